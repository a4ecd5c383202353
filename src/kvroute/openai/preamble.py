"""What an event stream may hold before the first token: comments, and events that an engine sends at once.

vLLM 0.32 sends `response.created` and `response.in_progress` before it has computed anything
(entrypoints/openai/responses/serving.py); other engines and proxies do the same with `message_start` and
`ping`, and send comments meanwhile. vLLM sends a chat's first chunk, with the role, and its `message_start`
after the first token (entrypoints/openai/chat_completion/serving.py: "first_iteration").
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from kvroute.openai.bounded import UNREADABLE

MAX_PREAMBLE_BYTES = 1 << 20
"""vLLM repeats the request's instructions and tools in `response.created` and in `response.in_progress`."""

_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])").search
"""A line ends with LF, CR LF or CR (WHATWG HTML, 9.2.5). A CR at the end of the bytes may be half of one."""
_BLANK_LINE = re.compile(rb"\n\r?\n|\r\r").search
_OVERLAP = 2
"""Bytes of a blank line that may have arrived without the rest of it."""
_STARTS = frozenset(b":edir\r\n")
"""First bytes of a comment, of the fields `event`, `data`, `id` and `retry`, and of an empty line."""


class _Event(Struct, gc=False):
    type: str = ""


_decode = msgspec.json.Decoder(_Event).decode


class Preamble(Struct):
    """The start of an event stream, up to the first event that is no preamble.

    Mutable: `lasts` reads what arrives.
    """

    kinds: frozenset[str]
    """Types of the events that come before the first token (`Endpoint.preamble`)."""
    size: int = 0
    """Bytes so far."""
    events: int = 0
    """Events of `kinds` so far. A comment is no event."""
    is_over: bool = False
    """The first token has arrived."""
    token_at: int = 0
    """Where its event begins in the stream, once it has arrived."""
    _unfinished: bytes = b""
    """The end of the bytes so far, which the next ones continue."""
    _is_known: bool = False
    """Within an event of `kinds`, of which only the end matters."""

    def lasts(self, data: bytes) -> bool:
        """Read the next bytes. Returns whether there is still no first token.

        Takes about 1 us for each line, and the time of a search for the rest of an event.
        """
        self.size += len(data)
        if not self.is_over:
            self.is_over = self._has_token(self._unfinished + data if self._unfinished else data)
        return not self.is_over

    def _has_token(self, data: bytes) -> bool:
        at = 0
        while True:
            if self._is_known:
                blank = _BLANK_LINE(data, at)
                if blank is None:
                    self._unfinished = data[max(at, len(data) - _OVERLAP) :]
                    return False
                self._is_known = False
                at = blank.end()
            end = _LINE_END(data, at)
            if end is None:
                self._unfinished = line_start = data[at:]
                if not line_start or self._may_go_on(line_start):
                    return False
                break
            if self._is_token(data[at : end.start()]):
                break
            # Within an event the search for its end begins with the end of this line.
            at = end.start() if self._is_known else end.end()
        self.token_at = self.size - len(data) + at
        self._unfinished = b""
        return True

    def _may_go_on(self, line_start: bytes) -> bool:
        """Whether a line that begins with `line_start` may be part of a preamble."""
        return line_start[0] in _STARTS and (bool(self.kinds) or not line_start.startswith(b"data:"))

    def _is_token(self, line: bytes) -> bool:
        """Whether this line belongs to an event that is no preamble."""
        name, _, value = line.partition(b":")
        value = value.strip()
        if name == b"event" and value:
            kind = value.decode("utf-8", "replace")
        elif name == b"data" and value:
            kind = _type_of(value)
        else:  # anything else is not as a server-sent event begins: do not hold it back
            return name not in (b"", b"event", b"data", b"id", b"retry")
        if kind not in self.kinds:
            return True
        self.events += 1
        self._is_known = True
        return False


def _type_of(data: bytes) -> str:
    """The `type` of an event without the field `event`; "" if it has none."""
    try:
        return _decode(data).type
    except UNREADABLE:
        return ""
