"""Asks the Redis behind LMCache's L2 which chunks of a prompt it holds.

Redis evicts and expires objects without a message to LMCache, so events alone report too many chunks. The
objects are named `<model>@<kv_rank, 8 hex digits>@<group, hex>@<chunk hash, hex>[@<cache salt>]` (LMCache
0.5.6, distributed/l2_adapters/native_connector_l2_adapter.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

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
"""Most chunks in one command."""
_LOG_EVERY_S: Final = 30.0


class L2Reason(StrEnum):
    """Why a lookup in Redis failed or stayed incomplete. A closed set, so it can be a metric label."""

    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    """Redis answered with an error: authentication, a cluster that redirects, loading."""
    FAILED = "failed"
    """Our own code failed, which is a defect; the log names the exception."""


@dataclass(frozen=True, slots=True)
class L2Target:
    """A model and the L2 pool in which to look up its chunks. `parts`: (`kv_rank`, group) of a chunk's
    objects."""

    holder: ChunkHolder
    scheme: ChunkScheme
    model: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class L2Answer:
    """The chunks that Redis holds, for `ChunkIndex.match(probed=...)`.

    A pool whose lookup failed is not in `chunks`, and `reason` says why: the index then uses the events'
    chunks.
    """

    chunks: MappingProxyType[ChunkHolder, frozenset[ChunkKey]]
    reason: L2Reason | None = None


@dataclass(slots=True)
class L2Counts:
    """Lookups since the start. Mutable: changed by `RedisL2`."""

    lookups: int = 0
    objects_queried: int = 0
    """Objects named in a command to Redis."""
    cached_chunks: int = 0
    """Chunks answered from the cache of recent answers."""
    failures: dict[L2Reason, int] = field(default_factory=lambda: dict.fromkeys(L2Reason, 0))


def object_name(model: str, kv_rank: int, group: int, chunk: bytes, salt: str) -> str:
    """LMCache's name in Redis for one object of a chunk."""
    name = f"{model}@{kv_rank:08x}@{group:x}@{chunk.hex()}"
    return f"{name}@{salt}" if salt else name


def targets_of(coordinator: Coordinator, pool_name: str) -> list[L2Target]:
    """One target for each model that a worker may read from the pool of this name.

    A pool that belongs to one server only has its adapter's type as its name.
    """
    targets: dict[L2Target, None] = {}
    for instance in coordinator.instances():
        for pool in instance.pools.values():
            if pool.name == pool_name:
                for model in coordinator.models_of(instance, pool):
                    parts = tuple(pool.chunks.object_parts(model))
                    targets[L2Target(pool.chunks.holder, instance.scheme, model.name, parts)] = None
    return [target for target in targets if target.parts and target.scheme.algorithm == BLAKE3]


class RedisL2:
    """Looks up chunks with batched EXISTS commands, under a deadline, with a cache of recent answers.

    A cached chunk costs about 1 us. The others cost one round trip for the first 16, one for the next 64 and
    one for each further 256, until a round trip finds none of its chunks. Mutable; used from the event loop
    only. The owner calls `aclose` at the end.
    """

    def __init__(self, options: L2Options, clock: Clock) -> None:
        if options.redis_url is None:
            raise ValueError("lmcache.l2.redis_url is not set")
        self.counts = L2Counts()
        self.problem: L2Reason | None = None
        """Why the last lookup that asked Redis failed; None if it succeeded."""
        self._options = options
        self._clock = clock
        tls: dict[str, Any] = {}
        if options.uses_tls and options.tls.is_set:
            files = options.tls
            tls = {
                # None: the default list of authorities.
                "ssl_ca_certs": str(files.ca_file) if files.ca_file is not None else None,
                "ssl_certfile": str(files.cert_file) if files.cert_file is not None else None,
                "ssl_keyfile": str(files.key_file) if files.key_file is not None else None,
                "ssl_check_hostname": True,  # redis 5 does not check it by default
                "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            }
        # No timeout of its own: `lookup` limits the wait for a free connection by its deadline.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            options.redis_url.get_secret_value(),
            max_connections=options.connections,
            # A password in the URL takes precedence.
            password=options.redis_password.get_secret_value() if options.redis_password else None,
            timeout=None,
            socket_connect_timeout=2.0,
            **tls,
        )
        self._client = redis.asyncio.Redis(connection_pool=pool)
        self._new_answers: dict[int, bool] = {}
        """Chunk key XOR hash of (target, salt) -> whether Redis holds the chunk."""
        self._old_answers: dict[int, bool] = {}
        self._rotated_at = clock.now()
        self._last_logged_at = -math.inf
        self._is_reported = False

    async def lookup(
        self, chunks: PromptChunks, salt: str, targets: Sequence[L2Target], first_token: int = 0
    ) -> L2Answer:
        """Which of the prompt's chunks from `first_token` on Redis holds. Takes at most `timeout_ms`.

        Raises only CancelledError; every other failure becomes the answer's `reason`.
        """
        self.counts.lookups += 1
        self._rotate_cache()
        present_by_holder: dict[ChunkHolder, frozenset[ChunkKey]] = {}
        reason: L2Reason | None = None
        queried = self.counts.objects_queried
        try:
            async with asyncio.timeout(self._options.timeout_ms / 1000):
                for target in targets:
                    present = await self._present_chunks(chunks, salt, target, first_token)
                    present_by_holder[target.holder] = (
                        present_by_holder.get(target.holder, frozenset()) | present
                    )
            if queried != self.counts.objects_queried:  # otherwise Redis was not asked
                self._succeeded()
        except (TimeoutError, redis.exceptions.TimeoutError):
            # redis.exceptions.TimeoutError: the client has its own timeout for connecting.
            reason = self._failed(L2Reason.DEADLINE, "no answer in time")
        except (redis.exceptions.AuthenticationError, redis.exceptions.BusyLoadingError) as error:
            # Redis did answer, although redis-py derives these errors from ConnectionError.
            reason = self._failed(L2Reason.REFUSED, type(error).__name__)
        except redis.exceptions.ConnectionError as error:
            reason = self._failed(L2Reason.UNREACHABLE, type(error).__name__)
        except (RedisError, OSError) as error:
            reason = self._failed(L2Reason.REFUSED, type(error).__name__)
        except Exception as error:  # noqa: BLE001 - costs a worse choice of worker, must not fail a request
            reason = self._failed(L2Reason.FAILED, type(error).__name__)
        return L2Answer(MappingProxyType(present_by_holder), reason)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def _present_chunks(
        self, chunks: PromptChunks, salt: str, target: L2Target, first_token: int
    ) -> frozenset[ChunkKey]:
        keys = chunks.keys(target.scheme)
        position = min(first_token // target.scheme.chunk_tokens, len(keys))
        window, present = _FIRST_WINDOW, set[ChunkKey]()
        while position < len(keys):
            stop = min(position + window, len(keys))
            keys.compute(stop)
            present_in_window = await self._window(
                keys.computed[position:stop], keys.names[position:stop], salt, target
            )
            if not present_in_window:
                break
            present |= present_in_window
            position, window = stop, min(window * _WINDOW_GROWTH, _LARGEST_WINDOW)
        return frozenset(present)

    async def _window(
        self, keys: Sequence[ChunkKey], names: Sequence[bytes], salt: str, target: L2Target
    ) -> set[ChunkKey]:
        present: set[ChunkKey] = set()
        uncached: list[tuple[ChunkKey, bytes]] = []
        query_hash = hash((target, salt))
        for key, name in zip(keys, names, strict=True):
            cached_answer = self._cached_answer(key ^ query_hash)
            if cached_answer is None:
                uncached.append((key, name))
            elif cached_answer:
                present.add(key)
        self.counts.cached_chunks += len(keys) - len(uncached)
        if uncached:
            answers = await self._exists([name for _, name in uncached], salt, target)
            for (key, _), is_there in zip(uncached, answers, strict=True):
                self._store_answer(key ^ query_hash, is_there)
                if is_there:
                    present.add(key)
        return present

    async def _exists(self, names: Sequence[bytes], salt: str, target: L2Target) -> list[bool]:
        """Whether Redis holds each chunk. One EXISTS if all objects or none exist, else one per chunk."""
        objects = [list(_objects(target, name, salt)) for name in names]
        self.counts.objects_queried += len(names) * len(target.parts)
        existing = await self._client.exists(
            *(object_name for object_names in objects for object_name in object_names)
        )
        if existing in (0, len(names) * len(target.parts)):
            return [existing > 0] * len(names)
        async with self._client.pipeline(transaction=False) as pipeline:
            for object_names in objects:
                pipeline.exists(*object_names)
            counts = await pipeline.execute()
        return [count == len(target.parts) for count in counts]

    # Cache of recent answers. It has two generations, each valid for half of `remember_s`, so that expired
    # answers are dropped as a whole instead of one by one.

    def _cached_answer(self, query: int) -> bool | None:
        answer = self._new_answers.get(query)
        return self._old_answers.get(query) if answer is None else answer

    def _store_answer(self, query: int, is_there: bool) -> None:
        if self._options.remember_s:
            if 2 * len(self._new_answers) >= self._options.remember_chunks:
                self._old_answers, self._new_answers = self._new_answers, {}
            self._new_answers[query] = is_there

    def _rotate_cache(self) -> None:
        elapsed = self._clock.now() - self._rotated_at
        if 2 * elapsed >= self._options.remember_s:
            self._old_answers = self._new_answers if elapsed < self._options.remember_s else {}
            self._new_answers = {}
            self._rotated_at = self._clock.now()

    def notes(self) -> list[str]:
        """A note for `/ready` while lookups fail."""
        return [] if self.problem is None else [f"L2: lookups in Redis fail: {self.problem}"]

    def _succeeded(self) -> None:
        self.problem = None
        if self._is_reported:
            self._is_reported = False
            log.info("lookups in the Redis of lmcache.l2.redis_url succeed again")

    def _failed(self, reason: L2Reason, detail: str) -> L2Reason:
        """Count a failure, and log at most one in 30 s.

        The URL and the text of the server's error are not logged, because they may contain the password.
        """
        self.counts.failures[reason] += 1
        self.problem = reason
        now = self._clock.now()
        # Also after a success: a Redis at its deadline answers some lookups and misses others.
        if now - self._last_logged_at >= _LOG_EVERY_S:
            self._last_logged_at = now
            self._is_reported = True
            log.warning("lookup in the Redis of lmcache.l2.redis_url failed: %s (%s)", reason, detail)
        return reason


def _objects(target: L2Target, chunk: bytes, salt: str) -> Iterator[str]:
    for kv_rank, group in target.parts:
        yield object_name(target.model, kv_rank, group, chunk, salt)
