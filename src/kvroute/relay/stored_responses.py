"""Requests for stored responses go to the worker that stored them."""

from __future__ import annotations

import asyncio
import re

import httpx

from kvroute.errors import InvalidRequest, NoRoutableWorker
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId
from kvroute.lru import Lru
from kvroute.openai.endpoints import ErrorShape
from kvroute.request.plan import RequestPlan
from kvroute.routing.strategy import (
    Candidate,
    CostTerms,
    RouteDecision,
    RouteQuery,
    RouteReason,
)

_ANY_ID = re.compile(r"[A-Za-z0-9_.~-]*[A-Za-z0-9_~-][A-Za-z0-9_.~-]*").fullmatch
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


class ResponseOwners:
    """Maps response IDs to workers, for the most recent `limit` responses (about 200 bytes each).

    Mutable: `remember` and `forget_worker`, on the event loop only.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._owners = Lru[str, WorkerId](limit)

    def remember(self, response_id: str, worker: WorkerId) -> None:
        self._owners.put(response_id, worker)

    def owner(self, response_id: str) -> WorkerId | None:
        return self._owners.peek(response_id)

    def latest(self, number: int) -> list[tuple[str, WorkerId]]:
        """The most recent `number` responses with their workers, the oldest first."""
        return list(self._owners.items())[-number:]

    def forget_worker(self, worker: WorkerId) -> None:
        """Remove the responses of a worker that left or restarted. Costs O(responses)."""
        for response_id in [key for key, owner in self._owners.items() if owner == worker]:
            self._owners.pop(response_id)


class StoredResponses:
    """Finds the worker of a response: from `owners`, otherwise by one query to all workers."""

    # The query is needed after a restart of the gateway.

    def __init__(
        self,
        owners: ResponseOwners,
        fleet: Fleet,
        client: httpx.AsyncClient,
        authorization: bytes | None,
        *,
        timeout_s: float,
    ) -> None:
        self._headers = {b"authorization": authorization} if authorization is not None else {}
        self._owners = owners
        self._fleet = fleet
        self._client = client
        self.timeout_s = timeout_s
        """Longest time to ask a worker for a response; a changed configuration changes it."""

    async def find(self, response_id: str) -> WorkerId | None:
        """The worker that holds the response; None if no routable worker has it."""
        owner = self._owners.owner(response_id)
        if owner is not None or not _RESPONSE_ID.fullmatch(b'"id":"%b"' % response_id.encode()):
            return owner
        workers = [worker for worker in self._fleet.workers() if worker.is_routable]
        if len(workers) < 2:
            return workers[0].id if workers else None
        answers = await asyncio.gather(*(self._holds(worker, response_id) for worker in workers))
        for worker, holds in zip(workers, answers, strict=True):
            if holds:
                self._owners.remember(response_id, worker.id)
                return worker.id
        return None

    async def _holds(self, worker: Worker, response_id: str) -> bool:
        try:
            answer = await self._client.get(
                f"{worker.spec.url}/v1/responses/{response_id}",
                headers=self._headers,
                timeout=self.timeout_s,
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def plan(
        self, method: bytes, target: bytes, body: bytes, owner: WorkerId | None, now: float
    ) -> RequestPlan:
        """Plan a request for a stored response itself. Raises NoRoutableWorker.

        It goes to the owner; without a known owner to any worker, whose 404 is the answer.
        """
        routable = [worker for worker in self._fleet.workers() if worker.is_routable]
        held = [worker for worker in self._fleet.workers() if worker.id == owner] if owner else []
        chosen = (held or routable)[:1]
        if not chosen:
            raise NoRoutableWorker(
                f"No routable worker at the moment. {self._fleet.causes()}".rstrip(), retry_after_s=1
            )
        ranking = tuple(Candidate(worker, 0.0, 0, 0.0, CostTerms()) for worker in chosen)
        query = RouteQuery(model="-", now=now, streamed=False)
        decision = RouteDecision("-", RouteReason.RESPONSE_OWNER, ranking)
        return RequestPlan(
            method,
            target,
            body,
            "-",
            (),
            query,
            decision,
            errors=ErrorShape.RESPONSES,
            has_roles=self._fleet.has_roles,
        )


def check_response_id(response_id: str) -> None:
    """Raise InvalidRequest if the ID is not safe as a path segment.

    Refused are IDs of dots only, and characters that workers might interpret differently than the gateway.
    """
    if not _ANY_ID(response_id):
        raise InvalidRequest("A response ID has letters, digits, `-`, `_`, `.` and `~` only.", param="id")


def response_id_in(first_bytes: bytes) -> str | None:
    """The response ID in the first bytes of an answer of `/v1/responses`, streamed or whole."""
    found = _RESPONSE_ID.search(first_bytes)
    return found[1].decode() if found else None
