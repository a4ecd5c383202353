"""The configuration's class: its own sections, and those of parts and strategies of other distributions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import create_model

from kvroute.config.config import Config, PartsOptions
from kvroute.config.paths import ENVIRONMENT_PREFIX, ConfigSetting, Path, Settings, dotted, split
from kvroute.errors import ConfigError
from kvroute.options import Options, option, with_sections
from kvroute.parts.registry import part_type
from kvroute.routing.registry import RoutingOptions, StrategyType, strategy_type, with_strategies


class PluginNames(NamedTuple):
    """The names of parts and strategies that are not built in."""

    parts: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


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
    below = {"parts": dict[str, None](), "routing": strategies}
    for path in paths:
        if len(path) > 1 and path[0] in below:
            below[str(path[0])][str(path[1])] = None
    own = {*RoutingOptions.model_fields, *RoutingOptions.types}
    return PluginNames(tuple(below["parts"]), tuple(name for name in strategies if name not in own))


def _strategies_in(setting: ConfigSetting) -> Iterable[str]:
    path, value = setting.path, setting.value
    is_strategy = path == ("routing", "strategy") or (
        len(path) == 4 and path[:2] == ("routing", "models") and path[3] == "strategy"
    )
    return (value,) if is_strategy and isinstance(value, str) else ()


def composed(names: PluginNames) -> Composed:
    """`Config` with the sections of these plugins, without those that are not installed."""
    problems: list[ConfigError] = []
    parts: dict[str, Any] = {}
    strategies: dict[str, StrategyType] = {}
    for name in names.parts:
        try:
            part = part_type(name)
        except ConfigError as error:
            problems.append(ConfigError(dotted(("parts", name)), str(error)))
            continue
        if part is not None:
            parts[name] = part.options
    for name in names.strategies:
        try:
            strategy = strategy_type(name)
        except ConfigError as error:
            problems.append(ConfigError("routing.strategy", str(error)))
            continue
        if strategy is not None:
            strategies[name] = strategy
    if not parts and not strategies:
        return Composed(Config, tuple(problems))
    return Composed(_class_with(tuple(parts.items()), tuple(strategies.items())), tuple(problems))


# The same plugins give the same class: two configurations can only be compared if they are of one class.
@cache
def _class_with(
    parts: tuple[tuple[str, type[Options]], ...], strategies: tuple[tuple[str, StrategyType], ...]
) -> type[Config]:
    sections: dict[str, Any] = {}
    if parts:
        made = with_sections(PartsOptions, dict(parts))
        sections["parts"] = (made, option(default_factory=made))
    if strategies:
        routing = with_strategies(RoutingOptions, dict(strategies))
        sections["routing"] = (routing, option(default_factory=routing))
    config = create_model("Config", __base__=Config, __doc__=Config.__doc__, **sections)
    names = PluginNames(tuple(name for name, _ in parts), tuple(name for name, _ in strategies))
    config.restored_by = (restored, names)
    return config


def restored(names: PluginNames, values: Mapping[str, Any]) -> Config:
    """A configuration that another process has pickled: its class exists only where it was composed."""
    return composed(names).root.model_validate(values)
