"""One request's life behind the gateway: tried on workers in order, relayed, accounted.

Everything that a dispatch accounts is given back in one `finally`, whatever mixture of errors,
disconnects and retries ended it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvroute.clock import Clock
from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    GatewayError,
    InvalidRequest,
    PoolExhausted,
    ResponseTimeout,
    ShuttingDown,
    UpstreamError,
    WorkerTimeout,
    WorkerUnreachable,
)
from kvroute.fleet.health import HealthMonitor
from kvroute.gateway.asgi import ClientDisconnected, Headers, Send, header
from kvroute.gateway.failures import error_event
from kvroute.gateway.journal import Record
from kvroute.gateway.planner import Plan
from kvroute.gateway.stored import ResponseOwners, response_id_in
from kvroute.gateway.usage import usage_in
from kvroute.metrics import Metrics
from kvroute.routing.decision import Candidate
from kvroute.routing.router import Dispatch, Router
from kvroute.tokens.estimate import TokenEstimator
from kvroute.upstream.headers import request_headers, response_headers
from kvroute.upstream.response import UpstreamResponse
from kvroute.upstream.retry import RetryBudget
from kvroute.upstream.transports import Transports

_RETRYABLE = (ConnectRefused, ConnectTimeout, ConnectionLost, PoolExhausted)


@dataclass(frozen=True, slots=True)
class Collaborators:
    """What every exchange uses; built once by the runtime."""

    router: Router
    transports: Transports
    health: HealthMonitor
    budget: RetryBudget
    metrics: Metrics
    estimator: TokenEstimator
    owners: ResponseOwners
    clock: Clock
    retry_statuses: frozenset[int]
    worker_authorization: bytes | None
    """Replaces the client's Authorization header towards workers."""
    drops_authorization: bool
    """The client's Authorization is a key of this gateway and is not shown to workers."""


class Exchange:
    """Mutable: one task runs it and fills in its record; only `end` may be called from elsewhere."""

    __slots__ = ("_headers", "_is_event_stream", "_plan", "_record", "_started", "_task", "_use")

    def __init__(self, use: Collaborators, plan: Plan, record: Record, headers: Headers) -> None:
        self._use = use
        self._plan = plan
        self._record = record
        self._headers = headers
        self._task: asyncio.Task[object] | None = None
        self._started = False
        self._is_event_stream = False

    @property
    def started(self) -> bool:
        """The head of an answer has been sent to the client."""
        return self._started

    def end(self, by: str) -> None:
        """Stop now: the client left ("client") or the gateway must stop ("shutdown").

        Interrupts whatever await the exchange is in; calls after the first change nothing.
        """
        if self._task is not None and not self._record.ended_by:
            self._record.ended_by = by
            self._task.cancel()

    async def run(self, send: Send) -> None:
        """Answer the request.

        Raises ClientDisconnected when the client left, and a GatewayError while nothing has been sent;
        after that a failure ends the answer as its protocol allows: an event stream with an error
        event, anything else by returning early, upon which the server closes the connection.
        """
        task = self._task = asyncio.current_task()
        try:
            await self._run(send)
        except asyncio.CancelledError:
            by = self._record.ended_by
            if task is None or by not in ("client", "shutdown"):
                raise
            task.uncancel()
            self._use.metrics.streams_aborted.labels(by).inc()
            if by == "client":
                raise ClientDisconnected from None
            self._task = None
            await self._cut(send, ShuttingDown("The gateway is shutting down."))
        finally:
            self._task = None

    async def _run(self, send: Send) -> None:
        use, plan = self._use, self._plan
        use.budget.request(plan.query.now)
        remaining = len(plan.decision.ranking)
        for candidate in plan.decision.ranking:
            remaining -= 1
            dispatch = use.router.dispatch(plan.query, plan.decision, candidate, use.clock.now())
            try:
                if await self._try(candidate, dispatch, send, can_retry=remaining > 0):
                    return
            finally:
                dispatch.finish(use.clock.now())
        raise WorkerUnreachable(f"None of {len(plan.decision.ranking)} routable workers could be reached.")

    async def _try(self, candidate: Candidate, dispatch: Dispatch, send: Send, *, can_retry: bool) -> bool:
        """One worker's turn. False when the next one should have it."""
        use, plan = self._use, self._plan
        try:
            response = await self._send(candidate)
        except UpstreamError as error:
            self._failed(candidate, error, can_retry=can_retry)
            return False
        try:
            # The head waits for the first body byte: until then another worker can still answer.
            try:
                chunk = await response.next_chunk()
            except UpstreamError as error:
                self._failed(candidate, error, can_retry=can_retry)
                return False
            use.health.report_status(candidate.worker, response.status)
            if can_retry and response.status in use.retry_statuses and self._spend("status"):
                return False
            use.metrics.routed(
                plan.model, plan.decision.strategy, plan.query.tokens, candidate.matched_tokens
            )
            await self._relay(response, chunk, dispatch, candidate, send)
            return True
        finally:
            response.abort()  # a no-op when the answer was complete and its connection went back

    async def _send(self, candidate: Candidate) -> UpstreamResponse:
        """Send the request to one worker; a kept connection that turns out dead is replaced once."""
        use, plan, record = self._use, self._plan, self._record
        worker = candidate.worker
        transport = use.transports.of(worker)
        headers = request_headers(
            self._headers,
            host=transport.host,
            request_id=record.request_id.encode("latin-1"),
            content_length=len(plan.body),
        )
        if use.drops_authorization or use.worker_authorization is not None:
            headers = [pair for pair in headers if pair[0].lower() != b"authorization"]
            if use.worker_authorization is not None:
                headers.append((b"authorization", use.worker_authorization))
        record.worker = worker.id
        record.matched_tokens = candidate.matched_tokens
        record.attempts += 1
        try:
            return await transport.send(plan.method, plan.target, headers, plan.body)
        except ConnectionLost as error:
            if not error.reused or not self._spend("stale_connection"):
                raise
        except ValueError as error:  # a header that would let one request look like two
            raise InvalidRequest(f"The request cannot be forwarded: {error}.") from error
        return await transport.send(plan.method, plan.target, headers, plan.body, fresh=True)

    def _failed(self, candidate: Candidate, error: UpstreamError, *, can_retry: bool) -> None:
        """Tell health of a failed attempt; raise what the client sees unless another worker may try."""
        use, worker = self._use, candidate.worker
        self._record.error = error.cause
        if isinstance(error, ConnectRefused):
            use.health.report_refused(worker)
        elif not isinstance(error, PoolExhausted):  # that is our own limit, not the worker's failure
            use.health.report_failure(worker, error.cause)
        if isinstance(error, _RETRYABLE) and can_retry and self._spend(error.cause):
            return
        if isinstance(error, ResponseTimeout):
            raise WorkerTimeout(f"Worker {worker.id!r} did not answer in time.") from error
        if not can_retry and isinstance(error, _RETRYABLE):
            tried = self._record.attempts
            raise WorkerUnreachable(
                f"No worker could be reached ({tried} attempts, last: {error.cause})."
            ) from error
        raise WorkerUnreachable(f"Worker {worker.id!r} failed before it answered ({error.cause}).") from error

    def _spend(self, cause: str) -> bool:
        """Whether an attempt may be repeated; refused connections cost nothing of the budget."""
        use = self._use
        if cause != ConnectRefused.cause and not use.budget.take(use.clock.now()):
            use.metrics.retries_denied.inc()
            return False
        use.metrics.retries.labels(cause).inc()
        return True

    async def _relay(
        self, response: UpstreamResponse, chunk: bytes, dispatch: Dispatch, candidate: Candidate, send: Send
    ) -> None:
        use, record = self._use, self._record
        record.status = response.status
        record.first_byte = now = use.clock.now()
        self._is_event_stream = header(response.headers, b"content-type").startswith(b"text/event-stream")
        if self._is_event_stream:
            dispatch.first_token(now)
        if self._plan.stores_response and (response_id := response_id_in(chunk)):
            use.owners.remember(response_id, candidate.worker.id)
        added = [
            (b"x-request-id", record.request_id.encode("latin-1")),
            (b"x-kvroute-worker", candidate.worker.id.encode()),
            (b"x-kvroute-strategy", self._plan.decision.strategy.encode()),
            (b"x-kvroute-reason", self._plan.decision.reason.value.encode()),
        ]
        self._started = True
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": response_headers(response.headers, added),
            }
        )
        before_last = last = b""
        try:
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                before_last, last = last, chunk
                chunk = await response.next_chunk()
        except UpstreamError as error:
            record.ended_by, record.error = "worker", error.cause
            use.metrics.streams_aborted.labels("worker").inc()
            use.health.report_failure(candidate.worker, error.cause)
            await self._cut(send, WorkerUnreachable(f"Worker {candidate.worker.id!r} broke off its answer."))
            return
        await send({"type": "http.response.body", "body": b""})
        if response.status == 200 and (usage := usage_in(before_last, last)):
            use.metrics.reported(
                self._plan.model, candidate.worker.id, usage.prompt_tokens, usage.cached_tokens
            )
            use.estimator.observe(self._plan.model, self._plan.prompts, usage.prompt_tokens)

    async def _cut(self, send: Send, error: GatewayError) -> None:
        """End an answer that cannot be completed."""
        if not self._started:
            raise error
        if self._is_event_stream:
            event = error_event(error, self._plan.errors)
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
