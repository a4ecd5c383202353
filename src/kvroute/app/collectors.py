"""Metrics that are read from fleet, router and cache map at a scrape.

A function without figures yields its families without samples: `declared_families` declares them this way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvroute.app.scaling import deletion_cost_metrics
from kvroute.blocks.keys import Tier
from kvroute.fleet.discovery.base import Discoverer
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import Ejection, HealthState
from kvroute.logs import failed_lines
from kvroute.metrics import Metrics
from kvroute.replicas.metrics import channel_metrics, link_metrics
from kvroute.routing.router import Router
from kvroute.routing.strategy import CacheMap
from kvroute.tallies import Gauges, counter, gauge

if TYPE_CHECKING:  # imported by a gateway with a map only: they load ZMQ and more
    from kvroute.events.ingest import StreamFigures
    from kvroute.index.chunk_index import ChunkIndexSize
    from kvroute.index.prefix_index import IndexSize
    from kvroute.lmcache.coordinator import CoordinatorCounts
    from kvroute.lmcache.l2_redis import L2Counts
    from kvroute.lmcache.membership import LMCacheServer
    from kvroute.lmcache.server_requests import PrefetchOutcome
    from kvroute.lmcache.tierd import FollowedDaemon


def count_tasks(metrics: Metrics) -> None:
    """Set the gauge of asyncio tasks; outside an event loop it keeps its value. O(tasks)."""
    with contextlib.suppress(RuntimeError):
        metrics.tasks.labels().value = float(len(asyncio.all_tasks()))


def fleet_gauges(fleet: Fleet, health: HealthMonitor, discoverer: Discoverer) -> Iterable[Metric]:
    """Metrics of workers, health probes and discovery."""
    workers = fleet.workers()
    yield gauge(
        "kvroute_worker_state",
        "1 for the current state of each worker.",
        ("worker", "state"),
        [((w.id, state.value), float(w.state is state)) for w in workers for state in HealthState],
    )
    yield gauge(
        "kvroute_worker_capacity_tokens",
        "KV cache capacity of each worker.",
        ("worker",),
        [((w.id,), float(w.capacity_tokens)) for w in workers],
    )
    yield counter(
        "kvroute_worker_fetched_tokens",
        "Prompt tokens that each worker got from other engines, by its own count, in a fleet with roles.",
        ("worker",),
        [((w.id,), float(w.facts.fetched.total)) for w in workers if fleet.has_roles],
    )
    yield counter(
        "kvroute_worker_probe_failures",
        "Health probes that failed.",
        ("worker",),
        [((worker,), float(n)) for worker, n in health.counts.probe_failures.items()],
    )
    yield counter(
        "kvroute_worker_ejections_held_back",
        "Ejections that fleet.health.max_ejected_share prevented.",
        (),
        [((), float(health.counts.held_back))],
    )
    yield gauge(
        "kvroute_workers_not_isolated",
        "Workers that get no requests because their vLLM may ignore `cache_salt` (server.isolation).",
        (),
        [((), float(sum(w.ejection is Ejection.NOT_ISOLATED for w in workers)))],
    )
    yield counter(
        "kvroute_discovery_errors",
        "Worker lists that could not be read or applied.",
        ("source",),
        [((source,), float(n)) for source, n in discoverer.errors().items()],
    )
    yield counter(
        "kvroute_discovery_shrinks_held_back",
        "Worker lists with far fewer workers than still answer, not applied until the source repeated them.",
        ("source",),
        [((source,), float(discoverer.shrinks[source])) for source in discoverer.kept()],
    )
    yield gauge(
        "kvroute_discovery_kept_workers",
        "Workers that a source no longer lists, kept until the source has repeated the shorter list.",
        ("source",),
        [((source,), float(n)) for source, n in discoverer.kept().items()],
    )


def load_gauges(fleet: Fleet, router: Router, now: float) -> Iterable[Metric]:
    """Metrics of each worker's load, and of the costs that routing assumes. `now` is `Clock.now()`."""
    workers = fleet.workers()
    yield gauge(
        "kvroute_worker_requests_in_flight",
        "Requests that were sent to each worker and have not finished.",
        ("worker",),
        [((w.id,), float(w.load.in_flight)) for w in workers],
    )
    waits = [((w.id,), w.load.wait(now)) for w in workers]  # it also removes completed prefills
    yield gauge(
        "kvroute_worker_requests_queued",
        "Requests in flight without a first token, on each worker.",
        ("worker",),
        [((w.id,), float(w.load.queued)) for w in workers],
    )
    yield gauge(
        "kvroute_worker_active_tokens",
        "Prompt tokens of the requests in flight on each worker.",
        ("worker",),
        [((w.id,), float(w.load.active_tokens)) for w in workers],
    )
    yield gauge(
        "kvroute_worker_queued_prefill_seconds",
        "Estimated prefill that a new request would wait for on each worker.",
        ("worker",),
        waits,
    )
    yield gauge(
        "kvroute_worker_foreign_requests",
        "Requests on each worker that no gateway of this fleet accounts for, by its last page of metrics.",
        ("worker", "state"),
        [
            ((w.id, state), float(count))
            for w in workers
            if (foreign := w.load.foreign) is not None
            for state, count in (("waiting", foreign.waiting), ("running", foreign.running))
        ],
    )
    models = sorted(fleet.catalog.bases)
    yield gauge(
        "kvroute_load_imbalance_ratio",
        "Active tokens of the busiest routable worker of a model, relative to the mean: 1 is even or idle.",
        ("model",),
        [((model,), _imbalance(fleet, model)) for model in models],
    )
    costs = {model: router.costs(model) for model in models}
    yield gauge(
        "kvroute_cost_seconds",
        "Costs that routing assumes on a worker of mean speed: for each missed prompt token, for each missed "
        "token and token before it, for each iteration, and the delay of decoding by each running token.",
        ("model", "part"),
        [
            ((model, part), seconds)
            for model, cost in costs.items()
            for part, seconds in (
                ("prefill_token", cost.token_s),
                ("context_token", cost.context_token_s),
                ("iteration", cost.iteration_s),
                ("running_token", cost.active_token_s),
            )
        ],
    )
    yield gauge(
        "kvroute_prefill_rate",
        "Prompt tokens per second that routing assumes for a short prompt on a worker of mean speed.",
        ("model",),
        [((model,), 1 / cost.token_s) for model, cost in costs.items() if cost.token_s],
    )
    yield gauge(
        "kvroute_costs_learned",
        "1 if the costs of the model are learned from first tokens, 0 if they are the configured ones.",
        ("model",),
        [((model,), float(router.has_learned(model))) for model in models],
    )
    discounts = router.reports.discounts
    yield gauge(
        "kvroute_match_share",
        "The share of the predicted tokens that counts, for workers whose reports contradict them, by the "
        "source of the predictions: the cache map, or the history of sent prompts.",
        ("worker", "source"),
        [
            ((w.id, source), shares[w.index])
            for source, shares in (("map", discounts.by_map), ("history", discounts.by_history))
            for w in workers
            if shares.get(w.index, 1.0) < 1.0
        ],
    )
    yield gauge(
        "kvroute_worker_slowness_ratio",
        "Learned duration of a prefill on each worker relative to the mean: above 1 for a slow worker.",
        ("model", "worker"),
        [((model, w.id), router.slowness(model, w)) for model in models for w in workers if w.serves(model)],
    )


def _imbalance(fleet: Fleet, model: str) -> float:
    """The largest number of active tokens among the model's routable workers, divided by their mean."""
    tokens = [load.active_tokens for load in fleet.view(model).loads]
    return max(tokens) * len(tokens) / sum(tokens) if any(tokens) else 1.0


def index_gauges(fleet: Fleet, router: Router) -> Iterable[Metric]:
    """Metrics of the route history."""
    size = router.index_size()
    yield gauge(
        "kvroute_index_blocks", "Different blocks in the prefix index.", (), [((), float(size.blocks))]
    )
    yield gauge("kvroute_index_bytes", "Estimated memory of the prefix index.", (), [((), float(size.bytes))])
    yield gauge(
        "kvroute_worker_index_blocks",
        "Blocks that each worker holds according to the prefix index.",
        ("worker",),
        [((w.id,), float(router.describe_worker(w)["tracked_blocks"])) for w in fleet.workers()],
    )

    yield counter(
        "kvroute_index_evicted_blocks",
        "Blocks evicted from each worker's part of the prefix index.",
        ("worker",),
        [((w.id,), float(router.evicted_blocks(w))) for w in fleet.workers()],
    )


class DeclaredFamilies(Collector):
    """Exports HELP and TYPE of the families that no other collector of `registry` has.

    So every family of the gateway is declared whatever is configured. Mutable: the first collection finds the
    absent families, which then stay the same.
    """

    def __init__(self, registry: CollectorRegistry, declared: Callable[[], Iterable[Metric]]) -> None:
        """`declared` yields all families that depend on the configuration."""
        self._registry = registry
        self._declared = declared
        self._absent: list[Metric] | None = None

    def collect(self) -> Iterable[Metric]:
        if self._absent is None:
            self._absent = []  # the registry calls this method again
            present = {family.name for family in self._registry.collect()}
            self._absent = [family for family in self._declared() if family.name not in present]
        return self._absent


def complete_families(registry: CollectorRegistry) -> None:
    """Register the log's figures, and the families that are still absent. Call it last."""
    registry.register(Gauges(_log_metrics))
    registry.register(DeclaredFamilies(registry, declared_families))


def _log_metrics() -> Iterable[Metric]:
    text = "Lines of the log that could not be written: the disk was full, or nobody read the pipe."
    yield counter("kvroute_log_lines_failed", text, (), [((), float(failed_lines()))])


def declared_families() -> Iterable[Metric]:
    """All families that depend on the configuration, without samples."""
    yield from map_metrics(None, {}, dropped_blocks=None)
    yield from stream_metrics(())
    yield tokenizing_metric({})
    yield next_turns_metric({})
    yield from lmcache_metrics(None, {})
    yield from coordinator_metrics((), None)
    yield shared_reports_metric({})
    yield prefetch_metric({})
    yield from l2_metrics(None)
    yield from tierd_metrics([])
    yield _tier_bandwidth(())
    yield from link_metrics(None)
    yield from channel_metrics(None)
    yield from deletion_cost_metrics({}, {}, {})


def tier_gauges(fleet: Fleet, router: Router, caches: CacheMap) -> Iterable[Metric]:
    """Metrics of the bandwidth between cache tiers."""
    yield _tier_bandwidth(
        [
            ((worker.id, str(place.rank), tier.name.lower()), 1e9 * router.rate(place.slot, tier))
            for worker in fleet.workers()
            for place in caches.places(worker)
            for tier in (Tier.L1, Tier.L2)
        ]
    )


def _tier_bandwidth(rows: Sequence[tuple[tuple[str, ...], float]]) -> Metric:
    return gauge(
        "kvroute_tier_bandwidth_bytes_per_second",
        "Bandwidth assumed from slower tiers to each worker: as measured by its LMCache server, otherwise as "
        "configured.",
        ("worker", "rank", "tier"),
        rows,
    )


def map_metrics(
    size: IndexSize | None, failures: Mapping[str, int], *, dropped_blocks: int | None = None
) -> Iterable[Metric]:
    """Metrics of the cache map. Only the process that fills it has `dropped_blocks`."""
    yield gauge(
        "kvroute_map_blocks",
        "Different blocks in the map.",
        (),
        [] if size is None else [((), float(size.blocks))],
    )
    yield gauge(
        "kvroute_map_bytes",
        "Estimated memory of the map.",
        (),
        [] if size is None else [((), float(size.bytes))],
    )
    yield counter(
        "kvroute_map_dropped_blocks",
        "Blocks not stored in the map because it is full (kv_events.max_index_blocks).",
        (),
        [] if dropped_blocks is None else [((), float(dropped_blocks))],
    )
    yield counter(
        "kvroute_following_failures",
        "Background tasks of the cache tracker that failed and were restarted (see the log), by task.",
        ("work",),
        [((name,), float(times)) for name, times in failures.items()],
    )


_STREAM_COUNTS = {
    "messages": "Event batches read.",
    "duplicates": "Event batches that were received before.",
    "unreadable": "Messages that are not a valid event batch.",
    "unknown_events": "Events of an unknown type, which were skipped.",
    "undivided": "Large events in an unusual encoding, applied in one step, which may block the event loop.",
    "gaps": "Event batches whose sequence number did not follow the previous one.",
    "replays": "Replays requested.",
    "replay_failures": "Replays that failed.",
    "restarts": "Streams that started again: the engine restarted, or its buffer was overrun.",
    "losses": "Gaps that could not be closed by a replay.",
    "rereads": "Maps that were distrusted and read again.",
    "failures": "Failures in the gateway itself (see the log), after which the map was read again.",
}


def stream_metrics(streams: Sequence[StreamFigures]) -> Iterable[Metric]:
    """One series per worker and data-parallel rank."""
    labelled = [((stream.worker, str(stream.rank)), stream) for stream in streams]
    yield gauge(
        "kvroute_map_trust",
        "1 for the trust in each worker's map, with the reason where it is limited.",
        ("worker", "rank", "trust", "cause"),
        [
            ((*labels, each.trust.value, each.reason.value if each.reason else ""), 1.0)
            for labels, each in labelled
        ],
    )
    yield gauge(
        "kvroute_map_held_blocks",
        "Blocks that each worker holds according to the map.",
        ("worker", "rank", "tier"),
        [
            ((*labels, tier.name.lower()), float(blocks))
            for labels, each in labelled
            for tier, blocks in each.held_blocks.items()
        ],
    )
    yield gauge(
        "kvroute_map_orphan_blocks",
        "Orphan blocks: announced by the worker, but with an unknown parent.",
        ("worker", "rank"),
        [(labels, float(each.orphan_blocks)) for labels, each in labelled],
    )
    for name, text in _STREAM_COUNTS.items():
        yield counter(
            f"kvroute_kv_events_{name}",
            text,
            ("worker", "rank"),
            [(labels, float(getattr(each.counts, name))) for labels, each in labelled],
        )
    for name, text in {
        "stored": "Blocks that workers announced as stored.",
        "removed": "Blocks that workers announced as removed.",
        "passed_over": "Announced blocks that do not count: of KV cache groups of an unknown kind, or not in "
        "GPU memory.",
    }.items():
        yield counter(
            f"kvroute_map_{name}_blocks",
            text,
            ("worker", "rank"),
            [(labels, float(getattr(each.blocks, name))) for labels, each in labelled],
        )


def tokenizing_metric(cpu_s: Mapping[str, float]) -> Metric:
    """CPU seconds of exact prompts, by thread."""
    return counter(
        "kvroute_tokenizing_cpu_seconds",
        "CPU time of exact prompts (parsing, rendering, tokenizing, hashing the ids), by thread: the event "
        "loop's or the tokenizer threads'.",
        ("thread",),
        [((thread,), seconds) for thread, seconds in cpu_s.items()],
    )


def next_turns_metric(turns: Mapping[str, Mapping[str, int]]) -> Metric:
    """Next turns of chats that were found in the tokenizer's memory, by model and outcome."""
    return counter(
        "kvroute_next_turns",
        "Next turns of known chats that were tokenized here, by outcome: continued (only what is new was "
        "tokenized), compared (also tokenized as a whole, as a proof), differed (the ids were not those of "
        "the whole chat; the model's long chats are tokenized as a whole from then on).",
        ("model", "outcome"),
        [
            ((model, outcome), float(count))
            for model, outcomes in turns.items()
            for outcome, count in outcomes.items()
        ],
    )


def lmcache_metrics(size: ChunkIndexSize | None, held: Mapping[Tier, int]) -> Iterable[Metric]:
    """Metrics of the map of LMCache's chunks; `held` is their number by tier."""
    yield gauge(
        "kvroute_lmcache_held_chunks",
        "Chunks by tier, summed over the places that hold them.",
        ("tier",),
        [((tier.name.lower(),), float(chunks)) for tier, chunks in held.items()],
    )
    yield gauge(
        "kvroute_lmcache_chunks",
        "Different chunks in the map.",
        (),
        [] if size is None else [((), float(size.chunks))],
    )
    yield lmcache_map_bytes(size)
    yield counter(
        "kvroute_lmcache_dropped_chunks",
        "Chunks not stored in the map because it is full (lmcache.coordinator.max_chunks).",
        (),
        [] if size is None else [((), float(size.dropped))],
    )


def lmcache_map_bytes(size: ChunkIndexSize | None) -> Metric:
    """The memory of the map of chunks, which every process has."""
    return gauge(
        "kvroute_lmcache_map_bytes",
        "Estimated memory of LMCache's map.",
        (),
        [] if size is None else [((), float(size.bytes))],
    )


def coordinator_metrics(
    servers: Iterable[LMCacheServer],
    counts: CoordinatorCounts | None,
    *,
    rate_failures: int = 0,
    malformed: int = 0,
    refused: int = 0,
) -> Iterable[Metric]:
    """Metrics of the coordinator that LMCache's servers report to."""
    yield gauge(
        "kvroute_lmcache_servers",
        "LMCache servers that report here, with the reason why their data is doubted.",
        ("server", "doubt"),
        [((each.id, each.trouble), 1.0) for each in servers],
    )
    yield counter(
        "kvroute_lmcache_batches",
        "Batches of cache events, by outcome.",
        ("outcome",),
        [] if counts is None else [((each.value,), float(number)) for each, number in counts.batches.items()],
    )
    for name, text, number in (
        ("gaps", "Batches whose sequence number did not follow the previous one.", counts and counts.gaps),
        (
            "rate_failures",
            "Requests for the load bandwidth of LMCache servers that got no answer.",
            rate_failures,
        ),
        ("malformed", "Messages to the coordinator that could not be decoded.", malformed),
        ("refused", "Messages to the coordinator from an address that may not send them.", refused),
        (
            "servers_expired",
            "LMCache servers that were removed because their heartbeats ended.",
            counts and counts.expired,
        ),
    ):
        rows = [] if counts is None else [((), float(number or 0))]
        yield counter(f"kvroute_lmcache_{name}", text, (), rows)


def shared_reports_metric(counts: Mapping[str, int]) -> Metric:
    """LMCache's reports to and from other gateways."""
    return counter(
        "kvroute_lmcache_shared_reports",
        "LMCache's reports that were forwarded to other gateways, and that were followed from them; times "
        "that forwarded batches were missed; states of servers that were copied from another gateway, or "
        "refused.",
        ("outcome",),
        [((outcome,), float(number)) for outcome, number in counts.items()],
    )


def prefetch_metric(counts: Mapping[PrefetchOutcome, int]) -> Metric:
    """Prefetches from L2, by outcome."""
    return counter(
        "kvroute_lmcache_prefetches",
        "Loads from L2 requested from LMCache servers while a request waits, by outcome.",
        ("outcome",),
        [((outcome.value,), float(times)) for outcome, times in counts.items()],
    )


def l2_metrics(counts: L2Counts | None) -> Iterable[Metric]:
    """Metrics of the lookups in the shared store."""
    yield counter(
        "kvroute_l2_lookups",
        "Prompts looked up in L2's Redis.",
        (),
        [] if counts is None else [((), float(counts.lookups))],
    )
    yield counter(
        "kvroute_l2_failures",
        "Lookups in L2's Redis that got no answer, by cause.",
        ("cause",),
        [] if counts is None else [((why.value,), float(number)) for why, number in counts.failures.items()],
    )


def tierd_metrics(daemons: Iterable[FollowedDaemon]) -> Iterable[Metric]:
    """Metrics of the followed `kvroute tierd` daemons."""
    daemons = list(daemons)
    yield gauge(
        "kvroute_lmcache_tierd_parts",
        "Parts of chunks that each followed tierd holds, as far as the gateway knows.",
        ("daemon",),
        [((each.url,), float(len(each.parts))) for each in daemons],
    )
    yield counter(
        "kvroute_lmcache_tierd_failures",
        "Calls to a followed tierd without a usable answer.",
        ("daemon",),
        [((each.url,), float(each.failures)) for each in daemons],
    )
