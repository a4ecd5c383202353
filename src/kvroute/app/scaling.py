"""Scaling that knows caches: the metric of needed workers, and the deletion costs of the workers' pods."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from prometheus_client.core import Metric

from kvroute.clock import Clock
from kvroute.config.config import Config
from kvroute.errors import DiscoveryError
from kvroute.fleet.discovery.kubernetes_api import KubernetesApi, access_of
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.options import FleetOptions
from kvroute.fleet.worker import Worker, WorkerId
from kvroute.metrics import Metrics
from kvroute.routing.cache_value import CacheValue
from kvroute.routing.router import Router
from kvroute.routing.scaling import DeletionCostOptions, WorkersNeeded, WorkerWorth, due_patches, surplus
from kvroute.tallies import Gauges, counter, gauge

log = logging.getLogger(__name__)

ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Read by the ReplicaSet controller since Kubernetes 1.22; a StatefulSet removes the highest number first."""


def cache_value_of(options: DeletionCostOptions, *, writes_costs: bool) -> CacheValue | None:
    """The value of caches, for the router; None in a process that writes no deletion costs."""
    return CacheValue(options.window_s) if options.enabled and writes_costs else None


class Scaling:
    """The two parts of one gateway process. Mutable: the averages of `WorkersNeeded`.

    Every process has the metric. One writes deletion costs: that whose router has a `cache_value`.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        router: Router,
        metrics: Metrics,
        clock: Clock,
        gateways: Callable[[], int],
    ) -> None:
        """`gateways` returns the number of gateways that share their load, this one included.

        Registers the metrics. Raises ConfigError if the API server for deletion costs is unknown.
        """
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._needed = WorkersNeeded(config.scaling)
        self._processes = config.server.processes
        self._gateways = gateways
        self.deletion_costs: DeletionCosts | None = None
        sources = [self._metric_of_needed]
        if router.cache_value is not None:
            api = _pods_api(config.fleet)
            options = config.scaling.deletion_cost
            self.deletion_costs = DeletionCosts(options, api, fleet, router, clock, self._workers_needed)
            sources.append(self.deletion_costs.metrics)
        metrics.registry.register(Gauges(*sources))

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start the tasks; the caller owns them."""
        if self.deletion_costs is None:
            return []
        return [asyncio.create_task(self.deletion_costs.run(), name="deletion costs")]

    def _metric_of_needed(self) -> Iterable[Metric]:
        gateways = self._gateways()
        needed = self._workers_needed()
        yield workers_needed_metric({model: number / gateways for model, number in needed.items()})

    def _workers_needed(self) -> dict[str, float]:
        """Model -> the workers that the load of all gateways which share needs."""
        # Each process sees its own queue only; the processes get equal shares of the requests, and so do the
        # gateways that share.
        fleet, waiting = self._fleet, dict[str, float]()
        queues = self._processes * self._gateways()
        for (model, _), tally in self._metrics.queue_waiting.children.items():
            waiting[model] = waiting.get(model, 0.0) + queues * tally.value
        return self._needed.update(fleet.catalog.bases, fleet.view, self._clock.now(), waiting)


def _pods_api(options: FleetOptions) -> KubernetesApi:
    own = options.kubernetes
    access = access_of(own, os.environ)
    return KubernetesApi(access, resource="pods", selector="", timeout_s=own.timeout_s, watch_s=own.watch_s)


class DeletionCosts:
    """Keeps the annotation `ANNOTATION` of the workers' pods near what each worker is worth.

    A worker's id must be the name of its pod, as it is with discovery through the Kubernetes API. Workers
    that scaling down would remove now get less traffic, so that new conversations begin elsewhere. Mutable:
    the costs that were written.
    """

    def __init__(
        self,
        options: DeletionCostOptions,
        api: KubernetesApi,
        fleet: Fleet,
        router: Router,
        clock: Clock,
        needed: Callable[[], Mapping[str, float]],
    ) -> None:
        """The router must have a `cache_value`. `needed` returns `WorkersNeeded.update`."""
        assert router.cache_value is not None
        self._options = options
        self._api = api
        self._fleet = fleet
        self._router = router
        self._cache_value = router.cache_value
        self._clock = clock
        self._written: dict[WorkerId, int] = {}
        self._refused: set[WorkerId] = set()
        """The pods whose last patch failed."""
        self._absent: set[WorkerId] = set()
        """Workers that are no pods: no autoscaler removes them."""
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._logged_trouble = ""
        self._needed = needed
        self._surplus: dict[str, frozenset[WorkerId]] = {}
        """Model -> the workers that get less traffic."""
        fleet.subscribe(self._fleet_changed)

    async def run(self) -> None:
        """Write the costs that have changed, each `interval_s`; runs until it is cancelled."""
        # A gateway that has just started has seen no use of the caches: all would be worth nothing.
        pause_s = max(self._options.interval_s, self._options.window_s)
        try:
            while True:
                await self._clock.sleep(pause_s)
                await self.write_due()
                self.steer()
                pause_s = self._options.interval_s
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        await self._api.aclose()

    def worths(self) -> list[WorkerWorth]:
        """What each routable worker is worth now. O(workers)."""
        now, found = self._clock.now(), []
        for worker in self._fleet.workers():
            if worker.is_routable:
                cache_s = sum(self._cache_value.seconds(unit, now) for unit in worker.units)
                found.append(WorkerWorth(worker.id, cache_s, worker.load.wait(now)))
        return found

    async def write_due(self) -> None:
        """Patch the pods whose costs have changed. Ends at the first failure: the next round tries again."""
        # A pod that failed comes last, so that a single pod cannot keep the others from being written.
        options = self._options
        due = due_patches(
            self.worths(), self._written, min_change=options.min_change, most=options.max_patches
        )
        for worker, cost in sorted(due, key=lambda each: each[0] in self._refused):
            try:
                exists = await self._api.annotate(worker, {ANNOTATION: str(cost)})
            except DiscoveryError as error:
                self._outcomes["failed"] += 1
                self._refused.add(worker)
                self._log_once(f"the deletion cost of pod {worker} cannot be written: {error}")
                return
            # Absent: the pod has just been deleted, or another source lists this worker, which is no pod.
            self._outcomes["patched" if exists else "absent"] += 1
            self._written[worker] = cost
            self._refused.discard(worker)
            (self._absent.discard if exists else self._absent.add)(worker)
        if due:
            self._log_once("")

    def steer(self) -> None:
        """Send less traffic to the workers that scaling down would remove now, by the written costs."""
        options, before = self._options, self._surplus
        if options.surplus_share == 1.0:
            return
        found, useful = dict[str, frozenset[WorkerId]](), set[WorkerId]()
        for model, needed in self._needed().items():
            ids = [worker.id for worker in self._fleet.view(model).workers]
            pods = [each for each in ids if each not in self._absent]
            # Kubernetes takes a pod without the annotation for one of cost 0. So while any cost is unknown,
            # the order of removal is, too.
            is_known = all(each in self._written for each in pods)
            costs = {each: self._written[each] for each in pods} if is_known else {}
            found[model] = surplus(costs, needed - (len(ids) - len(pods)), options.min_workers)
            useful.update(each for each in ids if each not in found[model])
        self._surplus = {model: ids - useful for model, ids in found.items()}
        for model, rest in self._surplus.items():
            if rest != before.get(model, frozenset()):
                log.info("model %s: less traffic for %s", model, ", ".join(sorted(rest)) or "no worker")
        less = frozenset[WorkerId]().union(*self._surplus.values())
        for worker in self._fleet.workers():
            self._fleet.set_share(worker, options.surplus_share if worker.id in less else 1.0)

    def metrics(self) -> Iterable[Metric]:
        return deletion_cost_metrics(self._written, self._outcomes, self._surplus)

    def _log_once(self, trouble: str) -> None:
        """Log a trouble when it begins, and its end."""
        if trouble and not self._logged_trouble:
            log.error("%s; the next round tries again", trouble)
        elif not trouble and self._logged_trouble:
            log.info("deletion costs of pods are written again")
        self._logged_trouble = trouble

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change in (FleetChange.LEFT, FleetChange.RESTARTED, FleetChange.CLEARED, FleetChange.STALE):
            for unit in worker.units:
                self._cache_value.forget(unit)
        if change in (FleetChange.LEFT, FleetChange.JOINED):
            self._written.pop(worker.id, None)  # a new pod of that name has no annotation
            self._refused.discard(worker.id)
            self._absent.discard(worker.id)


OUTCOMES: Final = ("patched", "absent", "failed")


def workers_needed_metric(needed: Mapping[str, float]) -> Metric:
    return gauge(
        "kvroute_workers_needed",
        "Workers that the load of each model needs, smoothed, as a fraction. Add it up over gateways: those "
        "that share know the load of all, and each reports its part.",
        ("model",),
        [((model,), number) for model, number in needed.items()],
    )


def deletion_cost_metrics(
    written: Mapping[WorkerId, int],
    outcomes: Mapping[str, int],
    surplus: Mapping[str, Collection[WorkerId]],
) -> Iterable[Metric]:
    """Metrics of the deletion costs; without samples where they are off."""
    yield gauge(
        "kvroute_worker_deletion_cost",
        "Deletion cost written to each worker's pod: milliseconds of prefill that its removal costs.",
        ("worker",),
        [((worker,), float(cost)) for worker, cost in written.items()],
    )
    yield gauge(
        "kvroute_workers_surplus",
        "Workers of each model that get less traffic, because the load does not need them.",
        ("model",),
        [((model,), float(len(workers))) for model, workers in surplus.items()],
    )
    yield counter(
        "kvroute_deletion_cost_patches",
        "Patches of pods with a deletion cost, by outcome: patched, absent (no such pod), failed.",
        ("outcome",),
        [((outcome,), float(number)) for outcome, number in outcomes.items()],
    )
