"""Asking the Redis behind LMCache's L2 which chunks of a prompt it has.

Redis evicts and expires without telling LMCache, so events alone would promise too much. The names of the
objects are known (LMCache 0.5.6, distributed/l2_adapters/native_connector_l2_adapter.py):
`<model>@<kv_rank, 8 hex digits>@<group, hex>@<chunk hash, hex>[@<cache salt>]`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import redis.asyncio
from redis.exceptions import RedisError

from kvroute.blocks.chunks import BLAKE3, ChunkKey, ChunkScheme, PromptChunks
from kvroute.clock import Clock
from kvroute.index.chunk_index import ChunkHolder
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.options import L2Options

log = logging.getLogger(__name__)

_FIRST_WINDOW: Final = 16
_WINDOW_GROWTH: Final = 4
_LARGEST_WINDOW: Final = 256
"""Chunks asked for in one command."""
_LOG_EVERY_S: Final = 30.0


class L2Reason(StrEnum):
    """Why Redis was not, or not fully, asked; bounded, so a metric label."""

    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """It answered with an error: authentication, a cluster that redirects, loading."""
    FAILED = "failed"
    """Asking failed on our side, which is a defect: the log has it."""


@dataclass(frozen=True, slots=True)
class L2Target:
    """Where a model's chunks are looked for. `parts` are (`kv_rank`, group) of the objects of a chunk."""

    holder: ChunkHolder
    scheme: ChunkScheme
    model: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class L2Answer:
    """What is there: for `ChunkIndex.match(probed=...)`. A pool that could not be asked is left out, and
    `reason` says why: for it, what events said stands."""

    held: MappingProxyType[ChunkHolder, frozenset[ChunkKey]]
    reason: L2Reason | None = None


@dataclass(slots=True)
class L2Counts:
    """Mutable; counted by its `RedisL2`."""

    lookups: int = 0
    asked: int = 0
    """Objects asked for."""
    remembered: int = 0
    """Chunks answered without asking."""
    failures: dict[L2Reason, int] = field(default_factory=lambda: dict.fromkeys(L2Reason, 0))


def object_name(model: str, kv_rank: int, group: int, chunk: bytes, salt: str) -> str:
    """How LMCache calls one object of a chunk in Redis."""
    name = f"{model}@{kv_rank:08x}@{group:x}@{chunk.hex()}"
    return f"{name}@{salt}" if salt else name


def targets_of(coordinator: Coordinator, pool_name: str) -> list[L2Target]:
    """What to look for in the pool of this name: each model that a joined worker may read from it. Pools that
    belong to one server alone count under their adapter's type."""
    found: dict[L2Target, None] = {}
    for instance in coordinator.instances():
        for pool in instance.pools.values():
            if pool.name == pool_name:
                for model in coordinator.models_of(instance, pool):
                    parts = tuple(pool.held.object_parts(model))
                    found[L2Target(pool.held.holder, instance.scheme, model.name, parts)] = None
    return [target for target in found if target.parts and target.scheme.algorithm == BLAKE3]


class RedisL2:
    """Batched EXISTS under a deadline, with a memory of recent answers. Mutable; touched from the event loop
    only. `aclose` it at the end.

    A lookup costs about 1 us a chunk that is remembered, and one round trip for the first 16 chunks that are
    not, for the next 64, and for each further 256, until nothing of them is there.
    """

    def __init__(self, options: L2Options, clock: Clock) -> None:
        if options.redis_url is None:
            raise ValueError("lmcache.l2.redis_url is not set")
        self.counts = L2Counts()
        self._options = options
        self._clock = clock
        # Waits for a connection end with the deadline of the lookup.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            options.redis_url.get_secret_value(),
            max_connections=options.connections,
            # What stands in the URL wins.
            password=options.redis_password.get_secret_value() if options.redis_password else None,
            timeout=None,
            socket_connect_timeout=2.0,
        )
        self._client = redis.asyncio.Redis(connection_pool=pool)
        self._recent: dict[int, bool] = {}
        """Chunk's key XOR the hash of what else it is asked for with -> whether it is there."""
        self._older: dict[int, bool] = {}
        self._turned = clock.now()
        self._logged = -_LOG_EVERY_S
        self._failing = False

    async def lookup(
        self, chunks: PromptChunks, salt: str, targets: Sequence[L2Target], first_token: int = 0
    ) -> L2Answer:
        """Which of the prompt's chunks from `first_token` on are there, at most `deadline_ms` later. Raises
        nothing but CancelledError."""
        self.counts.lookups += 1
        self._forget_old()
        held: dict[ChunkHolder, frozenset[ChunkKey]] = {}
        reason: L2Reason | None = None
        try:
            async with asyncio.timeout(self._options.deadline_ms / 1000):
                for target in targets:
                    there = await self._held(chunks, salt, target, first_token)
                    held[target.holder] = held.get(target.holder, frozenset()) | there
            self._failing = False
        except (TimeoutError, redis.exceptions.TimeoutError):
            # The client has time-outs of its own, for single steps of connecting.
            reason = self._failed(L2Reason.DEADLINE, "no answer in time")
        except (redis.exceptions.AuthenticationError, redis.exceptions.BusyLoadingError) as error:
            # Answers, though redis-py derives them from ConnectionError.
            reason = self._failed(L2Reason.REFUSED, type(error).__name__)
        except redis.exceptions.ConnectionError as error:
            reason = self._failed(L2Reason.UNREACHABLE, type(error).__name__)
        except (RedisError, OSError) as error:
            reason = self._failed(L2Reason.REFUSED, type(error).__name__)
        except Exception as error:  # noqa: BLE001 - a worse choice of worker, and never a failed request
            reason = self._failed(L2Reason.FAILED, type(error).__name__)
        return L2Answer(MappingProxyType(held), reason)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _held(
        self, chunks: PromptChunks, salt: str, target: L2Target, first_token: int
    ) -> frozenset[ChunkKey]:
        keys = chunks.keys(target.scheme)
        place = min(first_token // target.scheme.chunk_tokens, len(keys))
        window, there = _FIRST_WINDOW, set[ChunkKey]()
        while place < len(keys):
            stop = min(place + window, len(keys))
            keys.reach(stop)
            found = await self._window(keys.made[place:stop], keys.names[place:stop], salt, target)
            if not found:
                break
            there |= found
            place, window = stop, min(window * _WINDOW_GROWTH, _LARGEST_WINDOW)
        return frozenset(there)

    async def _window(
        self, keys: Sequence[ChunkKey], names: Sequence[bytes], salt: str, target: L2Target
    ) -> set[ChunkKey]:
        there: set[ChunkKey] = set()
        open_: list[tuple[ChunkKey, bytes]] = []
        asked_with = hash((target, salt))
        for key, name in zip(keys, names, strict=True):
            known = self._recall(key ^ asked_with)
            if known is None:
                open_.append((key, name))
            elif known:
                there.add(key)
        self.counts.remembered += len(keys) - len(open_)
        if open_:
            present = await self._ask([name for _, name in open_], salt, target)
            for (key, _), is_there in zip(open_, present, strict=True):
                self._remember(key ^ asked_with, is_there)
                if is_there:
                    there.add(key)
        return there

    async def _ask(self, names: Sequence[bytes], salt: str, target: L2Target) -> list[bool]:
        """One command says whether all are there, or none; only else each is asked for."""
        objects = [list(_objects(target, name, salt)) for name in names]
        self.counts.asked += len(names) * len(target.parts)
        count = await self._client.exists(*(each for some in objects for each in some))
        if count in (0, len(names) * len(target.parts)):
            return [count > 0] * len(names)
        async with self._client.pipeline(transaction=False) as pipeline:
            for some in objects:
                pipeline.exists(*some)
            counts = await pipeline.execute()
        return [each == len(target.parts) for each in counts]

    # Remembering: two generations, each of half the time, so that nothing has to be looked through

    def _recall(self, question: int) -> bool | None:
        known = self._recent.get(question)
        return self._older.get(question) if known is None else known

    def _remember(self, question: int, is_there: bool) -> None:
        if self._options.remember_s:
            if 2 * len(self._recent) >= self._options.remember_chunks:
                self._older, self._recent = self._recent, {}
            self._recent[question] = is_there

    def _forget_old(self) -> None:
        elapsed = self._clock.now() - self._turned
        if 2 * elapsed >= self._options.remember_s:
            self._older = self._recent if elapsed < self._options.remember_s else {}
            self._recent = {}
            self._turned = self._clock.now()

    def _failed(self, reason: L2Reason, what: str) -> L2Reason:
        """Counted; logged when it begins and then now and again, never with the URL or the server's words."""
        self.counts.failures[reason] += 1
        now = self._clock.now()
        if not self._failing or now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            log.warning("the Redis of lmcache.l2.redis_url was not asked: %s (%s)", reason, what)
        self._failing = True
        return reason


def _objects(target: L2Target, chunk: bytes, salt: str) -> Iterator[str]:
    for kv_rank, group in target.parts:
        yield object_name(target.model, kv_rank, group, chunk, salt)
