from __future__ import annotations

import pytest

from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.routing.strategy import Candidate, CandidateMatch, CostTerms, Prefetch, Tokens, prefetch_of


def candidate(*, wait: float, load: float, tokens: Tokens | None) -> Candidate:
    held = None if tokens is None else CandidateMatch(tokens, slot=0, rank=0, mapped=True)
    return Candidate(
        Worker(WorkerSpec(WorkerId("w"), "http://w")), 1.0, 0, 1.0, CostTerms(wait=wait, load=load), held
    )


def test_blocks_in_l2_set_out_where_the_wait_is_longer_than_the_load() -> None:
    waiting = candidate(wait=3.0, load=1.0, tokens=Tokens(512, 256, 1024))

    assert prefetch_of(waiting, server_known=True, delay_s=0.0) == Prefetch(1792, 2.0)


def test_there_is_time_for_them_before_and_after() -> None:
    """The engine may look into LMCache when the request comes, and does so at its turn."""
    held = Tokens(0, 0, 1024)
    short, long = (candidate(wait=wait, load=1.0, tokens=held) for wait in (2.0, 2.5))

    assert prefetch_of(short, server_known=True, delay_s=0.5) is None
    assert prefetch_of(long, server_known=True, delay_s=0.5) == Prefetch(1024, 1.0)


@pytest.mark.parametrize(
    ("wait", "load", "tokens", "server_known"),
    [
        (1.0, 1.0, Tokens(0, 0, 1024), True),
        (0.0, 1.0, Tokens(0, 0, 1024), True),
        (3.0, 1.0, Tokens(512, 1024, 0), True),
        (3.0, 1.0, Tokens(0, 0, 1024), False),
        (3.0, 1.0, None, True),
    ],
)
def test_nothing_sets_out_without_need_or_without_a_server(wait, load, tokens, server_known) -> None:
    asked = candidate(wait=wait, load=load, tokens=tokens)

    assert prefetch_of(asked, server_known=server_known, delay_s=0.0) is None
