"""Finds the end of msgpack values in small steps.

A decoder cannot stop half-way, so one call takes time proportional to the data. Here, regular expressions
skip runs of a given number of values in C; all other values are walked one by one. Malformed data raise
`WireError`.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final

from kvroute.errors import WireError

STEP_IDS: Final = 2048
"""Token ids in one step: about 50 us."""

_PAUSE: Final = 500
"""Values or short runs between two yields: about 0.1 ms."""

# The alternatives in order of frequency.
_ID: Final = rb"(?:\xcd..|\xce....|[\x00-\x7f]|\xcc.)"
_HASH: Final = (
    rb"(?:\xcf.{8}|\xc4\x20.{32}|\xc4\x10.{16}|\xce.{4}|\xcd..|[\x00-\x7f\xe0-\xff]|[\xcc\xd0].|\xd3.{8}"
    rb"|\xd1..|\xd2.{4}|\xc4\x08.{8}|\xc4\x40.{64})"
)
_PLAIN: Final = (
    rb"(?:\xcd..|\xce....|[\x00-\x7f\xe0-\xff\xc0\xc2\xc3]|[\xcf\xcb\xd3].{8}|\xc4\x20.{32}"
    rb"|[\xcc\xd0].|\xd1..|[\xca\xd2].{4})"
)


def _runs(value: bytes, *lengths: int) -> list[tuple[int, re.Pattern[bytes]]]:
    """Patterns for runs of `lengths` values, longest first. Groups of sixteen values are a quarter faster."""
    return [
        (
            length,
            re.compile(
                b"(?s:(?:%s){%d}+)" % (16 * value, length // 16) if length >= 16 else b"(?s:%s)" % value
            ),
        )
        for length in lengths
    ]


_IDS: Final = _runs(_ID, STEP_IDS, 16, 1)
_HASHES: Final = _runs(_HASH, 16, 1)
((_, _plain),) = _runs(_PLAIN, 16)


def _sizes() -> bytes:
    """Value size in bytes by first byte; 0 if the first byte does not determine the size."""
    sizes = bytearray(256)
    for head in range(256):
        if head < 0x80 or head >= 0xE0:
            sizes[head] = 1
        elif 0xA0 <= head < 0xC0:
            sizes[head] = 1 + (head & 0x1F)
    for head, size in {
        0xC0: 1,
        0xC2: 1,
        0xC3: 1,
        0xCA: 5,
        0xCB: 9,
        0xCC: 2,
        0xCD: 3,
        0xCE: 5,
        0xCF: 9,
        0xD0: 2,
        0xD1: 3,
        0xD2: 5,
        0xD3: 9,
        0xD4: 3,
        0xD5: 4,
        0xD6: 6,
        0xD7: 10,
        0xD8: 18,
    }.items():
        sizes[head] = size
    return bytes(sizes)


_SIZES: Final = _sizes()
_COUNTED: Final = {0xC4: 1, 0xD9: 1, 0xC7: 1, 0xC5: 2, 0xDA: 2, 0xC8: 2, 0xC6: 4, 0xDB: 4, 0xC9: 4}
"""First byte -> size of the length field that follows (binary, text and extensions)."""
_EXTENSIONS: Final = frozenset({0xC7, 0xC8, 0xC9})


def array_at(data: bytes, at: int) -> tuple[int, int] | None:
    """(number of values, start of the first one) of the array at `at`; None if there is no array."""
    head = _byte(data, at)
    if head & 0xF0 == 0x90:
        return head & 0x0F, at + 1
    if head == 0xDC:
        return _unsigned(data, at + 1, 2), at + 3
    if head == 0xDD:
        return _unsigned(data, at + 1, 4), at + 5
    return None


def map_at(data: bytes, at: int) -> tuple[int, int] | None:
    """(number of pairs, start of the first one) of the map at `at`; None if there is no map."""
    head = _byte(data, at)
    if head & 0xF0 == 0x80:
        return head & 0x0F, at + 1
    if head == 0xDE:
        return _unsigned(data, at + 1, 2), at + 3
    if head == 0xDF:
        return _unsigned(data, at + 1, 4), at + 5
    return None


def after_ids(data: bytes, at: int, count: int) -> int:
    """The end of `count` token ids in their shortest form, in one step; 0 if the values are of another
    kind."""
    return _after(_IDS, data, at, count)


def after_hashes(data: bytes, at: int, count: int) -> int:
    """The end of `count` block hashes, in one step; 0 if the values are of another kind.

    A hash is a number, or 8, 16, 32 or 64 bytes.
    """
    return _after(_HASHES, data, at, count)


def _after(runs: list[tuple[int, re.Pattern[bytes]]], data: bytes, at: int, count: int) -> int:
    for length, pattern in runs:
        while count >= length:
            match = pattern.match(data, at)
            if match is None:
                return 0
            at = match.end()
            count -= length
    return at


def skip(data: bytes, at: int, values: int = 1) -> Generator[None, None, int]:
    """The end of the next `values` values of any kind. Yields after every `_PAUSE` steps."""
    remaining, steps, end = values, 0, len(data)
    while remaining:
        if at >= end:
            raise WireError("a truncated value")
        size = _SIZES[data[at]]
        if size:
            at += size
            remaining -= 1
        elif (entries := array_at(data, at)) is not None:
            count, at = entries
            remaining += count - 1
            while count >= 16 and (match := _plain.match(data, at)) is not None:
                at = match.end()
                count -= 16
                remaining -= 16
                steps += 1
                if steps >= _PAUSE:
                    steps = 0
                    yield
        elif (pairs := map_at(data, at)) is not None:
            count, at = pairs
            remaining += 2 * count - 1
        else:
            at = _after_counted(data, at)
            remaining -= 1
        steps += 1
        if steps >= _PAUSE:
            steps = 0
            yield
    if at > end:
        raise WireError("a truncated value")
    return at


def text_at(data: bytes, at: int) -> tuple[bytes, int]:
    """The text of at most 255 bytes at `at`, and its end. Raises WireError for other values."""
    head = _byte(data, at)
    if 0xA0 <= head < 0xC0:
        start, size = at + 1, head & 0x1F
    elif head == 0xD9:
        start, size = at + 2, _unsigned(data, at + 1, 1)
    else:
        raise WireError("text was expected")
    return data[start : start + size], start + size


def _after_counted(data: bytes, at: int) -> int:
    head = data[at]
    width = _COUNTED.get(head)
    if width is None:
        raise WireError("not a msgpack value")
    return at + 1 + width + _unsigned(data, at + 1, width) + (head in _EXTENSIONS)


def _byte(data: bytes, at: int) -> int:
    if at >= len(data):
        raise WireError("a truncated value")
    return data[at]


def _unsigned(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise WireError("a truncated value")
    return int.from_bytes(data[at : at + width], "big")
