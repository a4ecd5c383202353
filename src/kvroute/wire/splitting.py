"""Large event batches as several small ones, so that no single decoding takes long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

SMALL_BYTES: Final = 32_768
"""Payloads up to this size are not split: about 0.1 ms to decode."""

LARGE_BYTES: Final = 262_144
"""Beyond this even finding where the events of a batch end takes too long in one go (0.7 ms)."""

_decode_rows = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_events = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.msgpack.encode

_TAG: Final = b"\xa4type"
"""The first key of an event that is a map (vLLM 0.24 and later), behind one byte that says how many."""
_HEAD_BYTES: Final = 1 + 9
"""An array of up to 15, and the time as a 64-bit float."""


def split_batch(payload: bytes) -> Iterator[bytes]:
    """The batch as payloads of about `SMALL_BYTES`, in order, each a batch of the same shape; all but the
    last may lack the rank.

    An event is never divided. What is not an array of time, events and rank comes back whole.
    """
    if len(payload) <= SMALL_BYTES:
        yield payload
        return
    done = 0
    if len(payload) > LARGE_BYTES:
        for piece, events in _stepwise(payload):
            yield piece
            if events is None:
                return
            done += events
    try:
        ts, packed, *rest = _decode_rows(payload)
        events_left = _decode_events(packed)[done:]
    except (msgspec.MsgspecError, ValueError):
        yield payload
        return
    start, size = 0, 0
    for stop, event in enumerate(events_left, 1):
        size += len(event)
        if size > SMALL_BYTES or stop == len(events_left):
            yield _encode([ts, events_left[start:stop], *rest])
            start, size = stop, 0


def _stepwise(payload: bytes) -> Iterator[tuple[bytes, int | None]]:
    """Pieces and how many events each has, None for the last; ends early where events cannot be told apart
    by their beginnings: arrays, or something that only looks like one."""
    start = _HEAD_BYTES
    if payload[0] not in (0x92, 0x93) or payload[1] != 0xCB:
        return
    if payload[start] & 0xF0 == 0x90:
        left, width = payload[start] & 0x0F, 1
    elif payload[start] in (0xDC, 0xDD):
        width = 3 if payload[start] == 0xDC else 5
        left = int.from_bytes(payload[start + 1 : start + width], "big")
    else:
        return
    start += width
    if left == 1:
        yield payload, None
        return
    while True:
        found = payload.find(_TAG, start + SMALL_BYTES)
        stop = found - 1 if found >= 0 else len(payload)
        events = payload.count(_TAG, start, stop)
        head = payload[:1] if found < 0 else b"\x92"
        piece = head + payload[1:_HEAD_BYTES] + b"\xdd" + events.to_bytes(4, "big") + payload[start:stop]
        try:
            _decode_rows(piece)
        except (msgspec.MsgspecError, ValueError):
            return
        if events > left or (found < 0 and events != left):
            return
        if found < 0:
            yield piece, None
            return
        yield piece, events
        left -= events
        start = stop
