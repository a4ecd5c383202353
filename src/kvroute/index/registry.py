"""All route histories, by the name in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvroute.index.history import RouteHistory, TrieHistory
from kvroute.index.radix_history import RadixHistory

HISTORIES: Final[dict[str, Callable[[int], RouteHistory]]] = {
    "radix": RadixHistory,
    "pygtrie": TrieHistory,
}
"""Name -> constructor, whose argument is the default capacity of a worker's part in blocks."""
