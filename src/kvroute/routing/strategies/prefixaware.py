"""The default strategy `prefixaware`: least cost in seconds; prefixes sent to a worker count as cached."""

from __future__ import annotations

from typing import ClassVar

from pydantic import field_validator

from kvroute import plugins
from kvroute.fleet.worker import FleetView, RankTargets
from kvroute.index.history import RouteHistory
from kvroute.index.registry import HISTORIES
from kvroute.options import Options, option
from kvroute.routing.cost import CostModel, discounted, matched_tokens
from kvroute.routing.ranks import best_ranks, rank_by_rank, targets_of
from kvroute.routing.sessions import keep_session
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews

_NAME = "prefixaware"
# To read an enum member through its class costs 80 ns (CPython 3.11), a module constant almost nothing.
_KEPT = RouteReason.SESSION_KEPT
_HIT, _SPILL, _MISS = RouteReason.PREFIX_HIT, RouteReason.PREFIX_SPILL, RouteReason.PREFIX_MISS


class PrefixAwareOptions(Options):
    """Routing on the history of sent prompts. A worker's part is as large as its KV cache."""

    index: str = option(
        "radix",
        f"The history of the sent prompts: {', '.join(HISTORIES)}. `radix` takes microseconds "
        "per prompt, `pygtrie` milliseconds.",
    )

    @field_validator("index")
    @classmethod
    def _known_index(cls, value: str) -> str:
        if value not in HISTORIES and plugins.find(plugins.HISTORIES, value) is None:
            raise ValueError(f"{value!r} is none of {', '.join(HISTORIES)}, nor of an installed distribution")
        return value


def _miss(query: RouteQuery, view: FleetView) -> RouteReason:
    return _MISS if query.reads_cache and view.caches_prefixes else RouteReason.NOT_CACHED


class PrefixAware:
    """Ranks workers by cost, with matched tokens from the route history; a session breaks ties
    (`keep_session`). Stateless; implements `Strategy`."""

    name: ClassVar[str] = _NAME
    needs: ClassVar[Needs] = Needs.PROMPT
    options: ClassVar[type[Options]] = PrefixAwareOptions
    has_affinity: ClassVar[bool] = True
    observes_dispatch: ClassVar[bool] = False

    def __init__(
        self, options: PrefixAwareOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._costs = costs
        self._history = history
        reports = views.reports
        self._shares = {} if reports is None else reports.discounts.by_history
        self._answers = {} if reports is None else reports.answers.by_unit

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        workers = view.workers
        if not query.prompts:
            ranking = self._costs.rank(query, workers, queues=view.loads)
            return RouteDecision(self.name, RouteReason.NO_PROMPT, ranking)
        if view.by_rank is not None:
            targets = targets_of(query, view)
            if targets is not None:
                return self._rank_by_rank(query, view, targets)
        matched = matched_tokens(self._history, query, workers, view.positions, self._answers)
        predicted = None
        if self._shares:
            predicted, matched = matched, discounted(matched, workers, self._shares)
        ranking = self._costs.rank(query, workers, matched, None, None, view.loads, None, predicted)
        session_worker = query.session_worker
        if (
            session_worker is not None
            and session_worker != workers[ranking.first_position].spec.id
            and keep_session(ranking, query, self._costs)
        ):
            return RouteDecision(_NAME, _KEPT, ranking)
        most = max(matched)
        if not most:
            return RouteDecision(_NAME, _miss(query, view), ranking)
        return RouteDecision(_NAME, _HIT if matched[ranking.first_position] == most else _SPILL, ranking)

    def _rank_by_rank(self, query: RouteQuery, view: FleetView, targets: RankTargets) -> RouteDecision:
        matched = matched_tokens(self._history, query, targets.workers, targets.positions, self._answers)
        counted = discounted(matched, targets.workers, self._shares) if self._shares else None
        ranking = rank_by_rank(self._costs, query, targets, matched, counted)
        matched = matched if counted is None else counted
        most, counted_first = max(matched), matched[ranking.first_position]
        reason = _miss(query, view) if not most else _HIT if counted_first == most else _SPILL
        return RouteDecision(_NAME, reason, best_ranks(ranking))

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Nothing to do: the router has added the prompt to the history."""

    def forget(self, session_key: str) -> bool:
        return False
