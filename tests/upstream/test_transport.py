"""`WorkerTransport.send` over real sockets, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.sockets import free_port

from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    ProtocolViolation,
    ResponseTimeout,
)

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_request_and_answer_cross_as_they_are(
    serve: Any, connect: Any, read_request: Any, read_all: Any
) -> None:
    requests = []
    wire = (
        b"HTTP/1.1 418 I'm a Teapot\r\nSet-Cookie: a\r\nset-cookie: b\r\nContent-Encoding: gzip\r\n"
        b"Content-Length: 3\r\n\r\n\x1f\x8b\x00"
    )

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await read_request(reader))
        writer.write(wire)

    server = await serve(script)
    transport = connect(server.url)

    response = await transport.send(
        b"POST", b"/v1/x?y=%2F", [(b"host", b"h"), (b"X-A", b"\xe9"), (b"content-length", b"2")], b"{}"
    )

    assert requests == [
        (b"POST /v1/x?y=%2F HTTP/1.1\r\nhost: h\r\nX-A: \xe9\r\ncontent-length: 2\r\n\r\n", b"{}")
    ]
    assert (response.status, response.reason) == (418, b"I'm a Teapot")
    assert response.headers == [
        (b"Set-Cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"Content-Encoding", b"gzip"),
        (b"Content-Length", b"3"),
    ]
    assert (response.content_length, response.is_chunked) == (3, False)
    assert await read_all(response) == b"\x1f\x8b\x00"
    assert await response.next_chunk() == b""


async def test_an_answer_sent_byte_by_byte_reads_whole(
    serve: Any, connect: Any, read_request: Any, read_all: Any
) -> None:
    wire = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + STREAM_HEAD
        + b"5\r\nhello\r\n1;ext\r\n!\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await read_request(reader)
            for byte in wire:
                writer.write(bytes([byte]))
                await writer.drain()

    server = await serve(script)
    transport = connect(server.url)

    for _ in range(2):
        response = await transport.send(b"GET", b"/", [])
        assert response.headers == [
            (b"content-type", b"text/event-stream"),
            (b"Transfer-Encoding", b"chunked"),
        ]
        assert response.is_chunked
        assert await read_all(response) == b"hello!"

    assert server.accepted == 1


async def test_each_chunk_is_given_as_soon_as_it_arrives(serve: Any, connect: Any, read_request: Any) -> None:
    taken = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM_HEAD)
        for chunk in (b"1\r\na\r\n", b"1\r\nb\r\n1\r\nc\r\n", b"1\r\nd\r\n0\r\n\r\n"):
            writer.write(chunk)
            await taken.wait()
            taken.clear()

    server = await serve(script)
    response = await connect(server.url).send(b"GET", b"/", [])

    for expected in (b"a", b"bc", b"d"):
        assert await response.next_chunk() == expected
        taken.set()
    assert await response.next_chunk() == b""
    assert response.at_end


async def test_connections_are_kept_and_the_last_used_is_used_first(
    serve: Any, connect: Any, read_request: Any, read_all: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = server.accepted
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number)

    server = await serve(script)
    transport = connect(server.url)
    await transport.send(b"GET", b"/", [])
    await transport.send(b"GET", b"/", [], fresh=True)  # ends last
    assert transport.idle_connections == 2

    for _ in range(3):
        response = await transport.send(b"GET", b"/", [])
        assert response.reused
        assert await read_all(response) == b"2"

    assert server.accepted == 2


async def test_a_fresh_connection_can_be_requested(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(*[OK] * 9))
    transport = connect(server.url)
    await transport.send(b"GET", b"/", [])

    response = await transport.send(b"GET", b"/", [], fresh=True)

    assert not response.reused
    assert server.accepted == 2


async def test_small_packets_are_not_held_back(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url)
    response = await transport.send(b"GET", b"/", [])

    # Only the connection's own socket shows its options; the peer cannot see TCP_NODELAY.
    connection = next(iter(transport._pool._open))
    duplicate = connection._transport.get_extra_info("socket").dup()
    with duplicate:
        assert duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    assert response.at_end is False


@pytest.mark.parametrize("body_bytes", [0, 10, 70_000, 5_000_000])
async def test_bodies_of_every_size_arrive(
    serve: Any, connect: Any, read_request: Any, body_bytes: int
) -> None:
    bodies = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            bodies.append((await read_request(reader))[1])
            writer.write(OK)

    server = await serve(script)
    transport = connect(server.url)
    body = b"ab" * (body_bytes // 2)

    for _ in range(2):
        response = await transport.send(b"POST", b"/", [], body)
        assert await response.next_chunk() == b"hi"

    assert bodies == [body, body]
    assert server.accepted == 1


async def test_an_answer_before_the_body_was_read_gets_through(
    serve: Any, connect: Any, read_all: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nmuch")
        await writer.drain()
        await answered.wait()

    answered = asyncio.Event()
    server = await serve(script)
    transport = connect(server.url)

    response = await transport.send(b"POST", b"/", [], bytes(30_000_000))

    assert response.status == 413
    assert await read_all(response) == b"much"
    assert transport.idle_connections == 0
    answered.set()
    await server.until_all_closed()


async def test_a_close_delimited_answer_ends_with_the_connection(
    serve: Any, connect: Any, answers: Any, read_all: Any
) -> None:
    server = await serve(answers(b"HTTP/1.0 200 OK\r\n\r\nall of it", close=True))
    transport = connect(server.url)

    response = await transport.send(b"GET", b"/", [])

    assert await read_all(response) == b"all of it"
    assert transport.idle_connections == 0


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", STREAM_HEAD + b"5\r\nshort\r\n"]
)
async def test_an_answer_cut_short_is_connection_lost(
    serve: Any, connect: Any, answers: Any, reply: bytes
) -> None:
    server = await serve(answers(reply, close=True))
    response = await connect(server.url).send(b"GET", b"/", [])

    assert await response.next_chunk() == b"short"
    with pytest.raises(ConnectionLost) as lost:
        await response.next_chunk()

    assert lost.value.was_sent
    assert not lost.value.reused
    with pytest.raises(ConnectionLost):
        await response.next_chunk()


async def test_a_reset_within_the_answer_is_connection_lost_with_its_cause(
    serve: Any, connect: Any, read_request: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM_HEAD)
        await writer.drain()
        await started.wait()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    started = asyncio.Event()
    server = await serve(script)
    response = await connect(server.url).send(b"GET", b"/", [])
    started.set()

    with pytest.raises(ConnectionLost) as lost:
        await response.next_chunk()

    assert isinstance(lost.value.__cause__, ConnectionResetError)


async def test_a_connection_closed_before_any_answer_is_connection_lost(
    serve: Any, connect: Any, read_request: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.close()

    server = await serve(script)

    with pytest.raises(ConnectionLost) as lost:
        await connect(server.url).send(b"POST", b"/", [], b"x")

    assert (lost.value.was_sent, lost.value.reused) == (True, False)


async def test_a_kept_connection_that_was_closed_before_the_next_request_arrived_is_marked_as_reused(
    connect: Any,
) -> None:
    """The worker's keep-alive timer fires while the request is in flight."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        transport = connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
        first = asyncio.create_task(transport.send(b"GET", b"/", []))
        accepted, _ = await loop.sock_accept(listener)
        await loop.sock_recv(accepted, 65536)
        await loop.sock_sendall(accepted, OK)
        await first
        accepted.close()  # the loop has not read it when the next request is written

        with pytest.raises(ConnectionLost) as lost:
            await transport.send(b"GET", b"/", [])

    assert (lost.value.was_sent, lost.value.reused) == (True, True)


async def test_a_kept_connection_that_ends_after_the_request_has_arrived_is_a_lost_worker(
    serve: Any, connect: Any, read_request: Any
) -> None:
    """The worker may have computed it, and may have died of it."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.close()

    server = await serve(script)
    transport = connect(server.url)
    await transport.send(b"GET", b"/", [])

    with pytest.raises(ConnectionLost) as lost:
        await transport.send(b"GET", b"/", [])

    assert (lost.value.was_sent, lost.value.reused) == (True, False)


async def test_an_idle_connection_that_the_worker_closes_is_not_used_again(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(OK, close=True))
    transport = connect(server.url)
    await transport.send(b"GET", b"/", [])
    while transport.open_connections:  # until the loop has read the end of the connection
        await asyncio.sleep(0)

    response = await transport.send(b"GET", b"/", [])

    assert not response.reused
    assert await response.next_chunk() == b"hi"
    assert server.accepted == 2


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"])
async def test_bytes_that_are_no_http_are_a_protocol_violation(
    serve: Any, connect: Any, answers: Any, reply: bytes
) -> None:
    server = await serve(answers(reply))
    transport = connect(server.url)

    with pytest.raises(ProtocolViolation):
        await transport.send(b"GET", b"/", [])

    await server.until_all_closed()
    assert transport.open_connections == 0


async def test_a_closed_port_is_connect_refused(connect: Any) -> None:
    transport = connect(f"http://127.0.0.1:{free_port()}")

    with pytest.raises(ConnectRefused) as refused:
        await transport.send(b"GET", b"/", [])

    assert not refused.value.was_sent
    assert isinstance(refused.value.__cause__, ConnectionRefusedError)


async def test_an_impossible_host_name_is_connect_refused(connect: Any) -> None:
    """Refused by the IDNA codec (a label over 63 octets), so that no resolver is asked."""
    with pytest.raises(ConnectRefused) as refused:
        await connect(f"http://{'a' * 64}.invalid:1").send(b"GET", b"/", [])

    assert isinstance(refused.value.__cause__, UnicodeError)
    assert not refused.value.was_sent


async def test_a_handshake_that_does_not_end_is_connect_timeout(serve: Any, connect: Any) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    server = await serve(script)
    transport = connect(server.url.replace("http", "https"), connect_timeout_s=0.05)

    with pytest.raises(ConnectTimeout) as timeout:
        await transport.send(b"GET", b"/", [])

    assert not timeout.value.was_sent
    await server.until_all_closed()


async def test_a_full_accept_queue_is_connect_timeout(connect: Any) -> None:
    with socket.socket() as listener, socket.socket() as filler, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        for client in (filler, second):
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.connect(address)
        transport = connect(f"http://127.0.0.1:{address[1]}")

        with pytest.raises(ConnectTimeout):
            await transport.send(b"GET", b"/", [], connect_timeout_s=0.05)

        assert transport.open_connections == 0


async def test_no_head_within_the_deadline_is_response_timeout(
    serve: Any, connect: Any, answers: Any
) -> None:
    """Interim answers do not count as the head."""
    server = await serve(answers(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n"))
    transport = connect(server.url, first_byte_timeout_s=0.05)

    with pytest.raises(ResponseTimeout):
        await transport.send(b"GET", b"/", [])

    await server.until_all_closed()


async def test_silence_within_the_answer_is_response_timeout(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(STREAM_HEAD + b"1\r\na\r\n"))
    response = await connect(server.url).send(b"GET", b"/", [], idle_timeout_s=0.05)

    assert await response.next_chunk() == b"a"
    with pytest.raises(ResponseTimeout):
        await response.next_chunk()

    await server.until_all_closed()


async def test_a_deadline_of_one_request_does_not_reach_the_next_on_its_connection(
    serve: Any, connect: Any, read_request: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        await asyncio.get_running_loop().run_in_executor(None, released.wait)
        writer.write(OK)

    released = threading.Event()
    server = await serve(script)
    transport = connect(server.url)
    first = await transport.send(b"GET", b"/", [], first_byte_timeout_s=0.03, idle_timeout_s=0.03)
    second = asyncio.ensure_future(transport.send(b"GET", b"/", [], first_byte_timeout_s=0))
    asyncio.get_running_loop().call_later(0.1, released.set)

    response = await second

    assert response.reused
    assert await first.next_chunk() == b"hi"


async def test_a_slow_reader_holds_the_worker_back(serve: Any, connect: Any, read_request: Any) -> None:
    size = 64 * 1024 * 1024
    written = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        block = bytes(65536)
        for _ in range(size // len(block)):
            writer.write(block)
            try:
                async with asyncio.timeout(0.2):
                    await writer.drain()
            except TimeoutError:
                stalled.set()
                await writer.drain()
            written += len(block)

    stalled = asyncio.Event()
    server = await serve(script)
    response = await connect(server.url, read_buffer_bytes=100_000).send(b"GET", b"/", [])

    await stalled.wait()
    first = await response.next_chunk()
    assert len(first) <= 100_000 + 262_144
    received = len(first)
    while chunk := await response.next_chunk():
        assert len(chunk) <= 100_000 + 262_144
        received += len(chunk)

    assert received == written == size


async def test_abort_closes_the_socket_immediately(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(STREAM_HEAD + b"1\r\na\r\n"))
    transport = connect(server.url)
    response = await transport.send(b"GET", b"/", [])

    response.abort()

    await server.until_all_closed()
    assert await response.next_chunk() == b"a"
    with pytest.raises(ConnectionLost):
        await response.next_chunk()
    response.abort()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("steps", [*range(12), 20, 40, 80])
async def test_a_send_cancelled_anywhere_leaves_no_socket_and_no_place_taken(
    serve: Any,
    connect: Any,
    read_request: Any,
    server_tls: ssl.SSLContext,
    tls_file: Path,
    scheme: str,
    steps: int,
) -> None:
    """Cancelled after a number of turns of the loop: in the connect, the handshake, or before the head."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if hold.is_set():
            return
        writer.write(OK)

    hold = asyncio.Event()
    hold.set()
    server = await serve(script, server_tls if scheme == "https" else None)
    tls = ssl.create_default_context(cafile=tls_file) if scheme == "https" else None
    transport = connect(server.url, tls=tls, max_connections=1)
    sending = asyncio.ensure_future(transport.send(b"POST", b"/", [], b"x"))
    waiting = asyncio.ensure_future(transport.send(b"POST", b"/", [], b"y"))

    for _ in range(steps):
        await asyncio.sleep(0)
    sending.cancel()
    waiting.cancel()
    results = await asyncio.gather(sending, waiting, return_exceptions=True)

    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    await server.until_all_closed()
    assert transport.idle_connections == 0
    hold.clear()
    response = await transport.send(b"POST", b"/", [], b"z")
    assert await response.next_chunk() == b"hi"


async def test_a_reader_cancelled_in_its_wait_can_abort(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(STREAM_HEAD))
    transport = connect(server.url, max_connections=1)
    response = await transport.send(b"GET", b"/", [])

    async def relay() -> None:
        try:
            await response.next_chunk()
        finally:
            response.abort()

    relaying = asyncio.ensure_future(relay())
    await asyncio.sleep(0)
    relaying.cancel()
    await asyncio.gather(relaying, return_exceptions=True)

    await server.until_all_closed()
    assert transport.idle_connections == 0


async def test_https_workers_are_verified(
    serve: Any, connect: Any, answers: Any, server_tls: ssl.SSLContext, tls_file: Path
) -> None:
    server = await serve(answers(OK, OK), server_tls)
    trusting = ssl.create_default_context(cafile=tls_file)

    verified = await connect(server.url, tls=trusting).send(b"GET", b"/", [])
    unverified = await connect(server.url, verify_tls="off").send(b"GET", b"/", [])
    with pytest.raises(ConnectRefused) as refused:
        await connect(server.url).send(b"GET", b"/", [])

    assert await verified.next_chunk() == await unverified.next_chunk() == b"hi"
    assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)
    assert not refused.value.was_sent


async def test_a_stream_over_tls_can_be_aborted(
    serve: Any, connect: Any, answers: Any, server_tls: ssl.SSLContext
) -> None:
    server = await serve(answers(STREAM_HEAD + b"1\r\na\r\n"), server_tls)
    response = await connect(server.url, verify_tls=False).send(b"GET", b"/", [])
    assert await response.next_chunk() == b"a"

    response.abort()

    await server.until_all_closed()


async def test_closing_the_transport_ends_requests_in_flight(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(STREAM_HEAD))
    transport = connect(server.url)
    response = await transport.send(b"GET", b"/", [])
    reading = asyncio.ensure_future(response.next_chunk())
    await asyncio.sleep(0)

    await transport.aclose()

    assert transport.open_connections == 0
    with pytest.raises(ConnectionLost):
        await reading
    with pytest.raises(ConnectRefused):
        await transport.send(b"GET", b"/", [])
    await server.until_all_closed()


async def test_a_retired_transport_lets_running_answers_finish(
    serve: Any, connect: Any, read_request: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM_HEAD)
        await retired.wait()
        writer.write(b"4\r\nrest\r\n0\r\n\r\n")

    retired = asyncio.Event()
    server = await serve(script)
    transport = connect(server.url)
    response = await transport.send(b"GET", b"/", [])

    transport.retire()
    retired.set()

    assert await response.next_chunk() == b"rest"
    assert await response.next_chunk() == b""
    with pytest.raises(ConnectRefused) as refused:
        await transport.send(b"GET", b"/", [])
    assert not refused.value.was_sent
    await server.until_all_closed()


async def test_concurrent_requests_share_only_the_pool(
    serve: Any, connect: Any, read_request: Any, read_all: Any
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            writer.write(STREAM_HEAD)
            for byte in body:
                writer.write(b"1\r\n%c\r\n" % byte)
                await writer.drain()
            writer.write(b"0\r\n\r\n")

    server = await serve(script)
    transport = connect(server.url)

    async def exchange(number: int) -> None:
        body = b"request %d" % number
        response = await transport.send(b"POST", b"/", [], body)
        if number % 7 == 0:
            response.abort()
        else:
            assert await read_all(response) == body

    for _ in range(3):
        await asyncio.gather(*[exchange(number) for number in range(60)])

    assert transport.open_connections == transport.idle_connections


@pytest.mark.parametrize(
    "url",
    ["ftp://w", "http://", "w:1", "http://w/a b", "http://w?q", "http://user:secret@w", "http://w:99999"],
)
def test_a_url_that_is_not_an_origin_is_refused_without_repeating_it(url: str, connect: Any) -> None:
    with pytest.raises(ValueError) as refused:
        connect(url)

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://w", b"w"),
        ("http://w:80", b"w"),
        ("http://w:8000/", b"w:8000"),
        ("https://w:443", b"w"),
        ("https://w:80", b"w:80"),
        ("http://[::1]:8000", b"[::1]:8000"),
    ],
)
def test_the_host_header_is_that_of_the_url(url: str, host: bytes, connect: Any) -> None:
    assert connect(url).host == host


async def test_headers_that_break_the_framing_are_refused_before_anything_is_sent(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url)

    with pytest.raises(ValueError):
        await transport.send(b"POST", b"/", [(b"content-length", b"9")], b"x")

    assert server.accepted == 0
