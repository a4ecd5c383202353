"""What SIGTERM, SIGINT and SIGHUP do to a gateway that serves traffic."""

from __future__ import annotations

import asyncio
import json
import signal

import httpx
import pytest

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
LONG_STREAM = {**CHAT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
DEADLINE_S = 60.0
LANES = ["on", "off"]


async def serve_with_delay(serve, delay_s: float, *arguments: str, **settings):
    """A gateway with a shutdown delay. An executable that knows no such option runs without one."""
    try:
        return await serve(*arguments, "--set", f"server.shutdown_delay_s={delay_s:g}", **settings)
    except AssertionError as error:
        if "shutdown_delay_s" not in str(error):
            raise
        return await serve(*arguments, **settings)


def client_of(url: str, **settings) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, trust_env=False, verify=False, **settings)


async def ready_status(client: httpx.AsyncClient) -> int:
    return (await client.get("/ready")).status_code


async def read_events(answer: httpx.Response, first: asyncio.Event) -> list[str]:
    """The data of each event; sets `first` with the first."""
    events = []
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            events.append(line.removeprefix("data: "))
            first.set()
    return events


async def stream(client: httpx.AsyncClient, first: asyncio.Event, body=LONG_STREAM) -> list[str]:
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        return await read_events(answer, first)


# The delay


@pytest.mark.parametrize("lane", LANES)
async def test_during_the_delay_the_gateway_is_not_ready_and_serves_everything(serve, sim, lane):
    gateway = await serve_with_delay(
        serve, 60, "--worker", await sim("--time-scale", "0"), "--set", f"server.fast_lane={lane}"
    )
    async with client_of(gateway.url) as kept:
        before = await kept.post("/v1/chat/completions", json=CHAT)
        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while await ready_status(kept) != 503:
                pass
        reasons = (await kept.get("/ready")).json()["reasons"]
        answers = [await kept.post("/v1/chat/completions", json=CHAT)]
        for _ in range(20):  # new connections
            async with client_of(gateway.url) as fresh:
                answers += [await fresh.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
                answers += [await fresh.get("/v1/models"), await fresh.get("/health")]

    assert "connection" not in before.headers
    assert reasons == ["the gateway is shutting down"]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers.get("connection") for answer in answers} == {"close"}
    assert all(answer.headers.get_list("connection") == ["close"] for answer in answers)
    assert await gateway.stop(signal.SIGINT) == 0  # which ends the delay


async def test_after_the_delay_running_streams_finish_and_the_exit_code_is_zero(serve, sim):
    worker = await sim("--time-scale", "1")
    gateway = await serve_with_delay(serve, 0.5, "--worker", worker)
    first, body = asyncio.Event(), {**LONG_STREAM, "max_tokens": 300}
    async with client_of(gateway.url) as client:
        running = asyncio.create_task(stream(client, first, body))
        await first.wait()
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.logged("waiting for 1 requests")
        with pytest.raises(httpx.ConnectError):
            async with client_of(gateway.url) as fresh:
                await fresh.get("/health")

        assert (await running)[-1] == "[DONE]"
    assert await gateway.ended() == 0


async def test_every_process_of_a_gateway_keeps_to_the_delay(serve, sim):
    gateway = await serve_with_delay(
        serve, 60, "--worker", await sim("--time-scale", "0"), "--processes", "2", workers=2
    )
    gateway.process.send_signal(signal.SIGTERM)
    statuses = set()
    async with asyncio.timeout(DEADLINE_S):
        unready = 0
        while unready < 20:  # both processes have got the signal
            async with client_of(gateway.url) as fresh:
                unready = unready + 1 if await ready_status(fresh) == 503 else 0
    for _ in range(20):
        async with client_of(gateway.url) as fresh:
            statuses.add((await fresh.post("/v1/chat/completions", json=CHAT)).status_code)
    gateway.process.send_signal(signal.SIGTERM)  # changes nothing
    async with client_of(gateway.url) as fresh:
        statuses.add((await fresh.post("/v1/chat/completions", json=CHAT)).status_code)

    assert statuses == {200}
    assert await gateway.stop(signal.SIGINT) == 0


# Further signals


@pytest.mark.parametrize("count", [1, 2])
async def test_each_further_sigint_ends_a_stage_and_a_further_sigterm_none(serve, sim, count):
    gateway = await serve_with_delay(
        serve, 600, "--worker", await sim("--time-scale", "1"), "--processes", str(count),
        "--set", "server.drain_timeout_s=600", workers=count,
    )  # fmt: skip
    first = asyncio.Event()
    async with client_of(gateway.url) as client:
        running = asyncio.create_task(stream(client, first))
        await first.wait()
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.logged("still serving")
        gateway.process.send_signal(signal.SIGTERM)
        async with client_of(gateway.url) as fresh:
            assert (await fresh.post("/v1/chat/completions", json=CHAT)).status_code == 200

        gateway.process.send_signal(signal.SIGINT)
        await gateway.logged("waiting for 1 requests")
        gateway.process.send_signal(signal.SIGTERM)
        assert not running.done()

        gateway.process.send_signal(signal.SIGINT)
        events = await running
    assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    assert await gateway.ended() == 0


# SIGHUP


@pytest.mark.parametrize("count", [1, 2])
async def test_sighup_without_a_changed_configuration_is_harmless(serve, sim, count):
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"), "--processes", str(count), workers=count
    )
    gateway.process.send_signal(signal.SIGHUP)
    await gateway.logged("nothing has changed")

    async with client_of(gateway.url) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert await ready_status(client) == 200
    assert gateway.process.returncode is None
    assert await gateway.stop() == 0


# Many streams


class RawStream(asyncio.Protocol):
    """One streamed chat on a connection of its own, with as little work as a client can have."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.began: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.is_whole = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        body = json.dumps({**LONG_STREAM, "max_tokens": 300}).encode()
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

    def data_received(self, data: bytes) -> None:
        if not self.began.done():
            self.began.set_result(None)
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self.is_whole = b"data: [DONE]" in self._tail
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.began, self.closed):
            if not future.done():
                future.set_result(None)


@pytest.mark.load
async def test_sigterm_under_500_streams_cuts_none_before_the_drain_limit(serve, sim):
    workers = [argument for _ in range(2) for argument in ("--worker", await sim("--max-sequences", "512"))]
    gateway = await serve_with_delay(serve, 0.5, *workers)
    loop = asyncio.get_running_loop()
    streams = [(await loop.create_connection(RawStream, *gateway.address))[1] for _ in range(500)]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(each.began for each in streams))
        running = sum(not each.closed.done() for each in streams)
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(each.closed for each in streams))

    assert running == 500
    assert sum(each.is_whole for each in streams) == 500
    assert await gateway.ended() == 0
    assert '"cut ' not in gateway.log
