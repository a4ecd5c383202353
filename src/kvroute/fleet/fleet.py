"""The set of workers with their states, and the views of it that routing reads.

Several discovery sources and the admin API name workers; `DesiredWorkers` merges them into one set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count

from kvroute.clock import Clock
from kvroute.errors import InvalidRequest, NoRoutableWorker, NotFound
from kvroute.fleet.catalog import ModelCatalog, catalog_of
from kvroute.fleet.worker import (
    Ejection,
    FleetView,
    HealthState,
    Worker,
    WorkerFacts,
    WorkerId,
    WorkerRole,
    WorkerSpec,
    same_cards,
)

log = logging.getLogger(__name__)

ADMIN = "admin"
"""The source name of workers added through the admin API. It wins over every other source of the same id."""


@dataclass(frozen=True, slots=True)
class AdminOverrides:
    """The admin API's changes of a fleet: workers added, removed and drained by an operator."""

    added: tuple[WorkerSpec, ...] = ()
    removed: frozenset[WorkerId] = frozenset()
    drained: frozenset[WorkerId] = frozenset()


class DesiredWorkers:
    """The full set of workers of each source, and the merged set.

    Mutable: `replace`, `add`, `remove` and `apply_overrides` change it. If two sources name one id, ADMIN
    wins, else the source that named it first. The same rule holds for one URL under two ids.
    """

    def __init__(self) -> None:
        self._sources: dict[str, dict[WorkerId, WorkerSpec]] = {ADMIN: {}}
        self._removed: set[WorkerId] = set()
        """Removed through the admin API while a source still lists them."""
        self._removed_unlisted: set[WorkerId] = set()
        """The members of `_removed` that a peer reported before any source listed them in this process."""
        self._shadowed: set[tuple[str, WorkerId]] = set()
        """Entries ignored because another entry has the same URL or id; kept to log each entry once."""

    def replace(self, source: str, specs: Iterable[WorkerSpec]) -> None:
        """Set the full set of workers of `source`."""
        self._sources[source] = {spec.id: spec for spec in specs}
        listed = {worker_id for specs_by_id in self._sources.values() for worker_id in specs_by_id}
        self._removed_unlisted -= listed
        self._removed &= listed | self._removed_unlisted

    def add(self, spec: WorkerSpec) -> None:
        """Add a worker through the admin API; undoes an earlier `remove`."""
        self._removed.discard(spec.id)
        self._sources[ADMIN][spec.id] = spec

    def remove(self, worker_id: WorkerId) -> None:
        """Remove a worker until every source has stopped listing it, or until `add`."""
        self._sources[ADMIN].pop(worker_id, None)
        if any(worker_id in listed for listed in self._sources.values()):
            self._removed.add(worker_id)

    def overrides(self, drained: frozenset[WorkerId]) -> AdminOverrides:
        """The current effect of `add` and `remove`, together with `drained`."""
        return AdminOverrides(tuple(self._sources[ADMIN].values()), frozenset(self._removed), drained)

    def apply_overrides(self, overrides: AdminOverrides) -> None:
        """Replace the additions and removals with those of a peer."""
        self._sources[ADMIN] = {spec.id: spec for spec in overrides.added}
        self._removed = set(overrides.removed)
        self._removed_unlisted = {
            worker_id
            for worker_id in self._removed
            if not any(worker_id in listed for listed in self._sources.values())
        }

    def merged(self) -> dict[WorkerId, WorkerSpec]:
        """The merged set; ids and URLs are unique. O(all entries)."""
        merged: dict[WorkerId, WorkerSpec] = {}
        owners: dict[str, WorkerId] = {}
        shadowed: set[tuple[str, WorkerId]] = set()
        for source, specs in self._sources.items():
            for spec in specs.values():
                if spec.id in self._removed:
                    continue
                named = merged.get(spec.id)
                if named is not None:
                    # An operator's entry replaces the listed one on purpose.
                    if named.url != spec.url and spec.id not in self._sources[ADMIN]:
                        shadowed.add((source, spec.id))
                        if (source, spec.id) not in self._shadowed:
                            log.warning(
                                "worker %s (%s) of %s is ignored: %s has the same id",
                                spec.id,
                                spec.url,
                                source,
                                named.url,
                            )
                    continue
                # One URL under two ids would count the worker's load in two places.
                owner = owners.setdefault(spec.url, spec.id)
                if owner == spec.id:
                    merged[spec.id] = spec
                    continue
                shadowed.add((source, spec.id))
                if (source, spec.id) not in self._shadowed:
                    log.warning("worker %s of %s is ignored: %s has the same URL", spec.id, source, owner)
        self._shadowed = shadowed
        return merged


_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How many requests still run on a draining worker."""

    worker: WorkerId
    in_flight: int

    @property
    def is_done(self) -> bool:
        return self.in_flight == 0


def progress_of(worker: Worker) -> DrainProgress:
    """The current progress; also for a worker that has left the fleet."""
    return DrainProgress(worker.id, worker.load.in_flight)


async def until_drained(worker: Worker, clock: Clock, *, timeout_s: float) -> DrainProgress:
    """Wait until no request runs on `worker`, at most `timeout_s`; return the progress at that time."""
    # Polls ten times a second: a notification would cost every request something and is hardly ever needed.
    end = clock.now() + timeout_s
    while not (progress := progress_of(worker)).is_done and (remaining_s := end - clock.now()) > 0:
        await clock.sleep(min(_POLL_S, remaining_s))
    return progress


log = logging.getLogger(__name__)


class FleetChange(StrEnum):
    """The kind of change that a `FleetListener` is called with."""

    JOINED = "joined"
    LEFT = "left"
    """The worker is no longer in any view. Its index is reused after the listeners have returned."""
    RESTARTED = "restarted"
    """The worker's process was restarted, so its cache is empty."""
    CLEARED = "cleared"
    """The worker's prefix cache was emptied; its process continues."""
    STALE = "stale"
    """The worker's prefix cache may have been emptied: by sleep mode, or for new weights. KV events tell."""
    CAPACITY = "capacity"
    """`capacity_tokens`, `block_size` or the units of the worker's ranks changed."""
    MODELS = "models"
    """The worker serves other models, or describes them differently."""
    STATE = "state"
    EJECTED = "ejected"
    """Follows STATE when a healthy worker is ejected; `Worker.ejection` has the cause."""


FleetListener = Callable[[FleetChange, Worker], None]
"""Called synchronously, when the fleet is consistent. Must not change the fleet."""


class Fleet:
    """All workers of one gateway.

    Mutable: discovery and the admin API change membership and draining, the health monitor changes states
    and facts. `aliases` maps other names to models; `created` is the Unix time in the cards of models that no
    worker has described; `configured_names` are the models with options of their own. `view`, `resolve` and
    `canonical` cost one dict lookup each.
    """

    # Used from the event loop only, and never across an await, so there are no locks.

    def __init__(
        self,
        aliases: Mapping[str, str] | None = None,
        *,
        created: int = 0,
        configured_names: Collection[str] = (),
    ) -> None:
        self._aliases = dict(aliases or {})
        self._configured_names = frozenset(configured_names)
        self.created = created
        self._desired = DesiredWorkers()
        self._workers: dict[WorkerId, Worker] = {}
        self._hidden_health: dict[WorkerId, HealthState] = {}
        """The health of each worker whose `state` is DRAINING or ASLEEP."""
        self._drained: set[WorkerId] = set()
        """Workers that the admin API drains, in addition to those that a source marks as draining."""
        self._assumed: set[WorkerId] = set()
        """Workers for which the log has the warning about an assumed capacity."""
        self._listeners: list[FleetListener] = []
        self._override_listeners: list[Callable[[WorkerId, AdminOverrides], None]] = []
        self._views: dict[str, FleetView] = {}
        self.version = 0
        """Rises whenever membership, states or models change. Callers only read it."""
        self._catalog = catalog_of((), self._aliases)
        self.has_roles = False
        """Whether a worker, routable or not, is for prefill or for decode only. Callers only read it."""

    # Read by routing and the HTTP edge

    @property
    def catalog(self) -> ModelCatalog:
        """The current model names."""
        return self._catalog

    def resolve(self, model: str | None) -> str:
        """See `ModelCatalog.resolve`. An error about unknown models names the cause at each worker."""
        try:
            return self._catalog.resolve(model)
        except NoRoutableWorker as error:
            raise NoRoutableWorker(
                f"{error.message} {self.causes()}".rstrip(), param=error.param, retry_after_s=1
            ) from None

    def canonical(self, model: str) -> str:
        """The name that stands for all names of a model (as workers know it): see `canonical_names`."""
        return self._catalog.canonical.get(model, model)

    def models(self) -> tuple[Mapping[str, object], ...]:
        """Cards for `/v1/models`: models, adapters, aliases. The last good cards of a failing worker stay."""
        return self._catalog.cards

    def view(self, model: str) -> FleetView:
        """The routable workers of a resolved model name; may be empty. O(1), or O(workers) after a change.

        Names of one model have the view of its canonical name, if the same workers serve both.
        """
        view = self._views.get(model)
        if view is None:
            routable = tuple(w for w in self.workers() if w.is_routable and w.serves(model))
            canonical = self.canonical(model)
            shared = None if canonical == model else self.view(canonical)
            if shared is not None and shared.workers == routable:
                view = shared
            else:
                view = FleetView(model, routable, self.version)
            if routable:  # clients choose the names: only existing models may use memory
                self._views[model] = view
        return view

    def workers(self) -> tuple[Worker, ...]:
        """All workers, ordered by id."""
        return tuple(self._workers[worker_id] for worker_id in sorted(self._workers))

    def get(self, worker_id: str) -> Worker:
        """Raises NotFound."""
        worker = self._workers.get(WorkerId(worker_id))
        if worker is None:
            raise NotFound(f"There is no worker {worker_id!r}.", code="worker_not_found")
        return worker

    def states(self) -> dict[HealthState, int]:
        """Number of workers by state; a state without workers has 0."""
        counts = dict.fromkeys(HealthState, 0)
        for worker in self._workers.values():
            counts[worker.state] += 1
        return counts

    def reasons_not_ready(self) -> list[str]:
        """Empty if at least one worker is routable, else one sentence per worker about its problem."""
        workers = self.workers()
        if any(worker.is_routable and worker.models for worker in workers):
            return []
        return self.problems() or ["No workers are known."]

    def problems(self) -> list[str]:
        """One sentence for each worker that gets no requests, about its problem."""
        return [_obstacle(worker) for worker in self.workers() if not worker.is_routable or not worker.models]

    def causes(self, model: str | None = None) -> str:
        """The problems of at most `_SHOWN_PROBLEMS` workers, for an error message; those of `model` if given.

        O(workers).
        """
        problems = [
            _obstacle(worker)
            for worker in self.workers()
            if not (worker.is_routable and worker.models) and (model is None or worker.serves(model))
        ]
        more = len(problems) - _SHOWN_PROBLEMS
        return " ".join([*problems[:_SHOWN_PROBLEMS], *([f"{more} more have problems."] if more > 0 else [])])

    # Membership

    def subscribe(self, listener: FleetListener) -> None:
        """Call `listener` for every later change. Listeners are called in the order of subscription."""
        self._listeners.append(listener)

    def set_names(self, aliases: Mapping[str, str], configured_names: Collection[str] = ()) -> None:
        """Replace the other names for models, and the names of models with options of their own."""
        self._aliases, self._configured_names = dict(aliases), frozenset(configured_names)
        self._changed()  # resolved names are kept by version

    def apply(self, source: str, specs: Iterable[WorkerSpec]) -> None:
        """Set the full set of workers of `source`; the workers of other sources stay.

        New workers start UNKNOWN. A worker whose `url` changed is a new worker. A worker that is no longer
        listed leaves every view immediately; its running requests continue. For conflicts between sources see
        `DesiredWorkers`.
        """
        self._desired.replace(source, specs)
        self._reconcile()

    def add(self, spec: WorkerSpec) -> Worker:
        """Add a worker through the admin API, or change the one with that id. Undoes an earlier `remove`.

        Raises InvalidRequest if another worker has this URL.
        """
        for worker in self._workers.values():
            if worker.spec.url == spec.url and worker.id != spec.id:
                raise InvalidRequest(f"The worker {worker.id!r} has this URL already.", param="url")
        self._desired.add(spec)
        self._reconcile()
        self._publish_overrides(spec.id)
        return self.get(spec.id)

    def remove(self, worker_id: str) -> None:
        """Remove a worker of any source through the admin API. Raises NotFound.

        It stays out until its source no longer lists it, or until `add`.
        """
        self._desired.remove(self.get(worker_id).id)
        self._reconcile()
        self._publish_overrides(WorkerId(worker_id))

    # The admin API's changes, for peers

    def subscribe_admin_overrides(self, listener: Callable[[WorkerId, AdminOverrides], None]) -> None:
        """Call `listener` with worker and current overrides after `add`, `remove`, `drain` and `undrain`."""
        self._override_listeners.append(listener)

    def admin_overrides(self) -> AdminOverrides:
        """The admin API's current changes."""
        return self._desired.overrides(frozenset(self._drained))

    def apply_admin_overrides(self, overrides: AdminOverrides) -> None:
        """Replace the admin API's changes with those of a peer; override listeners are not called.

        Drains of unknown workers are kept for workers that a source names later.
        """
        previously_drained = self._drained
        self._drained = set(overrides.drained)
        self._desired.apply_overrides(overrides)
        self._reconcile()
        for worker in [w for w in self.workers() if (w.id in previously_drained) != (w.id in self._drained)]:
            if self._update_draining(worker):
                self._changed((FleetChange.STATE, worker))

    def _publish_overrides(self, changed: WorkerId) -> None:
        for listener in self._override_listeners:
            listener(changed, self.admin_overrides())

    def _reconcile(self) -> None:
        desired = self._desired.merged()
        leaving = [
            w for w in self._workers.values() if w.id not in desired or desired[w.id].url != w.spec.url
        ]
        for worker in leaving:
            del self._workers[worker.id]
            self._hidden_health.pop(worker.id, None)
            self._drained.discard(worker.id)
            worker.state = HealthState.DRAINING
            self._assumed.discard(worker.id)
        if leaving:
            # Listeners free the state of an index before a new worker gets the index.
            self._changed(*((FleetChange.LEFT, worker) for worker in leaving))
        changes: list[tuple[FleetChange, Worker]] = []
        respecified = False
        for spec in desired.values():
            current = self._workers.get(spec.id)
            if current is None:
                joined = self._workers[spec.id] = Worker(spec, index=next(self._free_indices()))
                self._update_draining(joined)
                changes.append((FleetChange.JOINED, joined))
            elif current.spec != spec:
                previous_capacity = current.capacity_tokens
                current.spec = spec
                respecified = True
                if self._update_draining(current):
                    changes.append((FleetChange.STATE, current))
                if current.capacity_tokens != previous_capacity:
                    changes.append((FleetChange.CAPACITY, current))
        if changes or respecified:
            self._changed(*changes)

    def _free_indices(self) -> Iterator[int]:
        """Numbers that no live worker and no rank of one has, the smallest first."""
        taken = {unit for worker in self._workers.values() for unit in worker.units}
        return (index for index in count() if index not in taken)

    # Called by the health monitor

    def health(self, worker: Worker) -> HealthState:
        """UNKNOWN, HEALTHY or UNHEALTHY, also for a worker that drains or is asleep; DRAINING if it has left
        the fleet."""
        if not self._is_current(worker):
            return worker.state
        return self._hidden_health.get(worker.id, worker.state)

    def mark_healthy(
        self, worker: Worker, now: float, *, ramp_start: float = 1.0, ramp_s: float = 0.0
    ) -> None:
        """Mark a worker that passed a probe. Its traffic share rises from `ramp_start` to 1 in `ramp_s`."""
        if not self._is_current(worker):
            return
        ramps = ramp_s > 0 and ramp_start < 1.0
        worker.share, worker.ramp_since = (ramp_start if ramps else 1.0), now
        worker.ramp_until = now + ramp_s if ramps else None
        worker.ejection, worker.trouble = None, ""
        self._set_health(worker, HealthState.HEALTHY)

    def mark_unhealthy(self, worker: Worker, cause: Ejection, trouble: str) -> None:
        """Take a worker out of routing until it is marked healthy again, or change the cause."""
        if not self._is_current(worker):
            return
        previous = self.health(worker)
        was_healthy = previous is HealthState.HEALTHY
        was_troubled_by, worker.trouble = worker.trouble, trouble
        if was_healthy or cause is Ejection.NOT_ISOLATED:
            worker.ejection = cause
        if previous is HealthState.UNHEALTHY and trouble != was_troubled_by:
            self._log_health(worker, previous)
        self._set_health(worker, HealthState.UNHEALTHY)
        if was_healthy:
            self._notify(FleetChange.EJECTED, worker)

    def update_facts(self, worker: Worker, facts: WorkerFacts, *, restarted: bool = False) -> None:
        """Replace a worker's facts. With `restarted`, listeners get RESTARTED before the other changes."""
        if not self._is_current(worker):
            return
        previous_facts = worker.facts
        previous_sizes = worker.capacity_tokens, worker.block_size, worker.units
        if same_cards(worker.facts.model_cards, facts.model_cards):
            facts = replace(facts, model_cards=worker.facts.model_cards)
        worker.facts = facts
        changes: list[tuple[FleetChange, Worker]] = []
        if restarted:
            log.warning("worker %s has restarted: its cache is empty", worker.id)
            changes.append((FleetChange.RESTARTED, worker))
        if facts.ranks != tuple(worker.rank_units):
            worker.rank_units = {}
            worker.rank_units = dict(zip(facts.ranks, self._free_indices(), strict=False))
            worker.rank_loads = {rank: worker.load_of(rank) for rank in facts.ranks}
        if (worker.capacity_tokens, worker.block_size, worker.units) != previous_sizes:
            changes.append((FleetChange.CAPACITY, worker))
        if _served(facts) != _served(previous_facts):
            self._changed(*changes, (FleetChange.MODELS, worker))
        elif worker.units != previous_sizes[2] or facts.caches_prefixes != previous_facts.caches_prefixes:
            self._changed(*changes)  # views have what is derived from both
        else:
            for change, changed in changes:
                self._notify(change, changed)

    def report_cleared(self, worker: Worker, cause: str) -> None:
        """The prefix cache of a worker is empty now. `cause` follows the worker's name in the log."""
        if self._is_current(worker):
            log.info("worker %s %s: its prefix cache is empty", worker.id, cause)
            self._notify(FleetChange.CLEARED, worker)

    def report_stale(self, worker: Worker) -> None:
        """The prefix cache of a worker may have been emptied since its metrics were read the last time."""
        if self._is_current(worker):
            log.info("worker %s was asleep or got new weights: what it was sent counts no more", worker.id)
            self._notify(FleetChange.STALE, worker)

    def set_asleep(self, workers: Iterable[Worker], reason: str) -> None:
        """The engines of these workers compute nothing now, because of `reason`; empty: they are awake.

        Listeners are called when all of them have their new state.
        """
        changes: list[tuple[FleetChange, Worker]] = []
        for worker in workers:
            if not self._is_current(worker) or worker.asleep == reason:
                continue
            was_asleep, worker.asleep = bool(worker.asleep), reason
            if reason:
                log.info("worker %s is asleep and gets no requests: %s", worker.id, reason)
            elif was_asleep:
                log.info("worker %s is awake again", worker.id)
            if self._show(worker, self.health(worker)):
                changes.append((FleetChange.STATE, worker))
        if changes:
            self._changed(*changes)

    def refresh_ramp(self, worker: Worker, now: float) -> None:
        """Set `worker.share` to its value at `now`. Safe at any time: the ramp stays on the same line."""
        if worker.ramp_until is not None:
            worker.share, worker.ramp_since = worker.share_at(now), now
            if worker.share == 1.0:
                worker.ramp_until = None

    def set_share(self, worker: Worker, share: float) -> None:
        """Set `worker.share`, unless a ramp changes it."""
        worker.share = share if worker.ramp_until is None else worker.share

    # Draining

    def drain(self, worker_id: str) -> DrainProgress:
        """Send no new requests to a worker; its running requests and its probes continue. Raises NotFound."""
        worker = self.get(worker_id)
        self._drained.add(worker.id)
        if self._update_draining(worker):
            self._changed((FleetChange.STATE, worker))
        self._publish_overrides(worker.id)
        return progress_of(worker)

    def undrain(self, worker_id: str) -> None:
        """Undo `drain`; the worker gets the state that its probes have found. Raises NotFound.

        A worker that its source marks as draining stays DRAINING.
        """
        worker = self.get(worker_id)
        self._drained.discard(worker.id)
        if self._update_draining(worker):
            self._changed((FleetChange.STATE, worker))
        self._publish_overrides(worker.id)

    def _update_draining(self, worker: Worker) -> bool:
        """Set the state from the admin API's drains and the source's flag; return whether it changed."""
        was_draining = worker.state is HealthState.DRAINING
        if not self._show(worker, self.health(worker)):
            return False
        drains = worker.state is HealthState.DRAINING
        if drains != was_draining:
            log.info("worker %s %s", worker.id, "drains" if drains else "no longer drains")
        return True

    # Internal

    def _is_current(self, worker: Worker) -> bool:
        """False for a worker that has left the fleet, even if another worker has the same id now."""
        return self._workers.get(worker.id) is worker

    def _set_health(self, worker: Worker, health: HealthState) -> None:
        if self.health(worker) is health:
            return
        self._log_health(worker, health)
        if self._show(worker, health):
            self._changed((FleetChange.STATE, worker))

    def _show(self, worker: Worker, health: HealthState) -> bool:
        """Set `state` from the health, the drains and the engine's state; return whether it changed."""
        previous, state = worker.state, health
        if worker.spec.draining or worker.id in self._drained:
            state = HealthState.DRAINING
        elif worker.asleep and health is HealthState.HEALTHY:
            state = HealthState.ASLEEP
        if state is health:
            self._hidden_health.pop(worker.id, None)
        else:
            self._hidden_health[worker.id] = health
        worker.state = state
        return state is not previous

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
                "worker %s does not report the size of its KV cache: %d tokens in blocks of %d are assumed"
                " (set its capacity_tokens)",
                worker.id,
                worker.capacity_tokens,
                worker.block_size,
            )

    def _changed(self, *changes: tuple[FleetChange, Worker]) -> None:
        self.version += 1
        self._views.clear()
        self._catalog = catalog_of(
            self._workers.values(), self._aliases, self.created, self._configured_names
        )
        self.has_roles = any(worker.role is not WorkerRole.BOTH for worker in self._workers.values())
        for change, worker in changes:
            self._notify(change, worker)

    def _notify(self, change: FleetChange, worker: Worker) -> None:
        for listener in self._listeners:
            listener(change, worker)


_SHOWN_PROBLEMS = 3


def _obstacle(worker: Worker) -> str:
    if worker.is_routable:
        trouble = f": {worker.models_trouble}" if worker.models_trouble else ""
        return f"Worker {worker.id} is healthy, but has not reported its models{trouble}.".replace("?.", "?")
    cause = worker.asleep if worker.state is HealthState.ASLEEP else worker.trouble
    trouble = f": {cause}" if cause else ""
    return f"Worker {worker.id} is {worker.state.value}{trouble}.".replace("?.", "?")


def _served(facts: WorkerFacts) -> tuple[object, ...]:
    return facts.models, facts.adapters, facts.model_cards
