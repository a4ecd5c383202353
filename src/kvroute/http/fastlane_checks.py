"""Checks that uvicorn's protocol behaves as the fast lane expects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.http.fastlane import PER_CONNECTION

_OF_A_CONNECTION = {"transport", "flow", "server", "client", "scheme"}
"""Members that uvicorn's `connection_made` sets. The lane's own `connection_made` sets them instead."""


def fast_lane_problem(protocol_class: type[HttpToolsProtocol] = HttpToolsProtocol) -> str:
    """Check the internals of uvicorn that the fast lane uses; "" if all are as expected. About 1 ms.

    The text completes a sentence whose subject is uvicorn.
    """
    try:
        return _play(protocol_class)
    except Exception as error:  # noqa: BLE001 - every error turns the lane off, with a log line
        return f"failed the self-test of the fast lane ({type(error).__name__}: {error})"


def _play(protocol_class: type[HttpToolsProtocol]) -> str:
    calls: Any = []

    class Probe(protocol_class):  # type: ignore[misc, valid-type]
        def on_message_begin(self) -> None:
            calls.append("begin")
            super().on_message_begin()

        def on_message_complete(self) -> None:
            calls.append("complete")
            super().on_message_complete()

        def timeout_keep_alive_handler(self) -> None:
            calls.append("expired")
            super().timeout_keep_alive_handler()

    async def application(_scope: Any, _receive: Any, _send: Any) -> None:
        """Never run."""

    loop, transport, state = _Loop(), _Transport(), ServerState()
    config = Config(application, http=Probe, ws="none", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    protocol: Any = Probe(config, state, {}, cast(asyncio.AbstractEventLoop, loop))
    before = dict(vars(protocol))
    another = vars(Probe(config, state, protocol.app_state, cast(asyncio.AbstractEventLoop, loop)))
    differing = {name for name, value in another.items() if before.get(name, another) is not value}
    if another.keys() != before.keys() or not differing <= PER_CONNECTION:
        return "does not create connections as expected"
    protocol.connection_made(transport)
    changed = {name for name, value in vars(protocol).items() if before.get(name, before) is not value}
    if not changed <= _OF_A_CONNECTION:
        return "does not set up a connection as expected"
    if protocol not in state.connections or protocol.transport is not transport or protocol.cycle is not None:
        return "does not register a new connection as expected"
    protocol.data_received(b"GET /x HTTP/1.1\r\n")
    if calls != ["begin"] or protocol.cycle is not None:
        return "does not report the start of a message"
    protocol.data_received(b"host: x\r\n\r\n")
    if calls[1:] != ["complete"] or protocol.parser.should_upgrade():
        return "does not report the end of a message"
    cycle: Any = protocol.__dict__["cycle"]
    if cycle is None or cycle.response_complete is not False or protocol.pipeline:
        return "does not keep the current request as expected"
    if loop.started != 1 or len(state.tasks) != 1:
        return "does not start one task per request"
    protocol.flow.pause_reading()
    protocol.pause_writing()
    if not transport.is_reading_paused or not protocol.flow.write_paused:
        return "does not control the flow as expected"
    protocol.resume_writing()
    cycle.response_complete = True
    answered = state.total_requests
    protocol.on_response_complete()
    if state.total_requests != answered + 1 or transport.is_reading_paused or protocol.flow.write_paused:
        return "does not end a request as expected"
    if protocol.timeout_keep_alive_task is None or loop.delay_s != protocol.timeout_keep_alive:
        return "does not time idle connections as expected"
    protocol._unset_keepalive_if_required()
    if protocol.timeout_keep_alive_task is not None or not isinstance(state.default_headers, list):
        return "does not time idle connections as expected"
    if STATUS_LINE[200] != b"HTTP/1.1 200 OK\r\n" or STATUS_LINE[599] != b"HTTP/1.1 599 \r\n":
        return "does not write status lines as expected"
    protocol.shutdown()
    if not transport.is_closing():
        return "does not close an idle connection at shutdown"
    protocol.connection_lost(None)
    return "" if protocol not in state.connections else "does not forget a closed connection"


class _Handle:
    def cancel(self) -> None:
        pass

    def add_done_callback(self, _callback: Callable[..., object]) -> None:
        pass


class _Loop:
    """Counts the tasks that are to be started, and starts none."""

    def __init__(self) -> None:
        self.started = 0
        self.delay_s = 0.0

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> _Handle:
        coroutine.close()
        self.started += 1
        return _Handle()

    def call_later(self, delay_s: float, _callback: Callable[..., object], *_: Any) -> _Handle:
        self.delay_s = delay_s
        return _Handle()

    def time(self) -> float:
        return 0.0


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_reading_paused = False
        self._is_closing = False

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def write(self, data: Any) -> None:
        raise AssertionError("nothing is to be written")

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing
