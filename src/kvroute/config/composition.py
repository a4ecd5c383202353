"""The configuration's class: its own sections, and those of parts and strategies of other distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import create_model

from kvroute import plugins
from kvroute.config.config import Config, PartsOptions
from kvroute.config.paths import ENVIRONMENT_PREFIX, ConfigSetting, Path, Settings, dotted, split
from kvroute.errors import ConfigError
from kvroute.fleet.options import FleetOptions, SourceType, with_sources
from kvroute.options import option, with_sections
from kvroute.routing.registry import RoutingOptions, StrategyType, with_strategies

if TYPE_CHECKING:
    from kvroute.parts.part import Part


class PluginNames(NamedTuple):
    """The names of parts, strategies and sources of workers that are not built in."""

    parts: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


class Composed(NamedTuple):
    """The class of a configuration, and what is wrong with the plugins that it names."""

    root: type[Config]
    problems: tuple[ConfigError, ...] = ()


def named_plugins(
    sources: Iterable[Settings], environ: Mapping[str, str], assignments: Iterable[str]
) -> PluginNames:
    """The names that these sources use and kvroute does not know, installed or not."""
    paths: list[Path] = []
    strategies: dict[str, None] = {}
    for source in sources:
        for setting in source.settings:
            paths.append(setting.path)
            strategies.update(dict.fromkeys(_strategies_in(setting)))
    for name in environ:
        if name.startswith(ENVIRONMENT_PREFIX):
            paths.append(tuple(key.lower() for key in name.removeprefix(ENVIRONMENT_PREFIX).split("__")))
    for text in assignments:
        try:
            paths.append(split(text.partition("=")[0].strip()))
        except ValueError:
            continue  # reported where assignments are read
    below = {"parts": dict[str, None](), "routing": strategies, "fleet": dict[str, None]()}
    for path in paths:
        if len(path) > 1 and path[0] in below:
            below[str(path[0])][str(path[1])] = None
    own = {*RoutingOptions.model_fields, *RoutingOptions.types, *FleetOptions.model_fields}
    return PluginNames(
        tuple(below["parts"]),
        tuple(name for name in strategies if name not in own),
        tuple(name for name in below["fleet"] if name not in own),
    )


def _strategies_in(setting: ConfigSetting) -> Iterable[str]:
    path, value = setting.path, setting.value
    is_strategy = path == ("routing", "strategy") or (
        len(path) == 4 and path[:2] == ("routing", "models") and path[3] == "strategy"
    )
    return (value,) if is_strategy and isinstance(value, str) else ()


def composed(names: PluginNames) -> Composed:
    """`Config` with the sections of these plugins, without those that are not installed."""
    problems: list[ConfigError] = []

    def loaded(group: str, wanted: Iterable[str], path: Callable[[str], Path]) -> tuple[tuple[str, Any], ...]:
        found = []
        for name in wanted:
            if plugins.find(group, name) is None:
                continue  # its section or its name is then refused like any other unknown one
            try:
                found.append((name, plugins.load(group, name)))
            except ConfigError as error:
                problems.append(ConfigError(dotted(path(name)), str(error)))
        return tuple(found)

    parts = loaded(plugins.PARTS, names.parts, lambda name: ("parts", name))
    strategies = loaded(plugins.STRATEGIES, names.strategies, lambda name: ("routing", "strategy"))
    sources = loaded(plugins.DISCOVERY, names.sources, lambda name: ("fleet", name))
    if not (parts or strategies or sources):
        return Composed(Config, tuple(problems))
    return Composed(_class_with(parts, strategies, sources), tuple(problems))


# The same plugins give the same class: two configurations can only be compared if they are of one class.
@cache
def _class_with(
    parts: tuple[tuple[str, type[Part]], ...],
    strategies: tuple[tuple[str, StrategyType], ...],
    sources: tuple[tuple[str, SourceType], ...],
) -> type[Config]:
    sections: dict[str, Any] = {}
    if parts:
        own = with_sections(PartsOptions, {name: part.options for name, part in parts})
        sections["parts"] = (own, option(default_factory=own))
    if strategies:
        routing = with_strategies(RoutingOptions, dict(strategies))
        sections["routing"] = (routing, option(default_factory=routing))
    if sources:
        fleet = with_sources(FleetOptions, dict(sources))
        sections["fleet"] = (fleet, option(default_factory=fleet))
    config = create_model("Config", __base__=Config, __doc__=Config.__doc__, **sections)
    names = PluginNames(*(tuple(name for name, _ in kind) for kind in (parts, strategies, sources)))
    config.restored_by = (restored, names)
    return config


def restored(names: PluginNames, values: Mapping[str, Any]) -> Config:
    """A configuration that another process has pickled: its class exists only where it was composed."""
    return composed(names).root.model_validate(values)
