"""The trimmed protocol says what uvicorn's says, and does less for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.http.asgi import FIELDS, IS_SIZED, disconnect_signal_of
from kvroute.http.asgi_protocol import TrimmedProtocol

GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"
JSON = (b"content-type", b"application/json")


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_paused = self.was_paused = self.is_closed = False

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def pause_reading(self) -> None:
        self.is_paused = self.was_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def connected(application: Any, protocol_class: type[HttpToolsProtocol] = TrimmedProtocol) -> Any:
    config = Config(
        application, http=protocol_class, ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.load()
    protocol = protocol_class(config, ServerState(), {})
    protocol.connection_made(Transport())
    return protocol


def answering(*messages: dict[str, Any]) -> Any:
    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            if not message:
                raise ValueError("a defect of the application")
            await send(dict(message))

    return application


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


ANSWERS = {
    "a length": [start(JSON, (b"content-length", b"4")), body(b"1234")],
    "a length in parts": [start((b"content-length", b"4")), body(b"12", more=True), body(b"34")],
    "chunks": [start(JSON), body(b"12", more=True), body(b"", more=True), body(b"345")],
    "an empty end": [start(JSON), body(b"12", more=True), body(b"")],
    "no body": [start(JSON), body(b"")],
    "a large body": [start(JSON), body(b"x" * 100_000)],
    "204": [start(status=204), body(b"")],
    "304 with a length": [start((b"content-length", b"0"), status=304), body(b"")],
    "an unknown status": [start(status=599), body(b"")],
    "close": [start((b"connection", b"close"), (b"content-length", b"1")), body(b"1")],
    "transfer-encoding": [start((b"transfer-encoding", b"chunked")), body(b"12")],
    "two lengths": [start((b"content-length", b"2"), (b"content-length", b"2")), body(b"12")],
    "upper case": [start((b"Content-Type", b"x"), (b"Content-Length", b"2")), body(b"12")],
    "not ASCII": [start((b"x-name", "é".encode())), body(b"12")],
    "a line break": [start((b"x-name", b"a\r\nb: c")), body(b"12")],
    "a line break at the end": [start((b"x-name", b"a\r\n")), body(b"12")],
    "a bad name": [start((b"x name", b"a")), body(b"12")],
    "an empty value": [start((b"x-name", b"")), body(b"12")],
    "a bad length": [start((b"content-length", b"two")), body(b"12")],
    "too short": [start((b"content-length", b"4")), body(b"12")],
    "too long": [start((b"content-length", b"1")), body(b"12")],
    "a defect": [{}],
    "a defect within": [start(JSON), body(b"12", more=True), {}],
    "not begun": [body(b"12")],
    "begun twice": [start(JSON), start(JSON)],
    "after the end": [start(JSON), body(b"12"), body(b"34")],
    "nothing": [],
    "not ended": [start(JSON), body(b"12", more=True)],
}
REQUESTS = {
    "1.1": GET,
    "1.0": GET.replace(b"1.1", b"1.0"),
    "HEAD": GET.replace(b"GET", b"HEAD"),
    "close": GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
}


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("messages", ANSWERS.values(), ids=ANSWERS)
async def test_answers_are_the_same_bytes_as_uvicorns(
    messages: list[dict[str, Any]], request_bytes: bytes
) -> None:
    both = [connected(answering(*messages), each) for each in (HttpToolsProtocol, TrimmedProtocol)]
    for protocol in both:
        protocol.data_received(request_bytes)
        await rounds()

    expected, trimmed = (protocol.transport for protocol in both)
    assert trimmed.written == expected.written
    assert trimmed.is_closed == expected.is_closed


async def test_a_head_and_the_first_of_its_body_are_one_write() -> None:
    protocol = connected(answering(start(JSON), body(b"1234")))

    protocol.data_received(GET)
    await rounds()

    assert len(protocol.transport.writes) == 1


async def test_a_head_whose_body_comes_later_is_not_kept_back() -> None:
    may_answer = asyncio.Event()

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        await send(start((b"content-length", b"2")))
        await may_answer.wait()
        await send(body(b"12"))

    protocol = connected(application)
    protocol.data_received(GET)
    await rounds()
    assert protocol.transport.written == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"

    may_answer.set()
    await rounds()

    assert protocol.transport.written.endswith(b"\r\n\r\n12")


@pytest.mark.parametrize("request_bytes", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("status", [200, 204])
@pytest.mark.parametrize("sized", [True, False])
async def test_ready_lines_make_the_head_that_their_headers_make(
    request_bytes: bytes, status: int, sized: bool
) -> None:
    headers = [JSON, (b"x-a", b"b"), *([(b"content-length", b"0")] if sized else [])]
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    ready = {"type": "http.response.start", "status": status, FIELDS: lines, IS_SIZED: sized}
    expected = connected(answering(start(*headers, status=status), body(b"")), HttpToolsProtocol)
    trimmed = connected(answering(ready, body(b"")))
    for protocol in (expected, trimmed):
        protocol.data_received(request_bytes)
        await rounds()

    assert trimmed.transport.written == expected.transport.written


class Receiver:
    """An application that receives when the test allows it."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.turns = asyncio.Semaphore(0)

    async def __call__(self, _scope: Any, receive: Any, _send: Any) -> None:
        while True:
            await self.turns.acquire()
            self.messages.append(await receive())


def head(length: int) -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length


async def end(protocol: Any) -> None:
    for task in list(protocol.tasks):
        task.cancel()
    await rounds()


async def test_a_body_that_is_waited_for_comes_whole_and_without_pauses() -> None:
    application = Receiver()
    protocol = connected(application)
    application.turns.release()
    protocol.data_received(head(400_000) + b"x" * 100)
    await rounds()
    protocol.transport.was_paused = False

    for part in (100_000, 100_000, 199_900):
        protocol.data_received(b"x" * part)
        await rounds()

    assert application.messages == [{"type": "http.request", "body": b"x" * 400_000, "more_body": False}]
    assert not protocol.transport.was_paused
    await end(protocol)


async def test_a_very_large_body_comes_in_pieces_and_reading_stops_in_between() -> None:
    application = Receiver()
    protocol = connected(application)
    application.turns.release()
    protocol.data_received(head(3_000_000))
    for _ in range(11):
        await rounds()
        protocol.data_received(b"x" * 100_000)
    await rounds()
    assert [(len(each["body"]), each["more_body"]) for each in application.messages] == [(1_100_000, True)]
    assert protocol.transport.is_paused

    application.turns.release()
    await rounds()

    assert not protocol.transport.is_paused
    await end(protocol)


async def test_an_unread_body_pauses_reading_as_with_uvicorn() -> None:
    application = Receiver()
    protocol = connected(application)

    protocol.data_received(head(400_000) + b"x" * 60_000)
    assert not protocol.transport.is_paused
    protocol.data_received(b"x" * 6_000)

    assert protocol.transport.is_paused
    await end(protocol)


async def test_a_receive_that_is_cancelled_waits_no_more() -> None:
    forever = asyncio.Event()

    async def application(_scope: Any, receive: Any, _send: Any) -> None:
        receiving = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        receiving.cancel()
        await forever.wait()

    protocol = connected(application)
    protocol.data_received(head(400_000))
    await rounds()

    protocol.data_received(b"x" * 66_000)

    assert protocol.transport.is_paused
    await end(protocol)


async def test_a_disconnect_is_signalled_and_received() -> None:
    signalled: list[str] = []
    received: list[Any] = []

    async def application(scope: Any, receive: Any, _send: Any) -> None:
        signal = disconnect_signal_of(scope)
        assert signal is not None
        signal.subscribe(signalled.append)
        received.append(await receive())
        received.append(await receive())

    protocol = connected(application)
    protocol.data_received(GET)
    await rounds()
    protocol.connection_lost(None)
    assert signalled == ["client"]

    await rounds()

    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]


async def test_receive_after_a_disconnect_returns_immediately() -> None:
    signalled: list[str] = []

    async def application(scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.sleep(0)
        signal = disconnect_signal_of(scope)
        assert signal is not None
        signal.subscribe(signalled.append)

    protocol = connected(application)
    protocol.data_received(GET)
    protocol.connection_lost(None)
    await rounds()

    assert signalled == ["client"]


async def test_a_client_that_leaves_after_its_answer_is_nobodys_matter() -> None:
    signalled: list[str] = []

    async def application(scope: Any, _receive: Any, send: Any) -> None:
        signal = disconnect_signal_of(scope)
        assert signal is not None
        signal.subscribe(signalled.append)
        await send(start(JSON))
        await send(body(b"12"))

    protocol = connected(application)
    protocol.data_received(GET)
    await rounds()
    protocol.connection_lost(None)

    assert signalled == []


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    application = Receiver()
    protocol = connected(application)
    protocol.data_received(head(4).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
    await rounds()
    assert protocol.transport.written == b""

    application.turns.release()
    await rounds()

    assert protocol.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    await end(protocol)
