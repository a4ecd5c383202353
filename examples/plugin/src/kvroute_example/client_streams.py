"""A part that limits how many requests of one User-Agent run at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

from fastapi import APIRouter
from prometheus_client.core import GaugeMetricFamily, Metric

from kvroute.errors import TooManyRequests
from kvroute.openai.headers import header
from kvroute.options import Options, option
from kvroute.parts.part import Gateway
from kvroute.relay.call import Call
from kvroute.request.record import Record

log = logging.getLogger(__name__)


class ClientStreamsOptions(Options):
    """The section `parts.client_streams`."""

    most: int = option(
        0,
        "Most requests of one User-Agent that run at once; further ones get 429. 0: no limit.",
        unit="requests",
        higher="one program may use more of the fleet",
        lower="one program leaves more of the fleet to the others",
        reload=True,
        ge=0,
    )
    log_interval_s: float = option(60.0, "Time between two log lines with the refusals.", unit="s", gt=0)


class ClientStreams:
    """Counts the requests of each User-Agent. Mutable, on the event loop only."""

    options: ClassVar[type[Options]] = ClientStreamsOptions

    def __init__(self, options: ClientStreamsOptions, gateway: Gateway) -> None:
        self._most = options.most
        self._interval_s = options.log_interval_s
        self._clock = gateway.clock
        self._running: Counter[str] = Counter()
        self._finished = 0
        self._refused = 0

    @classmethod
    def build(cls, options: ClientStreamsOptions, gateway: Gateway) -> ClientStreams | None:
        return cls(options, gateway)

    # A stage: each request passes it.
    def enter(self, call: Call) -> None:
        agent = header(call.headers, b"user-agent").decode("latin-1")[:64]
        if self._most and self._running[agent] >= self._most:
            self._refused += 1
            raise TooManyRequests(
                f"{self._most} requests of this User-Agent are running already.", retry_after_s=1
            )
        self._running[agent] += 1

        def left(_record: Record) -> None:
            self._running[agent] -= 1
            if not self._running[agent]:
                del self._running[agent]

        if call.record.on_end is None:
            call.record.on_end = []
        call.record.on_end.append(left)

    # An observer: it hears of finished requests.
    def ended(self, record: Record) -> None:
        self._finished += 1

    # A background task.
    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            log.info("requests refused because of their User-Agent: %d", self._refused)

    # Metrics, read at a scrape.
    def families(self) -> Iterable[Metric]:
        running = GaugeMetricFamily(
            "kvroute_example_running_requests", "Running requests.", labels=["user_agent"]
        )
        for agent, number in self._running.items():
            running.add_metric([agent], number)
        yield running
        yield GaugeMetricFamily("kvroute_example_finished_requests", "Finished requests.", self._finished)

    # Endpoints. Those below /admin need the admin key.
    def routes(self) -> APIRouter:
        routes = APIRouter()

        @routes.get("/admin/client-streams", summary="Running requests by User-Agent")
        async def running() -> dict[str, int]:
            return dict(self._running)

        return routes

    # Options with reload=True may change.
    def configure(self, options: ClientStreamsOptions) -> None:
        self._most = options.most
