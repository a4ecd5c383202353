"""Constructs all services of a gateway and owns every background task."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fastapi import FastAPI
from prometheus_client.registry import Collector

from kvroute.access.client_keys import KeyRing
from kvroute.access.jwt import TokenVerifier
from kvroute.access.key_file import read_key_file
from kvroute.access.keys import AdminKeys, KeyCheck
from kvroute.admin.api import admin_routes
from kvroute.admin.application import build_application
from kvroute.admin.control import control_routes
from kvroute.admin.engine_control import EngineControl
from kvroute.admin.guard import AdminGuard
from kvroute.admin.key_guesses import KeyGuesses
from kvroute.admin.live import KEEP_RECORDING_S, LiveFigures
from kvroute.admin.page import page_routes
from kvroute.admission.request_queue import Permits, RequestQueue
from kvroute.app.collectors import complete_families, count_tasks, fleet_gauges, index_gauges, load_gauges
from kvroute.app.reloading import ConfigReload, InForce, Services, apply_changes
from kvroute.app.scaling import Scaling, cache_value_of
from kvroute.background_tasks import BackgroundTasks
from kvroute.blocks.keys import Tier
from kvroute.caches.metrics import tier_gauges
from kvroute.clock import Clock, SystemClock
from kvroute.config.config import Config
from kvroute.config.loading import masked
from kvroute.fleet.discovery.base import Discoverer, ShrinkLimits
from kvroute.fleet.discovery.registry import sources_of
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.probe import Prober, probe_client
from kvroute.fleet.worker import HealthState, Worker
from kvroute.http.descriptors import DescriptorLimit
from kvroute.http.overload import MemoryWatch, memory_reader
from kvroute.journal.compat_log_lines import announcer
from kvroute.journal.compat_metrics import VllmRouterMetrics
from kvroute.journal.journal import Journal
from kvroute.journal.tracing import Tracer, make_tracer
from kvroute.metrics import DepartedSeries, Metrics
from kvroute.openai.bounded import Bounded
from kvroute.parts.part import Background, ControlPlane, Families, Gateway, Notes, Reloads, Stage
from kvroute.parts.part import Observer as PartObserver
from kvroute.parts.registry import build_parts, distributions
from kvroute.relay.asleep import SleepersLeft
from kvroute.relay.attempts import AttemptDeps
from kvroute.relay.attribution import Attribution
from kvroute.relay.dataplane import DataPlane
from kvroute.relay.exchange import ExchangeDeps
from kvroute.relay.feedback import PredictionAudit
from kvroute.relay.key_spaces import KeySpaces
from kvroute.relay.planner import Planner
from kvroute.relay.poison import LostRequests
from kvroute.relay.retry_budget import RetryBudget
from kvroute.relay.sagemaker import Invocations
from kvroute.relay.session_keys import SessionKeys
from kvroute.relay.stored_responses import ResponseOwners, StoredResponses
from kvroute.replicas.channel_metrics import channel_metrics
from kvroute.replicas.metrics import GatewayMetrics, PageCollector, read
from kvroute.request.streams import StreamWaits
from kvroute.routing.audit import Audit
from kvroute.routing.router import Observer, Router
from kvroute.routing.strategies.kvaware import KvAwareOptions
from kvroute.routing.strategies.session import SessionOptions
from kvroute.routing.strategy import Needs, TokenWaitLimits, token_timeout_s
from kvroute.tallies import Gauges
from kvroute.tls import signatures
from kvroute.tokens.estimate import TokenEstimator
from kvroute.upstream.transport import AnyWorkerTransport, Transports
from kvroute.upstream.writes import Outbox

if TYPE_CHECKING:
    from kvroute.app.replica import Replica
    from kvroute.caches.mirror import CacheTrackerMirror
    from kvroute.caches.tracker import CacheMapPublisher, CacheTracker

log = logging.getLogger("kvroute.runtime")

_SYNC_TIMEOUT_S = 5.0
"""Longest time that a process which joins the others waits, for each of its conditions."""
_POLL_INTERVAL_S = 0.01


class Runtime:
    """All services of one gateway process; an async context manager inside its event loop.

    Entering starts discovery and probes; leaving stops every task and closes every connection. `application`
    is the ASGI app; a server shuts down through `plane`. With a `replica` (one of several processes) or
    `sharing.url`, entering also waits until this process has the state of the others. `admin_keys` default to
    the configured ones; without any key the admin API refuses every request.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock | None = None,
        replica: Replica | None = None,
        admin_keys: AdminKeys | None = None,
        *,
        keep_recording_s: float = KEEP_RECORDING_S,
        in_force: InForce | None = None,
        plane_type: type[DataPlane] = DataPlane,
    ) -> None:
        """`keep_recording_s`: see `LiveFigures`. `plane_type`: the class of `plane`."""
        self._config = config
        if replica is None and config.sharing.is_on:
            from kvroute.app.replica import Replica

            replica = Replica.of_one_process(config.sharing, clock or SystemClock())
        mesh = None if replica is None else replica.mesh
        self._plane_type = plane_type
        self._keep_recording_s = keep_recording_s
        self._admin_keys = admin_keys if admin_keys is not None else AdminKeys(config.admin.keys)
        self._clock = clock = clock or SystemClock()
        self.metrics = Metrics()
        is_first = replica is None or replica.number == 0
        self.reload = ConfigReload(
            in_force or InForce.at_start(config, "code", clock), self.metrics, counts=is_first
        )
        self.descriptors = DescriptorLimit(clock, self.metrics)
        self.fleet = Fleet(
            config.fleet.aliases, created=int(clock.wall()), configured_names=config.configured_names
        )
        self._isolation = KeySpaces(
            self.fleet,
            adapters=config.lmcache.isolate_adapters,
            tenants=config.server.isolation == "per-key",
            needs_tag=config.lmcache.controller.enabled,
        )
        self._client = probe_client(AnyWorkerTransport(config.upstream), self.metrics.answer_refused)
        worker_key = config.fleet.worker_api_key
        tokens = config.tokens
        self._token_wait_limits = TokenWaitLimits(
            tokens.timeout_ms * 1e-3, tokens.max_timeout_ms * 1e-3, tokens.timeout_share
        )
        needs_map = config.routing.may_need(Needs.TOKENS) or config.server.allow_strategy_header
        self._replica = replica
        self._map_publisher: CacheMapPublisher | None = None
        self._mirror: CacheTrackerMirror | None = None
        self.cache_tracker = self._make_cache_tracker() if needs_map else None
        own = replica.own if replica else None
        self._permits = self._make_permits(own) if config.admission.is_on else None
        self.router = Router(
            config.routing,
            caches=self.cache_tracker.caches if self.cache_tracker else None,
            observer=self._permits or own,
            cache_value=cache_value_of(config.scaling.deletion_cost, writes_costs=is_first),
        )
        self._estimator = TokenEstimator()
        self.audit = Audit(config.routing.options_of(KvAwareOptions).audit)
        prober = Prober(
            self._client,
            timeout_s=config.fleet.health.timeout_s,
            path=config.fleet.health.path,
            api_key=worker_key.get_secret_value() if worker_key else None,
        )
        self.health = HealthMonitor(
            self.fleet,
            prober,
            clock,
            config.fleet.health,
            isolates=config.server.isolation == "per-key" and config.server.isolation_checks_release,
        )
        shrink = ShrinkLimits(config.fleet.shrink_share, config.fleet.shrink_confirm_s)
        self._discoverer = Discoverer(self.fleet, sources_of(config.fleet, clock), clock, shrink)
        self._outbox = Outbox()
        self._transports = Transports(config.upstream, self._outbox)
        self._owners = replica.owners if replica else ResponseOwners()
        self._tracer = self._make_tracer()
        self._journal = Journal(
            self.metrics,
            clock,
            log_requests=config.logging.requests,
            kept=config.server.decisions_kept,
            on_traced=self._tracer.finished if self._tracer is not None else None,
        )
        self._gateway_metrics: GatewayMetrics | None = None
        self._compat: VllmRouterMetrics | None = None
        self._keys_seen = signatures(())
        jwt = config.server.jwt
        self._tokens = TokenVerifier(jwt, self.metrics, clock) if jwt.is_on else None
        self._ring = self._read_ring()
        self._budget = RetryBudget(config.retries)
        self._lost = LostRequests(config.retries, clock, self.metrics)
        number = 0 if replica is None else replica.number
        gateway = Gateway(config, clock, self.metrics, self.fleet, self.router, number)
        self.parts = build_parts(config.parts, gateway)
        self.plane = self._data_plane()
        parts = [built.part for built in self.parts]
        self._journal.observers = tuple(part.ended for part in parts if isinstance(part, PartObserver))
        self.application = self._application()
        self.reload.appliers.append(self._apply_config)
        self._departed = DepartedSeries(self.metrics, clock, self.metrics.forget_workers)
        self.metrics.call_before_collect(partial(count_tasks, self.metrics))
        self.fleet.subscribe(self._fleet_changed)
        self.fleet.subscribe(SleepersLeft(self.plane.entry_control.requests))
        self.metrics.registry.register(
            Gauges(
                lambda: fleet_gauges(self.fleet, self.health, self._discoverer),
                lambda: load_gauges(self.fleet, self.router, self._clock.now()),
                lambda: index_gauges(self.fleet, self.router),
            )
        )
        self._scaling = Scaling(
            config, self.fleet, self.router, self.metrics, clock, lambda: replica.gateways if replica else 1
        )
        if self.cache_tracker is not None:
            caches = self.cache_tracker.caches
            self.metrics.registry.register(
                Gauges(self.cache_tracker.gauges, lambda: tier_gauges(self.fleet, self.router, caches))
            )
        if config.metrics.compat == "vllm-router":
            window_s = config.metrics.compat_window_s
            self._compat = VllmRouterMetrics(self.metrics, self.fleet, clock, window_s=window_s)
        if replica is not None:
            self._attach_replica(replica)
        if mesh is None and self._compat is not None:
            self.metrics.registry.register(Gauges(self._compat))
        for part in parts:
            if isinstance(part, Families):
                self.metrics.registry.register(Gauges(part.families))
        complete_families(self.metrics.registry)
        self._tasks: list[asyncio.Task[None]] = []
        self._part_tasks = BackgroundTasks(clock)
        self._stack = AsyncExitStack()
        if in_force is not None and in_force.config is not config:
            self._apply_config(in_force.config)

    async def __aenter__(self) -> Self:
        if self._tracer is not None:
            self._tracer.open()
        if self.cache_tracker is not None:
            await self._stack.enter_async_context(self.cache_tracker)
        self._tasks = [
            asyncio.create_task(self._discoverer.run(), name="discovery"),
            asyncio.create_task(self.health.run(), name="health"),
            *self._scaling.tasks(),
        ]
        for built in self.parts:
            if isinstance(built.part, Background):
                self._part_tasks.start(f"part {built.name}", built.part.run)
        server = self._config.server
        if server.memory_watermark:
            watch = MemoryWatch(
                memory_reader(server.memory_limit_bytes),
                server.memory_watermark,
                self.plane.entry_control.shed,
                self.metrics,
                self._clock,
            )
            self._tasks.append(asyncio.create_task(watch.run(server.memory_interval_s), name="memory watch"))
        keys = server.client_keys
        if self._ring is not None and keys.file is not None and keys.reload_interval_s:
            reload = self._ring.run(keys.file, keys.reload_interval_s, self._keys_seen[0])
            self._tasks.append(asyncio.create_task(reload, name="file of keys"))
        if self._tokens is not None:
            await self._tokens.load()
            self._tasks.append(asyncio.create_task(self._tokens.run(), name="signing keys of tokens"))
        if self._replica is not None:
            await self._join_processes(self._replica)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.end()
        await self._part_tasks.aclose()
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a background task failed", exc_info=outcome)
        await self.plane.aclose()
        if self._gateway_metrics is not None:
            await self._gateway_metrics.save()
        if self._replica is not None:
            await self._replica.aclose()
        await self._stack.aclose()
        await self._transports.aclose()
        await self._client.aclose()
        if self._tracer is not None:
            self._journal.flush()
            await asyncio.to_thread(self._tracer.close)
        if self._tokens is not None:
            await self._tokens.aclose()

    def _make_cache_tracker(self) -> CacheTracker | CacheTrackerMirror:
        """Construct the cache tracker: process 0 reads the workers' events, the others mirror its map."""
        # Imported here because it loads tokenizers, templates, ZMQ and Redis: 16 MiB that a gateway without a
        # map does not need.
        from kvroute.caches.tracker import CacheTracker

        config, clock, replica = self._config, self._clock, self._replica
        limits = self._isolation, self._slot_removed, self._token_timeout_s
        shared = (config, self.fleet, self.metrics, clock, *limits)
        mesh, channel = (None, None) if replica is None else (replica.mesh, replica.channel)
        if replica is None or mesh is None:
            return CacheTracker(*shared, self._rate_measured, channel, None, self._cache_cleared)
        from kvroute.app.replica import TRACKING_PROCESS
        from kvroute.caches.mirror import CacheTrackerMirror
        from kvroute.caches.tracker import CacheMapPublisher

        if replica.number != TRACKING_PROCESS:
            self._mirror = mirror = CacheTrackerMirror(
                *shared, self._bandwidth_received, lambda message: mesh.send(TRACKING_PROCESS, message)
            )
            return mirror
        self._map_publisher = map_publisher = CacheMapPublisher(
            mesh.publish, clock, config.kv_events, max_chunks=config.lmcache.coordinator.max_chunks
        )
        cache_tracker = CacheTracker(
            *shared,
            self._rate_measured,
            channel,
            (map_publisher.blocks, map_publisher.chunks),
            self._cache_cleared,
        )
        map_publisher.attach_tracker(cache_tracker, self.fleet)
        return cache_tracker

    def _attach_replica(self, replica: Replica) -> None:
        reports = self.cache_tracker.reports if self.cache_tracker else None
        replica.attach_services(
            self.fleet, self.router, self.health, self._clock, self._map_publisher, self._mirror, reports
        )
        replica.own.counts_repeats = self._config.scaling.deletion_cost.enabled
        replica.share_limits(self._ring)
        replica.share_lost_requests(self._lost)
        replica.serve_admin(self._journal.decisions, self.audit.describe)
        registry = self.metrics.registry
        if replica.channel is not None:
            registry.register(Gauges(partial(channel_metrics, replica.channel)))
        if replica.mesh is None:
            return
        self._gateway_metrics = GatewayMetrics(
            replica.mesh, registry, replica.mesh.folder, generation=replica.generation
        )
        registry.register(Gauges(self._gateway_metrics.figures))

    async def _join_processes(self, replica: Replica) -> None:
        figures = self._gateway_metrics
        if figures is not None:
            await figures.load()
        if replica.generation or replica.channel is not None:
            # A history of workers that are not known yet would be dropped.
            await self._wait_for(lambda: self.fleet.workers(), "discovery has found no workers yet")
        await replica.start()
        if figures is not None:
            self._tasks.append(asyncio.create_task(figures.run(), name="counters for a successor"))
        if self._map_publisher is not None:
            self._tasks.append(asyncio.create_task(self._map_publisher.run(), name="places of the map"))
        await replica.wait_until_synced(_SYNC_TIMEOUT_S, self._config.sharing.join_timeout_s)
        if replica.generation:
            # The predecessor's clients reconnect immediately: this process must know its workers first.
            await self._wait_for(
                lambda: not self.fleet.states()[HealthState.UNKNOWN],
                "some workers have not answered a probe yet",
            )

    async def wait_for_first_probes(self, longest_s: float) -> None:
        """Wait until a probe of each worker has passed or failed, for at most `longest_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                while not self.fleet.workers() or self.fleet.states()[HealthState.UNKNOWN]:
                    await self._clock.sleep(_POLL_INTERVAL_S)

    async def _wait_for(self, condition: Callable[[], object], problem: str) -> None:
        """Wait until the condition is true, for at most `_SYNC_TIMEOUT_S`; then log `problem`."""
        try:
            async with asyncio.timeout(_SYNC_TIMEOUT_S):
                while not condition():
                    await self._clock.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            log.warning("joining the other processes: %s", problem)

    async def _collect_all_processes(self) -> Collector:
        """The metrics of all processes."""
        assert self._gateway_metrics is not None
        collected = await self._gateway_metrics.collect_all()
        if self._compat is None:
            return collected
        compat = self._compat
        return PageCollector([*read(collected), *read(Gauges(lambda: compat.of(collected)))])

    def _read_ring(self) -> KeyRing | None:
        """The named keys, if configured. Raises ConfigError. Blocks: called before the gateway serves."""
        file = self._config.server.client_keys.file
        if file is None:
            return None
        self._keys_seen = signatures((file,))  # before the file: a change in between is loaded again
        keys = read_key_file(file)
        return KeyRing(keys, self.metrics, self._clock, tokens=self._tokens)

    def _make_permits(self, inner: Observer | None) -> Permits:
        processes = self._config.server.processes
        number = 0 if self._replica is None else self._replica.number
        return Permits(self._config.admission, self._clock, inner, processes=processes, number=number)

    def _data_plane(self) -> DataPlane:
        config = self._config
        worker_key = config.fleet.worker_api_key
        keys = [key.get_secret_value() for key in config.server.api_keys]
        has_keys = bool(keys) or self._ring is not None
        attempts = AttemptDeps(
            router=self.router,
            transports=self._transports,
            health=self.health,
            budget=self._budget,
            metrics=self.metrics,
            clock=self._clock,
            retry_statuses=frozenset(config.retries.statuses),
            lost=self._lost,
            lost_workers=config.retries.lost_workers,
            busy_workers=config.retries.busy_workers,
            on_sent=self.cache_tracker.on_dispatch if self.cache_tracker else None,
            log_traces=config.logging.requests and config.logging.format == "json",
            on_exhausted=self.descriptors.worker_unreachable,
        )
        deps = ExchangeDeps(
            attempts=attempts,
            metrics=self.metrics,
            estimator=self._estimator,
            owners=self._owners,
            journal=self._journal,
            audit=PredictionAudit(self.audit, self.metrics, self.cache_tracker, self.router.reports),
            clock=self._clock,
            attribution=Attribution(self.router.predicting),
            streams=StreamWaits(config.streams),
        )
        worker_authorization = (
            f"Bearer {worker_key.get_secret_value()}".encode() if has_keys and worker_key else None
        )
        session_keys = config.routing.options_of(SessionOptions).keys
        sources = SessionKeys(session_keys)
        planner = Planner(
            self.fleet,
            self.router,
            self._estimator,
            sources,
            allow_strategy_header=config.server.allow_strategy_header,
            isolation=self._isolation,
            trusts_clients=config.server.trust_clients,
        )
        stored = StoredResponses(
            self._owners,
            self.fleet,
            self._client,
            worker_authorization,
            timeout_s=config.upstream.connect_timeout_s,
        )
        queue = None
        if self._permits is not None:
            queue = RequestQueue(config.admission, self._permits, self.fleet, self.metrics, self._clock)
        return self._plane_type(
            planner,
            stored,
            deps,
            KeyCheck(keys, self._ring),
            self._outbox,
            Invocations(self.fleet, self._owners),
            preparer=self.cache_tracker.preparer if self.cache_tracker else None,
            queue=queue,
            announce=announcer(config.logging, self._clock, session_keys),
            bounded=Bounded(config.server.body_limits, also=sources.fields),
            worker_authorization=worker_authorization,
            drops_authorization=has_keys,
            trusts_clients=config.server.trust_clients,
            held_bytes=config.upstream.read_buffer_bytes,
            max_body_bytes=config.server.max_body_bytes,
            max_in_flight=config.server.max_in_flight,
            tracer=self._tracer,
            stages=[built.part for built in self.parts if isinstance(built.part, Stage)],
        )

    def _make_tracer(self) -> Tracer | None:
        """Raises ConfigError if traces are configured and OpenTelemetry is not installed."""
        if not self._config.tracing.endpoint:
            return None
        spans = self.metrics.trace_spans
        tracer = make_tracer(self._config.tracing, lambda outcome, number: spans.labels(outcome).inc(number))
        self.metrics.call_before_collect(tracer.settle)
        return tracer

    def _application(self) -> FastAPI:
        config = self._config
        guard = AdminGuard(
            self._admin_keys,
            config.server.host,
            config.admin.allowed_hosts,
            self.metrics,
            KeyGuesses(self._clock),
        )
        admin = admin_routes(
            self.fleet,
            self.router,
            self._journal,
            self._clock,
            self._shown_config,
            self.audit,
            self.cache_tracker.describe if self.cache_tracker else dict,
            self._replica,
            self._replica.members if self._replica is not None else list,
            EngineControl(
                self._client,
                timeout_s=config.admin.engine_timeout_s,
                api_key=worker_key.get_secret_value()
                if (worker_key := config.fleet.worker_api_key)
                else None,
                cleared=self._cleared_through_admin,
                health=self.health,
            ),
            self._lost,
        )
        self.live = LiveFigures(
            self.fleet,
            self.router,
            self._journal,
            self.audit,
            self._clock,
            self.metrics,
            streams=self.cache_tracker.streams if self.cache_tracker else list,
            slow=self._slow_sections,
            keep_recording_s=self._keep_recording_s,
            is_shutting_down=lambda: self.plane.entry_control.is_shutting_down,
            peers=None if self._replica is None else self._replica.mesh,
            member="" if self._replica is None else self._replica.name,
        )
        has_siblings = self._replica is not None and self._replica.mesh is not None
        scrape = self._collect_all_processes if has_siblings else None
        control = control_routes(self.plane, self.fleet, self.router, self._notes, scrape)
        others = [built.part.routes() for built in self.parts if isinstance(built.part, ControlPlane)]
        return build_application(self.plane, guard, control, admin, page_routes(self.live), *others)

    def _shown_config(self) -> dict[str, Any]:
        shown = {**masked(self._config), "in_force": self.reload.in_force.described()}
        if self.parts:
            shown["parts_from"] = distributions(self.parts)
        return shown

    def _slow_sections(self) -> dict[str, Any]:
        """Sections of the live page that change slowly."""
        map_figures = self.cache_tracker.describe() if self.cache_tracker is not None else {}
        map_figures.pop("workers", None)
        return {
            "notes": [*self.fleet.reasons_not_ready(), *self._notes()],
            "tokenizers": map_figures.pop("tokens", {}),
            "map": map_figures or None,
            "discovery": self._discoverer.describe(),
            "members": [] if self._replica is None else self._replica.members(),
        }

    def _apply_config(self, config: Config) -> None:
        before, self._config = self._config, config
        services = Services(
            self.fleet, self.health, self.plane, self.router, self._budget, self._transports, self._clock
        )
        apply_changes(before, config, services)
        for built in self.parts:
            section = getattr(config.parts, built.name)
            if isinstance(built.part, Reloads) and section != getattr(before.parts, built.name):
                built.part.configure(section)

    def _notes(self) -> list[str]:
        return [
            *self._discoverer.notes(),
            *(self.cache_tracker.notes() if self.cache_tracker else ()),
            *(self._replica.notes() if self._replica else ()),
            *self._part_tasks.notes(),
            *(note for built in self.parts if isinstance(built.part, Notes) for note in built.part.notes()),
        ]

    def _token_timeout_s(self, model: str, body_bytes: int) -> float:
        canonical, workers = self.fleet.canonical(model), len(self.fleet.view(model).workers)
        tokens = round(body_bytes / self._estimator.bytes_per_token(canonical))
        return token_timeout_s(tokens, workers, self.router.costs(canonical), self._token_wait_limits)

    def _slot_removed(self, slot: int) -> None:
        self.router.slot_left(slot)
        if self._map_publisher is not None:
            self._map_publisher.slot_removed(slot)

    def _rate_measured(self, slot: int, tier: Tier, gb_s: float, loads: int) -> None:
        self.router.rate_measured(slot, tier, gb_s, loads)
        if self._map_publisher is not None:
            self._map_publisher.publish_bandwidth(slot, tier, self.router.rate(slot, tier))

    def _bandwidth_received(self, slot: int, tier: Tier, gb_s: float) -> None:
        self.router.set_rate(slot, tier, gb_s)

    def _cache_cleared(self, worker: Worker, rank: int) -> None:
        """An event says that the cache of this rank is empty."""
        self.router.history_cleared(worker, rank)
        if self._replica is not None:
            self._replica.cache_cleared(worker, rank)

    def _cleared_through_admin(self, worker: Worker) -> None:
        self.fleet.report_cleared(worker, "was reset through the admin API")
        if self._replica is not None:
            self._replica.cache_cleared(worker)

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        """Update all services that keep data of a worker."""
        if self.cache_tracker is not None:
            self.cache_tracker.fleet_changed(change, worker)
        if change in (FleetChange.LEFT, FleetChange.RESTARTED, FleetChange.CLEARED):
            self.audit.forget(worker.id)
        match change:
            case FleetChange.JOINED:
                self.router.worker_joined(worker)
                self._departed.returned(worker.id)
            case FleetChange.CAPACITY:
                self.router.capacity_changed(worker)
            case FleetChange.LEFT:
                self.router.worker_left(worker)
                self._owners.forget_worker(worker.id)
                self._transports.forget(worker)
                self._departed.mark_departed(worker.id)
            case FleetChange.RESTARTED:
                self.router.worker_restarted(worker)
                self._owners.forget_worker(worker.id)
            case FleetChange.CLEARED | FleetChange.STALE:
                self.router.worker_restarted(worker)
            case FleetChange.EJECTED if worker.ejection is not None:
                self.metrics.ejections.labels(worker.id, worker.ejection.value).inc()
