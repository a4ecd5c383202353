"""The plan of one request: its decision, and what is sent to a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvroute.fleet.worker import WorkerId
from kvroute.openai.endpoints import ErrorShape
from kvroute.openai.prompt import AnyPrompt
from kvroute.openai.request import InferenceRequest
from kvroute.routing.strategy import (
    RouteDecision,
    RouteQuery,
)


class RequestPlan(Struct, eq=False, gc=False):
    """The routing decision for one request and the bytes to send. Immutable.

    `model` is the name that workers use, `target` the path and query as received; `stores_response`,
    `errors` and `preamble` are those of the endpoint.
    """

    method: bytes
    target: bytes
    body: bytes
    model: str
    prompts: Sequence[AnyPrompt]
    query: RouteQuery
    decision: RouteDecision
    stores_response: bool = False
    errors: ErrorShape = ErrorShape.OPENAI
    other_bodies: Mapping[WorkerId, bytes] | None = None
    """Bodies for workers that have another revision of the adapter; all others get `body`."""
    is_isolated: bool = False
    """Whether `body` was put into a key space."""
    request: InferenceRequest | None = None
    """Set if the decision has a handover, whose legs need other bodies."""
    has_roles: bool = False
    """Whether the fleet has roles: then clients must not see the `kv_transfer_params` of answers."""
    preamble: frozenset[str] = frozenset()
    canonical: str = "-"
    """The name that stands for all names of the model (`Fleet.canonical`)."""

    def body_for(self, worker: WorkerId) -> bytes:
        """The body to send to `worker`."""
        return self.body if self.other_bodies is None else self.other_bodies.get(worker, self.body)
