"""The client's side of an exchange: it takes the answer, and it may stop, pause and resume the request."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from kvroute.openai.headers import HeaderList

field_pairs = re.compile(rb"([^:]*): ([^\r]*)\r\n").findall
"""Name and value of each header line. A name has no colon, a value no line break."""


class Downstream(Protocol):
    """Takes one answer and never waits.

    Calls come in this order: `start` or `start_relayed`, `write` any number of times, `finish`; or `answer`
    alone. `flush_head` may come once, before the first `write`. `cut` may come at any point, if the answer
    cannot be completed. Calls after `finish` or `cut`, or after the client has left, are ignored. The
    implementation calls `Exchange.resume` when `is_paused` becomes false.
    """

    @property
    def is_paused(self) -> bool:
        """The client reads slowly: read no more from the worker for now."""
        ...

    def start(self, status: int, headers: HeaderList) -> None:
        """The head. Names are lower-case; `headers` has no hop-by-hop headers."""
        ...

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        """Like `start`, with ready header lines `name: value CR LF`, which saves splitting and joining.

        `is_sized`: the lines include Content-Length.
        """
        ...

    def flush_head(self) -> None:
        """Send the head now, before any byte of the body."""
        ...

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        """A whole answer: `start_relayed` and `finish` in one."""
        ...

    def write(self, chunk: bytes) -> None:
        """The next bytes of the body, at least one."""
        ...

    def framed_writer(self) -> Callable[[bytes], None] | None:
        """A function that writes chunks which already have the framing of chunked transfer coding.

        It replaces `write` until the answer ends. The implementation calls `Exchange.pause` when `is_paused`
        becomes true. None if the answer is not chunked. Called after the first `write`.
        """
        ...

    def finish(self, chunk: bytes = b"") -> None:
        """The last bytes of the body, if any; the answer is complete."""
        ...

    def cut(self) -> None:
        """No more bytes will come: break the answer off in a way that the client notices."""
        ...


class InFlightRequest(Protocol):
    """A request in flight, as the client's connection sees it."""

    @property
    def is_over(self) -> bool: ...
    def end(self, by: str) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Forwarding(Struct, eq=False):
    """Passes an answer on to a client. Subclasses count or change the bytes of its body."""

    _client: Downstream

    @property
    def is_paused(self) -> bool:
        return self._client.is_paused

    def start(self, status: int, headers: HeaderList) -> None:
        self._client.start(status, headers)

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        self._client.start_relayed(status, fields, is_sized=is_sized)

    def flush_head(self) -> None:
        self._client.flush_head()

    def cut(self) -> None:
        self._client.cut()
