from kvroute.replicas.metrics import merge_decisions, merge_predictions
from kvroute.routing.audit import Audit


def test_the_newest_decisions_of_all_come_first():
    found = merge_decisions([[{"time": 3}, {"time": 1}], [{"time": 2}]], 2)

    assert found == [{"time": 3}, {"time": 2}]


def audit(worker: str, *cached: int) -> Audit:
    made = Audit()
    for tokens in cached:
        made.reported("kvaware", worker, "gpu", 16, 64, tokens)
        made.is_wrong(worker, 0, tokens != 64)
    return made


def test_predictions_are_summed_by_strategy_worker_and_tier():
    found = merge_predictions(
        [audit("a", 64, 0).describe(), audit("a", 64).describe(), audit("b", 64).describe()]
    )

    rows = {row["worker"]: row for row in found["predictions"]}
    assert (rows["a"]["exact"], rows["a"]["over"], rows["a"]["predicted_tokens"]) == (2, 1, 192)
    assert rows["b"]["exact"] == 1
    assert found["latest"] == [
        {"worker": "a", "rank": 0, "judged": 3, "wrong": 1},
        {"worker": "b", "rank": 0, "judged": 1, "wrong": 0},
    ]
    assert found["demotions"] == {}


def test_predicted_transfers_of_all_processes_are_added_up() -> None:
    one, other = Audit(), Audit()
    one.handed_over("d", 640)
    other.handed_over("d", 60)

    found = merge_predictions([one.describe(), other.describe()])

    assert found["transfers"] == [{"worker": "d", "predicted_tokens": 700}]
