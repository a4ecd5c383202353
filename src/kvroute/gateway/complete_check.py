"""Whether uvicorn, trimmed by `CompleteProtocol`, still does what uvicorn does.

The trimmed protocol changes uvicorn's internals. This plays the same requests through both, without sockets
or an event loop, before a gateway listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.gateway.asgi import FIELDS, IS_SIZED, departure_of
from kvroute.gateway.complete import CompleteProtocol

_POST = b"POST /x?y=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc"


def complete_trouble(protocol_class: type[HttpToolsProtocol] = CompleteProtocol) -> str:
    """What is not as expected, in words; "" when everything is. Takes about a millisecond."""
    expected = _Application()
    trimmed = _Application()
    try:
        _play(HttpToolsProtocol, expected)
        _play(protocol_class, trimmed)
    except Exception as error:  # noqa: BLE001 - whatever it is, uvicorn stays as it is and the log says why
        return f"failed the self-test of the complete path ({type(error).__name__}: {error})"
    if trimmed.received != expected.received:
        return "does not hand requests over as expected"
    if trimmed.written != expected.written:
        return "does not write answers as expected"
    return "" if trimmed.departures == 1 else "does not tell of a client's leaving as expected"


def _play(protocol_class: type[HttpToolsProtocol], application: _Application) -> None:
    loop, transport, state = _Loop(), _Transport(application.written), ServerState()
    config = Config(
        application, http=protocol_class, ws="none", lifespan="off", log_config=None, proxy_headers=False
    )
    config.load()
    protocol: Any = protocol_class(config, state, {}, cast(asyncio.AbstractEventLoop, loop))
    protocol.access_log = False  # as a gateway serves; what is answered here is no request of anybody's
    protocol.connection_made(transport)
    for _ in range(3):
        protocol.data_received(_POST)
        protocol.data_received(b"def")
        loop.run()
        application.written.append(b"|")
    protocol.data_received(_POST)
    protocol.connection_lost(None)
    loop.run()


class _Application:
    """Answers the first request with chunks, the second one with a length, the third one with ready lines."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.written: list[bytes] = []
        self.departures = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        departure = departure_of(scope)
        if departure is not None:
            departure.tell(self._departed)
        message = await receive()
        self.received.append([scope["path"], scope["headers"], message])
        headers = [(b"content-length", b"8")] if len(self.received) == 2 else [(b"content-type", b"x")]
        begin: dict[str, Any] = {"headers": headers}
        if departure is not None and len(self.received) == 3:
            begin = {FIELDS: b"content-type: x\r\n", IS_SIZED: False}
        await send({"type": "http.response.start", "status": 200, **begin})
        await send({"type": "http.response.body", "body": b"1234", "more_body": True})
        await send({"type": "http.response.body", "body": b"5678"})

    def _departed(self, _by: str) -> None:
        self.departures += 1


class _Handle:
    def cancel(self) -> None:
        pass

    def add_done_callback(self, _callback: Callable[..., object]) -> None:
        pass


class _Loop:
    """Runs tasks that never wait, when told to."""

    def __init__(self) -> None:
        self._tasks: list[Coroutine[Any, Any, Any]] = []

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> _Handle:
        self._tasks.append(coroutine)
        return _Handle()

    def call_later(self, _delay_s: float, _callback: Callable[..., object], *_: Any) -> _Handle:
        return _Handle()

    def call_soon(self, _callback: Callable[..., object], *_: Any) -> _Handle:
        return _Handle()

    def run(self) -> None:
        tasks, self._tasks = self._tasks, []
        for coroutine in tasks:
            try:
                coroutine.send(None)
            except StopIteration:
                continue
            coroutine.close()
            raise RuntimeError("a request that is complete waits")


class _Transport(asyncio.Transport):
    """What is written as one run of bytes, however many writes it took."""

    def __init__(self, written: list[bytes]) -> None:
        super().__init__()
        self._written = written

    def write(self, data: Any) -> None:
        if not self._written or self._written[-1] == b"|":
            self._written.append(b"")
        self._written[-1] += data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False
