"""Decides which workers are healthy, from probes and from the answers to clients' requests."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.foreign import PAGES, EngineFigures, OwnRequests, SeenPage, foreign_load, others_of
from kvroute.fleet.options import HealthOptions
from kvroute.fleet.probe import ProbeFailure, Prober
from kvroute.fleet.sleep import IS_PAUSED, IS_SLEEPING, PAUSED, EngineState, why_asleep
from kvroute.fleet.worker import (
    LONGEST_NAME,
    MOST_MODELS,
    Ejection,
    HealthState,
    LearnedConcurrency,
    MetricsPage,
    ModelsPage,
    Worker,
    WorkerId,
)


class BurstWindow:
    """Detects a burst of failures among a worker's latest answers. Mutable: each answer moves the window.

    A burst is `failures` failures among the last 2 x `failures` answers, none older than `window_s`. So a
    worker that fails five times in a row, or half of the time, has a burst; a rare error is none.
    """

    # Good answers before the first failure do not change the result and are not kept.

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
        """Whether the window has no failure, so that another good answer changes nothing."""
        return not self._answers

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()


class Backoff:
    """How long each burst keeps a worker out of routing: `base_s`, doubled each time, at most `max_s`.

    Mutable: the step rises with each burst and returns to zero after `max_s` without one.
    """

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max_s
        self._step = 0
        self._calm_from = 0.0

    def next_s(self, now: float) -> float:
        """Seconds to stay out of routing after a burst at `now`."""
        if now > self._calm_from + self._max_s:
            self._step = 0
        # The exponent is capped only to keep the power finite.
        pause = min(self._max_s, self._base_s * 2.0 ** min(self._step, 60))
        self._step += 1
        self._calm_from = now + pause
        return pause


log = logging.getLogger(__name__)

_NOT_IMPLEMENTED = 501  # caused by the request, not by the worker
_RECHECK_GROWTH = 1.5
_NO_REQUESTS = OwnRequests(0, 0, 0)


@dataclass(slots=True, eq=False)
class _WorkerProbes:
    """The monitor's state of one worker. Mutable: its probe task and the `report_*` calls change it."""

    worker: Worker
    answers: BurstWindow
    backoff: Backoff
    due: float
    """Time of the next probe."""
    recheck_s: float
    """Next pause between probes while the worker is not healthy."""
    failures: int = 0
    """Failed probes since the last passed one."""
    models_due: float = -math.inf
    metrics_due: float = -math.inf
    pages: deque[SeenPage] = field(default_factory=lambda: deque(maxlen=PAGES))
    """The engine's last figures, and what they show beyond the own requests."""
    peaks: OwnRequests = _NO_REQUESTS
    """The most own requests between the last two probes."""
    ask_from: dict[str, float] = field(default_factory=dict)
    """Path that the worker does not have -> when it is asked again."""
    told: int = 0
    """Rises when the admin API changes the engine's state, so that earlier answers cannot undo it."""
    left_out: int = 0
    """Models of its last list that do not count."""
    had_metrics: bool = False
    was_refused: bool = False
    """Whether a connection was refused since the last passed probe: the process may have been restarted."""
    was_healthy: bool = False
    """Whether the worker was healthy before; only then does it ramp when it becomes healthy again."""
    epoch: int = 0
    """Rises with each ejection, so that a probe started before the ejection cannot undo it."""
    task: asyncio.Task[None] | None = None
    pause: asyncio.Task[None] | None = None


@dataclass(slots=True)
class HealthCounts:
    """Totals since the start, for metrics. Mutable: the monitor counts, and drops workers that leave."""

    ejections: Counter[tuple[WorkerId, Ejection]] = field(default_factory=Counter)
    probe_failures: Counter[WorkerId] = field(default_factory=Counter)
    held_back: int = 0
    """Ejections that `max_ejected_share` prevented."""

    def forget(self, worker: WorkerId) -> None:
        """Drop the figures of a worker that has left."""
        self.probe_failures.pop(worker, None)
        for cause in Ejection:
            self.ejections.pop((worker, cause), None)


class HealthMonitor:
    """Keeps the states and facts of `fleet`'s workers up to date.

    `run` owns one probe task per worker of the fleet. The gateway calls a `report_*` method after each
    attempt: they are synchronous, cheap, and do nothing for a worker that has left. With `isolates`, a worker
    whose release may ignore `cache_salt` gets no requests. `rng` varies the pauses.
    """

    def __init__(
        self,
        fleet: Fleet,
        prober: Prober,
        clock: Clock,
        options: HealthOptions,
        *,
        isolates: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self.counts = HealthCounts()
        self._fleet = fleet
        self._prober = prober
        self._clock = clock
        self._options = options
        self._isolates = isolates
        self._rng = rng or random.Random()
        self._group: asyncio.TaskGroup | None = None
        self._probes: dict[WorkerId, _WorkerProbes] = {}
        self.suspects: set[WorkerId] = set()
        """Every worker with a failure in its window; may also contain workers without one. Callers only read
        it: while it is empty, they need not report a status below 500."""
        for worker in fleet.workers():
            self._joined(worker)
        fleet.subscribe(self._on_change)

    def configure(self, options: HealthOptions) -> None:
        """Change the options. The states of workers stay; bursts and back-offs start again."""
        self._options = options
        self._prober.configure(timeout_s=options.timeout_s, path=options.path)
        for probes in self._probes.values():
            probes.answers = BurstWindow(options.burst_failures, options.burst_window_s)
            probes.backoff = Backoff(options.backoff_s, options.backoff_max_s)
            probes.recheck_s = options.recheck_s
        self.suspects.clear()

    async def run(self) -> None:
        """Probe until cancelled. Call once."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for probes in self._probes.values():
                    self._start_task(probes)
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None

    # Reports about clients' requests

    def report_status(self, worker: Worker, status: int) -> None:
        """Record the HTTP status of an answer to a client. Only bursts of 5xx eject the worker."""
        if status < 500 and not self.suspects:
            return
        probes = self._probes_of(worker)
        if probes is None:
            return
        if status < 500 or status == _NOT_IMPLEMENTED:
            probes.answers.add(self._clock.now(), False)  # a good answer completes no burst
            if probes.answers.is_clean:
                self.suspects.discard(worker.id)
        else:
            self._count_failure(probes, f"a burst of failures, the last one HTTP {status}")

    def report_refused(self, worker: Worker) -> None:
        """Eject a worker that refused a connection; the next passed probe brings it back."""
        probes = self._probes_of(worker)
        if probes is not None:
            probes.was_refused = True
            self._eject(probes, Ejection.REFUSED, "connection refused")

    def report_failure(self, worker: Worker, kind: str) -> None:
        """Record an attempt without a complete answer; `kind` is `UpstreamError.cause`.

        "refused" and "connect_timeout" eject the worker immediately. Every other kind counts like a 5xx
        answer, and the worker is probed soon, because its process may have died.
        """
        if kind == "refused":
            self.report_refused(worker)
            return
        probes = self._probes_of(worker)
        if probes is None:
            return
        trouble = kind.replace("_", " ")
        if kind == "connect_timeout" and self._may_eject(worker):
            self._eject(probes, Ejection.CONNECT_TIMEOUT, trouble)
        else:
            self._count_failure(probes, f"a burst of failures, the last one: {trouble}")
        self.recheck(worker)

    def report_asleep(self, workers: Sequence[Worker], reason: str) -> None:
        """These workers get a request that stops their engines; `reason` is that of `sleep.why_asleep`."""
        for probes in filter(None, map(self._probes_of, workers)):
            probes.told += 1
        self._fleet.set_asleep(workers, reason)

    def report_awake(self, worker: Worker) -> None:
        """The worker has refused to sleep or to pause. The next probe tells more."""
        probes = self._probes_of(worker)
        if probes is not None:
            probes.told += 1
            self._fleet.set_asleep((worker,), "")

    def recheck(self, worker: Worker) -> None:
        """Probe a healthy worker soon: there is a hint that it fails."""
        probes = self._probes_of(worker)
        if probes is not None and self._fleet.health(worker) is HealthState.HEALTHY:
            probes.metrics_due = -math.inf
            probes.due = min(probes.due, self._clock.now() + self._options.recheck_s)
            self._wake(probes)

    def _count_failure(self, probes: _WorkerProbes, trouble: str) -> None:
        now = self._clock.now()
        self.suspects.add(probes.worker.id)
        if not probes.answers.add(now, True) or self._fleet.health(probes.worker) is not HealthState.HEALTHY:
            return
        probes.answers.clear()
        if not self._may_eject(probes.worker):
            self.counts.held_back += 1
            log.warning(
                "worker %s stays in routing despite %s: too few other workers are routable",
                probes.worker.id,
                trouble,
            )
            return
        self._eject(
            probes, Ejection.BURST, trouble, not_before=now + self._jittered(probes.backoff.next_s(now))
        )

    def _may_eject(self, worker: Worker) -> bool:
        """Whether `max_ejected_share` permits to eject `worker`, too."""
        peers = [w for w in self._fleet.workers() if w is worker or w.models & worker.models]
        out = sum(not w.is_routable for w in peers if w is not worker)
        return out + 1 <= self._options.max_ejected_share * len(peers)

    # Probing

    async def _probe_loop(self, probes: _WorkerProbes) -> None:
        while True:
            wait = probes.due - self._clock.now()
            if wait > 0:
                await self._sleep(probes, wait)
                continue
            started, epoch = self._clock.now(), probes.epoch
            try:
                failure = await self._probe(probes)
            except Exception as error:  # one bad answer must not end the probes of all workers
                log.exception("probing worker %s failed", probes.worker.id)
                failure = ProbeFailure(f"internal error: {type(error).__name__}")
            if probes.epoch != epoch:
                continue  # ejected during the probe; the ejection has set the time of the next probe
            if failure is None:
                self._on_passed(probes)
            else:
                self._on_failed(probes, failure)
            if probes.epoch == epoch:
                probes.due = started + self._jittered(self._pause_s(probes))

    async def _probe(self, probes: _WorkerProbes) -> ProbeFailure | None:
        """Probe the health, then read the facts that are due. None if the worker is healthy."""
        # The facts are read before the worker becomes routable, so they are known at the first request.
        # An engine's figures are those of its last step: own requests since the probe before count, too.
        probes.peaks = probes.worker.load.take_peaks()
        failure = await self._prober.health(probes.worker.spec.url)
        if failure is not None and (probes.worker.spec.needs_health or not failure.status):
            return failure
        # The release is read with every probe: another one may answer at the same address without a refusal
        # or a failed probe in between.
        told = probes.told
        failure, models, metrics, state = await asyncio.gather(
            self._read_isolation(probes),
            self._read_models(probes),
            self._read_metrics(probes),
            self._read_state(probes),
        )
        worker = probes.worker
        facts, restarted, had_metrics = worker.facts, False, probes.had_metrics
        if models is not None:
            facts = replace(facts, models=models.models, adapters=models.adapters, model_cards=models.cards)
        if metrics is not None:
            previous_start, start = facts.start_time, metrics.start_time
            restarted = probes.had_metrics and (
                previous_start != start or (previous_start is None and probes.was_refused)
            )
            probes.had_metrics = True
            facts = replace(
                facts,
                capacity_tokens=metrics.capacity_tokens,
                block_size=metrics.block_size,
                ranks=metrics.ranks,
                caches_prefixes=metrics.caches_prefixes,
                has_drafter=metrics.has_drafter,
                start_time=metrics.start_time,
                concurrency=(LearnedConcurrency() if restarted else facts.concurrency).after(
                    metrics.running, metrics.waiting or 0
                ),
                fetched=facts.fetched.after(metrics.fetched_tokens),
                sleep=metrics.sleep,
            )
        elif probes.was_refused and probes.was_healthy:
            restarted = True  # unknown; to assume an empty cache is safe
        if restarted:
            probes.ask_from.clear()
            probes.pages.clear()
            if models is None:
                probes.models_due = -math.inf
        slept = worker.facts.sleep
        if restarted or facts is not worker.facts:
            self._fleet.update_facts(worker, facts, restarted=restarted)
        if not restarted and facts.sleep != slept and had_metrics:
            if facts.sleep.is_emptied and not slept.is_emptied:
                self._fleet.report_cleared(worker, "sleeps")
            elif facts.sleep.operations > slept.operations:
                self._fleet.report_stale(worker)
        if told == probes.told:
            last_reason, page = "" if restarted else worker.asleep, None if metrics is None else metrics.sleep
            self._set_asleep(probes, why_asleep(last_reason, state, page))
        return failure

    def _set_asleep(self, probes: _WorkerProbes, reason: str) -> None:
        worker = probes.worker
        if reason and not worker.asleep:
            probes.metrics_due = -math.inf  # the page tells the level, and so what is left of the cache
            if reason == PAUSED:
                self._fleet.report_stale(worker)  # nothing tells whether the pause has cleared the cache
        self._fleet.set_asleep((worker,), reason)

    async def _read_state(self, probes: _WorkerProbes) -> EngineState:
        return EngineState(
            *await asyncio.gather(self._ask(probes, IS_PAUSED), self._ask(probes, IS_SLEEPING))
        )

    async def _ask(self, probes: _WorkerProbes, path: str) -> bool | None:
        now = self._clock.now()
        if now < probes.ask_from.get(path, -math.inf):
            return None
        answer = await self._prober.question(probes.worker.spec.url, path)
        if not isinstance(answer, ProbeFailure):
            return answer
        if 400 <= answer.status < 500:
            probes.ask_from[path] = now + self._jittered(self._options.models_interval_s)
        return None

    async def _read_isolation(self, probes: _WorkerProbes) -> ProbeFailure | None:
        if not self._isolates:
            return None
        return await self._prober.isolation(probes.worker.spec.url, probes.worker.learn_release)

    async def _read_models(self, probes: _WorkerProbes) -> ModelsPage | None:
        if self._clock.now() < probes.models_due:
            return None
        answer = await self._prober.models(probes.worker.spec.url)
        trouble = answer.detail if isinstance(answer, ProbeFailure) else ""
        if trouble != probes.worker.models_trouble:
            probes.worker.models_trouble = trouble
            if trouble:
                log.warning("worker %s does not report its models: %s", probes.worker.id, trouble)
        if isinstance(answer, ProbeFailure):
            return None  # still due: the next probe reads the list again
        probes.models_due = self._clock.now() + self._jittered(self._options.models_interval_s)
        if answer.left_out != probes.left_out:
            probes.left_out = answer.left_out
            if answer.left_out:
                log.warning(
                    "worker %s lists %d models, of which %d do not count: beyond the first %d, or without a "
                    "name of at most %d characters",
                    probes.worker.id,
                    len(answer.cards) + answer.left_out,
                    answer.left_out,
                    MOST_MODELS,
                    LONGEST_NAME,
                )
        return answer

    async def _read_metrics(self, probes: _WorkerProbes) -> MetricsPage | None:
        if self._clock.now() < probes.metrics_due:
            return None
        asked = self._clock.now()
        answer = await self._prober.metrics(probes.worker.spec.url)
        probes.metrics_due = self._clock.now() + self._jittered(self._options.metrics_interval_s)
        if isinstance(answer, ProbeFailure):
            return None
        self._account(probes, answer, asked)
        return answer

    def _account(self, probes: _WorkerProbes, page: MetricsPage, asked: float) -> None:
        """Keep the engine's figures, and the load from elsewhere that they show."""
        worker, previous_peaks = probes.worker, probes.peaks
        peaks = worker.load.take_peaks()
        if page.waiting is None:
            worker.engine_queue = None
            probes.pages.clear()
            worker.set_foreign(None)
            return
        worker.engine_queue = figures = EngineFigures(
            page.waiting, page.running, page.kv_usage, page.ended, asked
        )
        own_requests = OwnRequests(*map(max, previous_peaks, peaks))
        others = others_of(figures, own_requests, page.capacity_tokens or worker.capacity_tokens)
        probes.pages.append(SeenPage(figures, others))
        loads, now = [other.load for other in self._fleet.workers()], self._clock.now()
        recent = [load.recent(now) for load in loads]
        requests = sum(count for _, count in recent)
        stays = [load.residence_s for load in loads if load.residence_s is not None]
        worker.set_foreign(
            foreign_load(
                tuple(probes.pages),
                ranks=max(1, len(page.ranks)),
                prefill_s=sum(seconds for seconds, _ in recent) / requests if requests else 0.0,
                residence_s=worker.load.residence_s or (sum(stays) / len(stays) if stays else None),
            )
        )

    def _on_passed(self, probes: _WorkerProbes) -> None:
        worker, now = probes.worker, self._clock.now()
        probes.failures, probes.was_refused = 0, False
        if self._fleet.health(worker) is HealthState.HEALTHY:
            self._fleet.refresh_ramp(worker, now)
            return
        options = self._options
        ramp_s = options.ramp_s if probes.was_healthy else 0.0
        probes.was_healthy = True
        probes.recheck_s = options.recheck_s
        probes.answers.clear()
        self._fleet.mark_healthy(worker, now, ramp_start=options.ramp_start, ramp_s=ramp_s)

    def _on_failed(self, probes: _WorkerProbes, failure: ProbeFailure) -> None:
        if failure.is_own:
            return  # a gateway without descriptors must not eject every worker
        probes.failures += 1
        probes.was_refused |= failure.refused
        self.counts.probe_failures[probes.worker.id] += 1
        if failure.not_isolated:
            self._eject(probes, Ejection.NOT_ISOLATED, failure.detail)
        elif failure.refused:
            self._eject(probes, Ejection.REFUSED, failure.detail)
        elif probes.failures >= self._options.failures_to_eject:
            self._eject(probes, Ejection.PROBES, failure.detail)

    def _pause_s(self, probes: _WorkerProbes) -> float:
        """Seconds until the next probe. While the worker is not healthy, each call returns a longer pause."""
        interval_s = self._options.interval_s
        if self._fleet.health(probes.worker) is HealthState.HEALTHY:
            return interval_s
        pause = min(probes.recheck_s, interval_s)
        probes.recheck_s = min(probes.recheck_s * _RECHECK_GROWTH, interval_s)
        return pause

    def _eject(
        self, probes: _WorkerProbes, cause: Ejection, trouble: str, *, not_before: float = -math.inf
    ) -> None:
        health = self._fleet.health(probes.worker)
        if health is HealthState.UNHEALTHY:
            if cause is Ejection.NOT_ISOLATED:  # an operator must know that waiting does not help
                self._fleet.mark_unhealthy(probes.worker, cause, trouble)
            return
        probes.epoch += 1
        probes.answers.clear()
        probes.models_due = probes.metrics_due = -math.inf
        probes.ask_from.clear()
        probes.recheck_s = self._options.recheck_s
        probes.due = max(self._clock.now() + self._jittered(self._options.recheck_s), not_before)
        if health is HealthState.HEALTHY:
            self.counts.ejections[probes.worker.id, cause] += 1
        self._fleet.mark_unhealthy(probes.worker, cause, trouble)
        self._wake(probes)

    # Tasks

    def _on_change(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.JOINED:
            self._joined(worker)
        elif change is FleetChange.LEFT:
            probes = self._probes.pop(worker.id)
            self.suspects.discard(worker.id)
            self.counts.forget(worker.id)
            if probes.task is not None:
                probes.task.cancel()

    def _joined(self, worker: Worker) -> None:
        options = self._options
        probes = self._probes[worker.id] = _WorkerProbes(
            worker,
            BurstWindow(options.burst_failures, options.burst_window_s),
            Backoff(options.backoff_s, options.backoff_max_s),
            due=self._clock.now(),
            recheck_s=options.recheck_s,
        )
        if self._group is not None:
            self._start_task(probes)

    def _start_task(self, probes: _WorkerProbes) -> None:
        assert self._group is not None
        probes.task = self._group.create_task(self._probe_loop(probes), name=f"probe {probes.worker.id}")

    async def _sleep(self, probes: _WorkerProbes, seconds: float) -> None:
        """Sleep for `seconds`, or until `_wake`."""
        probes.pause = asyncio.create_task(self._clock.sleep(seconds))
        try:
            # `_wake` cancels the pause only. If this task is cancelled, gather cancels and awaits the pause.
            await asyncio.gather(probes.pause, return_exceptions=True)
        finally:
            probes.pause = None

    def _wake(self, probes: _WorkerProbes) -> None:
        if probes.pause is not None:
            probes.pause.cancel()

    def _probes_of(self, worker: Worker) -> _WorkerProbes | None:
        probes = self._probes.get(worker.id)
        return probes if probes is not None and probes.worker is worker else None

    def _jittered(self, seconds: float) -> float:
        jitter = self._options.jitter
        return seconds * self._rng.uniform(1.0 - jitter, 1.0 + jitter) if jitter else seconds
