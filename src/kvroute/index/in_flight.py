"""The prompts of unfinished requests: per slot, how far they run along another prompt.

Their blocks are held, or will be before the next request runs, whether or not a worker has announced them,
and whether or not what it announced has been read: a finished request's prompt stays until somebody has.
A request comes in here and leaves again, and most share nothing with any other in flight: so what is kept
of one is a reference to its keys, and where prompts share a beginning they are parted as in a radix tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from kvroute.blocks.keys import BlockKey


class _PathSegment(Struct, eq=False, gc=False):
    """Consecutive keys of one or more prompts, none of which leaves the others between them: those of `keys`
    from `begin` to `end`. Mutable; only `InFlight` changes it."""

    keys: Sequence[BlockKey]
    begin: int
    end: int
    before: _PathSegment | None
    flights: dict[int, int]
    """Slot -> its prompts that run through here."""
    ended: int = 0
    """Prompts whose last stretch this is and whose requests have finished."""


class _Place(Struct, eq=False, gc=False):
    """A slot until it is forgotten: its number may come to stand for another one."""

    slot: int
    is_forgotten: bool = False


_Stretches = dict[int, _PathSegment]
_NOTHING: Final[tuple[Mapping[int, int], bool]] = MappingProxyType({}), False
_MOST_ENDED: Final = 4096
"""Where nobody settles: in a process that makes no decisions, but hears of others'."""


class Flight(Struct, eq=False):
    """One prompt in flight. Implements `fleet.load.ReservationListener`."""

    _stretches: _Stretches
    _place: _Place
    _last: _PathSegment | None
    _ended: list[Flight]
    _has_ended: bool = False

    def release(self) -> None:
        """The request is finished: this goes with the next `InFlight.settle`. Only the first time counts."""
        if self._has_ended or self._last is None:
            return
        self._has_ended = True
        self._last.ended += 1
        self._ended.append(self)

    def leave(self) -> None:
        """Take it out; for `InFlight.settle`."""
        stretch, self._last = self._last, None
        if stretch is not None:
            stretch.ended -= 1
        if self._place.is_forgotten:
            return
        slot = self._place.slot
        while stretch is not None:
            flights = stretch.flights
            others = flights[slot] - 1
            if others:
                flights[slot] = others
            else:
                del flights[slot]
                if not flights:
                    del self._stretches[stretch.keys[stretch.begin]]
            stretch = stretch.before

    def first_token(self, now: float, is_first: bool) -> None:
        """It stays until the request is finished."""

    def finish(self, now: float) -> None:
        self.release()


class InFlight:
    """Mutable: by `acquire`, `settle`, `forget` and each `Flight.release`. Touched from the event loop only.

    Keys are chained, so one comparison stands for all keys before it. What shares nothing with others takes
    about 1 us to acquire and release, and 0.2 us to match.
    """

    def __init__(self) -> None:
        self._stretches: _Stretches = {}
        """By first key, which no two of them have in common."""
        self._places: dict[int, _Place] = {}
        self.ended: list[Flight] = []
        """Of finished requests; to be read only."""

    def match(self, keys: Sequence[BlockKey]) -> tuple[Mapping[int, int], bool]:
        """Slot -> the leading keys that a prompt in flight there has too; slots with none are left out. And
        whether the prompt goes on behind that of a finished request, as the next turn of a chat does: then
        the worker has announced more of it than that prompt."""
        stretches = self._stretches
        if not stretches:
            return _NOTHING
        try:
            stretch = stretches.get(keys[0])
        except IndexError:  # a prompt shorter than a block
            return _NOTHING
        if stretch is None:
            return _NOTHING
        found: dict[int, int] = {}
        goes_on = False
        end = len(keys)
        while stretch is not None:
            depth = _shared(stretch, keys, end)
            for slot in stretch.flights:
                found[slot] = depth
            if depth < stretch.end or depth == end:
                break
            if stretch.ended:
                goes_on = True
            stretch = stretches.get(keys[depth])
        return found, goes_on

    def acquire(self, slot: int, keys: Sequence[BlockKey]) -> Flight:
        """A request with this prompt was sent to `slot`. Keeps `keys`, which must not change, without a
        copy."""
        stretches, place = self._stretches, self._places.get(slot)
        if place is None:
            place = self._places[slot] = _Place(slot)
        if len(self.ended) >= _MOST_ENDED:
            self.settle()
        try:
            first = keys[0]
        except IndexError:
            return Flight(stretches, place, None, self.ended)
        stretch = stretches.get(first)
        if stretch is None:
            last = stretches[first] = _PathSegment(keys, 0, len(keys), None, {slot: 1})
        else:
            last = self._beside(stretch, slot, keys)
        return Flight(stretches, place, last, self.ended)

    def settle(self) -> None:
        """What workers have announced by now has been read: finished requests' prompts are not needed any
        more."""
        for flight in self.ended:
            flight.leave()
        self.ended.clear()

    def forget(self, slot: int) -> None:
        """The slot is no more. Its flights' releases do nothing. Walks all that is in flight."""
        place = self._places.pop(slot, None)
        if place is None:
            return
        place.is_forgotten = True
        for first, stretch in list(self._stretches.items()):
            if stretch.flights.pop(slot, None) and not stretch.flights:
                del self._stretches[first]

    def __len__(self) -> int:
        """Stretches: for inspection."""
        return len(self._stretches)

    def _beside(self, stretch: _PathSegment, slot: int, keys: Sequence[BlockKey]) -> _PathSegment:
        """Lay a prompt along others, of which `stretch` is the first it shares; its last one."""
        stretches, end = self._stretches, len(keys)
        while True:
            depth = _shared(stretch, keys, end)
            if depth < stretch.end:
                stretch = self._parted(stretch, depth)
            flights = stretch.flights
            flights[slot] = flights.get(slot, 0) + 1
            if depth == end:
                return stretch
            following = stretches.get(keys[depth])
            if following is None:
                own = stretches[keys[depth]] = _PathSegment(keys, depth, end, stretch, {slot: 1})
                return own
            stretch = following

    def _parted(self, stretch: _PathSegment, place: int) -> _PathSegment:
        """What `stretch` has before `place` becomes a stretch of its own. Flights end in the rest."""
        keys = stretch.keys
        head = _PathSegment(keys, stretch.begin, place, stretch.before, dict(stretch.flights))
        self._stretches[keys[stretch.begin]] = head
        self._stretches[keys[place]] = stretch
        stretch.begin, stretch.before = place, head
        return head


def _shared(stretch: _PathSegment, keys: Sequence[BlockKey], end: int) -> int:
    """How many leading keys of a prompt of `end` are those of `stretch`, its first at least."""
    own, high = stretch.keys, stretch.end
    if high > end:
        high = end
    if own[high - 1] == keys[high - 1]:
        return high
    low = stretch.begin + 1
    while high - low > 1:
        middle = (low + high) // 2
        if own[middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle
    return low
