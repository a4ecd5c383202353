"""The record of one request: what happened to it, without its body."""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct, field

from kvroute.access.client_keys import KeyUse, KnownClient
from kvroute.routing.strategy import CandidateMatch, RouteDecision

_traceparent = re.compile(rb"(?im)^traceparent:[ \t]*[0-9a-f]{2}-([0-9a-f]{32})-").search


class Usage(Struct, frozen=True, gc=False):
    """Token counts that a worker reported in an answer.

    `cached_tokens` is None if the worker omits it (vLLM without --enable-prompt-tokens-details).
    `completion_tokens` is 0 for endpoints that generate nothing.
    """

    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int = 0


class Connect(Struct, eq=False, gc=False):
    """The opening of a connection for a traced attempt. Mutable: its end and its error, "" without one."""

    worker: str
    began: float
    ended: float = 0.0
    """0 while it runs."""
    error: str = ""


class Trace(Struct, eq=False, gc=False):
    """The ids of a traced request, and the times that only its spans need (`Clock.now`).

    Mutable: the data plane sets the times, the attempts add connects.
    """

    trace_id: int
    parent_id: int
    """The client's span; 0 without one."""
    span_id: int
    worker_span_id: int
    """The span of the worker's part, which the worker gets as its parent."""
    prefill_span_id: int
    """The span of a first leg, which the prefill worker gets as its parent."""
    received: float = 0.0
    """The body is parsed."""
    prepared: float = 0.0
    """The prompt's tokens are known; 0 if the strategy needs none."""
    planned: float = 0.0
    """The decision begins."""
    decided: float = 0.0
    """The decision is made; 0 if it was not."""
    connects: list[Connect] = field(default_factory=list)
    """Of the attempts that found no idle connection."""


class HandoverRecord(Struct, eq=False, gc=False):
    """What happened to the parts of a request whose prompt another worker computed. Mutable: as `Record`."""

    prefill_worker: str
    moved_tokens: int
    """Prompt tokens that the decode worker lacked."""
    matched_tokens: int
    """Prompt tokens that the prefill worker was predicted to hold."""
    began: float = 0.0
    """When the first leg was sent (`Clock.now`); 0 before."""
    prefilled: float = 0.0
    """When the first leg ended, with or without the blocks; 0 while it runs."""
    moved: float = 0.0
    """When the second leg's answer began, or failed; 0 before."""
    prefill_s: float | None = None
    """From the first leg to its answer; None if it failed."""
    transfer_s: float | None = None
    """From the second leg to the first byte of a streamed answer."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefill worker reported as cached."""
    has_moved: bool = False
    """Whether the blocks were transferred to the worker that answers."""
    fallback: str = ""
    """Why one worker did the whole request after all; "" if it did not."""


class Record(Struct, eq=False, gc=False):
    """What happened to one request, without its body.

    `request_id` is printable ASCII; `decision` is None if the request was refused before. Mutable: the
    exchange sets the fields until it calls `Journal.finished`.
    """

    request_id: bytes
    path: str
    started: float
    model: str = "-"
    tokens: int = 0
    decision: RouteDecision | None = None
    worker: str = "-"
    matched_tokens: int = 0
    held: CandidateMatch | None = None
    """Where the matched tokens are, if the strategy reads a cache map."""
    attempts: int = 0
    begun: int = 0
    """Workers that have begun to compute the request, or its tokens, and failed."""
    status: int = 0
    first_byte: float | None = None
    ended_by: str = ""
    error: str = ""
    usage: Usage | None = None
    """The token counts that the worker reported."""
    key: str = ""
    """The name of the client's key, "" if it has none."""
    client: KnownClient | None = None
    """The client of that key, if it is known before the headers are read."""
    use: KeyUse | None = None
    """What the request uses of that key."""
    queued_s: float = 0.0
    """Seconds that the request waited for a permit of a worker."""
    streamed: bool = False
    """Whether the answer is an event stream."""
    head_worker: str = ""
    """The worker whose head the client has got, if another one sent the events."""
    queued_head: bool = False
    """The client has got the head of an event stream while the request waited for a permit. Another status
    than 200 is then that of an error event."""
    is_unseen: bool = False
    """The answer does not pass this process (`epp`), so that a stream has no first byte here."""
    trace_id: str = ""
    """The trace of the request's `traceparent`, 32 hexadecimal digits; "" without one, and in text logs."""
    trace: Trace | None = None
    """Set while the request is traced (`tracing.endpoint`)."""
    was_sampled: bool = False
    """It is decided whether the request is traced."""
    handover: HandoverRecord | None = None
    """Set if another worker was to compute the prompt."""
    ended: float = 0.0
    on_end: list[Callable[[Record], object]] | None = None
    """Called once when the request is finished: what stages release then."""
    parent_worker: str = ""
    """The worker of the session that began this request's new session, if it was known when a worker was
    chosen."""


def trace_id_in(fields: bytes) -> str:
    """The trace id of the `traceparent` among header lines (W3C Trace Context, level 1); "" without one."""
    found = _traceparent(fields)
    return "" if found is None else found[1].decode()


CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer started; only in metrics and logs."""
