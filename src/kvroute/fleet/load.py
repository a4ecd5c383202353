"""The load of one worker: its unfinished requests, and their queued prefill in seconds.

A worker computes requests in order of arrival (vLLM's default scheduler is first come, first served). So a
new request waits for the prefills of all earlier requests that have no first token yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from kvroute.fleet.foreign import ForeignLoad, OwnRequests

WINDOW_S = 30.0
"""Time constant of the averages below."""

WARM_UP_S = 1.0
"""Least age by which an average is divided, so that a single first request does not look like high load."""

RESIDENCE_WEIGHT = 0.05
"""Weight of one finished request in the average residence."""

_COARSE_S = 2.0**22
"""Adding and subtracting this rounds a duration to a multiple of 2**-30 s."""
# Every quantity that must return to zero is an integer or such a multiple. Floats below 2**23 add and
# subtract multiples of 2**-30 exactly, so no mix of reservations leaves a remainder.

_WARM_S = 40 * WINDOW_S
"""From this age on the warm-up factor is 1 to the last bit of a float."""

_NEVER = -inf
"""The time origin before the first dispatch: every weight from then has decayed to zero."""

_YOUNG = exp(-WARM_UP_S / WINDOW_S)
"""The decay at the age `WARM_UP_S`; a younger average has a larger one."""
_LEAST_SHARE = WINDOW_S - WINDOW_S * _YOUNG


class WorkerLoad:
    """Live load of one worker, or of one data-parallel rank.

    Mutable: its reservations change it; `measure_loads` writes `wait_s` and `utilisation`. `now` is
    `Clock.now()` and must not decrease from one call to the next.
    """

    __slots__ = (
        "_behind",
        "_head",
        "_head_end",
        "_head_start",
        "_is_warm",
        "_origin",
        "_queued_s",
        "_recent_requests",
        "_recent_s",
        "active_tokens",
        "foreign",
        "foreign_s",
        "foreign_tokens",
        "in_flight",
        "most_in_flight",
        "most_unanswered",
        "residence_s",
        "unanswered",
        "utilisation",
        "wait_s",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests that are dispatched and unfinished."""
        self.active_tokens = 0
        """Prompt tokens of the requests in flight; a prefix shared by n requests counts n times."""
        self.residence_s: float | None = None
        """Average time from dispatch to end of the answered requests; None before the first answer."""
        self.unanswered = 0
        """Those of them that have no first token and are not over, also if their prefill is assumed done."""
        self.most_in_flight = self.most_unanswered = 0
        """The largest of both since the last `take_peaks`."""
        self.foreign: ForeignLoad | None = None
        """Load from elsewhere. Set with `set_foreign`."""
        self.foreign_s = 0.0
        """The part of `wait_s` that comes from elsewhere."""
        self.foreign_tokens = 0.0
        """Tokens of others, beside `active_tokens`, as of the last `measure_loads`."""
        self.wait_s = 0.0
        """`wait` as of the last `measure_loads`."""
        self.utilisation = 0.0
        """Utilisation by prefill, the first figure of `recent`, as of the last `measure_loads`."""
        self._head: Reservation | None = None
        """The oldest request without a first token."""
        self._behind: dict[Reservation, None] = {}
        """The other requests without a first token, in order of dispatch."""
        self._queued_s = 0.0
        self._head_start = 0.0
        self._head_end = inf
        """When the prefill of the head is assumed to be done; inf for a streamed answer, whose first token
        will show it."""
        # Averages use forward decay (Cormode et al., "Forward decay", 2009): a later value is added with a
        # larger weight, and one common factor turns that into a decay. A value added at `_origin` weighs 1.
        self._recent_s = 0.0
        self._recent_requests = 0.0
        self._origin = _NEVER
        """The first dispatch. Moved forward after the warm-up, so that weights stay small."""
        self._is_warm = False

    @property
    def queued(self) -> int:
        """Requests without a first token, as of the last call that passed a time."""
        return 0 if self._head is None else 1 + len(self._behind)

    def reserve(self, now: float, prefill_s: float, tokens: int, streamed: bool = True) -> Reservation:
        """Account one dispatch with `prefill_s` of estimated prefill and `tokens` prompt tokens.

        `streamed` is False for an answer in one piece. Such an answer has no visible first token, so its
        prefill is assumed to take `prefill_s` from the time when it reaches the head of the queue.
        """
        reservation = Reservation(self, now, prefill_s, tokens, streamed)
        self.enter(reservation, now)
        return reservation

    def enter(self, reservation: Reservation, now: float) -> None:
        """Account a reservation that the caller has constructed for this load and that starts `now`."""
        if self._head_end <= now:
            self._complete_unstreamed(now)
        prefill_s = reservation.prefill_s = reservation.prefill_s + _COARSE_S - _COARSE_S
        in_flight = self.in_flight = self.in_flight + 1
        if in_flight > self.most_in_flight:
            self.most_in_flight = in_flight
        unanswered = self.unanswered = self.unanswered + 1
        if unanswered > self.most_unanswered:
            self.most_unanswered = unanswered
        self.active_tokens += reservation.tokens
        self._queued_s += prefill_s
        if self._head is not None:
            self._behind[reservation] = None
            return
        self._head = reservation
        self._head_start = now
        self._head_end = inf if reservation.streamed else now + prefill_s
        if self._origin == _NEVER:
            self._origin = now

    def wait(self, now: float) -> float:
        """Seconds before a request sent now: queued prefill, minus the time that the head has already had,
        and the load from elsewhere."""
        self._complete_unstreamed(now)
        head, foreign = self._head, self.foreign
        own_s = 0.0
        if head is not None:
            own_s = max(0.0, self._queued_s - min(now - self._head_start, head.prefill_s))
        return own_s if foreign is None else own_s + foreign.wait_at(now)

    def set_foreign(self, foreign: ForeignLoad | None) -> None:
        """Set the load from elsewhere."""
        self.foreign = foreign
        if foreign is None:
            self.foreign_s = self.foreign_tokens = 0.0

    def take_peaks(self) -> OwnRequests:
        """The most own requests at once since the last call."""
        peaks = OwnRequests(self.most_in_flight, self.most_unanswered, self.active_tokens)
        self.most_in_flight, self.most_unanswered = self.in_flight, self.unanswered
        return peaks

    def recent(self, now: float) -> tuple[float, float]:
        """Prefill seconds and number of prefills completed per second, averaged over 30 s.

        The first figure is the worker's utilisation by prefill. Both are divided by the warm-up
        1 - exp(-t / 30 s), where t is the time since the first dispatch.
        """
        # A prefill counts when it is done, not at dispatch: a burst is not yet utilisation, and a failed
        # request never is.
        self._complete_unstreamed(now)
        decay = exp((self._origin - now) / WINDOW_S)
        share = WINDOW_S if self._is_warm else max(_LEAST_SHARE, WINDOW_S - WINDOW_S * decay)
        return self._recent_s * (decay / share), self._recent_requests * (decay / share)

    def ended_elsewhere(self, requests: int, prefill_s: float, stay_s: float, now: float) -> None:
        """Account requests that have begun and ended elsewhere, and were answered: they count for the
        averages.

        `prefill_s` and `stay_s` are sums of the requests: estimated prefill, and time from dispatch to end.
        """
        if self._origin == _NEVER:
            self._origin = now
        weight = self._weight(now)
        self._recent_s += prefill_s * weight
        self._recent_requests += requests * weight
        mean_s, previous_s = stay_s / requests, self.residence_s
        if previous_s is None:
            self.residence_s = mean_s
        else:
            self.residence_s = mean_s + (previous_s - mean_s) * (1.0 - RESIDENCE_WEIGHT) ** requests

    def _leave_queue(self, reservation: Reservation, now: float, counts: bool = True) -> None:
        """Remove a reservation from the queue. `counts` is False if its prefill was never completed."""
        prefill_s = reservation.prefill_s
        reservation.is_queued = False
        self._queued_s -= prefill_s
        if reservation is not self._head:
            del self._behind[reservation]
        elif behind := self._behind:
            self._head = head = next(iter(behind))
            del behind[head]
            self._head_start = now
            self._head_end = inf if head.streamed else now + head.prefill_s
        else:
            self._head = None
            self._head_end = inf
        if counts:
            weight = self._weight(now)
            self._recent_s += prefill_s * weight
            self._recent_requests += weight

    def _weight(self, now: float) -> float:
        """The weight of a prefill that is completed now."""
        age_s = now - self._origin
        if age_s > _WARM_S:
            decay = exp(-age_s / WINDOW_S)
            self._recent_s *= decay
            self._recent_requests *= decay
            self._origin, self._is_warm, age_s = now, True, 0.0
        return exp(age_s / WINDOW_S)

    def _complete_unstreamed(self, now: float) -> None:
        """Remove reservations that are not streamed from the head once their estimated time has passed."""
        while (end := self._head_end) <= now and self._head is not None:
            self._leave_queue(self._head, end)


def describe_foreign(load: WorkerLoad, now: float) -> dict[str, Any] | None:
    """The load from elsewhere as JSON values: what the last page shows, its age, and what counts of it."""
    foreign = load.foreign
    if foreign is None:
        return None
    return {
        "waiting": foreign.waiting,
        "running": foreign.running,
        "age_s": round(now - foreign.at, 3),
        "wait_s": round(foreign.wait_at(now), 6),
        "tokens": round(foreign.tokens_at(now)),
    }


_figures = attrgetter(
    "in_flight",
    "active_tokens",
    "residence_s",
    "_queued_s",
    "_head_start",
    "_head_end",
    "_recent_s",
    "_recent_requests",
    "_origin",
    "_is_warm",
    "foreign",
)


class LoadStates(NamedTuple):
    """Copies of what ranking reads of several loads. Made by `copy_loads`."""

    figures: Sequence[tuple[Any, ...]]
    head_prefills_s: Sequence[float | None]
    """None where no request waits for its first token."""

    def restored(self) -> list[WorkerLoad]:
        """Loads that rank as the copied ones did, at the time of the copy. They take no reservations."""
        return [
            _restored(prefill_s, *figures)
            for figures, prefill_s in zip(self.figures, self.head_prefills_s, strict=True)
        ]


def copy_loads(loads: Sequence[WorkerLoad]) -> LoadStates:
    """Copy the figures of `loads`. About 0.4 us per load."""
    return LoadStates(
        list(map(_figures, loads)),
        [None if load._head is None else load._head.prefill_s for load in loads],
    )


def _restored(
    head_prefill_s: float | None,
    in_flight: int,
    active_tokens: int,
    residence_s: float | None,
    queued_s: float,
    head_start: float,
    head_end: float,
    recent_s: float,
    recent_requests: float,
    origin: float,
    is_warm: bool,
    foreign: ForeignLoad | None,
) -> WorkerLoad:
    load = WorkerLoad()
    load.in_flight, load.active_tokens, load.residence_s = in_flight, active_tokens, residence_s
    load._queued_s, load._head_start, load._head_end = queued_s, head_start, head_end
    load._recent_s, load._recent_requests = recent_s, recent_requests
    load._origin, load._is_warm, load.foreign = origin, is_warm, foreign
    if head_prefill_s is not None:
        load._head = Reservation(load, head_start, head_prefill_s, 0, True)
    return load


class Releasable(Protocol):
    """A resource that a request holds until its end."""

    def release(self) -> None: ...


class ReservationListener(Protocol):
    """Called when the request of a reservation has its first token and when the request ends."""

    def first_token(self, now: float, is_first: bool) -> None: ...

    def finish(self, now: float) -> None: ...


class BothListeners(NamedTuple):
    """Calls both listeners, the first one before the second one."""

    first: ReservationListener
    second: ReservationListener

    def first_token(self, now: float, is_first: bool) -> None:
        self.first.first_token(now, is_first)
        self.second.first_token(now, is_first)

    def finish(self, now: float) -> None:
        self.first.finish(now)
        self.second.finish(now)


class Reservation(Struct, eq=False):
    """One dispatched request's share of its worker's load.

    Made by `WorkerLoad.reserve`, or by a caller that passes it to `WorkerLoad.enter`. Mutable: its own
    methods and its load change it; the router sets `lease` and `listener`.
    """

    _load: WorkerLoad
    _start: float
    prefill_s: float
    """A multiple of 2**-30 s once `WorkerLoad.enter` has accounted it."""
    tokens: int
    streamed: bool
    is_queued: bool = True
    is_finished: bool = False
    lease: Releasable | None = None
    """Released by `finish`."""
    listener: ReservationListener | None = None
    is_unanswered: bool = True

    def first_token(self, now: float) -> None:
        """Record that the prefill is done. Later calls, and calls after `finish`, do nothing."""
        if not self.is_queued:
            return
        load = self._load
        # First come, first served: earlier requests that are not streamed have been computed, too.
        while (head := load._head) is not None and head is not self and not head.streamed:
            load._leave_queue(head, now)
        load._leave_queue(self, now)
        self.is_unanswered = False
        load.unanswered -= 1

    def finish(self, now: float) -> None:
        """Return the reserved load: the request ended, failed or was abandoned. Later calls do nothing."""
        if self.is_finished:
            return
        self.is_finished = True
        load = self._load
        if load._head_end <= now:
            load._complete_unstreamed(now)
        load.in_flight -= 1
        if self.is_unanswered:
            self.is_unanswered = False
            load.unanswered -= 1
        load.active_tokens -= self.tokens
        if self.is_queued and self.streamed:  # no first token: neither a prefill nor a residence is known
            load._leave_queue(self, now, False)
        else:
            if self.is_queued:
                load._leave_queue(self, now)
            stay = now - self._start
            residence_s = load.residence_s
            load.residence_s = (
                stay if residence_s is None else residence_s + RESIDENCE_WEIGHT * (stay - residence_s)
            )
        # `_release` inlined: every request ends here.
        lease, listener = self.lease, self.listener
        if lease is not None:
            lease.release()
        if listener is not None:
            listener.finish(now)

    def abandon(self, now: float) -> None:
        """Return the reserved load of a request that the worker has refused: it counts in no average."""
        if self.is_finished:
            return
        self.is_finished = True
        load = self._load
        load.in_flight -= 1
        load.active_tokens -= self.tokens
        if self.is_queued:
            load._leave_queue(self, now, False)
        self._release(now)

    def _release(self, now: float) -> None:
        lease, listener = self.lease, self.listener
        if lease is not None:
            lease.release()
        if listener is not None:
            listener.finish(now)


def measure_loads(loads: Iterable[WorkerLoad], now: float) -> tuple[float, float]:
    """Write `wait_s` and `utilisation` of each load; return the sums of both figures of `recent`.

    The results equal those of `wait` and `recent` to the last bit.
    """
    # One function instead of two calls per load: every request needs the figures of all workers of its
    # model, and two calls and a tuple per worker would be most of the cost of ranking.
    seconds = requests = 0.0
    for load in loads:
        if load._head_end <= now:
            load._complete_unstreamed(now)
        head = load._head
        if head is None:
            load.wait_s = 0.0
        else:
            had_s = now - load._head_start
            if had_s > head.prefill_s:
                had_s = head.prefill_s
            load.wait_s = load._queued_s - had_s  # at least zero: the head is queued itself
        if (foreign := load.foreign) is not None:
            load.foreign_s = foreign.wait_at(now)
            load.foreign_tokens = foreign.tokens_at(now)
            load.wait_s += load.foreign_s
        decay = exp((load._origin - now) / WINDOW_S)
        if load._is_warm:
            weight = decay / WINDOW_S
        elif decay < _YOUNG:
            weight = decay / (WINDOW_S - WINDOW_S * decay)
        else:
            weight = decay / _LEAST_SHARE
        load.utilisation = own_s = load._recent_s * weight
        seconds += own_s
        requests += load._recent_requests * weight
    return seconds, requests
