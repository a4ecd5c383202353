"""Large event batches as several small ones, so that nothing that is done with one takes long.

What a step costs does not depend on the size of the batch nor on that of its largest event: events are told
apart a window at a time, and a large one is divided (`kvroute.wire.dividing`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from kvroute.errors import WireError
from kvroute.wire.dividing import Layout, layout_of, parts_of
from kvroute.wire.walking import array_at, map_at, skip, text_at

SMALL_BYTES: Final = 32_768
"""Payloads up to this size are not split: about 0.2 ms to decode."""

LARGE_BYTES: Final = 131_072
"""Beyond this even finding where the events of a batch end takes too long in one go (0.3 ms)."""

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)

_decode_rows = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode

_TAG: Final = b"\xa4type"
"""The first key of an event that is a map (vLLM 0.24 and later), behind one byte that says how many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch of the same shape as the whole; only the last one surely has the rank.

    `continues`: its only event goes on with that of the piece before; `from_root` then says that the
    announcement begins with a prompt, `is_checked` that it can be read if the piece before can. `is_whole`:
    larger than it should be, since its event is unlike what vLLM writes.
    """

    payload: bytes
    continues: bool = False
    from_root: bool = False
    is_checked: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """`head` is what lies before the events, `least` the same for a batch of time and events alone."""

    head: bytes
    least: bytes
    events: int
    start: int


def split_batch(payload: bytes) -> Iterator[Piece | None]:
    """The batch as pieces of about `SMALL_BYTES`, in order; None is a chance to pause.

    Raises `WireError` for what is no batch, though not for all of it: pieces that are not `is_checked` may
    turn out to be unreadable.
    """
    if len(payload) <= SMALL_BYTES:
        yield Piece(payload)
        return
    batch = yield from _batch_at(payload)
    ends = _small_ends(payload, batch) if len(payload) <= LARGE_BYTES else None
    group = at = batch.start
    left, events, tagged = batch.events, 0, ends is None
    while left and len(payload) - at > SMALL_BYTES:
        count, stop, event = 0, at, None
        if tagged:
            count, stop = _tagged(payload, at, left)
            tagged = count >= 0
        elif ends is not None:
            count, stop = 1, ends[batch.events - left]
        if count <= 0 or stop - at > SMALL_BYTES:
            event = yield from layout_of(payload, at)
            count, stop = 1, event.end
            yield None
        if events and stop - group > SMALL_BYTES:
            yield _piece(batch, payload[group:at], events)
            group, events = at, 0
        left -= count
        if event is not None and stop - at > SMALL_BYTES:
            yield from _divided(payload, batch, event, is_last=not left)
            group = stop
        else:
            events += count
        at = stop
    if left and events and len(payload) - group > SMALL_BYTES:
        yield _piece(batch, payload[group:at], events)
        group, events = at, 0
    if left or events or not batch.events:
        yield _piece(batch, payload[group:], events + left, is_last=True)


def _batch_at(payload: bytes) -> Generator[None, None, _Batch]:
    """An array of time, events and more, or a map of them."""
    rows = array_at(payload, 0)
    if rows is not None and rows[0] >= 2:
        time = rows[1]
        at = yield from skip(payload, time)
        least = b"\x92" + payload[time:at]
        head = payload[:at]
    else:
        pairs = map_at(payload, 0)
        if pairs is None:
            raise WireError("a batch is an array or a map")
        count, at = pairs
        least = b""
        for _ in range(count):
            start = at
            name, at = text_at(payload, at)
            if name == b"events":
                break
            at = yield from skip(payload, at)
            if name == b"ts":
                least = payload[start:at]
        else:
            raise WireError("a batch has events")
        if not least:
            raise WireError("a batch has its time before its events")
        least, head = b"\x82" + least + payload[start:at], payload[:at]
    found = array_at(payload, at)
    if found is None:
        raise WireError("events are an array")
    return _Batch(head, least, *found)


def _small_ends(payload: bytes, batch: _Batch) -> list[int] | None:
    """Where each event ends, of a batch that is not large; None for a map."""
    if batch.head[0] & 0xF0 == 0x80:
        return None
    try:
        events = _decode_rows(_decode_rows(payload)[1])
    except _UNREADABLE as error:
        raise WireError("no batch") from error
    at, ends = batch.start, []
    for event in events:
        at += len(event)
        ends.append(at)
    return ends


def _tagged(payload: bytes, at: int, left: int) -> tuple[int, int]:
    """How many of the events that follow can be told apart by their beginnings, and where they end. None of
    them if the next is large; less than none if they only look like events."""
    stop = payload.rfind(_TAG, at + 2, at + SMALL_BYTES) - 1
    if stop <= at:
        return 0, at
    count = payload.count(_TAG, at, stop)
    try:
        _decode_rows(b"\xdd" + count.to_bytes(4, "big") + payload[at:stop])
    except _UNREADABLE:
        return -1, at
    return (count, stop) if count < left else (-1, at)


def _divided(payload: bytes, batch: _Batch, event: Layout, *, is_last: bool) -> Iterator[Piece | None]:
    """A large event's pieces; the last of them ends the batch if it `is_last`."""
    tail = payload[event.end :] if is_last else b""
    if not event.is_divisible:
        yield _piece(batch, payload[event.start : event.end] + tail, 1, is_last=is_last, is_whole=True)
        return
    for part in parts_of(payload, event):
        if part is None:
            yield None
            continue
        ends = is_last and part.is_last
        yield Piece(
            _packed(batch, part.event + tail if ends else part.event, 1, is_last=ends),
            continues=not part.is_first,
            from_root=part.from_root,
            is_checked=not (part.is_first or ends),
        )


def _piece(
    batch: _Batch, events: bytes, count: int, *, is_last: bool = False, is_whole: bool = False
) -> Piece:
    return Piece(_packed(batch, events, count, is_last=is_last), is_whole=is_whole)


def _packed(batch: _Batch, events: bytes, count: int, *, is_last: bool) -> bytes:
    return (batch.head if is_last else batch.least) + b"\xdd" + count.to_bytes(4, "big") + events
