"""In turn, whatever the request."""

from __future__ import annotations

from typing import ClassVar

from kvroute.fleet.worker import FleetView, WorkerId
from kvroute.index.history import RouteHistory
from kvroute.options import Options
from kvroute.routing.cost import CostModel
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews


class RoundRobinOptions(Options):
    """The routable workers in turn. Nothing to set."""


class _Turns:
    """One model's order. Mutable: by `RoundRobin.on_dispatch`. Start-time fair queueing: `due` is the turn at
    which a worker is next, `turn` where the order stands. Who joins or returns starts at `turn`, so it
    neither catches up on what it missed nor waits for the others."""

    __slots__ = ("due", "turn")

    def __init__(self) -> None:
        self.turn = 0.0
        self.due: dict[WorkerId, float] = {}

    def start(self, worker: WorkerId) -> float:
        return max(self.turn, self.due.get(worker, 0.0))


class RoundRobin:
    """Mutable: the turns, by `on_dispatch` only; implements `Strategy`."""

    name: ClassVar[str] = "roundrobin"
    needs: ClassVar[Needs] = Needs.NOTHING
    options: ClassVar[type[Options]] = RoundRobinOptions
    has_affinity: ClassVar[bool] = False
    observes_dispatch: ClassVar[bool] = True

    def __init__(
        self, options: RoundRobinOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._costs = costs
        self._turns: dict[str, _Turns] = {}

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        ranking = self._costs.rank(query, view.workers, queues=view.loads)
        turns = self._turns.get(view.model) or _Turns()
        chosen = min(view.workers, key=lambda worker: turns.start(worker.id))
        ranking.put_first(chosen)
        return RouteDecision(self.name, RouteReason.ROUND_ROBIN, ranking)

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        turns = self._turns.get(query.model)
        if turns is None:
            turns = self._turns[query.model] = _Turns()
        worker = candidate.worker
        start = turns.start(worker.id)
        if candidate is decision.ranking[0]:
            turns.turn = start
        turns.due[worker.id] = start + 1.0 / worker.ramp_at(query.now)
        if len(turns.due) > len(decision.ranking):
            present = {other.worker.id for other in decision.ranking}
            turns.due = {id_: due for id_, due in turns.due.items() if id_ in present}

    def forget(self, session_key: str) -> bool:
        return False
