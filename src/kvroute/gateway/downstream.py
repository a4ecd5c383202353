"""The client's side of an exchange: what an answer is written to, whichever way the request came in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from kvroute.errors import BodyTooLarge, KvrouteError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


DEPARTURE = "kvroute.departure"
"""Key in a scope's `extensions` of its `DisconnectSignal`, where the server offers one."""

FIELDS = "kvroute.fields"
"""Key in the message that begins an answer: its header lines, valid and ready, none of framing but perhaps
Content-Length, in place of `headers`. The next key says whether that is there. For a server that offers a
`DisconnectSignal`."""
IS_SIZED = "kvroute.is_sized"


class DisconnectSignal:
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


def departure_of(scope: Scope) -> DisconnectSignal | None:
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


class Downstream(Protocol):
    """Takes one answer, and never waits: `start` or `start_relayed`, then `write` any number of times, then
    `finish`; or `cut`, at any point, when there will be no whole answer.

    Calls after `finish`, `cut`, or the client's leaving are ignored. The owner calls `Exchange.go_on`
    when `is_paused` falls.
    """

    @property
    def is_paused(self) -> bool:
        """The client is slow: read no more from the worker for now."""
        ...

    def start(self, status: int, headers: Headers) -> None:
        """The head. Names are lower-case; `headers` has no hop-by-hop ones."""
        ...

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        """As `start`, from ready header lines, each `name: value` with its end; `is_sized` when one of them
        is Content-Length. Saves making pairs of them and lines again."""
        ...

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        """`start_relayed` and `finish` in one: a whole answer."""
        ...

    def write(self, chunk: bytes) -> None:
        """The next bytes of the body, at least one."""
        ...

    def framed_writer(self) -> Callable[[bytes], None] | None:
        """What takes the next chunks in the framing of a chunked answer, each as `write` does, until the
        answer ends; who gives it calls `Exchange.hold` when `is_paused` rises. None where the answer is not
        passed on in that framing. Asked for after the first `write`."""
        ...

    def finish(self, chunk: bytes = b"") -> None:
        """The last bytes of the body, if any; the answer is complete."""
        ...

    def cut(self) -> None:
        """Nothing more will come; what was begun is broken off in a way that the client notices."""
        ...


class Resumable(Protocol):
    def go_on(self) -> None: ...


class AsgiAnswer:
    """An answer on its way through ASGI's `send`, which `deliver` awaits.

    Mutable: written to by the exchange, emptied by `deliver`. Above `limit_bytes` it is paused, so that
    a slow client makes the gateway hold at most that and one socket read more. `takes_fields`: the server
    knows ready header lines (`asgi.FIELDS`).
    """

    def __init__(self, limit_bytes: int, *, takes_fields: bool = False) -> None:
        self._limit = limit_bytes
        self._takes_fields = takes_fields
        self._head: Message | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._is_complete = False
        self._is_over = False
        self._news: asyncio.Future[None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._held_bytes > self._limit

    def start(self, status: int, headers: Headers) -> None:
        self._head = {"type": "http.response.start", "status": status, "headers": headers}
        self._wake()

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        if self._takes_fields:
            self._head = {"type": "http.response.start", "status": status, FIELDS: fields, IS_SIZED: is_sized}
            self._wake()
        else:
            self.start(status, field_pairs(fields))

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self.start_relayed(status, fields, is_sized=is_sized)
        self.finish(body)

    def write(self, chunk: bytes) -> None:
        if not self._is_over:
            self._parts.append(chunk)
            self._held_bytes += len(chunk)
            self._wake()

    def framed_writer(self) -> None:
        return None

    def finish(self, chunk: bytes = b"") -> None:
        if not self._is_over:
            if chunk:
                self._parts.append(chunk)
            self._is_complete = self._is_over = True
            self._wake()

    def cut(self) -> None:
        self._is_over = True
        self._wake()

    async def deliver(self, send: Send, source: Resumable | None) -> None:
        """Send what comes, until the answer is complete or cut. `source` is told when there is room."""
        while True:
            head, self._head = self._head, None
            if head is not None:
                await send(head)
            parts, self._parts = self._parts, []
            is_last = self._is_complete
            last = parts.pop() if parts and is_last else b""
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self._held_bytes -= len(part)
            if is_last:
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            if source is not None and not self.is_paused:
                source.go_on()  # it may have been paused while `send` waited
            if not self._parts and not self._is_complete:
                if self._is_over:
                    return
                self._news = asyncio.get_running_loop().create_future()
                await self._news

    def _wake(self) -> None:
        news = self._news
        if news is not None and not news.done():
            news.set_result(None)
