"""The set of workers: who is in it, in what state, and what that means for routing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count

from kvroute.clock import Clock
from kvroute.errors import InvalidRequest, NotFound
from kvroute.fleet.membership import AdminOverrides, DesiredWorkers
from kvroute.fleet.probe import ModelCatalog, catalog_of
from kvroute.fleet.worker import (
    Ejection,
    FleetView,
    HealthState,
    Worker,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
    same_cards,
)

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """`is_done`: nothing runs on the worker any more."""

    worker: WorkerId
    in_flight: int

    @property
    def is_done(self) -> bool:
        return self.in_flight == 0


def progress_of(worker: Worker) -> DrainProgress:
    """As of now; also for a worker that has left the fleet."""
    return DrainProgress(worker.id, worker.load.in_flight)


async def until_drained(worker: Worker, clock: Clock, *, timeout_s: float) -> DrainProgress:
    """Wait until nothing runs on `worker`, but no longer than `timeout_s`; the answer tells which it was.

    Looks ten times a second: a drain takes as long as the longest answer, and requests should not pay
    for a notification that hardly ever has a listener.
    """
    end = clock.now() + timeout_s
    while not (progress := progress_of(worker)).is_done and (left := end - clock.now()) > 0:
        await clock.sleep(min(_POLL_S, left))
    return progress


log = logging.getLogger(__name__)


class FleetChange(StrEnum):
    """What happened to a worker, as listeners hear it."""

    JOINED = "joined"
    LEFT = "left"
    """Out of every view already; its index may be given away after the listeners have returned."""
    RESTARTED = "restarted"
    """Its process is a new one: whatever its cache held is gone."""
    CAPACITY = "capacity"
    """`capacity_tokens` or `block_size` changed."""
    MODELS = "models"
    """It serves other models, or describes them otherwise."""
    STATE = "state"
    EJECTED = "ejected"
    """After STATE, if it was healthy until now; `Worker.ejection` says why."""


FleetListener = Callable[[FleetChange, Worker], None]
"""Called synchronously, after the fleet is consistent again. Must not change the fleet."""


class Fleet:
    """All workers of one gateway.

    Mutable: membership changes through `apply`, `add` and `remove`, states and facts through the
    health monitor's calls, draining through the admin API's. Touched from the event loop only and
    never across an await, hence no locks. `view` and `resolve` cost one dict lookup each.

    `aliases` are other names for models (name -> model); `created` is the Unix time shown for models
    that no worker has described.
    """

    def __init__(self, aliases: Mapping[str, str] | None = None, *, created: int = 0) -> None:
        self._aliases = dict(aliases or {})
        self._created = created
        self._wanted = DesiredWorkers()
        self._workers: dict[WorkerId, Worker] = {}
        self._below: dict[WorkerId, HealthState] = {}
        """What the state of each draining worker would be otherwise."""
        self._drained: set[WorkerId] = set()
        """Draining by hand, whatever their source says."""
        self._assumed: set[WorkerId] = set()
        """Workers whose assumed capacity has been logged."""
        self._listeners: list[FleetListener] = []
        self._hand_listeners: list[Callable[[AdminOverrides], None]] = []
        self._views: dict[str, FleetView] = {}
        self.version = 0
        """Rises whenever membership, states or models change. Read only."""
        self._catalog = catalog_of((), self._aliases)

    # What routing and the HTTP edge read

    @property
    def catalog(self) -> ModelCatalog:
        """Model names as of this version."""
        return self._catalog

    def resolve(self, model: str | None) -> str:
        """See `ModelCatalog.resolve`."""
        return self._catalog.resolve(model)

    def models(self) -> tuple[Mapping[str, object], ...]:
        """Cards for `/v1/models`: models, adapters, aliases. A failing worker's last good ones stay."""
        return self._catalog.cards

    def view(self, model: str) -> FleetView:
        """The routable workers of a resolved model name; none of them, if none is. O(1) until
        something changes, then O(workers) once."""
        view = self._views.get(model)
        if view is None:
            routable = tuple(w for w in self.workers() if w.is_routable and w.serves(model))
            view = FleetView(model, routable, self.version)
            if routable:  # names come from clients: only those that exist may take up memory
                self._views[model] = view
        return view

    def workers(self) -> tuple[Worker, ...]:
        """All of them, by id."""
        return tuple(self._workers[worker_id] for worker_id in sorted(self._workers))

    def get(self, worker_id: str) -> Worker:
        """Raises NotFound."""
        worker = self._workers.get(WorkerId(worker_id))
        if worker is None:
            raise NotFound(f"There is no worker {worker_id!r}.", code="worker_not_found")
        return worker

    def states(self) -> dict[HealthState, int]:
        """How many workers are in each state; every state is there."""
        counts = dict.fromkeys(HealthState, 0)
        for worker in self._workers.values():
            counts[worker.state] += 1
        return counts

    def reasons_not_ready(self) -> list[str]:
        """Empty if some worker can be routed to, else one sentence per obstacle."""
        workers = self.workers()
        if any(worker.is_routable and worker.models for worker in workers):
            return []
        return [_obstacle(worker) for worker in workers] or ["No workers are known."]

    # Membership

    def subscribe(self, listener: FleetListener) -> None:
        """Hear of every change from now on, in the order of subscription."""
        self._listeners.append(listener)

    def apply(self, source: str, specs: Iterable[WorkerSpec]) -> None:
        """Make `specs` all that `source` wants; other sources' workers are untouched.

        New workers start UNKNOWN. A worker whose `url` changed is a new one. One that is no longer
        wanted leaves every view at once; requests that run on it go on. `DesiredWorkers` says what holds
        where sources contradict each other.
        """
        self._wanted.replace(source, specs)
        self._reconcile()

    def add(self, spec: WorkerSpec) -> Worker:
        """Add a worker by hand, or change the one of that id. Undoes an earlier `remove`.

        Raises InvalidRequest if another worker has this URL.
        """
        for worker in self._workers.values():
            if worker.spec.url == spec.url and worker.id != spec.id:
                raise InvalidRequest(f"The worker {worker.id!r} has this URL already.", param="url")
        self._wanted.add(spec)
        self._reconcile()
        self._tell_by_hand()
        return self.get(spec.id)

    def remove(self, worker_id: str) -> None:
        """Take a worker out by hand, whoever named it; it stays out until its source no longer lists it
        or it is added by hand. Raises NotFound."""
        self._wanted.remove(self.get(worker_id).id)
        self._reconcile()
        self._tell_by_hand()

    # What was done by hand, for other processes that have the same workers

    def subscribe_by_hand(self, listener: Callable[[AdminOverrides], None]) -> None:
        """Hear what stands done by hand after each `add`, `remove`, `drain` and `undrain`."""
        self._hand_listeners.append(listener)

    def by_hand(self) -> AdminOverrides:
        """All that stands done by hand."""
        return self._wanted.by_hand(frozenset(self._drained))

    def follow_hand(self, done: AdminOverrides) -> None:
        """Make what another process has been told by hand stand here, and nothing else; listeners of
        `subscribe_by_hand` do not hear of it. Drains of workers that are not known (yet) are kept."""
        before = self._drained
        self._drained = set(done.drained)
        self._wanted.follow_hand(done)
        self._reconcile()
        for worker in [w for w in self.workers() if (w.id in before) != (w.id in self._drained)]:
            if self._follow_drain(worker):
                self._changed((FleetChange.STATE, worker))

    def _tell_by_hand(self) -> None:
        for listener in self._hand_listeners:
            listener(self.by_hand())

    def _reconcile(self) -> None:
        wanted = self._wanted.merged()
        leaving = [w for w in self._workers.values() if w.id not in wanted or wanted[w.id].url != w.spec.url]
        for worker in leaving:
            del self._workers[worker.id]
            self._below.pop(worker.id, None)
            self._drained.discard(worker.id)
            worker.state = HealthState.DRAINING
            self._assumed.discard(worker.id)
        if leaving:
            # Listeners free what hangs on an index before it is given to a newcomer.
            self._changed(*((FleetChange.LEFT, worker) for worker in leaving))
        changes: list[tuple[FleetChange, Worker]] = []
        respecified = False
        for spec in wanted.values():
            known = self._workers.get(spec.id)
            if known is None:
                worker = self._workers[spec.id] = Worker(spec, index=self._free_index())
                self._follow_drain(worker)
                changes.append((FleetChange.JOINED, worker))
            elif known.spec != spec:
                before = known.capacity_tokens
                known.spec = spec
                respecified = True
                if self._follow_drain(known):
                    changes.append((FleetChange.STATE, known))
                if known.capacity_tokens != before:
                    changes.append((FleetChange.CAPACITY, known))
        if changes or respecified:
            self._changed(*changes)

    def _free_index(self) -> int:
        taken = {worker.index for worker in self._workers.values()}
        return next(index for index in count() if index not in taken)

    # Health, as the monitor sees it

    def health(self, worker: Worker) -> HealthState:
        """UNKNOWN, HEALTHY or UNHEALTHY, also of a draining worker; DRAINING of one that has left."""
        return self._below.get(worker.id, worker.state) if self._is_current(worker) else worker.state

    def mark_healthy(
        self, worker: Worker, now: float, *, ramp_start: float = 1.0, ramp_s: float = 0.0
    ) -> None:
        """It passed a probe. Its share then rises from `ramp_start` to 1 within `ramp_s`."""
        if not self._is_current(worker):
            return
        ramps = ramp_s > 0 and ramp_start < 1.0
        worker.ramp, worker.ramp_since = (ramp_start if ramps else 1.0), now
        worker.ramp_until = now + ramp_s if ramps else None
        worker.ejection, worker.trouble = None, ""
        self._set_health(worker, HealthState.HEALTHY)

    def mark_unhealthy(self, worker: Worker, cause: Ejection, trouble: str) -> None:
        """It may get no request until it is marked healthy again."""
        if not self._is_current(worker):
            return
        was_healthy = self.health(worker) is HealthState.HEALTHY
        worker.trouble = trouble
        if was_healthy:
            worker.ejection = cause
        self._set_health(worker, HealthState.UNHEALTHY)
        if was_healthy:
            self._tell(FleetChange.EJECTED, worker)

    def update_facts(self, worker: Worker, facts: WorkerFacts, *, restarted: bool = False) -> None:
        """Replace what is known about it. With `restarted`, listeners first hear that its cache is gone."""
        if not self._is_current(worker):
            return
        before = worker.facts, worker.capacity_tokens, worker.block_size
        if same_cards(worker.facts.model_cards, facts.model_cards):
            facts = replace(facts, model_cards=worker.facts.model_cards)
        worker.facts = facts
        changes: list[tuple[FleetChange, Worker]] = []
        if restarted:
            log.warning("worker %s has restarted: its cache is empty", worker.id)
            changes.append((FleetChange.RESTARTED, worker))
        if (worker.capacity_tokens, worker.block_size) != before[1:]:
            changes.append((FleetChange.CAPACITY, worker))
        if _served(facts) != _served(before[0]):
            self._changed(*changes, (FleetChange.MODELS, worker))
            return
        for change, changed in changes:
            self._tell(change, changed)

    def refresh_ramp(self, worker: Worker, now: float) -> None:
        """Bring `worker.ramp` up to date; it stays on the same line, so this may come at any time."""
        if worker.ramp_until is None:
            return
        worker.ramp, worker.ramp_since = worker.ramp_at(now), now
        if worker.ramp == 1.0:
            worker.ramp_until = None

    # Draining

    def drain(self, worker_id: str) -> DrainProgress:
        """Send no new requests there; running ones go on, probes too. Repeating it only reports.
        Raises NotFound."""
        worker = self.get(worker_id)
        self._drained.add(worker.id)
        if self._follow_drain(worker):
            self._changed((FleetChange.STATE, worker))
        self._tell_by_hand()
        return progress_of(worker)

    def undrain(self, worker_id: str) -> None:
        """Take it back into routing, in the state that its probes found meanwhile; one that drains because
        its source says so goes on draining. Raises NotFound."""
        worker = self.get(worker_id)
        self._drained.discard(worker.id)
        if self._follow_drain(worker):
            self._changed((FleetChange.STATE, worker))
        self._tell_by_hand()

    def _follow_drain(self, worker: Worker) -> bool:
        """Let the state follow what was said by hand and by the source; whether it changed."""
        drains = worker.spec.draining or worker.id in self._drained
        if drains == (worker.id in self._below):
            return False
        if drains:
            self._below[worker.id] = worker.state
            worker.state = HealthState.DRAINING
            log.info("worker %s drains", worker.id)
        else:
            worker.state = self._below.pop(worker.id)
            log.info("worker %s no longer drains", worker.id)
        return True

    # Inside

    def _is_current(self, worker: Worker) -> bool:
        """False for a worker that has left, even if another one has its id now."""
        return self._workers.get(worker.id) is worker

    def _set_health(self, worker: Worker, health: HealthState) -> None:
        if self.health(worker) is health:
            return
        self._log_health(worker, health)
        if worker.id in self._below:
            self._below[worker.id] = health
            return
        worker.state = health
        self._changed((FleetChange.STATE, worker))

    def _log_health(self, worker: Worker, health: HealthState) -> None:
        if health is HealthState.UNHEALTHY:
            log.warning("worker %s is unhealthy: %s", worker.id, worker.trouble)
            return
        log.info(
            "worker %s is healthy, serves %s", worker.id, ", ".join(sorted(worker.models)) or "nothing yet"
        )
        has_capacity = worker.facts.capacity_tokens or worker.spec.capacity_tokens
        if not has_capacity and worker.id not in self._assumed:
            self._assumed.add(worker.id)
            log.warning(
                "worker %s does not tell the size of its KV cache: taken to be %d tokens in blocks of %d"
                " (set its capacity_tokens)",
                worker.id,
                worker.capacity_tokens,
                worker.block_size,
            )

    def _changed(self, *changes: tuple[FleetChange, Worker]) -> None:
        self.version += 1
        self._views.clear()
        self._catalog = catalog_of(self._workers.values(), self._aliases, self._created)
        for change, worker in changes:
            self._tell(change, worker)

    def _tell(self, change: FleetChange, worker: Worker) -> None:
        for listener in self._listeners:
            listener(change, worker)


def _obstacle(worker: Worker) -> str:
    if worker.is_routable:
        return f"Worker {worker.id} is healthy, but has not said which models it serves."
    trouble = f": {worker.trouble}" if worker.trouble else ""
    return f"Worker {worker.id} is {worker.state.value}{trouble}."


def _served(facts: WorkerFacts) -> tuple[object, ...]:
    return facts.models, facts.adapters, facts.model_cards
