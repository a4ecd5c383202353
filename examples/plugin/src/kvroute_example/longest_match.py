"""A strategy: the worker that holds most of the prompt answers it, whatever its load."""

from __future__ import annotations

from typing import ClassVar

from kvroute.fleet.worker import FleetView
from kvroute.index.history import RouteHistory
from kvroute.options import Options, option
from kvroute.routing.cost import CostModel
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews


class LongestMatchOptions(Options):
    """The section `routing.longest_match`."""

    least_tokens: int = option(16, "A shorter match counts as none.", unit="tokens", ge=1)


class LongestMatch:
    """Reads the map of the workers' caches. Stateless."""

    name: ClassVar[str] = "longest_match"
    needs: ClassVar[Needs] = Needs.TOKENS
    options: ClassVar[type[Options]] = LongestMatchOptions
    has_affinity: ClassVar[bool] = True
    observes_dispatch: ClassVar[bool] = False

    def __init__(
        self, options: LongestMatchOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._least_tokens = options.least_tokens
        self._costs = costs
        self._caches = views.caches

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        self._caches.refresh(True)
        matches = [self._caches.match(prompt) for prompt in query.exact]
        tokens = [
            sum(
                matched.total
                for by_slot in matches
                for place in self._caches.places(worker)
                if (matched := by_slot.get(place.slot)) is not None
            )
            for worker in view.workers
        ]
        ranking = self._costs.rank(query, view.workers, tokens, queues=view.loads)
        longest = max(tokens)
        if longest < self._least_tokens:
            return RouteDecision(self.name, RouteReason.KV_MISS, ranking)
        ranking.put_first(view.workers[tokens.index(longest)])
        return RouteDecision(self.name, RouteReason.KV_HIT, ranking)

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Nothing to remember."""

    def forget(self, session_key: str) -> bool:
        return False
