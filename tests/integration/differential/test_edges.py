"""Where HTTP has edges: sizes, framing, order, and heads that no client should send."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

BODY = b'{"model": "sim-model", "prompt": "x", "max_tokens": 2}'
HEAD = b"Host: h\r\nContent-Type: application/json\r\nConnection: close\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
PLAIN = b"POST /v1/completions HTTP/1.1\r\n" + HEAD + LENGTH + b"\r\n" + BODY


def post(path: bytes, body: bytes, *, chunked: bool = False):
    """The bytes of one request, for `Pair.compare`."""

    def wire(host: bytes) -> list[bytes]:
        head = b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n" % (path, host)
        if not chunked:
            return [head, b"Content-Length: %d\r\n\r\n" % len(body), body]
        size = 300_000
        parts = [body[start : start + size] for start in range(0, len(body), size)]
        chunks = [piece for part in parts for piece in (b"%x\r\n" % len(part), part, b"\r\n")]
        return [head, b"Transfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"]

    return wire


def picture(size: int) -> bytes:
    """A chat with a picture, `size` bytes in all: few tokens for the engine."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}
    message = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    body = json.dumps({"model": "sim-model", "messages": [message], "max_tokens": 4}).encode()
    return body.replace(b"@", b"A" * (size - len(body) + 1))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [3_000_000, 16 * 1024 * 1024 - 1])
async def test_large_bodies_arrive_whole(pair, size, chunked) -> None:
    _, through = await pair.compare(post(b"/v1/chat/completions", picture(size), chunked=chunked))

    assert through.status == 200


async def test_a_large_text_that_no_model_takes_is_the_workers_to_refuse(pair) -> None:
    body = json.dumps({"prompt": "déjà vu " * 400_000}, ensure_ascii=False).encode()

    _, through = await pair.compare(post(b"/v1/completions", body))

    assert through.status == 400


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_the_gateways_to_refuse(pair, chunked) -> None:
    body = picture(18 * 1024 * 1024)

    await pair.compare(post(b"/v1/chat/completions", body, chunked=chunked), own=413)
    await pair.compare(post(b"/v1/completions", BODY))


async def test_stored_responses_are_continued_read_and_cancelled_alike(pair) -> None:
    stored = {"request_id": "resp_" + "5" * 32, "input": "Hello.", "max_output_tokens": 4}
    follow = {"previous_response_id": stored["request_id"], "input": "And?", "stream": True}
    path = b"/v1/responses/" + str(stored["request_id"]).encode()
    await pair.compare(post(b"/v1/responses", json.dumps(stored).encode()))
    await pair.compare(post(b"/v1/responses", json.dumps(follow).encode()))
    await pair.compare(post(path + b"/cancel", b""))

    for target, status in ((path, 200), (path + b"?stream=false", 200), (b"/v1/responses/resp_none", 404)):
        raw = b"GET %b HTTP/1.1\r\nConnection: close\r\nHost: h\r\n\r\n" % target
        direct, through = [await everything(url, [raw]) for url in (pair.alone.url, pair.gateway.url)]
        assert statuses(through) == statuses(direct) == [status]
        bodies = [pair.masked(answer.partition(b"\r\n\r\n")[2]) for answer in (direct, through)]
        assert bodies[0] == bodies[1]


ODD = {
    "bare line feeds": PLAIN.replace(b"\r\n", b"\n"),
    "empty lines before": b"\r\n\r\n" + PLAIN,
    "two spaces": PLAIN.replace(b"POST ", b"POST  "),
    "no version": PLAIN.replace(b" HTTP/1.1", b"", 1),
    "version 1.2": PLAIN.replace(b"HTTP/1.1", b"HTTP/1.2"),
    "version 2": PLAIN.replace(b"HTTP/1.1", b"HTTP/2.0"),
    "small http": PLAIN.replace(b"HTTP/1.1", b"http/1.1"),
    "small method": PLAIN.replace(b"POST", b"post"),
    "other method": PLAIN.replace(b"POST", b"PURGE"),
    "whole url": PLAIN.replace(b" /v1", b" http://h:80/v1"),
    "not ascii in the query": PLAIN.replace(b"completions ", b"completions?x=\xc3\xa9 "),
    "not ascii in the path": PLAIN.replace(b"completions ", b"completions\xc3\xa9 "),
    "a fragment": PLAIN.replace(b"completions ", b"completions?a=b#c "),
    "an empty query": PLAIN.replace(b"completions ", b"completions? "),
    "percent": PLAIN.replace(b"completions ", b"compl%65tions?%65=%00 "),
    "dots": PLAIN.replace(b" /v1", b" /v1/../v1"),
    "two slashes": PLAIN.replace(b" /v1", b" //v1"),
    "a slash behind": PLAIN.replace(b"completions ", b"completions/ "),
    "no host": PLAIN.replace(b"Host: h\r\n", b""),
    "two hosts": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nHost: i\r\n"),
    "no length": PLAIN.replace(LENGTH, b""),
    "length twice": PLAIN.replace(LENGTH, LENGTH + LENGTH),
    "two lengths": PLAIN.replace(LENGTH, LENGTH + b"Content-Length: 3\r\n"),
    "length with a sign": PLAIN.replace(b"Length: ", b"Length: +"),
    "length below zero": PLAIN.replace(b"Length: ", b"Length: -"),
    "length with zeros": PLAIN.replace(b"Length: ", b"Length: 000"),
    "length in hex": PLAIN.replace(b"Length: ", b"Length: 0x"),
    "length with spaces": PLAIN.replace(b"Length: ", b"Length: \t  ").replace(b"\r\n\r\n", b"  \r\n\r\n"),
    "a list of lengths": PLAIN.replace(LENGTH, b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY))),
    "no length value": PLAIN.replace(LENGTH, b"Content-Length:\r\n"),
    "length beyond 64 bits": PLAIN.replace(b"Length: ", b"Length: 99999999999999999999"),
    "length and chunked": PLAIN.replace(LENGTH, LENGTH + b"Transfer-Encoding: chunked\r\n"),
    "chunked and length": PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked\r\n" + LENGTH),
    "an unknown coding": PLAIN.replace(LENGTH, b"Transfer-Encoding: rot13\r\n"),
    "identity": PLAIN.replace(LENGTH, b"Transfer-Encoding: identity\r\n" + LENGTH),
    "space before the colon": PLAIN.replace(b"Host:", b"Host :"),
    "space before the name": PLAIN.replace(b"Host:", b" Host:"),
    "a folded line": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX-Fold: a\r\n b\r\n"),
    "no colon": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nnonsense\r\n"),
    "no name": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\n: x\r\n"),
    "a name with a space": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX Y: x\r\n"),
    "a name that is not ascii": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX-\xe9: x\r\n"),
    "NUL in a value": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX-Nul: a\0b\r\n"),
    "DEL in a value": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX-Del: a\x7fb\r\n"),
    "CR in a value": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX-Cr: a\rb\r\n"),
    "LF after a value": PLAIN.replace(b"Host: h\r\n", b"Host: h\nX-Lf: a\r\n"),
    "spaces around values": PLAIN.replace(b"Host: h\r\n", b"Host:h\r\nX-Space: \t a  b\t \r\nX-None:   \r\n"),
    "many headers": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\n" + b"X-Many: 1\r\n" * 2_000),
    "a huge header": PLAIN.replace(b"Host: h\r\n", b"Host: h\r\nX-Huge: " + b"x" * 300_000 + b"\r\n"),
    "chunked twice": PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked, chunked\r\n"),
    "expect": PLAIN.replace(LENGTH, LENGTH + b"Expect: 100-continue\r\n"),
    "expect something else": PLAIN.replace(LENGTH, LENGTH + b"Expect: a miracle\r\n"),
    "upgrade to h2c": PLAIN.replace(
        b"close", b"close, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x"
    ),
    "upgrade to websocket": PLAIN.replace(b"close", b"close, Upgrade\r\nUpgrade: websocket"),
    "upgrade without connection": PLAIN.replace(b"close", b"close\r\nUpgrade: h2c"),
    "two requests": PLAIN.replace(b"close", b"keep-alive") + PLAIN.replace(b'"x"', b'"y"'),
    "a slow path between": PLAIN.replace(b"close", b"keep-alive")
    + b"GET /version HTTP/1.1\r\nHost: h\r\n\r\n"
    + PLAIN,
    "an empty line between": PLAIN.replace(b"close", b"keep-alive") + b"\r\n" + PLAIN,
    "bytes behind the last": PLAIN + b"GET / HTTP/1.1\r\n\r\n",
    "a broken chunk": PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked\r\n").replace(
        BODY, b"zz\r\n" + BODY
    ),
    "a chunk that is too long": PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked\r\n").replace(
        BODY, b"3\r\n" + BODY + b"\r\n0\r\n\r\n"
    ),
    "trailers": PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked\r\nTrailer: x-t\r\n").replace(
        BODY, b"%x\r\n%b\r\n0\r\nX-T: 1\r\n\r\n" % (len(BODY), BODY)
    ),
}


OWN = {
    "no version": 505,
    "version 1.2": 505,
    "version 2": 505,
    "dots": 400,
    "no host": 400,
    "two spaces": 400,
    "two hosts": 400,
    "an unknown coding": 501,
    "many headers": 431,
    "a huge header": 431,
}
"""What the gateway refuses by itself, however its workers take it."""


async def test_odd_heads_are_taken_and_refused_alike(pair) -> None:
    different = {}
    for name, raw in ODD.items():
        if name in OWN:
            assert await outcome(pair.gateway.url, pair.behind, [raw]) == ([OWN[name]], []), name
            continue
        direct = await outcome(pair.alone.url, pair.alone, [raw])
        through = await outcome(pair.gateway.url, pair.behind, [raw])
        refused_here = min(through[0]) >= 400 and through == (direct[0], [])
        if name == "percent":  # workers get the endpoint's own path
            direct[1][0] = ("POST", "/v1/completions?%65=%00", BODY)
        if through != direct and not refused_here:
            different[name] = (direct, through)

    assert different == {}


async def test_requests_that_come_byte_by_byte_are_read_alike(pair) -> None:
    for name in (
        "a fragment",
        "length with spaces",
        "spaces around values",
        "expect",
        "trailers",
    ):
        raw = ODD[name]
        pieces = [raw[at : at + 1] for at in range(len(raw))]
        direct = await outcome(pair.alone.url, pair.alone, [raw])

        assert direct[0] == [200], name
        assert await outcome(pair.gateway.url, pair.behind, pieces) == direct, name


async def outcome(url: str, sim, parts: list[bytes]) -> tuple[list[int], list[object]]:
    """The statuses of all answers, and what reached the worker."""
    sim.worker.received.clear()
    raw_answer = await everything(url, parts)
    asked = [request for request in sim.worker.received if request.method != "GET"]
    return statuses(raw_answer), [(request.method, request.target, request.body) for request in asked]


async def everything(url: str, parts: list[bytes]) -> bytes:
    """All that the server says until it closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0)
            return await reader.read()
    finally:
        writer.close()


def statuses(answers: bytes) -> list[int]:
    """Of the final answers, in order."""
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]
    return [status for status in found if status >= 200]
