"""Splits a large event batch into small batches, so that no single step with a batch takes long.

The cost of a step does not depend on the size of the batch or of its largest event: events are found one
window at a time, and a large event is divided into several events. A batch of 100,000 blocks holds the event
loop for 1.5 ms at most; decoded as a whole, for 174 ms (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvroute.errors import WireError
from kvroute.wire.msgpack_walk import STEP_IDS, after_hashes, after_ids, array_at, map_at, skip, text_at
from kvroute.wire.vllm import FIELDS, TokenId

PART_HASHES: Final = 512
"""Most hashes in one part of an event without token ids."""

_NIL: Final = b"\xc0"
_check_ids = msgspec.msgpack.Decoder(list[list[TokenId]]).decode
_check_extra = msgspec.msgpack.Decoder(list[list[object] | None]).decode


@dataclass(slots=True)
class EventLayout:
    """Where the fields of one event are. Mutable: `layout_of` fills it.

    `is_divisible` is False if the event neither stores nor removes blocks, or has a shape that vLLM does not
    write.
    """

    start: int
    end: int = 0
    tag: bytes = b""
    is_divisible: bool = True
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Start and end of each value, in the order of the event."""
    hashes: int = 0
    ids: int = 0
    part_hashes: int = PART_HASHES
    """Hashes in each part but the last."""
    marks: list[int] = field(default_factory=list)
    """Start of the token ids of each part, and the end of the last; empty if they do not match the hashes."""


@dataclass(frozen=True, slots=True)
class EventPart:
    """A part of an event, as an event. If the first part can be decoded, the others can too.

    `from_root`: the whole event begins at the start of a prompt.
    """

    event: bytes
    is_first: bool
    is_last: bool
    from_root: bool


def layout_of(data: bytes, at: int) -> Generator[None, None, EventLayout]:
    """Walk the event at `at`; yields after every few thousand token ids. Raises `WireError`."""
    event = EventLayout(at)
    fields = map_at(data, at)
    if fields is not None:
        count, at = fields
        for _ in range(count):
            name, at = text_at(data, at)
            at = yield from _walk_field(data, event, name.decode(errors="replace"), at)
    else:
        values = array_at(data, at)
        if values is None or not values[0]:
            raise WireError("an event is neither a map nor an array")
        count, at = values
        at = yield from _walk_field(data, event, "type", at)
        field_names = FIELDS.get(event.tag.decode(errors="replace"), ())
        for index in range(count - 1):
            field_name = field_names[index] if index < len(field_names) else f"#{index}"
            at = yield from _walk_field(data, event, field_name, at)
    event.end = at
    _check_layout(data, event)
    return event


def _walk_field(data: bytes, event: EventLayout, name: str, at: int) -> Generator[None, None, int]:
    start = at
    if name in event.fields or (name == "token_ids" and not event.hashes):
        event.is_divisible = False
    if name == "type":
        event.tag, at = text_at(data, at)
    elif name == "block_hashes" and (array := array_at(data, at)) is not None:
        event.hashes, at = array
        at = yield from _walk_hashes(data, event, at)
    elif name == "token_ids" and (array := array_at(data, at)) is not None:
        event.ids, at = array
        at = yield from _walk_ids(data, event, at)
    else:
        at = yield from skip(data, at)
    event.fields[name] = start, at
    return at


def _walk_hashes(data: bytes, event: EventLayout, at: int) -> Generator[None, None, int]:
    remaining = event.hashes
    while remaining:
        step_count = min(PART_HASHES, remaining)
        stop = after_hashes(data, at, step_count)
        if not stop:
            event.is_divisible = False
            return (yield from skip(data, at, remaining))
        at = stop
        remaining -= step_count
        yield
    return at


def _walk_ids(data: bytes, event: EventLayout, at: int) -> Generator[None, None, int]:
    """The end of the token ids. Fills `marks` if each hash has the same number of token ids."""
    remaining = event.ids
    step = STEP_IDS
    fits = bool(remaining and event.hashes) and remaining % event.hashes == 0
    if fits:
        size = remaining // event.hashes
        event.part_hashes = max(1, STEP_IDS // size)
        step = event.part_hashes * size
        event.marks.append(at)
    while remaining:
        step_count = min(step, remaining)
        stop = after_ids(data, at, step_count)
        if not stop:
            event.is_divisible = False
            event.marks.clear()
            return (yield from skip(data, at, remaining))
        at = stop
        remaining -= step_count
        if fits:
            event.marks.append(at)
        yield
    return at


def _check_layout(data: bytes, event: EventLayout) -> None:
    """Set `is_divisible`, and clear `marks` if the token ids do not match the block size."""
    fields = event.fields
    if event.tag not in (b"BlockStored", b"BlockRemoved") or not event.hashes:
        event.is_divisible = False
    elif event.tag == b"BlockStored":
        if "parent_block_hash" not in fields or "block_size" not in fields or "token_ids" not in fields:
            event.is_divisible = False
        elif event.marks:
            start, stop = fields["block_size"]
            block_size = msgspec.msgpack.decode(data[start:stop])
            if block_size != event.ids // event.hashes:
                event.marks.clear()
    if not event.marks:
        event.part_hashes = PART_HASHES


def parts_of(data: bytes, event: EventLayout) -> Iterator[EventPart | None]:
    """Yields the parts of an event in order, and None where the caller may yield to the event loop.

    Each part of a `BlockStored` has the last hash of the part before as its parent. If the token ids do not
    match the hashes, the event is useless: the parts then have the hashes, to be counted, and one token id.
    Raises `WireError` for malformed extra keys.
    """
    fields = event.fields
    hashes = array_at(data, fields["block_hashes"][0])
    assert hashes is not None
    at, parent = hashes[1], b""
    is_stored = event.tag == b"BlockStored"
    from_root = is_stored and data[slice(*fields["parent_block_hash"])] == _NIL
    placeholder_ids = b"\x90" if not event.ids else b"\x91\x00"
    extra = yield from _row_parts(data, event, "extra_keys", _check_extra) if is_stored else ()
    ahead = yield from _row_parts(data, event, "lookahead_token_ids", _check_ids) if is_stored else ()
    for number, start_hash in enumerate(range(0, event.hashes, event.part_hashes)):
        count = min(event.part_hashes, event.hashes - start_hash)
        last = after_hashes(data, at, count - 1)
        stop = after_hashes(data, last, 1)
        new = {"block_hashes": _array(count) + data[at:stop]}
        if is_stored:
            if parent:
                new["parent_block_hash"] = parent
            if event.marks:
                ids = data[event.marks[number] : event.marks[number + 1]]
                new["token_ids"] = _array(count * (event.ids // event.hashes)) + ids
            else:
                new["token_ids"] = placeholder_ids
            if extra:
                new["extra_keys"] = extra[number] if number < len(extra) else _NIL
            if ahead:
                new["lookahead_token_ids"] = ahead[number] if number < len(ahead) else _NIL
            parent = data[last:stop]
        at = stop
        yield EventPart(_with(data, event, new), number == 0, start_hash + count == event.hashes, from_root)


def _row_parts(
    data: bytes, event: EventLayout, name: str, check: Callable[[bytes], object]
) -> Generator[None, None, list[bytes]]:
    """A field with one row per block, divided like the hashes; empty if the event does not have it."""
    span = event.fields.get(name)
    rows = None if span is None else array_at(data, span[0])
    if span is None or rows is None:
        return []
    count, at = rows
    parts = []
    for start_row in range(0, count, event.part_hashes):
        step_count = min(event.part_hashes, count - start_row)
        if data.startswith(_NIL * step_count, at):
            stop = at + step_count
            packed_rows = _array(step_count) + data[at:stop]
        else:
            stop = yield from skip(data, at, step_count)
            packed_rows = _array(step_count) + data[at:stop]
            try:
                check(packed_rows)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise WireError(f"malformed {name}") from error
            yield
        parts.append(packed_rows)
        at = stop
    return parts


def _with(data: bytes, event: EventLayout, new: dict[str, bytes]) -> bytes:
    """The event with new values for the given fields."""
    at = event.start
    pieces: list[bytes] = []
    for name, (start, stop) in event.fields.items():
        if name in new:
            pieces += data[at:start], new[name]
            at = stop
    pieces.append(data[at : event.end])
    return b"".join(pieces)


def _array(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


SMALL_BYTES: Final = 32_768
"""Payloads up to this size are not split: about 0.2 ms to decode."""

MAX_WHOLE_BYTES: Final = 1 << 20
"""Longest part of a batch that cannot be divided: 20 ms to decode."""

LARGE_BYTES: Final = 131_072
"""Above this size, even finding the ends of the events takes too long in one step (0.3 ms)."""

_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)

_decode_rows = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode

_TAG: Final = b"\xa4type"
"""The first key of an event that is a map (vLLM 0.24 and later). One byte before it has the number of
keys."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a batch, as a batch of the same shape. Only the last piece is sure to have the rank.

    `continues`: the only event of the piece continues the event of the piece before. Then `from_root` says
    that the event begins at the start of a prompt, and `is_checked` that the piece can be decoded if the
    piece before can. `is_whole`: the piece is larger than intended, because its event has a shape that vLLM
    does not write.
    """

    payload: bytes
    continues: bool = False
    from_root: bool = False
    is_checked: bool = False
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """`head` has the bytes before the events; `short_head` those bytes for a batch of time and events
    alone."""

    head: bytes
    short_head: bytes
    events: int
    start: int


def split_batch(payload: bytes) -> Iterator[Piece | None]:
    """Yields pieces of about `SMALL_BYTES` in order, and None where the caller may yield to the event loop.

    Raises `WireError` if the payload is not a batch, or if one event, or what follows the events, cannot be
    divided and is longer than `MAX_WHOLE_BYTES`. Not everything is checked: a piece without `is_checked`
    may still be unreadable.
    """
    if len(payload) <= SMALL_BYTES:
        yield Piece(payload)
        return
    batch = yield from _batch_at(payload)
    ends = _small_ends(payload, batch) if len(payload) <= LARGE_BYTES else None
    group = at = batch.start
    remaining, events, tagged = batch.events, 0, ends is None
    while remaining and len(payload) - at > SMALL_BYTES:
        count, stop, event = 0, at, None
        if tagged:
            count, stop = _count_tagged(payload, at, remaining)
            tagged = count >= 0
        elif ends is not None:
            count, stop = 1, ends[batch.events - remaining]
        if count <= 0 or stop - at > SMALL_BYTES:
            event = yield from layout_of(payload, at)
            count, stop = 1, event.end
            yield None
        if events and stop - group > SMALL_BYTES:
            yield _piece(batch, payload[group:at], events)
            group, events = at, 0
        remaining -= count
        if event is not None and stop - at > SMALL_BYTES:
            yield from _divide(payload, batch, event, is_last=not remaining)
            group = stop
        else:
            events += count
        at = stop
    if remaining and events and len(payload) - group > SMALL_BYTES:
        yield _piece(batch, payload[group:at], events)
        group, events = at, 0
    if remaining or events or not batch.events:
        yield _piece(batch, payload[group:], events + remaining, is_last=True)


def _batch_at(payload: bytes) -> Generator[None, None, _Batch]:
    """Find the events of a batch, which is an array (time, events, ...) or a map."""
    rows = array_at(payload, 0)
    if rows is not None and rows[0] >= 2:
        time = rows[1]
        at = yield from skip(payload, time)
        short_head = b"\x92" + payload[time:at]
        head = payload[:at]
    else:
        pairs = map_at(payload, 0)
        if pairs is None:
            raise WireError("a batch is neither an array nor a map")
        count, at = pairs
        short_head = b""
        for _ in range(count):
            start = at
            name, at = text_at(payload, at)
            if name == b"events":
                break
            at = yield from skip(payload, at)
            if name == b"ts":
                short_head = payload[start:at]
        else:
            raise WireError("a batch without events")
        if not short_head:
            raise WireError("a batch without a time before its events")
        short_head, head = b"\x82" + short_head + payload[start:at], payload[:at]
    events = array_at(payload, at)
    if events is None:
        raise WireError("the events are not an array")
    return _Batch(head, short_head, *events)


def _small_ends(payload: bytes, batch: _Batch) -> list[int] | None:
    """The end of each event of a batch that is not large; None if the batch is a map."""
    if batch.head[0] & 0xF0 == 0x80:
        return None
    try:
        events = _decode_rows(_decode_rows(payload)[1])
    except _UNREADABLE as error:
        raise WireError("not a batch") from error
    at, ends = batch.start, []
    for event in events:
        at += len(event)
        ends.append(at)
    return ends


def _count_tagged(payload: bytes, at: int, remaining: int) -> tuple[int, int]:
    """(number, end) of the next events within `SMALL_BYTES`, found by their first key.

    The number is 0 if the next event is large, and -1 if the bytes only resemble events.
    """
    stop = payload.rfind(_TAG, at + 2, at + SMALL_BYTES) - 1
    if stop <= at:
        return 0, at
    count = payload.count(_TAG, at, stop)
    try:
        _decode_rows(b"\xdd" + count.to_bytes(4, "big") + payload[at:stop])
    except _UNREADABLE:
        return -1, at
    return (count, stop) if count < remaining else (-1, at)


def _divide(payload: bytes, batch: _Batch, event: EventLayout, *, is_last: bool) -> Iterator[Piece | None]:
    """The pieces of a large event. With `is_last`, the last piece also has the end of the batch."""
    tail = payload[event.end :] if is_last else b""
    if not event.is_divisible:
        yield _piece(batch, payload[event.start : event.end] + tail, 1, is_last=is_last, is_whole=True)
        return
    room = 4 * len(payload) + MAX_WHOLE_BYTES  # each part has a copy of the fields that are not divided
    for event_part in parts_of(payload, event):
        if event_part is None:
            yield None
            continue
        room -= len(event_part.event)
        if len(event_part.event) > MAX_WHOLE_BYTES or room < 0:
            raise WireError("a field of an event cannot be divided and is too long")
        ends = is_last and event_part.is_last
        yield Piece(
            _encode(batch, event_part.event + tail if ends else event_part.event, 1, is_last=ends),
            continues=not event_part.is_first,
            from_root=event_part.from_root,
            is_checked=not (event_part.is_first or ends),
        )


def _piece(
    batch: _Batch, events: bytes, count: int, *, is_last: bool = False, is_whole: bool = False
) -> Piece:
    if len(events) > MAX_WHOLE_BYTES:
        raise WireError("a part of a batch cannot be divided and is too long")
    return Piece(_encode(batch, events, count, is_last=is_last), is_whole=is_whole)


def _encode(batch: _Batch, events: bytes, count: int, *, is_last: bool) -> bytes:
    return (batch.head if is_last else batch.short_head) + b"\xdd" + count.to_bytes(4, "big") + events
