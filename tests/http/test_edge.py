"""The edge's bounds on heads and on time, with both protocols that it can extend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.http.asgi_protocol import TrimmedProtocol
from kvroute.http.edge import ClientBounds, EdgeProtocol
from kvroute.http.options import ServerOptions
from kvroute.metrics import Metrics
from kvroute.request.wait_queue import WaitQueue

HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = self.is_closed = self.was_aborted = self.is_reset = False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        assert not self.is_closed, "uvloop raises here"
        self.written += data  # after write_eof uvloop raises, too; that a test sees by the bytes behind `|`

    def write_eof(self) -> None:
        if self.is_reset:
            raise OSError(107, "Transport endpoint is not connected")
        self.written += b"|"

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.was_aborted = True


class Application:
    """Answers each request when `may_answer` is set; receives its body first unless `receives` is off."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.receives = True
        self.messages: list[str] = []
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        while self.receives:
            message = await receive()
            self.messages.append(message["type"])
            if not message.get("more_body"):
                break
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class LoopWithManualTime:
    """An event loop whose `time()` is `now`, which the test sets; the test also ends the waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self.now


class Connection:
    def __init__(self, parts: tuple[type[HttpToolsProtocol], ...], **options: Any) -> None:
        self.application = Application()
        self.metrics = Metrics()
        self.bounds = ClientBounds(ServerOptions(**options), self.metrics)
        protocol_class = type("Bound", parts, {"bounds": self.bounds})
        config = Config(
            self.application,
            http=protocol_class,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        config.load()
        self.clock = LoopWithManualTime(asyncio.get_running_loop())
        self.protocol: Any = protocol_class(config, ServerState(), {}, self.clock)
        self.transport = Transport()
        self.protocol.connection_made(self.transport)

    @property
    def waits_for(self) -> str:
        """The queue in which the connection is; "" if it is in none."""
        bounds = self.bounds
        queues = [bounds.idle, bounds.head, bounds.body, bounds.closing]
        return " ".join(queue.name for queue in queues if len(queue))

    async def take(self, data: bytes) -> None:
        self.protocol.data_received(data)
        await rounds()

    def after(self, seconds: float, queue: WaitQueue) -> None:
        """End the connection's wait in this queue `seconds` later."""
        assert self.waits_for == queue.name
        self.clock.now += seconds
        queue.discard(self.protocol)
        self.protocol.wait_expired(queue)

    async def end(self) -> None:
        self.application.may_answer.set()
        self.protocol.connection_lost(None)
        await rounds()


async def rounds() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


PARTS = {"trimmed": (EdgeProtocol, TrimmedProtocol), "uvicorn's own": (EdgeProtocol,)}


@pytest.fixture(params=PARTS.values(), ids=PARTS)
def connect(request: pytest.FixtureRequest) -> Any:
    return lambda **options: Connection(request.param, **options)


async def test_the_kind_of_wait_follows_the_requests_state(connect: Any) -> None:
    connection = connect()
    seen = [connection.waits_for]
    for data in (b"\r\n", HEAD[:9], HEAD[9:30], HEAD[30:], b"x" * 50_000, b"x" * 50_000):
        await connection.take(data)
        seen.append(connection.waits_for)
    assert seen == ["idle", "idle", "head", "head", "body", "body", ""]

    await connection.take(GET[:9])  # the next head, while the answer is pending
    assert connection.waits_for == ""
    connection.application.may_answer.set()
    await rounds()
    assert connection.waits_for == "head"
    await connection.take(GET[9:])
    assert connection.waits_for == ""  # uvicorn's timer from here on
    assert connection.transport.written.count(b"200 OK") == 2
    await connection.end()
    bounds = connection.bounds
    assert [len(queue) for queue in (bounds.idle, bounds.head, bounds.body)] == [0, 0, 0]


async def test_parts_of_a_head_do_not_win_time(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect()
    await connection.take(GET[:5])
    monkeypatch.setattr(WaitQueue, "add", lambda *_: pytest.fail("the wait has restarted"))
    for at in range(5, 20):
        connection.clock.now += 1
        await connection.take(GET[at : at + 1])

    monkeypatch.undo()
    connection.after(0, connection.bounds.head)
    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
    assert connection.transport.written.endswith(b"|")
    connection.after(1, connection.bounds.closing)
    assert connection.transport.was_aborted


async def test_a_client_that_has_reset_the_connection_is_no_failure(connect: Any) -> None:
    connection = connect()
    await connection.take(GET[:5])
    connection.transport.is_reset = True

    connection.after(10, connection.bounds.head)

    assert connection.transport.is_closed
    assert connection.waits_for == ""


async def test_a_silent_connection_is_closed_without_a_word(connect: Any) -> None:
    connection = connect()

    connection.after(75, connection.bounds.idle)

    assert connection.transport.is_closed
    assert connection.transport.written == b""
    assert connection.metrics.client_timeouts.labels("idle").value == 1


async def test_a_body_is_held_to_its_least_rate_again_and_again(connect: Any) -> None:
    connection = connect(body_timeout_s=30, body_bytes_per_s=1000)
    await connection.take(HEAD)
    for _ in range(2):
        await connection.take(b"x" * 30_000)
        connection.after(30, connection.bounds.body)
        assert connection.waits_for == "body"

    await connection.take(b"x" * 29_000)
    connection.after(30, connection.bounds.body)

    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
    await rounds()
    assert connection.application.messages[-1] == "http.disconnect"


async def test_the_body_timeout_pauses_while_reading_is_paused(connect: Any) -> None:
    connection = connect(body_timeout_s=30, body_bytes_per_s=1000)
    connection.application.receives = False
    await connection.take(HEAD + b"x" * 70_000)
    assert connection.transport.is_paused
    assert connection.waits_for == "body"

    for _ in range(5):
        connection.after(30, connection.bounds.body)
        assert connection.waits_for == "body"

    connection.protocol.flow.resume_reading()
    connection.after(30, connection.bounds.body)
    assert b"HTTP/1.1 408 " in connection.transport.written


async def test_no_time_runs_while_an_answer_is_streamed(connect: Any) -> None:
    connection = connect()
    started = asyncio.Event()

    async def streaming(_scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        started.set()
        await connection.application.may_answer.wait()
        await send({"type": "http.response.body", "body": b"2"})

    connection.protocol.app = streaming
    await connection.take(HEAD + b"x")  # its body is not even complete
    assert started.is_set()
    await connection.take(b"x")

    assert connection.waits_for == ""
    await connection.end()


async def test_a_head_is_given_to_the_parser_in_lines(connect: Any) -> None:
    """So each byte is copied once more at most, however small the parts that it comes in."""
    connection = connect()
    fed: list[int] = []
    real = connection.protocol.parser

    class Parser:
        def feed_data(self, data: bytes) -> None:
            fed.append(len(data))
            real.feed_data(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    connection.protocol.parser = Parser()
    whole = b"GET /x HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 10_000 + b"\r\n\r\n"
    for at in range(len(whole)):
        connection.protocol.data_received(whole[at : at + 1])
    await rounds()

    assert connection.application.paths == ["/x"]
    assert len(fed) <= 10
    assert sum(fed) == len(whole)
    await connection.end()


async def test_requests_in_line_are_read_no_faster_than_answered(connect: Any) -> None:
    connection = connect()
    await connection.take(GET * 50)
    assert connection.transport.is_paused
    assert len(connection.protocol.pipeline) == 49

    connection.application.may_answer.set()
    while len(connection.protocol.pipeline) > 1:
        assert connection.transport.is_paused
        await asyncio.sleep(0)
    await rounds()

    assert not connection.transport.is_paused
    assert connection.transport.written.count(b"200 OK") == 50
    await connection.end()


async def test_a_client_that_leaves_ends_all_of_its_requests(connect: Any) -> None:
    connection = connect()
    connection.application.receives = False
    await connection.take(GET * 3)
    connection.transport.is_closed = True
    connection.protocol.connection_lost(ConnectionResetError())
    connection.application.may_answer.set()

    await rounds()  # nothing is written: the transport would raise

    assert connection.application.paths == ["/x"]


async def test_a_refusal_waits_for_the_answers_before_it(connect: Any) -> None:
    connection = connect()
    await connection.take(GET + GET + b"nonsense\r\n\r\n")
    assert connection.transport.written == b""
    await connection.take(GET)  # not read any more

    connection.application.may_answer.set()
    await rounds()

    answers = [part[:3] for part in connection.transport.written.split(b"HTTP/1.1 ")[1:]]
    assert answers == [b"200", b"200", b"400"]
    assert connection.metrics.rejected.labels("invalid_request").value == 1


async def test_a_broken_body_is_refused_or_cut(connect: Any) -> None:
    chunked = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    waiting = connect()
    await waiting.take(chunked)
    await waiting.take(b"zz\r\n")
    assert waiting.transport.written.startswith(b"HTTP/1.1 400 ")
    assert waiting.application.messages == ["http.disconnect"]

    answered = connect()
    answered.application.receives = False
    answered.application.may_answer.set()
    await answered.take(chunked)
    await answered.take(b"zz\r\n")
    assert answered.transport.written.count(b"HTTP/1.1") == 1
    assert answered.transport.is_closed


async def test_after_a_refusal_little_is_read(connect: Any) -> None:
    connection = connect()
    await connection.take(b"nonsense\r\n\r\n")
    await connection.take(b"x" * 200_000)
    assert not connection.transport.is_paused

    await connection.take(b"x" * 200_000)

    assert connection.transport.is_paused
    assert connection.transport.written.count(b"HTTP/1.1 400") == 1


@pytest.mark.parametrize(
    ("chunk", "is_refused"), [(b"1\r\na\r\n", True), (b"10\r\n%b\r\n" % (b"a" * 16), False)]
)
async def test_a_body_in_very_many_tiny_chunks_is_refused(
    connect: Any, chunk: bytes, is_refused: bool
) -> None:
    connection = connect()
    await connection.take(b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    await connection.take(chunk * 8_192)
    assert connection.transport.written == b""

    await connection.take(chunk * 10)

    assert (b" 400 " in connection.transport.written) is is_refused
    await connection.end()


async def test_a_refused_request_gets_no_100_continue(connect: Any) -> None:
    connection = connect()
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"

    await connection.take(head + b"no chunk\r\n")

    assert connection.transport.written.startswith(b"HTTP/1.1 400 ")
    assert connection.transport.written.endswith(b"|")
    await connection.end()
