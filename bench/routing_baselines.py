"""Placements for the routing benchmark: the published policies of other routers.

The policies are simple re-implementations from their descriptions, with their default settings and blocks of
512 tokens. A policy that reads figures of engines reads them without delay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.fleet.load import Reservation, WorkerLoad
from kvroute.routing.cost import TierLoad
from kvroute.sim.cache_tiers import TierChange
from kvroute.sim.fleet import FleetRequest
from kvroute.sim.tiers import TieredEngine, TierOptions
from kvroute.wire.vllm import BlockRemoved, BlockStored, KvEvent

BLOCK = 512


class Policy:
    """Base of a placement; its methods do nothing. The benchmark calls `attach` once, before the first
    request."""

    wants_events = False
    wants_tiers = False
    """The policy gets LMCache's reports; other policies read the tiers directly."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.engines: Sequence[TieredEngine] = ()
        self.tiers = TierOptions()

    def attach(self, engines: Sequence[TieredEngine], tiers: TierOptions) -> None:
        self.engines = engines
        self.tiers = tiers

    @property
    def size(self) -> int:
        return len(self.engines)

    def place(self, request: FleetRequest, now: float) -> int:
        raise NotImplementedError

    def first_token(self, request: FleetRequest, now: float) -> None:
        """Not needed."""

    def finished(self, request: FleetRequest, now: float) -> None:
        """Not needed."""

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        """Not needed."""

    def tier_changed(self, worker: int, change: TierChange, now: float) -> None:
        """Not needed."""

    def least(self, costs: Sequence[float]) -> int:
        best = min(costs)
        return self.random.choice([worker for worker, cost in enumerate(costs) if cost == best])


class RoundRobin(Policy):
    turn = -1

    def place(self, request: FleetRequest, now: float) -> int:
        self.turn += 1
        return self.turn % self.size


class Least(Policy):
    """Fewest requests in flight."""

    def attach(self, engines: Sequence[TieredEngine], tiers: TierOptions) -> None:
        super().attach(engines, tiers)
        self.in_flight = [0] * self.size

    def place(self, request: FleetRequest, now: float) -> int:
        worker = self.choose(request, now)
        self.in_flight[worker] += 1
        return worker

    def choose(self, request: FleetRequest, now: float) -> int:
        return self.least(self.in_flight)

    def finished(self, request: FleetRequest, now: float) -> None:
        self.in_flight[request.worker] -= 1


class SessionHash(Policy):
    def place(self, request: FleetRequest, now: float) -> int:
        return xxh3_64_intdigest(request.conversation.to_bytes(8, "little"), 7) % self.size


class _Where:
    """The workers that hold each block, as bit masks."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._copies: dict[tuple[int, int], int] = {}

    def add(self, worker: int, keys: Sequence[Any]) -> None:
        for key in keys:
            self.masks[key] = self.masks.get(key, 0) | 1 << worker

    def count(self, worker: int, keys: Sequence[Any], step: int) -> None:
        for key in keys:
            copies = self._copies.get((worker, key), 0) + step
            if copies:
                self._copies[worker, key] = copies
                self.masks[key] = self.masks.get(key, 0) | 1 << worker
            else:
                del self._copies[worker, key]
                self.masks[key] &= ~(1 << worker)
                if not self.masks[key]:
                    del self.masks[key]

    def apply(self, worker: int, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.count(worker, event.block_hashes, 1)
            elif isinstance(event, BlockRemoved):
                self.count(worker, event.block_hashes, -1)

    def extents(self, keys: Sequence[int], limit: int, size: int, other: _Where | None = None) -> list[int]:
        """Leading blocks held per worker."""
        held = [0] * size
        alive = (1 << size) - 1
        masks = self.masks
        more = other.masks if other else {}
        for place in range(limit):
            key = keys[place]
            left = alive & (masks.get(key, 0) | more.get(key, 0))
            if left != alive:
                lost = alive & ~left
                for worker in range(size):
                    if lost >> worker & 1:
                        held[worker] = place
                alive = left
                if not alive:
                    return held
        for worker in range(size):
            if alive >> worker & 1:
                held[worker] = limit
        return held


def _limit(request: FleetRequest) -> int:
    return min(len(request.keys), (request.prompt_tokens - 1) // BLOCK)


class StackPrefix(Policy):
    """production-stack's prefixaware: a trie without eviction, random among the deepest matches."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.where = _Where()

    def place(self, request: FleetRequest, now: float) -> int:
        keys = request.keys[: request.prompt_tokens // BLOCK]
        held = self.where.extents(keys, len(keys), self.size)
        deepest = max(held)
        worker = self.random.choice([worker for worker in range(self.size) if held[worker] == deepest])
        self.where.add(worker, keys)
        return worker


def _first(node: int, worker: int) -> int:
    """The worker that comes first in the order of a node's hash map."""
    return xxh3_64_intdigest(f"{node}/{worker}".encode())


class SmgTree(Least):
    """sglang's gateway, cache_aware over HTTP: 0.3 / 64 / 1.5; its tree never evicts here.

    If several workers are at the node where a match ends, the policy takes the first one in that node's hash
    map (`prefix_match` in tree.rs): always the same one at a node, but different ones at different nodes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.where = _Where()

    def choose(self, request: FleetRequest, now: float) -> int:
        keys = request.keys[: request.prompt_tokens // BLOCK]
        loads = self.in_flight
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            worker = self.least(loads)
        else:
            held = self.where.extents(keys, len(keys), self.size)
            deepest = max(held)
            if deepest * BLOCK > 0.3 * request.prompt_tokens:
                node = keys[deepest - 1]
                worker = min((w for w in range(self.size) if held[w] == deepest), key=partial(_first, node))
            else:
                worker = self.least(loads)
        self.where.add(worker, keys)
        return worker


class Events(Policy):
    """Base of policies that follow the GPU events of workers."""

    wants_events = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.gpu = _Where()

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        self.gpu.apply(worker, events)


class SmgEvents(Events, Least):
    """The same policy over gRPC, where workers publish events: matches are the blocks on the GPUs."""

    def choose(self, request: FleetRequest, now: float) -> int:
        loads = self.in_flight
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return self.least(loads)
        held = self.gpu.extents(request.keys, _limit(request), self.size)
        deepest = max(held)
        if not deepest:
            return self.least(loads)
        holders = [worker for worker in range(self.size) if held[worker] == deepest]
        few = min(loads[worker] for worker in holders)
        return self.random.choice([worker for worker in holders if loads[worker] == few])


class StackKv(SessionHash):
    """production-stack's kvaware: the first worker whose CPU tier lacks at most 2,000 tokens, else the
    session's."""

    def place(self, request: FleetRequest, now: float) -> int:
        limit = _limit(request)
        for worker, engine in enumerate(self.engines):
            if engine.tiers.l1.run_end(request.keys, 0, limit) * BLOCK >= request.prompt_tokens - 2000:
                return worker
        return super().place(request, now)


class LlmD(Events):
    """llm-d's precise prefix scorer with prefix 2, queue 1, KV utilisation 1."""

    def place(self, request: FleetRequest, now: float) -> int:
        held = self.gpu.extents(request.keys, _limit(request), self.size)
        waiting = [engine.waiting for engine in self.engines]
        low, high = min(waiting), max(waiting)
        costs = []
        for worker, engine in enumerate(self.engines):
            queue = (high - waiting[worker]) / (high - low) if high > low else 1.0
            prefix = held[worker] * BLOCK / request.prompt_tokens
            costs.append(-(2 * prefix + queue + (1 - engine.cache.usage)))
        return self.least(costs)


class Dynamo(Events):
    """Dynamo's KV router: prefill blocks to compute, including queued ones, plus active blocks."""

    def attach(self, engines: Sequence[TieredEngine], tiers: TierOptions) -> None:
        super().attach(engines, tiers)
        self.queued = [0] * self.size
        self.active: list[dict[int, int]] = [{} for _ in engines]
        self.own: dict[FleetRequest, int] = {}

    def place(self, request: FleetRequest, now: float) -> int:
        keys = request.keys[: request.prompt_tokens // BLOCK]
        held = self.gpu.extents(request.keys, _limit(request), self.size)
        costs = []
        for worker in range(self.size):
            active = self.active[worker]
            new = sum(key not in active for key in keys)
            prefill = (self.queued[worker] + request.prompt_tokens) / BLOCK - held[worker]
            costs.append(max(prefill, 0.0) + len(active) + new)
        worker = self.least(costs)
        self.own[request] = request.prompt_tokens - held[worker] * BLOCK
        self.queued[worker] += self.own[request]
        for key in keys:
            self.active[worker][key] = self.active[worker].get(key, 0) + 1
        return worker

    def first_token(self, request: FleetRequest, now: float) -> None:
        self.queued[request.worker] -= self.own.pop(request)

    def finished(self, request: FleetRequest, now: float) -> None:
        active = self.active[request.worker]
        for key in request.keys[: request.prompt_tokens // BLOCK]:
            active[key] -= 1
            if not active[key]:
                del active[key]


class _Backlog(Events):
    """Base of policies that count queued prefill in seconds, at the true costs."""

    def attach(self, engines: Sequence[TieredEngine], tiers: TierOptions) -> None:
        super().attach(engines, tiers)
        self.loads = [WorkerLoad() for _ in engines]
        self.open: dict[FleetRequest, Reservation] = {}

    def prefill_s(self, request: FleetRequest, held: int) -> float:
        miss = request.prompt_tokens - held * BLOCK
        chunks = max(1, -(-miss // 8192))
        return miss * 40e-6 + 0.75e-9 * miss * (held * BLOCK + miss / 2) + 10e-3 * chunks

    def send(self, request: FleetRequest, worker: int, prefill_s: float, now: float) -> int:
        self.open[request] = self.loads[worker].reserve(
            now, prefill_s=prefill_s, tokens=request.prompt_tokens
        )
        return worker

    def first_token(self, request: FleetRequest, now: float) -> None:
        self.open[request].first_token(now)

    def finished(self, request: FleetRequest, now: float) -> None:
        self.open.pop(request).finish(now)


class Conductor(_Backlog):
    """Mooncake's conductor: least estimated TTFT, with all tiers and blocks from events."""

    def place(self, request: FleetRequest, now: float) -> int:
        held, loads = tier_loads(self, request, now, None)
        prefills = [self.prefill_s(request, blocks) for blocks in held]
        costs = [max(self.loads[w].wait(now), loads[w].ready_s) + prefills[w] for w in range(self.size)]
        worker = self.least(costs)
        return self.send(request, worker, prefills[worker], now)


class Shared(_Backlog):
    """Least backlog in front of one infinite cache (its engines are built that way): the bound."""

    wants_events = False

    def place(self, request: FleetRequest, now: float) -> int:
        held = self.engines[0].tiers.store.tier.run_end(request.keys, 0, _limit(request))
        worker = self.least([load.wait(now) for load in self.loads])
        return self.send(request, worker, self.prefill_s(request, held), now)


def tier_loads(
    policy: Events, request: FleetRequest, now: float, in_flight: _Where | None
) -> tuple[list[int], list[TierLoad]]:
    """Blocks in any tier by worker, and the time to fetch those that are not on its GPU."""
    keys, limit, tiers = request.keys, _limit(request), policy.tiers
    extents, loads = [], []
    block = BLOCK * tiers.token_bytes
    gpu = policy.gpu.extents(keys, limit, policy.size, in_flight)
    for worker, engine in enumerate(policy.engines):
        slow = engine.tiers
        near, far = slow.lookup(keys, gpu[worker], limit)
        ready = own = 0.0
        if near:
            own = near * block / tiers.l1_bytes_s
            ready = max(0.0, slow.from_l1.busy_until_s - now) + own
        if far:
            l2 = far * block / tiers.l2_worker_bytes_s
            busy = max(slow.from_store.busy_until_s, slow.store.link.busy_until_s)
            ready = max(ready, max(0.0, busy - now) + l2 + tiers.l2_latency_s)
            own += l2
        extents.append(gpu[worker] + near + far)
        loads.append(TierLoad(ready, own))
    return extents, loads


BASELINES: dict[str, Callable[[int], Policy]] = {
    "roundrobin": RoundRobin,
    "least": Least,
    "session": SessionHash,
    "stack-prefix": StackPrefix,
    "stack-kv": StackKv,
    "smg-tree": SmgTree,
    "smg-events": SmgEvents,
    "llm-d": LlmD,
    "dynamo": Dynamo,
    "conductor": Conductor,
    "shared": Shared,
}
