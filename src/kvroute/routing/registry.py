"""Every strategy by the name that configuration uses. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvroute.index.history import RouteHistory
from kvroute.options import Options
from kvroute.routing.cost import CostModel
from kvroute.routing.strategies.kvaware import CacheViews, KvAware, KvAwareOptions
from kvroute.routing.strategies.prefixaware import PrefixAware, PrefixAwareOptions
from kvroute.routing.strategies.roundrobin import RoundRobin, RoundRobinOptions
from kvroute.routing.strategies.session import Session, SessionOptions
from kvroute.routing.strategy import Strategy


class Registration(NamedTuple):
    """A strategy's option class, and how to make it from one of those, the costs, the history of what was
    sent, and the views of the workers' caches."""

    options: type[Options]
    make: Callable[[Any, CostModel, RouteHistory, CacheViews], Strategy]


def _without_views(make: Callable[[Any, CostModel, RouteHistory], Strategy]) -> Any:
    return lambda options, costs, history, _: make(options, costs, history)


STRATEGIES: Final[dict[str, Registration]] = {
    "roundrobin": Registration(RoundRobinOptions, _without_views(RoundRobin)),
    "session": Registration(SessionOptions, _without_views(Session)),
    "prefixaware": Registration(PrefixAwareOptions, _without_views(PrefixAware)),
    "kvaware": Registration(KvAwareOptions, KvAware),
}
