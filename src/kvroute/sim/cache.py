"""The paged prefix cache of simulated engines.

It behaves like vLLM's block pool (0.32, v1/core/block_pool.py). Full blocks are found by a
chained key. Blocks of finished sequences stay cached until a new block needs the room. The least recently
freed sequence is evicted first, and its last blocks before its first ones. If two sequences compute the same
content, the cache holds two copies, with an event for each when it is stored and when it is removed.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvroute.sim.prompts import MEDIA_TOKENS
from kvroute.wire.vllm import AllBlocksCleared, BlockRemoved, BlockStored, ExternalBlockHash, KvEvent


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The content of a sequence: prompt and answer, in order.

    `keys` has one chained key per full block. `token_ids` may be empty if no events are recorded. The other
    fields are copied into the events.
    """

    keys: Sequence[int]
    token_ids: array[int] | Sequence[int] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    media: Sequence[tuple[int, str]] = ()
    """The offset and the identifier of each image; `token_ids` has placeholders there."""

    def extra_keys(self, start: int, stop: int) -> list[object] | None:
        """What the hash of the block of these tokens covers besides their ids, as vLLM 0.32 shows it."""
        extra: list[object] = [self.lora_name] if self.lora_name else []
        extra += [
            [identifier, at - start]
            for at, identifier in self.media
            if at < stop and at + MEDIA_TOKENS > start
        ]
        if start == 0 and self.cache_salt:
            extra.append(self.cache_salt)
        return extra or None


class Block:
    """One block. `key` is None until the block is full. Mutable: changed by the cache only."""

    __slots__ = ("key", "refs")

    def __init__(self) -> None:
        self.key: int | None = None
        self.refs = 1


@dataclass(slots=True, eq=False)
class PagedCache:
    """`capacity` blocks of `block_size` tokens. Mutable: changed by its own methods only.

    With `record` events are collected until `take_events`. `byte_hashes` writes hashes as 32 bytes instead of
    64-bit ints (vLLM: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0).
    """

    capacity: int
    block_size: int
    record: bool = False
    byte_hashes: bool = False
    lookahead: int = 0
    """Tokens after each block that its key covers too; then `Chain.keys` are such keys (vLLM 0.33, EAGLE)."""
    _by_key: dict[int, Block] = field(default_factory=dict)
    _copies: dict[int, list[Block]] = field(default_factory=dict)
    _idle: OrderedDict[Block, None] = field(default_factory=OrderedDict)
    _empty: int = field(init=False)
    _events: list[KvEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._empty = self.capacity

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` could return now, with evictions."""
        return self._empty + len(self._idle)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of prompts that fit in at the same time."""
        return self.capacity * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that running sequences hold, 0 to 1."""
        return 1.0 - max(0, self.available) / self.capacity

    @property
    def held_keys(self) -> set[int]:
        """A copy of the keys of all full blocks; for tests."""
        return set(self._by_key)

    def match(self, keys: Sequence[int], limit: int) -> int:
        """Number of leading keys that are cached, at most `limit`."""
        by_key = self._by_key
        for position in range(min(limit, len(keys))):
            if keys[position] not in by_key:
                return position
        return min(limit, len(keys))

    def idle_among(self, keys: Sequence[int], count: int) -> int:
        """Number of blocks among the first `count` keys that no sequence uses: to take them costs room.

        The cache must hold a block for each key.
        """
        by_key = self._by_key
        return sum(by_key[keys[position]].refs == 0 for position in range(count))

    def take(self, keys: Sequence[int], count: int) -> list[Block]:
        """Add a reference to the blocks of the first `count` keys, which must be cached. Returns the
        blocks."""
        blocks = [self._by_key[keys[position]] for position in range(count)]
        for block in blocks:
            if block.refs == 0:
                del self._idle[block]
            block.refs += 1
        return blocks

    def allocate(self, count: int) -> list[Block]:
        """Return `count` new blocks; evicts the blocks that are idle for longest. The caller checks
        `available`."""
        blocks = []
        for _ in range(count):
            if self._empty > 0:
                self._empty -= 1
            else:
                self._evict()
            blocks.append(Block())
        return blocks

    def store(self, blocks: Sequence[Block], chain: Chain, start: int, stop: int) -> None:
        """Add the full blocks `blocks[start:stop]` to the cache, and announce them in one event."""
        keys = chain.keys
        for position in range(start, stop):
            key, block = keys[position], blocks[position]
            block.key = key
            if self._by_key.setdefault(key, block) is not block:
                self._copies.setdefault(key, []).append(block)
        if self.record and stop > start:
            self._announce(chain, start, stop, run_start=start)

    def reannounce(self, chain: Chain, count: int) -> None:
        """Announce `count` blocks again from the start (vLLM 0.32, kv_cache_report_mode "full")."""
        if self.record and count:
            self._announce(chain, 0, count, run_start=0)

    def free(self, blocks: Sequence[Block]) -> None:
        """Drop a sequence's references to its blocks, given in order. Its last block is evicted first."""
        idle = self._idle
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                if block.key is None:
                    self._empty += 1
                else:
                    idle[block] = None
        self._evict_surplus()

    def clear(self) -> bool:
        """Remove all blocks. Returns False and changes nothing while sequences run, as vLLM's reset does."""
        if self.available != self.capacity:
            return False
        self._by_key.clear()
        self._copies.clear()
        self._idle.clear()
        self._empty = self.capacity
        if self.record:
            self._events.append(AllBlocksCleared())
        return True

    def resize(self, capacity: int) -> None:
        """Change the capacity. Surplus blocks are evicted now, or when their sequences free them."""
        self._empty += capacity - self.capacity
        self.capacity = capacity
        self._evict_surplus()

    def take_events(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def external_hash(self, key: int) -> ExternalBlockHash:
        """The hash of this key's block in events."""
        return key.to_bytes(32, "big") if self.byte_hashes else key

    def _evict_surplus(self) -> None:
        while self._empty < 0 and self._idle:
            self._evict()
            self._empty += 1

    def _evict(self) -> None:
        block, _ = self._idle.popitem(last=False)
        key = block.key
        assert key is not None  # only full blocks are idle
        copies = self._copies.get(key)
        if copies is None:
            del self._by_key[key]
        else:
            if self._by_key[key] is block:
                self._by_key[key] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[key]
        if self.record:
            self._events.append(BlockRemoved([self.external_hash(key)], medium="GPU", group_idx=0))

    def _announce(self, chain: Chain, start: int, stop: int, *, run_start: int) -> None:
        size = self.block_size
        extra = [chain.extra_keys(position * size, (position + 1) * size) for position in range(start, stop)]
        self._events.append(
            BlockStored(
                block_hashes=[self.external_hash(key) for key in chain.keys[start:stop]],
                parent_block_hash=self.external_hash(chain.keys[run_start - 1]) if run_start else None,
                token_ids=list(chain.token_ids[start * size : stop * size]),
                block_size=size,
                lora_id=chain.lora_id,
                medium="GPU",
                lora_name=chain.lora_name,
                extra_keys=extra,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                session_id=chain.session_id,
                lookahead_token_ids=self._lookahead_of(chain, start, stop) if self.lookahead else None,
            )
        )

    def _lookahead_of(self, chain: Chain, start: int, stop: int) -> list[list[int]]:
        ends = [(position + 1) * self.block_size for position in range(start, stop)]
        return [list(chain.token_ids[end : end + self.lookahead]) for end in ends]


@dataclass(slots=True, eq=False)
class TierReports:
    """The times at which an LMCache server reports changes to its coordinator. Mutable.

    A change is reported immediately, but at least `interval_s` after the report before
    (`--coordinator-event-flush-interval`, 1 s by default; v1/mp_coordinator/cache_events.py).
    """

    interval_s: float
    _next_s: float = 0.0
    _is_due: bool = False

    def report_time(self, now: float) -> float:
        """When a change at time `now` is reported. Call it in order of time."""
        if self._is_due and now >= self._next_s:
            self._next_s += self.interval_s
            self._is_due = False
        if now < self._next_s:
            self._is_due = True
            return self._next_s
        self._next_s = now + self.interval_s
        return now
