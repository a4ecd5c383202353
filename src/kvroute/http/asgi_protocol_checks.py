"""Checks that uvicorn's protocol behaves as `http/asgi_protocol.py` expects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.http.asgi import FIELDS, IS_SIZED, disconnect_signal_of
from kvroute.http.asgi_protocol import TrimmedProtocol

_POST = b"POST /x?y=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc"


def trimmed_protocol_problem(protocol_class: type[HttpToolsProtocol] = TrimmedProtocol) -> str:
    """Compare `TrimmedProtocol` with uvicorn's own protocol; "" if both behave alike. About 1 ms.

    The text completes a sentence that begins with "uvicorn".
    """
    expected = _Application()
    trimmed = _Application()
    try:
        _play_uvicorn(HttpToolsProtocol, expected)
        _play_uvicorn(protocol_class, trimmed)
    except Exception as error:  # noqa: BLE001 - every error leads to uvicorn's own protocol and a log line
        return f"failed the self-test of the trimmed protocol ({type(error).__name__}: {error})"
    if trimmed.received != expected.received:
        return "does not hand requests over as expected"
    if trimmed.written != expected.written:
        return "does not write answers as expected"
    return "" if trimmed.disconnects == 1 else "does not report a client's disconnect as expected"


def _play_uvicorn(protocol_class: type[HttpToolsProtocol], application: _Application) -> None:
    loop, transport, state = _UvicornLoop(), _UvicornTransport(application.written), ServerState()
    config = Config(
        application, http=protocol_class, ws="none", lifespan="off", log_config=None, proxy_headers=False
    )
    config.load()
    protocol: Any = protocol_class(config, state, {}, cast(asyncio.AbstractEventLoop, loop))
    protocol.access_log = False  # as in a gateway; these requests must not appear in a log
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
    """Answers the first request in chunks, the second with Content-Length, the third with `FIELDS`."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.written: list[bytes] = []
        self.disconnects = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        signal = disconnect_signal_of(scope)
        if signal is not None:
            signal.subscribe(self._on_disconnect)
        message = await receive()
        self.received.append([scope["path"], scope["headers"], message])
        headers = [(b"content-length", b"8")] if len(self.received) == 2 else [(b"content-type", b"x")]
        begin: dict[str, Any] = {"headers": headers}
        if signal is not None and len(self.received) == 3:
            begin = {FIELDS: b"content-type: x\r\n", IS_SIZED: False}
        await send({"type": "http.response.start", "status": 200, **begin})
        await send({"type": "http.response.body", "body": b"1234", "more_body": True})
        await send({"type": "http.response.body", "body": b"5678"})

    def _on_disconnect(self, _by: str) -> None:
        self.disconnects += 1


class _UvicornHandle:
    def cancel(self) -> None:
        pass

    def add_done_callback(self, _callback: Callable[..., object]) -> None:
        pass


class _UvicornLoop:
    """Runs tasks that never wait when `run` is called."""

    def __init__(self) -> None:
        self._tasks: list[Coroutine[Any, Any, Any]] = []

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> _UvicornHandle:
        self._tasks.append(coroutine)
        return _UvicornHandle()

    def call_later(self, _delay_s: float, _callback: Callable[..., object], *_: Any) -> _UvicornHandle:
        return _UvicornHandle()

    def call_soon(self, _callback: Callable[..., object], *_: Any) -> _UvicornHandle:
        return _UvicornHandle()

    def run(self) -> None:
        tasks, self._tasks = self._tasks, []
        for coroutine in tasks:
            try:
                coroutine.send(None)
            except StopIteration:
                continue
            coroutine.close()
            raise RuntimeError("a request that is complete waits")


class _UvicornTransport(asyncio.Transport):
    """Collects the written bytes of each answer, joined over its writes."""

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
