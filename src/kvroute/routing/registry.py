"""The registry of strategies by configured name, and the options under `routing`.

A new strategy is a module in `routing/strategies` and an entry in `STRATEGIES`, or an entry point
`kvroute.strategies` of another distribution. Everything else (options, flags, the endpoint spec, what the
gateway prepares for a request) follows from the class variables of the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Protocol, TypeVar

from pydantic import field_validator

from kvroute import plugins
from kvroute.index.history import RouteHistory
from kvroute.options import Options, Switch, option, with_sections
from kvroute.routing.cost import CostModel
from kvroute.routing.cost_parameters import CostOptions
from kvroute.routing.prefill_decode import PrefillDecodeOptions
from kvroute.routing.strategies.kvaware import KvAware
from kvroute.routing.strategies.prefixaware import PrefixAware
from kvroute.routing.strategies.roundrobin import RoundRobin
from kvroute.routing.strategies.session import Session
from kvroute.routing.strategy import Needs, Strategy
from kvroute.routing.transfers import CacheViews


class StrategyType(Protocol):
    """A class that implements `Strategy`, with its class variables.

    mypy calls the type of an entry in `STRATEGIES` incompatible if one of them is missing.
    """

    @property
    def name(self) -> str:
        """Its name in the configuration and in metrics."""
        ...

    @property
    def needs(self) -> Needs:
        """What must be known of a prompt."""
        ...

    @property
    def options(self) -> type[Options]:
        """The class of its section of the configuration."""
        ...

    @property
    def has_affinity(self) -> bool:
        """Whether follow-ups of a request go to its worker."""
        ...

    @property
    def observes_dispatch(self) -> bool:
        """Whether it needs a call for every dispatch, those of other processes included."""
        ...

    def __call__(
        self, options: Any, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> Strategy: ...


STRATEGIES: Final[dict[str, StrategyType]] = {
    "roundrobin": RoundRobin,
    "session": Session,
    "prefixaware": PrefixAware,
    "kvaware": KvAware,
}


def strategy_type(name: str) -> StrategyType | None:
    """The strategy called `name`: a built-in one, or one of another distribution; None if there is none.

    Raises ConfigError if the other distribution cannot be imported.
    """
    built_in = STRATEGIES.get(name)
    if built_in is not None or plugins.find(plugins.STRATEGIES, name) is None:
        return built_in
    plugin: StrategyType = plugins.load(plugins.STRATEGIES, name)
    return plugin


def needs_of(strategy: str | None) -> Needs | None:
    """The `needs` of the strategy called `strategy`; None for an unknown name."""
    registered = None if strategy is None else strategy_type(strategy)
    return None if registered is None else registered.needs


def is_strategy(name: str) -> bool:
    """Whether a strategy has this name, a built-in one or one of an installed distribution."""
    return name in STRATEGIES or plugins.find(plugins.STRATEGIES, name) is not None


def _known_strategy(name: str) -> str:
    if not is_strategy(name):
        raise ValueError(f"{name!r} is none of {', '.join(STRATEGIES)}, nor of an installed distribution")
    return name


class ModelRouting(Options):
    """Routing options of one model."""

    strategy: str | None = option(None, "The model's strategy; unset: `routing.strategy`.")
    costs: CostOptions | None = option(None, "The model's costs; a missing key is as in `routing.costs`.")

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str | None) -> str | None:
        return value if value is None else _known_strategy(value)


_O = TypeVar("_O", bound=Options)
_Section = TypeVar("_Section", bound=Options)


def _with_strategy_sections(base: type[_O]) -> type[_O]:
    """Class decorator: give `base` one section per built-in strategy, named as the strategy."""
    return with_sections(base, {name: strategy.options for name, strategy in STRATEGIES.items()})


def with_strategies(
    base: type[RoutingOptions], strategies: Mapping[str, StrategyType]
) -> type[RoutingOptions]:
    """`base` with these strategies of other distributions, and a section for each."""
    made = with_sections(base, {name: strategy.options for name, strategy in strategies.items()})
    made.types = {**base.types, **strategies}
    return made


@_with_strategy_sections
class RoutingOptions(Options):
    """How a worker is chosen. In every strategy the retry order, and every use of load, follows the costs."""

    types: ClassVar[Mapping[str, StrategyType]] = STRATEGIES
    """The strategies of this configuration, by name."""
    strategy: str = option("prefixaware", "The strategy: " + ", ".join(STRATEGIES) + ".", reload=True)
    costs: CostOptions = option(default_factory=CostOptions, reload=True)
    prefill_decode: PrefillDecodeOptions = option(default_factory=PrefillDecodeOptions)
    learning: Annotated[bool, Switch] = option(
        True,
        "Learn the times of `costs`, and each worker's speed, from first tokens of streamed answers. The "
        "configured times are used until 50 prefills of different lengths explain the measured ones.",
    )
    models: dict[str, ModelRouting] = option(
        description="Options of single models, by the name that their workers know.",
        default_factory=dict,
        reload=True,
    )

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, value: str) -> str:
        return _known_strategy(value)

    def strategies_used(self) -> frozenset[str]:
        """The fleet's strategy, and those of single models."""
        overrides = (routing.strategy for routing in self.models.values())
        return frozenset({self.strategy, *(name for name in overrides if name is not None)})

    def may_need(self, needs: Needs) -> bool:
        """Whether a configured strategy, for all models or for one, has these `needs`."""
        return any(self.types[name].needs is needs for name in self.strategies_used())

    def options_of(self, options: type[_Section]) -> _Section:
        """The section of the strategy whose option class is `options`."""
        name = next(name for name, strategy in self.types.items() if strategy.options is options)
        section: _Section = getattr(self, name)
        return section

    def costs_of_models(self) -> dict[str, CostOptions]:
        """The full costs of each model with its own costs."""
        costs_by_model = {model: routing.costs for model, routing in self.models.items()}
        return {
            model: self.costs.model_copy(
                update={name: getattr(costs, name) for name in costs.model_fields_set}
            )
            for model, costs in costs_by_model.items()
            if costs is not None
        }
