"""Measure a hot prompt that no worker can reuse, in virtual time.

    python bench/hot_prompt.py [--drafter] [--seeds 8] [--load 0.5 --load 0.8] [--json]

All requests begin with the same 6,000 tokens, and differ in the 700 after them. The four simulated workers
serve a Mamba hybrid in blocks of 528 tokens that keeps states only where prompts end. The blocks with full
attention say that the beginning is held, and no request hits anything. A router that believes them sends
everything to the workers that "hold" the prompt. The goal is a mean latency of at most 1.1 of round robin's
with each strategy, every request being a session of its own, at each load and in the mean over the seeds.

With `--drafter` the workers have full attention and an EAGLE-style drafter, and drop the last block of each
hit. The goal is that the map is in use at least 99% of the time.

The gateway's router, cost model, history, event ledgers, cache map, learning from answers and audit place the
requests; the engines are those of the simulated worker, with their events. No figure depends on the machine.
The load is the share of the fleet's time that the prompts need if nothing is found in a cache. The first
requests come one after another, so that few workers hold the prompt when the traffic begins, and every
figure counts all requests after them.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from statistics import fmean

from msgspec.structs import replace

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import KEY_TOKENS, BlockKey, PromptKeys, adapter_space, block_keys, token_keys
from kvroute.caches.tracker import held_tokens, with_rules
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.map_trust import MapTrust
from kvroute.index.prefix_index import PrefixIndex
from kvroute.metrics import Metrics
from kvroute.relay.feedback import PredictionAudit
from kvroute.request.plan import RequestPlan
from kvroute.request.record import Usage
from kvroute.routing.audit import Audit
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.reports import LastUnits
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import CacheMap, CachePlace, ExactPrompt, Needs, NoMap, RouteQuery, Tokens
from kvroute.sim.cache import Chain
from kvroute.sim.engine import EngineRequest
from kvroute.sim.fleet import FleetRequest, SimFleet
from kvroute.sim.groups import GroupedCache, GroupedEngine
from kvroute.sim.options import SimOptions
from kvroute.wire.vllm import EventBatch, KvEvent

STRATEGIES = ("roundrobin", "prefixaware", "kvaware", "session")
WORKERS = 4
HOT_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 6000, 700, 8
MOST_OF_ROUND_ROBIN = 1.1
IN_USE = 0.99
QUIET, QUIET_S = 4, 2.0
"""Requests one after another before the others, and the time between them."""
MODEL = "model"


def worker_options(drafter: bool) -> SimOptions:
    if drafter:
        return SimOptions(capacity_tokens=400_000, drafted_tokens=3)
    groups = ("mamba:528", "mamba:528", "mamba:528", "full_attention:528")
    return SimOptions(capacity_tokens=400_000, kv_groups=groups, keeps_junctions=False)


def engine_of(options: SimOptions) -> GroupedEngine:
    layout = options.layout
    assert layout is not None
    cache = GroupedCache(
        options.pool_blocks(options.capacity_tokens), layout.unit, record=True, layout=layout
    )
    return GroupedEngine(cache, options.timing)


@dataclass(slots=True, eq=False)
class HotRequest(FleetRequest):
    """A request with the token ids of its prompt and answer."""

    ids: array[int] = field(default_factory=lambda: array("I"))


class GroupedFleet(SimFleet):
    """A fleet whose engines write token ids into their events."""

    def _place(self, request: FleetRequest) -> None:
        assert isinstance(request, HotRequest)
        request.worker = worker = self.placement.place(request, self.now)
        chain = Chain(request.keys, request.ids)
        self.engines[worker].add(
            EngineRequest(chain, request.prompt_tokens, request.output_tokens, owner=request)
        )
        if not self._busy[worker]:
            self._start_iteration(worker)


class GroupedCaches:
    """The cache map of `kvaware`, from the engines' events. It is the `Feedback` of the audit, too.

    Mutable: by `apply`, `judged` and `distrust`. The map of a worker that the audit distrusts is read again
    after `reread_s`, as the gateway does.
    """

    def __init__(self, workers: int) -> None:
        self._index = PrefixIndex()
        self._ledgers = [Ledger(self._index, number) for number in range(workers)]
        self._chunks = ChunkIndex()
        self._last_units = LastUnits(self._index.unit)
        self._index.drops = self._last_units.slots
        self._reread_s = KvEventsOptions().reread_s
        self._unused_until: dict[int, float] = {}
        self.now = 0.0
        self.unused_s = 0.0
        """Time in which a map was not used, summed over the workers."""

    def apply(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        for _ in self._ledgers[worker].apply(EventBatch(now, list(events))):
            pass

    def refresh(self, force: bool) -> bool:
        return True

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        slot = worker.index
        if self._unused_until.get(slot, 0.0) > self.now:
            return (CachePlace(slot, 0, MapTrust.NONE, "audit"),)
        return (with_rules(CachePlace(slot, 0, MapTrust.WHOLE), self._index),)

    def match(self, prompt: ExactPrompt) -> Mapping[int, Tokens]:
        return held_tokens(self._index, self._chunks, lambda _: True, prompt)

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        return self._index.holds(slot, keys, tokens)

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        return self._index.has_end(slot, keys)

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        return prompt.keys

    def answered(
        self, worker: Worker, rank: int, model: str, prompt: ExactPrompt, sent: float, cached: int | None
    ) -> None:
        """Nothing: all events arrive."""

    def judged(self, slot: int, tokens: Tokens, cached_tokens: int, has_drafter: bool) -> bool:
        return self._last_units.reported(slot, tokens, cached_tokens)

    def distrust(self, worker: Worker, rank: int, why: str) -> None:
        self._unused_until[worker.index] = self.now + self._reread_s
        self.unused_s += self._reread_s


class Gateway:
    """The gateway's router with what it learns from answers, as the placement of a fleet."""

    def __init__(self, strategy: str, engines: Sequence[GroupedEngine]) -> None:
        self.caches = GroupedCaches(len(engines)) if strategy == "kvaware" else None
        caches: CacheMap = self.caches or NoMap()
        self.router = Router(RoutingOptions(strategy=strategy), caches=caches)
        self.workers = [
            Worker(
                WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}"),
                state=HealthState.HEALTHY,
                facts=WorkerFacts(
                    capacity_tokens=engine.cache.capacity_tokens, block_size=engine.cache.block_size
                ),
                index=number,
            )
            for number, engine in enumerate(engines)
        ]
        for worker in self.workers:
            self.router.worker_joined(worker)
        self.view = FleetView(MODEL, tuple(self.workers), 1)
        self.audit = PredictionAudit(Audit(), Metrics(), self.caches, self.router.reports)
        self.open: dict[FleetRequest, tuple[RequestPlan, Dispatch]] = {}
        self.promised = 0

    def place(self, request: FleetRequest, now: float) -> int:
        assert isinstance(request, HotRequest)
        if self.caches is not None:
            self.caches.now = now
        query = query_of(request, now, self.router.strategy(MODEL).needs)
        decision = self.router.decide(query, self.view)
        first = decision.ranking[0]
        plan = RequestPlan(b"POST", b"/v1/completions", b"", MODEL, (), query, decision)
        self.open[request] = plan, self.router.dispatch(query, decision, first, now)
        self.promised += first.matched_tokens
        return first.worker.index

    def first_token(self, request: FleetRequest, now: float) -> None:
        self.open[request][1].first_token(now)

    def finished(self, request: FleetRequest, now: float) -> None:
        plan, dispatch = self.open.pop(request)
        if self.caches is not None:
            self.caches.now = now
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        self.audit.answered(plan, plan.decision.ranking[0], usage)
        dispatch.finish(now)

    def events(self, worker: int, events: Sequence[KvEvent], now: float) -> None:
        if self.caches is not None:
            self.caches.apply(worker, events, now)


def query_of(request: HotRequest, now: float, needs: Needs) -> RouteQuery:
    query = RouteQuery(
        MODEL,
        now,
        tokens=request.prompt_tokens,
        session_key=f"session {request.conversation}",
        fingerprint=request.conversation,
    )
    if needs not in (Needs.PROMPT, Needs.TOKENS):
        return query
    prompt = request.ids[: request.prompt_tokens - 1]
    keys = token_keys(prompt, adapter_space(None).seed)
    prompts = (PromptKeys(keys, request.prompt_tokens, float(KEY_TOKENS)),)
    exact = (ExactPrompt(request.prompt_tokens, keys, PromptChunks(prompt)),)
    return replace(query, prompts=prompts, exact=exact if needs is Needs.TOKENS else ())


@dataclass(frozen=True)
class Figures:
    """Mean latency of the requests, in seconds; tokens that the gateway promised and the engines found; the
    requests of each worker; the share of the time in which the maps of all workers were in use."""

    latency_s: float
    promised: int
    cached: int
    requests: list[int]
    used: float


def measure(strategy: str, *, drafter: bool, load: float, requests: int, seed: int) -> Figures:
    chooser = Random(f"hot prompt {seed}")
    options = worker_options(drafter)
    engines = [engine_of(options) for _ in range(WORKERS)]
    gateway = Gateway(strategy, engines)
    fleet = GroupedFleet(engines, gateway)
    hot = tokens(chooser, HOT_TOKENS)
    size = engines[0].cache.layout.hash_size  # type: ignore[attr-defined]
    prompt_s = options.timing.iteration_s(HOT_TOKENS + OWN_TOKENS, (HOT_TOKENS + OWN_TOKENS) ** 2 / 2, 0)
    at = 0.0
    for number in range(QUIET + requests):
        ids = hot + tokens(chooser, OWN_TOKENS + ANSWER_TOKENS)
        keys = block_keys(ids.tobytes(), block_bytes=4 * size, seed=0)
        request = HotRequest(
            keys, HOT_TOKENS + OWN_TOKENS, ANSWER_TOKENS, conversation=chooser.getrandbits(60), ids=ids
        )
        at += QUIET_S if number < QUIET else chooser.expovariate(load * WORKERS / prompt_s)
        fleet.submit(request, at)
    fleet.run()
    counted = sorted(fleet.done, key=lambda each: each.arrival_s)[QUIET:]
    unused_s = 0.0 if gateway.caches is None else gateway.caches.unused_s
    return Figures(
        fmean(each.finished_s - each.arrival_s for each in counted),
        gateway.promised,
        sum(each.cached_tokens for each in fleet.done),
        [sum(each.worker == number for each in counted) for number in range(WORKERS)],
        max(0.0, 1.0 - unused_s / fleet.now),
    )


def tokens(chooser: Random, count: int) -> array[int]:
    return array("I", chooser.choices(range(50_000), k=count))


def mean_of(found: Sequence[Figures]) -> Figures:
    return Figures(
        fmean(each.latency_s for each in found),
        sum(each.promised for each in found),
        sum(each.cached for each in found),
        [sum(each.requests[number] for each in found) for number in range(WORKERS)],
        fmean(each.used for each in found),
    )


@dataclass(frozen=True)
class Row:
    """The figures of a strategy at a load, over all seeds. `ratio`: its mean latency, of round robin's."""

    strategy: str
    load: float
    figures: Figures
    ratio: float
    met: bool

    def __str__(self) -> str:
        found = self.figures
        return (
            f"load {self.load:.2f} {self.strategy:12} mean {found.latency_s:6.3f} s, {self.ratio:.2f} of "
            f"roundrobin, promised {found.promised}, cached {found.cached}, requests {found.requests}, "
            f"map in use {found.used:.4f}: {'met' if self.met else 'MISSED'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", action="store_true")
    parser.add_argument("--load", type=float, action="append", help="repeatable; default 0.5, 0.8 and 0.9")
    parser.add_argument("--requests", type=int, default=400, help="of each seed")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--strategy", action="append", choices=STRATEGIES[1:])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    strategies = options.strategy or (STRATEGIES[2:3] if options.drafter else STRATEGIES[1:])
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows: list[Row] = []
    for load in options.load or (0.5, 0.8, 0.9):
        means = {
            strategy: mean_of(
                [
                    measure(
                        strategy, drafter=options.drafter, load=load, requests=options.requests, seed=seed
                    )
                    for seed in seeds
                ]
            )
            for strategy in (STRATEGIES[0], *strategies)
        }
        for strategy, found in means.items():
            ratio = found.latency_s / means[STRATEGIES[0]].latency_s
            met = found.used >= IN_USE if options.drafter else ratio <= MOST_OF_ROUND_ROBIN
            rows.append(Row(strategy, load, found, ratio, met))
            if not options.json:
                print(rows[-1], flush=True)
    if options.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=2)
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
