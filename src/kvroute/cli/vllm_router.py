"""`kvroute serve` as a stand-in for production-stack's router: its flags, read and reported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from kvroute.app.config_paths import split
from kvroute.app.config_sources import ENVIRONMENT_PREFIX, Setting
from kvroute.cli.vllm_router_flags import (
    DEFAULTS,
    FLAGS,
    LOG_LEVELS,
    dynamic_flags,
    known_values,
    parameter,
    translate,
)
from kvroute.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DYNAMIC = ("dynamic-config-yaml", "dynamic-config-json")


def router_flags(command: _Command) -> _Command:
    """Let a click command take that router's flags; `--help` does not list them."""
    for name, flag in FLAGS.items():
        # One spelling only: click would take `--k8s_port` for an unknown flag anyway.
        command = click.option(f"--{name}", parameter(name), is_flag=flag.is_switch, hidden=True)(command)
    return command


def router_settings(flags: dict[str, Any]) -> list[Setting]:
    """What the flags of that router amount to, told on stderr line by line; none given: nothing, silently.

    Changes `flags` where one of kvroute's own has values of that router. Raises ConfigError. Reads the
    dynamic configuration file; blocks.
    """
    given = known_values(flags)
    if not given:
        return []
    unknown: tuple[str, ...] = ()
    for name in _DYNAMIC:
        if name in given:
            found, more = _read(name, Path(given[name]))
            given, unknown = {**found, **given}, (*unknown, *more)  # the command line wins
    translation = translate(given)
    defaults = _defaults(flags)
    lines = [
        *translation.lines,
        *(f"{key}: no effect: kvroute has nothing like it" for key in unknown),
        *(f"{'.'.join(map(str, each.path))}={each.value}: {each.origin}" for each in defaults),
    ]
    level = LOG_LEVELS.get(flags["log_level"])
    if level is not None:
        lines.append(f"--log-level: logging.level={level}")
        flags["log_level"] = level
    for line in lines:
        click.echo(f"kvroute: {line}", err=True)
    return [*defaults, *translation.settings]


def _defaults(flags: dict[str, Any]) -> list[Setting]:
    """Where that router listens, unless anything at all may say otherwise."""
    context = click.get_current_context()
    if context.params.get("file") is not None:
        return []
    return [
        Setting(split(path), value, "that router's default")
        for path, value in DEFAULTS.items()
        if flags[path.rpartition(".")[2]] is None
        and ENVIRONMENT_PREFIX + path.upper().replace(".", "__") not in os.environ
        and not any(text.startswith(f"{path}=") for text in context.params.get("assignments", ()))
    ]


def _read(name: str, file: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    try:
        return dynamic_flags(yaml.safe_load(file.read_text(encoding="utf-8")) or {})  # JSON is YAML
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--{name}", f"cannot read {file}: {reason}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"--{name}", f"{file} is not YAML or JSON") from exc
    except ConfigError as exc:
        raise ConfigError(f"--{name}", f"{file}: {exc}") from exc
