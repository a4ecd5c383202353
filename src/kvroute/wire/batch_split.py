"""Large event batches as several small ones, so that nothing that is done with one takes long.

What a step costs does not depend on the size of the batch nor on that of its largest event: events are told
apart a window at a time, and a large one is divided (`kvroute.wire.batch_split`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvroute.errors import WireError
from kvroute.wire.msgpack_walk import STEP_IDS, after_ids, after_names, array_at, map_at, skip, text_at
from kvroute.wire.vllm import FIELDS

PART_NAMES: Final = 512
"""Most hashes in one part of an event without token ids."""

_NIL: Final = b"\xc0"
_check_extra = msgspec.msgpack.Decoder(list[list[object] | None]).decode


@dataclass(slots=True)
class EventLayout:
    """Where the parts of one event are. Mutable while it is walked.

    `is_divisible` is False if it is no announcement or removal of blocks, or unlike what vLLM writes.
    """

    start: int
    end: int = 0
    tag: bytes = b""
    is_divisible: bool = True
    fields: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Start and end of each value, in the order of their coming."""
    names: int = 0
    ids: int = 0
    part_names: int = PART_NAMES
    """Hashes in each part but the last."""
    marks: list[int] = field(default_factory=list)
    """Where the token ids of each part begin, and where the last ends; empty if they do not fit."""


@dataclass(frozen=True, slots=True)
class EventPart:
    """A part of an event as an event. All but the first can be read if that can. `from_root`: the whole
    begins with a prompt."""

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
            raise WireError("an event is a map or an array")
        count, at = values
        at = yield from _walk_field(data, event, "type", at)
        known = FIELDS.get(event.tag.decode(errors="replace"), ())
        for place in range(count - 1):
            name_of = known[place] if place < len(known) else f"#{place}"
            at = yield from _walk_field(data, event, name_of, at)
    event.end = at
    _judge(data, event)
    return event


def _walk_field(data: bytes, event: EventLayout, name: str, at: int) -> Generator[None, None, int]:
    start = at
    if name in event.fields or (name == "token_ids" and not event.names):
        event.is_divisible = False
    if name == "type":
        event.tag, at = text_at(data, at)
    elif name == "block_hashes" and (found := array_at(data, at)) is not None:
        event.names, at = found
        at = yield from _walk_names(data, event, at)
    elif name == "token_ids" and (found := array_at(data, at)) is not None:
        event.ids, at = found
        at = yield from _walk_ids(data, event, at)
    else:
        at = yield from skip(data, at)
    event.fields[name] = start, at
    return at


def _walk_names(data: bytes, event: EventLayout, at: int) -> Generator[None, None, int]:
    left = event.names
    while left:
        some = min(PART_NAMES, left)
        stop = after_names(data, at, some)
        if not stop:
            event.is_divisible = False
            return (yield from skip(data, at, left))
        at = stop
        left -= some
        yield
    return at


def _walk_ids(data: bytes, event: EventLayout, at: int) -> Generator[None, None, int]:
    """Their end; notes where parts begin if there are as many for each hash."""
    left = event.ids
    step = STEP_IDS
    fits = bool(left and event.names) and left % event.names == 0
    if fits:
        size = left // event.names
        event.part_names = max(1, STEP_IDS // size)
        step = event.part_names * size
        event.marks.append(at)
    while left:
        some = min(step, left)
        stop = after_ids(data, at, some)
        if not stop:
            event.is_divisible = False
            event.marks.clear()
            return (yield from skip(data, at, left))
        at = stop
        left -= some
        if fits:
            event.marks.append(at)
        yield
    return at


def _judge(data: bytes, event: EventLayout) -> None:
    """May it be divided, and do its token ids fit its hashes?"""
    fields = event.fields
    if event.tag not in (b"BlockStored", b"BlockRemoved") or not event.names:
        event.is_divisible = False
    elif event.tag == b"BlockStored":
        if "parent_block_hash" not in fields or "block_size" not in fields or "token_ids" not in fields:
            event.is_divisible = False
        elif event.marks:
            start, stop = fields["block_size"]
            said = msgspec.msgpack.decode(data[start:stop])
            if said != event.ids // event.names:
                event.marks.clear()
    if not event.marks:
        event.part_names = PART_NAMES


def parts_of(data: bytes, event: EventLayout) -> Iterator[EventPart | None]:
    """The event's parts in order; None is a chance to pause. Raises `WireError` where extra keys are none.

    Every announcement goes on behind the last hash of the one before. Where the token ids do not fit the
    hashes nothing can be made of it: the parts have the hashes, to be counted, and one token id.
    """
    fields = event.fields
    found = array_at(data, fields["block_hashes"][0])
    assert found is not None
    at, parent = found[1], b""
    is_stored = event.tag == b"BlockStored"
    from_root = is_stored and data[slice(*fields["parent_block_hash"])] == _NIL
    some_id = b"\x90" if not event.ids else b"\x91\x00"
    extra = yield from _extra_parts(data, event) if is_stored else ()
    for number, first in enumerate(range(0, event.names, event.part_names)):
        count = min(event.part_names, event.names - first)
        last = after_names(data, at, count - 1)
        stop = after_names(data, last, 1)
        new = {"block_hashes": _array(count) + data[at:stop]}
        if is_stored:
            if parent:
                new["parent_block_hash"] = parent
            if event.marks:
                ids = data[event.marks[number] : event.marks[number + 1]]
                new["token_ids"] = _array(count * (event.ids // event.names)) + ids
            else:
                new["token_ids"] = some_id
            if extra:
                new["extra_keys"] = extra[number] if number < len(extra) else _NIL
            parent = data[last:stop]
        at = stop
        yield EventPart(_with(data, event, new), number == 0, first + count == event.names, from_root)


def _extra_parts(data: bytes, event: EventLayout) -> Generator[None, None, list[bytes]]:
    """Its extra keys, divided as the hashes are; empty if it has none."""
    span = event.fields.get("extra_keys")
    found = None if span is None else array_at(data, span[0])
    if span is None or found is None:
        return []
    count, at = found
    parts = []
    for first in range(0, count, event.part_names):
        some = min(event.part_names, count - first)
        if data.startswith(_NIL * some, at):
            stop = at + some
            part = _array(some) + data[at:stop]
        else:
            stop = yield from skip(data, at, some)
            part = _array(some) + data[at:stop]
            try:
                _check_extra(part)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise WireError("no extra keys") from error
            yield
        parts.append(part)
        at = stop
    return parts


def _with(data: bytes, event: EventLayout, new: dict[str, bytes]) -> bytes:
    """The event with other values for some of its fields."""
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


def _divided(payload: bytes, batch: _Batch, event: EventLayout, *, is_last: bool) -> Iterator[Piece | None]:
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
