"""No client makes the gateway keep a head without bounds: it is answered 431 while it comes, and closed."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from tests.blackbox.raw import BODY, answers_to, connected, post, statuses
from tests.support.workers import scripted_worker

MB = 1_000_000
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = post(b"connection: close")


@pytest.fixture
async def worker():
    async with scripted_worker() as running:
        yield running


@pytest.fixture(params=["true", "false"], ids=["fast lane", "ASGI path"])
async def gateway(request, serve, worker):
    return await serve("--worker", worker.url, "--set", f"server.fast_lane={request.param}")


async def endless(gateway, begin: bytes, part: bytes, most: int) -> tuple[int, bytes]:
    """Send `begin`, then `part` again and again until the gateway ends the connection or `most` bytes went;
    how many did, and what was answered. Others are answered meanwhile."""
    sent = 0
    async with connected(gateway.address) as client, httpx.AsyncClient(trust_env=False) as other:
        reading = asyncio.create_task(client.read_all(60))
        client.writer.write(begin)
        with contextlib.suppress(ConnectionError):
            while sent < most and not reading.done():
                client.writer.write(part)
                sent += len(part)
                await client.writer.drain()
                if sent % (20 * len(part)) == 0:
                    assert (await other.get(f"{gateway.url}/health", timeout=10)).status_code == 200
        if sent >= most:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return sent, client.received
        return sent, await reading


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"GET /health HTTP/1.1\r\nhost: g\r\n", b"".join(b"x-%d: y\r\n" % n for n in range(20_000))),
        (b"GET /health HTTP/1.1\r\nhost: g\r\nx-a: ", b"a" * 200_000),
        (b"GET /health HTTP/1.1\r\nhost: g\r\n", (b"x-a: " + b"a" * 8_000 + b"\r\n") * 20),
        (b"GET /health?", b"a" * 200_000),
        (
            CHUNKED + b"5\r\nhello\r\n0\r\n",
            b"".join(b"x-%d: y\r\n" % n for n in range(20_000)),
        ),
        (
            CHUNKED + b"5;",
            b"e" * 200_000,
        ),
    ],
    ids=["many lines", "one long line", "long lines", "a long target", "trailers", "a chunk extension"],
)
async def test_a_head_without_an_end_is_refused_while_it_comes(gateway, begin, part):
    before = gateway.peak_rss_mb

    sent, answered = await endless(gateway, begin, part, 60 * MB)

    assert statuses(answered) == [431]
    assert b"connection: close" in answered
    assert sent < 20 * MB
    assert gateway.peak_rss_mb - before < 30


@pytest.mark.parametrize(
    "lines",
    [
        (b"x-a: " + b"a" * 17_000,),
        tuple(b"x-%d: y" % number for number in range(140)),
        tuple(b"x-%d: " % number + b"a" * 8_000 for number in range(9)),
    ],
    ids=["line", "lines", "head"],
)
async def test_each_limit_holds_for_a_head_that_comes_whole(gateway, worker, lines):
    answered = await answers_to(gateway.address, post(*lines))

    assert statuses(answered) == [431]
    assert b'"code": "head_too_large"' in answered
    assert worker.requests == []


async def test_heads_within_the_limits_are_served(gateway, worker):
    large = post(
        *[b"x-%d: y" % number for number in range(110)],
        *[b"x-large-%d: " % number + b"a" * 14_000 for number in range(4)],
        b"connection: close",
    )

    assert statuses(await answers_to(gateway.address, large)) == [200]
    assert statuses(
        await answers_to(gateway.address, *[large[at : at + 700] for at in range(0, len(large), 700)])
    )
    assert [request.endswith(BODY) for request in worker.requests] == [True, True]


async def test_a_trailer_never_becomes_a_header(gateway, worker):
    chunked = b"%x\r\n%b\r\n0\r\nx-secret: 1\r\nauthorization: Bearer t\r\n\r\n" % (len(BODY), BODY)
    request = post(b"transfer-encoding: chunked", b"connection: close", length=False, body=chunked)

    assert statuses(await answers_to(gateway.address, request)) == [200]
    (asked,) = worker.requests
    assert b"x-secret" not in asked
    assert b"Bearer t" not in asked


async def test_an_absolute_target_without_a_path_is_the_root(serve, sim):
    gateway = await serve("--worker", await sim("--time-scale", "0"))
    heads = [
        b"GET %b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" % target
        for target in (b"/", b"http://h", b"http://h:80", b"http://h?x=1")
    ]
    answers = [await answers_to(gateway.address, head) for head in heads]
    assert len({answer.split(b"\r\n", 1)[0] for answer in answers}) == 1
    assert not answers[0].startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("line", [b"GET  /health HTTP/1.1", b"GET /health  HTTP/1.1"])
async def test_two_spaces_in_a_request_line_are_refused(serve, sim, line):
    gateway = await serve("--worker", await sim("--time-scale", "0"))
    head = line + b"\r\nHost: h\r\nConnection: close\r\n\r\n"
    for segments in ([head], [head[:2], head[2:4], head[4:]], [b"\r\n" + head[:9], head[9:]]):
        assert (await answers_to(gateway.address, *segments)).startswith(b"HTTP/1.1 400")
