"""The data of the live page over real sockets: lines of JSON, one a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from tests.support.waiting import until

from kvroute.app.runtime import Runtime
from kvroute.config.config import Config

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "hello " * 300}], "max_tokens": 2}


@pytest.fixture
def lane() -> str:
    return "fast lane"


@asynccontextmanager
async def live(gateway) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with gateway.client.stream("GET", "/admin/live") as answer:
        assert answer.status_code == 200, await answer.aread()
        yield (json.loads(line) async for line in answer.aiter_lines())


async def test_the_first_line_is_whole_and_later_ones_have_what_changed(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway:
        await gateway.client.post("/v1/chat/completions", json=CHAT)
        async with live(gateway) as lines:
            first = await anext(lines)
            second = await anext(lines)
            await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "later"})
            third = await anext(lines)
            while not third["requests"]:
                third = await anext(lines)

        assert set(first["workers"]) == {"w0"}
        assert first["bucket"]["requests"] == 1
        assert "strategy" not in second
        assert second["bucket"]["requests"] == 0
        assert [row["id"] for row in third["requests"]] == ["later"]
        assert third["bucket"]["requests"] == 1


async def test_recording_begins_with_the_first_line(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway:
        assert gateway.runtime.router.recorder is None
        async with live(gateway) as lines:
            await anext(lines)
            assert gateway.runtime.router.recorder is not None


async def test_recording_ends_after_the_last_page(instant_sim) -> None:
    config = Config.model_validate({"fleet": {"workers": [{"url": instant_sim.url}]}})
    async with Runtime(config, keep_recording_s=0.01) as runtime:
        await runtime.live.part(None, with_slow=True)
        assert runtime.router.recorder is not None

        await until(lambda: runtime.router.recorder is None)


async def test_a_worker_that_leaves_is_null(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway, live(gateway) as lines:
        await anext(lines)
        await gateway.client.delete("/admin/workers/w0")

        async for line in lines:
            if line.get("workers", {}).get("w0", ...) is None:
                break


async def test_a_shutdown_ends_the_stream(run_gateway, instant_sim) -> None:
    """Otherwise the gateway would wait for an open page until the end of its drain."""
    async with run_gateway([instant_sim.url]) as gateway, live(gateway) as lines:
        await anext(lines)
        gateway.runtime.plane.entry_control.announce_shutdown()

        async for _ in lines:
            pass


async def test_the_ninth_page_is_refused_until_one_is_closed(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway:
        eight = [gateway.client.stream("GET", "/admin/live") for _ in range(8)]
        answers = [await stream.__aenter__() for stream in eight]
        assert {answer.status_code for answer in answers} == {200}

        refused = await gateway.client.get("/admin/live")
        for stream in eight:
            await stream.__aexit__(None, None, None)

        assert refused.status_code == 429
        while (await status(gateway)) != 200:
            await asyncio.sleep(0)


async def status(gateway) -> int:
    async with gateway.client.stream("GET", "/admin/live") as answer:
        return answer.status_code


async def test_it_needs_the_admin_key(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway, httpx.AsyncClient(trust_env=False) as stranger:
        for path in ("/admin/live", "/admin/what-if?strategy=roundrobin"):
            assert (await stranger.get(gateway.url + path)).status_code == 401


async def test_an_unknown_strategy_is_named(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway:
        answer = await gateway.client.get("/admin/what-if?strategy=best")

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "strategy"


async def test_decisions_are_found_by_a_part_of_the_request_id(run_gateway, instant_sim) -> None:
    async with run_gateway([instant_sim.url]) as gateway:
        for name in ("talk-1", "talk-2", "other"):
            await gateway.client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": name})

        found = (await gateway.client.get("/admin/decisions?request_id=talk")).json()["decisions"]

        assert [each["request_id"] for each in found] == ["talk-2", "talk-1"]
        assert found[0]["cached_tokens"] > 0
