"""Clients that say nothing, or half of something, are given up; slow ones and slow answers are not."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from tests.blackbox.raw import BODY, connected, post, statuses
from tests.support.waiting import until
from tests.support.workers import scripted_worker

MANY = 50
PATIENCE_S = 60.0
"""How long a test waits for what takes 30 s at most, on a machine with other work."""


@pytest.fixture
async def worker():
    async with scripted_worker() as running:
        yield running


async def statuses_after_timeouts(address: tuple[str, int], *segments: bytes) -> list[list[int]]:
    """The statuses on each connection, after the gateway has closed all connections; each sends one segment
    only."""

    async def one() -> list[int]:
        async with connected(address) as client:
            for segment in segments:
                await client.send(segment)
                await asyncio.sleep(0.05)
            return statuses(await client.read_all(PATIENCE_S))

    return await asyncio.gather(*(one() for _ in range(MANY)))


async def dripping(address: tuple[str, int]) -> list[int]:
    """A head of which a byte comes each half second."""
    async with connected(address) as client:
        reading = asyncio.create_task(client.read_all(PATIENCE_S))
        await client.send(b"GET /health HTTP/1.1\r\nhost: g\r\nx-a: ")
        while not reading.done():
            await client.send(b"a")
            await asyncio.wait([reading], timeout=0.5)
        return statuses(await reading)


async def uploading(address: tuple[str, int], size: int, bytes_per_s: int) -> list[int]:
    """A body that comes at this rate, ten times a second."""
    body = BODY[:-1] + b" " * (size - len(BODY)) + BODY[-1:]
    async with connected(address) as client:
        whole = post(b"connection: close", body=body)
        await client.send(whole[: -len(body)])
        part, began = bytes_per_s // 10, time.monotonic()
        for number, at in enumerate(range(0, len(body), part)):
            await client.send(body[at : at + part])
            await asyncio.sleep(max(0.0, began + number / 10 - time.monotonic()))
        return statuses(await client.read_all())


async def kept_waiting(worker, address: tuple[str, int]) -> list[int]:
    """A request whose answer takes longer than any wait for a client may."""
    async with connected(address) as client:
        await client.send(post(b"connection: close"))
        await until(lambda: worker.requests, within_s=PATIENCE_S)
        await asyncio.sleep(12)
        worker.may_answer.set()
        return statuses(await client.read_all())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("lane", ["true", "false"], ids=["fast lane", "ASGI path"])
async def test_each_wait_for_a_client_has_its_timeout(serve, worker, lane):
    gateway = await serve(
        "--worker", worker.url, "--set", f"server.fast_lane={lane}", "--set", "server.keep_alive_s=5"
    )
    address = gateway.address
    chunked = post(b"transfer-encoding: chunked", length=False, body=b"5\r\nhel")
    worker.may_answer.clear()

    seen = await asyncio.gather(
        statuses_after_timeouts(address),
        statuses_after_timeouts(address, b"\r\n"),
        statuses_after_timeouts(address, b"POST /v1/comple"),
        statuses_after_timeouts(address, post()[:-8]),
        statuses_after_timeouts(address, post()[:60], post()[60:-8]),
        statuses_after_timeouts(address, chunked),
        dripping(address),
        uploading(address, 600_000, 50_000),
        kept_waiting(worker, address),
        return_exceptions=True,
    )

    silent, blank, head, body, parts, chunks, drip, upload, answer = seen
    assert silent == blank == [[]] * MANY
    assert head == body == parts == chunks == [[408]] * MANY
    assert drip == [408]
    assert upload == answer == [200]
    async with httpx.AsyncClient(trust_env=False) as client:
        metrics = (await client.get(f"{gateway.url}/metrics")).text
    assert f'kvroute_client_timeouts_total{{wait="head"}} {MANY + 1}.0' in metrics
    assert f'kvroute_client_timeouts_total{{wait="body"}} {3 * MANY}.0' in metrics
    assert "Traceback" not in gateway.log
