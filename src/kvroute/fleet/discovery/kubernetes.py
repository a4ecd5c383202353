"""Discovery through the Kubernetes API: list, watch, resync."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from kvroute.clock import Clock
from kvroute.errors import DiscoveryError, WatchExpired
from kvroute.fleet.discovery.kubernetes_api import (
    KubernetesApi,
    Listing,
    Object,
    ObjectReader,
    ObjectReading,
    access_of,
    by_name,
    name_of,
    read_endpoint_slice,
    read_pod,
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


class KubernetesDiscovery:
    """Lists the objects, then watches for changes; lists again after 410 Gone and every `resync_s`.

    While the API server is unavailable the last known set stays. Mutable: `errors` counts failed requests
    and unusable objects; the Discoverer sets `recheck_s`.
    """

    is_explicit = False

    def __init__(
        self,
        api: KubernetesApi,
        reader: ObjectReader,
        options: KubernetesOptions,
        clock: Clock,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.errors = 0
        self.recheck_s: float | None = None
        self._api = api
        self._options = options
        self._clock = clock
        self._rng = rng or random.Random()
        self._workers = _Workers(_READERS[options.resource], reader, require_ready=options.require_ready)
        self._logged_trouble = ""
        self._rounds_without_event = 0
        """Consecutive rounds without an event; each doubles the pause before the next round."""

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> KubernetesDiscovery | None:
        """None if not enabled. Raises ConfigError if the API server is unknown."""
        own = options.kubernetes
        if not own.enabled:
            return None
        api = KubernetesApi(
            access_of(own, os.environ),
            resource=own.resource,
            selector=own.selector,
            timeout_s=own.timeout_s,
            watch_s=own.watch_s,
        )
        meanings = {
            **dict.fromkeys(own.prefill_labels, "prefill"),
            **dict.fromkeys(own.decode_labels, "decode"),
        }
        reader = ObjectReader(own.port, own.scheme, own.role_label, own.roles, own.model_label, meanings)
        return cls(api, reader, own, clock)

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Yield the full set after the first list, then after each change."""
        yielded: tuple[WorkerSpec, ...] | None = None
        try:
            async with aclosing(self._sets()) as sets:
                async for specs in sets:
                    if specs != yielded or self.recheck_s is not None:
                        yielded = specs
                        yield specs
        finally:
            await self._api.aclose()

    async def _sets(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """The set after each list and each event, changed or not."""
        version, resync_at = "", 0.0
        while True:
            if self.recheck_s is not None:
                # List again: a watch does not correct a wrong list, and without events the set would stay.
                version = ""
                await self._clock.sleep(self.recheck_s)
            started = self._clock.now()
            try:
                if not version or started >= resync_at:
                    listing = await self._api.list()
                    started = self._clock.now()
                    version, resync_at = listing.version, started + self._options.resync_s
                    self._log_unusable(self._workers.replace(listing))
                    yield self._workers.specs()
                    if self.recheck_s is not None:
                        self._recovered()
                        continue
                async with self._api.watching(version) as events:
                    self._recovered()
                    async for event in events:
                        self._rounds_without_event = 0
                        version = event.version or version
                        if event.item is not None:
                            self._log_unusable(self._workers.change(event.item, is_deleted=event.is_deleted))
                            yield self._workers.specs()
                            if self.recheck_s is not None:
                                break
                failed = False
            except WatchExpired as error:
                failed = True
                version = ""
                log.info("%s: %s; listing again", self._api.place, error)
            except DiscoveryError as error:
                failed = True
                self._failed(str(error))
            if self.recheck_s is not None and not failed:
                continue
            lasted = self._clock.now() - started >= _LASTED_S
            if lasted:
                self._rounds_without_event = 0
            if failed or not lasted:
                self._rounds_without_event += 1
                await self._clock.sleep(self._pause_s())

    def _pause_s(self) -> float:
        # The exponent is capped only to keep the power finite.
        pause = _FIRST_PAUSE_S * 2.0 ** min(self._rounds_without_event - 1, 60)
        return min(self._options.backoff_max_s, pause) * self._rng.uniform(0.8, 1.0)

    def _failed(self, trouble: str) -> None:
        self.errors += 1
        if trouble != self._logged_trouble:
            self._logged_trouble = trouble
            log.error("%s: %s; the known workers stay", self._api.place, trouble)

    def _recovered(self) -> None:
        if self._logged_trouble:
            self._logged_trouble = ""
            log.info("%s answers again", self._api.place)

    def _log_unusable(self, troubles: list[str]) -> None:
        for trouble in troubles:
            self.errors += 1
            log.warning("ignored: %s", trouble)


class _Workers:
    """The workers of all current objects. Mutable: `replace` and `change` apply lists and events."""

    def __init__(
        self,
        read: Callable[[Object, ObjectReader], ObjectReading],
        reader: ObjectReader,
        *,
        require_ready: bool,
    ) -> None:
        self._read = read
        self._reader = reader
        self._require_ready = require_ready
        self._readings: dict[str, ObjectReading] = {}
        self._joined: set[tuple[str, str]] = set()
        """Name and URL of workers that have been ready. If one is no longer ready, it drains; a worker that
        has never been ready has not joined yet."""

    def replace(self, listing: Listing) -> list[str]:
        """Replace all objects. Returns the problems of objects that did not have them before."""
        before = self._readings
        self._readings = {name_of(item): self._read(item, self._reader) for item in listing.items}
        return [
            reading.trouble
            for name, reading in self._readings.items()
            if reading.trouble and (name not in before or before[name].trouble != reading.trouble)
        ]

    def change(self, item: Object, *, is_deleted: bool) -> list[str]:
        """Add, change or delete one object. Returns its problem if it is new."""
        name = name_of(item)
        before = self._readings.pop(name, ObjectReading())
        if is_deleted:
            return []
        reading = self._readings[name] = self._read(item, self._reader)
        return [reading.trouble] if reading.trouble and reading.trouble != before.trouble else []

    def specs(self) -> tuple[WorkerSpec, ...]:
        """The workers, ordered by name. O(all objects)."""
        found = by_name(each for reading in self._readings.values() for each in reading.found)
        self._joined &= {(each.name, each.url) for each in found.values()}
        specs = []
        for each in found.values():
            serves = not each.is_terminating and (each.is_ready or not self._require_ready)
            if serves:
                self._joined.add((each.name, each.url))
            if (each.name, each.url) in self._joined:
                specs.append(each.spec(draining=not serves))
        return tuple(specs)
