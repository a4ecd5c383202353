"""What a gateway needs for LMCache's word: coordinator, controller, and the Redis behind its L2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpx
from prometheus_client.core import Metric

from kvroute.app.background_tasks import BackgroundTasks
from kvroute.blocks.keys import Tier
from kvroute.clock import Clock
from kvroute.fleet.worker import Worker
from kvroute.gateway import admin as hyperpod
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.controller_sockets import ControllerSockets
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.coordinator_http import CoordinatorApp, CoordinatorServer
from kvroute.lmcache.l2_redis import L2Counts, L2Target, RedisL2, targets_of
from kvroute.lmcache.membership import served_worker
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.polling import RatePoller, StatusPoller
from kvroute.lmcache.prefetch import Prefetcher
from kvroute.metrics import counter, gauge
from kvroute.routing.strategy import Candidate, ExactPrompt, Probed, RouteQuery, prefetch_of


class LMCache:
    """Both protocols and the lookup, as far as they are enabled; `chunks` is what they draw.

    `open` begins its work in `upkeep`, whose owner ends it before `aclose`. Mutable: through what it owns.
    """

    def __init__(
        self,
        chunks: ChunkIndex,
        client: httpx.AsyncClient,
        clock: Clock,
        options: LMCacheOptions,
        upkeep: BackgroundTasks,
        measured: Callable[[int, Tier, float, int], None],
        *,
        hyperpod_lines: bool,
    ) -> None:
        """`measured` hears of the mean bandwidth in GB/s of so many loads from a tier to a slot."""
        self.chunks = chunks
        self._options = options
        self._upkeep = upkeep
        self._measured = measured
        announce = hyperpod.worker_registered if hyperpod_lines else None
        self._coordinator: Coordinator | None = None
        if options.coordinator.enabled:
            self._coordinator = Coordinator(self.chunks, clock, options)
            self._app = CoordinatorApp(self._coordinator, clock, options.coordinator)
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
            self._prefetcher = Prefetcher(self._coordinator, client, clock, options.prefetch)
        self._controller: Controller | None = None
        if options.controller.enabled:
            self._controller = Controller(
                self.chunks, clock, options.controller, on_registered=announce or _nobody
            )
            self._sockets = ControllerSockets(self._controller, clock, options.controller)
        self._redis = RedisL2(options.l2, clock) if options.l2.redis_url else None
        self._targets: list[L2Target] = []
        self._targets_of = -1
        """`Coordinator.changes` that they were looked up at: with many workers it takes a while."""
        self._worker_of: dict[int, str] = {}
        """By slot."""

    @property
    def coordinator_address(self) -> str:
        """Where LMCache's servers can report, as bound; empty if they cannot."""
        return self._server.address if self._coordinator is not None else ""

    def open(self) -> None:
        """Raises ConfigError if an address to listen on cannot be had."""
        if self._coordinator is not None:
            self._server.bind()
        if self._controller is not None:
            self._sockets.bind()
            self._upkeep.begin("LMCache controller", self._sockets.run)
        if self._coordinator is not None:
            self._upkeep.begin("LMCache coordinator", self._server.run)
            self._upkeep.begin("LMCache status", lambda: self._watch.run(self._app.registered))
            if self._options.coordinator.rates_interval_s:
                self._upkeep.begin("LMCache bandwidths", self._rates.run)
        if self._prefetcher is not None:
            self._upkeep.begin("LMCache prefetches", self._prefetcher.run)

    async def aclose(self) -> None:
        """Close what `open` took, if it did not come to be served."""
        if self._coordinator is not None:
            self._server.close()
        if self._controller is not None:
            self._sockets.close()
        if self._redis is not None:
            await self._redis.aclose()

    # The fleet

    def places_changed(self, worker: Worker, places: Mapping[int, int]) -> None:
        """The worker's places in the map, slot by rank, or its model's names are others now."""
        self._worker_of |= dict.fromkeys(places.values(), str(worker.id))
        if self._coordinator is not None:
            self._coordinator.worker_changed(served_worker(worker, tuple(places.values())))
        if self._controller is not None:
            host = urlsplit(worker.spec.url).hostname or ""
            for rank, slot in places.items():
                self._controller.follow(slot, str(worker.id), rank=rank, addresses=_addresses(host))

    def place_left(self, slot: int) -> None:
        self._worker_of.pop(slot, None)
        if self._controller is not None:
            self._controller.leave(slot)

    def worker_left(self, worker: Worker) -> None:
        if self._coordinator is not None:
            self._coordinator.worker_left(str(worker.id))

    def tells_of(self, slot: int) -> bool:
        """Whether the LMCache server behind this place reports here: then what vLLM says of its L1 is the
        same once more, and older."""
        worker = self._worker_of.get(slot)
        return (
            self._coordinator is not None
            and worker is not None
            and self._coordinator.instance_of(worker) is not None
        )

    def _rate_measured(self, instance_id: str, tier: Tier, gb_s: float, loads: int) -> None:
        """An LMCache server measured how fast it loads: that holds for every place behind it."""
        assert self._coordinator is not None
        for slot, worker in self._worker_of.items():
            instance = self._coordinator.instance_of(worker)
            if instance is not None and instance.id == instance_id:
                self._measured(slot, tier, gb_s, loads)

    # Requests

    async def probe(self, prompts: Sequence[ExactPrompt]) -> Sequence[Probed]:
        """What the shared store has of each prompt, as far as it can be asked; in their order."""
        redis, targets = self._redis, self.targets()
        if redis is None or not targets:
            return [None] * len(prompts)
        answers = await asyncio.gather(
            *(redis.lookup(prompt.chunks, prompt.salt, targets) for prompt in prompts)
        )
        return [answer.held for answer in answers]

    def targets(self) -> Sequence[L2Target]:
        """Where the shared store is asked now."""
        if self._redis is None or self._coordinator is None:
            return ()
        if self._targets_of != self._coordinator.changes:
            self._targets_of = self._coordinator.changes
            self._targets = targets_of(self._coordinator, self._options.l2.redis_pool)
        return self._targets

    def answered(self, slot: int, token_ids: Sequence[int]) -> None:
        """A prompt was computed there: an in-process LMCache will have stored it."""
        if self._controller is not None:
            self._controller.on_prompt_served(slot, token_ids)

    @property
    def prefetches(self) -> bool:
        """Whether `sent` may have something to do."""
        return self._prefetcher is not None

    def sent(self, query: RouteQuery, candidate: Candidate) -> None:
        """A request was sent to a worker: where it will wait for longer than its blocks take to come from L2,
        let them set out. Returns at once."""
        prefetcher = self._prefetcher
        if prefetcher is None or len(query.exact) != 1:
            return
        worker = str(candidate.worker.id)
        wanted = prefetch_of(
            candidate, server_known=prefetcher.has_server(worker), delay_s=self._options.prefetch.delay_s
        )
        if wanted is not None:
            prompt = query.exact[0]
            token_ids = prompt.chunks.token_ids[: wanted.tokens]
            prefetcher.request(worker, token_ids, prompt.salt, wanted.spare_s)

    # What is shown

    def notes(self) -> list[str]:
        notes = []
        if self._coordinator is not None:
            notes += [
                f"LMCache server {each.id!r}: {each.doubt}"
                for each in self._coordinator.instances()
                if each.doubt is not None
            ]
        if self._controller is not None:
            notes += self._controller.problems()
        return notes

    def metrics(self) -> Iterable[Metric]:
        size = self.chunks.size()
        yield gauge("kvroute_lmcache_chunks", "Different chunks in the map.", (), [((), float(size.chunks))])
        yield gauge(
            "kvroute_lmcache_map_bytes", "Estimated memory of LMCache's map.", (), [((), float(size.bytes))]
        )
        yield counter(
            "kvroute_lmcache_dropped_chunks",
            "Chunks not taken into the map because it is full (lmcache.coordinator.max_chunks).",
            (),
            [((), float(size.dropped))],
        )
        if self._coordinator is not None:
            yield from self._coordinator_metrics(self._coordinator)
        if self._prefetcher is not None:
            yield counter(
                "kvroute_lmcache_prefetches",
                "Loads from L2 that LMCache servers were asked for while a request waits, by outcome.",
                ("outcome",),
                [((outcome.value,), float(times)) for outcome, times in self._prefetcher.counts.items()],
            )
        if self._redis is not None:
            yield from l2_metrics(self._redis.counts)

    def _coordinator_metrics(self, coordinator: Coordinator) -> Iterable[Metric]:
        counts = coordinator.counts
        yield gauge(
            "kvroute_lmcache_servers",
            "LMCache servers that report here, and what is wrong with what is known of them.",
            ("server", "doubt"),
            [((each.id, str(each.doubt or "")), 1.0) for each in coordinator.instances()],
        )
        yield counter(
            "kvroute_lmcache_batches",
            "Batches of cache events, by what became of them.",
            ("outcome",),
            [((outcome.value,), float(number)) for outcome, number in counts.batches.items()],
        )
        yield counter(
            "kvroute_lmcache_gaps",
            "Batches that did not follow the one before.",
            (),
            [((), float(counts.gaps))],
        )
        yield counter(
            "kvroute_lmcache_rate_failures",
            "Questions to LMCache servers how fast they load that got no answer.",
            (),
            [((), float(self._rates.failures))],
        )
        yield counter(
            "kvroute_lmcache_malformed",
            "Messages to the coordinator that could not be read.",
            (),
            [((), float(self._app.malformed))],
        )


def l2_metrics(counts: L2Counts) -> Iterable[Metric]:
    """Of lookups in the shared store."""
    yield counter(
        "kvroute_l2_lookups", "Prompts looked for in L2's Redis.", (), [((), float(counts.lookups))]
    )
    yield counter(
        "kvroute_l2_failures",
        "Of those, the ones that got no answer, by why.",
        ("cause",),
        [((reason.value,), float(number)) for reason, number in counts.failures.items()],
    )


def _nobody(_: str) -> None:
    pass


def _addresses(host: str) -> tuple[str, ...]:
    """The worker's address, where its URL has one; names are not resolved."""
    if host == "localhost":
        return ("127.0.0.1",)
    try:
        return (ip_address(host).compressed,)
    except ValueError:
        return ()
