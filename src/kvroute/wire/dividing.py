"""One large event as several small ones that say the same, without reading all of it at once."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from kvroute.errors import WireError
from kvroute.wire.vllm import FIELDS
from kvroute.wire.walking import STEP_IDS, after_ids, after_names, array_at, map_at, skip, text_at

PART_NAMES: Final = 512
"""Most hashes in one part of an event without token ids."""

_NIL: Final = b"\xc0"
_check_extra = msgspec.msgpack.Decoder(list[list[object] | None]).decode


@dataclass(slots=True)
class Layout:
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
class Part:
    """A part of an event as an event. All but the first can be read if that can. `from_root`: the whole
    begins with a prompt."""

    event: bytes
    is_first: bool
    is_last: bool
    from_root: bool


def layout_of(data: bytes, at: int) -> Generator[None, None, Layout]:
    """Walk the event at `at`; yields after every few thousand token ids. Raises `WireError`."""
    event = Layout(at)
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


def _walk_field(data: bytes, event: Layout, name: str, at: int) -> Generator[None, None, int]:
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


def _walk_names(data: bytes, event: Layout, at: int) -> Generator[None, None, int]:
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


def _walk_ids(data: bytes, event: Layout, at: int) -> Generator[None, None, int]:
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


def _judge(data: bytes, event: Layout) -> None:
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


def parts_of(data: bytes, event: Layout) -> Iterator[Part | None]:
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
        yield Part(_with(data, event, new), number == 0, first + count == event.names, from_root)


def _extra_parts(data: bytes, event: Layout) -> Generator[None, None, list[bytes]]:
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


def _with(data: bytes, event: Layout, new: dict[str, bytes]) -> bytes:
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
