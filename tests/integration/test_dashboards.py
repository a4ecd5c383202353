"""Every query of the dashboards returns data from a real Prometheus, or is named here as optional."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from tests.support.sockets import free_port, tcp_server

from kvroute.deploy.render.monitoring import ALERTS, ALL
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

PAGES = Path(__file__).parents[1] / "data" / "metrics"
TEXT = "It was the best of times, it was the worst of times. " * 30
OPTIONAL = {
    ("Retries and ejections", "retry: {{cause}}"): "no attempt fails here",
    ("Retries and ejections", "ejected: {{worker}}"): "no worker fails here",
    ("Waiting in the queue", "{{key}}"): "no request waits here",
    ("Clients", "admitted: {{key}}"): "no named keys here",
    ("Clients", "limited: {{key}}"): "no named keys here",
    ("Clients", "refused by the queue: {{key}}"): "the queue is never full here",
    ("Prompts without exact tokens", "{{cause}}"): "all prompts have exact tokens here",
    ("Chunks of LMCache by tier", "{{tier}}"): "no LMCache server reports here",
}
"""Panel and legend of the queries that may return nothing -> why."""


@pytest.fixture
def lane():
    """The lanes count alike; see test_lanes.py."""
    return "fast lane"


@asynccontextmanager
async def recorded(page: bytes) -> AsyncIterator[str]:
    """A server that answers every request with `page`; yields its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/plain; version=0.0.4\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(page), page))
        writer.close()

    async with tcp_server(answer) as port:
        yield f"127.0.0.1:{port}"


@asynccontextmanager
async def prometheus(program: str, folder: Path, targets: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus server that scrapes `targets` (job -> address) every second; yields a client."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [at]}]} for job, at in targets.items()]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        program,
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
        "--log.level=error",
        cwd=folder,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def returns_data(client: httpx.AsyncClient, expr: str) -> bool:
    try:
        answer = await client.get("/api/v1/query", params={"query": expr.replace("$__rate_interval", "10s")})
    except httpx.ConnectError:
        return False  # Prometheus is starting
    assert answer.status_code in (200, 503), f"{expr}: {answer.text}"
    return answer.status_code == 200 and bool(answer.json()["data"]["result"])


@pytest.mark.heavy
async def test_every_query_returns_data_or_is_optional(run_gateway, system_program, tmp_path):
    program = system_program("prometheus")
    async with AsyncExitStack() as stack:
        sims = [await stack.enter_async_context(run_sim(SimOptions(time_scale=0))) for _ in range(2)]
        sections = {
            "routing": {"strategy": "kvaware", "learning": True},
            "tokens": {"timeout_ms": 10_000},
            "admission": {"max_concurrent": 64},
        }
        gateway = await stack.enter_async_context(run_gateway([sim.url for sim in sims], **sections))
        await gateway.until(lambda: not gateway.runtime.cache_tracker.notes())
        targets = {
            "kvroute": gateway.url.removeprefix("http://"),
            "vllm": await stack.enter_async_context(recorded((PAGES / "vllm-0.32.0.prom").read_bytes())),
            "lmcache": await stack.enter_async_context(recorded((PAGES / "lmcache-0.5.6.prom").read_bytes())),
        }
        client = await stack.enter_async_context(prometheus(program, tmp_path, targets))

        async def traffic() -> None:
            number = 0
            while True:
                number += 1
                chat = {"model": "sim-model", "messages": [{"role": "user", "content": f"{number} {TEXT}"}]}
                for streamed in (True, False, True):
                    body = {**chat, "max_tokens": 4, "stream": streamed}
                    await gateway.client.post("/v1/chat/completions", json=body)
                await gateway.client.post("/v1/chat/completions", json={**chat, "model": "unknown"})
                await asyncio.sleep(0.05)  # a pace, not a wait for a result

        running = asyncio.create_task(traffic())
        queries = [(panel.title, query) for board in ALL for panel in board.panels for query in panel.queries]
        missing = queries
        try:
            async with asyncio.timeout(60):
                while missing := [
                    (title, query) for title, query in missing if not await returns_data(client, query.expr)
                ]:
                    if all((title, query.legend) in OPTIONAL for title, query in missing):
                        break
                    await asyncio.sleep(0.5)
        except TimeoutError:
            pass
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        assert [
            (title, query.expr) for title, query in missing if (title, query.legend) not in OPTIONAL
        ] == []
        for alert in ALERTS:
            await returns_data(client, alert.expr)  # asserts that Prometheus accepts it


def test_optional_queries_say_in_their_dashboard_what_they_need():
    needs = {
        (panel.title, query.legend): query.needs
        for board in ALL
        for panel in board.panels
        for query in panel.queries
    }

    assert all(needs[place] for place in OPTIONAL)
