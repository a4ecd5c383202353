from __future__ import annotations

import pytest

from kvroute.routing.audit import Audit, AuditOptions, PredictionOutcome


@pytest.fixture
def audit() -> Audit:
    return Audit(AuditOptions(window=10, least=4, most_wrong=0.5))


def report(audit: Audit, tokens: int, reported: int, worker: str = "a") -> None:
    audit.reported("kvaware", worker, "gpu" if tokens else "none", 16, tokens, reported)


@pytest.mark.parametrize(
    ("predicted", "reported", "outcome"),
    [
        (160, 160, PredictionOutcome.EXACT),
        (160, 145, PredictionOutcome.EXACT),
        (160, 144, PredictionOutcome.OVER),
        (0, 16, PredictionOutcome.UNDER),
        (0, 15, PredictionOutcome.EXACT),
        (0, 0, PredictionOutcome.EXACT),
    ],
)
def test_a_prediction_is_judged_to_the_block(audit, predicted, reported, outcome) -> None:
    counted = []
    audit.on_counted = lambda *found: counted.append(found[3:])

    report(audit, predicted, reported)
    audit.settle()

    [(outcomes, errors)] = counted
    assert {name for name, number in outcomes if number} == {outcome}
    assert errors == [abs(predicted - reported)]


def test_a_map_that_fails_more_often_than_not_is_called_wrong_once(audit) -> None:
    verdicts = [audit.is_wrong("a", 0, failed) for failed in (False, True, True, True, True, True)]

    assert verdicts == [False, False, False, True, False, False]
    assert audit.describe()["demotions"] == {"a": 1}


def test_each_rank_is_audited_separately(audit) -> None:
    for _ in range(3):
        assert not audit.is_wrong("a", 0, True)
        assert not audit.is_wrong("a", 1, True)

    assert audit.is_wrong("a", 1, True)


def test_old_verdicts_make_room(audit) -> None:
    for failed in (False,) * 10 + (True,) * 5:
        assert not audit.is_wrong("a", 0, failed)

    assert audit.is_wrong("a", 0, True), "6 of the last 10"


def test_a_restarted_workers_audit_is_reset(audit) -> None:
    for _ in range(3):
        audit.is_wrong("a", 0, True)

    audit.forget("a")

    assert not audit.is_wrong("a", 0, True)
    assert audit.describe()["latest"] == [{"worker": "a", "rank": 0, "judged": 1, "wrong": 1}]


def test_sums_are_kept_by_strategy_worker_and_tier(audit) -> None:
    report(audit, 160, 128)
    report(audit, 0, 0)

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
        report(audit, 160, 0, worker=f"pod-{number}")
        for _ in range(4):
            audit.is_wrong(f"pod-{number}", 0, True)
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


def test_no_more_than_a_few_hundred_predictions_of_a_place_wait(audit) -> None:
    counted = []
    audit.on_counted = lambda *found: counted.extend(found[4])

    for _ in range(1000):
        report(audit, 160, 160)

    assert len(counted) > 700
