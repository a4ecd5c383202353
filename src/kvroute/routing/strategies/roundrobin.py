"""The strategy `roundrobin`: one worker after another, independent of the request."""

from __future__ import annotations

from typing import ClassVar

from kvroute.fleet.worker import FleetView, WorkerId
from kvroute.index.history import RouteHistory
from kvroute.options import Options
from kvroute.routing.cost import CostModel
from kvroute.routing.ranks import best_ranks, rank_by_rank, ranks_of, targets_of
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews


class RoundRobinOptions(Options):
    """All routable workers, one after another. There are no options."""


class _FairQueue:
    """The order of one model's workers, by start-time fair queueing. Mutable: `RoundRobin.on_dispatch`.

    A worker that joins or returns starts at the current virtual time: it neither catches up on requests that
    it missed, nor waits for the others.
    """

    __slots__ = ("next_rank", "next_start", "virtual_time")

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.next_start: dict[WorkerId, float] = {}
        """Virtual time of each worker's next request."""
        self.next_rank: dict[WorkerId, int] = {}
        """Of a worker with several data-parallel ranks, the number of the next one in its list of ranks."""

    def start(self, worker: WorkerId) -> float:
        return max(self.virtual_time, self.next_start.get(worker, 0.0))


class RoundRobin:
    """Ranks one worker after another first, each by its share of traffic. Implements `Strategy`.

    Mutable: only `on_dispatch` changes the queues.
    """

    name: ClassVar[str] = "roundrobin"
    needs: ClassVar[Needs] = Needs.NOTHING
    options: ClassVar[type[Options]] = RoundRobinOptions
    has_affinity: ClassVar[bool] = False
    observes_dispatch: ClassVar[bool] = True

    def __init__(
        self, options: RoundRobinOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._costs = costs
        self._queues: dict[str, _FairQueue] = {}

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        queue = self._queues.get(view.model) or _FairQueue()
        chosen = min(view.workers, key=lambda worker: queue.start(worker.id))
        targets = None if view.by_rank is None else targets_of(query, view)
        if targets is not None:
            ranks = ranks_of(chosen, targets)
            by_rank = rank_by_rank(self._costs, query, targets)
            by_rank.put_first(chosen, ranks[queue.next_rank.get(chosen.id, 0) % len(ranks)][0])
            return RouteDecision(self.name, RouteReason.ROUND_ROBIN, best_ranks(by_rank))
        ranking = self._costs.rank(query, view.workers, queues=view.loads)
        ranking.put_first(chosen)
        return RouteDecision(self.name, RouteReason.ROUND_ROBIN, ranking)

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        queue = self._queues.get(query.model)
        if queue is None:
            queue = self._queues[query.model] = _FairQueue()
        worker = candidate.worker
        start = queue.start(worker.id)
        if candidate is decision.ranking[0]:
            queue.virtual_time = start
        queue.next_start[worker.id] = start + 1.0 / worker.share_at(query.now)
        rank = candidate.rank
        if rank is not None and rank in worker.rank_units:
            queue.next_rank[worker.id] = list(worker.rank_units).index(rank) + 1
        if len(queue.next_start) > len(decision.ranking):
            present = {other.worker.id for other in decision.ranking}
            queue.next_start = {id_: at for id_, at in queue.next_start.items() if id_ in present}
            queue.next_rank = {id_: rank for id_, rank in queue.next_rank.items() if id_ in present}

    def state_for(self, query: RouteQuery, view: FleetView) -> list[tuple[float, int]]:
        """Each worker's virtual time and next rank, in the order of the view. See `StatefulStrategy`."""
        queue = self._queues.get(view.model) or _FairQueue()
        return [(queue.start(worker.id), queue.next_rank.get(worker.id, 0)) for worker in view.workers]

    def restore(self, query: RouteQuery, view: FleetView, state: list[tuple[float, int]]) -> None:
        """See `StatefulStrategy`."""
        queue = self._queues[view.model] = _FairQueue()
        for worker, (start, rank) in zip(view.workers, state, strict=True):
            queue.next_start[worker.id], queue.next_rank[worker.id] = start, rank

    def forget(self, session_key: str) -> bool:
        return False
