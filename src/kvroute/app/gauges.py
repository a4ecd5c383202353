"""What is read from the fleet and the router when metrics are scraped."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from kvroute.blocks.tokens import Tier
from kvroute.fleet.discovery.source import Discoverer
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import HealthState
from kvroute.metrics import counter, gauge
from kvroute.routing.caches import CacheMap
from kvroute.routing.router import Router


def fleet_gauges(fleet: Fleet, health: HealthMonitor, discoverer: Discoverer) -> Iterable[Metric]:
    """Of the workers, their probes and where they are found."""
    workers = fleet.workers()
    yield gauge(
        "kvroute_worker_state",
        "1 for the state that each worker is in.",
        ("worker", "state"),
        [((w.id, state.value), float(w.state is state)) for w in workers for state in HealthState],
    )
    yield gauge(
        "kvroute_worker_capacity_tokens",
        "KV cache of each worker.",
        ("worker",),
        [((w.id,), float(w.capacity_tokens)) for w in workers],
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
    yield counter(
        "kvroute_discovery_errors",
        "Worker lists that could not be read or applied.",
        ("source",),
        [((source,), float(n)) for source, n in discoverer.errors().items()],
    )
    yield counter(
        "kvroute_discovery_shrinks_held_back",
        "Worker lists that named far fewer workers than answer, and were not believed until repeated.",
        ("source",),
        [((source,), float(discoverer.shrinks[source])) for source in discoverer.kept()],
    )
    yield gauge(
        "kvroute_discovery_kept_workers",
        "Workers that a source no longer names and that stay until it has repeated that.",
        ("source",),
        [((source,), float(n)) for source, n in discoverer.kept().items()],
    )


def index_gauges(fleet: Fleet, router: Router) -> Iterable[Metric]:
    """Of the history of what was sent."""
    size = router.index_size()
    yield gauge(
        "kvroute_index_blocks", "Different blocks in the prefix index.", (), [((), float(size.blocks))]
    )
    yield gauge("kvroute_index_bytes", "Estimated memory of the prefix index.", (), [((), float(size.bytes))])
    yield gauge(
        "kvroute_worker_index_blocks",
        "Blocks that the prefix index believes each worker to hold.",
        ("worker",),
        [((w.id,), float(router.describe_worker(w)["tracked_blocks"])) for w in fleet.workers()],
    )


def tier_gauges(fleet: Fleet, router: Router, caches: CacheMap) -> Iterable[Metric]:
    """Of the links between the caches' tiers."""
    yield gauge(
        "kvroute_tier_bandwidth_bytes_per_second",
        "Bandwidth reckoned with from slower tiers to each worker: as its LMCache server measured it, else "
        "as configured.",
        ("worker", "rank", "tier"),
        [
            ((worker.id, str(place.rank), tier.name.lower()), 1e9 * router.rate(place.slot, tier))
            for worker in fleet.workers()
            for place in caches.places(worker)
            for tier in (Tier.L1, Tier.L2)
        ],
    )
