"""Who is healthy: probes of our own, and what answers to clients tell."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.options import HealthOptions
from kvroute.fleet.probe import ProbeFailure, Prober
from kvroute.fleet.worker import Ejection, HealthState, MetricsPage, ModelsPage, Worker, WorkerId


class BurstWindow:
    """A worker's latest answers. Mutable: the window moves with each answer.

    A burst is `failures` failures among the last 2 x `failures` answers, none older than `window_s`:
    five in a row are one, as is half of what a busy worker says, while a rare error never is. Good answers
    before the first failure tell nothing and are not kept.
    """

    def __init__(self, failures: int, window_s: float) -> None:
        self._failures = failures
        self._window_s = window_s
        self._answers: deque[tuple[float, bool]] = deque(maxlen=2 * failures)

    def add(self, now: float, failed: bool) -> bool:
        """Count one answer; True if it completes a burst. A good answer costs O(1)."""
        answers = self._answers
        if not failed:
            if answers:
                answers.append((now, False))
                if not any(bad for _, bad in answers):
                    answers.clear()
            return False
        answers.append((now, True))
        oldest = now - self._window_s
        return sum(bad for at, bad in answers if at >= oldest) >= self._failures

    @property
    def is_clean(self) -> bool:
        """No failure is in it, so that another good answer changes nothing."""
        return not self._answers

    def clear(self) -> None:
        """Forget all of it: a new life begins."""
        self._answers.clear()


class Backoff:
    """How long each burst keeps a worker out: `base_s`, doubled each time, at most `max_s`.

    Mutable: the step rises with each burst; it starts anew after `max_s` without one.
    """

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._step = 0
        self._calm_from = 0.0

    def next_s(self, now: float) -> float:
        """Seconds to stay out for a burst at `now`."""
        if now > self._calm_from + self._max_s:
            self._step = 0
        # The exponent is capped only to keep the power finite.
        pause = min(self._max_s, self._base_s * 2.0 ** min(self._step, 60))
        self._step += 1
        self._calm_from = now + pause
        return pause


log = logging.getLogger(__name__)

_NOT_IMPLEMENTED = 501  # says something about the request, not about the worker
_RECHECK_GROWTH = 1.5


@dataclass(slots=True, eq=False)
class _Watch:
    """What the monitor remembers of one worker. Mutable: by its own probe task and by reports."""

    worker: Worker
    answers: BurstWindow
    backoff: Backoff
    due: float
    """When to probe next."""
    recheck_s: float
    """Next pause while the worker is not healthy."""
    failures: int = 0
    """Failed probes since the last passed one."""
    models_due: float = -math.inf
    metrics_due: float = -math.inf
    had_metrics: bool = False
    was_refused: bool = False
    """Since the last passed probe: perhaps its process is a new one."""
    was_healthy: bool = False
    """It has served once: only then is its return a return."""
    epoch: int = 0
    """Rises with each ejection, so that a probe begun before it cannot undo it."""
    models_trouble: str = ""
    task: asyncio.Task[None] | None = None
    pause: asyncio.Task[None] | None = None


@dataclass(slots=True)
class HealthCounts:
    """Totals since the start, for metrics. Mutable: the monitor counts; workers that left are dropped."""

    ejections: Counter[tuple[WorkerId, Ejection]] = field(default_factory=Counter)
    probe_failures: Counter[WorkerId] = field(default_factory=Counter)
    held_back: int = 0
    """Ejections that `max_ejected_share` prevented."""

    def forget(self, worker: WorkerId) -> None:
        """Drop the figures of a worker that left."""
        self.probe_failures.pop(worker, None)
        for cause in Ejection:
            self.ejections.pop((worker, cause), None)


class HealthMonitor:
    """Keeps the states and facts of `fleet`'s workers true.

    One task per worker probes it for as long as it is in the fleet; all of them belong to `run`.
    `report_*` are what the relay calls after each attempt: synchronous, cheap, and harmless for a
    worker that has left. `rng` makes the pauses vary (tests seed it).
    """

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        clock: Clock,
        options: HealthOptions,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self.counts = HealthCounts()
        self._fleet = fleet
        self._prober = prober
        self._clock = clock
        self._options = options
        self._rng = rng or random.Random()
        self._group: asyncio.TaskGroup | None = None
        self._watches: dict[WorkerId, _Watch] = {}
        self._suspects: set[WorkerId] = set()
        """Whose last answers have a failure among them, all of them and perhaps more."""
        for worker in fleet.workers():
            self._joined(worker)
        fleet.subscribe(self._on_change)

    async def run(self) -> None:
        """Probe until cancelled. Call once."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for watch in self._watches.values():
                    self._start(watch)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    # What answers to clients tell

    def report_status(self, worker: Worker, status: int) -> None:
        """It answered a client's request. Only 5xx speak against it, and only in bursts."""
        if status < 500 and not self._suspects:
            return
        watch = self._watch_of(worker)
        if watch is None:
            return
        if status < 500 or status == _NOT_IMPLEMENTED:
            watch.answers.add(self._clock.now(), False)  # which completes no burst
            if watch.answers.is_clean:
                self._suspects.discard(worker.id)
        else:
            self._count_failure(watch, f"a burst of failures, the last one HTTP {status}")

    def report_refused(self, worker: Worker) -> None:
        """It refused a connection: out at once, back with the next passed probe."""
        watch = self._watch_of(worker)
        if watch is not None:
            watch.was_refused = True
            self._eject(watch, Ejection.REFUSED, "connection refused")

    def report_failure(self, worker: Worker, kind: str) -> None:
        """An attempt brought no complete answer; `kind` is `UpstreamError.cause`.

        Only "refused" and "connect_timeout" eject at once; the others count like a 5xx answer and have
        the worker probed now, because it may have died.
        """
        if kind == "refused":
            self.report_refused(worker)
            return
        watch = self._watch_of(worker)
        if watch is None:
            return
        trouble = kind.replace("_", " ")
        if kind == "connect_timeout" and self._may_lose(worker):
            self._eject(watch, Ejection.CONNECT_TIMEOUT, trouble)
        else:
            self._count_failure(watch, f"a burst of failures, the last one: {trouble}")
        if self._fleet.health(worker) is HealthState.HEALTHY:
            watch.metrics_due = -math.inf
            watch.due = min(watch.due, self._clock.now() + self._options.recheck_s)
            self._wake(watch)

    def _count_failure(self, watch: _Watch, trouble: str) -> None:
        now = self._clock.now()
        self._suspects.add(watch.worker.id)
        if not watch.answers.add(now, True) or self._fleet.health(watch.worker) is not HealthState.HEALTHY:
            return
        watch.answers.clear()
        if not self._may_lose(watch.worker):
            self.counts.held_back += 1
            log.warning(
                "worker %s stays in routing despite %s: too few others are left", watch.worker.id, trouble
            )
            return
        self._eject(watch, Ejection.BURST, trouble, not_before=now + self._vary(watch.backoff.next_s(now)))

    def _may_lose(self, worker: Worker) -> bool:
        """Whether the fleet can do without `worker` as far as `max_ejected_share` goes."""
        peers = [w for w in self._fleet.workers() if w is worker or w.models & worker.models]
        out = sum(not w.is_routable for w in peers if w is not worker)
        return out + 1 <= self._options.max_ejected_share * len(peers)

    # Probing

    async def _keep(self, watch: _Watch) -> None:
        while True:
            wait = watch.due - self._clock.now()
            if wait > 0:
                await self._rest(watch, wait)
                continue
            started, epoch = self._clock.now(), watch.epoch
            try:
                failure = await self._probe(watch)
            except Exception as error:  # one bad answer must not end the watch of all workers
                log.exception("probing worker %s failed", watch.worker.id)
                failure = ProbeFailure(f"internal error: {type(error).__name__}")
            if watch.epoch != epoch:
                continue  # ejected meanwhile, which also set the next probe's time
            if failure is None:
                self._passed(watch)
            else:
                self._failed(watch, failure)
            if watch.epoch == epoch:
                watch.due = started + self._vary(self._pause_s(watch))

    async def _probe(self, watch: _Watch) -> ProbeFailure | None:
        """Ask for health, then for the facts that are due: they are known before the first request."""
        failure = await self._prober.health(watch.worker.spec.url)
        if failure is not None:
            return failure
        models, metrics = await asyncio.gather(self._read_models(watch), self._read_metrics(watch))
        worker = watch.worker
        facts, restarted = worker.facts, False
        if models is not None:
            facts = replace(facts, models=models.models, adapters=models.adapters, model_cards=models.cards)
        if metrics is not None:
            told = (facts.start_time, metrics.start_time)
            restarted = watch.had_metrics and (told[0] != told[1] or (told[0] is None and watch.was_refused))
            watch.had_metrics = True
            facts = replace(
                facts,
                capacity_tokens=metrics.capacity_tokens,
                block_size=metrics.block_size,
                start_time=metrics.start_time,
            )
        elif watch.was_refused and watch.was_healthy:
            restarted = True  # nobody can tell: an empty cache is the safe belief
        if restarted and models is None:
            watch.models_due = -math.inf
        if restarted or facts is not worker.facts:
            self._fleet.update_facts(worker, facts, restarted=restarted)
        return None

    async def _read_models(self, watch: _Watch) -> ModelsPage | None:
        if self._clock.now() < watch.models_due:
            return None
        answer = await self._prober.models(watch.worker.spec.url)
        trouble = answer.detail if isinstance(answer, ProbeFailure) else ""
        if trouble != watch.models_trouble:
            watch.models_trouble = trouble
            if trouble:
                log.warning("worker %s does not tell its models: %s", watch.worker.id, trouble)
        if isinstance(answer, ProbeFailure):
            return None  # still due: asked again by the next probe
        watch.models_due = self._clock.now() + self._vary(self._options.models_interval_s)
        return answer

    async def _read_metrics(self, watch: _Watch) -> MetricsPage | None:
        if self._clock.now() < watch.metrics_due:
            return None
        answer = await self._prober.metrics(watch.worker.spec.url)
        watch.metrics_due = self._clock.now() + self._vary(self._options.metrics_interval_s)
        return None if isinstance(answer, ProbeFailure) else answer

    def _passed(self, watch: _Watch) -> None:
        worker, now = watch.worker, self._clock.now()
        watch.failures, watch.was_refused = 0, False
        if self._fleet.health(worker) is HealthState.HEALTHY:
            self._fleet.refresh_ramp(worker, now)
            return
        options = self._options
        ramp_s = options.ramp_s if watch.was_healthy else 0.0
        watch.was_healthy = True
        watch.recheck_s = options.recheck_s
        watch.answers.clear()
        self._fleet.mark_healthy(worker, now, ramp_start=options.ramp_start, ramp_s=ramp_s)

    def _failed(self, watch: _Watch, failure: ProbeFailure) -> None:
        watch.failures += 1
        watch.was_refused |= failure.refused
        self.counts.probe_failures[watch.worker.id] += 1
        if failure.refused:
            self._eject(watch, Ejection.REFUSED, failure.detail)
        elif watch.failures >= self._options.failures_to_eject:
            self._eject(watch, Ejection.PROBES, failure.detail)

    def _pause_s(self, watch: _Watch) -> float:
        """Until the next probe; while the worker is not healthy it grows with each call."""
        interval_s = self._options.interval_s
        if self._fleet.health(watch.worker) is HealthState.HEALTHY:
            return interval_s
        pause = min(watch.recheck_s, interval_s)
        watch.recheck_s = min(watch.recheck_s * _RECHECK_GROWTH, interval_s)
        return pause

    def _eject(self, watch: _Watch, cause: Ejection, trouble: str, *, not_before: float = -math.inf) -> None:
        health = self._fleet.health(watch.worker)
        if health is HealthState.UNHEALTHY:
            return
        watch.epoch += 1
        watch.answers.clear()
        watch.models_due = watch.metrics_due = -math.inf
        watch.recheck_s = self._options.recheck_s
        watch.due = max(self._clock.now() + self._vary(self._options.recheck_s), not_before)
        if health is HealthState.HEALTHY:
            self.counts.ejections[watch.worker.id, cause] += 1
        self._fleet.mark_unhealthy(watch.worker, cause, trouble)
        self._wake(watch)

    # Tasks

    def _on_change(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.JOINED:
            self._joined(worker)
        elif change is FleetChange.LEFT:
            watch = self._watches.pop(worker.id)
            self._suspects.discard(worker.id)
            self.counts.forget(worker.id)
            if watch.task is not None:
                watch.task.cancel()

    def _joined(self, worker: Worker) -> None:
        options = self._options
        watch = self._watches[worker.id] = _Watch(
            worker,
            BurstWindow(options.burst_failures, options.burst_window_s),
            Backoff(options.backoff_s, options.backoff_max_s),
            due=self._clock.now(),
            recheck_s=options.recheck_s,
        )
        if self._group is not None:
            self._start(watch)

    def _start(self, watch: _Watch) -> None:
        assert self._group is not None
        watch.task = self._group.create_task(self._keep(watch), name=f"probe {watch.worker.id}")

    async def _rest(self, watch: _Watch, seconds: float) -> None:
        """Sleep, or less if woken."""
        watch.pause = asyncio.create_task(self._clock.sleep(seconds))
        try:
            # Cancelled from inside, the pause ends; cancelled from outside, gather cancels and awaits it.
            await asyncio.gather(watch.pause, return_exceptions=True)
        finally:
            watch.pause = None

    def _wake(self, watch: _Watch) -> None:
        if watch.pause is not None:
            watch.pause.cancel()

    def _watch_of(self, worker: Worker) -> _Watch | None:
        watch = self._watches.get(worker.id)
        return watch if watch is not None and watch.worker is worker else None

    def _vary(self, seconds: float) -> float:
        jitter = self._options.jitter
        return seconds * self._rng.uniform(1.0 - jitter, 1.0 + jitter) if jitter else seconds
