"""A prompt as LMCache cuts and names it: chunks, hashed in a chain, in LMCache's own ways.

LMCache's two protocols tell what lies where by these hashes, so kvroute computes them itself from the token
ids of a prompt (LMCache 0.5.6: v1/multiprocess/token_hasher.py, v1/token_database.py). Model, cache salt and
rank are no part of a hash; they are what a `ChunkSpace` and the index's holders keep apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from struct import Struct
from sys import byteorder
from typing import Final, NamedTuple, TypeAlias, overload

from blake3 import blake3

from kvroute.blocks.known_prompts import PromptIds

ChunkKey: TypeAlias = int
"""How maps know a chunk: 64 bits of its hash, which depend on every token before its end. With `blake3` the
last 8 bytes of the name, unsigned (what vLLM's CPU events call the same chunk, LMCache 0.5.6); with the
others the number itself, `builtin`'s being signed."""

BLAKE3: Final = "blake3"
"""Default of LMCache's servers (multiprocess mode, 0.5): 32 bytes over the previous name and the tokens as
big-endian 32-bit numbers."""
BUILTIN: Final = "builtin"
"""Default of LMCache in the engine (0.4 and 0.5): CPython's `hash((previous, tokens, ()))`."""
BUILTIN_NONE: Final = "builtin_none"
"""The same in LMCache 0.3: `hash((previous, tokens, None))`, on CPython 3.12 and later, where `hash(None)` is
fixed (before, it is an address, and no two processes agree)."""
SHA256_CBOR: Final = "sha256_cbor"
"""In the engine: first 8 bytes, unsigned, of SHA-256 over the CBOR of `(previous, tokens, ())`."""

_BLAKE3_START: Final = blake3(bytes(12)).digest()
"""What comes before the first chunk: the hash of eight zero bytes and the token 0."""
_HASH_OF_NONE: Final = 0xFCA86420
"""`hash(None)` since CPython 3.12; an int of this value has the same hash."""
_last_8_bytes = Struct(">24xQ").unpack
_two_bytes = Struct(">BH").pack
_four_bytes = Struct(">BI").pack


class ChunkScheme(NamedTuple):
    """What must agree before two caches name a chunk alike.

    `seed` is the "previous hash" of the first chunk for the chains of numbers (`builtin`, `builtin_none`,
    `sha256_cbor`): LMCache derives it from PYTHONHASHSEED. `blake3` has a start of its own, and 0 here.
    """

    algorithm: str = BLAKE3
    chunk_tokens: int = 256
    seed: int = 0


class ChunkSpace(NamedTuple):
    """What else tells chunks of equal hashes apart: the model as LMCache knows it (vLLM's `--model`, often a
    path; "" where the protocol has none) and the request's cache salt."""

    scheme: ChunkScheme
    model: str = ""
    salt: str = ""


def chunk_key(name: bytes) -> ChunkKey:
    """The key of a chunk with this 32-byte `blake3` name. Raises ValueError for any other length."""
    if len(name) != 32:
        raise ValueError(f"a BLAKE3 chunk hash has 32 bytes, this one has {len(name)}")
    return _key_of(name)


class ChunkKeys(Sequence[ChunkKey]):
    """One key per full chunk of a prompt, each made, with those before it, when first asked for; a trailing
    part of a chunk gets none. Mutable: `made` grows.

    About 5 us for a chunk of 256 tokens, half of it for turning a list into bytes: an `array("I")` of token
    ids saves that (bench/micro_chunks.py). Equality is that of the keys.
    """

    __slots__ = ("_ids", "_last", "_next", "_tokens", "made", "names")

    def __init__(self, token_ids: Sequence[int], scheme: ChunkScheme) -> None:
        start, self._next = _chain(scheme)
        self._ids = token_ids
        self._tokens = scheme.chunk_tokens
        self._last: bytes | int = start
        self.made: list[ChunkKey] = []
        """The keys so far; `reach` makes more."""
        self.names: list[bytes] = []
        """The 32-byte names behind them, `blake3` only."""

    def reach(self, count: int) -> None:
        """Make the first `count` keys, or all there are."""
        made, tokens, follow, last = self.made, self._tokens, self._next, self._last
        for place in range(len(made), min(count, len(self))):
            last = follow(last, self._ids[place * tokens : (place + 1) * tokens])
            if isinstance(last, bytes):
                self.names.append(last)
                made.append(_key_of(last))
            else:
                made.append(last)
        self._last = last

    def __len__(self) -> int:
        return len(self._ids) // self._tokens

    @overload
    def __getitem__(self, place: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, place: slice) -> list[ChunkKey]: ...
    def __getitem__(self, place: int | slice) -> ChunkKey | list[ChunkKey]:
        if isinstance(place, slice):
            chosen = range(*place.indices(len(self)))
            if chosen:
                self.reach(max(chosen[0], chosen[-1]) + 1)
            return [self.made[index] for index in chosen]
        if place < 0:
            place += len(self)
        if not 0 <= place < len(self):
            raise IndexError(place)
        self.reach(place + 1)
        return self.made[place]

    def __iter__(self) -> Iterator[ChunkKey]:
        self.reach(len(self))
        return iter(self.made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkKeys({len(self)} chunks)"


class PromptChunks:
    """One prompt, cut and named in whatever schemes are asked for. Mutable: remembers what it was asked.

    `token_ids` are those that a cache may serve: all but the prompt's last. Ids are unsigned 32-bit; others
    raise OverflowError once their chunk is named. Holds them: for the time of one decision.
    """

    __slots__ = ("_made", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self._made: dict[ChunkScheme, ChunkKeys] = {}

    def keys(self, scheme: ChunkScheme) -> ChunkKeys:
        """Raises ValueError for an unknown algorithm or a chunk without tokens."""
        made = self._made.get(scheme)
        if made is None:
            ids = self.token_ids
            if isinstance(ids, PromptIds):  # of which every slice costs as much as a chunk's hash
                ids = ids.flat()
            made = self._made[scheme] = ChunkKeys(ids, scheme)
        return made


def chunk_keys(token_ids: Sequence[int], scheme: ChunkScheme) -> list[ChunkKey]:
    """The keys of all full chunks of `token_ids`, in order. Raises ValueError for an unknown algorithm."""
    return list(ChunkKeys(token_ids, scheme))


def chunk_names(token_ids: Sequence[int], scheme: ChunkScheme) -> list[bytes]:
    """The 32-byte `blake3` names of all full chunks. Raises ValueError for other algorithms."""
    if scheme.algorithm != BLAKE3:
        raise ValueError(f"chunks have 32-byte names with {BLAKE3} only, not with {scheme.algorithm!r}")
    keys = ChunkKeys(token_ids, scheme)
    keys.reach(len(keys))
    return keys.names


_Follow: TypeAlias = Callable[..., bytes | int]
"""(what comes before, token ids of one chunk) -> what stands for both."""


def _chain(scheme: ChunkScheme) -> tuple[bytes | int, _Follow]:
    """The start of a chain, and how it goes on."""
    if scheme.chunk_tokens < 1:
        raise ValueError(f"a chunk has at least one token, not {scheme.chunk_tokens}")
    if scheme.algorithm == BLAKE3:
        return _BLAKE3_START, _blake3_next
    follow = {BUILTIN: _builtin_next, BUILTIN_NONE: _builtin_none_next, SHA256_CBOR: _sha256_cbor_next}.get(
        scheme.algorithm
    )
    if follow is None:
        raise ValueError(f"unknown chunk hash algorithm {scheme.algorithm!r}")
    return scheme.seed, follow


def _key_of(name: bytes) -> ChunkKey:
    key: int
    (key,) = _last_8_bytes(name)
    return key


def _blake3_next(before: bytes, ids: Sequence[int]) -> bytes:
    # A slice of an array is a copy already.
    words = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    if byteorder == "little":
        words.byteswap()
    return blake3(before + words.tobytes()).digest()


def _builtin_next(before: int, ids: Sequence[int]) -> int:
    return hash((before, tuple(ids), ()))


def _builtin_none_next(before: int, ids: Sequence[int]) -> int:
    return hash((before, tuple(ids), _HASH_OF_NONE))


def _sha256_cbor_next(before: int, ids: Sequence[int]) -> int:
    # An array of three: a number, an array of numbers, an empty array (RFC 8949, shortest forms).
    numbers = b"".join(map(_cbor_number, ids))
    body = b"\x83" + _cbor_number(before) + _cbor_head(0x80, len(ids)) + numbers + b"\x80"
    return int.from_bytes(sha256(body).digest()[:8], "big")


def _cbor_number(number: int) -> bytes:
    """A number from 0 to 2**64 - 1; token ids mostly have two or four bytes."""
    if 0xFF < number <= 0xFFFF:
        return _two_bytes(0x19, number)
    if 0xFFFF < number <= 0xFFFFFFFF:
        return _four_bytes(0x1A, number)
    return _cbor_head(0, number)


def _cbor_head(kind: int, number: int) -> bytes:
    """The head of a CBOR item: its major type, shifted, and a number below 2**64."""
    if 0 <= number < 24:
        return bytes((kind | number,))
    for extra, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes((kind | extra,)) + number.to_bytes(size, "big")
    raise OverflowError(number)
