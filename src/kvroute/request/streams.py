"""How long a client of an event stream sees nothing: until the head of its answer, and between its events.

Some clients give up when no head comes (`openai` for node, opencode), and some proxies when no byte comes.
"""

from __future__ import annotations

from typing import Annotated

from kvroute.options import Options, Switch, option
from kvroute.request.wait_queue import WaitQueue

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of event streams ignore (WHATWG HTML, 9.2.5)."""

_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
FRAMED_EVENT_ENDS = (b"\n\n\r\n", b"\n\r\n\r\n")
"""Ends of a chunk with its framing that are the end of an event, as workers write it."""
MAX_HELD_BYTES = 65_536
_ENCODED = b"\r\ncontent-encoding:"


class StreamOptions(Options):
    """What clients of event streams get while their worker has no token for them."""

    head_wait_s: float = option(
        5.0,
        "Longest time that the head of an event stream waits for its first token; until then another worker "
        "can still answer with any status. After it the client gets the worker's own head (200) and what the "
        "worker has sent so far; if that has no event yet, another worker can still continue the stream. "
        "0: the head waits for the first token.",
        unit="s",
        higher="more requests get another worker's answer, or an error with its status",
        lower="clients with a short timeout do not give up",
        ge=0,
    )
    head_while_queued: Annotated[bool, Switch] = option(
        False,
        "Also send the head of an event stream after `head_wait_s` while its request waits in the gateway's "
        "queue (`admission`), and then comments as `keep_alive_s` says. Such a request cannot be answered "
        "429 or 503 any more: that becomes an error event in the stream. The head names no worker.",
        higher="on: clients with a short timeout do not give up while they wait in the queue",
    )
    keep_alive_s: float = option(
        15.0,
        "After this long without any byte, a client of an event stream whose head it has got is sent an SSE "
        "comment, and again after each further such time. 0: off.",
        unit="s",
        higher="fewer bytes",
        lower="proxies and clients with a short idle timeout keep the connection",
        ge=0,
    )


class StreamWaits:
    """The waits of all event streams. Mutable: the queues, and `configure` replaces them."""

    def __init__(self, options: StreamOptions) -> None:
        self.configure(options)

    def configure(self, options: StreamOptions) -> None:
        """Change the limits for further waits; those that have begun keep theirs."""
        self.head_wait_s, self.keep_alive_s = options.head_wait_s, options.keep_alive_s
        self.sends_queued_heads = options.head_while_queued and options.head_wait_s > 0
        self.head = WaitQueue("stream_head", options.head_wait_s)
        self.silence = WaitQueue("stream_silence", options.keep_alive_s)


def is_readable(fields: bytes) -> bool:
    """Whether an event stream with these header lines is not compressed, so that comments may be added."""
    return not fields.startswith(_ENCODED[2:]) and _ENCODED not in fields


class WholeEvents:
    """Withholds the part of an event that has arrived, so that a client gets whole events only.

    What it has been given so can be followed by a comment or by an error event at any time. Mutable: `take`.
    """

    __slots__ = ("held", "is_inside")

    def __init__(self) -> None:
        self.held = b""
        """The part of an event that the client has not got."""
        self.is_inside = False
        """The client has got a part of an event that is too large to be withheld."""

    def take(self, chunk: bytes) -> bytes:
        """What the client gets now that `chunk` has come: up to the end of the last event."""
        data = self.held + chunk if self.held else chunk
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
        if end:
            self.is_inside = False
        if self.is_inside or len(data) - end > MAX_HELD_BYTES:
            self.held, self.is_inside = b"", True
            return data
        self.held = data[end:]
        return data[:end]


def answers(worker: str) -> bytes:
    """The comment of a stream whose head was sent before a worker was chosen."""
    return b": worker %b answers\n\n" % worker.encode()


def moved(lost: str, answering: str) -> bytes:
    """The comment of a stream whose head is that of another worker than its events."""
    return b": worker %b was lost before its first event, worker %b answers\n\n" % (
        lost.encode(),
        answering.encode(),
    )
