from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.load import WorkerLoad, measure_loads


@pytest.fixture
def load() -> WorkerLoad:
    return WorkerLoad()


def is_at_rest(load: WorkerLoad, now: float) -> bool:
    return (load.in_flight, load.active_tokens, load.queued, load.wait(now)) == (0, 0, 0, 0.0)


def test_an_idle_worker_has_no_wait(load) -> None:
    assert is_at_rest(load, 5.0)
    assert load.recent(5.0) == (0.0, 0.0)
    assert load.residence_s is None


def test_a_new_request_waits_for_the_prefills_before_it(load) -> None:
    load.reserve(10.0, prefill_s=2.0, tokens=100)
    load.reserve(10.0, prefill_s=0.5, tokens=30)

    assert load.wait(10.0) == 2.5
    assert (load.in_flight, load.queued, load.active_tokens) == (2, 2, 130)


def test_the_first_in_line_makes_progress_up_to_its_estimate(load) -> None:
    load.reserve(10.0, prefill_s=2.0, tokens=1)
    load.reserve(10.5, prefill_s=0.5, tokens=1)

    assert load.wait(11.0) == 1.5
    assert load.wait(12.0) == 0.5
    assert load.wait(60.0) == 0.5, "the second has not had its turn"


def test_a_first_token_ends_its_share_of_the_wait_but_not_of_the_load(load) -> None:
    first = load.reserve(0.0, prefill_s=2.0, tokens=100)
    load.reserve(0.0, prefill_s=3.0, tokens=50)

    first.first_token(1.0)
    first.first_token(1.5)

    assert load.wait(1.0) == 3.0
    assert load.wait(2.0) == 2.0, "the next in line started when the first was through"
    assert (load.in_flight, load.queued, load.active_tokens) == (2, 1, 150)


def test_a_first_token_out_of_turn_leaves_the_head_its_progress(load) -> None:
    load.reserve(0.0, prefill_s=2.0, tokens=1)
    second = load.reserve(0.0, prefill_s=3.0, tokens=1)

    second.first_token(1.0)

    assert load.wait(1.0) == 1.0


def test_an_unstreamed_answer_leaves_the_queue_after_its_estimate(load) -> None:
    load.reserve(0.0, prefill_s=1.0, tokens=1, streamed=False)
    load.reserve(0.0, prefill_s=1.0, tokens=1, streamed=False)
    load.reserve(0.0, prefill_s=1.0, tokens=1, streamed=False)

    assert load.wait(0.25) == 2.75
    assert load.wait(1.25) == pytest.approx(1.75)
    assert load.wait(2.5) == pytest.approx(0.5)
    assert load.wait(9.0) == 0.0
    assert load.in_flight == 3


def test_one_that_is_not_streamed_waits_for_the_streamed_one_in_front(load) -> None:
    head = load.reserve(0.0, prefill_s=1.0, tokens=1)
    load.reserve(0.0, prefill_s=1.0, tokens=1, streamed=False)

    assert load.wait(5.0) == 1.0
    head.first_token(5.0)
    assert load.wait(5.5) == 0.5
    assert load.wait(6.0) == 0.0


def test_a_first_token_ends_the_prefill_of_earlier_unstreamed_requests(load) -> None:
    load.reserve(0.0, prefill_s=5.0, tokens=1, streamed=False)
    load.reserve(0.0, prefill_s=5.0, tokens=1, streamed=False)
    streamed = load.reserve(0.0, prefill_s=1.0, tokens=1)
    load.reserve(0.0, prefill_s=1.0, tokens=1, streamed=False)

    streamed.first_token(2.0)

    assert load.wait(2.0) == 1.0
    assert load.queued == 1


def test_a_queue_that_has_run_out_starts_afresh(load) -> None:
    load.reserve(0.0, prefill_s=1.0, tokens=1, streamed=False)

    load.reserve(10.0, prefill_s=1.0, tokens=1, streamed=False)

    assert load.queued == 1
    assert load.wait(10.5) == 0.5


def test_finishing_returns_everything_once(load) -> None:
    reservation = load.reserve(0.0, prefill_s=0.1 + 0.2, tokens=7)

    reservation.finish(1.0)
    reservation.finish(2.0)
    reservation.first_token(3.0)

    assert is_at_rest(load, 3.0)


def test_asking_for_the_wait_changes_no_later_answer() -> None:
    asked, quiet = WorkerLoad(), WorkerLoad()
    for load in (asked, quiet):
        for start in range(4):
            load.reserve(start * 0.1, prefill_s=0.3, tokens=1, streamed=start % 2 == 1)
    for tick in range(20):
        asked.wait(0.3 + tick * 0.05)
        asked.recent(0.3 + tick * 0.05)

    assert asked.wait(1.3) == quiet.wait(1.3)
    assert asked.recent(1.3) == pytest.approx(quiet.recent(1.3))


def test_utilisation_is_the_share_of_time_spent_on_prefill(load) -> None:
    for second in range(200):
        load.reserve(float(second), prefill_s=0.25, tokens=1).first_token(second + 0.5)

    own_s, arrivals = load.recent(200.0)

    assert own_s == pytest.approx(0.25, rel=0.03)
    assert arrivals == pytest.approx(1.0, rel=0.03)


def test_utilisation_is_right_from_the_start(load) -> None:
    """Without the division by 1 - exp(-t / 30 s) it would read a tenth of this after 3 s."""
    for step in range(30):
        load.reserve(step * 0.1, prefill_s=0.05, tokens=1).first_token(step * 0.1 + 0.05)

    assert load.recent(3.0)[0] == pytest.approx(0.5, rel=0.05)


def test_utilisation_fades_with_a_time_constant_of_thirty_seconds(load) -> None:
    for second in range(300):
        load.reserve(float(second), prefill_s=0.5, tokens=1).first_token(float(second))

    busy, later = load.recent(300.0)[0], load.recent(330.0)[0]

    assert later / busy == pytest.approx(math.exp(-1), rel=0.01)


def test_utilisation_matches_its_definition_over_any_time(load) -> None:
    """Compared with a sum over all busy intervals; the pauses are long enough that older intervals have no
    weight."""
    rng, now, done = random.Random(5), 50.0, []
    load.reserve(now, prefill_s=0.0, tokens=1).first_token(now)
    done.append((now, 0.0))
    for pause_s in (1.0, 600.0, 1190.0, 1210.0, 30_000.0, 20.0):
        now += pause_s
        for _ in range(40):
            now += rng.expovariate(2.0)
            took_s = rng.randrange(1000) / 1024
            load.reserve(now, took_s, tokens=1).first_token(now)
            done.append((now, took_s))

            age_s = max(1.0, now - done[0][0])
            share = 30.0 * (1.0 - math.exp(-age_s / 30.0))
            weights = [math.exp((at - now) / 30.0) / share for at, _ in done]
            by_definition = (
                sum(w * took_s for w, (_, took_s) in zip(weights, done, strict=True)),
                sum(weights),
            )
            assert load.recent(now) == pytest.approx(by_definition, rel=1e-9)


def test_a_burst_is_no_utilisation_before_it_is_computed(load) -> None:
    reservations = [load.reserve(0.0, prefill_s=1.0, tokens=1) for _ in range(60)]

    assert load.recent(0.01) == (0.0, 0.0)
    reservations[0].first_token(0.5)
    assert load.recent(1.0)[0] == pytest.approx(1.0, rel=0.05)


def test_a_request_that_failed_before_its_first_token_counts_neither_as_utilisation_nor_residence(
    load,
) -> None:
    load.reserve(0.0, prefill_s=1.0, tokens=1).finish(0.5)

    assert load.recent(1.0) == (0.0, 0.0)
    assert load.residence_s is None


def test_residence_is_averaged_over_answered_requests(load) -> None:
    for stay in (2.0, 4.0):
        reservation = load.reserve(0.0, prefill_s=0.1, tokens=1)
        reservation.first_token(0.2)
        reservation.finish(stay)
    assert load.residence_s == pytest.approx(2.1)

    load.reserve(10.0, prefill_s=0.1, tokens=1, streamed=False).finish(12.1)
    assert load.residence_s == pytest.approx(2.1)


events = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "first_token", "finish", "wait"]),
        st.integers(0, 7),
        st.booleans(),
        st.floats(0, 3, allow_nan=False),
    ),
    max_size=60,
)


@given(events)
def test_any_mix_of_events_returns_to_exactly_zero(steps) -> None:
    load, reservations, now = WorkerLoad(), [], 0.0
    for action, which, streamed, seconds in steps:
        now += seconds / 7
        if action == "reserve":
            reservations.append(load.reserve(now, prefill_s=seconds, tokens=which, streamed=streamed))
        elif action == "wait":
            assert load.wait(now) >= 0.0
        elif reservations:
            getattr(reservations[which % len(reservations)], action)(now)

    assert load.in_flight == sum(not reservation.is_finished for reservation in reservations)
    for reservation in reservations:
        reservation.finish(now)
    assert is_at_rest(load, now)


fleets = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["reserve", "first_token", "finish"]),
        st.integers(0, 7),
        st.booleans(),
        st.floats(0, 3, allow_nan=False),
    ),
    max_size=60,
)


@given(fleets, st.sampled_from([0.0, 0.001, 0.5, 40.0, 1300.0, 1e6]))
def test_many_loads_read_together_equal_each_read_alone(steps, later) -> None:
    """To the last bit. The twins are asked one by one and in different orders."""
    loads, twins = [WorkerLoad() for _ in range(3)], [WorkerLoad() for _ in range(3)]
    now, reservations = 0.0, []
    for number, action, which, streamed, seconds in steps:
        now += seconds / 7
        if action == "reserve":
            reservations.append(
                [each[number].reserve(now, seconds, which, streamed) for each in (loads, twins)]
            )
        elif reservations:
            for reservation in reservations[which % len(reservations)]:
                getattr(reservation, action)(now)
    now += later

    seconds, requests = measure_loads(loads, now)

    assert [load.wait_s for load in loads] == [twin.wait(now) for twin in twins]
    own_s = all_requests = 0.0
    for load, twin in zip(loads, twins, strict=True):
        its_s, its_requests = twin.recent(now)
        assert load.utilisation == its_s
        own_s += its_s
        all_requests += its_requests
    assert (seconds, requests) == (own_s, all_requests)
    assert [load.queued for load in loads] == [twin.queued for twin in twins]
