"""The attempts of one request: which worker gets it, and whether another one is tried after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from kvroute.clock import Clock
from kvroute.errors import (
    OUT_OF_DESCRIPTORS,
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    GatewayError,
    GatewayOverloaded,
    InvalidRequest,
    NoResources,
    PoolExhausted,
    ProtocolViolation,
    RedirectedByWorker,
    ResponseTimeout,
    UpstreamError,
    WorkersBusy,
    WorkerTimeout,
    WorkerUnreachable,
)
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.load import Reservation
from kvroute.fleet.worker import HealthState, Worker
from kvroute.metrics import Metrics
from kvroute.relay.back_pressure import estimated_retry_after_s
from kvroute.relay.planner import has_rank
from kvroute.relay.poison import LostRequests
from kvroute.relay.retry_budget import RetryBudget
from kvroute.request.plan import RequestPlan
from kvroute.request.record import Connect, Record, Trace, trace_id_in
from kvroute.routing.router import Router
from kvroute.routing.strategy import Candidate, RouteDecision, RouteQuery
from kvroute.upstream.response import AnswerListener, UpstreamResponse
from kvroute.upstream.transport import Transports

_RETRYABLE = (
    ConnectRefused,
    ConnectTimeout,
    ConnectionLost,
    NoResources,
    PoolExhausted,
    ProtocolViolation,
    RedirectedByWorker,
)
"""After NoResources another worker may have an open connection that is idle."""
_OWN_LIMITS = (NoResources, PoolExhausted)


@dataclass(frozen=True, slots=True)
class AttemptDeps:
    """What every attempt uses; the runtime builds it once."""

    router: Router
    transports: Transports
    health: HealthMonitor
    budget: RetryBudget
    metrics: Metrics
    clock: Clock
    retry_statuses: frozenset[int]
    """Statuses of a worker's answer for which the exchange asks for `Attempts.retry_after_status`."""
    lost: LostRequests | None = None
    lost_workers: int = 2
    """Most workers that begin to compute one request."""
    busy_workers: int = 4
    """Most workers that one request asks while they are full."""
    on_sent: Callable[[RouteQuery, Candidate], None] | None = None
    """Called after each attempt was sent; must not block."""
    log_traces: bool = False
    """Whether the log has fields, one of which is `Record.trace_id`."""
    on_exhausted: Callable[[str], None] | None = None
    """Called when a connection fails because the gateway lacks descriptors, ports or memory."""
    now: Callable[[], float] = field(init=False)
    """`clock.now`. To look it up costs more than to call it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "now", self.clock.now)


class Attempts(Struct, eq=False):
    """The worker that has the request now, the load reserved there, and its response.

    Mutable: changed by the exchange that owns it. No method waits. Methods that send take the
    listener of the response, so that exchange and attempts do not refer to each other.
    """

    _deps: AttemptDeps
    _plan: RequestPlan
    _record: Record
    _fields: bytes
    """The client's headers as `upstream.headers.relayed_fields` returns them."""
    response: UpstreamResponse | None = None
    candidate: Candidate | None = None
    _dispatch: Reservation | None = None
    _busy: list[tuple[Worker, int]] | None = None
    """The workers that were full, with their Retry-After (0: none)."""
    _has_left: bool = False
    """The request was taken from a worker that was found asleep. It is done once: a whole fleet may be put to
    sleep, one worker after another."""

    def start(self, listener: AnswerListener) -> None:
        """Send the request to the first worker of the ranking. Raises InvalidRequest."""
        self._deps.budget.count_request(self._plan.query.now)
        if self._deps.log_traces and not self._record.trace_id:  # tracing may have set it
            self._record.trace_id = trace_id_in(self._fields)
        self._send_to_next(listener)

    def _send_to_next(self, listener: AnswerListener) -> None:
        deps, plan, record = self._deps, self._plan, self._record
        query, decision, tried = plan.query, plan.decision, record.attempts
        if tried:  # a worker may have fallen asleep since the request was planned
            ranking = _awake_first(decision.ranking, tried)
            if ranking is not decision.ranking:
                decision = RouteDecision(decision.strategy, decision.reason, ranking, decision.handover)
                plan = self._plan = replace(plan, decision=decision)
        candidate = self.candidate = decision.ranking[tried]
        # The first attempt is sent at the moment for which it was planned.
        now = deps.now() if tried else query.now
        record.worker = candidate.worker.spec.id
        record.matched_tokens = candidate.matched_tokens
        record.held = candidate.match
        record.attempts = tried + 1
        # Sent before it is accounted: the worker can read meanwhile. No other decision comes in between.
        self._send(candidate, listener)
        self._dispatch = deps.router.dispatch(query, decision, candidate, now)
        if deps.on_sent is not None:
            deps.on_sent(query, candidate)

    def _send(
        self,
        candidate: Candidate,
        listener: AnswerListener,
        fresh: bool = False,
        body: bytes | memoryview | None = None,
        tail: bytes = b"",
        *,
        is_leg: bool = False,
        limit_s: float = 0.0,
    ) -> None:
        """Send the request. `body` and `tail`, if they are given, are sent in place of its body.

        `is_leg`: the answer is not streamed. `limit_s`: see `WorkerTransport.submit`.
        """
        plan, fields, held = self._plan, self._fields, candidate.match
        if held is not None and held.rank is not None and not has_rank(fields):
            fields += b"x-data-parallel-rank: %d\r\n" % candidate.worker.sent_rank(held.rank)
        if body is None:
            body = plan.body if plan.other_bodies is None else plan.body_for(candidate.worker.id)
        transport = self._deps.transports.of(candidate.worker)
        try:
            head = transport.heads.encode(
                plan.method, plan.target, fields, self._record.request_id, len(body) + len(tail)
            )
        except ValueError as error:
            raise InvalidRequest(f"The request cannot be forwarded: {error}.") from error
        self.response = response = transport.submit(
            head, body, listener, fresh, plan.query.streamed and not is_leg, tail, limit_s
        )
        if self._record.trace is not None and response.opening is not None:
            _trace_connect(self._record.trace, candidate.worker.id, response, self._deps.now)

    def first_token_arrived(self, now: float) -> None:
        if self._dispatch is not None:
            self._dispatch.first_token(now)

    def release(self, now: float) -> None:
        """End the current attempt: abort its response and release its reservation. Idempotent."""
        response, dispatch = self.response, self._dispatch
        if response is not None:
            self.response = None
            if not response.is_over:
                response.abort()
        if dispatch is not None:
            dispatch.finish(now)  # a second call changes nothing

    def retry_after_failure(self, listener: AnswerListener) -> None:
        """Report the failure of an attempt without any answer to `health`, and send the request again.

        Raises the error that the client sees when no retry is possible.
        """
        candidate, response = self.candidate, self.response
        assert candidate is not None
        assert response is not None
        assert response.error is not None
        deps, worker, error = self._deps, candidate.worker, response.error
        if isinstance(error, ConnectionLost) and error.reused and self._may_retry("stale_connection"):
            # The worker closed an idle connection while the request was sent: no failure of the worker.
            self._send(candidate, listener, fresh=True)
            return
        self._record.error = error.cause
        self._report(worker, error)
        may_begin = self.may_begin_after(worker, error)
        has_next = may_begin and self._record.attempts < len(self._plan.decision.ranking)
        if isinstance(error, _RETRYABLE) and has_next and self._may_retry(error.cause):
            self.release(deps.now())
            self._send_to_next(listener)
            return
        raise self._client_error(error, worker.id, has_next) from error

    def _report(self, worker: Worker, error: UpstreamError) -> None:
        """Report a failed attempt to `health`."""
        if isinstance(error, ConnectRefused):
            self._deps.health.report_refused(worker)
        elif not isinstance(error, _OWN_LIMITS):  # those are the gateway's own, not failures of the worker
            self._deps.health.report_failure(worker, error.cause)

    def may_begin_after(self, worker: Worker, error: UpstreamError) -> bool:
        """Account for a failed attempt. Returns whether another worker may begin to compute the request."""
        if not error.was_sent:
            return True
        self._record.begun += 1
        self.report_lost(worker, error)
        return self._record.begun < self._deps.lost_workers

    def report_lost(self, worker: Worker, error: UpstreamError) -> None:
        """Keep the request's body among those that have lost workers, if the worker broke off."""
        plan, lost = self._plan, self._deps.lost
        if lost is not None and isinstance(error, ConnectionLost):
            lost.lost(worker, self._record.key, plan.target, plan.body, plan.model)

    def retry_after_status(self, listener: AnswerListener) -> bool:
        """Send the request to the next worker because of the answer's status; False if no retry is
        possible."""
        self._record.begun += 1
        if self._record.begun >= self._deps.lost_workers or self._record.attempts >= len(
            self._plan.decision.ranking
        ):
            return False
        if not self._may_retry("status"):
            return False
        self.release(self._deps.now())
        self._send_to_next(listener)
        return True

    def leave_busy_worker(self, listener: AnswerListener, retry_after_s: int) -> None:
        """Send the request to the next worker, because this one is full and has not taken it.

        `retry_after_s` is the worker's, 0 if it names none. Raises WorkersBusy if no other worker may be
        asked.
        """
        deps, candidate, now = self._deps, self.candidate, self._deps.now()
        assert candidate is not None
        if self._busy is None:
            self._busy = []
        self._busy.append((candidate.worker, retry_after_s))
        deps.metrics.busy_answers.labels(candidate.worker.id).inc()
        if self._dispatch is not None:
            self._dispatch.abandon(now)
        if self._record.attempts >= len(self._plan.decision.ranking) or len(self._busy) >= deps.busy_workers:
            raise self._busy_error(self._busy)
        deps.metrics.retries.labels("busy").inc()
        self.release(now)
        self._send_to_next(listener)

    @staticmethod
    def _busy_error(busy: list[tuple[Worker, int]]) -> WorkersBusy:
        stated = [retry_after_s for _, retry_after_s in busy if retry_after_s]
        estimated = estimated_retry_after_s(worker.load for worker, _ in busy)
        return WorkersBusy(
            f"Every worker that was asked is full ({len(busy)}).",
            retry_after_s=min(stated) if stated else estimated,
        )

    def leave(self, worker: Worker, listener: AnswerListener) -> bool:
        """Send the request to another worker, if it is at `worker`, which was found asleep.

        Returns False if it is not there, or if no other worker of the ranking is awake: then it stays, and is
        answered after the sleep. Costs nothing of the retry budget, because nothing has failed.
        """
        if self.candidate is None or self.candidate.worker is not worker or not self._may_leave():
            return False
        self.release(self._deps.now())
        self._send_to_next(listener)
        return True

    def _may_leave(self) -> bool:
        others = self._plan.decision.ranking[self._record.attempts :]
        if (
            self._has_left
            or self.response is None
            or all(other.worker.state is HealthState.ASLEEP for other in others)
        ):
            return False
        self._has_left = True
        self._deps.metrics.retries.labels("asleep").inc()
        return True

    def _may_retry(self, cause: str) -> bool:
        """Take a retry from the budget; a refused connection costs nothing."""
        deps = self._deps
        if cause != ConnectRefused.cause and not deps.budget.take(deps.now()):
            deps.metrics.retries_denied.inc()
            return False
        deps.metrics.retries.labels(cause).inc()
        return True

    def _client_error(self, error: UpstreamError, worker: str, has_next: bool) -> GatewayError:
        if isinstance(error, NoResources):
            deps = self._deps
            if deps.on_exhausted is not None:
                deps.on_exhausted(str(error))
            return GatewayOverloaded(
                "The gateway has no descriptor or port left for a connection to a worker.", OUT_OF_DESCRIPTORS
            )
        if isinstance(error, ResponseTimeout):
            return WorkerTimeout(f"Worker {worker!r} did not answer in time.")
        if self._record.begun > 1 and self._record.begun >= self._deps.lost_workers:
            return WorkerUnreachable(
                f"{self._record.begun} workers began to compute the request and failed (last: {error.cause})."
            )
        if not has_next and isinstance(error, _RETRYABLE):
            tried = self._record.attempts
            return WorkerUnreachable(f"No worker could be reached ({tried} attempts, last: {error.cause}).")
        return WorkerUnreachable(f"Worker {worker!r} failed before it answered ({error.cause}).")


def _awake_first(ranking: Sequence[Candidate], tried: int) -> Sequence[Candidate]:
    """The ranking, in which the first worker at `tried` or behind it that is awake is at `tried`.

    The same object if that is so already, or if none of them is awake.
    """
    for place in range(tried, len(ranking)):
        if ranking[place].worker.state is not HealthState.ASLEEP:
            if place == tried:
                return ranking
            return [*ranking[:tried], ranking[place], *ranking[tried:place], *ranking[place + 1 :]]
    return ranking


def _trace_connect(trace: Trace, worker: str, response: UpstreamResponse, now: Callable[[], float]) -> None:
    """Add the connect of `response`, whose connection is being opened, to the trace."""
    assert response.opening is not None
    connect = Connect(worker, now())
    trace.connects.append(connect)

    def ended(_: object) -> None:
        connect.ended = now()
        if response.error is not None:
            connect.error = response.error.cause

    response.opening.add_done_callback(ended)
