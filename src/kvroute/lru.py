"""A mapping with a bound on its total weight, which evicts the least recently used entries first. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView
from typing import Generic, TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


class Lru(Generic[_K, _V]):
    """A mapping with least-recently-used eviction. `get` and `put` mark an entry as used; `peek` does not.

    `weigh` returns an entry's weight, such as its bytes; without it every entry weighs 1, so `max_weight`
    bounds the number of entries. The weight of a stored entry must not change. Mutable, without a lock: of
    several threads, only `peek` and `in` may run beside another call.
    """

    __slots__ = ("_entries", "_weigh", "mark_used", "max_weight", "peek", "weight")

    def __init__(self, max_weight: int, weigh: Callable[[_K, _V], int] | None = None) -> None:
        self.max_weight = max_weight
        self.weight = 0
        """Weight of all entries together."""
        self._weigh = weigh
        self._entries: OrderedDict[_K, _V] = OrderedDict()
        self.peek: Callable[[_K], _V | None] = self._entries.get
        """The value of a key, or None; the entry is not marked as used."""
        self.mark_used: Callable[[_K], None] = self._entries.move_to_end
        """Marks an entry as used. Raises KeyError without one."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: _K) -> bool:
        return key in self._entries

    def items(self) -> ItemsView[_K, _V]:
        """All entries, the least recently used first."""
        return self._entries.items()

    def get(self, key: _K) -> _V | None:
        """The value of a key, or None; marks the entry as used."""
        entries = self._entries
        if key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key]

    def put(self, key: _K, value: _V) -> list[tuple[_K, _V]]:
        """Store an entry, also instead of the key's old one. Returns the evicted entries, oldest first.

        An entry that weighs more than `max_weight` is not stored; it is the only one that is then returned.
        """
        self.pop(key)
        weight = 1 if self._weigh is None else self._weigh(key, value)
        if weight > self.max_weight:
            return [(key, value)]
        self._entries[key] = value
        self.weight += weight
        return self.evict(self.max_weight) if self.weight > self.max_weight else []

    def pop(self, key: _K) -> _V | None:
        """Remove an entry. Returns its value, or None."""
        if key not in self._entries:
            return None
        value = self._entries.pop(key)
        self.weight -= 1 if self._weigh is None else self._weigh(key, value)
        return value

    def evict(self, max_weight: int) -> list[tuple[_K, _V]]:
        """Remove the least recently used entries until the others weigh at most `max_weight`. Returns
        them."""
        evicted = []
        while self.weight > max_weight and self._entries:
            key, value = self._entries.popitem(last=False)
            self.weight -= 1 if self._weigh is None else self._weigh(key, value)
            evicted.append((key, value))
        return evicted
