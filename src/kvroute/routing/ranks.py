"""The data-parallel ranks of workers as places to send a request to. Pure.

Each rank has its own scheduler and its own KV cache. vLLM computes a request on the rank of its header
`X-data-parallel-rank`; without it, its balancer chooses by load and loses the hits of the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.fleet.worker import FleetView, RankTargets, Worker, rank_targets
from kvroute.routing.cost import CostModel, Ranking
from kvroute.routing.strategy import Candidate, CandidateMatch, RouteQuery, Tokens


def targets_of(query: RouteQuery, view: FleetView) -> RankTargets | None:
    """Where the request can be sent to by rank; None if it is sent to workers as a whole.

    None if every worker has one rank, and for requests whose rank the engine chooses.
    """
    by_rank = view.by_rank
    if by_rank is None or not query.takes_rank:
        return None
    return by_rank if query.rank is None else rank_targets(view.workers, query.rank)


def rank_by_rank(
    costs: CostModel,
    query: RouteQuery,
    targets: RankTargets,
    matched: Sequence[int] | None = None,
    counted: Sequence[int] | None = None,
) -> Ranking:
    """Rank `targets` by cost. `matched` has the matched tokens of each, by the route history; `counted` what
    is left of them after a discount, None without one."""
    matches = [
        CandidateMatch(Tokens(tokens), None, rank)
        for tokens, rank in zip(matched or [0] * len(targets.ranks), targets.ranks, strict=True)
    ]
    counts, predicted = (matched, None) if counted is None else (counted, matched)
    return costs.rank(query, targets.workers, counts, None, matches, targets.loads, targets.units, predicted)


def best_ranks(ranking: Sequence[Candidate]) -> Sequence[Candidate]:
    """The first candidate of each worker, so that a second attempt goes to another worker."""
    seen: set[int] = set()
    best = []
    for candidate in ranking:
        if id(candidate.worker) not in seen:
            seen.add(id(candidate.worker))
            best.append(candidate)
    return best


def ranks_of(worker: Worker, targets: RankTargets) -> Sequence[tuple[int | None, int]]:
    """The ranks of `worker` among `targets`, each with the number of its requests in flight."""
    return [
        (rank, load.in_flight)
        for other, rank, load in zip(targets.workers, targets.ranks, targets.loads, strict=True)
        if other is worker
    ]
