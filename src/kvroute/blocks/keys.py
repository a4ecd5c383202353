"""Chained block keys: two blocks with equal keys have equal content *and* an equal prefix.

An engine's own block hash is opaque and differs per worker (`ExternalBlockHash` in `wire`). A `BlockKey` is
kvroute's own hash. The two are never mixed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice, repeat
from operator import itemgetter
from typing import Final, NewType, TypeAlias, cast, overload

from msgspec import Struct
from xxhash import xxh3_64_intdigest

BlockKey = NewType("BlockKey", int)
"""A 64-bit xxh3 hash, chained: the key of the preceding part is the seed."""

BLOCK_BYTES = 64
"""Prompt bytes per block of the route history."""
# About 16 tokens of English text at 4 bytes per token, and exactly 16 token ids of 4 bytes: texts and token
# ids have the same granularity.

BYTES_PER_TOKEN = 4.0
"""Assumed bytes per token of text until the `usage` of answers gives a better figure."""


@dataclass(frozen=True, slots=True)
class CacheSpace:
    """A key space: equal prompts share KV blocks only within one space."""

    model: str
    """The name of the served model *or LoRA adapter*: vLLM hashes the adapter into every block."""
    salt: str = ""
    """The request's `cache_salt` (vLLM 0.32, engine docs "cache_salt")."""
    seed: int = field(init=False, repr=False, compare=False)
    """The start of the key chain in this space."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", xxh3_64_intdigest(f"{self.model}\0{self.salt}".encode()))


GROUP_BLOCKS = 32
"""Blocks between two anchors."""
ANCHOR_BYTES = GROUP_BLOCKS * BLOCK_BYTES
"""Bytes of prompt between two anchors."""


def _slices(size: int, count: int) -> list[slice]:
    """`count` consecutive slices of `size`."""
    return [slice(start, start + size) for start in range(0, count * size, size)]


_Bytes: TypeAlias = "bytes | memoryview[int]"


def _slicer(slices: list[slice]) -> Callable[[_Bytes], Sequence[_Bytes]]:
    """A function that returns these slices of its argument."""
    if len(slices) > 1:
        return itemgetter(*slices)
    return lambda data: [data[piece] for piece in slices]


_PREPARED_GROUPS = 32
_GROUP_SLICERS = [_slicer(_slices(ANCHOR_BYTES, groups)) for groups in range(_PREPARED_GROUPS + 1)]
"""By number of groups: returns the first groups of its argument."""

_SHORT_BLOCKS = 16
"""A prompt of fewer blocks has no anchor, and all of its keys are computed immediately."""
LONG_BYTES = _SHORT_BLOCKS * BLOCK_BYTES
"""From this size on `block_keys` returns `BlockKeys`."""


def _prefix_slices(block_bytes: int, count: int) -> list[slice]:
    """The first block, the first two blocks, and so on."""
    return [slice(0, block_bytes * (block + 1)) for block in range(count)]


_PREFIX_SLICERS = [_slicer(_prefix_slices(BLOCK_BYTES, blocks)) for blocks in range(_SHORT_BLOCKS)]
"""By number of blocks: returns the prefixes of its argument that end at a block."""


class BlockKeys(Sequence[BlockKey]):
    """The chained keys of `data`, one per full block; each key is computed at its first access.

    Two prompts share key *i* exactly if they share the seed and their first `(i + 1) * block_bytes` bytes. A
    trailing partial block has no key, because engines cache full blocks only. `data` has at least one block.
    One key of a 256 KB prompt costs 0.3 us, and once about 15 us for all anchors. Compares as a sequence of
    keys. Keeps a reference to `data`, so use it for one decision only.
    """

    # The chain has an anchor every 32 blocks. A key is the hash of the bytes from its anchor to its end, with
    # the anchor's key as the seed. So a reader of a few keys pays for these and for the anchors only. The
    # last key is computed immediately: it identifies the prompt, and every caller reads it. The key that was
    # read last is cached: most keys are read twice. So are the last keys: a history reads those that are new
    # to it, and they are sent to the other processes.

    __slots__ = ("_anchors", "_block_bytes", "_data", "_latest", "_latest_key", "_size", "_tail")

    _skipped = 0
    """Number of prompt bytes before `_data`."""
    _latest: int | None
    """Index of the key that was read last."""
    _latest_key: BlockKey
    _tail: tuple[int, array[int]] | None
    """Index of the first one of the last keys, and these keys; None until they are read as a slice."""

    def __init__(self, data: bytes | memoryview, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> None:
        self._data = data
        self._block_bytes = block_bytes
        self._size = size = len(data) // block_bytes
        self._anchors = anchors = [seed]
        self._latest = last = size - 1
        self._tail = None
        groups = last // GROUP_BLOCKS
        if 0 < groups <= _PREPARED_GROUPS and block_bytes == BLOCK_BYTES:
            # `_add_anchors` inlined. The seed of each anchor is the anchor before it: `map` reads `anchors`
            # while they grow.
            anchors.extend(map(xxh3_64_intdigest, _GROUP_SLICERS[groups](memoryview(data)), anchors))
        elif groups:
            self._add_anchors(groups)
        self._latest_key = xxh3_64_intdigest(  # type: ignore[assignment]  # a `NewType` is a call
            data[groups * GROUP_BLOCKS * block_bytes : size * block_bytes], anchors[groups]
        )

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockKey]: ...
    def __getitem__(self, index: int | slice) -> BlockKey | Sequence[BlockKey]:
        if index == -1:
            index = self._size - 1
        if index == self._latest:
            return self._latest_key
        if isinstance(index, slice):
            start, stop, step = index.indices(self._size)
            if step == 1:
                return self._range(start, stop)
            return [self[number] for number in range(start, stop, step)]
        if index < 0:
            index += self._size
        if not 0 <= index < self._size:
            raise IndexError(index)
        size, group, anchors = self._block_bytes, index // GROUP_BLOCKS, self._anchors
        if group >= len(anchors):
            self._add_anchors(group)
        key: BlockKey = xxh3_64_intdigest(  # type: ignore[assignment]  # a `NewType` is a call
            self._data[group * GROUP_BLOCKS * size : (index + 1) * size], anchors[group]
        )
        self._latest = index
        self._latest_key = key
        return key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._range(0, self._size))

    def group_ends(self) -> Sequence[BlockKey]:
        """Every 32nd key, starting with the 32nd. These are the anchors, which cost less than other keys."""
        groups = self._size // GROUP_BLOCKS
        if groups >= len(self._anchors):
            self._add_anchors(groups)
        return cast("list[BlockKey]", self._anchors[1 : groups + 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BlockKeys({self._size} blocks)"

    def _add_anchors(self, group: int) -> None:
        """Compute the anchors up to `group`."""
        anchors, size, hashed = self._anchors, GROUP_BLOCKS * self._block_bytes, xxh3_64_intdigest
        anchored = len(anchors) - 1
        # Views: to copy a group costs more than to hash it.
        unhashed, groups = memoryview(self._data)[anchored * size - self._skipped :], group - anchored
        if 0 < groups <= _PREPARED_GROUPS and size == ANCHOR_BYTES:
            parts = _GROUP_SLICERS[groups](unhashed)
        else:
            parts = [unhashed[piece] for piece in _slices(size, groups)]
        # The seed of each anchor is the anchor before it: `map` reads `anchors` while they grow.
        anchors.extend(map(hashed, parts, islice(anchors, anchored, None)))

    def _range(self, start: int, stop: int) -> list[BlockKey]:
        """The keys from `start` to before `stop`."""
        if start >= stop:
            return []
        if stop < self._size:
            return self._hashed(start, stop)
        tail = self._tail
        if tail is not None and start >= tail[0]:
            return cast("list[BlockKey]", tail[1][start - tail[0] :].tolist())
        keys = self._hashed(start, stop if tail is None else tail[0])
        if tail is not None:
            keys += cast("list[BlockKey]", tail[1].tolist())
        self._tail = start, array("Q", keys)  # 8 bytes a key, for as long as the request lasts
        return keys

    def _hashed(self, start: int, stop: int) -> list[BlockKey]:
        """Compute the keys from `start` to before `stop`; at least one."""
        keys: list[int] = []
        self._add_anchors((stop - 1) // GROUP_BLOCKS)
        append, data, size, hashed = keys.append, memoryview(self._data), self._block_bytes, xxh3_64_intdigest
        skipped = self._skipped
        while start < stop:
            group = start // GROUP_BLOCKS
            group_start = group * GROUP_BLOCKS
            begin, seed = group_start * size - skipped, self._anchors[group]
            until = min(stop, group_start + GROUP_BLOCKS)
            for end in range((start + 1) * size - skipped, (until + 1) * size - skipped, size):
                append(hashed(data[begin:end], seed))
            start = until
        return cast("list[BlockKey]", keys)


_MOST_CACHED = 64


class PrefixKeys(Struct, eq=False):
    """Cached keys of a prompt's prefix, for later prompts with the same prefix.

    The prefix has `blocks` blocks, a whole number of groups. Mutable: `cached` changes.
    """

    anchors: list[int]
    """The seed, and the keys of the group ends."""
    cached: dict[int, int]
    """Index -> key, of at most 64 other keys that were read: most requests read the keys that the request
    before them read. Keys at or after `blocks` belong to one prompt only and are ignored."""

    @property
    def blocks(self) -> int:
        return (len(self.anchors) - 1) * GROUP_BLOCKS


class ContinuedKeys(BlockKeys):
    """As `BlockKeys`, for a prompt whose prefix has cached keys: the prefix is not hashed again.

    `tail` are the bytes after the prefix. `whole` returns all bytes of the prompt; it is called only for a
    key of the prefix that is not cached. With `records`, keys that are read are added to the result of
    `prefix`.
    """

    __slots__ = ("_cached_prefix", "_prefix_blocks", "_recorded", "_skipped", "_whole")

    def __init__(
        self,
        prefix: PrefixKeys,
        tail: bytes,
        whole: Callable[[], bytes],
        records: bool = False,
    ) -> None:
        self._cached_prefix = prefix
        self._prefix_blocks = blocks = prefix.blocks
        self._skipped = blocks * BLOCK_BYTES
        self._data = tail
        self._whole = whole
        self._recorded = (
            {index: key for index, key in prefix.cached.items() if index < blocks} if records else None
        )
        self._block_bytes = BLOCK_BYTES
        self._size = blocks + len(tail) // BLOCK_BYTES
        self._anchors = prefix.anchors.copy()
        self._latest = self._tail = None

    def prefix(self, blocks: int) -> PrefixKeys:
        """The keys of the first `blocks` blocks, rounded down to whole groups, for later prompts."""
        groups = blocks // GROUP_BLOCKS
        if groups >= len(self._anchors):
            self._add_anchors(groups)
        return PrefixKeys(self._anchors[: groups + 1], {} if self._recorded is None else self._recorded)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index == -1:
            index = self._size - 1
        if index == self._latest:
            return self._latest_key
        if isinstance(index, slice):
            return super().__getitem__(index)
        if index < 0:
            index += self._size
        if not 0 <= index < self._size:
            raise IndexError(index)
        if index < self._prefix_blocks:
            key = self._prefix_key(index)
        else:
            group = index // GROUP_BLOCKS
            anchors, skipped = self._anchors, self._skipped
            if group >= len(anchors):
                self._add_anchors(group)
            begin = group * ANCHOR_BYTES - skipped
            key = xxh3_64_intdigest(self._data[begin : (index + 1) * BLOCK_BYTES - skipped], anchors[group])
        self._record(index, key)
        self._latest = index
        self._latest_key = key  # type: ignore[assignment]
        return key

    def _prefix_key(self, index: int) -> int:
        """A key of the prefix."""
        group, after = divmod(index + 1, GROUP_BLOCKS)
        if not after:
            return self._anchors[group]
        cached = self._cached_prefix.cached
        key = cached.get(index)
        if key is None:
            self._load_whole()
            begin = group * ANCHOR_BYTES
            key = xxh3_64_intdigest(self._data[begin : (index + 1) * BLOCK_BYTES], self._anchors[group])
            if len(cached) >= _MOST_CACHED:
                del cached[next(iter(cached))]
            cached[index] = key
        return key

    def _record(self, index: int, key: int) -> None:
        recorded = self._recorded
        if recorded is not None:
            if len(recorded) >= _MOST_CACHED:
                del recorded[next(iter(recorded))]
            recorded[index] = key

    def _load_whole(self) -> None:
        if self._skipped:
            self._data = self._whole()
            self._skipped = 0

    def _range(self, start: int, stop: int) -> list[BlockKey]:
        if start < min(stop, self._prefix_blocks):
            self._load_whole()
        keys = super()._range(start, stop)
        if keys:
            self._record(stop - 1, keys[-1])  # a prompt that continues this one will be compared here
        return keys


def block_keys(data: bytes, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> BlockKeys | list[BlockKey]:
    """The chained keys of `data`: a list for a short prompt, `BlockKeys` for a longer one."""
    # To compute the few keys of a short prompt costs less than to compute them on demand.
    blocks = len(data) // block_bytes
    if blocks >= _SHORT_BLOCKS:
        return BlockKeys(data, block_bytes, seed)
    if block_bytes == BLOCK_BYTES:
        prefixes = _PREFIX_SLICERS[blocks](data)
    else:
        prefixes = list(map(data.__getitem__, _prefix_slices(block_bytes, blocks)))
    return list(map(xxh3_64_intdigest, prefixes, repeat(seed)))  # type: ignore[arg-type]


class PromptKeys(Struct, frozen=True, gc=False):
    """One prompt for the route history.

    `tokens` is the length of the whole prompt, `block_tokens` the number of tokens in one block of `keys`.
    Both are estimates, except for a prompt of token ids.
    """

    keys: Sequence[BlockKey]
    tokens: int
    block_tokens: float


KEY_TOKENS: Final = 16
"""Tokens per key: the size of vLLM's block on GPU. All other block sizes are multiples of it."""


class Tier(IntEnum):
    """The tier that holds a block, fastest first."""

    GPU = 0
    L1 = 1
    """The worker's CPU memory."""
    L2 = 2
    """A slower or shared store."""


_PLAIN: Final = CacheSpace("")

_blocks = struct.Struct(f"{KEY_TOKENS * 4}s").iter_unpack


def token_keys(token_ids: Sequence[int], seed: int) -> list[BlockKey]:
    """The chained keys of `token_ids`, one per full `KEY_TOKENS` tokens; a trailing rest has no key.

    `seed` is the start of the chain: `CacheSpace.seed`, or the key of the preceding block. Token ids are
    unsigned 32-bit; others raise OverflowError. About 0.2 us per key (bench/micro_events.py).
    """
    partial = len(token_ids) % KEY_TOKENS
    if partial:
        token_ids = token_ids[: len(token_ids) - partial]
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    key, digest = seed, xxh3_64_intdigest
    keys: list[int] = [key := digest(block, key) for (block,) in _blocks(ids.tobytes())]
    return keys  # type: ignore[return-value]  # a `NewType` is a call


def prompt_keys(token_ids: Sequence[int], space: CacheSpace) -> list[BlockKey]:
    """The keys of a prompt without its last token, which is always computed and never served from a cache."""
    return token_keys(token_ids[: max(0, len(token_ids) - 1)], space.seed)


def adapter_space(adapter: str | None, salt: str = "") -> CacheSpace:
    """The key space of exact keys: LoRA adapter and salt, without the base model."""
    # A worker has one base model and its blocks are its own, so keys need no model. KV events do not have it.
    return CacheSpace(adapter or "", salt) if adapter or salt else _PLAIN


def lookahead_seed(head: Sequence[int], seed: int) -> int:
    """The start of the key chain behind a prompt's first tokens `head`: see `lookahead_keys`."""
    return mixed_seed(seed, array("I", head).tobytes())


def lookahead_keys(token_ids: Sequence[int], seed: int, ahead: int) -> list[BlockKey]:
    """The keys of a prompt for workers whose block hashes also cover `ahead` tokens after each block.

    Key *i* covers the first `(i + 1) * KEY_TOKENS + ahead` tokens, as the engine's hash does: a block that
    was computed before another continuation has another key. `token_ids` is the whole prompt.
    """
    return token_keys(token_ids[ahead:], lookahead_seed(token_ids[:ahead], seed))


def mixed_seed(key: int, extra: bytes) -> int:
    """The seed of a block with content besides token ids (images, embeddings), from the key before it."""
    return xxh3_64_intdigest(extra, key)
