"""What we have sent to one worker and what of it is unfinished, in seconds of prefill.

The one place where load is counted. A worker takes requests in order (vLLM's default scheduler is first
come, first served), so what a new request waits for is the prefill of those before it that have not
shown a first token. Everything that must return to zero is an integer, or seconds in whole multiples of
2**-30, which floats below 2**23 add and take off exactly: no mix of reservations leaves a remainder.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf
from typing import Protocol

from msgspec import Struct

WINDOW_S = 30.0
"""Time constant of the averages below."""

WARM_UP_S = 1.0
"""An average younger than this is divided as if it were this old: a first request is not a flood."""

RESIDENCE_WEIGHT = 0.05
"""Weight of one finished request in the average residence."""

_COARSE_S = 2.0**22
"""Added and taken off again, it leaves whole multiples of 2**-30 s: floats from here on are no finer."""

_WARM_S = 40 * WINDOW_S
"""From this age on the warm-up is 1 to the last bit of a float."""

_NEVER = -inf
"""What began then has decayed to nothing."""

_YOUNG = exp(-WARM_UP_S / WINDOW_S)
_LEAST_SHARE = WINDOW_S - WINDOW_S * _YOUNG


class WorkerLoad:
    """Live load of one worker, or of one data-parallel rank. Mutable: changed by its reservations only, but
    for what `survey` leaves.

    `now` is `Clock.now()` and must not fall from one call to the next.
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
        "in_flight",
        "residence_s",
        "utilisation",
        "wait_s",
    )

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests dispatched and unfinished."""
        self.active_tokens = 0
        """Prompt tokens of those, shared prefixes counted once each time."""
        self.residence_s: float | None = None
        """Average time from dispatch to end of the requests that were answered; None before the first."""
        self.wait_s = 0.0
        """`wait` as of the last `survey`."""
        self.utilisation = 0.0
        """By prefill, the first figure of `recent`, as of the last `survey`."""
        self._head: Reservation | None = None
        """The first of the requests without a first token."""
        self._behind: dict[Reservation, None] = {}
        """The others, in order of dispatch."""
        self._queued_s = 0.0
        self._head_start = 0.0
        self._head_end = inf
        """When the head is taken to be through; never, if it will show a first token."""
        # Averages decay forwards (Cormode et al., "Forward decay", 2009): what comes later weighs more, and
        # one factor for all of it makes that a decay. What is added at `_origin` weighs 1.
        self._recent_s = 0.0
        self._recent_requests = 0.0
        self._origin = _NEVER
        """The first dispatch; later on, so that weights stay small, some time when all was warm."""
        self._is_warm = False

    @property
    def queued(self) -> int:
        """Requests without a first token, as of the last call that brought the time."""
        return 0 if self._head is None else 1 + len(self._behind)

    def reserve(self, now: float, prefill_s: float, tokens: int, streamed: bool = True) -> Reservation:
        """Account one dispatch: `prefill_s` of estimated prefill, `tokens` of prompt.

        `streamed` is False for an answer that comes in one piece. It shows no first token, so once it
        heads the queue its prefill is taken to last what was estimated.
        """
        reservation = Reservation(self, now, prefill_s, tokens, streamed)
        self.enter(reservation, now)
        return reservation

    def enter(self, reservation: Reservation, now: float) -> None:
        """As `reserve`, with a new reservation of this load that starts `now`."""
        if self._head_end <= now:
            self._run_out(now)
        prefill_s = reservation.prefill_s = reservation.prefill_s + _COARSE_S - _COARSE_S
        self.in_flight += 1
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
        """Seconds of prefill in front of a request sent now, less what the first in line has had."""
        self._run_out(now)
        head = self._head
        if head is None:
            return 0.0
        return max(0.0, self._queued_s - min(now - self._head_start, head.prefill_s))

    def recent(self, now: float) -> tuple[float, float]:
        """Prefill seconds and prefills done per second: a 30 s average, divided by its warm-up.

        The first is the worker's utilisation by prefill. Counted when the prefill is through, not at
        dispatch: a burst is no utilisation yet, and what fails never was. The warm-up is
        1 - exp(-t / 30 s), t since the first dispatch.
        """
        self._run_out(now)
        decay = exp((self._origin - now) / WINDOW_S)
        share = WINDOW_S if self._is_warm else max(_LEAST_SHARE, WINDOW_S - WINDOW_S * decay)
        return self._recent_s * (decay / share), self._recent_requests * (decay / share)

    def _through(self, reservation: Reservation, now: float, counts: bool = True) -> None:
        """Out of the queue: its prefill is done, or (`counts` is False) never will be."""
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
        if not counts:
            return
        age_s = now - self._origin
        if age_s > _WARM_S:
            decay = exp(-age_s / WINDOW_S)
            self._recent_s *= decay
            self._recent_requests *= decay
            self._origin, self._is_warm, age_s = now, True, 0.0
        weight = exp(age_s / WINDOW_S)
        self._recent_s += prefill_s * weight
        self._recent_requests += weight

    def _run_out(self, now: float) -> None:
        """Take off the front what is not streamed and has had its estimated time."""
        while (end := self._head_end) <= now and self._head is not None:
            self._through(self._head, end)


class Releasable(Protocol):
    """Something that a request holds until it is over."""

    def release(self) -> None: ...


class Followers(Protocol):
    """What goes the same way as a reservation."""

    def first_token(self, now: float, is_first: bool) -> None: ...

    def finish(self, now: float) -> None: ...


class Reservation(Struct, eq=False):
    """One dispatched request's share of its worker's load, made by `WorkerLoad.reserve` or given to `enter`.
    Mutable: by its own methods and its load; whoever made it may give it what ends with it."""

    _load: WorkerLoad
    _start: float
    prefill_s: float
    """In whole multiples of 2**-30 s, once its load has it."""
    tokens: int
    streamed: bool
    is_queued: bool = True
    is_finished: bool = False
    lease: Releasable | None = None
    followers: Followers | None = None

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
        if load._head_end <= now:
            load._run_out(now)
        load.in_flight -= 1
        load.active_tokens -= self.tokens
        if self.is_queued and self.streamed:  # without a first token it was no prefill and no residence
            load._through(self, now, False)
        else:
            if self.is_queued:
                load._through(self, now)
            stay = now - self._start
            before = load.residence_s
            load.residence_s = stay if before is None else before + RESIDENCE_WEIGHT * (stay - before)
        lease, followers = self.lease, self.followers
        if lease is not None:
            lease.release()
        if followers is not None:
            followers.finish(now)


def survey(loads: Iterable[WorkerLoad], now: float) -> tuple[float, float]:
    """Of many loads at once: leaves `wait_s` and `utilisation` in each; returns the sums of both of
    `recent`'s figures.

    The same to the last bit as asking each load, which is the plain form. Every request asks all workers of
    its model, and two calls and a pair a worker would be most of what ranking costs.
    """
    seconds = requests = 0.0
    for load in loads:
        if load._head_end <= now:
            load._run_out(now)
        head = load._head
        if head is None:
            load.wait_s = 0.0
        else:
            had_s = now - load._head_start
            if had_s > head.prefill_s:
                had_s = head.prefill_s
            load.wait_s = load._queued_s - had_s  # at least zero: the head is queued itself
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
