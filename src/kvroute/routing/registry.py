"""Every strategy by the name that configuration uses. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, NamedTuple

from pydantic import field_validator

from kvroute.index.history import RouteHistory
from kvroute.options import Options, Switch, option
from kvroute.routing.cost import CostModel
from kvroute.routing.cost_options import CostOptions
from kvroute.routing.strategies.kvaware import CacheViews, KvAware, KvAwareOptions
from kvroute.routing.strategies.prefixaware import PrefixAware, PrefixAwareOptions
from kvroute.routing.strategies.roundrobin import RoundRobin, RoundRobinOptions
from kvroute.routing.strategies.session import Session, SessionOptions
from kvroute.routing.strategy import Strategy


class StrategyRegistration(NamedTuple):
    """A strategy's option class, and how to make it from one of those, the costs, the history of what was
    sent, and the views of the workers' caches."""

    options: type[Options]
    make: Callable[[Any, CostModel, RouteHistory, CacheViews], Strategy]


def _without_views(make: Callable[[Any, CostModel, RouteHistory], Strategy]) -> Any:
    return lambda options, costs, history, _: make(options, costs, history)


STRATEGIES: Final[dict[str, StrategyRegistration]] = {
    "roundrobin": StrategyRegistration(RoundRobinOptions, _without_views(RoundRobin)),
    "session": StrategyRegistration(SessionOptions, _without_views(Session)),
    "prefixaware": StrategyRegistration(PrefixAwareOptions, _without_views(PrefixAware)),
    "kvaware": StrategyRegistration(KvAwareOptions, KvAware),
}


def _known_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise ValueError(f"{name!r} is none of {', '.join(STRATEGIES)}")
    return name


class ModelRouting(Options):
    """What one model does differently."""

    strategy: str | None = option(None, "Its strategy; unset: `routing.strategy`.")
    costs: CostOptions | None = option(None, "Its costs. What is left out here is as in `routing.costs`.")

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str | None) -> str | None:
        return value if value is None else _known_strategy(value)


class RoutingOptions(Options):
    """How a worker is chosen. Every strategy's retry order, and load wherever it counts, is by cost."""

    strategy: str = option("prefixaware", "How a worker is chosen: " + ", ".join(STRATEGIES) + ".")
    costs: CostOptions = option(default_factory=CostOptions)
    learning: Annotated[bool, Switch] = option(
        True,
        "Learn the times of `costs`, and each worker's speed, from first tokens of streamed answers. The "
        "configured ones hold until 50 prefills of different lengths explain what is seen.",
    )
    roundrobin: RoundRobinOptions = option(default_factory=RoundRobinOptions)
    session: SessionOptions = option(default_factory=SessionOptions)
    prefixaware: PrefixAwareOptions = option(default_factory=PrefixAwareOptions)
    kvaware: KvAwareOptions = option(default_factory=KvAwareOptions)
    models: dict[str, ModelRouting] = option(
        description="What single models do differently, by the name that their workers know.",
        default_factory=dict,
    )

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str) -> str:
        return _known_strategy(value)

    def strategies_used(self) -> frozenset[str]:
        """The fleet's strategy, and those of single models."""
        own = (routing.strategy for routing in self.models.values())
        return frozenset({self.strategy, *(name for name in own if name is not None)})

    def costs_of_models(self) -> dict[str, CostOptions]:
        """Full costs of the models that have their own."""
        own = {model: routing.costs for model, routing in self.models.items()}
        return {
            model: self.costs.model_copy(
                update={name: getattr(costs, name) for name in costs.model_fields_set}
            )
            for model, costs in own.items()
            if costs is not None
        }
