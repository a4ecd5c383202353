"""The queue of requests that wait for a worker: priority classes, ageing, and fairness between keys.

Pure: no event loop and no clock. `admission/request_queue.py` connects it to requests, workers and timers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from math import floor
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Struct
from pydantic import PositiveInt

from kvroute.fleet.worker import WorkerId
from kvroute.options import Options, Switch, option


class AdmissionOptions(Options):
    """Limits of each worker's concurrent requests, and the queue of the requests above the limits."""

    max_concurrent: int = option(
        0,
        "Requests that a worker gets at the same time; further ones wait in the gateway. A good value is "
        "vLLM's `--max-num-seqs`, or less. 0: no limit.",
        unit="requests",
        higher="larger batches in the workers; the order of requests is vLLM's",
        lower="earlier first tokens; more requests wait where priority and fairness count",
        ge=0,
    )
    max_concurrent_by_model: dict[str, PositiveInt] = option(
        description="The same for the workers of one model, by the model's name on the workers.",
        default_factory=dict,
    )
    max_concurrent_by_worker: dict[str, PositiveInt] = option(
        description="The same for single workers, by their ids. It counts before the model's limit.",
        default_factory=dict,
    )
    learn: Annotated[bool, Switch] = option(
        False,
        "Give workers without another limit the one that their metrics show: the number of running requests "
        "that stays equal in three readings (`fleet.health.metrics_interval_s`) while other requests wait in "
        "the worker. Until then such a worker has no limit.",
        higher="on: vLLM's `--max-num-seqs` need not be known",
    )
    max_waiting: int = option(
        512,
        "Requests that wait in each gateway process. When the queue is full, requests are answered 429.",
        unit="requests",
        higher="longer bursts are absorbed",
        lower="clients get 429 earlier",
        ge=1,
        le=100_000,
    )
    max_wait_s: float = option(
        30.0,
        "Longest time that a request waits; then it is answered 429. A request whose expected wait is longer "
        "than 80% of this is answered 429 when it arrives.",
        unit="s",
        higher="longer bursts are absorbed",
        lower="clients get 429 earlier, and can use another gateway",
        gt=0,
    )
    ageing_s: float = option(
        10.0,
        "Time after which a waiting request moves up by one priority class, but not above the highest class "
        "that waits. 0: no ageing.",
        unit="s",
        higher="high classes are served first for longer",
        lower="low classes wait less",
        ge=0,
    )
    output_token_weight: float = option(
        2.0,
        "Cost of a generated token compared with a prompt token, for fairness between keys.",
        higher="keys with long answers are served less often",
        lower="keys with long prompts are served less often",
        gt=0,
    )

    @property
    def is_on(self) -> bool:
        """Whether any worker may have a limit. If not, no request waits."""
        limits = (*self.max_concurrent_by_model.values(), *self.max_concurrent_by_worker.values())
        return bool(self.max_concurrent or self.learn or any(limits))


class Target(NamedTuple):
    """The workers that can serve a request: those of a model, or only the owner of a stored response."""

    model: str
    owner: WorkerId | None = None


class QueueEntry(Struct, eq=False):
    """One waiting request. `priority` is as in vLLM: a lower value is served earlier.

    `key` is the name of the client's key, "" without one. Mutable: the queue sets `lane`.
    """

    target: Target
    key: str
    weight: float
    priority: int
    entered: float
    """`Clock.now()` at the arrival."""
    deadline: float
    session: str | None = None
    lane: Lane | None = None
    """Where the entry waits; None before and after."""


_LaneKey: TypeAlias = tuple[int, str, Target]


class Lane(Struct, eq=False):
    """The waiting requests of one key, class and target, first come first served. Mutable, by the queue."""

    place: _LaneKey
    entries: dict[QueueEntry, None]

    @property
    def head(self) -> QueueEntry:
        return next(iter(self.entries))


class _Account(Struct, eq=False):
    """The tokens of one key. Mutable, by `TokenAccounts`."""

    weight: float
    counter: float
    output_tokens: float = 0.0
    """Average length of the key's answers."""
    unfinished: int = 0


_MAX_ACCOUNTS = 4096
_OUTPUT_SHARE = 0.05
"""Weight of one answer in the average length of answers."""


class TokenAccounts:
    """The virtual token counter of each key (VTC; Sheng et al., "Fairness in Serving Large Language Models",
    OSDI 2024).

    A request adds (input tokens + w * output tokens) / weight to the counter of its key. A key that begins to
    wait is lifted: c := max(c, min of the counters of waiting keys), or, if no key waits, max(c, counter of
    the key served last). So a key cannot save up service while it is idle. The key with the lowest counter is
    served first. Mutable: at most 4096 counters are kept.
    """

    # The paper adds output tokens while they are generated. The gateway does not parse streams, so it adds
    # the key's average at the start and corrects it at the end (the paper's variant with length prediction).

    def __init__(self, output_weight: float) -> None:
        self._output_weight = output_weight
        self._accounts: dict[str, _Account] = {}
        self._last_counter = 0.0

    def set_output_weight(self, weight: float) -> None:
        """Use another weight of output tokens from now on."""
        self._output_weight = weight

    def counter(self, key: str) -> float:
        account = self._accounts.get(key)
        return self._last_counter if account is None else account.counter

    def lift(self, key: str, weight: float, waiting: Collection[str]) -> None:
        """A request of `key` has arrived while the keys `waiting` wait, and `key` does not."""
        account = self._account(key, weight)
        account.weight = weight
        least = min(map(self.counter, waiting)) if waiting else self._last_counter
        if account.counter < least:
            account.counter = least

    def started(self, key: str, input_tokens: int) -> float:
        """Charge a request that is sent to a worker. Returns the output tokens that were assumed."""
        account = self._account(key, 1.0)
        account.unfinished += 1
        assumed = account.output_tokens
        self._last_counter = account.counter
        account.counter += (input_tokens + self._output_weight * assumed) / account.weight
        return assumed

    def finished(self, key: str, assumed: float, output_tokens: int) -> None:
        """Correct the charge of a request by its real number of output tokens."""
        account = self._account(key, 1.0)
        account.unfinished = max(0, account.unfinished - 1)
        account.counter += self._output_weight * (output_tokens - assumed) / account.weight
        before = account.output_tokens
        account.output_tokens = before + _OUTPUT_SHARE * (output_tokens - before) if before else output_tokens

    def _account(self, key: str, weight: float) -> _Account:
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= _MAX_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[key] = _Account(weight, self._last_counter)
        return account

    def _forget_idle(self) -> None:
        # An idle key whose counter is not above the last one would be lifted to it anyway.
        idle = sorted(
            (account.counter, key) for key, account in self._accounts.items() if not account.unfinished
        )
        for _, key in idle[: _MAX_ACCOUNTS // 2]:
            del self._accounts[key]


CERTAIN_SHARE = 0.8
"""Share of the longest wait above which an expected wait is refused. The expectation is not exact, and a
client should get its 429 at the arrival, not after the wait."""
_LEAST_STARTS = 8
"""Starts from the queue after which their rate is known well enough to refuse requests by it."""
_START_SHARE = 1 / 16


class StartRate:
    """The average time between two starts from the queue while requests wait. Mutable."""

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._starts = 0
        self._last: float | None = None

    def started(self, now: float) -> None:
        if self._last is not None:
            self._starts += 1
            share = max(_START_SHARE, 1 / self._starts)
            self._interval_s += share * (now - self._last - self._interval_s)
        self._last = now

    def queue_is_empty(self) -> None:
        """Time without waiting requests says nothing about the rate."""
        self._last = None

    @property
    def interval_s(self) -> float:
        """Seconds; 0 while it is unknown."""
        return self._interval_s if self._starts >= _LEAST_STARTS else 0.0


class Outcome(StrEnum):
    """What happens to a request that arrives, or to one that waits. The refusals are values of a metric
    label."""

    START = "start"
    WAIT = "wait"
    EXPECTED_WAIT = "expected_wait"
    """Refused: it would wait for longer than it may."""
    FULL = "full"
    """Refused: the queue is full."""
    DISPLACED = "displaced"
    """Refused: the queue is full, and a preferred request has arrived."""
    DEADLINE = "deadline"
    """Refused: it has waited for too long."""


class FairQueue:
    """Chooses the next waiting request by priority class, then by the virtual tokens of its key.

    A waiting request moves up one class after each `ageing_s`, but not above the highest class that waits, so
    that ageing never overrides fairness inside that class. Requests of one session keep their order, also if
    their classes differ. Mutable: `push`, `pop` and `remove`. A `pop` costs O(lanes): about 0.5 us for each
    key, class and target that waits.
    """

    def __init__(self, accounts: TokenAccounts, *, ageing_s: float, max_waiting: int) -> None:
        self.accounts = accounts
        self._ageing_s = ageing_s
        self._max_waiting = max_waiting
        self._lanes: dict[_LaneKey, Lane] = {}
        self._order: dict[QueueEntry, None] = {}
        """All entries in order of arrival, which is also the order of their deadlines."""
        self._of_key: dict[str, int] = {}
        self._sessions: dict[tuple[str, str], list[QueueEntry]] = {}
        self._rate = StartRate()

    def configure(self, options: AdmissionOptions) -> None:
        """Change the limits. Waiting requests get the new deadline; none is refused for the new size."""
        self.accounts.set_output_weight(options.output_token_weight)
        self._ageing_s = options.ageing_s
        self._max_waiting = options.max_waiting
        for entry in self._order:  # all, so that the deadlines keep the order of the arrivals
            entry.deadline = entry.entered + options.max_wait_s

    def __len__(self) -> int:
        return len(self._order)

    def waiting(self, key: str) -> int:
        """Number of waiting requests of a key."""
        return self._of_key.get(key, 0)

    def offer(
        self, entry: QueueEntry, can_start: Callable[[Target], bool]
    ) -> tuple[Outcome, QueueEntry | None]:
        """What happens to a request that arrives now: START, WAIT, EXPECTED_WAIT or FULL.

        With WAIT the caller first refuses the second value, if any, as DISPLACED, and then calls `push`.
        """
        if entry.key not in self._of_key:
            self.accounts.lift(entry.key, entry.weight, self._of_key)
        if not self._order and can_start(entry.target):
            return Outcome.START, None
        if self.expected_wait_s(entry) > CERTAIN_SHARE * (entry.deadline - entry.entered):
            return Outcome.EXPECTED_WAIT, None
        victim = self.victim(entry)
        return (Outcome.FULL, None) if victim is entry else (Outcome.WAIT, victim)

    def push(self, entry: QueueEntry) -> None:
        """Add a request for which `offer` has returned WAIT."""
        place = (entry.priority, entry.key, entry.target)
        if entry.session is not None:
            followed = self._sessions.setdefault((entry.key, entry.session), [])
            if followed and followed[-1].lane is not None:
                place = followed[-1].lane.place
            followed.append(entry)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = Lane(place, {})
        entry.lane = lane
        lane.entries[entry] = None
        self._order[entry] = None
        self._of_key[entry.key] = self.waiting(entry.key) + 1

    def pop(self, can_start: Callable[[Target], bool], now: float) -> QueueEntry | None:
        """Remove and return the next request whose target `can_start`; None if there is none."""
        best: tuple[object, ...] | None = None
        chosen: QueueEntry | None = None
        top = min((place[0] for place in self._lanes), default=0)
        known: dict[Target, bool] = {}
        for lane in self._lanes.values():
            head = lane.head
            target = head.target
            if target not in known:
                known[target] = can_start(target)
            if not known[target]:
                continue
            key = head.key
            # Between equal counters the key with fewer waiting requests is first: it has arrived later.
            rank = (
                max(top, self._aged(lane.place[0], head, now)),
                self.accounts.counter(key),
                self._of_key[key] / head.weight,
                head.entered,
            )
            if best is None or rank < best:
                best, chosen = rank, head
        if chosen is not None:
            self._rate.started(now)
            self.remove(chosen)
        return chosen

    def remove(self, entry: QueueEntry) -> bool:
        """Remove a request that started or does not wait any longer; False if it does not wait."""
        lane = entry.lane
        if lane is None:
            return False
        entry.lane = None
        del lane.entries[entry]
        if not lane.entries:
            del self._lanes[lane.place]
        del self._order[entry]
        left = self._of_key[entry.key] - 1
        if left:
            self._of_key[entry.key] = left
        else:
            del self._of_key[entry.key]
        if entry.session is not None:
            place = (entry.key, entry.session)
            followed = self._sessions[place]
            followed.remove(entry)
            if not followed:
                del self._sessions[place]
        if not self._order:
            self._rate.queue_is_empty()
        return True

    def expired(self, now: float) -> list[QueueEntry]:
        """Remove and return the requests whose deadline has passed."""
        expired = []
        while self._order and (oldest := next(iter(self._order))).deadline <= now:
            self.remove(oldest)
            expired.append(oldest)
        return expired

    @property
    def next_deadline(self) -> float | None:
        """The deadline of the oldest entry; None for an empty queue."""
        return next(iter(self._order)).deadline if self._order else None

    def expected_wait_s(self, entry: QueueEntry) -> float:
        """The wait of a request that arrives now, from the rate of the last starts; 0 if it is unknown.

        Before it start all requests of higher classes, and of its own class as many as fairness allows while
        those of its key start. Costs O(lanes).
        """
        interval_s = self._rate.interval_s
        if not interval_s:
            return 0.0
        ahead = same = own = 0
        weights = {entry.key: entry.weight}
        for (priority, key, _), lane in self._lanes.items():
            if priority < entry.priority:
                ahead += len(lane.entries)
            elif priority == entry.priority:
                same += len(lane.entries)
                weights[key] = lane.head.weight
                own += len(lane.entries) if key == entry.key else 0
        fair = own * sum(weights.values()) / entry.weight
        return (ahead + min(float(same), fair) + 1) * interval_s

    def victim(self, entry: QueueEntry) -> QueueEntry | None:
        """The request that must leave so that `entry` can wait; `entry` itself, or None if there is room.

        A full queue drops the newest request of the lowest class, and in this class of the key with the
        most waiting requests for its weight.
        """
        if len(self._order) < self._max_waiting:
            return None
        worst = max(
            self._lanes.values(),
            key=lambda lane: (lane.place[0], self._of_key[lane.place[1]] / lane.head.weight),
        )
        priority, key, _ = worst.place
        if priority < entry.priority:
            return entry
        if priority == entry.priority:
            mine = (self.waiting(entry.key) + 1) / entry.weight
            if key == entry.key or mine >= self._of_key[key] / worst.head.weight:
                return entry
        return next(reversed(worst.entries))

    def _aged(self, priority: int, head: QueueEntry, now: float) -> int:
        if not self._ageing_s:
            return priority
        return priority - floor((now - head.entered) / self._ageing_s)
