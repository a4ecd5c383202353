"""One of several gateway processes: what it tells the others, and what becomes of what they tell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.membership import AdminOverrides
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.gateway.stored import ResponseOwners
from kvroute.replicas.decisions import OthersDecisions, OwnDecisions, recent_prompts, take_recent
from kvroute.replicas.mesh import Mesh
from kvroute.replicas.messages import (
    Ejected,
    Finished,
    FirstToken,
    HandSpec,
    InSync,
    Message,
    OverridesChanged,
    Owner,
    Recent,
    Sent,
    SessionForgotten,
    SnapshotFollows,
    SnapshotRequest,
)
from kvroute.replicas.metrics import merged_decisions, merged_predictions
from kvroute.routing.router import Router

if TYPE_CHECKING:
    from kvroute.app.cache_tracker import CacheMapPublisher
    from kvroute.app.cache_tracker_mirror import CacheTrackerMirror

log = logging.getLogger(__name__)

FOLLOWS: Final = 0
"""The process that follows the workers' caches."""

_ASK_S: Final = 1.0
_DECISIONS: Final = "decisions"
_PREDICTIONS: Final = "predictions"
_ELSEWHERE: Final = "reported_by_another_process"


class SharedOwners(ResponseOwners):
    """Tells the others of each stored response."""

    def __init__(self, publish: Callable[[Message], None]) -> None:
        super().__init__()
        self._publish = publish

    def remember(self, response_id: str, worker: WorkerId) -> None:
        super().remember(response_id, worker)
        self._publish(Owner(response_id, worker))

    def remembered_elsewhere(self, response_id: str, worker: WorkerId) -> None:
        super().remember(response_id, worker)


class Replica:
    """This process among the others; a `Member` of the mesh and `Elsewhere` for the admin API.

    Mutable. Its runtime calls `take_part` once all is constructed, then `start`, and `aclose` at the end.
    """

    def __init__(self, number: int, processes: int, folder: Path, *, generation: int) -> None:
        """`folder` is where the processes meet; `generation` how often this one was replaced."""
        self.number = number
        self.folder = folder
        self.generation = generation
        self.mesh = Mesh(number, processes, folder)
        self.own = OwnDecisions(self.mesh.publish)
        self.owners = SharedOwners(self.mesh.publish)
        self.teller: CacheMapPublisher | None = None
        self._mirroring: CacheTrackerMirror | None = None
        # Those that start together know all there is: nothing was sent yet.
        self._is_level = generation == 0
        self._level = asyncio.Event()
        self._asked: int | None = None
        self._handlers: Mapping[type, Callable[[int, Any], object]] = {}

    def take_part(
        self,
        fleet: Fleet,
        router: Router,
        health: HealthMonitor,
        clock: Clock,
        teller: CacheMapPublisher | None,
        mirroring: CacheTrackerMirror | None,
    ) -> None:
        """What the others' messages change here."""
        self._fleet, self._router, self._health = fleet, router, health
        self._others = others = OthersDecisions(router, fleet, clock)
        self.teller, self._mirroring = teller, mirroring
        self._handlers = {
            Sent: others.sent,
            SnapshotFollows: lambda number, _: others.begin_anew(number),
            FirstToken: lambda number, told: others.first_token(number, told.id),
            Finished: lambda number, told: others.finished(number, told.id),
            Owner: lambda _, told: self.owners.remembered_elsewhere(told.response_id, WorkerId(told.worker)),
            SessionForgotten: lambda _, told: router.session_forgotten_elsewhere(told.session_key),
            OverridesChanged: lambda _, told: fleet.apply_admin_overrides(_done(told)),
            Ejected: self._ejected_elsewhere,
            SnapshotRequest: self._wanted,
            Recent: lambda _, told: take_recent(router, fleet, told),
            InSync: self._became_level,
        }
        fleet.subscribe_admin_overrides(lambda done: self.mesh.publish(_told(done)))
        fleet.subscribe(self._fleet_changed)

    def answers(self, decisions: Callable[[int], list[dict[str, Any]]], audit: Callable[[], Any]) -> None:
        """Answer the others' admin requests from these."""

        async def told_decisions(how: bytes) -> bytes:
            return msgspec.json.encode(decisions(int(how)))

        async def told_predictions(_: bytes) -> bytes:
            return msgspec.json.encode(audit())

        self.mesh.answers(_DECISIONS, told_decisions)
        self.mesh.answers(_PREDICTIONS, told_predictions)

    async def start(self) -> None:
        """Listen to the others. Raises OSError."""
        await self.mesh.start(self)

    async def until_level(self, deadline_s: float) -> None:
        """Wait until this process knows what the others know, as long as that may take."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.mesh.all_linked()
                if not self._is_level and self._asked is not None:
                    await self._level.wait()
        except TimeoutError:
            pass
        self._is_level = True  # or there is nobody to ask
        if set(self.mesh.others) - set(self.mesh.peers):
            missing = sorted(set(self.mesh.others) - set(self.mesh.peers))
            log.warning("begins without a link to process %s", ", ".join(map(str, missing)))

    async def aclose(self) -> None:
        await self.mesh.aclose()

    def notes(self) -> list[str]:
        """For `/ready`."""
        missing = set(self.mesh.others) - set(self.mesh.peers)
        return [f"process {self.number} has no link to process {number}" for number in sorted(missing)]

    # `Elsewhere`

    async def decisions(self, limit: int, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        told = await self.mesh.ask(_DECISIONS, str(limit).encode(), _ASK_S)
        return merged_decisions([own, *map(msgspec.json.decode, told.values())], limit)

    async def predictions(self, own: dict[str, Any]) -> dict[str, Any]:
        told = await self.mesh.ask(_PREDICTIONS, b"", _ASK_S)
        return merged_predictions([own, *map(msgspec.json.decode, told.values())])

    # `Member`

    @property
    def is_level(self) -> bool:
        return self._is_level

    def greeting(self, number: int) -> Sequence[Message]:
        told = self.own.unfinished()
        if self._is_level:
            told.insert(0, _told(self._fleet.admin_overrides()))
        if self.teller is not None:
            told += self.teller.greeting()
        return told

    def linked(self, number: int, *, is_level: bool) -> None:
        self.own.begin_anew()
        if not self._is_level and is_level and self._asked is None:
            self._asked = number
            self.mesh.send(number, SnapshotRequest())

    def heard(self, number: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(number, message)
        elif self.teller is not None:
            self.teller.heard(message)
        elif self._mirroring is not None:
            self._mirroring.caches.heard(message)

    def lost(self, number: int) -> None:
        self._others.lost(number)
        if number == self._asked and not self._is_level:
            self._asked = None
        if number == FOLLOWS and self._mirroring is not None:
            self._mirroring.caches.alone()

    # Inside

    def _wanted(self, number: int, _: SnapshotRequest) -> None:
        self.mesh.own(self._tell_recent(number), f"what process {number} missed")

    async def _tell_recent(self, number: int) -> None:
        """In pieces: streams go on meanwhile, and what is new is told to that process anyway."""
        for recent in recent_prompts(self._router, self._fleet.workers()):
            self.mesh.send(number, recent)
            await asyncio.sleep(0)
        self.mesh.send(number, InSync())

    def _became_level(self, number: int, _: InSync) -> None:
        self._is_level = True
        self._level.set()
        log.info("process %d knows what process %d knew", self.number, number)

    def _ejected_elsewhere(self, _: int, told: Ejected) -> None:
        try:
            self._health.report_failure(self._fleet.get(told.worker), _ELSEWHERE)
        except NotFound:
            return

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.EJECTED and worker.ejection is not None:
            self.mesh.publish(Ejected(worker.id, worker.ejection.value))


def _told(done: AdminOverrides) -> OverridesChanged:
    return OverridesChanged(
        [
            HandSpec(
                each.id, each.url, each.models, each.capacity_tokens, each.role, each.draining, each.node
            )
            for each in done.added
        ],
        sorted(done.removed),
        sorted(done.drained),
    )


def _done(told: OverridesChanged) -> AdminOverrides:
    return AdminOverrides(
        tuple(
            WorkerSpec(
                WorkerId(each.id),
                each.url,
                each.models,
                each.capacity_tokens,
                each.role,
                each.draining,
                each.node,
            )
            for each in told.added
        ),
        frozenset(map(WorkerId, told.removed)),
        frozenset(map(WorkerId, told.drained)),
    )
