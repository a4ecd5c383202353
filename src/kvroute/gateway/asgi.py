"""ASGI's types, and the two things that every raw endpoint does with them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvroute.errors import BodyTooLarge, KvrouteError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


DEPARTURE = "kvroute.departure"
"""Key in a scope's `extensions` of its `Departure`, where the server offers one."""

FIELDS = "kvroute.fields"
"""Key in the message that begins an answer: its header lines, valid and ready, none of framing but perhaps
Content-Length, in place of `headers`. The next key says whether that is there. For a server that offers a
`Departure`."""
IS_SIZED = "kvroute.is_sized"


class Departure:
    """Tells of a client that leaves before its answer is complete, in place of a task that awaits `receive`.

    Mutable: by one who is to be told, and by the server, once.
    """

    __slots__ = ("_tell", "is_past")

    def __init__(self) -> None:
        self._tell: Callable[[str], None] | None = None
        self.is_past = False

    def tell(self, whom: Callable[[str], None] | None) -> None:
        """Call `whom("client")` when it happens, at once if it has; None calls nobody."""
        self._tell = whom
        if self.is_past and whom is not None:
            whom("client")

    def happened(self) -> None:
        """The client left. Later calls change nothing."""
        if self.is_past:
            return
        self.is_past = True
        if self._tell is not None:
            self._tell("client")


field_pairs = re.compile(rb"([^:]*): ([^\r]*)\r\n").findall
"""Name and value of each of some header lines; a name holds no colon, a value no line break."""


class ClientDisconnected(KvrouteError):
    """The client left; nobody is there to be answered."""


def departure_of(scope: Scope) -> Departure | None:
    """None where the server offers none."""
    extensions = scope.get("extensions")
    return extensions.get(DEPARTURE) if extensions else None


def header(headers: Headers, name: bytes) -> bytes:
    """The first value of a header (names come lower-case from the server), b"" where it is absent."""
    for key, value in headers:
        if key == name:
            return value
    return b""


async def read_body(receive: Receive, headers: Headers, limit_bytes: int) -> bytes:
    """The whole request body.

    Raises BodyTooLarge as soon as the limit is passed (a declared Content-Length counts before any
    byte is read) and ClientDisconnected when the client leaves midway.
    """
    declared = header(headers, b"content-length")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        if not message.get("more_body", False):
            if not parts:
                return bytes(part)
            parts.append(part)
            return b"".join(parts)
        parts.append(part)
