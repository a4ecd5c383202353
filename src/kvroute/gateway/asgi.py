"""ASGI's types, and the two things that every raw endpoint does with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvroute.errors import BodyTooLarge, KvrouteError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class ClientDisconnected(KvrouteError):
    """The client left; nobody is there to be answered."""


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
