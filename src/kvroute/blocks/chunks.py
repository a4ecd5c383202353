"""LMCache's chunk hashes of a prompt: chained hashes of 256 tokens by default.

LMCache's two protocols name stored chunks by these hashes, so kvroute computes them from the token ids of a
prompt (LMCache 0.5.6: v1/multiprocess/token_hasher.py, v1/token_database.py). Model, cache salt and rank are
not in a hash; `ChunkSpace` and the index's holders distinguish them.
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
"""A chunk in a map: 64 bits of its hash, which depends on all tokens up to the chunk's end.

With `blake3`, the last 8 bytes of the 32-byte hash, unsigned (the same number as in vLLM's CPU events,
LMCache
0.5.6). With the other algorithms, the hash itself; that of `builtin` is signed."""

BLAKE3: Final = "blake3"
"""Default of LMCache's servers (multiprocess mode, 0.5): 32 bytes, over the previous hash and the tokens as
big-endian 32-bit numbers."""
BUILTIN: Final = "builtin"
"""Default of LMCache in the engine (0.4 and 0.5): CPython's `hash((previous, tokens, ()))`."""
BUILTIN_NONE: Final = "builtin_none"
"""Default of LMCache 0.3 in the engine: `hash((previous, tokens, None))`, on CPython 3.12 and later. Before,
`hash(None)` is an address that differs per process."""
SHA256_CBOR: Final = "sha256_cbor"
"""An option of LMCache in the engine: the first 8 bytes, unsigned, of SHA-256 over the CBOR of
`(previous, tokens, ())`."""

_BLAKE3_START: Final = blake3(bytes(12)).digest()
"""The hash before the first chunk: that of eight zero bytes and the token 0."""
_HASH_OF_NONE: Final = 0xFCA86420
"""`hash(None)` since CPython 3.12; an int of this value has the same hash."""
_last_8_bytes = Struct(">24xQ").unpack
_two_bytes = Struct(">BH").pack
_four_bytes = Struct(">BI").pack


class ChunkScheme(NamedTuple):
    """How chunks are hashed. Two caches have the same hash for a chunk only if their schemes are equal."""

    algorithm: str = BLAKE3
    chunk_tokens: int = 256
    seed: int = 0
    """The "previous hash" of the first chunk for `builtin`, `builtin_none` and `sha256_cbor`; LMCache derives
    it from PYTHONHASHSEED. 0 for `blake3`, which has its own start."""


class ChunkSpace(NamedTuple):
    """The space in which a chunk hash is unique: scheme, model and cache salt."""

    scheme: ChunkScheme
    model: str = ""
    """The model's name in LMCache (vLLM's `--model`, often a path); "" if the protocol has none."""
    salt: str = ""
    """The request's cache salt."""


def chunk_key(name: bytes) -> ChunkKey:
    """The key of a chunk with this 32-byte `blake3` name. Raises ValueError for any other length."""
    if len(name) != 32:
        raise ValueError(f"a BLAKE3 chunk hash has 32 bytes, this one has {len(name)}")
    return _key_of(name)


class ChunkKeys(Sequence[ChunkKey]):
    """One key per full chunk of a prompt, computed at the first access. Mutable: `computed` grows.

    An incomplete last chunk has no key. Takes about 5 us per chunk of 256 tokens, and 2.5 us for an
    `array("I")`, which needs no conversion to bytes (bench/micro_chunks.py). Compares as a sequence of keys.
    """

    __slots__ = ("_hash_next", "_ids", "_last", "_tokens", "computed", "names")

    def __init__(self, token_ids: Sequence[int], scheme: ChunkScheme) -> None:
        start, self._hash_next = _chain(scheme)
        self._ids = token_ids
        self._tokens = scheme.chunk_tokens
        self._last: bytes | int = start
        self.computed: list[ChunkKey] = []
        """The keys computed so far."""
        self.names: list[bytes] = []
        """The 32-byte hashes of `computed`, for `blake3` only."""

    def compute(self, count: int) -> None:
        """Compute the first `count` keys, or all keys if there are fewer."""
        computed, tokens, hash_next, last = self.computed, self._tokens, self._hash_next, self._last
        for index in range(len(computed), min(count, len(self))):
            last = hash_next(last, self._ids[index * tokens : (index + 1) * tokens])
            if isinstance(last, bytes):
                self.names.append(last)
                computed.append(_key_of(last))
            else:
                computed.append(last)
        self._last = last

    def tail(self, last_id: int) -> ChunkKey:
        """The key of the chunk that ends with `last_id`, the prompt's last token. It need not be full."""
        self.compute(len(self))
        ids = (*self._ids[len(self) * self._tokens :], last_id)
        last = self._hash_next(self._last, ids)
        return _key_of(last) if isinstance(last, bytes) else last

    def __len__(self) -> int:
        return len(self._ids) // self._tokens

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkKey]: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | list[ChunkKey]:
        if isinstance(index, slice):
            chosen = range(*index.indices(len(self)))
            if chosen:
                self.compute(max(chosen[0], chosen[-1]) + 1)
            return [self.computed[number] for number in chosen]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.compute(index + 1)
        return self.computed[index]

    def __iter__(self) -> Iterator[ChunkKey]:
        self.compute(len(self))
        return iter(self.computed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChunkKeys({len(self)} chunks)"


class PromptChunks:
    """The chunk keys of one prompt, in any scheme. Mutable: caches the keys of each scheme.

    `token_ids` are the prompt's ids without the last one, which no cache serves; `last_id` is the last one,
    if it is known. Ids are unsigned 32-bit; others raise OverflowError when their chunk is hashed. Keeps a
    reference to the ids, so use it for one decision only.
    """

    __slots__ = ("_made", "last_id", "token_ids")

    def __init__(self, token_ids: Sequence[int], last_id: int | None = None) -> None:
        self.token_ids = token_ids
        self.last_id = last_id
        self._made: dict[ChunkScheme, ChunkKeys] = {}

    def keys(self, scheme: ChunkScheme) -> ChunkKeys:
        """The keys in one scheme. Raises ValueError for an unknown algorithm or a chunk size below 1."""
        made = self._made.get(scheme)
        if made is None:
            ids = self.token_ids
            if isinstance(ids, PromptIds):  # a slice of `PromptIds` costs as much as a chunk's hash
                ids = ids.flat()
            made = self._made[scheme] = ChunkKeys(ids, scheme)
        return made

    def tail(self, scheme: ChunkScheme) -> tuple[int, ChunkKey] | None:
        """The chunk with the prompt's last token: its tokens without the last one, and its key; or None.

        LMCache in the engine stores a prompt's last chunk although it is not full (`save_unfull_chunk`), and
        finds it for an equal prompt only: the key covers the whole prompt. A full last chunk is found in the
        same way. LMCache's servers (`blake3`) have full chunks only, so there is no tail.
        """
        if self.last_id is None or scheme.algorithm == BLAKE3:
            return None
        keys = self.keys(scheme)
        usable = len(self.token_ids) - len(keys) * scheme.chunk_tokens
        return (usable, keys.tail(self.last_id)) if usable else None


def chunk_keys(token_ids: Sequence[int], scheme: ChunkScheme) -> list[ChunkKey]:
    """The keys of all full chunks of `token_ids`, in order. Raises ValueError for an unknown algorithm."""
    return list(ChunkKeys(token_ids, scheme))


def chunk_names(token_ids: Sequence[int], scheme: ChunkScheme) -> list[bytes]:
    """The 32-byte `blake3` hashes of all full chunks. Raises ValueError for other algorithms."""
    if scheme.algorithm != BLAKE3:
        raise ValueError(f"chunks have 32-byte hashes with {BLAKE3} only, not with {scheme.algorithm!r}")
    keys = ChunkKeys(token_ids, scheme)
    keys.compute(len(keys))
    return keys.names


_HashNext: TypeAlias = Callable[..., bytes | int]
"""(hash of the previous chunk, token ids of a chunk) -> hash of the chunk."""


def _chain(scheme: ChunkScheme) -> tuple[bytes | int, _HashNext]:
    """The start of the hash chain, and the function that continues it."""
    if scheme.chunk_tokens < 1:
        raise ValueError(f"a chunk has at least one token, not {scheme.chunk_tokens}")
    if scheme.algorithm == BLAKE3:
        return _BLAKE3_START, _blake3_next
    hash_next = {
        BUILTIN: _builtin_next,
        BUILTIN_NONE: _builtin_none_next,
        SHA256_CBOR: _sha256_cbor_next,
    }.get(scheme.algorithm)
    if hash_next is None:
        raise ValueError(f"unknown chunk hash algorithm {scheme.algorithm!r}")
    return scheme.seed, hash_next


def _key_of(name: bytes) -> ChunkKey:
    key: int
    (key,) = _last_8_bytes(name)
    return key


def _blake3_next(parent: bytes, ids: Sequence[int]) -> bytes:
    # A slice of an array is a copy, so it may be swapped in place.
    words = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    if byteorder == "little":
        words.byteswap()
    return blake3(parent + words.tobytes()).digest()


def _builtin_next(parent: int, ids: Sequence[int]) -> int:
    return hash((parent, tuple(ids), ()))


def _builtin_none_next(parent: int, ids: Sequence[int]) -> int:
    return hash((parent, tuple(ids), _HASH_OF_NONE))


def _sha256_cbor_next(parent: int, ids: Sequence[int]) -> int:
    # An array of three items: a number, an array of numbers, an empty array (RFC 8949, shortest forms).
    numbers = b"".join(map(_cbor_number, ids))
    body = b"\x83" + _cbor_number(parent) + _cbor_head(0x80, len(ids)) + numbers + b"\x80"
    return int.from_bytes(sha256(body).digest()[:8], "big")


def _cbor_number(number: int) -> bytes:
    """The CBOR of a number from 0 to 2**64 - 1. Token ids mostly have two or four bytes."""
    if 0xFF < number <= 0xFFFF:
        return _two_bytes(0x19, number)
    if 0xFFFF < number <= 0xFFFFFFFF:
        return _four_bytes(0x1A, number)
    return _cbor_head(0, number)


def _cbor_head(kind: int, number: int) -> bytes:
    """The head of a CBOR item: `kind` is its major type, shifted; `number` is below 2**64."""
    if 0 <= number < 24:
        return bytes((kind | number,))
    for extra, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes((kind | extra,)) + number.to_bytes(size, "big")
    raise OverflowError(number)
