"""kvroute's own router as a placement of the routing benchmark: the gateway's code in virtual time.

Strategies, costs, history, reservations and learning are the gateway's; with `kvaware` also the event ledgers
and the block index. `replicas` gateways get requests at random and receive each other's dispatches, first
tokens and ends after `sync_s`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from kvroute.blocks.chunks import ChunkKey, ChunkScheme, ChunkSpace, PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, PromptKeys, Tier, adapter_space, token_keys
from kvroute.caches.tracker import held_tokens
from kvroute.events.ledger import Ledger
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.index.prefix_index import PrefixIndex
from kvroute.lmcache.options import PrefetchOptions
from kvroute.routing.cache_value import CacheValue
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import (
    CacheMap,
    CachePlace,
    Candidate,
    ExactPrompt,
    NoMap,
    RouteDecision,
    RouteQuery,
    Tokens,
    prefetch_of,
)
from kvroute.sim.cache_tiers import TierChange
from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import TieredEngine, TierOptions
from kvroute.wire.vllm import BlockRemoved, BlockStored, EventBatch, KvEvent
from routing_baselines import BLOCK, Policy

TRUE_COSTS = {"token_us": 40.0, "context_token_ns": 0.75, "iteration_ms": 10.0}
"""The simulated engines' own."""

_SCALE = BLOCK // KEY_TOKENS
"""A block of the simulation goes through ledger and indexes as a block of this many times fewer tokens."""
_SCHEME = ChunkScheme(chunk_tokens=KEY_TOKENS)
_SPACE = ChunkSpace(_SCHEME)
_DOMAIN = (_SCHEME, "")


def _token_ids(keys: Sequence[int]) -> array[int]:
    """`KEY_TOKENS` token ids for each block; no other content of a block has them."""
    words = array("Q", (key for key in keys for _ in range(KEY_TOKENS // 2)))
    return array("I", words.tobytes())


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that one gateway has dispatched."""

    dispatch: Dispatch
    others: list[Dispatch] = field(default_factory=list)
    """The dispatches of the same request in the other gateways."""


class Gateway:
    """One gateway's router, with its own accounting of every worker's load."""

    def __init__(
        self,
        options: RoutingOptions,
        engines: Sequence[TieredEngine],
        caches: CacheMap | None = None,
        cache_value: CacheValue | None = None,
    ) -> None:
        self.router = Router(options, caches=caches or NoMap(), cache_value=cache_value)
        self.workers = [
            Worker(
                WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}"),
                state=HealthState.HEALTHY,
                facts=WorkerFacts(capacity_tokens=engine.cache.capacity * BLOCK, block_size=BLOCK),
                index=number,
            )
            for number, engine in enumerate(engines)
        ]
        for worker in self.workers:
            self.router.worker_joined(worker)
        self.view = FleetView("model", tuple(self.workers), 1)

    def account_peer(
        self, query: RouteQuery, decision: RouteDecision, chosen: Candidate, now: float
    ) -> Dispatch:
        """Account a dispatch of another gateway."""
        worker = self.workers[chosen.worker.index]
        own = Candidate(
            worker, chosen.score, chosen.matched_tokens, chosen.prefill_s, chosen.terms, chosen.match
        )
        return self.router.dispatch(query, decision, own, now, is_own=False)


class Kvroute(Policy):
    """kvroute with `prefixaware`, its default."""

    def __init__(
        self,
        seed: int,
        options: RoutingOptions | None = None,
        *,
        replicas: int = 1,
        sync_s: float = 0.0,
        prefetch: bool = False,
    ) -> None:
        super().__init__(seed)
        self.prefetch = prefetch
        self.prefetch_delay_s = PrefetchOptions().delay_s
        self.prefetches = 0
        self.options = options or RoutingOptions()
        self.replicas = replicas
        self.sync_s = sync_s
        self.gateways: list[Gateway] = []
        self.open: dict[FleetRequest, OpenRequest] = {}
        self.number = seed << 32
        self._messages: deque[tuple[float, Callable[[float], None]]] = deque()

    def attach(self, engines: Sequence[TieredEngine], tiers: TierOptions) -> None:
        super().attach(engines, tiers)
        options, caches = self.routing_options(), self.cache_map()
        self.gateways = [Gateway(options, engines, caches) for _ in range(self.replicas)]

    def routing_options(self) -> RoutingOptions:
        return self.options

    def cache_map(self) -> CacheMap | None:
        return None

    def query(self, request: FleetRequest, now: float) -> RouteQuery:
        self.number += 1
        keys = [BlockKey(key) for key in request.keys[: request.prompt_tokens // BLOCK]]
        return RouteQuery(
            "model",
            now,
            (PromptKeys(keys, request.prompt_tokens, float(BLOCK)),),
            request.prompt_tokens,
            session_key=str(request.conversation),
            fingerprint=xxh3_64_intdigest(self.number.to_bytes(8, "little")),
        )

    def place(self, request: FleetRequest, now: float) -> int:
        self._deliver(now)
        gateway = self.random.choice(self.gateways) if self.replicas > 1 else self.gateways[0]
        query = self.query(request, now)
        decision = gateway.router.decide(query, gateway.view)
        first = decision.ranking[0]
        opened = self.open[request] = OpenRequest(gateway.router.dispatch(query, decision, first, now))
        if self.prefetch:
            self._prefetch(request, first, now)
        if self._publishes:
            others = [other for other in self.gateways if other is not gateway]

            def deliver(then: float) -> None:
                opened.others = [other.account_peer(query, decision, first, then) for other in others]

            self._messages.append((now + self.sync_s, deliver))
        return first.worker.index

    def _prefetch(self, request: FleetRequest, chosen: Candidate, now: float) -> None:
        delay_s = self.prefetch_delay_s
        wanted = prefetch_of(chosen, server_known=True, delay_s=delay_s)
        if wanted is not None:
            self.prefetches += 1
            tiers, keys = self.engines[chosen.worker.index].tiers, request.keys[: wanted.tokens // BLOCK]
            tiers.store.schedule(now + delay_s, lambda at: tiers.prefetch(keys, at))

    def first_token(self, request: FleetRequest, now: float) -> None:
        self._deliver(now)
        opened = self.open[request]
        opened.dispatch.first_token(now)
        if self._publishes:
            self._messages.append((now + self.sync_s, lambda then: _first_tokens(opened, then)))

    def finished(self, request: FleetRequest, now: float) -> None:
        self._deliver(now)
        opened = self.open.pop(request)
        opened.dispatch.finish(now)
        if self._publishes:
            self._messages.append((now + self.sync_s, lambda then: _finish(opened, then)))

    @property
    def _publishes(self) -> bool:
        return self.replicas > 1 and self.sync_s < inf

    def _deliver(self, now: float) -> None:
        messages = self._messages
        while messages and messages[0][0] <= now:
            due, deliver = messages.popleft()
            deliver(due)


def _first_tokens(opened: OpenRequest, now: float) -> None:
    for dispatch in opened.others:
        dispatch.first_token(now)


def _finish(opened: OpenRequest, now: float) -> None:
    for dispatch in opened.others:
        dispatch.finish(now)


class SimulatedCaches:
    """The cache map of `kvaware`: GPU blocks from events, through ledgers, in the prefix index; LMCache's
    chunks from the servers' reports, in the chunk index. Mutable: by `apply`, `tier_changed` and
    `exact_prompt`."""

    def __init__(self, engines: Sequence[TieredEngine]) -> None:
        self._index = PrefixIndex()
        self._ledgers = [Ledger(self._index, number) for number in range(len(engines))]
        self._chunks = ChunkIndex()
        self._pool = ChunkHolder(Tier.L2, shared=True)
        self._memories = [ChunkHolder(Tier.L1) for _ in engines]
        self._chunk_of: dict[int, ChunkKey] = {}
        """LMCache's key of each block, known from the first request with it, before a server can store it."""
        for number, memory in enumerate(self._memories):
            self._chunks.attach(number, memory, (_DOMAIN,))
            self._chunks.attach(number, self._pool, (_DOMAIN,))

    def apply(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        for _ in self._ledgers[worker].apply(EventBatch(now, list(_in_small_blocks(events)))):
            pass

    def tier_changed(self, worker: int, change: TierChange) -> None:
        holder = self._pool if change.is_shared else self._memories[worker]
        named = self._chunk_of
        self._chunks.store(holder, _SPACE, [named[key] for key in change.stored])
        self._chunks.remove_all(holder, _SPACE, [named[key] for key in change.removed])

    def exact_prompt(self, request: FleetRequest) -> ExactPrompt:
        """The prompt with its token ids, for the `match` that follows."""
        ids = _token_ids(request.keys)
        self._chunk_of.update(zip(request.keys, PromptChunks(ids).keys(_SCHEME), strict=True))
        ids = ids[: (request.prompt_tokens - 1) // BLOCK * KEY_TOKENS]
        keys = token_keys(ids, adapter_space(None).seed)
        return ExactPrompt(request.prompt_tokens, keys, PromptChunks(ids), key_tokens=BLOCK)

    def refresh(self, force: bool) -> bool:
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return (CachePlace(worker.index, 0, MapTrust.WHOLE),)

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        found = held_tokens(self._index, self._chunks, lambda _: True, prompt)
        return {slot: Tokens(*(tokens * _SCALE for tokens in held)) for slot, held in found.items()}

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        return self._index.holds(slot, keys, tokens // _SCALE)

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        return self._index.has_end(slot, keys)

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        return prompt.keys


def _in_small_blocks(events: Sequence[KvEvent]) -> Iterator[KvEvent]:
    for event in events:
        if isinstance(event, BlockStored):
            names = [_number(name) for name in event.block_hashes]
            yield BlockStored(
                block_hashes=list(event.block_hashes),
                parent_block_hash=event.parent_block_hash,
                token_ids=list(_token_ids(names)),
                block_size=KEY_TOKENS,
                medium=event.medium,
            )
        elif isinstance(event, BlockRemoved):
            yield BlockRemoved(list(event.block_hashes), medium=event.medium)
        else:
            yield event


def _number(name: object) -> int:
    assert isinstance(name, int)
    return name


class KvrouteAware(Kvroute):
    """kvroute with `kvaware`."""

    wants_events = True
    wants_tiers = True

    def routing_options(self) -> RoutingOptions:
        tiers = self.tiers
        kvaware = {
            "tiers": {
                "token_bytes": tiers.token_bytes,
                "l1_gb_s": tiers.l1_bytes_s / 1e9,
                "l2_gb_s": tiers.l2_worker_bytes_s / 1e9,
                "l2_store_gb_s": tiers.l2_bytes_s / 1e9,
                "l2_latency_ms": tiers.l2_latency_s * 1e3,
            }
        }
        given: dict[str, Any] = self.options.model_dump(exclude_unset=True)
        return RoutingOptions.model_validate(given | {"strategy": "kvaware", "kvaware": kvaware})

    def cache_map(self) -> CacheMap:
        self.caches = SimulatedCaches(self.engines)
        return self.caches

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        self.caches.apply(worker, events, now)

    def tier_changed(self, worker: int, change: TierChange, now: float) -> None:
        self.caches.tier_changed(worker, change)

    def query(self, request: FleetRequest, now: float) -> RouteQuery:
        return replace(super().query(request, now), exact=(self.caches.exact_prompt(request),))
