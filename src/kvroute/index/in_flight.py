"""The prompts of unfinished requests: per slot, how many leading keys another prompt shares with them.

A worker holds the blocks of these prompts, or will hold them before the next request runs, even if it has not
announced them yet, or the gateway has not read the announcement. An engine publishes its events from a thread
of its own, so an answer can end before the events of its prompt arrive. So the prompt of a finished request
stays until the cache map has its last block, for at most `ANNOUNCED_S`. Most prompts share nothing with
another one in flight, so an entry is a reference to the prompt's keys; prompts with a common beginning are
split into segments as in a radix tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from kvroute.blocks.keys import BlockKey


class _PathSegment(Struct, eq=False, gc=False):
    """A path segment shared by every prompt on it: keys[begin:end] with no branch inside.

    Mutable; only `InFlight` changes it.
    """

    keys: Sequence[BlockKey]
    begin: int
    end: int
    predecessor: _PathSegment | None
    flights: dict[int, int]
    """Slot -> the number of its prompts that contain this segment."""
    ended: int = 0
    """Prompts of finished requests that end with this segment."""


class _SlotEntry(Struct, eq=False, gc=False):
    """A slot until it is forgotten. Later another slot may get the same number. Mutable: `is_forgotten`."""

    slot: int
    is_forgotten: bool = False
    ends: dict[tuple[int, BlockKey], int] | None = None
    """Length and last key of each prompt -> number of such prompts; None while every common beginning
    counts."""


HasEnd = Callable[[int, Sequence[BlockKey]], bool]
"""`(slot, keys)`: does the cache map have the last block of a prompt there (`CacheMap.has_end`)?"""

_Segments = dict[int, _PathSegment]
_NO_MATCH: Final[tuple[Mapping[int, int], bool]] = MappingProxyType({}), False
ANNOUNCED_S: Final = 1.0
"""Time after a request's end by which the events of its prompt have arrived, or never will."""
MOST_ENDED: Final = 256
"""Finished prompts that are kept; `InFlight.compact` looks at each."""


def _has_nothing(slot: int, keys: Sequence[BlockKey]) -> bool:
    """For a gateway without a map."""
    return False


class Flight(Struct, eq=False):
    """One prompt in flight; implements `fleet.load.ReservationListener`. Mutable: by itself and `leave`."""

    _segments: _Segments
    _entry: _SlotEntry
    _last: _PathSegment | None
    _ended: list[Flight]
    _announced: Sequence[BlockKey]
    """The keys under which the slot's blocks of the prompt come into the cache map."""
    _has_end: HasEnd
    _is_computed: bool
    _end: float | None = None

    def first_token(self, now: float, is_first: bool) -> None:
        """The worker has computed the prompt."""
        self._is_computed = True

    def finish(self, now: float) -> None:
        """The request has ended: a later `InFlight.compact` removes the prompt. Only the first call
        counts."""
        if self._end is not None or self._last is None:
            return
        # The blocks of a prompt that was never computed will not be announced. Those that the map has may be
        # evicted before the next decision.
        is_awaited = self._is_computed and not self._has_end(self._entry.slot, self._announced)
        self._end = now if is_awaited else -inf
        self._last.ended += 1
        self._ended.append(self)

    def is_awaited(self, now: float) -> bool:
        """Of an ended request: can the events of its prompt still come?"""
        if self._end is None or now - self._end >= ANNOUNCED_S or self._entry.is_forgotten:
            return False
        return not self._has_end(self._entry.slot, self._announced)

    def leave(self) -> None:
        """Remove the prompt; for `InFlight.compact`."""
        segment, self._last = self._last, None
        if segment is not None:
            segment.ended -= 1
        if self._entry.is_forgotten:
            return
        slot, ends = self._entry.slot, self._entry.ends
        if ends and segment is not None:
            end = segment.end, segment.keys[segment.end - 1]
            others = ends.get(end, 0) - 1
            if others > 0:
                ends[end] = others
            else:
                ends.pop(end, None)
        while segment is not None:
            flights = segment.flights
            others = flights[slot] - 1
            if others:
                flights[slot] = others
            else:
                del flights[slot]
                if not flights:
                    del self._segments[segment.keys[segment.begin]]
            segment = segment.predecessor


class InFlight:
    """All prompts in flight. Mutable: `acquire`, `compact`, `forget` and each `Flight.finish`.

    Use it from the event loop only. A prompt that shares nothing with others takes about 1 us to acquire and
    release, and 0.2 us to match.
    """

    # Keys are chained: equal keys at one position mean equal keys at all positions before it.

    def __init__(self, has_end: HasEnd = _has_nothing) -> None:
        self._has_end = has_end
        self._segments: _Segments = {}
        """Segments by their first key; no two segments have the same one."""
        self._slots: dict[int, _SlotEntry] = {}
        self.ended: list[Flight] = []
        """The prompts of finished requests. For reading."""
        self._by_ends: dict[int, _SlotEntry] = {}
        """The slots of `count_whole_prompts`."""

    def match(self, keys: Sequence[BlockKey]) -> tuple[Mapping[int, int], bool]:
        """Returns (slot -> leading keys shared with a prompt in flight there, continues a finished prompt).

        Slots that share no key are left out. A prompt continues the prompt of a finished request when it is
        the next turn of a chat: then the worker has announced more blocks of it than that prompt has.
        """
        segments = self._segments
        if not segments:
            return _NO_MATCH
        try:
            segment = segments.get(keys[0])
        except IndexError:  # a prompt shorter than a block
            return _NO_MATCH
        if segment is None:
            return _NO_MATCH
        depth_by_slot: dict[int, int] = {}
        continues_finished = False
        end = len(keys)
        while segment is not None:
            depth = _shared_end(segment, keys, end)
            for slot in segment.flights:
                depth_by_slot[slot] = depth
            if depth < segment.end or depth == end:
                break
            if segment.ended:
                continues_finished = True
            segment = segments.get(keys[depth])
        if self._by_ends:
            self._limit_to_ends(keys, depth_by_slot)
        return depth_by_slot, continues_finished

    def count_whole_prompts(self, slot: int) -> bool:
        """From now on, of this slot only prompts count that a new prompt has whole; True if that is new.

        For engines that keep a state of a prompt's end only, and not of every common beginning.
        """
        entry = self._slots.get(slot)
        if entry is None:
            entry = self._slots[slot] = _SlotEntry(slot)
        if entry.ends is not None:
            return False
        entry.ends = {}
        self._by_ends[slot] = entry
        return True

    def _limit_to_ends(self, keys: Sequence[BlockKey], depth_by_slot: dict[int, int]) -> None:
        for slot in [slot for slot in depth_by_slot if slot in self._by_ends]:
            depth, longest = depth_by_slot[slot], 0
            for length, last in self._by_ends[slot].ends or ():
                if longest < length <= depth and keys[length - 1] == last:
                    longest = length
            if longest:
                depth_by_slot[slot] = longest
            else:
                del depth_by_slot[slot]

    def acquire(
        self,
        slot: int,
        keys: Sequence[BlockKey],
        announced: Sequence[BlockKey] | None = None,
        *,
        streamed: bool = True,
    ) -> Flight:
        """A request with this prompt was sent to `slot`. Keeps `keys` without a copy: they must not change.

        `announced`: the keys of the slot's blocks in the cache map, if they are others. `streamed`: a first
        token will show that the prompt is computed.
        """
        segments, entry = self._segments, self._slots.get(slot)
        if entry is None:
            entry = self._slots[slot] = _SlotEntry(slot)
        if len(self.ended) > MOST_ENDED:
            self._keep(self.ended[-MOST_ENDED // 2 :])
        if announced is None:
            announced = keys
        try:
            head_key = keys[0]
        except IndexError:
            return Flight(segments, entry, None, self.ended, announced, self._has_end, not streamed)
        if entry.ends is not None:
            end = len(keys), keys[-1]
            entry.ends[end] = entry.ends.get(end, 0) + 1
        segment = segments.get(head_key)
        if segment is None:
            last = segments[head_key] = _PathSegment(keys, 0, len(keys), None, {slot: 1})
        else:
            last = self._attach(segment, slot, keys)
        return Flight(segments, entry, last, self.ended, announced, self._has_end, not streamed)

    def compact(self, now: float) -> None:
        """Remove the prompts of finished requests whose events have been applied, or will not come.

        Call this after the workers' events have been read.
        """
        if self.ended:
            self._keep([flight for flight in self.ended if flight.is_awaited(now)])

    def _keep(self, kept: Sequence[Flight]) -> None:
        """Remove the finished prompts that are not in `kept`, a part of `ended` in the same order."""
        if len(kept) == len(self.ended):
            return
        remaining = set(map(id, kept))
        for flight in self.ended:
            if id(flight) not in remaining:
                flight.leave()
        self.ended[:] = kept

    def forget(self, slot: int) -> None:
        """The slot has left: remove its prompts. Later releases of its flights do nothing. Visits all
        segments."""
        entry = self._slots.pop(slot, None)
        if entry is None:
            return
        entry.is_forgotten = True
        self._by_ends.pop(slot, None)
        for head_key, segment in list(self._segments.items()):
            if segment.flights.pop(slot, None) and not segment.flights:
                del self._segments[head_key]

    def __len__(self) -> int:
        """The number of segments: for inspection."""
        return len(self._segments)

    def _attach(self, segment: _PathSegment, slot: int, keys: Sequence[BlockKey]) -> _PathSegment:
        """Add a prompt that shares `segment` with others; returns the last segment of the prompt."""
        segments, end = self._segments, len(keys)
        while True:
            depth = _shared_end(segment, keys, end)
            if depth < segment.end:
                segment = self._split(segment, depth)
            flights = segment.flights
            flights[slot] = flights.get(slot, 0) + 1
            if depth == end:
                return segment
            following = segments.get(keys[depth])
            if following is None:
                new_segment = segments[keys[depth]] = _PathSegment(keys, depth, end, segment, {slot: 1})
                return new_segment
            segment = following

    def _split(self, segment: _PathSegment, position: int) -> _PathSegment:
        """Split `segment` at `position`; returns the new first part. Flights keep pointing to the second
        part."""
        keys = segment.keys
        head = _PathSegment(keys, segment.begin, position, segment.predecessor, dict(segment.flights))
        self._segments[keys[segment.begin]] = head
        self._segments[keys[position]] = segment
        segment.begin, segment.predecessor = position, head
        return head


def _shared_end(segment: _PathSegment, keys: Sequence[BlockKey], end: int) -> int:
    """The number of leading keys that the prompt shares up to within `segment`, whose first key it has."""
    segment_keys, high = segment.keys, segment.end
    if high > end:
        high = end
    if segment_keys[high - 1] == keys[high - 1]:
        return high
    low = segment.begin + 1
    while high - low > 1:
        middle = (low + high) // 2
        if segment_keys[middle - 1] == keys[middle - 1]:
            low = middle
        else:
            high = middle
    return low
