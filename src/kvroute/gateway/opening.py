"""Opening a client's connection for less.

uvicorn's protocol sets some forty attributes for each connection, makes a parser and asks the kernel for
both addresses, four times in all. Of this a plain request on the fast lane needs next to nothing, and of
clients that come together the last one waits for what all of them take. Here a connection is opened
without; the rest is made up for when somebody first asks for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.logging import TRACE_LOG_LEVEL
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl
from uvicorn.server import ServerState

_OF_ITS_SOCKET: dict[str, Callable[[asyncio.Transport], object]] = {
    "server": get_local_addr,
    "client": get_remote_addr,
    "scheme": lambda transport: "https" if is_ssl(transport) else "http",
}


class ClientProtocols:
    """Makes the protocols of one server's connections, as uvicorn's `http_protocol_class`.

    What the constructor sets to one and the same value each time lies in a class, what it makes anew is
    made when it is first asked for. Mutable: the first connection makes that class.
    """

    def __init__(self, protocol_class: type[HttpToolsProtocol]) -> None:
        self._protocol_class = protocol_class
        self._new: Callable[[], HttpToolsProtocol] | None = None

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> HttpToolsProtocol:
        """The arguments of the first call count for all."""
        if self._new is None:
            self._new = _opener(self._protocol_class, (config, server_state, app_state, _loop))
        return self._new()


class _Late:
    """An attribute that is made when it is first asked for. Setting it on an object replaces it there."""

    __slots__ = ("_make", "_name")

    def __init__(self, name: str, make: Callable[[Any], object]) -> None:
        self._name = name
        self._make = make

    def __get__(self, protocol: Any, _: type | None = None) -> Any:
        if protocol is None:
            return self
        made = self._make(protocol)
        setattr(protocol, self._name, made)
        return made


class _Opened(HttpToolsProtocol):
    """One connection, opened as uvicorn does it, but for what is made late."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.logger.isEnabledFor(TRACE_LOG_LEVEL):
            super().connection_made(transport)  # it logs who has come
            return
        self.connections.add(self)
        self.transport = transport
        self.flow = FlowControl(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn asks for the client before it looks whether it is to log who has gone.
        if not self.logger.isEnabledFor(TRACE_LOG_LEVEL) and "client" not in vars(self):
            self.client = None
        super().connection_lost(exc)


def _opener(protocol_class: type[HttpToolsProtocol], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    one, other = vars(protocol_class(*arguments)), vars(protocol_class(*arguments))
    common = {name: value for name, value in one.items() if value is other[name]}
    made_anew = one.keys() - common.keys()

    def construct(protocol: Any, name: str) -> object:
        """All that the constructor makes anew, for `protocol`; the one of that name."""
        attributes = vars(protocol)
        known = dict(attributes)
        protocol_class.__init__(protocol, *arguments)
        late = {name: attributes[name] for name in made_anew}
        attributes.clear()
        attributes.update(late | known)
        return late[name]

    in_class: dict[str, object] = dict(common)
    for name in made_anew:
        in_class[name] = _Late(name, partial(construct, name=name))
    for name, ask in _OF_ITS_SOCKET.items():
        in_class[name] = _Late(name, partial(_asked, ask=ask))
    # In a class a function would become a method.
    copied = [(name, value) for name, value in common.items() if hasattr(type(value), "__get__")]
    opened: Any = type(protocol_class.__name__, (_Opened, protocol_class), in_class)

    def new() -> Any:
        protocol = opened.__new__(opened)
        for name, value in copied:
            setattr(protocol, name, value)
        return protocol

    return new


def _asked(protocol: Any, ask: Callable[[asyncio.Transport], object]) -> object:
    return ask(protocol.transport)
