"""The headers of a message: those of the fast lane's known heads are found without a list of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from msgspec import Struct

_MOST_SHAPES: Final = 512


class HeaderPlaces:
    """Where the values of known heads lie. Immutable, and hashed by identity.

    `names` has all names in their order, each once.
    """

    __slots__ = ("by_name", "names")

    def __init__(
        self, names: Iterable[bytes], fixed: dict[bytes, bytes], varying: Iterable[bytes | None]
    ) -> None:
        """`fixed`: the values that all heads share. `varying`: the names of the other values, in the order of
        `KnownHeaders.values`; None for a value that is no header of `names`."""
        self.names = tuple(names)
        self.by_name: dict[bytes, int | bytes] = dict(fixed)
        """Name -> its value, or the place of its value."""
        for place, name in enumerate(varying):
            if name is not None:
                self.by_name[name] = place


class KnownHeaders(Struct, frozen=True, eq=False, gc=False):
    """The headers of a known head; iterates over pairs of name and value."""

    places: HeaderPlaces
    values: tuple[bytes, ...]
    """Those that vary."""

    def get(self, name: bytes) -> bytes:
        """The value; b"" if the header is absent."""
        found = self.places.by_name.get(name, b"")
        return self.values[found] if type(found) is int else found  # type: ignore[return-value]

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter([(name, self.get(name)) for name in self.places.names])


HeaderList: TypeAlias = list[tuple[bytes, bytes]]
"""Pairs of name and value."""
Headers: TypeAlias = HeaderList | KnownHeaders
"""Names are lower-case."""


def header(headers: Headers, name: bytes) -> bytes:
    """The first value of a header, b"" if it is absent. The server makes names lower-case."""
    if type(headers) is KnownHeaders:
        return headers.get(name)
    for key, value in headers:
        if key == name:
            return value
    return b""


class FirstHeader:
    """Finds the first of several headers, in the order of `names`, that has a value.

    Values above `max_bytes` are none. Mutable: remembers the places in known heads, of at most 512 shapes.
    """

    def __init__(self, names: Iterable[bytes], max_bytes: int) -> None:
        self._ranks: dict[bytes, int] = {}
        for name in names:
            self._ranks.setdefault(name, len(self._ranks))
        self._max_bytes = max_bytes
        self._known: dict[HeaderPlaces, tuple[int | bytes, ...]] = {}

    def read(self, headers: Headers) -> bytes:
        """The value; b"" without one."""
        if type(headers) is not KnownHeaders:
            return self._read_list(headers)
        try:
            places = self._known[headers.places]
        except KeyError:
            places = self._learn(headers.places)
        for place in places:
            value = headers.values[place] if type(place) is int else place
            if value and len(value) <= self._max_bytes:  # type: ignore[arg-type]
                return value  # type: ignore[return-value]
        return b""

    def _learn(self, places: HeaderPlaces) -> tuple[int | bytes, ...]:
        if len(self._known) >= _MOST_SHAPES:
            self._known.clear()
        found = self._known[places] = tuple(
            [places.by_name[name] for name in self._ranks if name in places.by_name]
        )
        return found

    def _read_list(self, headers: Headers) -> bytes:
        ranks, best, value = self._ranks, len(self._ranks), b""
        for name, given in headers:
            rank = ranks.get(name)
            if rank is not None and rank < best and 0 < len(given) <= self._max_bytes:
                best, value = rank, given
        return value
