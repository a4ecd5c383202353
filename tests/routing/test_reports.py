"""What the token counts in answers teach: discounts, the last unit, the lengths of answers."""

from __future__ import annotations

import pytest

from kvroute.routing.cost import discounted
from kvroute.routing.reports import Answers, Discounts, LastUnits
from kvroute.routing.strategy import GroupTokens, Tokens

UNIT = 32


def learner() -> LastUnits:
    return LastUnits(lambda slot: UNIT)


def test_an_engine_that_finds_a_unit_less_three_times_drops_it() -> None:
    drops = learner()
    assert [drops.reported(7, Tokens(128), 96) for _ in range(3)] == [False, False, True]
    assert drops.slots == {7}
    assert not drops.reported(7, Tokens(96), 96)


def test_of_an_engine_with_a_drafter_one_report_is_enough() -> None:
    drops = learner()
    assert not drops.reported(7, Tokens(128), 128, has_drafter=True)  # not every drafter costs a unit
    assert [drops.reported(7, Tokens(128), 96, has_drafter=True) for _ in range(3)] == [False, False, True]
    assert drops.reported(8, Tokens(128), 96, has_drafter=True)


def test_a_drop_that_reports_no_longer_show_is_forgotten() -> None:
    drops = learner()
    drops.slots.add(7)
    assert [drops.reported(7, Tokens(96), 128) for _ in range(3)] == [False, False, True]
    assert drops.slots == set()


def test_requests_that_race_each_other_do_not_change_a_rule_that_has_proved_itself() -> None:
    drops = learner()
    for _ in range(8):
        drops.reported(7, Tokens(128), 128)
    assert not any(drops.reported(7, Tokens(128), 96) for _ in range(4))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (Tokens(128), 64),  # neither rule
        (Tokens(0), 0),  # both rules say nothing
        (Tokens(64, 64), 96),  # the rule of slower tiers is another one
        (GroupTokens.of(64, 0, 0, 64), 64),  # both rules say the same
    ],
)
def test_a_report_that_tells_the_rules_not_apart_teaches_nothing(tokens: Tokens, found: int) -> None:
    drops = learner()
    for _ in range(10):
        assert not drops.reported(7, tokens, found)


def test_with_several_groups_the_other_rules_own_prediction_counts() -> None:
    drops = learner()
    assert [drops.reported(7, GroupTokens.of(544, 0, 0, 0), 0) for _ in range(3)] == [False, False, True]


def test_a_worker_that_finds_nothing_of_what_was_predicted_has_the_share_zero() -> None:
    discounts = Discounts()
    for count in range(2):
        assert discounts.by_history == {}, count
        discounts.reported(1, False, 6000, 0, 16)
    assert discounts.by_history == {1: 0.0}
    assert discounts.by_map == {}


def test_the_share_is_what_was_found_of_what_was_predicted() -> None:
    discounts = Discounts()
    for found in (500, 1000, 500, 500):
        discounts.reported(1, True, 1000, found, 16)
    assert discounts.by_map == {1: 0.625}


def test_a_worker_without_reports_has_the_mean_share_of_the_others_that_serve_the_model(make_worker) -> None:
    discounts, workers = Discounts(), [make_worker(index) for index in range(3)]
    for _ in range(2):
        discounts.reported(workers[0].index, False, 6000, 0, 16)
        discounts.reported(workers[1].index, False, 6000, 6000, 16)
    assert discounted([600] * 3, workers, discounts.by_history) == [0, 600, 300]
    assert discounted([600], workers[2:], discounts.by_history) == [600]


def test_workers_that_all_agree_leave_no_shares() -> None:
    discounts = Discounts()
    for _ in range(4):
        discounts.reported(1, True, 1000, 1000, 16)
    assert discounts.by_map == {}
    for _ in range(2):
        discounts.reported(2, True, 1000, 0, 16)
    assert discounts.by_map == {1: 1.0, 2: 0.0}
    discounts.forget(2)
    assert discounts.by_map == {}


def test_a_worker_whose_reports_agree_again_has_no_discount() -> None:
    discounts = Discounts()
    for _ in range(4):
        discounts.reported(1, True, 1000, 0, 16)
    for _ in range(16):
        discounts.reported(1, True, 1000, 1000, 16)
    assert discounts.by_map == {}


@pytest.mark.parametrize("found", [985, 1000, 2000])
def test_less_than_a_block_too_much_and_too_little_are_no_contradiction(found: int) -> None:
    discounts = Discounts()
    for _ in range(20):
        discounts.reported(1, True, 1000, found, 16)
    assert discounts.by_map == {}


def test_a_worker_that_left_is_forgotten() -> None:
    discounts, answers = Discounts(), Answers()
    for _ in range(4):
        discounts.reported(1, True, 1000, 0, 16)
    answers.add(1, 5, 100, 10)  # type: ignore[arg-type]
    discounts.forget(1)
    answers.forget(1)
    assert (discounts.by_map, answers.by_unit) == ({}, {})
    discounts.reported(1, True, 1000, 0, 16)
    assert discounts.by_map == {}


def test_the_last_token_of_an_answer_is_not_held_and_old_answers_are_dropped() -> None:
    answers = Answers()
    for key in range(5000):
        answers.add(1, key, 100, 10)  # type: ignore[arg-type]
    assert answers.by_unit[1][4999] == 109  # type: ignore[index]
    assert len(answers.by_unit[1]) == 4096


def test_one_report_is_enough_where_another_worker_drops_the_unit() -> None:
    units = learner()
    for _ in range(3):
        units.reported(0, Tokens(4 * UNIT), 3 * UNIT)
    assert units.slots == {0}

    assert units.reported(1, Tokens(4 * UNIT), 3 * UNIT)
    assert units.slots == {0, 1}

    units.reported(2, Tokens(4 * UNIT), 4 * UNIT)  # this one has shown that it drops nothing
    assert not units.reported(2, Tokens(4 * UNIT), 3 * UNIT)
