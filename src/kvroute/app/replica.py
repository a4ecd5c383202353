"""One of several gateway processes: connects its services to the messages of the other processes.

The others are the processes of this gateway, over Unix sockets (`replicas/mesh.py`), and with `sharing.url`
those of other gateways, through Redis (`replicas/channel.py`). Both bring the same messages, and the same
code applies them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvroute.access.client_keys import KeyRing, SharedUse
from kvroute.blocks.key_groups import KeyGroups
from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.fleet.fleet import AdminOverrides, Fleet, FleetChange
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.relay.poison import Loss, LostRequests
from kvroute.relay.stored_responses import ResponseOwners
from kvroute.replicas.channel import Channel
from kvroute.replicas.decisions import DispatchPublisher, PeerDispatches
from kvroute.replicas.envelope import ID_BYTES
from kvroute.replicas.joining import Joining
from kvroute.replicas.members import apply_learned_costs, apply_recent_prompts, learned_costs, recent_prompts
from kvroute.replicas.mesh import GATHER_S, Mesh
from kvroute.replicas.messages import (
    AdminWorkerSpec,
    CacheCleared,
    Dispatched,
    Ejected,
    EndedRequests,
    Finished,
    FirstToken,
    InSync,
    KeyGroupsAnswer,
    KeyGroupsRequest,
    KeyUsed,
    LearnedCosts,
    LimitsInUse,
    LostRequestsCleared,
    Message,
    OverrideEntry,
    OverridesChanged,
    PeerId,
    PlacedSessions,
    RecentPrompts,
    RequestLost,
    ResponseOwner,
    SessionForgotten,
    SharedMessage,
    SnapshotRequest,
)
from kvroute.replicas.metrics import merge_decisions, merge_predictions
from kvroute.replicas.options import SharingOptions
from kvroute.routing.router import Router
from kvroute.routing.strategies.session import Session
from kvroute.wire.lmcache_server import CacheServerStore

if TYPE_CHECKING:
    from kvroute.caches.mirror import CacheTrackerMirror
    from kvroute.caches.tracker import CacheMapPublisher
    from kvroute.replicas.cache_reports import CacheReports


class OverrideLog:
    """The latest entry of each worker that was ever changed by hand.

    Of two entries for a worker the later one is valid, so processes agree again after a separation. A drain
    or removal that ends because the worker leaves is no change by hand: its entry loses the effect and keeps
    the stamp. Mutable: `changed` adds this process's changes, `merge` those of others. An entry without an
    effect stays: it is the end of a drain that another process may still have.
    """

    def __init__(self, author: str) -> None:
        """`author` names this process; it is unique among all processes that exchange entries."""
        self._author = author
        self._time = 0
        self._entries: dict[str, OverrideEntry] = {}
        self._ended: set[str] = set()
        """Workers whose entry has lost its effect because they left in this process."""

    def changed(self, worker: WorkerId, overrides: AdminOverrides, wall_s: float) -> OverridesChanged:
        """Stamp a change of `worker` by hand, for other processes; `overrides` are the fleet's after it."""
        # The wall clock, so that the later change wins after a separation. The maximum, so that others can
        # still change what a process whose clock is ahead has changed.
        self._time = max(self._time + 1, int(wall_s * 1000))
        self._entries[worker] = entry = _entry_of(worker, overrides, (self._time, self._author))
        self._ended.discard(worker)
        return OverridesChanged([entry])

    def merge(self, message: OverridesChanged, current: AdminOverrides) -> AdminOverrides | None:
        """Take over later entries; `current` are the fleet's overrides.

        Returns all overrides that are valid now, None if nothing has changed.
        """
        self._end(current)
        is_changed = False
        for entry in message.entries:
            self._time = max(self._time, entry.stamp[0])
            known = self._entries.get(entry.worker)
            # With one stamp, only some processes have seen the worker leave. One that joins hears both kinds,
            # in any order: the drain wins, because an operator may be at work on the worker.
            holds = (entry.removed or entry.drained) and entry.worker not in self._ended
            if known is None or (known.stamp, False) < (entry.stamp, holds):
                is_changed = is_changed or _effect(known) != _effect(entry)
                self._entries[entry.worker] = entry
                self._ended.discard(entry.worker)
        return self._overrides() if is_changed else None

    def snapshot(self, current: AdminOverrides) -> OverridesChanged:
        """All entries, for a process that joins or was cut off; `current` are the fleet's overrides."""
        self._end(current)
        return OverridesChanged(list(self._entries.values()))

    def _end(self, current: AdminOverrides) -> None:
        """End what the fleet has ended. It keeps the drains of workers that no source has listed yet."""
        for name, entry in self._entries.items():
            is_removed, is_drained = name in current.removed, name in current.drained
            if (entry.removed and not is_removed) or (entry.drained and not is_drained):
                self._entries[name] = msgspec.structs.replace(entry, removed=False, drained=False)
                self._ended.add(name)

    def _overrides(self) -> AdminOverrides:
        entries = self._entries.values()
        return AdminOverrides(
            tuple(_spec_of(entry.added) for entry in entries if entry.added is not None),
            frozenset(WorkerId(entry.worker) for entry in entries if entry.removed),
            frozenset(WorkerId(entry.worker) for entry in entries if entry.drained),
        )


def _lost_message(loss: Loss, age_s: float) -> RequestLost:
    return RequestLost(loss.digest, loss.id, loss.key, loss.model, loss.body_bytes, loss.worker, age_s)


def _effect(entry: OverrideEntry | None) -> tuple[AdminWorkerSpec | None, bool, bool]:
    return (None, False, False) if entry is None else (entry.added, entry.removed, entry.drained)


def _entry_of(worker: WorkerId, overrides: AdminOverrides, stamp: tuple[int, str]) -> OverrideEntry:
    added = next((_message_of(spec) for spec in overrides.added if spec.id == worker), None)
    return OverrideEntry(worker, stamp, added, worker in overrides.removed, worker in overrides.drained)


def _message_of(spec: WorkerSpec) -> AdminWorkerSpec:
    return AdminWorkerSpec(
        spec.id,
        spec.url,
        spec.models,
        spec.capacity_tokens,
        spec.role,
        spec.draining,
        spec.node,
        spec.needs_health,
    )


def _spec_of(sent: AdminWorkerSpec) -> WorkerSpec:
    return WorkerSpec(
        WorkerId(sent.id),
        sent.url,
        sent.models,
        sent.capacity_tokens,
        sent.role,
        sent.draining,
        sent.node,
        sent.needs_health,
    )


log = logging.getLogger(__name__)

TRACKING_PROCESS: Final = 0
"""The process that tracks the workers' caches; the others mirror its map."""

_REQUEST_TIMEOUT_S: Final = 1.0
_DECISIONS: Final = "decisions"
_PREDICTIONS: Final = "predictions"
_OWNERS: Final = 10_000
"""Most owners of stored responses in a snapshot."""
_SESSIONS: Final = 10_000
"""Most sessions with the worker of their last request in a snapshot."""
_TOGETHER: Final = 1000
_PARTS_OF_STATES: Final = {LearnedCosts, PlacedSessions, LimitsInUse, RecentPrompts, CacheServerStore}


class SharedOwners(ResponseOwners):
    """The owners of stored responses, shared with the other processes."""

    def __init__(self, publish: Callable[[SharedMessage], None]) -> None:
        super().__init__()
        self._publish = publish

    def remember(self, response_id: str, worker: WorkerId) -> None:
        super().remember(response_id, worker)
        self._publish(ResponseOwner(response_id, worker))

    def remember_from_peer(self, response_id: str, worker: WorkerId) -> None:
        """Remember an owner that another process published."""
        super().remember(response_id, worker)


class Replica:
    """This process as a `PeerListener`, and the admin API's `PeerProcesses`.

    Mutable. The runtime calls `attach_services` once the services are constructed, then `start`, and at the
    end `aclose`.
    """

    def __init__(self, number: int, mesh: Mesh | None, channel: Channel | None, *, generation: int) -> None:
        """`mesh`: the links to the other processes of this gateway; `channel`: to other gateways.

        `generation` is how often this process was replaced.
        """
        self.number = number
        self.generation = generation
        self.mesh = mesh
        self.channel = channel
        self.groups = KeyGroups()
        self.own = DispatchPublisher(self._flush_soon, self.groups)
        self.publish = self.own.publish
        """Send to all processes of this gateway and of others, in a few `GATHER_S`."""
        self._timer: asyncio.TimerHandle | None = None
        self.owners = SharedOwners(self.publish)
        self.name = f"process {number}" if channel is None else channel.name
        """Of this process, in decisions and on the live page."""
        self._overrides = OverrideLog(f"{number}/{os.urandom(4).hex()}")
        self._map_publisher: CacheMapPublisher | None = None
        self._mirror: CacheTrackerMirror | None = None
        self._reports: CacheReports | None = None
        self._ring: KeyRing | None = None
        self._lost: LostRequests | None = None
        # Processes of a gateway that start together are in sync: no request was dispatched yet.
        self._joining = Joining(
            self.send,
            lambda: () if channel is None else channel.reporting_peers,
            is_needed=generation > 0 or channel is not None,
        )
        self._is_charged = False  # with the use of limits by others
        self._handlers: dict[type, Callable[[PeerId, Any], object]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of_one_process(cls, options: SharingOptions, clock: Clock) -> Replica | None:
        """The replica of a gateway of one process; None if it shares with no other gateway."""
        channel = redis_channel(options, os.urandom(ID_BYTES), 0, clock)
        return None if channel is None else cls(0, None, channel, generation=0)

    def attach_services(
        self,
        fleet: Fleet,
        router: Router,
        health: HealthMonitor,
        clock: Clock,
        map_publisher: CacheMapPublisher | None,
        mirror: CacheTrackerMirror | None,
        reports: CacheReports | None,
    ) -> None:
        """Connect the services that the other processes' messages change."""
        self._reports, joining = reports, self._joining
        joining.needs_reports = reports is not None and joining.needs_state
        self._fleet, self._router, self._health, self._clock = fleet, router, health, clock
        self._peer_decisions = peers = PeerDispatches(router, fleet, clock, self.groups, self.send)
        self._map_publisher, self._mirror = map_publisher, mirror
        self._handlers = {
            Dispatched: peers.dispatched,
            FirstToken: lambda peer, message: peers.first_token(peer, message.id),
            Finished: lambda peer, message: peers.finished(peer, message.id),
            EndedRequests: peers.ended,
            KeyGroupsRequest: peers.send_key_groups,
            KeyGroupsAnswer: peers.learn_key_groups,
            ResponseOwner: lambda _, owner: self.owners.remember_from_peer(
                owner.response_id, WorkerId(owner.worker)
            ),
            SessionForgotten: lambda _, message: router.session_forgotten_by_peer(message.session_key),
            OverridesChanged: self._on_overrides,
            Ejected: self._on_ejected,
            CacheCleared: self._on_cache_cleared,
            SnapshotRequest: self._on_snapshot_request,
            RecentPrompts: lambda _, recent: apply_recent_prompts(router, fleet, self.groups, recent),
            LearnedCosts: self._on_learned_costs,
            PlacedSessions: self._on_placed_sessions,
            KeyUsed: self._on_key_used,
            LimitsInUse: self._on_keys_refilling,
            RequestLost: self._on_request_lost,
            LostRequestsCleared: self._on_lost_requests_cleared,
            InSync: self._on_in_sync,
            **({} if reports is None else reports.handlers),
        }
        for kind in _PARTS_OF_STATES & self._handlers.keys():
            self._handlers[kind] = joining.noted(self._handlers[kind])
        fleet.subscribe_admin_overrides(self._overrides_changed)
        fleet.subscribe(self._fleet_changed)

    def share_limits(self, ring: KeyRing | None) -> None:
        """Let the limits of the named keys hold for all processes and gateways together."""
        self._ring = ring
        if ring is not None:
            ring.share(lambda use: self.publish(KeyUsed(*use)))

    def share_lost_requests(self, lost: LostRequests) -> None:
        """Let bodies that have lost workers be refused by all processes and gateways."""
        self._lost = lost
        lost.share = lambda loss: self.publish(_lost_message(loss, 0.0))
        lost.share_clear = lambda digest: self.publish(LostRequestsCleared(digest))

    def _on_request_lost(self, _: PeerId, message: RequestLost) -> None:
        if self._lost is not None and message.age_s >= 0:
            *fields, _ = msgspec.structs.astuple(message)
            self._lost.merge(Loss(*fields), message.age_s)

    def _on_lost_requests_cleared(self, _: PeerId, message: LostRequestsCleared) -> None:
        if self._lost is not None:
            self._lost.clear(message.digest, is_own=False)

    def _flush_soon(self, after_s: float = GATHER_S) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            soon = loop.call_soon
            # After one more poll: a request whose answer has arrived meanwhile has ended then and costs less.
            self._timer = loop.call_later(after_s, lambda: soon(lambda: soon(self._flush)))

    def _flush(self, *, everything: bool = False) -> None:
        if self._timer is not None:  # `state` flushes early: a timer left alone would start another chain
            self._timer.cancel()
        self._timer, now = None, self._clock.now()
        messages = self.own.take(now, everything=everything)
        if self.own.due_at is not None:
            self._flush_soon(max(0.0, self.own.due_at - now))
        if messages and self.mesh is not None:
            self.mesh.publish(*messages)
            self.mesh.flush()
        if messages and self.channel is not None:
            self.channel.publish(*messages)
            self.channel.flush()

    def send(self, peer: PeerId, *messages: SharedMessage) -> bool:
        """Send to one process. False if it is not linked."""
        link = self.mesh if isinstance(peer, int) else self.channel
        return link is not None and link.send(peer, *messages)

    def serve_admin(
        self, decisions: Callable[[int, str], list[dict[str, Any]]], audit: Callable[[], Any]
    ) -> None:
        """Answer the admin requests of the other processes with these functions."""

        async def answer_decisions(asked: bytes) -> bytes:
            limit, _, request_id = asked.decode().partition(" ")
            return msgspec.json.encode(self._named(decisions(int(limit), request_id)))

        async def answer_predictions(_: bytes) -> bytes:
            return msgspec.json.encode(audit())

        if self.mesh is not None:
            self.mesh.handle(_DECISIONS, answer_decisions)
            self.mesh.handle(_PREDICTIONS, answer_predictions)

    async def start(self) -> None:
        """Open the links to the other processes. Raises OSError."""
        if self.mesh is not None:
            await self.mesh.start(self)
        if self.channel is not None:
            await self.channel.start(self)
            asking = self._joining.ask_until_it_has_the_state(self._clock)
            self._tasks.add(asyncio.create_task(asking, name="state of the others"))

    async def wait_until_synced(self, timeout_s: float, join_timeout_s: float) -> None:
        """Wait for the others' state: `timeout_s` at most, with other gateways the longer of both times."""
        has_met_all = False
        try:
            async with asyncio.timeout(timeout_s if self.channel is None else max(timeout_s, join_timeout_s)):
                _, has_met_all = await asyncio.gather(
                    asyncio.sleep(0) if self.mesh is None else self.mesh.all_linked(),
                    asyncio.sleep(0, True) if self.channel is None else self.channel.joined(join_timeout_s),
                )
                if self._joining.is_waiting:
                    await self._joining.has_joined.wait()
                await (self._reports.settled() if self._reports is not None else asyncio.sleep(0))
        except TimeoutError:
            log.warning("process %d starts without the whole state of the others", self.number)
        self._joining.is_synced = True  # also after a timeout: no process could send the state
        if missing := self._missing():
            log.warning("starting without a link to process %s", ", ".join(map(str, missing)))
        if has_met_all:
            self._joining.needs_nothing()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._flush(everything=True)
        if self.mesh is not None:
            await self.mesh.aclose()
        if self.channel is not None:
            await self.channel.aclose()

    @property
    def gateways(self) -> int:
        """The number of gateways whose requests count here, this one included."""
        counted = [row for row in self.members() if row["state"] not in ("silent", "left")]
        return len({row["gateway"] for row in counted}) or 1

    def members(self) -> Sequence[Mapping[str, Any]]:
        """This process and those of other gateways; empty if the gateway shares with none."""
        return [] if self.channel is None else self.channel.describe()

    def notes(self) -> list[str]:
        """Notes for `/ready`: processes without a link, and a Redis that cannot be used."""
        notes = [f"process {self.number} has no link to process {number}" for number in self._missing()]
        return notes if self.channel is None else notes + self.channel.notes()

    def _missing(self) -> list[int]:
        return [] if self.mesh is None else sorted(set(self.mesh.peers) - set(self.mesh.linked_peers))

    # `PeerProcesses`

    async def decisions(self, limit: int, request_id: str, own: list[dict[str, Any]]) -> list[dict[str, Any]]:
        asked = f"{limit} {request_id}".encode()
        own = self._named(own)
        if self.mesh is None:
            return own
        answers = await self.mesh.request_all(_DECISIONS, asked, _REQUEST_TIMEOUT_S)
        return merge_decisions([own, *map(msgspec.json.decode, answers.values())], limit)

    def _named(self, decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**decision, "member": self.name} for decision in decisions]

    async def predictions(self, own: dict[str, Any]) -> dict[str, Any]:
        if self.mesh is None:
            return own
        answers = await self.mesh.request_all(_PREDICTIONS, b"", _REQUEST_TIMEOUT_S)
        return merge_predictions([own, *map(msgspec.json.decode, answers.values())])

    # `PeerListener`

    @property
    def is_synced(self) -> bool:
        return self._joining.is_synced

    def greeting(self, peer: PeerId) -> Sequence[Message]:
        messages: list[Message] = [*self.state()]
        if self._map_publisher is not None:
            messages += self._map_publisher.snapshot()
        return messages

    def state(self) -> Sequence[SharedMessage]:
        self._flush(everything=True)  # so that the state has everything that is not sent after it
        overrides = self._overrides.snapshot(self._fleet.admin_overrides())
        uses = [] if self._ring is None else self._ring.own_uses()
        losses = [] if self._lost is None else self._lost.losses()
        return [
            *([overrides] if overrides.entries else []),
            *(KeyUsed(*use) for use in uses),
            *(_lost_message(loss, age_s) for loss, age_s in losses),
            *self.own.unfinished(),
        ]

    def on_linked(self, peer: PeerId, *, is_synced: bool) -> None:
        if is_synced:
            self._joining.linked(peer)

    @property
    def has_reports(self) -> bool:
        return self._reports is not None

    def on_message(self, peer: PeerId, message: Message) -> None:
        if (handler := self._handlers.get(type(message))) is not None:
            handler(peer, message)
        elif self._map_publisher is not None:
            self._map_publisher.on_message(message)
        elif self._mirror is not None:
            self._mirror.caches.on_message(message)

    def on_state(self, peer: PeerId) -> None:
        self._peer_decisions.peer_gone(peer)

    def on_missed(self, peer: PeerId, message: SharedMessage) -> None:
        """A message of a batch of another gateway that did not arrive in time."""
        if isinstance(message, Dispatched):
            self._peer_decisions.missed(peer, message)
        elif isinstance(message, EndedRequests | ResponseOwner | SessionForgotten):
            self.on_message(peer, message)

    def on_peer_gone(self, peer: PeerId) -> None:
        self._peer_decisions.peer_gone(peer)
        if self._reports is not None:
            self._reports.on_peer_gone(peer)
        if self._ring is not None:
            self._ring.peer_gone(peer)
        self._joining.gone(peer)
        if peer == TRACKING_PROCESS and self._mirror is not None:
            self._mirror.caches.on_tracker_gone()

    # Message handlers

    def _on_snapshot_request(self, peer: PeerId, message: SnapshotRequest) -> None:
        name = f"state for process {peer}, only reports: {message.only_reports}"
        if any(task.get_name() == name for task in self._tasks):
            return  # it asks again because the answer is slow
        task = asyncio.create_task(self._send_snapshot(peer, message), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_snapshot(self, peer: PeerId, request: SnapshotRequest) -> None:
        """Send history, owners, learned costs, sessions, limits and LMCache's reports, then `InSync`."""
        for messages in () if request.only_reports else self._snapshot():
            if not self.send(peer, *messages):
                return
            await asyncio.sleep(0)  # so that streams are relayed in between
            if self.channel is not None and isinstance(peer, str):
                await self.channel.has_room()
        if self._reports is not None and isinstance(peer, str):
            await self._reports.send_states(peer)
        self.send(peer, InSync(request.only_reports))

    def _snapshot(self) -> Iterable[Sequence[SharedMessage]]:
        """What is sent together. New dispatches reach the process that joins anyway."""
        owners = [ResponseOwner(*owner) for owner in self.owners.latest(_OWNERS)]
        for start in range(0, len(owners), _TOGETHER):
            yield owners[start : start + _TOGETHER]
        yield learned_costs(self._router, self._fleet.workers())
        placed = self._sessions().placements()
        for start in range(0, len(placed), _TOGETHER):
            some = placed[start : start + _TOGETHER]
            ranks = [each[4] for each in some]
            yield (PlacedSessions([each[:4] for each in some], ranks=ranks),)
        models, latest = self._router.sessions.latest(_SESSIONS)
        for start in range(0, len(latest), _TOGETHER):
            yield (PlacedSessions([], models, [*latest[start : start + _TOGETHER]]),)
        if self._ring is not None:
            yield (LimitsInUse(self._ring.refilling()),)
        for recent in recent_prompts(self._router, self._fleet.workers()):
            yield (recent,)

    def _on_in_sync(self, peer: PeerId, message: InSync) -> None:
        self._joining.received(peer, only_reports=message.only_reports)
        log.info("process %d has received the state of process %s", self.number, peer)

    def _on_learned_costs(self, peer: PeerId, message: LearnedCosts) -> None:
        if peer == self._joining.source:
            apply_learned_costs(self._router, self._fleet, message)

    def _sessions(self) -> Session:
        strategy = self._router.strategy("", Session.name)
        assert isinstance(strategy, Session)
        return strategy

    def _on_placed_sessions(self, peer: PeerId, message: PlacedSessions) -> None:
        if peer == self._joining.source:
            ranks = message.ranks or [None] * len(message.placements)
            for (model, place, home, worker), rank in zip(message.placements, ranks, strict=False):
                self._sessions().adopt(model, place, WorkerId(home), WorkerId(worker), rank)
            latest = [(session, WorkerId(worker)) for session, worker in message.latest]
            self._router.sessions.adopt(message.models, latest)

    def _on_key_used(self, peer: PeerId, message: KeyUsed) -> None:
        if self._ring is not None:
            self._ring.used_elsewhere(peer, SharedUse(*msgspec.structs.astuple(message)))

    def _on_keys_refilling(self, peer: PeerId, message: LimitsInUse) -> None:
        if self._ring is not None and peer == self._joining.source and not self._is_charged:
            self._is_charged = True  # another answer has the same use
            for use in message.uses:
                self._ring.charge(*use)

    def _on_ejected(self, _: PeerId, message: Ejected) -> None:
        # Only a hint: the worker may be unreachable from there alone.
        with contextlib.suppress(NotFound):
            self._health.recheck(self._fleet.get(message.worker))

    def cache_cleared(self, worker: Worker, rank: int | None = None) -> None:
        """The cache of a worker was emptied through the admin API, or that of one rank by its own event.

        Each gateway reads the events itself.
        """
        if rank is None:
            self.publish(CacheCleared(worker.id))
        elif self.mesh is not None:
            self.mesh.publish(CacheCleared(worker.id, rank))

    def _on_cache_cleared(self, _: PeerId, message: CacheCleared) -> None:
        with contextlib.suppress(NotFound):
            worker = self._fleet.get(message.worker)
            if message.rank is None:
                self._fleet.report_cleared(worker, "was reset through another process")
            else:
                self._router.history_cleared(worker, message.rank)

    def _on_overrides(self, _: PeerId, message: OverridesChanged) -> None:
        if (overrides := self._overrides.merge(message, self._fleet.admin_overrides())) is not None:
            self._fleet.apply_admin_overrides(overrides)

    def _overrides_changed(self, worker: WorkerId, overrides: AdminOverrides) -> None:
        self.publish(self._overrides.changed(worker, overrides, self._clock.wall()))

    def _fleet_changed(self, change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.EJECTED and worker.ejection is not None:
            self.publish(Ejected(worker.id, worker.ejection.value))
        elif change in (FleetChange.CLEARED, FleetChange.STALE, FleetChange.RESTARTED):
            self.own.cache_cleared(worker.id)


def redis_channel(options: SharingOptions, gateway: bytes, process: int, clock: Clock) -> Channel | None:
    """The channel of one process; None if the gateway shares with no other. `gateway`: see `Channel`."""
    if not options.is_on:
        return None
    # Imported here because it loads Redis' client, which a gateway without sharing does not need.
    from kvroute.replicas.redis_link import RedisLink

    return Channel(
        options, gateway, process, clock, lambda channel, names: RedisLink(options, names, channel)
    )
