from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.foreign import (
    MOST_AGE_S,
    PAGES,
    EngineFigures,
    Others,
    OwnRequests,
    SeenPage,
    foreign_load,
    others_of,
)
from kvroute.fleet.load import WorkerLoad, copy_loads, measure_loads


def page(
    waiting: int, running: int, usage: float = 0.0, at: float = 0.0, ended: int | None = None
) -> EngineFigures:
    return EngineFigures(waiting, running, usage, ended, at)


def seen(others: Others, at: float = 0.0, ended: int | None = None) -> SeenPage:
    return SeenPage(page(others.waiting, others.running, 0.0, at, ended), others)


@pytest.mark.parametrize(
    ("shown", "own", "others"),
    [
        (page(22, 4), OwnRequests(0, 0, 0), (22, 4)),
        (page(0, 0), OwnRequests(3, 3, 100), (0, 0)),
        # Only own requests: those without a first token may wait or run.
        (page(6, 4), OwnRequests(10, 6, 100), (0, 0)),
        (page(6, 4), OwnRequests(12, 12, 100), (0, 0)),
        # Own ones wait behind 16 of others that run.
        (page(10, 16), OwnRequests(10, 10, 100), (0, 16)),
        (page(10, 4), OwnRequests(4, 2, 100), (8, 2)),
        (page(10**400, -3), OwnRequests(0, 0, 0), (1_000_000, 0)),
    ],
)
def test_what_others_have_there(shown: EngineFigures, own: OwnRequests, others: tuple[int, int]) -> None:
    assert others_of(shown, own, 1000)[:2] == others


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.data())
def test_own_requests_are_never_others(
    own_waiting: int, own_running: int, more: int, answered: int, data: st.DataObject
) -> None:
    answered = min(answered, own_running)
    own = OwnRequests(own_waiting + own_running + more, own_waiting + own_running - answered + more, 0)
    assert others_of(page(own_waiting, own_running, 0.5), own, 1000) == (0, 0, 0.0)
    others_waiting, others_running = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    found = others_of(page(own_waiting + others_waiting, own_running + others_running, 0.5), own, 1000)
    assert found.waiting <= others_waiting
    assert found.waiting + found.running <= others_waiting + others_running
    assert 0.0 <= found.tokens <= 500.0


def test_the_figure_goes_with_its_age_and_what_all_pages_show_lasts() -> None:
    few, many = Others(2, 4, 400.0), Others(22, 4, 400.0)
    once = foreign_load([seen(many, 10.0)], ranks=1, prefill_s=0.1, residence_s=26.0)
    assert once is not None
    assert once.wait_at(10.0) == 22.0  # 26 requests stay for 26 s: one ends each second
    assert once.wait_at(12.0) == 20.0
    assert once.wait_at(40.0) == 0.0
    assert once.tokens_at(23.0) == 200.0
    pages = [seen(few), seen(many, 5.0), seen(many, 10.0)]
    assert len(pages) == PAGES
    lasting = foreign_load(pages, ranks=1, prefill_s=0.1, residence_s=26.0)
    assert lasting is not None
    assert lasting.wait_at(12.0) == 20.0
    assert lasting.wait_at(40.0) == 2.0
    assert lasting.wait_at(10.0 + MOST_AGE_S + 1.0) == 0.0
    nothing = seen(Others(0, 0, 0.0), 15.0)
    assert foreign_load([*pages, nothing], ranks=1, prefill_s=1.0, residence_s=1.0) is None


@pytest.mark.parametrize(
    ("pages", "wait_s"),
    [
        ([seen(Others(10, 90, 0.0))], 5.0),  # by prefill: Little's law says 0.04 s
        ([seen(Others(10, 4, 0.0), 0.0, 7), seen(Others(10, 4, 0.0), 5.0, 7)], 50.0),  # none has ended
        (  # they have come lately
            [
                seen(Others(0, 4, 0.0), 0.0, 7),
                seen(Others(10, 4, 0.0), 1.0, 7),
                seen(Others(10, 4, 0.0), 5.0, 7),
            ],
            40.0,
        ),
        ([seen(Others(10, 4, 0.0), 0.0, 7), seen(Others(10, 4, 0.0), 5.0, 12)], 10.0),
        ([seen(Others(0, 4, 0.0), 0.0, 7), seen(Others(10, 4, 0.0), 5.0, 7)], 5.0),  # it was not full before
    ],
)
def test_the_slowest_of_what_requests_wait_for_counts(pages: list[SeenPage], wait_s: float) -> None:
    load = foreign_load(pages, ranks=1, prefill_s=0.5, residence_s=4.0)
    assert load is not None
    assert load.wait_s == wait_s


def test_it_is_part_of_a_load_and_of_its_copies() -> None:
    load, now = WorkerLoad(), 5.0
    load.reserve(now, 3.0, 100)
    foreign = foreign_load([seen(Others(8, 2, 50.0), now)], ranks=1, prefill_s=0.1, residence_s=5.0)
    load.set_foreign(foreign)
    measure_loads([load], now + 1.0)
    assert (load.wait_s, load.foreign_s) == (2.0 + 3.0, 3.0)
    assert load.wait(now + 1.0) == load.wait_s
    (copied,) = copy_loads([load]).restored()
    measure_loads([copied], now + 1.0)
    assert (copied.wait_s, copied.foreign_tokens) == (load.wait_s, load.foreign_tokens)
    load.set_foreign(None)
    measure_loads([load], now + 1.0)
    assert (load.wait_s, load.foreign_s, load.foreign_tokens) == (2.0, 0.0, 0.0)


def test_the_most_own_requests_at_once_are_kept_until_they_are_taken() -> None:
    load = WorkerLoad()
    first, second = load.reserve(0.0, 1.0, 10), load.reserve(0.0, 1.0, 10, streamed=False)
    first.first_token(1.0)
    assert load.unanswered == 1
    first.finish(2.0)
    second.finish(9.0)
    assert load.take_peaks() == OwnRequests(2, 2, 0)
    assert load.take_peaks() == OwnRequests(0, 0, 0)
    assert load.unanswered == 0
    assert math.isclose(load.wait(9.0), 0.0)
