"""Whether a connection that `ClientProtocols` opens is as the protocol itself would have made it.

What it leaves out at first are uvicorn's internals. This opens one connection both ways, without sockets or
an event loop, before a gateway listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.gateway.opening import ClientProtocols

_GET = b"GET /x?y=1 HTTP/1.1\r\nhost: x\r\n\r\n"


def opening_trouble(protocol_class: type[HttpToolsProtocol] = HttpToolsProtocol) -> str:
    """What is not as expected, in words; "" when everything is. Takes about a millisecond."""
    try:
        return _play(protocol_class)
    except Exception as error:  # noqa: BLE001 - whatever it is, connections open as ever and the log says why
        return f"failed the self-test of opening connections ({type(error).__name__}: {error})"


def _play(protocol_class: type[HttpToolsProtocol]) -> str:
    async def application(_scope: Any, _receive: Any, _send: Any) -> None:
        """Never run."""

    state, app_state, loop = ServerState(), dict[str, Any](), cast(asyncio.AbstractEventLoop, _Loop())
    config = Config(
        application, http=protocol_class, ws="none", lifespan="off", log_config=None, proxy_headers=False
    )
    config.load()
    make = ClientProtocols(protocol_class)
    usual: Any = protocol_class(config, state, app_state, loop)
    opened: Any = make(config, state, app_state, loop)
    transport = _Transport()
    for protocol in (usual, opened):
        protocol.connection_made(transport)
        if protocol not in state.connections:
            return "does not register a new connection as expected"
    for name, value in vars(usual).items():
        if not _is_like(getattr(opened, name, None), value):
            return f"does not set {name!r} of a new connection as expected"
    for protocol in (usual, opened):
        protocol.data_received(_GET)
    for protocol in (usual, opened):
        protocol.scope.pop("extensions", None)  # of objects that are one connection's
    if opened.scope != usual.scope or len(state.tasks) != 2:
        return "does not hand a new connection's request over as expected"
    for protocol in (usual, opened):
        protocol.connection_lost(None)
    return "does not forget a closed connection" if state.connections else ""


def _is_like(one: object, other: object) -> bool:
    has_identity_only = type(other).__eq__ is object.__eq__
    return one is other or (type(one) is type(other) and (has_identity_only or one == other))


class _Handle:
    def add_done_callback(self, _callback: Callable[..., object]) -> None:
        pass


class _Loop:
    """Starts nothing."""

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: Any) -> _Handle:
        coroutine.close()
        return _Handle()

    def call_soon(self, _callback: Callable[..., object], *_: Any) -> None:
        pass


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)})

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False
