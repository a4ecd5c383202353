"""Decisions of scaling: how many workers the load needs, and which worker is worth least. Pure.

`kvroute_workers_needed` adds three parts, all in workers (docs/kubernetes.md): prefill that is being done,
prefill that is queued, and the KV memory that running requests use.

The deletion cost of a worker follows from the value of its cache: the prefill time that the cache saves. The
time saved lately is the estimate of the time saved soon: conversations that continue were used a short time
ago, conversations that have ended were not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, exp
from typing import Annotated, Final, NamedTuple

from kvroute.fleet.load import measure_loads
from kvroute.fleet.worker import FleetView, Worker, WorkerId
from kvroute.options import Options, Switch, option

MAX_COST: Final = 2**31 - 1
"""The largest value of the annotation, an int32 (Kubernetes, core/v1 annotation_key_constants.go)."""


class DeletionCostOptions(Options):
    """The annotation `controller.kubernetes.io/pod-deletion-cost` on the workers' pods.

    When a Deployment gets fewer replicas, Kubernetes removes the pods with the lowest values first.
    """

    enabled: Annotated[bool, Switch] = option(
        False,
        "Write the annotation, so that scaling down removes the workers whose caches are worth least. Needs "
        "`fleet.kubernetes`, permission to patch pods, and `prefixaware` or `kvaware`.",
    )
    interval_s: float = option(
        30.0,
        "Pause between two rounds, and before the second; the first comes after `window_s`.",
        unit="s",
        ge=1,
        higher="fewer requests to the API server",
        lower="the annotations are more recent",
    )
    window_s: float = option(
        180.0,
        "Time constant of a cache's value: a use this long ago counts 37%.",
        unit="s",
        gt=0,
        higher="long conversations count after longer pauses",
        lower="conversations that have ended are forgotten sooner",
    )
    min_change: float = option(
        0.05,
        "A pod is patched if its cost has changed by more than this share of the mean cost.",
        unit="share",
        ge=0,
        higher="fewer requests to the API server",
        lower="the order of workers of similar worth is more recent",
    )
    surplus_share: float = option(
        0.25,
        "Share of its normal traffic that a worker gets while the load needs fewer workers and this one "
        "would be removed first. So new conversations begin where they can stay. 1: no difference.",
        unit="share",
        gt=0,
        le=1,
        higher="requests are spread over more workers",
        lower="fewer conversations are lost when workers are removed",
    )
    min_workers: int = option(
        1,
        "Workers of a model that always get their normal traffic: the minimum of the autoscaler.",
        ge=1,
        higher="requests are spread over more workers",
        lower="fewer conversations are lost when workers are removed",
    )
    max_patches: int = option(
        20,
        "Most pods that one round patches; the largest changes are first.",
        ge=1,
        higher="large fleets are up to date sooner",
        lower="fewer requests to the API server",
    )


class ScalingOptions(Options):
    """The metric of needed workers, and the order in which workers are removed."""

    target_utilisation: float = option(
        0.7,
        "Part of a worker that may be in use. `kvroute_workers_needed` is the load divided by it.",
        unit="share",
        gt=0,
        le=1,
        higher="fewer workers",
        lower="more workers: room for bursts while new ones start",
    )
    queue_s: float = option(
        30.0,
        "Time in which queued prefill should be done: this number of queued seconds needs one worker more.",
        unit="s",
        gt=0,
        higher="bursts start fewer workers",
        lower="queues start more workers",
    )
    smoothing_s: float = option(
        60.0,
        "Time constant of the average of `kvroute_workers_needed`.",
        unit="s",
        ge=0,
        higher="short bursts start no workers",
        lower="follows the load sooner; 0: no average",
    )
    deletion_cost: DeletionCostOptions = option(default_factory=DeletionCostOptions)


class Demand(NamedTuple):
    """The load of the workers of one model. Each part is a number of fully used workers."""

    prefill: float
    """Prefill seconds that are completed in a second, averaged over 30 s."""
    queued: float
    """Queued prefill seconds, at the workers and in the gateway, per `queue_s`."""
    memory: float
    """Prompt tokens of running requests, each worker's relative to its KV capacity."""

    @property
    def total(self) -> float:
        return self.prefill + self.queued + self.memory


def demand_of(workers: Sequence[Worker], now: float, *, queue_s: float, waiting: float = 0.0) -> Demand:
    """The demand on `workers` at `now` (`Clock.now()`), with `waiting` requests in the gateway's queue.

    A waiting request counts as the mean of the prefills that were completed in the last 30 s, and as nothing
    before the first. O(workers).
    """
    loads = [worker.load for worker in workers]
    seconds, requests = measure_loads(loads, now)
    queued_s = sum(load.wait_s - load.foreign_s for load in loads)
    if waiting and requests > 0:
        queued_s += waiting * seconds / requests
    memory = sum(worker.load.active_tokens / worker.capacity_tokens for worker in workers)
    return Demand(seconds, queued_s / queue_s, memory)


def pools(models: Iterable[str], view_of: Callable[[str], FleetView]) -> list[FleetView]:
    """One view for each set of routable workers, under the first name by alphabet; none without workers."""
    # One worker may serve a model under several names. Its load must count once, because an autoscaler adds
    # the figures of all models.
    view_by_workers: dict[tuple[Worker, ...], FleetView] = {}
    for model in sorted(models):
        view = view_of(model)
        if view.workers:
            view_by_workers.setdefault(view.workers, view)
    return list(view_by_workers.values())


class WorkersNeeded:
    """The smoothed number of workers that each model needs. Mutable: `update` adds the demand of a moment."""

    def __init__(self, options: ScalingOptions) -> None:
        self._options = options
        self._averages: dict[str, tuple[float, float]] = {}
        """Model -> the average, and when it was last updated."""

    def update(
        self,
        models: Iterable[str],
        view_of: Callable[[str], FleetView],
        now: float,
        waiting: Mapping[str, float],
    ) -> dict[str, float]:
        """Model -> needed workers, as a fraction, for models with at least one routable worker.

        A model without routable workers has no figure: 0 would make an autoscaler remove workers because a
        network is down. `view_of` is `Fleet.view`. `waiting` has the number of requests in the queues by
        model or adapter.
        """
        options = self._options
        previous_averages, self._averages = self._averages, {}
        for view in pools(models, view_of):
            # Which name a request waits under does not matter: all workers of a view serve the same names.
            queued = sum(number for name, number in waiting.items() if view.workers[0].serves(name))
            demand = demand_of(view.workers, now, queue_s=options.queue_s, waiting=queued)
            needed = demand.total / options.target_utilisation
            previous = previous_averages.get(view.model)
            if previous is not None and options.smoothing_s:
                average, then = previous
                needed = average + (needed - average) * (1 - exp((then - now) / options.smoothing_s))
            self._averages[view.model] = needed, now
        return {model: needed for model, (needed, _) in self._averages.items()}


class WorkerWorth(NamedTuple):
    """What is lost if a worker is removed, in seconds of prefill."""

    worker: WorkerId
    cache_s: float
    """`CacheValue.seconds`."""
    load_s: float
    """Queued prefill, which the worker must compute before it ends."""
    # Running requests do not count: a worker finishes them when it is removed, and their use of the cache is
    # part of `cache_s`. Counted twice, a single long prompt would hide the differences between caches.

    @property
    def cost(self) -> int:
        """The deletion cost: milliseconds of prefill."""
        return min(MAX_COST, round(1e3 * (self.cache_s + self.load_s)))


def due_patches(
    worths: Sequence[WorkerWorth], written: Mapping[WorkerId, int], *, min_change: float, most: int
) -> list[tuple[WorkerId, int]]:
    """The workers whose deletion cost must be written, with the cost; the largest changes first.

    `written` are the costs that the pods have. A cost is due if it differs by more than `min_change` of the
    mean of all costs, or was never written. At most `most` are returned.
    """
    costs = {worth.worker: worth.cost for worth in worths}
    tolerated = min_change * sum(costs.values()) / max(1, len(costs))
    changes = {
        worker: MAX_COST if worker not in written else abs(cost - written[worker])
        for worker, cost in costs.items()
    }
    due = [worker for worker, change in changes.items() if change > tolerated]
    due.sort(key=lambda worker: (-changes[worker], worker))
    return [(worker, costs[worker]) for worker in due[:most]]


def surplus(costs: Mapping[WorkerId, int], needed: float, least: int) -> frozenset[WorkerId]:
    """The workers of one model that scaling down would remove now: those with the lowest deletion costs.

    The load needs `needed` of the workers in `costs`, a fraction; at least `least` stay.
    """
    kept = max(least, ceil(needed))
    by_cost = sorted(costs, key=lambda worker: (-costs[worker], worker))
    return frozenset(by_cost[kept:])
