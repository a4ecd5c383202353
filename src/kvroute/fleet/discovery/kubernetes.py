"""Discovery through the Kubernetes API: list, watch, resync."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, NamedTuple

from kvroute.clock import Clock
from kvroute.errors import DiscoveryError, WatchExpired
from kvroute.fleet.discovery.kubernetes_api import (
    ApiAccess,
    KubernetesApi,
    Listing,
    Object,
    ObjectReader,
    ObjectReading,
    PoolReading,
    PoolTarget,
    access_of,
    by_name,
    name_of,
    read_endpoint_slice,
    read_pod,
    read_pool,
)
from kvroute.fleet.options import FleetOptions, KubernetesOptions
from kvroute.fleet.worker import WorkerSpec

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_LASTED_S: Final = 1.0
"""A watch that ends sooner and has no event counts as a failure."""

_READERS: Final[dict[str, Callable[[Object, ObjectReader], ObjectReading]]] = {
    "pods": read_pod,
    "endpointslices": read_endpoint_slice,
}


class Changed(NamedTuple):
    """An object that was added or changed, or its last state before it was deleted."""

    item: Object
    is_deleted: bool


class KubernetesDiscovery:
    """The workers in the pods or EndpointSlices of a label selector, or in the pods of an InferencePool.

    While the API server is unavailable the last known set stays. Mutable: `errors` counts failed requests
    and unusable objects; the Discoverer sets `recheck_s`.
    """

    is_explicit = False

    def __init__(
        self,
        access: ApiAccess,
        reader: ObjectReader,
        options: KubernetesOptions,
        clock: Clock,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.errors = 0
        self.recheck_s: float | None = None
        self.options = options
        self.clock = clock
        self.rng = rng or random.Random()
        self._access = access
        self._reader = reader
        self._workers = _Workers(_READERS[options.resource], reader, require_ready=options.require_ready)

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> KubernetesDiscovery | None:
        """None if not enabled. Raises ConfigError if the API server is unknown."""
        kubernetes = options.kubernetes
        if not kubernetes.enabled:
            return None
        meanings = {
            **dict.fromkeys(kubernetes.prefill_labels, "prefill"),
            **dict.fromkeys(kubernetes.decode_labels, "decode"),
        }
        reader = ObjectReader(
            kubernetes.port,
            kubernetes.scheme,
            kubernetes.role_label,
            kubernetes.roles,
            kubernetes.model_label,
            meanings,
        )
        return cls(access_of(kubernetes, os.environ), reader, kubernetes, clock)

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Yield the full set after the first list, then after each change."""
        pool, selector = self.options.pool, self.options.selector
        sets = self._sets(selector) if pool is None else self._pool_sets(pool)
        yielded: tuple[WorkerSpec, ...] | None = None
        async with aclosing(sets) as spec_sets:
            async for specs in spec_sets:
                if specs != yielded or self.recheck_s is not None:
                    yielded = specs
                    yield specs

    async def _sets(self, selector: str) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """The set after each list and each change, different or not."""
        async with aclosing(self._follow(self.options.resource, selector).changes()) as changes:
            async for change in changes:
                if isinstance(change, Listing):
                    troubles = await self._workers.replace(change)
                else:
                    troubles = self._workers.change(change.item, is_deleted=change.is_deleted)
                for trouble in troubles:
                    self.errors += 1
                    log.warning("ignored: %s", trouble)
                yield self._workers.specs()

    async def _pool_sets(self, pool: str) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """The sets of the pods that the InferencePool selects; an empty set while there is no such pool."""
        target: PoolTarget | None = None
        targets, sets = self._targets(pool), None
        next_target = asyncio.ensure_future(anext(targets))
        next_set: asyncio.Future[tuple[WorkerSpec, ...]] | None = None
        try:
            while True:
                waiting = (next_target,) if next_set is None else (next_target, next_set)
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if next_target.done():
                    previous_target, target = target, next_target.result()
                    if target != previous_target and sets is not None and next_set is not None:
                        await _ended(next_set)
                        await sets.aclose()
                        sets = next_set = None
                    if target is None:
                        yield ()
                    elif sets is None:
                        # One object for all targets: a worker of both the old and the new target has joined.
                        self._workers.reader = replace(self._reader, target_ports=target.ports)
                        sets = self._sets(target.selector)
                        next_set = asyncio.ensure_future(anext(sets))
                    # Not earlier: the source reads `recheck_s`, which may be set after an empty set.
                    next_target = asyncio.ensure_future(anext(targets))
                elif sets is not None and next_set is not None:
                    yield next_set.result()
                    next_set = asyncio.ensure_future(anext(sets))
        finally:
            for task, generator in ((next_target, targets), (next_set, sets)):
                if task is not None:
                    await _ended(task)
                if generator is not None:
                    await generator.aclose()

    async def _targets(self, pool: str) -> AsyncGenerator[PoolTarget | None, None]:
        """What the InferencePool selects, after each list and each change; None while it selects nothing."""
        absent = PoolReading(trouble=f"there is no InferencePool {pool} in {self._access.namespace}")
        reading = PoolReading()
        async with aclosing(self._follow("inferencepools", name=pool).changes()) as changes:
            async for change in changes:
                if isinstance(change, Listing):
                    item = change.items[0] if change.items else None
                else:
                    item = None if change.is_deleted else change.item
                previous, reading = reading, absent if item is None else read_pool(item)
                if reading.trouble and reading.trouble != previous.trouble:
                    self.errors += 1
                    log.error("no workers: %s", reading.trouble)
                yield reading.target

    def _follow(self, resource: str, selector: str = "", name: str | None = None) -> ListWatch:
        options = self.options
        api = KubernetesApi(
            self._access,
            resource=resource,
            selector=selector,
            timeout_s=options.timeout_s,
            watch_s=options.watch_s,
            name=name,
        )
        return ListWatch(api, self)


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class ListWatch:
    """Lists the objects of one collection, then watches for changes; lists again after 410 Gone and every
    `resync_s`.

    While the API server is unavailable it tries again, after growing pauses. Mutable: the state of these
    retries; failed requests count among the source's `errors`.
    """

    def __init__(self, api: KubernetesApi, source: KubernetesDiscovery) -> None:
        self._api = api
        self._source = source
        self._logged_trouble = ""
        self._rounds_without_event = 0
        """Consecutive rounds without an event; each doubles the pause before the next round."""

    async def changes(self) -> AsyncGenerator[Listing | Changed, None]:
        """Yield each list, and each change of an object. Closes the API's client at the end."""
        version, resync_at = "", 0.0
        source, clock = self._source, self._source.clock
        try:
            while True:
                if source.recheck_s is not None:
                    # List again: a watch does not correct a wrong list, and without events the set would
                    # stay.
                    version = ""
                    await clock.sleep(source.recheck_s)
                started = clock.now()
                try:
                    if not version or started >= resync_at:
                        listing = await self._api.list()
                        started = clock.now()
                        version, resync_at = listing.version, started + source.options.resync_s
                        yield listing
                        if source.recheck_s is not None:
                            self._recovered()
                            continue
                    async with self._api.watching(version) as events:
                        self._recovered()
                        async for event in events:
                            self._rounds_without_event = 0
                            version = event.version or version
                            if event.item is not None:
                                yield Changed(event.item, event.is_deleted)
                                if source.recheck_s is not None:
                                    break
                    failed = False
                except WatchExpired as error:
                    failed = True
                    version = ""
                    log.info("%s: %s; listing again", self._api.url, error)
                except DiscoveryError as error:
                    failed = True
                    self._failed(str(error))
                if source.recheck_s is not None and not failed:
                    continue
                lasted = clock.now() - started >= _LASTED_S
                if lasted:
                    self._rounds_without_event = 0
                if failed or not lasted:
                    self._rounds_without_event += 1
                    await clock.sleep(self._pause_s())
        finally:
            await self._api.aclose()

    def _pause_s(self) -> float:
        # The exponent is capped only to keep the power finite.
        pause = _FIRST_PAUSE_S * 2.0 ** min(self._rounds_without_event - 1, 60)
        return min(self._source.options.backoff_max_s, pause) * self._source.rng.uniform(0.8, 1.0)

    def _failed(self, trouble: str) -> None:
        self._source.errors += 1
        if trouble != self._logged_trouble:
            self._logged_trouble = trouble
            log.error("%s: %s; the known workers stay", self._api.url, trouble)

    def _recovered(self) -> None:
        if self._logged_trouble:
            self._logged_trouble = ""
            log.info("%s answers again", self._api.url)


_UNPAUSED_OBJECTS = 1000
"""Objects and workers in them that are read before the event loop gets a turn: 10 ms."""


class _Workers:
    """The workers of all current objects. Mutable: `replace` and `change` apply lists and events."""

    def __init__(
        self,
        read: Callable[[Object, ObjectReader], ObjectReading],
        reader: ObjectReader,
        *,
        require_ready: bool,
    ) -> None:
        self.reader = reader
        """May be replaced before a list is applied."""
        self._read = read
        self._require_ready = require_ready
        self._readings: dict[str, ObjectReading] = {}
        self._joined: set[tuple[str, str]] = set()
        """Name and URL of workers that have been ready. If one is no longer ready, it drains; a worker that
        has never been ready has not joined yet."""

    async def replace(self, listing: Listing) -> list[str]:
        """Replace all objects. Returns the problems of objects that did not have them before."""
        previous_readings, readings, read = self._readings, dict[str, ObjectReading](), 0
        for item in listing.items:
            reading = readings[name_of(item)] = self._read(item, self.reader)
            read += 1 + len(reading.workers)
            if read >= _UNPAUSED_OBJECTS:
                read = 0
                await asyncio.sleep(0)
        self._readings = readings
        return [
            reading.trouble
            for name, reading in self._readings.items()
            if reading.trouble
            and (name not in previous_readings or previous_readings[name].trouble != reading.trouble)
        ]

    def change(self, item: Object, *, is_deleted: bool) -> list[str]:
        """Add, change or delete one object. Returns its problem if it is new."""
        name = name_of(item)
        previous = self._readings.pop(name, ObjectReading())
        if is_deleted:
            return []
        reading = self._readings[name] = self._read(item, self.reader)
        return [reading.trouble] if reading.trouble and reading.trouble != previous.trouble else []

    def specs(self) -> tuple[WorkerSpec, ...]:
        """The workers, ordered by name. O(all objects)."""
        workers_by_name = by_name(worker for reading in self._readings.values() for worker in reading.workers)
        self._joined &= {(worker.name, worker.url) for worker in workers_by_name.values()}
        specs = []
        for worker in workers_by_name.values():
            serves = not worker.is_terminating and (worker.is_ready or not self._require_ready)
            if serves:
                self._joined.add((worker.name, worker.url))
            if (worker.name, worker.url) in self._joined:
                specs.append(worker.spec(draining=not serves))
        return tuple(specs)
