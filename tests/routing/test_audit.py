from __future__ import annotations

import pytest

from kvroute.routing.audit import Audit, AuditOptions, Prediction, PredictionOutcome


@pytest.fixture
def audit() -> Audit:
    return Audit(AuditOptions(window=10, least=4, most_wrong=0.5))


def prediction(tokens: int, *, judged: bool = True, worker: str = "a", rank: int = 0) -> Prediction:
    return Prediction("kvaware", worker, rank, "gpu" if tokens else "none", tokens, 16, judged)


@pytest.mark.parametrize(
    ("predicted", "reported", "outcome"),
    [
        (160, 160, PredictionOutcome.EXACT),
        (160, 145, PredictionOutcome.EXACT),
        (160, 144, PredictionOutcome.OVER),
        (0, 16, PredictionOutcome.UNDER),
        (0, 0, PredictionOutcome.EXACT),
    ],
)
def test_a_prediction_is_judged_to_the_block(audit, predicted, reported, outcome) -> None:
    assert audit.reported(prediction(predicted), reported) == (outcome, False)


def test_a_map_that_fails_more_often_than_not_is_called_wrong_once(audit) -> None:
    verdicts = [audit.reported(prediction(160), reported)[1] for reported in (160, 0, 0, 0, 0, 0)]

    assert verdicts == [False, False, False, True, False, False]
    assert audit.describe()["demotions"] == {"a": 1}


def test_predictions_without_a_whole_map_are_counted_and_not_audited(audit) -> None:
    verdicts = [audit.reported(prediction(160, judged=False), 0)[1] for _ in range(20)]

    assert not any(verdicts)
    assert audit.describe()["predictions"][0]["over"] == 20


def test_each_rank_is_audited_separately(audit) -> None:
    for _ in range(3):
        assert not audit.reported(prediction(160, rank=0), 0)[1]
        assert not audit.reported(prediction(160, rank=1), 0)[1]

    assert audit.reported(prediction(160, rank=1), 0)[1]


def test_old_verdicts_make_room(audit) -> None:
    for reported in (160,) * 10 + (0,) * 5:
        assert not audit.reported(prediction(160), reported)[1]

    assert audit.reported(prediction(160), 0)[1], "6 of the last 10"


def test_a_restarted_workers_audit_is_reset(audit) -> None:
    for _ in range(3):
        audit.reported(prediction(160), 0)

    audit.forget("a")

    assert not audit.reported(prediction(160), 0)[1]
    assert audit.describe()["latest"] == [{"worker": "a", "rank": 0, "judged": 1, "wrong": 1}]


def test_sums_are_kept_by_strategy_worker_and_tier(audit) -> None:
    audit.reported(prediction(160), 128)
    audit.reported(prediction(0), 0)

    assert audit.describe()["predictions"] == [
        {
            "strategy": "kvaware",
            "worker": "a",
            "slowest_tier": tier,
            "exact": exact,
            "over": over,
            "under": 0,
            "predicted_tokens": predicted,
            "reported_tokens": reported,
            "absolute_error_tokens": predicted - reported,
        }
        for tier, exact, over, predicted, reported in [("gpu", 0, 1, 160, 128), ("none", 1, 0, 0, 0)]
    ]


def test_workers_that_come_and_go_do_not_pile_up(audit) -> None:
    for number in range(5000):
        for _ in range(4):
            audit.reported(prediction(160, worker=f"pod-{number}"), 0)
        audit.forget(f"pod-{number}")

    described = audit.describe()
    assert described["latest"] == []
    assert len(described["predictions"]) == len(described["demotions"]) == 4096
    assert described["demotions"]["pod-4999"] == 1


def test_transfers_are_added_up_by_decode_worker(audit) -> None:
    for worker, tokens in (("b", 640), ("a", 100), ("b", 60)):
        audit.handed_over(worker, tokens)

    assert audit.describe()["transfers"] == [
        {"worker": "a", "predicted_tokens": 100},
        {"worker": "b", "predicted_tokens": 700},
    ]
