"""Chunked answers whose chunks bypass the parser: a reader of framed chunks gets the same bytes as other
readers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import ConnectionLost, ProtocolViolation, UpstreamError
from kvroute.upstream.connection import UpstreamConnection
from kvroute.upstream.response import PlainAnswers, UpstreamResponse, unframed

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def framed(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Owner:
    def connection_opened(self, connection: UpstreamConnection) -> None: ...

    def exchange_ended(self, connection: UpstreamConnection) -> None: ...

    def connection_closed(self, connection: UpstreamConnection) -> None: ...


class Listener:
    """Takes every chunk framed, if `takes` says so."""

    def __init__(self, takes: Callable[[], bool] = lambda: True) -> None:
        self._takes = takes
        self.body = b""
        self.taken_framed = 0
        self.is_over = False
        self.error: UpstreamError | None = None

    def answer_arrived(self, response: UpstreamResponse) -> None:
        self.body += response.take()
        self.is_over, self.error = response.is_over, response.error
        if not response.is_over:
            self._decide(response)

    def _decide(self, response: UpstreamResponse) -> None:
        def take(framed: bytes) -> None:
            self.taken_framed += 1
            self.body += unframed(framed)
            assert unframed(framed) != framed
            self._decide(response)

        response.on_framed_chunk = take if self._takes() else None


async def feed(listener: Listener, *segments: bytes) -> UpstreamConnection:
    """As a loop would: nothing more after the socket was closed."""
    socket = Socket()
    connection = UpstreamConnection(
        Owner(), asyncio.get_running_loop(), origin="http://w", read_buffer_bytes=1 << 20
    )
    connection.connection_made(socket)
    connection.start(b"head", b"", UpstreamResponse(idle_timeout_s=0, listener=listener))
    for segment in segments:
        if not socket.is_aborted:
            connection.data_received(segment)
    return connection


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=60), max_size=6),
    cuts=st.sets(st.integers(0, 600)),
    taking=st.lists(st.booleans(), min_size=1, max_size=5),
    last=st.sampled_from([LAST, b"0\r\nA: b\r\n\r\n"]),
)
def test_any_cut_gives_the_same_body(chunks, cuts, taking, last):
    wire = HEAD + b"".join(map(framed, chunks)) + last
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(wire)), len(wire)]
    segments = [wire[start:end] for start, end in itertools.pairwise(places)]
    turns = iter(taking * 1000)
    listener = Listener(lambda: next(turns))

    connection = asyncio.run(feed(listener, *segments))

    assert listener.body == b"".join(chunks)
    assert listener.is_over
    assert listener.error is None
    assert connection.is_open


async def test_chunks_that_come_one_by_one_are_taken_with_their_framing():
    listener = Listener()

    connection = await feed(listener, HEAD, framed(b"one"), framed(b"two") + framed(b"three"), LAST)

    assert (listener.body, listener.taken_framed) == (b"onetwothree", 1)
    assert connection.is_open


@pytest.mark.parametrize(
    "chunk",
    [
        b"03\r\none\r\n",
        b"3;a=b\r\none\r\n",
        b"A\r\n0123456789\r\n",
    ],
)
async def test_a_framing_that_we_would_not_write_is_the_parsers(chunk):
    listener = Listener()

    connection = await feed(listener, HEAD, chunk, framed(b"two"), LAST)

    assert listener.body.endswith(b"two")
    assert listener.taken_framed == 0
    assert listener.is_over
    assert connection.is_open


@pytest.mark.parametrize(
    "bad", [b"3\r\nonexx", b"+3\r\none\r\n", b"0x3\r\none\r\n", b"\r\n3\r\none\r\n", b"g\r\n"]
)
async def test_bad_framing_is_a_violation(bad):
    listener = Listener()

    connection = await feed(listener, HEAD, framed(b"one"), bad)

    assert isinstance(listener.error, ProtocolViolation)
    assert not connection.is_open


async def test_bytes_after_the_end_close_the_connection():
    listener = Listener()

    connection = await feed(listener, HEAD, framed(b"one"), LAST + b"HTTP/1.1 200 OK\r\n")

    assert listener.body == b"one"
    assert listener.error is None
    assert not connection.is_open


async def test_a_stream_that_ends_without_its_end_is_lost():
    listener = Listener()

    connection = await feed(listener, HEAD, framed(b"one"))
    connection.connection_lost(None)

    assert isinstance(listener.error, ConnectionLost)


def test_a_chunked_head_is_plain():
    answer = PlainAnswers().read(HEAD)

    assert answer is not None
    assert (answer.body_bytes, answer.is_event_stream) == (None, True)
    assert answer.fields == b"content-type: text/event-stream\r\n"


@pytest.mark.parametrize("part", [b"", b"data: {}\n\n", b"3\r\nonex\r\n", b"3\r\non", b"x3\r\none\r\n"])
def test_bytes_that_are_no_chunk_are_left_unchanged(part):
    assert unframed(part) == part
