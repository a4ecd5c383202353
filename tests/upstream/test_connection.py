"""Bytes in, exchange out: the protocol object without a socket, cut at every place a segment can end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import ConnectionLost, ProtocolViolation, UpstreamError
from kvroute.upstream.connection import MAX_HEAD_BYTES, UpstreamConnection
from kvroute.upstream.response import UpstreamResponse
from kvroute.upstream.writes import Outbox


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unsent = 0
        self.is_paused = False
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        assert not self.is_paused
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused
        self.is_paused = False


@dataclass
class Owner:
    events: list[str] = field(default_factory=list)

    def connection_opened(self, connection: UpstreamConnection) -> None:
        self.events.append("opened")

    def exchange_ended(self, connection: UpstreamConnection) -> None:
        self.events.append("kept" if connection.is_open else "dropped")

    def connection_closed(self, connection: UpstreamConnection) -> None:
        self.events.append("closed")


class Bench:
    """A connection between a recording transport and a recording owner. Needs a running loop."""

    def __init__(self, read_buffer_bytes: int = 1 << 20) -> None:
        self.owner = Owner()
        self.transport = RecordingTransport()
        self.connection = UpstreamConnection(
            self.owner, asyncio.get_running_loop(), origin="http://w", read_buffer_bytes=read_buffer_bytes
        )
        self.connection.connection_made(self.transport)

    def start(self, method: bytes = b"POST") -> UpstreamResponse:
        response = UpstreamResponse(idle_timeout_s=0)
        self.connection.start(b"head", b"body", response, is_head_request=method == b"HEAD")
        return response

    def feed(self, *segments: bytes) -> None:
        """As a loop would: nothing more after the transport was aborted."""
        for segment in segments:
            if not self.transport.is_aborted:
                self.connection.data_received(segment)

    def lose(self, exc: Exception | None = None) -> None:
        self.connection.connection_lost(exc)


async def drain(response: UpstreamResponse) -> tuple[bytes, UpstreamError | None]:
    """What a reader gets: all bytes, and the error that ends them, if any. Never waits."""
    body = b""
    try:
        while chunk := await asyncio.wait_for(response.next_chunk(), 5):
            body += chunk
    except UpstreamError as exc:
        return body, exc
    return body, None


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@dataclass(frozen=True)
class Answer:
    wire: bytes
    body: bytes
    is_kept: bool
    headers: list[tuple[bytes, bytes]]


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """An answer that ends by itself, in any framing that HTTP/1.1 has for that."""
    interim = b"".join(
        draw(
            st.lists(
                st.sampled_from(
                    [
                        b"HTTP/1.1 100 Continue\r\n\r\n",
                        b"HTTP/1.1 102 Processing\r\nA: b\r\n\r\n",
                        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nLink: </y>\r\n\r\n",
                    ]
                ),
                max_size=2,
            )
        )
    )
    chunks = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    body = b"".join(chunks)
    headers = [(b"X-Twice", b"1"), (b"x-twice", b"2"), (b"Empty", b"")]
    is_kept = draw(st.booleans())
    if not is_kept:
        headers.append((b"Connection", b"close"))
    framing = draw(st.sampled_from(["length", "chunked", "none"]))
    if framing == "chunked":
        headers.append((b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked"]))))
        extension = draw(st.sampled_from([b"", b";ext=1"]))
        payload = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks)
        trailers = draw(st.sampled_from([b"", b"Trailer: 1\r\n", b"A: b\r\nC: d\r\n"]))
        payload += b"0\r\n" + trailers + b"\r\n"
        status = b"200 OK"
    elif framing == "length":
        headers.append((b"Content-Length", b"%d" % len(body)))
        payload, status = body, b"207 Odd Status"
    else:
        payload = body = b""
        status = draw(st.sampled_from([b"204 No Content", b"304 Not Modified"]))
        if status.startswith(b"304"):
            headers.append((b"Content-Length", b"11"))
    head = b"".join(b"%b: %b\r\n" % header for header in headers)
    return Answer(
        interim + b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n" + payload, body, is_kept, headers
    )


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(wire) for place in places}), len(wire)]
    return [wire[a:b] for a, b in itertools.pairwise(edges) if a < b]


@settings(max_examples=150, deadline=None)
@given(answers(), st.lists(st.integers(0, 10_000), max_size=12))
def test_an_answer_reads_the_same_however_it_is_cut(answer: Answer, places: list[int]) -> None:
    async def scenario() -> None:
        bench = Bench()
        response = bench.start()

        bench.feed(*cut(answer.wire, places))

        await response.head(0)
        assert response.headers == answer.headers
        assert response.status in (200, 204, 207, 304)
        assert await drain(response) == (answer.body, None)
        assert response.at_end
        assert bench.connection.is_open == answer.is_kept
        assert bench.transport.is_aborted == (not answer.is_kept)
        assert bench.owner.events == ["opened", "kept" if answer.is_kept else "dropped"]

    run(scenario())


@settings(max_examples=100, deadline=None)
@given(answers(), answers(), st.lists(st.integers(0, 10_000), max_size=6))
def test_nothing_of_one_answer_shows_in_the_next(first: Answer, second: Answer, places: list[int]) -> None:
    """Trailers, interim heads and reasons of the first one stay with it."""

    async def scenario() -> None:
        bench = Bench()
        bench.start()
        bench.feed(*cut(first.wire, places))
        if not bench.connection.is_open:
            return

        response = bench.start()
        bench.feed(*cut(second.wire, places))

        await response.head(0)
        assert response.reused
        assert response.headers == second.headers
        assert await drain(response) == (second.body, None)

    run(scenario())


@settings(max_examples=150, deadline=None)
@given(answers(), st.lists(st.integers(0, 10_000), max_size=6), st.integers(0, 10_000))
def test_an_answer_that_ends_early_gives_its_bytes_and_then_connection_lost(
    answer: Answer, places: list[int], end: int
) -> None:
    async def scenario() -> None:
        kept = answer.wire[: end % len(answer.wire)]
        bench = Bench()
        response = bench.start()

        if kept:
            bench.feed(*cut(kept, places))
        bench.connection.eof_received()
        bench.lose()

        body, error = await drain(response)
        assert type(error) is ConnectionLost
        assert error.was_sent
        assert answer.body.startswith(body)
        assert not response.at_end
        assert bench.owner.events == ["opened", "dropped", "closed"]

    run(scenario())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=30), max_size=5), st.integers(0, 10_000))
def test_an_answer_without_framing_ends_with_the_connection(chunks: list[bytes], place: int) -> None:
    async def scenario() -> None:
        bench = Bench()
        response = bench.start()

        bench.feed(*cut(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\n", [place]), *chunks)
        assert bench.connection.is_open
        bench.connection.eof_received()
        bench.lose()

        assert (response.content_length, response.is_chunked) == (None, False)
        assert await drain(response) == (b"".join(chunks), None)
        assert bench.owner.events == ["opened", "dropped", "closed"]

    run(scenario())


async def test_a_request_for_a_stream_is_written_immediately_while_others_wait() -> None:
    outbox, loop = Outbox(), asyncio.get_running_loop()
    other = RecordingTransport()
    for _ in range(20):  # several writes in one iteration: from the next one on writes wait
        outbox.send(other, b"x")
    await asyncio.sleep(0)
    written = {}
    for is_streamed in (False, True):
        transport = RecordingTransport()
        connection = UpstreamConnection(
            Owner(), loop, origin="http://w", read_buffer_bytes=1 << 20, outbox=outbox
        )
        connection.connection_made(transport)
        connection.start(b"head", b"body", UpstreamResponse(idle_timeout_s=0), is_streamed=is_streamed)
        written[is_streamed] = bytes(transport.written)
    assert written == {False: b"", True: b"headbody"}
    outbox.flush()


async def test_the_tail_of_a_body_follows_it() -> None:
    bench = Bench()

    body = memoryview(b'{"a":1}')[:-1]
    bench.connection.start(b"head", body, UpstreamResponse(idle_timeout_s=0), tail=b',"b":2}')

    assert bench.transport.written == b'head{"a":1,"b":2}'


async def test_an_answer_without_framing_that_breaks_with_an_error_is_not_whole() -> None:
    bench = Bench()
    response = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\n\r\nsome")

    cause = ConnectionResetError()
    bench.lose(cause)

    body, error = await drain(response)
    assert body == b"some"
    assert isinstance(error, ConnectionLost)
    assert error.__cause__ is cause


@pytest.mark.parametrize(
    "wire",
    [
        b"\x16\x03\x01 this is TLS",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\nA: b\n\n",
        b"HTTP/1.1 200 OK\r\nA b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a size\r\n",
    ],
)
async def test_an_answer_that_is_no_http_is_a_protocol_violation(wire: bytes) -> None:
    bench = Bench()
    response = bench.start()

    bench.feed(wire)

    body, error = await drain(response)
    assert body == b""
    assert type(error) is ProtocolViolation
    assert bench.transport.is_aborted
    assert bench.owner.events == ["opened", "dropped"]


async def test_bytes_before_bad_framing_are_given_first() -> None:
    bench = Bench()
    response = bench.start()

    bench.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n")

    body, error = await drain(response)
    assert body == b"abc"
    assert isinstance(error, ProtocolViolation)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("where", ["header", "name", "reason", "trailer", "interim"])
async def test_a_head_over_the_limit_is_a_protocol_violation(where: str, is_cut: bool) -> None:
    one = b"A: " + b"x" * 1000 + b"\r\n"
    many = one * (MAX_HEAD_BYTES // 1000 + 2)
    wire = {
        "header": b"HTTP/1.1 200 OK\r\n" + many,
        "name": b"HTTP/1.1 200 OK\r\n" + b"x" * MAX_HEAD_BYTES,
        "reason": b"HTTP/1.1 200 " + b"x" * MAX_HEAD_BYTES,
        "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + many,
        "interim": (b"HTTP/1.1 103 Early Hints\r\n" + one + b"\r\n") * (MAX_HEAD_BYTES // 1000 + 1),
    }[where]
    bench = Bench()
    response = bench.start()

    bench.feed(*cut(wire, list(range(0, len(wire), 700)) if is_cut else []))

    _, error = await drain(response)
    assert isinstance(error, ProtocolViolation)
    assert "larger than" in str(error)


async def test_a_large_body_in_the_heads_segment_does_not_count_as_head() -> None:
    bench = Bench()
    response = bench.start()
    body = b"x" * (2 * MAX_HEAD_BYTES)

    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    assert await drain(response) == (body, None)


async def test_bytes_after_an_answer_end_the_connection_but_not_the_answer() -> None:
    for extra in (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"garbage"):
        bench = Bench()
        response = bench.start()

        bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi" + extra)

        assert await drain(response) == (b"hi", None)
        assert not bench.connection.is_open
        assert bench.transport.is_aborted


async def test_bytes_on_an_idle_connection_close_it() -> None:
    bench = Bench()
    bench.start()
    bench.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert bench.connection.is_open

    bench.feed(b"HTTP/1.1 408 Request Timeout\r\n\r\n")

    assert not bench.connection.is_open
    assert bench.transport.is_aborted


async def test_an_answer_to_head_has_no_body_and_ends_the_connection() -> None:
    for tail in (
        b"Content-Length: 5\r\n\r\n",
        b"Content-Length: 0\r\n\r\n",
        b"Content-Length: 5\r\n\r\nwrong",
    ):
        bench = Bench()
        response = bench.start(b"HEAD")

        bench.feed(b"HTTP/1.1 200 OK\r\n" + tail)

        assert await drain(response) == (b"", None)
        assert response.content_length in (0, 5)
        assert not bench.connection.is_open


async def test_an_answer_before_the_whole_request_was_written_ends_the_connection() -> None:
    bench = Bench()
    response = bench.start()
    bench.transport.unsent = 1

    bench.feed(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 2\r\n\r\nno")

    await response.head(0)
    assert response.status == 413
    assert await drain(response) == (b"no", None)
    assert bench.transport.is_aborted


@pytest.mark.parametrize(
    ("version", "keep_alive", "is_kept"), [(b"1.0", b"", False), (b"1.0", b"keep-alive", True)]
)
async def test_http_1_0_keeps_the_connection_only_with_keep_alive(
    version: bytes, keep_alive: bytes, is_kept: bool
) -> None:
    bench = Bench()
    response = bench.start()

    bench.feed(b"HTTP/%b 200\r\nConnection: %b\r\nContent-Length: 1\r\n\r\nx" % (version, keep_alive))

    assert await drain(response) == (b"x", None)
    assert response.http_version == b"HTTP/1.0"
    assert response.reason == b""
    assert bench.connection.is_open == is_kept


async def test_reading_pauses_above_the_limit_and_resumes_when_parts_are_taken() -> None:
    bench = Bench(read_buffer_bytes=100)
    response = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")

    bench.feed(b"x" * 100)
    assert not bench.transport.is_paused
    bench.feed(b"y")
    assert bench.transport.is_paused
    bench.feed(b"z")

    assert await response.next_chunk() == b"x" * 100 + b"yz"
    assert not bench.transport.is_paused
    bench.feed(b"w" * 99)
    assert not bench.transport.is_paused
    response.abort()


async def test_framing_without_body_bytes_never_pauses_reading() -> None:
    """Reading could not resume, because there would be no byte to take."""
    bench = Bench(read_buffer_bytes=10)
    response = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;")

    bench.feed(*[b"e" * 20] * 10)

    assert not bench.transport.is_paused
    response.abort()


async def test_a_connection_that_ended_while_paused_is_read_on_for_the_next_exchange() -> None:
    bench = Bench(read_buffer_bytes=10)
    first = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n", b"x" * 20)
    assert bench.transport.is_paused

    bench.feed(b"x" * 20)

    assert not bench.transport.is_paused
    assert bench.connection.is_open
    second = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny")
    assert await drain(first) == (b"x" * 40, None)
    assert await drain(second) == (b"y", None)


async def test_abort_after_the_end_leaves_the_next_exchange_alone() -> None:
    bench = Bench()
    first = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    second = bench.start()

    first.abort()
    first.abort()

    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny")
    assert await drain(first) == (b"x", None)
    assert await drain(second) == (b"y", None)
    assert bench.connection.is_open


async def test_abort_wakes_the_reader_and_is_idempotent() -> None:
    bench = Bench()
    response = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    reader = asyncio.ensure_future(drain(response))
    await asyncio.sleep(0)

    response.abort()
    response.abort()
    bench.lose()
    response.abort()

    body, error = await reader
    assert body == b""
    assert isinstance(error, ConnectionLost)
    assert bench.owner.events == ["opened", "dropped", "closed"]


async def test_a_response_has_one_reader_and_a_connection_one_exchange() -> None:
    bench = Bench()
    response = bench.start()
    reader = asyncio.ensure_future(response.next_chunk())
    await asyncio.sleep(0)

    with pytest.raises(RuntimeError):
        await response.next_chunk()
    with pytest.raises(RuntimeError):
        bench.start()

    response.abort()
    with pytest.raises(ConnectionLost):
        await reader
    with pytest.raises(RuntimeError):
        bench.start()


async def test_a_cancelled_reader_loses_no_bytes() -> None:
    bench = Bench()
    response = bench.start()
    bench.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n")
    reader = asyncio.ensure_future(response.next_chunk())
    await asyncio.sleep(0)

    reader.cancel()
    bench.feed(b"ab")
    await asyncio.gather(reader, return_exceptions=True)
    bench.feed(b"cd")

    assert await drain(response) == (b"abcd", None)


async def test_a_kept_connection_whose_end_shows_nothing_of_the_request_does_not_count_as_reused() -> None:
    fresh, kept, started = Bench(), Bench(), Bench()
    for bench in (kept, started):
        bench.start()
        bench.feed(b"HTTP/1.1 204 No Content\r\n\r\n")
    responses = [bench.start() for bench in (fresh, kept, started)]
    started.feed(b"HT")

    errors = []
    for bench, response in zip((fresh, kept, started), responses, strict=True):
        bench.lose()
        errors.append((await drain(response))[1])

    assert [error is not None and error.reused for error in errors] == [False, False, False]
