"""All route histories, by the name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvroute import plugins
from kvroute.index.history import RouteHistory, TrieHistory
from kvroute.index.radix_history import RadixHistory

HISTORIES: Final[dict[str, Callable[[int], RouteHistory]]] = {
    "radix": RadixHistory,
    "pygtrie": TrieHistory,
}
"""Name -> constructor, whose argument is the default capacity of a worker's part in blocks."""


def history_type(name: str) -> Callable[[int], RouteHistory] | None:
    """The constructor of the history called `name`, built in or of another distribution; None without one.

    Raises ConfigError if the other distribution cannot be imported.
    """
    if name in HISTORIES or plugins.find(plugins.HISTORIES, name) is None:
        return HISTORIES.get(name)
    plugin: Callable[[int], RouteHistory] = plugins.load(plugins.HISTORIES, name)
    return plugin
