"""Metrics that are read from fleet, router and cache map at a scrape.

A function without figures yields its families without samples: `declared_families` declares them this way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvroute.app.scaling import deletion_cost_metrics
from kvroute.caches.metrics import (
    _tier_bandwidth,
    coordinator_metrics,
    l2_metrics,
    lmcache_metrics,
    map_metrics,
    next_turns_metric,
    prefetch_metric,
    shared_reports_metric,
    stream_metrics,
    tierd_metrics,
    tokenizing_metric,
)
from kvroute.fleet.discovery.base import Discoverer
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import Ejection, HealthState
from kvroute.logs import failed_lines
from kvroute.metrics import Metrics
from kvroute.replicas.channel_metrics import channel_metrics
from kvroute.replicas.metrics import link_metrics
from kvroute.routing.router import Router
from kvroute.tallies import Gauges, counter, gauge

if TYPE_CHECKING:  # imported by a gateway with a map only: they load ZMQ and more
    pass


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
