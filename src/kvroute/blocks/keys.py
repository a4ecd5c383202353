"""Chained block keys: equal keys mean equal content *and* equal prefix.

An engine's own block hash is opaque and per worker (`ExternalBlockHash` in `wire`); a `BlockKey`
is ours, and the two are never mixed.
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
"""64-bit xxh3, chained through its seed."""

BLOCK_BYTES = 64
"""Bytes of prompt per block of the approximate view: about 16 tokens of English text at 4 bytes a
token, and exactly 16 token ids (4 bytes each), so that texts and ids share one granularity."""

BYTES_PER_TOKEN = 4.0
"""What a token of text is taken to weigh until `usage` of real answers says better."""


@dataclass(frozen=True, slots=True)
class CacheSpace:
    """What must agree before two equal prompts may share KV blocks.

    `model` is the served model *or LoRA adapter* name (vLLM hashes the adapter into every block),
    `salt` the request's `cache_salt` (vLLM 0.32, engine docs "cache_salt").
    """

    model: str
    salt: str = ""
    seed: int = field(init=False, repr=False, compare=False)
    """Start of the chain for this space."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", xxh3_64_intdigest(f"{self.model}\0{self.salt}".encode()))


GROUP_BLOCKS = 32
"""Blocks between two anchors."""
ANCHOR_BYTES = GROUP_BLOCKS * BLOCK_BYTES
"""Bytes of prompt between two anchors."""


def _slices(size: int, count: int) -> list[slice]:
    """`count` parts of `size`, one after the other."""
    return [slice(start, start + size) for start in range(0, count * size, size)]


_Bytes: TypeAlias = "bytes | memoryview[int]"


def _taking(parts: list[slice]) -> Callable[[_Bytes], Sequence[_Bytes]]:
    """What takes these parts of something."""
    if len(parts) > 1:
        return itemgetter(*parts)
    return lambda data: [data[part] for part in parts]


_READY_GROUPS = 32
_GROUPS = [_taking(_slices(ANCHOR_BYTES, groups)) for groups in range(_READY_GROUPS + 1)]
"""By their number: what takes so many groups from the beginning of something."""

_SHORT_BLOCKS = 16
"""Below it, and so before the first anchor, keys are made at once."""
LONG_BYTES = _SHORT_BLOCKS * BLOCK_BYTES
"""From here on `block_keys` gives `BlockKeys`."""


def _beginnings(block_bytes: int, count: int) -> list[slice]:
    """The first block, the first two, and so on."""
    return [slice(0, block_bytes * (block + 1)) for block in range(count)]


_BEGINNINGS = [_taking(_beginnings(BLOCK_BYTES, blocks)) for blocks in range(_SHORT_BLOCKS)]
"""By the number of blocks: what takes the beginnings of something."""


class BlockKeys(Sequence[BlockKey]):
    """One key per full block of `data`, which has one at least. The last is made at once: a prompt's own last
    key names it, and everybody asks for it. The others are made when they are first asked for.

    Key *i* depends on every byte before it, so two prompts share key *i* exactly when they share their
    first `(i + 1) * block_bytes` bytes (and the seed). A trailing partial block gets no key: engines
    cache full blocks only.

    The chain has an anchor every 32 blocks; a key is the hash of what lies between its anchor and its
    end, seeded with the anchor's own key. So one key of a 256 KB prompt costs the anchors before it
    (about 15 us for all of them, once) and 0.3 us, and a history that looks at a few keys pays for those.
    Equality is that of the keys. Holds `data`: for the time of one decision. Remembers the key that was asked
    for last: most are asked for twice.
    """

    __slots__ = ("_anchors", "_block_bytes", "_data", "_latest", "_latest_key", "_size")

    _skipped = 0
    """Bytes of the prompt before `_data`."""
    _latest: int | None
    _latest_key: BlockKey

    def __init__(self, data: bytes | memoryview, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> None:
        self._data = data
        self._block_bytes = block_bytes
        self._size = size = len(data) // block_bytes
        self._anchors = anchors = [seed]
        self._latest = last = size - 1
        groups = last // GROUP_BLOCKS
        if 0 < groups <= _READY_GROUPS and block_bytes == BLOCK_BYTES:
            # As `_anchor`. Each is seeded with the one before it: `anchors` are read as they grow.
            anchors.extend(map(xxh3_64_intdigest, _GROUPS[groups](memoryview(data)), anchors))
        elif groups:
            self._anchor(groups)
        self._latest_key = xxh3_64_intdigest(  # type: ignore[assignment]  # a `NewType` is a call
            data[groups * GROUP_BLOCKS * block_bytes : size * block_bytes], anchors[groups]
        )

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> BlockKey: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[BlockKey]: ...
    def __getitem__(self, place: int | slice) -> BlockKey | Sequence[BlockKey]:
        if place == -1:
            place = self._size - 1
        if place == self._latest:
            return self._latest_key
        if isinstance(place, slice):
            start, stop, step = place.indices(self._size)
            return (
                self._some(start, stop) if step == 1 else [self[index] for index in range(start, stop, step)]
            )
        if place < 0:
            place += self._size
        if not 0 <= place < self._size:
            raise IndexError(place)
        size, group, anchors = self._block_bytes, place // GROUP_BLOCKS, self._anchors
        if group >= len(anchors):
            self._anchor(group)
        key: BlockKey = xxh3_64_intdigest(  # type: ignore[assignment]  # a `NewType` is a call
            self._data[group * GROUP_BLOCKS * size : (place + 1) * size], anchors[group]
        )
        self._latest = place
        self._latest_key = key
        return key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._some(0, self._size))

    def group_ends(self) -> Sequence[BlockKey]:
        """Every 32nd key, from the 32nd on: the anchors, which cost less than other keys."""
        groups = self._size // GROUP_BLOCKS
        if groups >= len(self._anchors):
            self._anchor(groups)
        return cast("list[BlockKey]", self._anchors[1 : groups + 1])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BlockKeys({self._size} blocks)"

    def _anchor(self, group: int) -> None:
        """Make the anchors up to `group`."""
        anchors, size, hashed = self._anchors, GROUP_BLOCKS * self._block_bytes, xxh3_64_intdigest
        known = len(anchors) - 1
        # Views: to copy a group costs more than to hash it.
        rest, groups = memoryview(self._data)[known * size - self._skipped :], group - known
        if 0 < groups <= _READY_GROUPS and size == ANCHOR_BYTES:
            parts = _GROUPS[groups](rest)
        else:
            parts = [rest[part] for part in _slices(size, groups)]
        # Each is seeded with the one before it: `anchors` are read as they grow.
        anchors.extend(map(hashed, parts, islice(anchors, known, None)))

    def _some(self, start: int, stop: int) -> list[BlockKey]:
        """The keys from `start` to before `stop`."""
        keys: list[int] = []
        if start >= stop:
            return []
        self._anchor((stop - 1) // GROUP_BLOCKS)
        append, data, size, hashed = keys.append, memoryview(self._data), self._block_bytes, xxh3_64_intdigest
        skipped = self._skipped
        while start < stop:
            group = start // GROUP_BLOCKS
            first = group * GROUP_BLOCKS
            begin, seed = first * size - skipped, self._anchors[group]
            until = min(stop, first + GROUP_BLOCKS)
            for end in range((start + 1) * size - skipped, (until + 1) * size - skipped, size):
                append(hashed(data[begin:end], seed))
            start = until
        return cast("list[BlockKey]", keys)


_MOST_NOTED = 64


class KnownKeys(Struct, eq=False):
    """What is kept of the keys of a prompt's first `blocks` blocks, whole groups, for prompts that begin
    alike.

    `anchors` begin with the seed. `some` are other keys that were asked for, by place: most requests ask for
    those that the one before them asked for. Mutable: they are at most 64 and change; of those not before
    `blocks` nothing follows, they are one prompt's.
    """

    anchors: list[int]
    some: dict[int, int]

    @property
    def blocks(self) -> int:
        return (len(self.anchors) - 1) * GROUP_BLOCKS


class ContinuedKeys(BlockKeys):
    """The same keys of a prompt that begins like one whose keys are known: what is known is not hashed again,
    and its bytes are not there. `tail` are those behind it, `whole` gives all of them, for a key that nobody
    asked for before. With `notes_more`, what is asked for is kept in what is `known` of these."""

    __slots__ = ("_known", "_known_blocks", "_noted", "_skipped", "_whole")

    def __init__(
        self,
        known: KnownKeys,
        tail: bytes,
        whole: Callable[[], bytes],
        notes_more: bool = False,
    ) -> None:
        self._known = known
        self._known_blocks = blocks = known.blocks
        self._skipped = blocks * BLOCK_BYTES
        self._data = tail
        self._whole = whole
        self._noted = (
            {place: key for place, key in known.some.items() if place < blocks} if notes_more else None
        )
        self._block_bytes = BLOCK_BYTES
        self._size = blocks + len(tail) // BLOCK_BYTES
        self._anchors = known.anchors.copy()
        self._latest = None

    def known(self, blocks: int) -> KnownKeys:
        """What to keep of the first `blocks` keys, rounded down to whole groups; keys asked for later, too,
        where they are noted."""
        groups = blocks // GROUP_BLOCKS
        if groups >= len(self._anchors):
            self._anchor(groups)
        return KnownKeys(self._anchors[: groups + 1], {} if self._noted is None else self._noted)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        if place == -1:
            place = self._size - 1
        if place == self._latest:
            return self._latest_key
        if isinstance(place, slice):
            return super().__getitem__(place)
        if place < 0:
            place += self._size
        if not 0 <= place < self._size:
            raise IndexError(place)
        if place < self._known_blocks:
            key = self._before(place)
        else:
            group = place // GROUP_BLOCKS
            anchors, skipped = self._anchors, self._skipped
            if group >= len(anchors):
                self._anchor(group)
            begin = group * ANCHOR_BYTES - skipped
            key = xxh3_64_intdigest(self._data[begin : (place + 1) * BLOCK_BYTES - skipped], anchors[group])
        self._note(place, key)
        self._latest = place
        self._latest_key = key  # type: ignore[assignment]
        return key

    def _before(self, place: int) -> int:
        """A key of what is known."""
        group, after = divmod(place + 1, GROUP_BLOCKS)
        if not after:
            return self._anchors[group]
        some = self._known.some
        key = some.get(place)
        if key is None:
            self._read_whole()
            begin = group * ANCHOR_BYTES
            key = xxh3_64_intdigest(self._data[begin : (place + 1) * BLOCK_BYTES], self._anchors[group])
            if len(some) >= _MOST_NOTED:
                del some[next(iter(some))]
            some[place] = key
        return key

    def _note(self, place: int, key: int) -> None:
        noted = self._noted
        if noted is not None:
            if len(noted) >= _MOST_NOTED:
                del noted[next(iter(noted))]
            noted[place] = key

    def _read_whole(self) -> None:
        if self._skipped:
            self._data = self._whole()
            self._skipped = 0

    def _some(self, start: int, stop: int) -> list[BlockKey]:
        if start < min(stop, self._known_blocks):
            self._read_whole()
        keys = super()._some(start, stop)
        if keys:
            self._note(stop - 1, keys[-1])  # where a prompt that continues this one will be compared
        return keys


def block_keys(data: bytes, block_bytes: int = BLOCK_BYTES, seed: int = 0) -> BlockKeys | list[BlockKey]:
    """`data` as chained block keys: of a short prompt a list, because making its few keys costs less than
    being asked for some of them; of a longer one `BlockKeys`, which has the same."""
    blocks = len(data) // block_bytes
    if blocks >= _SHORT_BLOCKS:
        return BlockKeys(data, block_bytes, seed)
    if block_bytes == BLOCK_BYTES:
        beginnings = _BEGINNINGS[blocks](data)
    else:
        beginnings = [data[part] for part in _beginnings(block_bytes, blocks)]
    return list(map(xxh3_64_intdigest, beginnings, repeat(seed)))  # type: ignore[arg-type]


class PromptKeys(Struct, frozen=True, gc=False):
    """One prompt as the approximate view sees it.

    `tokens` is the estimated length of the whole prompt, `block_tokens` the estimated tokens in one
    of `keys`' blocks; both are estimates unless the prompt came as token ids.
    """

    keys: Sequence[BlockKey]
    tokens: int
    block_tokens: float


KEY_TOKENS: Final = 16
"""Tokens between two keys of a chain: vLLM's block on GPU, of which all other sizes are multiples."""


class Tier(IntEnum):
    """Where a block lies, fastest first."""

    GPU = 0
    L1 = 1
    """The worker's host memory."""
    L2 = 2
    """A slower or shared store behind it."""


_PLAIN: Final = CacheSpace("")

_blocks = struct.Struct(f"{KEY_TOKENS * 4}s").iter_unpack


def token_keys(token_ids: Sequence[int], seed: int) -> list[BlockKey]:
    """Chain `token_ids` into one key per full `KEY_TOKENS` tokens; a trailing rest gets none.

    `seed` starts the chain: `CacheSpace.seed`, or the last key of what comes before. Ids are unsigned
    32-bit; others raise OverflowError. About 0.2 us a key (bench/micro_events.py).
    """
    rest = len(token_ids) % KEY_TOKENS
    if rest:
        token_ids = token_ids[: len(token_ids) - rest]
    ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    key, digest = seed, xxh3_64_intdigest
    keys: list[int] = [key := digest(block, key) for (block,) in _blocks(ids.tobytes())]
    return keys  # type: ignore[return-value]  # a `NewType` is a call


def prompt_keys(token_ids: Sequence[int], space: CacheSpace) -> list[BlockKey]:
    """The keys of a prompt that a cache can serve: its last token is always computed, so it is left out."""
    return token_keys(token_ids[: max(0, len(token_ids) - 1)], space.seed)


def adapter_space(adapter: str | None, salt: str = "") -> CacheSpace:
    """The space of exact keys: LoRA name and salt, but no base model.

    A worker has one base model and its blocks are its own, so the model need not be in the keys; and its
    events do not say it.
    """
    return CacheSpace(adapter or "", salt) if adapter or salt else _PLAIN


def mixed_seed(key: int, extra: bytes) -> int:
    """`key` as the seed of a block whose content is more than its token ids (images, embeddings)."""
    return xxh3_64_intdigest(extra, key)
