"""LMCache's reports between gateways: the one that they arrive at forwards them, the others follow them.

LMCache has one coordinator URL and one controller, so its reports arrive at one member of the fleet. Each
report that this member has applied is published in order, with the server's incarnation and number; the
others apply it with the same code, as if it had arrived there. So any of them can take over, with the map of
the one before.

What did not arrive shows in these numbers, with the next batch or heartbeat. Then the server's chunks do not
count, and its whole state is asked for; so does a member that joins. The copy of a state is inexact by the
batches that are applied while it is sent. Therefore the receiver applies them to the copy, too, and skips
what the copy says of their objects.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.index.map_trust import MapTrust
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.coordinator import BatchOutcome, Coordinator, ServerCopy
from kvroute.lmcache.membership import Doubt, LMCacheServer
from kvroute.replicas.messages import PeerId, SharedMessage
from kvroute.wire import lmcache_controller
from kvroute.wire.lmcache_server import (
    CacheEvents,
    CacheServerAlive,
    CacheServerEvents,
    CacheServerLeft,
    CacheServerState,
    CacheServerStateEnd,
    CacheServerStore,
    CacheServerWanted,
    ChunkRun,
    ControllerReport,
    FullSyncWanted,
    entries_of,
    runs_of,
)

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
"""Longest pause between two questions for the state of one server; no other member may have it either."""
_COPY_S: Final = 60.0
"""A copy that is not complete after this long is dropped."""
_STORE_BYTES: Final = 32_768
_MAX_RECENT: Final = 8192
"""Objects of recent batches that are kept for the beginning of a copy, whose sender may lack them."""
_NOT_ASKED: Final = (Doubt.FOREIGN_HASHES, Doubt.REGISTERED_AGAIN)
"""No member knows more: whether the server was restarted, its next batch shows."""
_NOT_FORWARDED: Final = (lmcache_controller.P2pLookup, lmcache_controller.FullSyncStatus)
"""Questions to the controller that change nothing."""


class ReportChannel(Protocol):
    """The messages to the other members: `replicas.channel.Channel`, or a simulated one."""

    @property
    def reporting_peers(self) -> Sequence[PeerId]:
        """The members that can send the state of LMCache's servers."""

    def publish(self, message: SharedMessage) -> None: ...

    def send(self, peer: PeerId, *messages: SharedMessage) -> bool: ...

    async def has_room(self) -> None: ...


@dataclass(slots=True)
class ReportCounts:
    """Totals since the start. Mutable: by `CacheReports`."""

    forwarded: int = 0
    followed: int = 0
    missed: int = 0
    """Times that batches which another member had forwarded did not arrive."""
    copied: int = 0
    """States of servers that were taken over from another member."""
    refused: int = 0
    """States that could not be: incomplete, or older than the map here."""


@dataclass(slots=True)
class _Copy:
    """A state that is arriving. Mutable: by `CacheReports`."""

    peer: PeerId
    map: ServerCopy
    began_at: float
    since: int
    """Pieces of batches that were applied before it began."""
    is_open: bool = False
    """Whether the recent batches were applied to it; from then on each one is."""
    messages: int = 0
    arrived: deque[CacheServerStore] = field(default_factory=deque)
    """What is not in the map yet."""
    end: CacheServerStateEnd | None = None


class CacheReports:
    """Forwards and follows the reports. An observer of the coordinator's and the controller's sockets.

    Mutable; belongs to one event loop. `run` asks for what is missing.
    """

    def __init__(
        self,
        index: CopyableChunkIndex,
        coordinator: Coordinator | None,
        controller: Controller | None,
        channel: ReportChannel,
        member: str,
        clock: Clock,
    ) -> None:
        """`member` is the id of this process among the members of the fleet."""
        self.counts = ReportCounts()
        self._member = member
        self._index = index
        self._coordinator = coordinator
        self._controller = controller
        self._channel = channel
        self._clock = clock
        self._recent: deque[CacheEvents] = deque()
        self._recent_objects = 0
        self._applied = 0
        """Pieces of batches that were applied since the start: the number after the last of `_recent`."""
        self._pieces: dict[str, tuple[int, int, int]] = {}
        """Server -> incarnation, number and next piece of a batch whose last piece has not come."""
        self._copies: dict[str, _Copy] = {}
        self._asked: dict[str, tuple[float, float]] = {}
        """Server -> when to ask for its state again, and the pause after that."""
        self._wanted: dict[tuple[PeerId, str], CacheServerWanted] = {}
        self._work = asyncio.Event()
        self._arrived = asyncio.Event()
        self._settled = asyncio.Event()
        self._sending = asyncio.Lock()
        self.handlers: Mapping[type, Callable[[PeerId, Any], object]] = {}
        """The messages of other members, and what handles them."""
        if coordinator is not None:
            self.handlers = {
                CacheServerEvents: self._on_events,
                CacheServerAlive: self._on_alive,
                CacheServerLeft: self._on_left,
                CacheServerWanted: self._on_wanted,
                CacheServerState: self._on_state,
                CacheServerStore: self._on_store,
                CacheServerStateEnd: self._on_state_end,
            }
        if controller is not None:
            self.handlers = {
                **self.handlers,
                ControllerReport: self._on_controller_report,
                FullSyncWanted: lambda _, message: controller.want_sync(
                    lmcache_controller.Sender(instance_id=message.instance_id, worker_id=message.worker_id)
                ),
            }

    # `ReportObserver`: what LMCache reports to this member

    def alive(self, server: str) -> None:
        instance = self._instance(server)
        if instance is None or not instance.registered:
            return
        self._channel.publish(
            CacheServerAlive(
                server,
                instance.address,
                instance.http_port,
                self._chunk_tokens(server),
                instance.incarnation,
                instance.last_seq,
                instance.trust is MapTrust.WHOLE and server not in self._pieces,
            )
        )
        self.counts.forwarded += 1

    def server_left(self, server: str) -> None:
        self._refuse(server, "the server has left")
        self._channel.publish(CacheServerLeft(server))
        self.counts.forwarded += 1

    def applied(self, batch: CacheEvents, *, is_last: bool) -> None:
        piece = self._next_piece(batch.instance_id, batch.incarnation, batch.seq, is_last=is_last)
        self._note(batch)
        self._channel.publish(
            CacheServerEvents(
                batch.instance_id,
                batch.incarnation,
                batch.seq,
                piece,
                is_last,
                batch.event_type,
                batch.tier,
                batch.backend,
                batch.shared,
                self._chunk_tokens(batch.instance_id),
                # How often a chunk is read does not change what is stored.
                [] if batch.event_type == "access" else runs_of(batch.entries),
            )
        )
        self.counts.forwarded += 1

    def handled(self, message: lmcache_controller.Message, payload: bytes) -> None:
        if not isinstance(message, _NOT_FORWARDED):
            self._channel.publish(ControllerReport(payload))
            self.counts.forwarded += 1

    # Other members

    def on_peer_gone(self, peer: PeerId) -> None:
        """A member has died or left: what LMCache reported through it does not count until it is reported
        elsewhere."""
        for server in [server for server, copy in self._copies.items() if copy.peer == peer]:
            self._refuse(server, "its sender is gone")
        if self._coordinator is not None:
            self._coordinator.member_gone(str(peer))
        if self._controller is not None:
            self._controller.member_gone(str(peer))

    async def send_states(self, peer: PeerId) -> None:
        """Send the state of every server, for a member that joins."""
        for instance in () if self._coordinator is None else self._coordinator.instances():
            await self._send_state(peer, instance)

    async def settled(self) -> None:
        """Wait until no copy is arriving."""
        while self._copies:
            self._settled.clear()
            await self._settled.wait()

    async def run(self) -> None:
        """Answer questions, apply copies, and ask for incomplete maps, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for work in (self._answer_questions, self._apply_copies, self._ask_each_second):
                group.create_task(work())

    async def _answer_questions(self) -> None:
        while await self._work.wait():
            self._work.clear()
            while self._wanted:
                peer, server = next(iter(self._wanted))
                await self._answer(peer, self._wanted.pop((peer, server)))

    async def _apply_copies(self) -> None:
        while await self._arrived.wait():
            self._arrived.clear()
            await self.apply_arrived()

    async def _ask_each_second(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            self.ask()

    def ask(self) -> None:
        """Ask one member for the state of each server whose map is incomplete here, if it is time."""
        now = self._clock.now()
        for server in [name for name, copy in self._copies.items() if now - copy.began_at > _COPY_S]:
            self._refuse(server, f"it took longer than {_COPY_S:.0f} s")
        instances = [] if self._coordinator is None else self._coordinator.instances()
        incomplete = [instance for instance in instances if instance.trust is not MapTrust.WHOLE]
        asked_ids = [instance.id for instance in incomplete if instance.id in self._asked]
        self._asked = {server: self._asked[server] for server in asked_ids}
        for instance in incomplete:
            self._ask(instance)

    def _ask(self, instance: LMCacheServer) -> None:
        now, server = self._clock.now(), instance.id
        at, pause = self._asked.get(server, (now, _FIRST_PAUSE_S))
        peers = self._channel.reporting_peers
        if now < at or not peers or instance.doubt in _NOT_ASKED or server in self._copies:
            return
        self._asked[server] = now + pause, min(2 * pause, _MAX_PAUSE_S)
        # Later any other one: the first may have missed the same batches.
        peer: PeerId = instance.reports_to
        if peer not in peers or pause > _FIRST_PAUSE_S:
            peer = random.choice(peers)
        wanted = CacheServerWanted(
            server, instance.incarnation, instance.last_seq, instance.doubt is not None
        )
        self._channel.send(peer, wanted)

    # Following

    def _on_alive(self, peer: PeerId, message: CacheServerAlive) -> None:
        assert self._coordinator is not None
        self.counts.followed += 1
        expected = self._pieces.get(message.server)
        if expected is not None and message.is_whole and expected[:2] == (message.incarnation, message.seq):
            self._miss(message.server, expected)  # the last pieces of the last batch
        is_needed = self._coordinator.follow(message, str(peer))
        instance = self._instance(message.server)
        if is_needed and instance is not None:
            self._ask(instance)

    def _on_left(self, peer: PeerId, message: CacheServerLeft) -> None:
        assert self._coordinator is not None
        self._refuse(message.server, "the server has left")
        self._coordinator.deregister(message.server)

    def _on_events(self, peer: PeerId, message: CacheServerEvents) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        batch = CacheEvents(
            message.server,
            message.incarnation,
            message.seq,
            message.event_type,
            message.tier,
            message.backend,
            entries_of(message.runs),
            message.shared,
        )
        expected = self._pieces.get(message.server)
        if message.piece == 0:
            if expected is not None and expected[:2] != (message.incarnation, message.seq):
                self._miss(message.server, expected)  # the last pieces of the batch before
            if coordinator.admit(batch, str(peer)) is not BatchOutcome.APPLIED:
                return
        elif expected != (message.incarnation, message.seq, message.piece):
            instance = self._instance(message.server)
            at = (-1, 0) if instance is None else _position(instance)
            if expected is not None or at < (message.incarnation, message.seq):
                self._miss(message.server, (message.incarnation, message.seq))
            return  # otherwise it was in the state of another member
        self.counts.followed += 1
        self._next_piece(message.server, message.incarnation, message.seq, is_last=message.is_last)
        coordinator.learn_chunk_size(message.server, message.chunk_tokens)
        coordinator.apply(batch)
        self._note(batch)
        instance = self._instance(message.server)
        if instance is not None and instance.doubt is not None:
            self._ask(instance)

    def _miss(self, server: str, batch: tuple[int, ...]) -> None:
        """A piece of the batch with this incarnation and number did not arrive."""
        assert self._coordinator is not None
        self._pieces.pop(server, None)
        copy = self._copies.get(server)
        if copy is not None and batch[:2] > copy.map.sent_position:
            self._refuse(server, "a later batch did not arrive")
        self.counts.missed += 1
        self._coordinator.distrust(server)

    def _next_piece(self, server: str, incarnation: int, seq: int, *, is_last: bool) -> int:
        """The number of this piece; the next one is expected, if it is not the last one."""
        expected = self._pieces.pop(server, None)
        piece = expected[2] if expected is not None and expected[:2] == (incarnation, seq) else 0
        if not is_last:
            self._pieces[server] = incarnation, seq, piece + 1
        return piece

    def _note(self, batch: CacheEvents) -> None:
        self._applied += 1
        self._recent.append(batch)
        self._recent_objects += len(batch.entries) + 1
        while self._recent_objects > _MAX_RECENT:
            self._recent_objects -= len(self._recent.popleft().entries) + 1
        for copy in list(self._copies.values()):
            if copy.is_open and (problem := copy.map.apply(batch)):
                self._refuse(copy.map.state.server, problem)

    def _on_controller_report(self, peer: PeerId, message: ControllerReport) -> None:
        assert self._controller is not None
        try:
            decoded = lmcache_controller.decode(message.payload)
        except WireError as error:
            log.warning("a report of LMCache that another gateway forwarded was refused: %s", error)
            return
        self.counts.followed += 1
        if self._controller.follow(decoded, str(peer)):
            self._channel.send(peer, FullSyncWanted(decoded.instance_id, decoded.worker_id))

    # Copies

    def _on_wanted(self, peer: PeerId, message: CacheServerWanted) -> None:
        self._wanted[peer, message.server] = message
        self._work.set()

    async def _answer(self, peer: PeerId, wanted: CacheServerWanted) -> None:
        instance = self._instance(wanted.server)
        if instance is not None and (wanted.has_doubt or _position(instance) > _position(wanted)):
            await self._send_state(peer, instance)

    async def _send_state(self, peer: PeerId, instance: LMCacheServer) -> None:
        """Send all that is known of a server. Nothing if the map here is incomplete, too."""
        async with self._sending:
            if self._instance(instance.id) is not instance:
                return  # it has left while another state was sent
            server, incarnation, memory = instance.id, instance.incarnation, instance.memory
            if incarnation is None or instance.doubt is not None or server in self._pieces:
                return  # the receiver asks again, if this process is only in the middle of a batch
            state = CacheServerState(
                server,
                instance.address if instance.registered else "",
                instance.http_port,
                instance.scheme.chunk_tokens,
                instance.scheme_known,
                incarnation,
                instance.last_seq,
                instance.reports_to,
                instance.is_reporting,
            )
            self._channel.send(peer, state)
            messages = 0
            for store in _stores_of(instance):
                if store is not None:
                    messages += 1
                    if not self._channel.send(peer, store):
                        return
                    await self._channel.has_room()
                await asyncio.sleep(0)
            is_valid = instance.incarnation == incarnation and instance.doubt is None
            is_valid = is_valid and instance.memory is memory and self._instance(server) is instance
            self._channel.send(peer, CacheServerStateEnd(server, messages, is_valid))

    def _on_state(self, peer: PeerId, state: CacheServerState) -> None:
        instance, copy = self._instance(state.server), self._copies.get(state.server)
        position = state.incarnation, state.seq
        if instance is not None and instance.doubt is None and _position(instance) >= position:
            return  # the answer to a question that another member has answered
        if copy is not None and copy.peer != peer:
            return
        self._refuse(state.server, "its sender has begun again")
        assert self._coordinator is not None
        copied = self._coordinator.begin_copy(state)
        self._copies[state.server] = _Copy(peer, copied, self._clock.now(), self._applied)

    def _on_store(self, peer: PeerId, message: CacheServerStore) -> None:
        if (copy := self._copies.get(message.server)) is not None and copy.peer == peer:
            copy.messages += 1
            copy.arrived.append(message)
            self._arrived.set()

    def _on_state_end(self, peer: PeerId, message: CacheServerStateEnd) -> None:
        if (copy := self._copies.get(message.server)) is not None and copy.peer == peer:
            copy.end = message
            self._arrived.set()

    async def apply_arrived(self) -> None:
        """Apply what has arrived of the copies, in steps of about 1 ms."""
        for copy in list(self._copies.values()):
            try:
                for _ in self._steps(copy):
                    await asyncio.sleep(0)
            except ValueError as error:
                log.warning("a state that another gateway has sent cannot be read: %s", error)
                self._refuse(copy.map.state.server, "it cannot be read")

    def _steps(self, copy: _Copy) -> Iterator[None]:
        """Apply what has arrived; yields after each step. Ends early when the copy is refused."""
        server = copy.map.state.server
        while copy.arrived:
            store = copy.arrived.popleft()
            if not copy.is_open and not store.backend:
                # The recent batches need the parts of chunks: their objects may not show all.
                copy.map.begin(store)
                yield from self._apply_recent(copy)
                if self._copies.get(server) is not copy:
                    return
            for _ in copy.map.restore(store):
                yield
                if self._copies.get(server) is not copy:
                    return
        if copy.end is not None and self._copies.get(server) is copy:
            self._finish(copy, copy.end)

    def _apply_recent(self, copy: _Copy) -> Iterator[None]:
        """Apply the batches that the sender of a state may not have applied when it began."""
        server, problem = copy.map.state.server, ""
        number = min(copy.since, self._applied - len(self._recent))
        while not problem and number < self._applied:
            index = number - (self._applied - len(self._recent))
            if index < 0:
                problem = "LMCache reports too much at once"
            elif number >= copy.since or self._recent[index].instance_id == server:
                problem = copy.map.apply(self._recent[index])
                yield
            number += 1
        copy.is_open = True
        if problem and self._copies.get(server) is copy:
            self._refuse(server, problem)

    def _finish(self, copy: _Copy, end: CacheServerStateEnd) -> None:
        coordinator, server = self._coordinator, copy.map.state.server
        assert coordinator is not None
        instance = self._instance(server)
        is_older = instance is not None and _position(instance) > copy.map.position
        if is_older or not copy.is_open or not end.is_valid or end.messages != copy.messages:
            self._refuse(server, "it is older than the map here" if is_older else "it is incomplete")
            return
        del self._copies[server]
        self._settled.set()
        member = copy.map.state.reports_to or str(copy.peer)
        coordinator.adopt(copy.map, "" if member == self._member else member)
        self.counts.copied += 1
        instance, open_batch = self._instance(server), self._pieces.get(server)
        if open_batch is not None and instance is not None and open_batch[:2] != _position(instance):
            del self._pieces[server]

    def _refuse(self, server: str, reason: str) -> None:
        """Drop a copy that is arriving, if there is one. What it has added to L2 pools stays; it is right."""
        copy = self._copies.pop(server, None)
        if copy is None:
            return
        copy.map.memory.clear()
        self._settled.set()
        self.counts.refused += 1
        log.info("a copy of the map of LMCache server %s was refused: %s", server, reason)

    def _chunk_tokens(self, server: str) -> int:
        instance = self._instance(server)
        return instance.scheme.chunk_tokens if instance is not None and instance.scheme_known else 0

    def _instance(self, server: str) -> LMCacheServer | None:
        return None if self._coordinator is None else self._coordinator.instance(server)


def _position(of: LMCacheServer | CacheServerWanted) -> tuple[int, int]:
    """Incarnation and number of the last batch of a server."""
    seq = of.seq if isinstance(of, CacheServerWanted) else of.last_seq
    return (-1 if of.incarnation is None else of.incarnation), seq


def _stores_of(instance: LMCacheServer) -> Iterator[CacheServerStore | None]:
    """The content of a server's stores; None after a step of about 1 ms without a message."""
    pools = [(pool.chunks, backend, not pool.owner) for backend, pool in instance.pools.items()]
    for chunks, backend, shared in [(instance.memory, "", False), *pools]:
        yield CacheServerStore(instance.id, backend, shared, chunks.layouts(), b"", [])
        packed, runs, size = bytearray(), list[ChunkRun](), 0
        for entries, some in chunks.contents():
            packed += entries
            runs += some
            size += len(entries) + sum(len(run.keys) for run in some)
            if size >= _STORE_BYTES:
                yield CacheServerStore(instance.id, backend, shared, [], bytes(packed), runs)
                packed, runs, size = bytearray(), [], 0
            else:
                yield None
        if size:
            yield CacheServerStore(instance.id, backend, shared, [], bytes(packed), runs)
