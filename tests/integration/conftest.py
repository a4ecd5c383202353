"""Real gateways in front of simulated workers, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tests.support.waiting import until
from tests.support.workers import ScriptedWorker, scripted_worker

from kvroute.app.listening import picker_listener, picker_plane
from kvroute.app.runtime import Runtime
from kvroute.app.server import GatewayServer, uvicorn_config
from kvroute.clock import Clock
from kvroute.config.config import Config
from kvroute.fleet.worker import HealthState
from kvroute.relay.dataplane import DataPlane
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

ADMIN_KEY = "admin-key-of-the-tests"
"""The admin key of a gateway whose test does not set one."""


def admin_key(request: httpx.Request) -> httpx.Request:
    """An httpx `auth`: requests under /admin without a key get the usual one."""
    if request.url.path.startswith("/admin"):
        request.headers.setdefault("authorization", f"Bearer {ADMIN_KEY}")
    return request


@dataclass
class Gateway:
    """A gateway that listens on `url`; `client` speaks to it."""

    url: str
    runtime: Runtime
    client: httpx.AsyncClient
    server: GatewayServer
    grpc_port: int = 0
    """The port of an endpoint picker's gRPC listener."""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a change that a background task makes."""
        await until(condition)

    async def until_healthy(self, count: int) -> None:
        """Wait for so many workers, and for the models of those that were only too slow to report them.

        A worker is healthy before its models are known, if `/v1/models` was not answered within a probe's
        time; on a busy machine that happens, and until the next probe its requests get 503.
        """
        await self.until(
            lambda: (
                self.runtime.fleet.states()[HealthState.HEALTHY] >= count
                and not any(
                    "gave no answer" in worker.models_trouble for worker in self.runtime.fleet.workers()
                )
            )
        )

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        return sum(
            sample.value
            for family in self.runtime.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def gateway(
    config: Config, clock: Clock | None = None, *, is_picker: bool = False
) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        plane_type = picker_plane() if is_picker else DataPlane
        runtime = await stack.enter_async_context(Runtime(config, clock, plane_type=plane_type))
        settings = uvicorn_config(config, runtime)
        picker = picker_listener(config, runtime.fleet, runtime.plane, settings) if is_picker else None
        server = GatewayServer(settings, runtime, config.server, picker=picker)
        settings.load()
        server.lifespan = settings.lifespan_class(settings)
        await server.startup()
        loop = asyncio.create_task(server.main_loop())
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        limits = httpx.Limits(max_connections=None)
        client = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://{host}:{port}",
                limits=limits,
                timeout=30,
                trust_env=False,
                auth=admin_key,
            )
        )
        running = Gateway(f"http://{host}:{port}", runtime, client, server, picker.port if picker else 0)
        try:
            yield running
        finally:
            server.should_exit = True
            await loop
            await client.aclose()
            await server.shutdown()


@pytest.fixture(params=["fast lane", "ASGI path"])
def lane(request: pytest.FixtureRequest) -> str:
    """Which way plain inference requests take. A module whose tests do not depend on it overrides this."""
    return str(request.param)


@pytest.fixture
def run_gateway(lane: str) -> Callable[..., AbstractAsyncContextManager[Gateway]]:
    """Start a gateway: `async with run_gateway(workers=[url], **sections) as running`.

    Workers are called w0, w1, ...: ties break by a hash of the name, and tests should not depend on their
    ports. Sections are those of the configuration; health checks are quick, and all workers are waited
    for unless `wait=False`. Its `client` brings the admin key.
    """

    @asynccontextmanager
    async def start(
        workers: Sequence[str | dict[str, Any]],
        *,
        wait: bool = True,
        clock: Clock | None = None,
        **sections: Any,
    ) -> AsyncIterator[Gateway]:
        named = [
            {"id": f"w{place}", "url": worker} if isinstance(worker, str) else worker
            for place, worker in enumerate(workers)
        ]
        fleet = {"workers": named, **sections.pop("fleet", {})}
        fleet["health"] = {"interval_s": 0.2, "recheck_s": 0.05, **fleet.get("health", {})}
        lane_options = {"fast_lane": lane == "fast lane"}
        server = {"port": 0, "drain_timeout_s": 5, **lane_options, **sections.pop("server", {})}
        admin = {"api_key": ADMIN_KEY, **sections.pop("admin", {})}
        config = Config.model_validate({"fleet": fleet, "server": server, "admin": admin, **sections})
        async with gateway(config, clock) as running:
            if wait:
                await running.until_healthy(len(workers))
            yield running

    return start


@pytest.fixture
async def instant_sim() -> AsyncIterator[RunningSim]:
    """A simulated worker that computes in no time."""
    async with run_sim(SimOptions(time_scale=0)) as sim:
        yield sim


@pytest.fixture
async def raw_worker() -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker() as worker:
        yield worker
