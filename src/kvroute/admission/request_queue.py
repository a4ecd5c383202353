"""Holds requests until a worker has a permit for them: permits, the queue's timers, and waiting requests.

`waiting.py` decides which request is next. docs/admission.md describes the behaviour.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from math import ceil
from typing import NamedTuple

from kvroute.admission.fair_queue import (
    AdmissionOptions,
    FairQueue,
    Outcome,
    QueueEntry,
    Target,
    TokenAccounts,
)
from kvroute.clock import Clock
from kvroute.errors import GatewayError, InvalidRequest, QueueFull, QueueTimeout
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.load import ReservationListener
from kvroute.fleet.worker import Worker, WorkerFacts
from kvroute.metrics import Metrics
from kvroute.openai.headers import Headers, header
from kvroute.openai.request import InferenceRequest
from kvroute.request.downstream import InFlightRequest
from kvroute.request.pending import DelayedExchange
from kvroute.routing.router import Observer
from kvroute.routing.strategy import Candidate, RouteDecision, RouteQuery, RouteReason

log = logging.getLogger(__name__)

PRIORITY_HEADER = b"x-vllm-priority"
_MAX_PRIORITY = 1_000_000
_NO_KEY = "-"
"""Label of requests without a named key."""
_STARTS_AT_ONCE = 16
"""Requests that start in one iteration of the event loop; each costs about 0.1 ms."""
_CHECK_S = 1.0
"""Longest time between two checks while requests wait: a ramp rises without an event."""


class Permits:
    """The requests of this process in flight on each worker, and the workers' limits.

    Observes the router, so that every attempt counts, retries included; `inner` is the router's other
    observer. With several processes each has its share of a limit, at least 1. Mutable: by the router's
    calls.
    """

    # Each process has a share, because only a process's own requests wake its queue. With one common count
    # the process that ends a request would always take its permit, and the queues of the others would starve.

    def __init__(
        self,
        options: AdmissionOptions,
        clock: Clock,
        inner: Observer | None = None,
        *,
        processes: int = 1,
        number: int = 0,
    ) -> None:
        self._options = options
        self._now = clock.now
        self._inner = inner
        self._processes = processes
        self._number = number
        self._in_flight: dict[Worker, int] = {}
        self._shares: dict[Worker, tuple[WorkerFacts, int]] = {}
        """This process's share of each limit, and the facts from which it was computed; 0 without a limit."""
        self.on_free: Callable[[], None] = lambda: None
        """Called when a permit is returned."""

    def configure(self, options: AdmissionOptions) -> None:
        """Change the limits. Requests in flight stay; a worker above its new limit gets no other ones."""
        self._options = options
        self._shares.clear()

    def limit(self, worker: Worker) -> int | None:
        """The worker's limit for all processes together; None without one."""
        options = self._options
        limit = options.max_concurrent_by_worker.get(worker.id)
        if limit is None:
            by_model = options.max_concurrent_by_model
            found = [by_model[model] for model in worker.models if model in by_model] if by_model else []
            limit = min(found) if found else options.max_concurrent
        if not limit and options.learn:
            limit = worker.facts.concurrency.limit
        return limit or None

    def in_flight(self, worker: Worker) -> int:
        """Requests of this process in flight on the worker."""
        return self._in_flight.get(worker, 0)

    def has_free(self, worker: Worker) -> bool:
        """Whether this process may send the worker another request. During a ramp the limit is reduced."""
        known = self._shares.get(worker)
        share = known[1] if known is not None and known[0] is worker.facts else self._share(worker)
        if not share:
            return True
        if worker.ramp_until is not None:
            share = max(1, int(share * worker.share_at(self._now())))
        return self._in_flight.get(worker, 0) < share

    def _share(self, worker: Worker) -> int:
        limit = self.limit(worker)
        share = 0
        if limit is not None:
            share = max(1, limit // self._processes + (self._number < limit % self._processes))
        self._shares[worker] = worker.facts, share
        return share

    def forget(self, worker: Worker) -> None:
        """Drop a worker that has left the fleet; its requests in flight still count until they end."""
        self._shares.pop(worker, None)

    def placed(self, decision: RouteDecision) -> RouteDecision:
        """The decision with the best worker that has a permit first; unchanged if none has."""
        ranking = decision.ranking
        handover = decision.handover
        if self.has_free(ranking[0].worker):
            if handover is None or self.has_free(handover.prefill.worker):
                return decision
            others = ranking[1:]
            return RouteDecision(decision.strategy, RouteReason.AT_LIMIT, (handover.decode_only, *others))
        for place, candidate in enumerate(ranking):
            if place and self.has_free(candidate.worker):
                others = [other for other in ranking if other is not candidate]
                return RouteDecision(decision.strategy, RouteReason.AT_LIMIT, (candidate, *others))
        return decision

    def dispatched(
        self, query: RouteQuery, decision: RouteDecision, candidate: Candidate, now: float
    ) -> ReservationListener:
        worker = candidate.worker
        self._in_flight[worker] = self._in_flight.get(worker, 0) + 1
        inner = None if self._inner is None else self._inner.dispatched(query, decision, candidate, now)
        return _Permit(self, worker, inner)

    def session_forgotten(self, session_key: str) -> None:
        if self._inner is not None:
            self._inner.session_forgotten(session_key)

    def returned(self, worker: Worker) -> None:
        """An attempt on the worker has ended."""
        left = self._in_flight[worker] - 1
        if left:
            self._in_flight[worker] = left
        else:
            del self._in_flight[worker]
        self.on_free()


class _Permit(NamedTuple):
    """The permit of one attempt."""

    permits: Permits
    worker: Worker
    inner: ReservationListener | None

    def first_token(self, now: float, is_first: bool) -> None:
        if self.inner is not None:
            self.inner.first_token(now, is_first)

    def finish(self, now: float) -> None:
        if self.inner is not None:
            self.inner.finish(now)
        self.permits.returned(self.worker)


def requested_priority(request: InferenceRequest, headers: Headers) -> int:
    """The priority that the client asks for: `X-Vllm-Priority`, else the body's `priority`, else 0.

    As in vLLM (0.33) a lower value is earlier, and the header overrides the body. Raises InvalidRequest if
    the value is not an integer.
    """
    text = header(headers, PRIORITY_HEADER).strip()
    name = "X-Vllm-Priority"
    if not text:
        if b'"priority"' not in request.body:
            return 0
        raw = (request.fields or {}).get("priority")
        text, name = bytes(raw) if raw is not None else b"0", "priority"
        if text == b"null":
            return 0
    try:
        value = int(text[:32])
    except ValueError:
        raise InvalidRequest(f"`{name}` must be an integer.", param=name) from None
    return max(-_MAX_PRIORITY, min(_MAX_PRIORITY, value))


class RequestQueue:
    """Admits requests while a worker has a permit, and lets the others wait.

    Mutable: by requests that arrive, start, leave or time out. All calls come from the event loop; a timer
    exists only while requests wait.
    """

    def __init__(
        self, options: AdmissionOptions, permits: Permits, fleet: Fleet, metrics: Metrics, clock: Clock
    ) -> None:
        self.permits = permits
        self._options = options
        self._fleet = fleet
        self._metrics = metrics
        self._now = clock.now
        self._accounts = TokenAccounts(options.output_token_weight)
        self._queue = FairQueue(self._accounts, ageing_s=options.ageing_s, max_waiting=options.max_waiting)
        self._waiting: dict[QueueEntry, WaitingRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_check_due = False
        permits.on_free = self.check
        fleet.subscribe(self._fleet_changed)

    def configure(self, options: AdmissionOptions) -> None:
        """Change all options, also for the requests that wait."""
        self._options = options
        self.permits.configure(options)
        self._queue.configure(options)
        self.check()

    def __len__(self) -> int:
        return len(self._queue)

    def entry(
        self,
        target: Target,
        key: str,
        weight: float,
        priority: int,
        session: str | None,
    ) -> QueueEntry:
        """An entry for a request that arrives now."""
        now = self._now()
        return QueueEntry(target, key, weight, priority, now, now + self._options.max_wait_s, session)

    def check_room(self, entry: QueueEntry) -> None:
        """Raises QueueFull if an arriving request can neither start nor wait."""
        self._offered(entry)

    def may_start(self, entry: QueueEntry) -> bool:
        """Whether an arriving request may start immediately. Raises QueueFull if it can neither start nor
        wait."""
        outcome, displaced = self._offered(entry)
        if outcome is Outcome.START:
            return True
        if displaced is not None:
            self._refuse(displaced, Outcome.DISPLACED, self._full(displaced))
        return False

    def _offered(self, entry: QueueEntry) -> tuple[Outcome, QueueEntry | None]:
        """See `FairQueue.offer`. Raises QueueFull instead of returning a refusal."""
        outcome, displaced = self._queue.offer(entry, self._can_start)
        if outcome is not Outcome.START and outcome is not Outcome.WAIT:
            self._shed(entry, outcome)
            raise self._too_long(entry) if outcome is Outcome.EXPECTED_WAIT else self._full(entry)
        return outcome, displaced

    def wait(self, entry: QueueEntry, waiting: WaitingRequest) -> None:
        """Let a request wait; `waiting` is started, refused or ended later."""
        self._queue.push(entry)
        self._waiting[entry] = waiting
        self._metrics.queue_waiting.labels(entry.target.model, entry.key or _NO_KEY).inc()
        if self._timer is None:
            self._set_timer()
        # Requests for another model may wait while this one could start.
        self.check()

    def leave(self, entry: QueueEntry) -> None:
        """The request's client has left, or the gateway stops."""
        self._queue.remove(entry)
        self._forget(entry)

    def placed(self, decision: RouteDecision) -> RouteDecision:
        """The decision with the best worker that has a permit first; unchanged if none has."""
        return self.permits.placed(decision)

    def started(self, entry: QueueEntry, model: str, input_tokens: int) -> float:
        """Account for a request that is sent now. Returns what `finished` needs."""
        waited_s = self._now() - entry.entered
        self._metrics.queue_wait.labels(model, entry.key or _NO_KEY).append(waited_s)
        return self._accounts.started(entry.key, input_tokens)

    def finished(self, entry: QueueEntry, assumed: float, output_tokens: int) -> None:
        """Correct the account of a request that has ended."""
        self._accounts.finished(entry.key, assumed, output_tokens)

    def describe(self, model: str) -> Mapping[str, object]:
        """Permits and waiting requests, as JSON values."""
        return {
            "waiting_requests": len(self._queue),
            "workers": {
                worker.id: {
                    "max_concurrent": self.permits.limit(worker),
                    "requests_of_this_process": self.permits.in_flight(worker),
                    "has_permit": self.permits.has_free(worker),
                }
                for worker in self._fleet.view(model).workers
            },
        }

    def check(self) -> None:
        """Start requests in the next iteration of the event loop, if any can start."""
        if not self._is_check_due and len(self._queue):
            self._is_check_due = True
            # Not immediately: the caller may be in the middle of ending or moving another request.
            asyncio.get_running_loop().call_soon(self._start_next)

    def _start_next(self) -> None:
        self._is_check_due = False
        now = self._now()
        for expired in self._queue.expired(now):
            message = f"No worker had a permit for {now - expired.entered:.3g} s (admission.max_wait_s)."
            retry_after_s = max(1, ceil(self._queue.expected_wait_s(expired)))
            self._refuse(expired, Outcome.DEADLINE, QueueTimeout(message, retry_after_s=retry_after_s))
        for _ in range(_STARTS_AT_ONCE):
            entry = self._queue.pop(self._can_start, now)
            if entry is None:
                break
            self._forget(entry).start()
        else:
            self.check()
        if self._timer is None:
            self._set_timer()

    def _can_start(self, target: Target) -> bool:
        workers = self._fleet.view(target.model).workers
        if target.owner is not None:
            workers = tuple(worker for worker in workers if worker.id == target.owner) or workers
        has_free = self.permits.has_free
        for worker in workers:
            if has_free(worker):
                return True
        return not workers  # then the request starts, and the planner answers 503

    def _set_timer(self) -> None:
        deadline = self._queue.next_deadline
        if deadline is not None:
            pause_s = min(_CHECK_S, max(0.0, deadline - self._now()))
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._start_next()

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.LEFT:
            self.permits.forget(worker)
        self.check()

    def _forget(self, entry: QueueEntry) -> WaitingRequest:
        self._metrics.queue_waiting.labels(entry.target.model, entry.key or _NO_KEY).dec()
        waiting = self._waiting.pop(entry)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return waiting

    def _refuse(self, entry: QueueEntry, outcome: Outcome, error: GatewayError) -> None:
        self._shed(entry, outcome)
        self._queue.remove(entry)
        self._forget(entry).refuse(error)

    def _too_long(self, entry: QueueEntry) -> QueueFull:
        expected_s, most_s = self._queue.expected_wait_s(entry), self._options.max_wait_s
        return QueueFull(
            f"The request would wait for a worker for about {expected_s:.1f} s; the limit is {most_s:g} s "
            "(admission.max_wait_s).",
            retry_after_s=max(1, ceil(expected_s - most_s)),
        )

    def _full(self, entry: QueueEntry) -> QueueFull:
        return QueueFull(
            f"{len(self._queue)} requests wait for a worker already (admission.max_waiting).",
            retry_after_s=max(1, ceil(self._queue.expected_wait_s(entry))),
        )

    def _shed(self, entry: QueueEntry, outcome: Outcome) -> None:
        self._metrics.queue_shed.labels(entry.target.model, entry.key or _NO_KEY, outcome.value).inc()


class WaitingRequest(DelayedExchange):
    """A request that waits in the queue.

    `start` plans the request and returns its exchange. `on_refused` answers an error, `on_ended` handles a
    client that left ("client") or a gateway that stops ("shutdown"). Exactly one of them is called, once.
    Mutable: by the queue.
    """

    def __init__(
        self,
        queue: RequestQueue,
        entry: QueueEntry,
        start: Callable[[], InFlightRequest],
        on_refused: Callable[[WaitingRequest, Exception], None],
        on_ended: Callable[[WaitingRequest, str], None],
    ) -> None:
        super().__init__()
        self._queue = queue
        self._entry = entry
        self._start = start
        self._on_refused = on_refused
        self._on_ended = on_ended

    def start(self) -> None:
        """Start the exchange; the queue has removed the request."""
        try:
            self._exchange = self._start()
        except Exception as error:  # noqa: BLE001 - passed on; other requests are not affected
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Answer the request with an error; the queue has removed it."""
        self._is_over = True
        self._on_refused(self, error)

    def _end_early(self, by: str) -> None:
        self._queue.leave(self._entry)
        self._on_ended(self, by)
