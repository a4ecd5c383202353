"""Whether a request's blocks should set out from L2 while it waits in its worker's queue."""

from __future__ import annotations

from typing import NamedTuple

from kvroute.routing.decision import Candidate


class Prefetch(NamedTuple):
    """What is worth it: the leading tokens to have in L1, and how many seconds from the decision on is the
    last time to ask for them."""

    tokens: int
    spare_s: float


def prefetch_of(candidate: Candidate, *, server_known: bool, delay_s: float) -> Prefetch | None:
    """A prefetch for a request that is sent to `candidate`; None where there is nothing to gain.

    Engines look into LMCache when a request's turn comes, and load then. That can be done before if the wait
    in the queue is longer than the load. Where it is not, the engine would find the load half done, and would
    load the same again beside it (LMCache 0.5.6, `L1Manager.reserve_write`). Worse, chunks that arrive while
    the engine's lookup is under way are found nowhere: it has looked into L1 already, and may not load what
    is there by then (`_reserve_l1_cells`, `l1_contended`). An engine with room looks at once, any other at
    the request's turn; so the chunks shall be asked for `delay_s` after the request is sent, and be there as
    long before its turn. `server_known` says whether the worker's LMCache server is known.
    """
    held, terms = candidate.held, candidate.terms
    if held is None or not held.tokens.l2 or not server_known:
        return None
    last_s = terms.wait - terms.load - delay_s
    return Prefetch(held.tokens.total, last_s) if last_s > delay_s else None
