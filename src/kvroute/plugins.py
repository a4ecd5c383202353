"""Code of other distributions, found by their entry points: strategies, parts, commands and other extensions.

An entry point is looked up only for a name that is not built in: reading the metadata of all installed
distributions takes about 10 ms.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kvroute.errors import ConfigError

STRATEGIES: Final = "kvroute.strategies"
PARTS: Final = "kvroute.parts"
DISCOVERY: Final = "kvroute.discovery"
HISTORIES: Final = "kvroute.histories"
L2_STORES: Final = "kvroute.l2_stores"
RENDER_TARGETS: Final = "kvroute.render_targets"
COMMANDS: Final = "kvroute.commands"


def find(group: str, name: str) -> EntryPoint | None:
    """The entry point called `name`; None if no installed distribution has it. Imports nothing of it."""
    return next(iter(entry_points(group=group, name=name)), None)


def load(group: str, name: str) -> Any:
    """What the entry point called `name` stands for.

    Raises ConfigError if no distribution has it, or if it cannot be imported.
    """
    point = find(group, name)
    if point is None:
        raise ConfigError(
            "", f"{name!r} is not installed: no distribution has it as an entry point of {group}"
        )
    try:
        return point.load()
    except Exception as error:  # any code may fail at its import, in any way
        raise ConfigError(
            "", f"{name!r} of {distribution_of(point)} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def distribution_of(point: EntryPoint) -> str:
    """Name and version of the distribution that has the entry point."""
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
