"""A toy strategy: the worker that holds most of the prompt, by the workers' own cache events."""

from __future__ import annotations

from typing import ClassVar

from kvroute.fleet.worker import FleetView
from kvroute.index.history import RouteHistory
from kvroute.options import Options, option
from kvroute.routing.cost import CostModel
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews


class HeldFirstOptions(Options):
    """The worker that holds most of the prompt goes first."""

    least_tokens: int = option(1, "Fewer held tokens count as none.", unit="tokens", ge=1)


class HeldFirst:
    """Stateless; implements `Strategy`."""

    name: ClassVar[str] = "heldfirst"
    needs: ClassVar[Needs] = Needs.TOKENS
    options: ClassVar[type[Options]] = HeldFirstOptions
    has_affinity: ClassVar[bool] = True
    observes_dispatch: ClassVar[bool] = False

    def __init__(
        self, options: HeldFirstOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._options = options
        self._costs = costs
        self._caches = views.caches

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        self._caches.refresh(True)
        found = [self._caches.match(prompt) for prompt in query.exact]
        held = [
            sum(tokens.total for by_slot in found for place in places if (tokens := by_slot.get(place.slot)))
            for places in map(self._caches.places, view.workers)
        ]
        ranking = self._costs.rank(query, view.workers, held, queues=view.loads)
        most = max(held)
        if most < self._options.least_tokens:
            return RouteDecision(self.name, RouteReason.KV_MISS, ranking)
        ranking.put_first(view.workers[held.index(most)])
        return RouteDecision(self.name, RouteReason.KV_HIT, ranking)

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Nothing: the router does not call it."""

    def forget(self, session_key: str) -> bool:
        return False
