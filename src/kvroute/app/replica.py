"""One of several gateway processes: connects its services to the messages of the other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.fleet.fleet import AdminOverrides, Fleet, FleetChange
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.gateway.stored import ResponseOwners
from kvroute.replicas.decisions import OwnDecisions, PeerDecisions, apply_recent_prompts, recent_prompts
from kvroute.replicas.mesh import Mesh
from kvroute.replicas.messages import (
    AdminWorkerSpec,
    Dispatched,
    Ejected,
    EncoderReset,
    Finished,
    FirstToken,
    InSync,
    Message,
    OverridesChanged,
    Owner,
    RecentPrompts,
    SessionForgotten,
    SnapshotRequest,
)
from kvroute.replicas.metrics import merge_decisions, merge_predictions
from kvroute.routing.router import Router

if TYPE_CHECKING:
    from kvroute.app.cache_tracker import CacheMapPublisher
    from kvroute.app.cache_tracker_mirror import CacheTrackerMirror

log = logging.getLogger(__name__)

TRACKING_PROCESS: Final = 0
"""The process that tracks the workers' caches; the others mirror its map."""

_REQUEST_TIMEOUT_S: Final = 1.0
_DECISIONS: Final = "decisions"
_PREDICTIONS: Final = "predictions"
_REPORTED_BY_PEER: Final = "reported_by_another_process"


class SharedOwners(ResponseOwners):
    """The owners of stored responses, shared with the other processes."""

    def __init__(self, publish: Callable[[Message], None]) -> None:
        super().__init__()
        self._publish = publish

    def remember(self, response_id: str, worker: WorkerId) -> None:
        super().remember(response_id, worker)
        self._publish(Owner(response_id, worker))

    def remember_from_peer(self, response_id: str, worker: WorkerId) -> None:
        """Remember an owner that another process published."""
        super().remember(response_id, worker)


class Replica:
    """This process as a `MeshMember`, and the admin API's `PeerProcesses`.

    Mutable. The runtime calls `attach_services` once the services are constructed, then `start`, and at the
    end `aclose`.
    """

    def __init__(self, number: int, processes: int, folder: Path, *, generation: int) -> None:
        """`folder` has the processes' sockets; `generation` is how often this process was replaced."""
        self.number = number
        self.folder = folder
        self.generation = generation
        self.mesh = Mesh(number, processes, folder)
        self.own = OwnDecisions(self.mesh.publish)
        self.owners = SharedOwners(self.mesh.publish)
        self._map_publisher: CacheMapPublisher | None = None
        self._mirror: CacheTrackerMirror | None = None
        # Processes that start together are in sync: no request was dispatched yet.
        self._is_synced = generation == 0
        self._synced = asyncio.Event()
        self._snapshot_source: int | None = None
        self._handlers: Mapping[type, Callable[[int, Any], object]] = {}

    def attach_services(
        self,
        fleet: Fleet,
        router: Router,
        health: HealthMonitor,
        clock: Clock,
        map_publisher: CacheMapPublisher | None,
        mirror: CacheTrackerMirror | None,
    ) -> None:
        """Connect the services that the other processes' messages change."""
        self._fleet, self._router, self._health = fleet, router, health
        self._peer_decisions = peers = PeerDecisions(router, fleet, clock)
        self._map_publisher, self._mirror = map_publisher, mirror
        self._handlers = {
            Dispatched: peers.dispatched,
            EncoderReset: lambda number, _: peers.reset_keys(number),
            FirstToken: lambda number, message: peers.first_token(number, message.id),
            Finished: lambda number, message: peers.finished(number, message.id),
            Owner: lambda _, owner: self.owners.remember_from_peer(owner.response_id, WorkerId(owner.worker)),
            SessionForgotten: lambda _, message: router.session_forgotten_by_peer(message.session_key),
            OverridesChanged: lambda _, message: fleet.apply_admin_overrides(_overrides_of(message)),
            Ejected: self._on_ejected,
            SnapshotRequest: self._on_snapshot_request,
            RecentPrompts: lambda _, recent: apply_recent_prompts(router, fleet, recent),
            InSync: self._on_in_sync,
        }
        fleet.subscribe_admin_overrides(lambda overrides: self.mesh.publish(_overrides_message(overrides)))
        fleet.subscribe(self._fleet_changed)

    def serve_admin(
        self, decisions: Callable[[int, str], list[dict[str, Any]]], audit: Callable[[], Any]
    ) -> None:
        """Answer the admin requests of the other processes with these functions."""

        async def answer_decisions(asked: bytes) -> bytes:
            limit, _, request_id = asked.decode().partition(" ")
            return msgspec.json.encode(decisions(int(limit), request_id))

        async def answer_predictions(_: bytes) -> bytes:
            return msgspec.json.encode(audit())

        self.mesh.handle(_DECISIONS, answer_decisions)
        self.mesh.handle(_PREDICTIONS, answer_predictions)

    async def start(self) -> None:
        """Open the links to the other processes. Raises OSError."""
        await self.mesh.start(self)

    async def wait_until_synced(self, timeout_s: float) -> None:
        """Wait until this process has the state of the others, for at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.mesh.all_linked()
                if not self._is_synced and self._snapshot_source is not None:
                    await self._synced.wait()
        except TimeoutError:
            pass
        self._is_synced = True  # also after a timeout: no process could send the state
        if set(self.mesh.peers) - set(self.mesh.linked_peers):
            missing = sorted(set(self.mesh.peers) - set(self.mesh.linked_peers))
            log.warning("starting without a link to process %s", ", ".join(map(str, missing)))

    async def aclose(self) -> None:
        await self.mesh.aclose()

    def notes(self) -> list[str]:
        """Notes for `/ready`: processes without a link."""
        missing = set(self.mesh.peers) - set(self.mesh.linked_peers)
        return [f"process {self.number} has no link to process {number}" for number in sorted(missing)]

    # `PeerProcesses`

    async def decisions(self, limit: int, request_id: str, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked = f"{limit} {request_id}".encode()
        answers = await self.mesh.request_all(_DECISIONS, asked, _REQUEST_TIMEOUT_S)
        return merge_decisions([own, *map(msgspec.json.decode, answers.values())], limit)

    async def predictions(self, own: dict[str, Any]) -> dict[str, Any]:
        answers = await self.mesh.request_all(_PREDICTIONS, b"", _REQUEST_TIMEOUT_S)
        return merge_predictions([own, *map(msgspec.json.decode, answers.values())])

    # `MeshMember`

    @property
    def is_synced(self) -> bool:
        return self._is_synced

    def greeting(self, number: int) -> Sequence[Message]:
        messages = self.own.unfinished()
        if self._is_synced:
            messages.insert(0, _overrides_message(self._fleet.admin_overrides()))
        if self._map_publisher is not None:
            messages += self._map_publisher.snapshot()
        return messages

    def on_linked(self, number: int, *, is_synced: bool) -> None:
        self.own.reset_keys()
        if not self._is_synced and is_synced and self._snapshot_source is None:
            self._snapshot_source = number
            self.mesh.send(number, SnapshotRequest())

    def on_message(self, number: int, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(number, message)
        elif self._map_publisher is not None:
            self._map_publisher.on_message(message)
        elif self._mirror is not None:
            self._mirror.caches.on_message(message)

    def on_link_lost(self, number: int) -> None:
        self._peer_decisions.lost(number)
        if number == self._snapshot_source and not self._is_synced:
            self._snapshot_source = None
        if number == TRACKING_PROCESS and self._mirror is not None:
            self._mirror.caches.on_link_lost()

    # Message handlers

    def _on_snapshot_request(self, number: int, _: SnapshotRequest) -> None:
        self.mesh.spawn(self._send_snapshot(number), f"snapshot for process {number}")

    async def _send_snapshot(self, number: int) -> None:
        """Send the route history, then `InSync`."""
        # In several messages, so that streams are relayed in between. New dispatches reach that process
        # anyway.
        for recent in recent_prompts(self._router, self._fleet.workers()):
            self.mesh.send(number, recent)
            await asyncio.sleep(0)
        self.mesh.send(number, InSync())

    def _on_in_sync(self, number: int, _: InSync) -> None:
        self._is_synced = True
        self._synced.set()
        log.info("process %d has received the state of process %d", self.number, number)

    def _on_ejected(self, _: int, message: Ejected) -> None:
        try:
            self._health.report_failure(self._fleet.get(message.worker), _REPORTED_BY_PEER)
        except NotFound:
            return

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.EJECTED and worker.ejection is not None:
            self.mesh.publish(Ejected(worker.id, worker.ejection.value))


def _overrides_message(overrides: AdminOverrides) -> OverridesChanged:
    return OverridesChanged(
        [
            AdminWorkerSpec(
                each.id, each.url, each.models, each.capacity_tokens, each.role, each.draining, each.node
            )
            for each in overrides.added
        ],
        sorted(overrides.removed),
        sorted(overrides.drained),
    )


def _overrides_of(message: OverridesChanged) -> AdminOverrides:
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
            for each in message.added
        ),
        frozenset(map(WorkerId, message.removed)),
        frozenset(map(WorkerId, message.drained)),
    )
