"""Every strategy by the name that configuration uses. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvroute.index.history import RouteHistory
from kvroute.options import Options
from kvroute.routing.cost import CostModel
from kvroute.routing.strategies.prefixaware import PrefixAware, PrefixAwareOptions
from kvroute.routing.strategies.roundrobin import RoundRobin, RoundRobinOptions
from kvroute.routing.strategies.session import Session, SessionOptions
from kvroute.routing.strategy import Strategy


class Registration(NamedTuple):
    """A strategy's option class, and how to make it from one of those, the costs and the history."""

    options: type[Options]
    make: Callable[[Any, CostModel, RouteHistory], Strategy]


STRATEGIES: Final[dict[str, Registration]] = {
    "roundrobin": Registration(RoundRobinOptions, RoundRobin),
    "session": Registration(SessionOptions, Session),
    "prefixaware": Registration(PrefixAwareOptions, PrefixAware),
}
