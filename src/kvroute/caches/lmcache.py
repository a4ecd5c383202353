"""Connects the gateway to LMCache: coordinator, controller, tierd, and lookups in the Redis of L2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx
from prometheus_client.core import Metric

from kvroute.background_tasks import BackgroundTasks
from kvroute.blocks.keys import Tier
from kvroute.caches.metrics import (
    coordinator_metrics,
    l2_metrics,
    lmcache_metrics,
    prefetch_metric,
    shared_reports_metric,
    tierd_metrics,
)
from kvroute.clock import Clock
from kvroute.fleet.worker import Worker
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.journal.compat_log_lines import worker_registered
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.l2_redis import L2Target, RedisL2, targets_of
from kvroute.lmcache.listeners import ControllerSockets, CoordinatorApp, CoordinatorServer
from kvroute.lmcache.membership import served_worker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.polls import RatePoller, StatusPoller
from kvroute.lmcache.server_requests import Prefetcher
from kvroute.lmcache.tierd import TierdFollower
from kvroute.replicas.cache_reports import CacheReports
from kvroute.replicas.channel import Channel
from kvroute.routing.strategy import Candidate, ExactPrompt, Probed, RouteQuery, prefetch_of


class LMCache:
    """The enabled parts of LMCache's coordinator, controller, L2 lookup and prefetch; they fill `chunks`.

    `open` starts its tasks in `background`, whose owner cancels them before `aclose`. Mutable: through its
    parts.
    """

    def __init__(
        self,
        chunks: CopyableChunkIndex,
        client: httpx.AsyncClient,
        clock: Clock,
        options: LMCacheOptions,
        background: BackgroundTasks,
        rate_measured: Callable[[int, Tier, float, int], None],
        channel: Channel | None,
        *,
        hyperpod_lines: bool,
    ) -> None:
        """`rate_measured` gets slot, tier, mean bandwidth in GB/s, and the number of measured loads.

        `channel` leads to the gateways that the reports are forwarded to; None if there are no others.
        """
        self.chunks = chunks
        self._options = options
        self._background = background
        self._report_rate = rate_measured
        announce = worker_registered if hyperpod_lines else None
        self._coordinator = Coordinator(chunks, clock, options) if options.coordinator.enabled else None
        self._controller: Controller | None = None
        if options.controller.enabled:
            self._controller = Controller(
                chunks, clock, options.controller, on_registered=announce or _ignore_registration
            )
        self.reports: CacheReports | None = None
        """The reports to and from other gateways."""
        if channel is not None and (self._coordinator or self._controller):
            self.reports = CacheReports(
                chunks, self._coordinator, self._controller, channel, channel.id.hex(), clock
            )
        if self._coordinator is not None:
            self._app = CoordinatorApp(self._coordinator, clock, options.coordinator, self.reports)
            self._server = CoordinatorServer(self._app, self._coordinator, self.chunks, options.coordinator)
            self._watch = StatusPoller(self._coordinator, client, clock, options.coordinator)
            self._rates = RatePoller(
                self._coordinator,
                client,
                clock,
                self._rate_measured,
                interval_s=options.coordinator.rates_interval_s,
                timeout_s=options.coordinator.status_timeout_s,
            )
        self._prefetcher: Prefetcher | None = None
        if self._coordinator is not None and options.prefetch.enabled:
            self._prefetcher = Prefetcher(
                self._coordinator, client, clock, options.prefetch, self._app.addresses
            )
        if self._controller is not None:
            self._sockets = ControllerSockets(self._controller, clock, options.controller, self.reports)
        self._tierd: TierdFollower | None = None
        if self._controller is not None and options.tierd.urls:
            self._tierd = TierdFollower(
                self.chunks,
                self._controller.scheme,
                self._controller.ranks_of,
                client,
                clock,
                options.tierd,
            )
        self._redis = RedisL2(options.l2, clock) if options.l2.redis_url else None
        self._targets: list[L2Target] = []
        self._targets_of = -1
        """The `Coordinator.changes` at which `_targets` was computed, which is slow with many workers."""
        self._worker_of: dict[int, str] = {}
        """Worker id of each slot."""

    @property
    def coordinator_address(self) -> str:
        """The bound address for the reports of LMCache's servers; empty without a coordinator."""
        return self._server.address if self._coordinator is not None else ""

    def open(self) -> None:
        """Raises ConfigError if an address to listen on cannot be bound."""
        if self._coordinator is not None:
            self._server.bind()
        if self._controller is not None:
            self._sockets.bind()
            self._background.start("LMCache controller", self._sockets.run)
        if self._coordinator is not None:
            self._background.start("LMCache coordinator", self._server.run)
            self._background.start("LMCache status", lambda: self._watch.run(self._app.registered))
            if self._options.coordinator.rates_interval_s:
                self._background.start("LMCache bandwidths", self._rates.run)
        if self.reports is not None:
            self._background.start("LMCache's reports of other gateways", self.reports.run)
        if self._tierd is not None:
            self._background.start("tierd", self._tierd.run)
        if self._prefetcher is not None:
            self._background.start("LMCache prefetches", self._prefetcher.run)

    async def aclose(self) -> None:
        """Close the sockets that `open` bound (their tasks have ended) and the connection to Redis."""
        if self._coordinator is not None:
            self._server.close()
        if self._controller is not None:
            self._sockets.close()
        if self._redis is not None:
            await self._redis.aclose()

    # The fleet

    def slots_changed(self, worker: Worker, slots: Mapping[int, int]) -> None:
        """Set the worker's slots, by rank; also called when its model names have changed."""
        self._worker_of |= dict.fromkeys(slots.values(), str(worker.id))
        if self._coordinator is not None:
            self._coordinator.worker_changed(served_worker(worker, tuple(slots.values())))
        if self._controller is not None:
            host = urlsplit(worker.spec.url).hostname or ""
            for rank, slot in slots.items():
                self._controller.add_slot(slot, str(worker.id), rank=rank, addresses=_addresses(host))
        if self._tierd is not None:
            self._tierd.slots_changed(slots.values(), served_worker(worker, ()).models)

    def slot_removed(self, slot: int) -> None:
        self._worker_of.pop(slot, None)
        if self._controller is not None:
            self._controller.remove_slot(slot)
        if self._tierd is not None:
            self._tierd.slot_removed(slot)

    def worker_left(self, worker: Worker) -> None:
        if self._coordinator is not None:
            self._coordinator.worker_left(str(worker.id))

    def reports_l1(self, slot: int) -> bool:
        """Whether the LMCache server of this slot reports to the coordinator here."""
        # vLLM's events report the same L1 content later, so they are not needed then.
        worker = self._worker_of.get(slot)
        return (
            self._coordinator is not None
            and worker is not None
            and self._coordinator.instance_of(worker) is not None
        )

    def _rate_measured(self, instance_id: str, tier: Tier, gb_s: float, loads: int) -> None:
        """Report the load bandwidth of an LMCache server for every slot that uses it."""
        assert self._coordinator is not None
        for slot, worker in self._worker_of.items():
            instance = self._coordinator.instance_of(worker)
            if instance is not None and instance.id == instance_id:
                self._report_rate(slot, tier, gb_s, loads)

    # Requests

    async def probe(self, prompts: Sequence[ExactPrompt]) -> Sequence[Probed]:
        """The tokens of each prompt that the shared store has, in order; None without a shared store."""
        redis, targets = self._redis, self.targets()
        if redis is None or not targets:
            return [None] * len(prompts)
        answers = await asyncio.gather(
            *(redis.lookup(prompt.chunks, prompt.salt, targets) for prompt in prompts)
        )
        return [answer.chunks for answer in answers]

    def targets(self) -> Sequence[L2Target]:
        """The places in the shared store where lookups are made now."""
        if self._redis is None or self._coordinator is None:
            return ()
        if self._targets_of != self._coordinator.changes:
            self._targets_of = self._coordinator.changes
            self._targets = targets_of(self._coordinator, self._options.l2.redis_pool)
        return self._targets

    def answered(self, slot: int, token_ids: Sequence[int]) -> None:
        """A worker computed a prompt: an in-process LMCache has stored its chunks."""
        if self._controller is not None:
            self._controller.on_prompt_served(slot, token_ids)

    @property
    def prefetches(self) -> bool:
        """Whether `on_dispatch` must be called."""
        return self._prefetcher is not None

    def on_dispatch(self, query: RouteQuery, candidate: Candidate) -> None:
        """Start a prefetch from L2 if the request will wait longer than the load takes. Does not block."""
        prefetcher = self._prefetcher
        if prefetcher is None or len(query.exact) != 1:
            return
        worker = str(candidate.worker.id)
        prefetch = prefetch_of(
            candidate, server_known=prefetcher.has_server(worker), delay_s=self._options.prefetch.delay_s
        )
        if prefetch is not None:
            prompt = query.exact[0]
            token_ids = prompt.chunks.token_ids[: prefetch.tokens]
            prefetcher.request(worker, token_ids, prompt.salt, prefetch.spare_s)

    # Metrics and notes

    def notes(self) -> list[str]:
        notes = []
        if self._coordinator is not None:
            notes += [
                f"LMCache server {each.id!r}: {each.trouble}"
                for each in self._coordinator.instances()
                if each.trouble
            ]
        if self._controller is not None:
            notes += self._controller.problems()
        if self._tierd is not None:
            notes += self._tierd.notes()
        if self._redis is not None:
            notes += self._redis.notes()
        return notes

    def describe(self) -> dict[str, object]:
        """The servers and instances that report here, for the admin API and `kvroute doctor`."""
        servers = []
        if self._coordinator is not None:
            coordinator = self._coordinator
            workers = sorted(set(self._worker_of.values()))
            for each in coordinator.instances():
                host = f"[{each.address}]" if ":" in each.address else each.address
                scheme = self._options.coordinator.server_scheme
                servers.append(
                    {
                        "id": each.id,
                        "url": f"{scheme}://{host}:{each.http_port}" if each.http_port else "",
                        "doubt": each.trouble or None,
                        "via": each.reports_to or None,
                        "workers": [name for name in workers if coordinator.instance_of(name) is each],
                    }
                )
        return {
            "servers": servers,
            "instances": [] if self._controller is None else self._controller.instance_names(),
            "uncompared": [] if self._controller is None else self._controller.uncompared(),
            "problems": [] if self._controller is None else self._controller.problems(),
        }

    def metrics(self) -> Iterable[Metric]:
        yield from lmcache_metrics(self.chunks.size(), self.chunks.held_by_tier())
        if self._coordinator is not None:
            yield from coordinator_metrics(
                self._coordinator.instances(),
                self._coordinator.counts,
                rate_failures=self._rates.failures,
                malformed=self._app.malformed,
                refused=self._app.refused,
            )
        if self._tierd is not None:
            yield from tierd_metrics(self._tierd.daemons.values())
        if self.reports is not None:
            yield shared_reports_metric(asdict(self.reports.counts))
        if self._prefetcher is not None:
            yield prefetch_metric(self._prefetcher.counts)
        if self._redis is not None:
            yield from l2_metrics(self._redis.counts)


def _ignore_registration(_: str) -> None:
    pass


def _addresses(host: str) -> tuple[str, ...]:
    """The IP address in the worker's URL; empty for a host name, which is not resolved."""
    if host == "localhost":
        return ("127.0.0.1",)
    try:
        return (ip_address(host).compressed,)
    except ValueError:
        return ()
