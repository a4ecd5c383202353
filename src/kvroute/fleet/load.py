"""What we have sent to one worker and what of it is unfinished, in seconds of prefill.

The one place where load is counted. A worker takes requests in order (vLLM's default scheduler is first
come, first served), so what a new request waits for is the prefill of those before it that have not
shown a first token. Everything that must return to zero is an integer (nanoseconds, tokens, counts):
no mix of reservations leaves a remainder.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, expm1

WINDOW_S = 30.0
"""Time constant of the averages below."""

WARM_UP_S = 1.0
"""An average younger than this is divided as if it were this old: a first request is not a flood."""

RESIDENCE_WEIGHT = 0.05
"""Weight of one finished request in the average residence."""

_WARM_S = 40 * WINDOW_S
"""From this age on the warm-up is 1 to the last bit of a float."""

_new = object.__new__


class WorkerLoad:
    """Live load of one worker, or of one data-parallel rank. Mutable: changed by its reservations only.

    `now` is `Clock.now()` and must not fall from one call to the next.
    """

    __slots__ = (
        "_at",
        "_head",
        "_head_start",
        "_queue",
        "_queued_ns",
        "_recent_requests",
        "_recent_s",
        "_since",
        "active_tokens",
        "in_flight",
        "residence_s",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests dispatched and unfinished."""
        self.active_tokens = 0
        """Prompt tokens of those, shared prefixes counted once each time."""
        self.residence_s: float | None = None
        """Average time from dispatch to end of the requests that were answered; None before the first."""
        self._queue: dict[Reservation, None] = {}
        """Requests without a first token, in order of dispatch."""
        self._queued_ns = 0
        self._head: Reservation | None = None
        self._head_start = 0.0
        self._recent_s = 0.0
        self._recent_requests = 0.0
        self._at = 0.0
        self._since: float | None = None

    @property
    def queued(self) -> int:
        """Requests without a first token, as of the last call that brought the time."""
        return len(self._queue)

    def reserve(self, now: float, prefill_s: float, tokens: int, streamed: bool = True) -> Reservation:
        """Account one dispatch: `prefill_s` of estimated prefill, `tokens` of prompt.

        `streamed` is False for an answer that comes in one piece. It shows no first token, so once it
        heads the queue its prefill is taken to last what was estimated.
        """
        head = self._head
        if head is not None and not head.streamed:
            self._run_out(now)
            head = self._head
        # As `Reservation(...)`: a constructor in Python costs more than its fields.
        reservation = _new(Reservation)
        reservation._load = self
        reservation._start = now
        reservation.prefill_ns = prefill_ns = round(prefill_s * 1e9)
        reservation.tokens = tokens
        reservation.streamed = streamed
        reservation.is_queued = True
        reservation.is_finished = False
        if self._since is None:
            self._since = self._at = now
        self.in_flight += 1
        self.active_tokens += tokens
        self._queued_ns += prefill_ns
        self._queue[reservation] = None
        if head is None:
            self._head = reservation
            self._head_start = now
        return reservation

    def wait(self, now: float) -> float:
        """Seconds of prefill in front of a request sent now, less what the first in line has had."""
        head = self._head
        if head is None:
            return 0.0
        if not head.streamed:
            self._run_out(now)
            head = self._head
            if head is None:
                return 0.0
        had_ns = (now - self._head_start) * 1e9
        return max(0.0, self._queued_ns - min(had_ns, head.prefill_ns)) / 1e9

    def recent(self, now: float) -> tuple[float, float]:
        """Prefill seconds and prefills done per second: a 30 s average, divided by its warm-up.

        The first is the worker's utilisation by prefill. Counted when the prefill is through, not at
        dispatch: a burst is no utilisation yet, and what fails never was. The warm-up is
        1 - exp(-t / 30 s), t since the first dispatch.
        """
        since = self._since
        if since is None:
            return 0.0, 0.0
        if self._head is not None:
            self._run_out(now)
        age_s = now - since
        share = -WINDOW_S * expm1((-age_s if age_s > WARM_UP_S else -WARM_UP_S) / WINDOW_S)
        weight = exp((self._at - now) / WINDOW_S) / share
        return self._recent_s * weight, self._recent_requests * weight

    def _through(self, reservation: Reservation, now: float, counts: bool = True) -> None:
        """Out of the queue: its prefill is done, or (`counts` is False) never will be."""
        queue = self._queue
        del queue[reservation]
        self._queued_ns -= reservation.prefill_ns
        reservation.is_queued = False
        if reservation is self._head:
            self._head = next(iter(queue)) if queue else None
            self._head_start = now
        if not counts:
            return
        if now > self._at:
            decay = exp((self._at - now) / WINDOW_S)
            self._recent_s *= decay
            self._recent_requests *= decay
            self._at = now
        self._recent_s += reservation.prefill_ns / 1e9
        self._recent_requests += 1.0

    def _run_out(self, now: float) -> None:
        """Take off the front what is not streamed and has had its estimated time."""
        while (head := self._head) is not None and not head.streamed:
            end = self._head_start + head.prefill_ns / 1e9
            if end > now:
                return
            self._through(head, end)


class Reservation:
    """One dispatched request's share of its worker's load, made by `WorkerLoad.reserve`. Mutable: by its own
    methods and its load."""

    __slots__ = ("_load", "_start", "is_finished", "is_queued", "prefill_ns", "streamed", "tokens")

    _load: WorkerLoad
    _start: float
    prefill_ns: int
    tokens: int
    streamed: bool
    is_queued: bool
    is_finished: bool

    def first_token(self, now: float) -> None:
        """Its prefill is done. Does nothing after the first time, or after `finish`."""
        if not self.is_queued:
            return
        load = self._load
        # First come, first served: what stands before it without being able to show a first token has
        # been computed too.
        while (head := load._head) is not None and head is not self and not head.streamed:
            load._through(head, now)
        load._through(self, now)

    def finish(self, now: float) -> None:
        """Return everything: the request ended, failed or was abandoned. Does nothing the second time."""
        if self.is_finished:
            return
        self.is_finished = True
        load = self._load
        head = load._head
        if head is not None and not head.streamed:
            load._run_out(now)
        load.in_flight -= 1
        load.active_tokens -= self.tokens
        if self.is_queued:
            load._through(self, now, not self.streamed)
            if self.streamed:
                return  # without a first token it was no prefill and no residence
        stay = now - self._start
        before = load.residence_s
        load.residence_s = stay if before is None else before + RESIDENCE_WEIGHT * (stay - before)


def survey(loads: Iterable[WorkerLoad], now: float) -> tuple[list[float], list[float], float, float]:
    """Of many loads at once: each one's `wait`; its utilisation as of `recent`; the sums of both of
    `recent`'s figures.

    The same to the last bit as asking each load, which is the plain form. Every request asks all workers of
    its model, and two calls and a pair a worker would be most of what ranking costs.
    """
    waits: list[float] = []
    busy: list[float] = []
    seconds = requests = 0.0
    for load in loads:
        since = load._since
        if since is None:
            waits.append(0.0)
            busy.append(0.0)
            continue
        head = load._head
        if head is not None and not head.streamed and load._head_start + head.prefill_ns / 1e9 <= now:
            load._run_out(now)
            head = load._head
        if head is None:
            waits.append(0.0)
        else:
            had_ns, prefill_ns = (now - load._head_start) * 1e9, head.prefill_ns
            left_ns = load._queued_ns - (had_ns if had_ns <= prefill_ns else prefill_ns)
            waits.append(left_ns / 1e9 if left_ns > 0 else 0.0)
        recent_s, recent_requests = load._recent_s, load._recent_requests
        if recent_requests or recent_s:
            age_s = now - since
            if age_s > _WARM_S:
                share = WINDOW_S
            else:
                share = -WINDOW_S * expm1((-age_s if age_s > WARM_UP_S else -WARM_UP_S) / WINDOW_S)
            weight = exp((load._at - now) / WINDOW_S) / share
            own_s = recent_s * weight
            seconds += own_s
            requests += recent_requests * weight
            busy.append(own_s)
        else:
            busy.append(0.0)
    return waits, busy, seconds, requests
