from __future__ import annotations

import httpx

from kvroute.blocks.keys import Tier
from kvroute.clock import SystemClock
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.options import LMCacheOptions
from kvroute.lmcache.polls import RatePoller
from kvroute.wire.lmcache_server import ServerRegistration


def page(loads: int, gb_s: float) -> str:
    name = "lmcache_mp_l0_l1_load_throughput_GB_per_second"
    return f"{name}_count {loads}.0\n{name}_sum {gb_s}\n"


class Servers:
    """LMCache servers by address; an answer that is None is an error."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.pages: dict[str, str | None] = {}
        self.reported: list[tuple[str, Tier, float, int]] = []
        self.polls: list[str] = []
        self.coordinator = Coordinator(ChunkIndex(), clock, LMCacheOptions())
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.poller = RatePoller(
            self.coordinator,
            self.client,
            clock,
            lambda *measured: self.reported.append(measured),
            interval_s=3600.0,
            timeout_s=5.0,
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.polls.append(str(request.url))
        page = self.pages[request.url.host]
        return httpx.Response(500) if page is None else httpx.Response(200, text=page)

    def register(self, name: str, address: str) -> None:
        self.coordinator.register(ServerRegistration(address, 8080, name))


async def test_only_loads_since_the_last_poll_are_reported() -> None:
    servers = Servers()
    servers.register("a", "10.0.0.1")
    servers.register("b", "::1")
    servers.pages = {"10.0.0.1": page(1, 10.0), "::1": page(5, 5.0)}

    async with servers.client:
        await servers.poller.poll()
        assert servers.polls == ["http://10.0.0.1:8080/metrics", "http://[::1]:8080/metrics"]
        assert servers.reported == []
        servers.pages["10.0.0.1"] = page(3, 50.0)
        await servers.poller.poll()

    assert servers.reported == [("a", Tier.L1, 20.0, 2)]
    assert servers.poller.failures == 0


async def test_a_server_that_does_not_answer_is_counted_and_polled_again() -> None:
    servers = Servers()
    servers.register("a", "10.0.0.1")
    servers.pages = {"10.0.0.1": page(1, 10.0)}

    async with servers.client:
        await servers.poller.poll()
        servers.pages = {"10.0.0.1": None}
        await servers.poller.poll()
        servers.pages = {"10.0.0.1": page(2, 12.0)}
        await servers.poller.poll()

    assert servers.poller.failures == 1
    assert servers.reported == [("a", Tier.L1, 2.0, 1)]


async def test_a_server_that_left_is_not_polled_and_starts_from_zero_when_it_returns() -> None:
    servers = Servers()
    servers.register("a", "10.0.0.1")
    servers.pages = {"10.0.0.1": page(1, 10.0)}

    async with servers.client:
        await servers.poller.poll()
        servers.coordinator.deregister("a")
        await servers.poller.poll()
        assert len(servers.polls) == 1
        servers.register("a", "10.0.0.1")
        servers.pages = {"10.0.0.1": page(9, 99.0)}
        await servers.poller.poll()

    assert servers.reported == []
