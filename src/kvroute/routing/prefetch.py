"""Whether a request's blocks should set out from L2 while it waits in its worker's queue."""

from __future__ import annotations

from typing import NamedTuple

from kvroute.routing.decision import Candidate


class Prefetch(NamedTuple):
    """What is worth it: the leading tokens to have in L1, and for how many seconds from the decision on it
    is of use to ask for them."""

    tokens: int
    spare_s: float


def prefetch_of(candidate: Candidate, *, server_known: bool) -> Prefetch | None:
    """A prefetch for a request that is sent to `candidate`; None where there is nothing to gain.

    Engines look into LMCache when a request's turn comes, and load then. That can be done before if the wait
    in the queue is longer than the load. Where it is not, the engine would find the load half done, and would
    load the same again beside it (LMCache 0.5.6, `L1Manager.reserve_write`). `server_known` says whether the
    worker's LMCache server is known.
    """
    held, terms = candidate.held, candidate.terms
    if held is None or not held.tokens.l2 or not server_known or terms.wait <= terms.load:
        return None
    return Prefetch(held.tokens.total, terms.wait - terms.load)
