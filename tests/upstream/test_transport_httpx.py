"""`WorkerTransport` as httpx's transport, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import kvroute.errors
from kvroute.upstream import transport as transport_module

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_our_transport_gives_the_same_answers_as_httpxs_default_one(
    serve: Any, connect: Any, read_request: Any
) -> None:
    seen: list[tuple[bytes, bytes]] = []
    packed = gzip.compress(b'{"a": 1}', mtime=0)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(
            b"HTTP/1.1 201 Made\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
            b"X: 1\r\nx: 2\r\n"
            b"Content-Length: %d\r\n\r\n" % len(packed) + packed
        )

    server = await serve(script)

    async def ask(transport: httpx.AsyncBaseTransport) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
            return await client.post("/v1/a?b=c%20d", json={"é": [1]}, headers={"X-Twice": "1"})

    ours = await ask(connect(server.url))
    default = await ask(httpx.AsyncHTTPTransport())

    assert ours.json() == default.json() == {"a": 1}
    assert ours.headers.raw == default.headers.raw
    assert (ours.status_code, ours.reason_phrase, ours.http_version) == (201, "Made", "HTTP/1.1")
    assert (default.status_code, default.reason_phrase, default.http_version) == (201, "Made", "HTTP/1.1")
    assert seen[0] == seen[1]


async def test_a_streamed_request_body_is_sent_with_its_length(
    serve: Any, connect: Any, read_request: Any
) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    server = await serve(script)
    async with httpx.AsyncClient(transport=connect(server.url), base_url=server.url) as client:
        response = await client.post("/", content=body())

    assert response.status_code == 204
    head, sent = seen[0]
    assert sent == b"onetwo"
    assert b"Content-Length: 6\r\n" in head
    assert b"ransfer-" not in head


async def test_leaving_a_streamed_answer_early_closes_its_connection(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(STREAM_HEAD + b"1\r\na\r\n"))
    transport = connect(server.url)
    async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
        async with client.stream("GET", "/") as response:
            stream = response.aiter_raw()
            assert await anext(stream) == b"a"

        await server.until_all_closed()
        assert transport.open_connections == 0
        await stream.aclose()


async def test_a_whole_answer_leaves_its_connection_in_the_pool(
    serve: Any, connect: Any, answers: Any
) -> None:
    reply = STREAM_HEAD + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    server = await serve(answers(reply, reply))
    async with httpx.AsyncClient(transport=connect(server.url), base_url=server.url) as client:
        assert [(await client.get("/")).content for _ in range(2)] == [b"ab", b"ab"]

    assert server.accepted == 1


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", httpx.ReadError),
        (b"nonsense", httpx.RemoteProtocolError),
        (STREAM_HEAD + b"zz\r\n", httpx.RemoteProtocolError),
    ],
)
async def test_a_workers_fault_is_an_httpx_exception(
    serve: Any, connect: Any, answers: Any, reply: bytes, error: type[httpx.TransportError]
) -> None:
    server = await serve(answers(reply, close=True))
    async with httpx.AsyncClient(transport=connect(server.url), base_url=server.url) as client:
        with pytest.raises(error) as raised:
            await client.get("/")

    assert raised.value.request.url == server.url + "/"
    assert isinstance(raised.value.__cause__, kvroute.errors.UpstreamError)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"])
async def test_httpx_read_timeout_bounds_each_silence(
    serve: Any, connect: Any, answers: Any, reply: bytes
) -> None:
    server = await serve(answers(reply))
    async with httpx.AsyncClient(transport=connect(server.url), base_url=server.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/", timeout=httpx.Timeout(None, read=0.05))


async def test_connecting_fails_as_in_httpx(serve: Any, connect: Any, answers: Any) -> None:
    silent = await serve(answers())
    url = silent.url.replace("http", "https")
    async with httpx.AsyncClient(transport=connect(url)) as client:
        with pytest.raises(httpx.ConnectTimeout):
            await client.get(url, timeout=httpx.Timeout(None, connect=0.05))
    await silent.close()
    async with httpx.AsyncClient(transport=connect(silent.url)) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(silent.url)


async def test_another_origin_and_a_bad_request_are_refused(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers())
    async with httpx.AsyncClient(transport=connect(server.url)) as client:
        with pytest.raises(httpx.UnsupportedProtocol):
            await client.get("http://elsewhere.invalid/")
        with pytest.raises(httpx.LocalProtocolError):
            await client.get(server.url, headers={"content-length": "7"})

    assert server.accepted == 0


async def test_a_client_closes_the_transport(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(b"HTTP/1.1 204 No Content\r\n\r\n"))
    transport = connect(server.url)

    async with httpx.AsyncClient(transport=transport, base_url=server.url) as client:
        await client.get("/")
        assert transport.idle_connections == 1

    assert transport.open_connections == 0


def test_every_upstream_error_has_its_httpx_exception() -> None:
    assert set(transport_module._HTTPX_ERRORS) == set(kvroute.errors.UpstreamError.__subclasses__())
