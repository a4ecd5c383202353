"""How many workers the load of each model needs, for an autoscaler: `kvroute_workers_needed`.

The figure adds three parts, all in workers (docs/kubernetes.md): prefill that is being done, prefill that is
queued, and the KV memory that running requests use. The options of deletion costs are here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import Annotated, NamedTuple

from kvroute.fleet.fleet import Fleet
from kvroute.fleet.load import measure_loads
from kvroute.fleet.worker import FleetView, Worker
from kvroute.options import Options, Switch, option


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
    queued_s = sum(load.wait_s for load in loads)
    if waiting and requests > 0:
        queued_s += waiting * seconds / requests
    memory = sum(worker.load.active_tokens / worker.capacity_tokens for worker in workers)
    return Demand(seconds, queued_s / queue_s, memory)


def pools(models: Iterable[str], fleet: Fleet) -> list[FleetView]:
    """One view for each set of routable workers, under the first name by alphabet; none without workers."""
    # One worker may serve a model under several names. Its load must count once, because an autoscaler adds
    # the figures of all models.
    found: dict[tuple[Worker, ...], FleetView] = {}
    for model in sorted(models):
        view = fleet.view(model)
        if view.workers:
            found.setdefault(view.workers, view)
    return list(found.values())


class WorkersNeeded:
    """The smoothed number of workers that each model needs. Mutable: `update` adds the demand of a moment."""

    def __init__(self, options: ScalingOptions) -> None:
        self._options = options
        self._known: dict[str, tuple[float, float]] = {}
        """Model -> the average, and when it was last updated."""

    def update(self, fleet: Fleet, now: float, waiting: Mapping[str, float]) -> dict[str, float]:
        """Model -> needed workers, as a fraction, for models with at least one routable worker.

        A model without routable workers has no figure: 0 would make an autoscaler remove workers because a
        network is down. `waiting` has the number of requests in the gateway's queue by model or adapter.
        """
        options = self._options
        known, self._known = self._known, {}
        for view in pools(fleet.catalog.bases, fleet):
            # Which name a request waits under does not matter: all workers of a view serve the same names.
            queued = sum(number for name, number in waiting.items() if view.workers[0].serves(name))
            demand = demand_of(view.workers, now, queue_s=options.queue_s, waiting=queued)
            needed = demand.total / options.target_utilisation
            before = known.get(view.model)
            if before is not None and options.smoothing_s:
                average, then = before
                needed = average + (needed - average) * (1 - exp((then - now) / options.smoothing_s))
            self._known[view.model] = needed, now
        return {model: needed for model, (needed, _) in self._known.items()}
