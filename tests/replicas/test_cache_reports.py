"""Members that follow one LMCache: whatever is lost, none has a chunk that the server does not hold."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.clocks import ManualClock

from kvroute.blocks.chunks import ChunkScheme, PromptChunks, chunk_keys, chunk_names
from kvroute.blocks.keys import Tier
from kvroute.index.map_trust import MapTrust
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.coordinator import BatchOutcome, Coordinator
from kvroute.lmcache.membership import HeldChunks, ServedWorker
from kvroute.lmcache.options import ControllerOptions, LMCacheOptions
from kvroute.replicas.cache_reports import CacheReports
from kvroute.replicas.envelope import decode_payload, encode_payloads
from kvroute.wire import lmcache_controller as wire
from kvroute.wire.lmcache_server import CacheEvents, ChunkRun, ServerRegistration, ServerStatus, entries_of

MODEL = "/models/tiny"
SCHEME = ChunkScheme(chunk_tokens=4)
ONE_RANK = 0x01000100
TWO_RANKS = (0x02000200, 0x02010201)
NAMES = {number: chunk_names([number, 1, 2, 3], SCHEME)[0] for number in range(40)}
_decode = msgspec.json.Decoder(list[CacheEvents]).decode


class Server:
    """An LMCache server, and the objects that it really holds: (chunk, rank) in L1 and in L2."""

    def __init__(self, ranks: Iterable[int] = (ONE_RANK,)) -> None:
        self.ranks = tuple(ranks)
        self.incarnation, self.seq = 1000, 0
        self.held: dict[str, set[tuple[int, int]]] = {"l1": set(), "l2": set()}

    def batch(self, event_type: str, tier: str = "l1", numbers: Iterable[int] = ()) -> CacheEvents:
        self.seq += 1
        objects = [(number, rank) for number in numbers for rank in self.ranks]
        if event_type == "store":
            self.held[tier].update(objects)
        elif event_type == "delete":
            self.held[tier].difference_update(objects)
        entries = [
            {
                "key": {
                    "chunk_hash_hex": NAMES[number].hex(),
                    "model_name": MODEL,
                    "kv_rank": rank,
                    "object_group_id": 0,
                    "cache_salt": "",
                }
            }
            for number, rank in objects
        ]
        body = {
            "instance_id": "w",
            "incarnation": self.incarnation,
            "seq": self.seq,
            "event_type": event_type,
            "tier": tier,
            "backend": "dram" if tier == "l1" else "resp",
            "entries": entries,
            "shared": tier == "l2",
        }
        (batch,) = _decode(json.dumps([body]))
        return batch


class Bus:
    """The other members' mailboxes; `loses(to)` says whether the next message is lost."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.loses = lambda to: False

    def post(self, sender: str, to: str, message: Any) -> None:
        if to in self.members and not self.loses(to):
            (payload,) = encode_payloads([message])
            ((decoded,), unknown) = decode_payload(payload)
            assert not unknown
            self.members[to].inbox.append((sender, decoded))

    async def pump(self, *names: str) -> None:
        """Deliver all messages, or those to the named members, and let each answer."""
        is_busy = True
        while is_busy:
            is_busy = False
            for member in [self.members[name] for name in names or list(self.members)]:
                while member.inbox:
                    is_busy = True
                    sender, message = member.inbox.pop(0)
                    member.reports.handlers[type(message)](sender, message)
                    await member.reports.apply_arrived()
                while member.reports._wanted:
                    is_busy = True
                    (peer, server), wanted = next(iter(member.reports._wanted.items()))
                    del member.reports._wanted[peer, server]
                    await member.reports._answer(peer, wanted)


class Member:
    """One gateway: its index, coordinator, controller and reports."""

    def __init__(self, bus: Bus, name: str, clock: ManualClock) -> None:
        self.bus, self.name = bus, name
        self.inbox: list[tuple[str, Any]] = []
        self.index = CopyableChunkIndex()
        self.coordinator = Coordinator(
            self.index, clock, LMCacheOptions(coordinator={"chunk_tokens": 4, "heartbeat_timeout_s": 1e9})
        )
        self.coordinator.worker_changed(ServedWorker("w", "10.0.0.1", (0,), frozenset({MODEL})))
        self.controller = Controller(self.index, clock, ControllerOptions(chunk_tokens=4))
        self.controller.add_slot(1, "w")
        self.reports = CacheReports(self.index, self.coordinator, self.controller, self, name, clock)
        bus.members[name] = self

    # `ReportChannel`

    @property
    def reporting_peers(self) -> list[str]:
        return [name for name in self.bus.members if name != self.name]

    def publish(self, message: Any) -> None:
        for name in self.reporting_peers:
            self.bus.post(self.name, name, message)

    def send(self, peer: str, *messages: Any) -> bool:
        for message in messages:
            self.bus.post(self.name, peer, message)
        return peer in self.bus.members

    async def has_room(self) -> None: ...

    # What LMCache does at the sockets

    def beat(self) -> None:
        """A heartbeat; if the member does not know the server, its registration."""
        if not self.coordinator.heartbeat("w"):
            self.coordinator.register(ServerRegistration("10.0.0.1", 8080, "w"))
            self.coordinator.status("w", ServerStatus(4))
        self.reports.alive("w")

    def report(self, *pieces: CacheEvents) -> None:
        if self.coordinator.admit(pieces[0]) is BatchOutcome.APPLIED:
            for number, piece in enumerate(pieces, start=1):
                self.coordinator.apply(piece)
                self.reports.applied(piece, is_last=number == len(pieces))

    def say(self, message: wire.Message) -> Any:
        """A message to the controller; returns the reply."""
        reply = self.controller.handle(message)
        self.reports.handled(message, wire.encode(message))
        return reply

    # What routing sees

    @property
    def trust(self) -> MapTrust:
        instance = self.coordinator.instance("w")
        return MapTrust.NONE if instance is None else instance.trust

    def seen(self) -> tuple[set[int], set[int]]:
        """The chunks that the worker's prompts find in L1, and in L2 alone."""
        found: tuple[set[int], set[int]] = (set(), set())
        for number in NAMES:
            l1, l2 = self.index.match(PromptChunks([number, 1, 2, 3]), "", {}).get(0, (0, 0))
            if l1 or l2:
                found[0 if l1 else 1].add(number)
        return found


def whole(server: Server, tier: str) -> set[int]:
    held = server.held[tier]
    return {number for number in NAMES if all((number, rank) in held for rank in server.ranks)}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture
def trio(bus: Bus, clock: ManualClock) -> list[Member]:
    return [Member(bus, name, clock) for name in "abc"]


@pytest.mark.parametrize("ranks", [(ONE_RANK,), TWO_RANKS], ids=["one rank", "two ranks"])
async def test_every_member_has_the_map_of_the_one_that_lmcache_reports_to(trio, bus, ranks):
    server, (one, *others) = Server(ranks), trio
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(10)))
    one.report(server.batch("store", "l2", range(12)))
    one.report(server.batch("delete", "l1", range(3)))
    one.report(server.batch("access", "l1", range(5, 7)))
    await bus.pump()

    for member in trio:
        assert member.trust is MapTrust.WHOLE
        assert member.seen() == (set(range(3, 10)), {0, 1, 2, 10, 11})
    assert [each.reports.counts.missed + each.reports.counts.copied for each in others] == [0, 0]


async def test_chunks_of_a_lost_member_count_again_after_the_next_batch_elsewhere(trio, bus):
    server, (one, two, three) = Server(), trio
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(5)))
    await bus.pump()

    del bus.members["a"]
    for member in (two, three):
        member.reports.on_peer_gone("a")
        assert (member.trust, member.seen()) == (MapTrust.NONE, (set(), set()))
    assert not two.coordinator.heartbeat("w"), "the server shall register, and report its capacity"
    two.beat()
    await bus.pump()
    assert two.seen() == three.seen() == (set(), set())
    two.report(server.batch("config"))
    await bus.pump()

    for member in (two, three):
        assert (member.trust, member.seen()[0]) == (MapTrust.WHOLE, set(range(5)))


async def test_batches_that_died_with_a_member_leave_nothing_false(trio, bus):
    server, (one, two, three) = Server(), trio
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(5)))
    await bus.pump()
    bus.loses = lambda to: True
    one.report(server.batch("delete", "l1", range(4)))
    bus.loses = lambda to: False
    del bus.members["a"]
    for member in (two, three):
        member.reports.on_peer_gone("a")

    two.beat()
    two.report(server.batch("store", "l1", [7]))
    await bus.pump()

    for member in (two, three):
        assert (member.trust, member.seen()[0]) == (MapTrust.PARTIAL, {7})


@pytest.mark.parametrize("ranks", [(ONE_RANK,), TWO_RANKS], ids=["one rank", "two ranks"])
async def test_a_member_that_joins_gets_the_map_while_batches_go_on(bus, clock, ranks):
    server, one, two = Server(ranks), Member(bus, "a", clock), Member(bus, "b", clock)
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(20)))
    one.report(server.batch("store", "l2", range(25)))
    await bus.pump()
    late = Member(bus, "c", clock)
    one.report(server.batch("store", "l1", [20]))

    await two.reports.send_states("c")
    one.report(server.batch("delete", "l1", range(10)))
    await bus.pump()

    assert late.trust is MapTrust.WHOLE
    assert late.seen() == one.seen() == (set(range(10, 21)), set(range(10)) | set(range(21, 25)))
    for member in (one, two, late):
        instance = member.coordinator.instance("w")
        assert instance.memory.objects == len(server.held["l1"])
    assert late.reports.counts.copied == 1


async def test_a_member_started_again_takes_over_with_the_map_of_the_others(trio, bus, clock):
    server, (one, two, _) = Server(), trio
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(5)))
    await bus.pump()
    del bus.members["a"]
    for member in trio[1:]:
        member.reports.on_peer_gone("a")
    again = Member(bus, "A", clock)
    again.beat()
    again.report(server.batch("config"))
    assert again.trust is MapTrust.PARTIAL
    await bus.pump()

    again.reports.ask()
    await bus.pump()

    for member in (again, two):
        assert (member.trust, member.seen()[0]) == (MapTrust.WHOLE, set(range(5)))


async def test_a_server_that_leaves_while_its_state_is_sent_stays_away(bus, clock):
    one, two = Member(bus, "a", clock), Member(bus, "b", clock)
    server = Server()
    one.beat()
    one.report(server.batch("store", numbers=range(5)))
    two.inbox.clear()
    instance = one.coordinator.instance("w")
    assert instance is not None

    await one.reports._sending.acquire()
    sending = asyncio.ensure_future(one.reports._send_state("b", instance))
    await asyncio.sleep(0)
    one.coordinator.deregister("w")
    one.reports.server_left("w")
    one.reports._sending.release()
    await sending
    await bus.pump()

    assert two.trust is MapTrust.NONE
    assert two.seen() == (set(), set())


async def test_a_state_from_before_a_missed_batch_is_refused(trio, bus):
    server, (one, two, three) = Server(), trio
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", [1]))
    await bus.pump()
    bus.loses = lambda to: to == "c"
    one.report(server.batch("delete", "l1", [1]))
    bus.loses = lambda to: to == "a"  # the question of the third one
    one.report(server.batch("store", "l1", [2]))
    await bus.pump("c")

    await two.reports.send_states("c")  # without the last two batches, which it has not read
    await bus.pump("c")

    assert (three.trust, three.seen()[0]) == (MapTrust.PARTIAL, {2})
    assert three.reports.counts.refused == 1


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO)


async def begin_of_copy(bus: Bus, one: Member, late: Member) -> list:
    """The messages of a copy, without its last one, have arrived at `late`; returns the last one."""
    await one.reports.send_states(late.name)
    end = late.inbox.pop()
    await bus.pump(late.name)
    assert late.reports._copies
    return [end]


async def test_a_refused_copy_leaves_the_shared_pools_as_they_are(bus, clock, caplog):
    server, one, late = Server(), Member(bus, "a", clock), Member(bus, "b", clock)
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(4)))
    one.report(server.batch("store", "l2", range(8)))
    await bus.pump()
    late.coordinator.distrust("w")  # as if it had missed a piece
    one.report(server.batch("store", "l2", [8]))  # known here, whatever becomes of the copy
    await bus.pump("b")
    one.inbox.clear()  # the question of the other one
    await begin_of_copy(bus, one, late)

    late.reports.on_peer_gone("a")  # the copy is refused
    late.beat()
    late.report(server.batch("config"))

    assert late.reports.counts.refused == 1
    assert "was refused: its sender is gone" in caplog.text
    assert late.seen() == (set(), set(range(9)))


async def test_a_copy_is_whole_after_any_number_of_batches_meanwhile(bus, clock):
    server, one, late = Server(), Member(bus, "a", clock), Member(bus, "b", clock)
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(20)))
    one.report(server.batch("store", "l2", range(25)))
    late.inbox.clear()
    end = await begin_of_copy(bus, one, late)

    one.report(server.batch("delete", "l1", range(10)))
    one.report(server.batch("delete", "l2", range(5)))
    for _ in range(600):  # more objects than `_MAX_RECENT`
        one.report(server.batch("store", "l1", range(20, 40)))
    await bus.pump()
    late.inbox += end
    await bus.pump()

    assert late.reports.counts.refused == 0
    assert (late.trust, late.seen()) == (MapTrust.WHOLE, one.seen())
    assert late.coordinator.instance("w").memory.objects == len(server.held["l1"])


@pytest.mark.parametrize("ranks", [(ONE_RANK,), TWO_RANKS], ids=["one rank", "two ranks"])
async def test_a_copy_says_nothing_of_objects_that_have_changed_meanwhile(bus, clock, ranks):
    server, one, late = Server(ranks), Member(bus, "a", clock), Member(bus, "b", clock)
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(10)))
    one.report(server.batch("store", "l2", range(20)))
    await bus.pump()
    late.coordinator.distrust("w")
    await one.reports.send_states("b")
    copied, late.inbox = late.inbox, []

    one.report(server.batch("delete", "l1", range(3)))
    one.report(server.batch("delete", "l2", range(15)))
    late.inbox, changes = [copied[0]], late.inbox
    await bus.pump("b")  # the state begins
    late.inbox = changes
    await bus.pump("b")  # the deletions overtake the rest of it
    late.inbox = copied[1:]
    await bus.pump("b")

    assert late.trust is MapTrust.WHOLE
    assert late.seen() == one.seen() == (set(range(3, 10)), set(range(15, 20)))
    assert late.coordinator.instance("w").memory.objects == len(server.held["l1"])


async def test_a_copy_that_lacks_a_batch_is_refused_and_asked_for_again(bus, clock, caplog):
    server, one, late = Server(), Member(bus, "a", clock), Member(bus, "b", clock)
    one.beat()
    one.report(server.batch("config"))
    one.report(server.batch("store", "l1", range(5)))
    late.inbox.clear()
    end = await begin_of_copy(bus, one, late)
    waiting = asyncio.ensure_future(late.reports.settled())

    bus.loses = lambda to: True
    one.report(server.batch("delete", "l1", [0]))
    bus.loses = lambda to: False
    one.report(server.batch("store", "l1", [5]))
    await bus.pump()
    assert "was refused: batches between" in caplog.text
    await waiting
    late.inbox += end
    clock.time += 2
    late.reports.ask()
    await bus.pump()

    assert late.reports.counts.refused == 1
    assert (late.trust, late.seen()[0]) == (MapTrust.WHOLE, set(range(1, 6)))


@pytest.mark.parametrize("ranks", [(ONE_RANK,), TWO_RANKS], ids=["one rank", "two ranks"])
def test_a_store_is_copied_in_small_steps(ranks):
    """A step of 512 chunks takes 0.5 to 2 ms."""
    index, copied = CopyableChunkIndex(), CopyableChunkIndex()
    held, copy = HeldChunks(index, Tier.L1), HeldChunks(copied, Tier.L1)
    number = 20_000
    for rank in ranks:
        keys = array("Q", range(1, number + 1)).tobytes()
        held.store(SCHEME, entries_of([ChunkRun(MODEL, rank, 0, "", keys)]))

    for _ in copy.restore(SCHEME, held.layouts(), b"", []):
        pass
    for entries, runs in held.contents():
        assert len(entries) // 9 + sum(len(run.keys) // 8 for run in runs) <= 512
    packed = b"".join(entries for entries, _ in held.contents())
    all_runs = [run for _, runs in held.contents() for run in runs]
    before = 0
    for _ in copy.restore(SCHEME, [], packed, all_runs):
        assert copy.objects - before <= 512
        before = copy.objects

    assert copy.objects == held.objects == number * len(ranks)
    assert copied.size().chunks == number


async def test_a_lost_piece_of_a_batch_is_missed_and_asked_for(trio, bus, clock):
    server, (one, two, three) = Server(), trio
    one.beat()
    one.report(server.batch("config"))
    first, second, third = (server.batch("store", "l1", numbers) for numbers in ([1], [2], [3]))
    pieces = [msgspec.structs.replace(each, seq=2) for each in (first, second, third)]
    server.seq = 2
    await bus.pump()
    one.coordinator.admit(pieces[0])
    for number, piece in enumerate(pieces):
        bus.loses = lambda to, number=number: (to, number) in {("b", 1), ("c", 2)}
        one.coordinator.apply(piece)
        one.reports.applied(piece, is_last=number == 2)
    bus.loses = lambda to: False
    await bus.pump()
    assert (two.reports.counts.missed, three.trust) == (1, MapTrust.WHOLE)

    one.beat()  # only this shows that the last piece is missing
    await bus.pump()
    for member in (two, three):
        clock.time += 2
        member.reports.ask()
        await bus.pump()

    for member in trio:
        assert (member.trust, member.seen()[0]) == (MapTrust.WHOLE, {1, 2, 3})


class Lossy(RuleBasedStateMachine):
    """Reports reach members by chance, through a member that changes; copies are made at any time."""

    @initialize(ranks=st.sampled_from([(ONE_RANK,), TWO_RANKS]))
    def begin(self, ranks: tuple[int, ...]) -> None:
        self.clock, self.bus, self.server = ManualClock(0.0), Bus(), Server(ranks)
        for name in "abc":
            Member(self.bus, name, self.clock)
        self.started, self.at, self.is_lost = 3, "a", False
        self.member.beat()
        self.member.report(self.server.batch("config"))
        self.settle()

    @property
    def member(self) -> Member:
        """The one that LMCache reports to."""
        return self.bus.members[self.at]

    def settle(self) -> None:
        asyncio.run(self.bus.pump())

    @rule(
        kind=st.sampled_from(["store", "store", "delete", "access"]),
        tier=st.sampled_from(["l1", "l2"]),
        numbers=st.sets(st.integers(0, 39), min_size=1, max_size=6),
        lost=st.sets(st.integers(0, 2)),
    )
    def report(self, kind: str, tier: str, numbers: set[int], lost: set[int]) -> None:
        names = sorted(self.bus.members)
        self.bus.loses = {names[number] for number in lost}.__contains__
        self.member.report(self.server.batch(kind, tier, numbers))
        self.bus.loses = lambda to: False

    @rule()
    def beat(self) -> None:
        self.member.beat()
        self.settle()
        known = self.member.coordinator.instance("w")
        for member in self.bus.members.values():
            if member.trust is MapTrust.WHOLE:
                assert member.coordinator.instance("w").last_seq >= known.last_seq, (
                    "it knows that it is behind"
                )

    @rule()
    def deliver(self) -> None:
        self.settle()

    @rule()
    def ask(self) -> None:
        self.clock.time += 40
        for member in list(self.bus.members.values()):
            member.reports.ask()

    @rule(numbers=st.sets(st.integers(0, 39), max_size=3))
    def a_report_is_lost_for_all(self, numbers: set[int]) -> None:
        self.server.batch("delete", "l1", numbers)
        self.is_lost = True

    @rule(to=st.integers(0, 2))
    def lmcache_reports_elsewhere(self, to: int) -> None:
        self.settle()
        self.at = sorted(self.bus.members)[to % len(self.bus.members)]

    @rule()
    def the_member_dies(self) -> None:
        dead = self.at
        del self.bus.members[dead]
        self.started += 1
        joined = Member(self.bus, f"m{self.started:03}", self.clock)
        for member in self.bus.members.values():
            member.inbox = [each for each in member.inbox if each[0] != dead]
            if member is not joined:
                member.reports.on_peer_gone(dead)
        self.at = sorted(self.bus.members)[0]
        self.member.beat()

    @invariant()
    def a_whole_map_is_right(self) -> None:
        if not hasattr(self, "server"):
            return
        behind = [member for member in self.bus.members.values() if member.inbox]
        for member in self.bus.members.values():
            instance = member.coordinator.instance("w")
            if instance is None or behind or instance.last_seq != self.server.seq:
                continue  # it cannot know yet
            if member.trust is not MapTrust.NONE:
                assert member.seen()[0] <= whole(self.server, "l1"), "a chunk that the server does not hold"
            if member.trust is MapTrust.WHOLE and "w" not in member.reports._pieces:
                assert member.seen()[0] == whole(self.server, "l1")

    def teardown(self) -> None:
        """At the end everything heals, if no report was lost for all."""
        if not hasattr(self, "server"):
            return
        self.settle()
        for _ in range(12):
            self.member.beat()
            self.member.report(self.server.batch("config"))
            self.settle()
            self.ask()
            self.settle()
        holders = [m for m in self.bus.members.values() if m.trust is MapTrust.WHOLE]
        for member in holders:
            assert member.seen()[0] == whole(self.server, "l1")
        assert len(holders) in (0, len(self.bus.members))


Lossy.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestLossy = Lossy.TestCase


class InProcess:
    """An in-process LMCache: the chunks that it holds, and the messages that it sends."""

    def __init__(self) -> None:
        self.sender = {"instance_id": "w", "worker_id": 0}
        self.address = {"ip": "10.0.0.1", "port": 7600}
        self.held: set[int] = set()
        self.seq = 0

    def register(self, to: Member) -> None:
        to.say(wire.Register(**self.sender, **self.address))

    def operations(self, kind: Any, *firsts: int) -> wire.KvOperations:
        keys = [self.key(to_key) for to_key in firsts]
        self.held = self.held | set(keys) if kind == "admit" else self.held - set(keys)
        operations = [wire.Operation(kind, key, self.seq + place) for place, key in enumerate(keys)]
        self.seq += len(keys)
        return wire.KvOperations(**self.sender, location="LocalCPUBackend", operations=operations)

    def key(self, first: int) -> int:
        scheme = Controller(CopyableChunkIndex(), ManualClock(), ControllerOptions(chunk_tokens=4)).scheme
        return chunk_keys([first, 1, 2, 3], scheme)[0]

    def beat(self, to: Member) -> bool:
        """A heartbeat, and the full synchronisation if the reply asks for it. Whether it did."""
        reply = to.say(wire.Heartbeat(**self.sender, **self.address))
        if not reply.commands:
            return False
        what = {**self.sender, "location": "LocalCPUBackend", "sync_id": "s"}
        to.say(wire.FullSyncStart(**what, total_keys=len(self.held), batch_count=1))
        to.say(wire.FullSyncBatch(**what, batch_id=0, keys=sorted(self.held)))
        to.say(wire.FullSyncEnd(**what, actual_total_keys=len(self.held)))
        return True


def in_process(member: Member) -> set[int]:
    """The chunks that the worker's prompts find, by the controller's reports."""
    while member.controller.sweep():
        pass
    found = {}
    for number in NAMES:
        found[number] = member.index.match(PromptChunks([number, 1, 2, 3]), "", {}).get(1, (0, 0))[0]
    return {number for number, tokens in found.items() if tokens}


async def test_messages_to_one_controller_reach_all(trio, bus):
    engine, (one, *_) = InProcess(), trio
    engine.register(one)
    one.say(engine.operations("admit", 1, 2, 3))
    one.say(engine.operations("evict", 2))
    await bus.pump()

    for member in trio:
        assert in_process(member) == {1, 3}
        assert member.controller.trust(1) is MapTrust.WHOLE


async def test_a_member_that_lacks_messages_gets_a_full_synchronisation_through_the_controller(trio, bus):
    engine, (one, two, _) = InProcess(), trio
    engine.register(one)
    one.say(engine.operations("admit", 1))
    bus.loses = lambda to: to == "b"
    one.say(engine.operations("admit", 2))
    bus.loses = lambda to: False
    one.say(engine.operations("admit", 3))
    await bus.pump()
    assert two.controller.trust(1) is MapTrust.PARTIAL

    assert not engine.beat(one)
    await bus.pump()
    assert engine.beat(one)
    await bus.pump()
    for _ in range(3):  # what it lacked has come: it is not asked for again
        assert not engine.beat(one)
        await bus.pump()

    assert [in_process(member) for member in trio] == 3 * [{1, 2, 3}]
    assert two.controller.trust(1) is MapTrust.WHOLE


async def test_another_controller_takes_over_with_a_full_synchronisation(trio, bus):
    engine, (one, two, three) = InProcess(), trio
    engine.register(one)
    one.say(engine.operations("admit", 1, 2))
    await bus.pump()
    engine.operations("evict", 1)  # lost with the member
    del bus.members["a"]
    for member in (two, three):
        member.reports.on_peer_gone("a")
        assert in_process(member) == set()

    assert engine.beat(two)
    await bus.pump()

    for member in (two, three):
        assert in_process(member) == {2}
        assert member.controller.trust(1) is MapTrust.WHOLE
