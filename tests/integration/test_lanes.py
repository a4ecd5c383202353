"""Both lanes answer each input with the same bytes, and send the same bytes to workers."""

import asyncio
import contextlib
import re

import pytest

from kvroute.http.asgi import InferenceEndpoint

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
LAST = b"GET /version HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n"
"""Ends a connection in order, so that a case can be read to its end."""


def post(*lines: bytes, target: bytes = b"/v1/chat/completions", body: bytes = BODY) -> bytes:
    """A POST with exactly these header lines."""
    head = b"POST %b HTTP/1.1\r\nhost: g\r\nx-request-id: r1\r\n" % target
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


def length(body: bytes = BODY) -> bytes:
    return b"content-length: %d" % len(body)


PLAIN = post(length(), b"content-type: application/json", b"connection: keep-alive")
BLANK = PLAIN.index(b"\r\n\r\n") + 3
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: g\r\nx: "

CASES: dict[str, list[bytes]] = {
    "plain": [PLAIN, LAST],
    "head in two segments": [PLAIN[:60], PLAIN[60:], LAST],
    "split inside the blank line": [PLAIN[:BLANK], PLAIN[BLANK:], LAST],
    "body in two segments": [PLAIN[:-20], PLAIN[-20:], LAST],
    "byte by byte": [*[PLAIN[n : n + 1] for n in range(len(PLAIN))], LAST],
    "body and next request in one segment": [PLAIN[:-20], PLAIN[-20:] + LAST],
    "three in one segment": [PLAIN + PLAIN + PLAIN + LAST],
    "plain after unusual after plain": [PLAIN, post(length(), b"x-a: 1", b"x-a: 2"), PLAIN, LAST],
    "the last one closes": [PLAIN, post(length(), b"connection: close")],
    "blank lines before": [b"\r\n\r\n" + PLAIN, LAST],
    "blank lines between": [PLAIN + b"\r\n\r\n" + PLAIN, LAST],
    "no host": [PLAIN.replace(b"host: g\r\n", b""), LAST],
    "two hosts": [post(length(), b"host: other"), LAST],
    "request id of its own": [PLAIN.replace(b"x-request-id: r1\r\n", b""), LAST],
    "request id that is not printable": [PLAIN.replace(b"r1", b"\xe9"), LAST],
    "obsolete text in a value": [post(length(), b"x-a: \xe9\xff"), LAST],
    "an empty value": [post(length(), b"x-a:"), LAST],
    "blanks around a value": [post(length(), b"x-a: \t 1 \t "), LAST],
    "a long header": [post(length(), b"x-a: " + b"a" * 20_000), LAST],
    "many headers": [post(length(), *[b"x-%d: 1" % n for n in range(300)]), LAST],
    "names in capitals": [PLAIN.replace(b"content-type", b"Content-TYPE"), LAST],
    "connection names a header": [post(length(), b"connection: keep-alive, x-a", b"x-a: 1"), LAST],
    "hop by hop": [post(length(), b"te: trailers", b"keep-alive: 5", b"proxy-connection: x"), LAST],
    "an upgrade to h2c": [post(length(), b"connection: upgrade", b"upgrade: h2c"), LAST],
    "a websocket": [post(length(), b"connection: upgrade", b"upgrade: websocket"), LAST],
    "100-continue": [post(length(), b"expect: 100-continue"), LAST],
    "another expectation": [post(length(), b"expect: something"), LAST],
    "chunked": [post(b"transfer-encoding: chunked", body=CHUNKED), LAST],
    "chunked with trailers": [
        post(b"transfer-encoding: chunked", body=CHUNKED[:-2] + b"content-length: 9\r\nx-t: 1\r\n\r\n"), LAST
    ],
    "length then chunked": [post(length(), b"transfer-encoding: chunked", body=CHUNKED), LAST],
    "chunked then length": [post(b"transfer-encoding: chunked", length(), body=CHUNKED), LAST],
    "chunked in capitals with a length": [post(length(), b"Transfer-Encoding: CHUNKED", body=CHUNKED), LAST],
    "a blank before the colon": [post(length(), b"transfer-encoding : chunked", body=CHUNKED), LAST],
    "an unknown coding": [post(length(), b"transfer-encoding: xchunked", body=CHUNKED), LAST],
    "identity": [post(length(), b"transfer-encoding: identity"), LAST],
    "a folded coding": [post(length(), b"transfer-encoding:\r\n chunked", body=CHUNKED), LAST],
    "a folded value": [post(length(), b"x-a: 1\r\n 2"), LAST],
    "a folded length": [post(b"content-length:\r\n %d" % len(BODY)), LAST],
    "a tab before the first header": [PLAIN.replace(b"host:", b"\tx: 1\r\nhost:"), LAST],
    "two equal lengths": [post(length(), length()), LAST],
    "two lengths": [post(length(), b"content-length: 5", body=BODY + SMUGGLED), LAST],
    "two lengths, the short one first": [post(b"content-length: 5", length(), body=BODY + SMUGGLED), LAST],
    "a list of lengths": [post(b"content-length: %d, 5" % len(BODY)), LAST],
    "a length with a plus": [post(b"content-length: +%d" % len(BODY)), LAST],
    "a hexadecimal length": [post(b"content-length: 0x%x" % len(BODY)), LAST],
    "a negative length": [post(b"content-length: -5"), LAST],
    "a length with leading zeros": [post(b"content-length: 000%d" % len(BODY)), LAST],
    "a length beyond 64 bits": [post(b"content-length: 99999999999999999999"), LAST],
    "a length over the limit": [post(b"content-length: 70000", body=b"x" * 70_000), LAST],
    "an empty length": [post(b"content-length:"), LAST],
    "length zero": [post(b"content-length: 0", body=b""), LAST],
    "no length": [post(body=b""), LAST],
    "a body without length": [post(), LAST],
    "bytes after the body": [PLAIN + SMUGGLED + b"y\r\n\r\n", LAST],
    "garbage after the body": [PLAIN + b"\x00\x01garbage\r\n\r\n", LAST],
    "bare line feeds": [PLAIN.replace(b"\r\n", b"\n"), LAST],
    "one bare line feed": [post(length(), b"x-a: 1\nx-b: 2"), LAST],
    "a bare carriage return": [post(length(), b"x-a: 1\rx-b: 2"), LAST],
    "a smuggled request behind a bare carriage return": [post(length(), b"x-a: 1\r" + SMUGGLED), LAST],
    "NUL in a value": [post(length(), b"x-a: 1\x002"), LAST],
    "a control character": [post(length(), b"x-a: \x01"), LAST],
    "NUL in a name": [post(length(), b"x\x00a: 1"), LAST],
    "no colon": [post(length(), b"x-a"), LAST],
    "no name": [post(length(), b": 1"), LAST],
    "a blank in a name": [post(length(), b"x a: 1"), LAST],
    "a quote in a name": [post(length(), b'x"a: 1'), LAST],
    "method in lower case": [PLAIN.replace(b"POST", b"post"), LAST],
    "an unknown method": [PLAIN.replace(b"POST", b"POUND"), LAST],
    "two blanks": [PLAIN.replace(b"POST ", b"POST  "), LAST],
    "a tab for a blank": [PLAIN.replace(b"POST ", b"POST\t"), LAST],
    "HTTP/1.0": [PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0")],
    "HTTP/1.2": [PLAIN.replace(b"HTTP/1.1", b"HTTP/1.2"), LAST],
    "HTTP/2.0": [PLAIN.replace(b"HTTP/1.1", b"HTTP/2.0"), LAST],
    "no version": [b"POST /v1/chat/completions\r\n\r\n"],
    "absolute form": [post(length(), target=b"http://g/v1/chat/completions"), LAST],
    "a query": [post(length(), target=b"/v1/chat/completions?a=%20b&c"), LAST],
    "a fragment": [post(length(), target=b"/v1/chat/completions#f"), LAST],
    "a quoted path": [post(length(), target=b"/v1/chat%2Fcompletions"), LAST],
    "dots in the path": [post(length(), target=b"/v1/../v1/chat/completions"), LAST],
    "a slash at the end": [post(length(), target=b"/v1/chat/completions/"), LAST],
    "two slashes": [post(length(), target=b"//v1/chat/completions"), LAST],
    "another endpoint": [post(length(), target=b"/v1/embeddings"), LAST],
    "no endpoint": [post(length(), target=b"/v1/nothing"), LAST],
    "not JSON": [post(length(b"{nonsense"), body=b"{nonsense"), LAST],
    "an unknown model": [post(length(b'{"model":"other"}'), body=b'{"model":"other"}'), LAST],
    "an unknown model for Anthropic's client": [
        post(length(b'{"model":"other"}'), body=b'{"model":"other"}', target=b"/v1/messages"), LAST
    ],
    "refused, then plain": [post(length(b"["), body=b"["), PLAIN, LAST],
}  # fmt: skip

OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS: dict[str, bytes] = {
    "a length": OK + b"Content-Type: application/json\r\ncontent-length: 2\r\n\r\n{}",
    "nothing": OK + b"content-length: 0\r\n\r\n",
    "chunked": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunked and empty": OK + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "trailers": OK + b"transfer-encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nx-t: 1\r\n\r\n",
    "no reason": b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\n{}",
    "an unknown status": b"HTTP/1.1 599 Odd\r\ncontent-length: 2\r\n\r\n{}",
    "204": b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\netag: x\r\n\r\n",
    "early hints": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK + b"content-length: 2\r\n\r\n{}",
    "odd headers": OK + b"X-A:1\r\nx-a:  2 \r\nX-Empty:\r\nX-B: \xe9\r\ncontent-length: 2\r\n\r\n{}",
    "its own request id": OK + b"X-Request-Id: w\r\nX-KVRoute-Worker: w\r\ncontent-length: 2\r\n\r\n{}",
    "hop by hop": OK + b"connection: x-a\r\nx-a: 1\r\nkeep-alive: 5\r\nupgrade: h2c\r\n"
    b"content-length: 2\r\n\r\n{}",
    "large": OK + b"content-length: 300000\r\n\r\n" + b"x" * 300_000,
    "closes, as it says": OK + b"connection: close\r\ncontent-length: 2\r\n\r\n{}",
    "an error": b'HTTP/1.1 500 Internal Server Error\r\ncontent-length: 12\r\n\r\n{"error": 1}',
    "not HTTP": b"nonsense\r\n\r\n",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}}",
    "length and chunked": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
    "a bad chunk in a stream": OK + b"content-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\na\r\ndata: {}\n\n\r\nzz\r\n",
}  # fmt: skip
CUT = {
    "before a byte": b"",
    "inside the head": OK + b"content-le",
    "after the head": OK + b"content-length: 5\r\n\r\n",
    "inside the body": OK + b"content-length: 5\r\n\r\nhe",
    "inside a chunk": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhe",
    "inside a stream": OK + b"content-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\na\r\ndata: {}\n\n\r\n",
    "at the end without framing": OK + b"content-type: text/plain\r\n\r\nhello",
}


@pytest.fixture
def lane():
    """Every test here starts both."""
    return "both"


@contextlib.asynccontextmanager
async def both(run_gateway, url, **server):
    options = {"max_body_bytes": 60_000, **server}
    # The cases send one body: it must not be refused because its worker broke off in the cases before.
    retries = {"refuse_s": 0}
    async with (
        run_gateway([url], server={**options, "fast_lane": True}, retries=retries) as fast,
        run_gateway([url], server={**options, "fast_lane": False}, retries=retries) as complete,
    ):
        yield fast, complete


async def answers_to(gateway, segments: list[bytes]) -> bytes:
    """Everything that the gateway answers to these segments, until it closes."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    with contextlib.suppress(ConnectionError):
        for segment in segments:
            writer.write(segment)
            await writer.drain()
            for _ in range(3):
                await asyncio.sleep(0)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                received += data
    writer.close()
    return re.sub(rb"(x-request-id: )[0-9a-f]{32}", rb"\1made", received)


async def test_framing_of_requests(run_gateway, raw_worker):
    different, answered = {}, 0
    async with both(run_gateway, raw_worker.url) as (fast, complete):
        for name, segments in CASES.items():
            raw_worker.requests.clear()
            one = await answers_to(fast, segments), tuple(raw_worker.requests)
            raw_worker.requests.clear()
            other = await answers_to(complete, segments), tuple(raw_worker.requests)
            seen = [re.sub(rb"(x-request-id: )[0-9a-f]{32}", rb"\1made", sent) for sent in one[1]]
            same = [re.sub(rb"(x-request-id: )[0-9a-f]{32}", rb"\1made", sent) for sent in other[1]]
            answered += b"HTTP/1.1 200" in one[0]
            if (one[0], seen) != (other[0], same):
                different[name] = (one[0], seen), (other[0], same)
            assert not any(b"smuggled" in sent.split(b"\r\n\r\n")[0] for sent in seen), name
        assert (
            fast.runtime.plane.entry_control.in_flight == complete.runtime.plane.entry_control.in_flight == 0
        )

    assert different == {}, different
    assert answered > 40


async def test_framing_of_answers(run_gateway, raw_worker):
    different = {}
    async with both(run_gateway, raw_worker.url) as (fast, complete):
        for closes, answers in ((False, ANSWERS), (True, CUT)):
            for name, answer in answers.items():
                raw_worker.answer, raw_worker.closes_after_answer = answer, closes
                one, other = await answers_to(fast, [PLAIN, LAST]), await answers_to(complete, [PLAIN, LAST])
                if one != other or not one:
                    different[name] = one, other

    assert different == {}, different


async def test_keys(run_gateway, raw_worker):
    cases = [
        [post(length()), LAST],
        [post(length(), b"authorization: Bearer wrong"), LAST],
        [post(length(), b"authorization: Bearer sesame"), LAST],
        [post(length(), b"Authorization: bearer sesame", b"x-a: 1"), LAST],
        [post(length(), b"x-api-key: sesame"), LAST],
    ]
    async with both(run_gateway, raw_worker.url, api_keys=["sesame"]) as (fast, complete):
        answers = [(await answers_to(fast, case), await answers_to(complete, case)) for case in cases]

    assert [one == other for one, other in answers] == [True] * 5
    assert [one.split(b" ", 2)[1] for one, _ in answers] == [b"401", b"401", b"200", b"200", b"200"]
    assert all(
        b"sesame" not in sent.split(b"\r\n\r\n")[0].split(b"x-api-key")[0] for sent in raw_worker.requests
    )


async def test_both_lanes_count_the_same_metrics(run_gateway, raw_worker):
    async with both(run_gateway, raw_worker.url) as (fast, complete):
        for gateway in (fast, complete):
            for segments in (
                CASES["plain"],
                CASES["not JSON"],
                CASES["an unknown model"],
                CASES["three in one segment"],
            ):
                await answers_to(gateway, segments)
            await gateway.until(lambda gateway=gateway: gateway.metric("kvroute_requests_total") == 6)

        def counted(gateway):
            return {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for family in gateway.runtime.metrics.registry.collect()
                for sample in family.samples
                if re.fullmatch("kvroute_(?!.*probe).*(_total|_count|_in_flight)", sample.name)
            }

        assert counted(fast) == counted(complete)


async def test_plain_requests_do_not_pass_through_asgi(run_gateway, raw_worker, monkeypatch):
    calls = []
    complete_way = InferenceEndpoint.__call__

    async def counting(self, scope, receive, send):
        calls.append(scope["path"])
        await complete_way(self, scope, receive, send)

    monkeypatch.setattr(InferenceEndpoint, "__call__", counting)
    async with both(run_gateway, raw_worker.url) as (fast, complete):
        host, port = fast.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for segment in (PLAIN, PLAIN[:-9], PLAIN[-9:], PLAIN):
            writer.write(segment)
            if segment.endswith(b"}"):
                assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        assert calls == []
        await answers_to(fast, CASES["chunked"])
        await answers_to(complete, CASES["plain"])

    assert len(calls) == 2


async def opened(gateway):
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_client_that_leaves_before_its_body_is_complete_is_counted(run_gateway, raw_worker):
    async with both(run_gateway, raw_worker.url) as gateways:
        for gateway in gateways:
            _, writer = await opened(gateway)
            writer.write(PLAIN[:-5])
            await writer.drain()
            await gateway.until(lambda gateway=gateway: len(gateway.server.server_state.connections) == 1)
            writer.write_eof()
            await gateway.until(
                lambda gateway=gateway: gateway.metric("kvroute_requests_total", status="499") == 1
            )
            writer.close()

    assert raw_worker.requests == []


async def test_an_idle_connection_is_closed_after_its_time(run_gateway, raw_worker):
    async with both(run_gateway, raw_worker.url, keep_alive_s=1) as gateways:
        for gateway in gateways:
            reader, writer = await opened(gateway)
            writer.write(PLAIN)
            assert (await reader.read()).endswith(b"{}")
            writer.close()


async def test_a_connection_is_not_idle_while_its_next_request_is_answered(run_gateway, raw_worker):
    async with both(run_gateway, raw_worker.url, keep_alive_s=1) as (fast, _):
        idle, (reader, writer) = await opened(fast), await opened(fast)
        for each_reader, each_writer in ((reader, writer), idle):
            each_writer.write(PLAIN)
            await each_reader.readuntil(b"{}")
        raw_worker.may_answer.clear()
        writer.write(PLAIN)
        await fast.until(lambda: len(raw_worker.requests) == 3)

        assert await idle[0].read() == b""  # the gateway closes the connection that is really idle
        raw_worker.may_answer.set()

        assert (await reader.readuntil(b"{}")).startswith(OK)
        idle[1].close()
        writer.close()


async def test_a_client_that_does_not_read_holds_the_worker_back(run_gateway, raw_worker):
    size = 64 * 1024 * 1024
    raw_worker.answer = OK + b"content-length: %d\r\n\r\n" % size + bytes(size)
    async with both(run_gateway, raw_worker.url) as gateways:
        for gateway in gateways:
            reader, writer = await opened(gateway)
            writer.transport.pause_reading()
            writer.write(PLAIN)
            seen = []

            def is_held(gateway=gateway, seen=seen):
                """Whether the client's connection is full and the worker sent nothing during 50 polls."""
                seen.append(raw_worker.unsent_bytes)
                clients = [c for c in gateway.server.server_state.connections if c.flow.write_paused]
                return clients and seen[-1] and len(seen) >= 50 and len({*seen[-50:]}) == 1

            await gateway.until(is_held)
            (client,) = [c for c in gateway.server.server_state.connections if c.flow.write_paused]
            assert client.transport.get_write_buffer_size() < 1024 * 1024
            assert raw_worker.unsent_bytes > size // 2
            writer.transport.resume_reading()
            received = await reader.readuntil(b"\r\n\r\n")
            assert received.startswith(OK)
            assert len(await reader.readexactly(size)) == size
            writer.close()
