"""One request on its way through the gateway: everything that its stages know and change."""

from __future__ import annotations

from msgspec import Struct

from kvroute.admission.fair_queue import QueueEntry
from kvroute.fleet.worker import WorkerId
from kvroute.openai.headers import Headers
from kvroute.openai.request import InferenceRequest
from kvroute.relay.preparation import Prepared
from kvroute.request.downstream import Downstream
from kvroute.request.record import Record


class Call(Struct, eq=False):
    """One request from its last byte until its exchange starts.

    Made when the body is parsed; a request that waits, for tokens or for a worker, is continued with the same
    call. Mutable: each stage of `DataPlane.relay` may replace what it says here.
    """

    request: InferenceRequest
    target: bytes
    """The request target: path and query, as the client sent it."""
    headers: Headers
    fields: bytes
    """The client's header lines for a worker, as bytes."""
    record: Record
    client: Downstream
    owner: WorkerId | None = None
    """The worker that must serve it, because it has a stored response or a stateful session."""
    prepared: Prepared | None = None
    """The prompt's exact tokens, once they are known."""
    entry: QueueEntry | None = None
    """Its place in the queue, once it has one."""
