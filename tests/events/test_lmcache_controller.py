"""LMCache's controller: what is believed of what workers say, whatever gets lost on the way."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import zmq
import zmq.asyncio

from kvroute.blocks.chunks import ChunkSpace, PromptChunks, chunk_keys
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.events.controller import Controller
from kvroute.events.controller_options import ControllerOptions
from kvroute.events.controller_sockets import ControllerSockets
from kvroute.events.trust import Trust
from kvroute.index.chunk_index import ChunkIndex
from kvroute.wire import lmcache_controller as wire

CAPTURE = Path(__file__).parent.parent / "data" / "captures" / "lmcache-classic-controller.jsonl"
CHUNK = 64
CPU = "LocalCPUBackend"
DISK = "LocalDiskBackend"
CAPTURED_PROMPT = [2000 + place for place in range(600)]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


class Rig:
    """A controller with an index, and slot 1 for worker `a`."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.index = ChunkIndex()
        self.options = ControllerOptions(**{"chunk_tokens": CHUNK, **options})
        self.controller = Controller(self.index, self.clock, self.options)
        self.controller.follow(1, "a")

    @property
    def counts(self) -> Any:
        return self.controller.counts

    def say(self, message: wire.Message) -> Any:
        """Handle the message as it would come over the wire."""
        return self.controller.handle(wire.decode(wire.encode(message)))

    def settle(self) -> None:
        while self.controller.sweep():
            pass

    def keys(self, tokens: Sequence[int]) -> list[int]:
        return list(chunk_keys(tokens, self.controller.scheme))

    def matched(self, tokens: Sequence[int], slot: int = 1) -> int:
        """Tokens that the index gives the slot in L1."""
        self.settle()
        return self.index.match(PromptChunks(tokens), "", {}).get(slot, (0, 0))[0]


class Worker:
    """A rank of an instance, and what it truly holds."""

    def __init__(self, rig: Rig, name: str = "a", number: int = 0, **place: Any) -> None:
        self.rig = rig
        self.who = {"instance_id": name, "worker_id": number}
        self.place = {"ip": "192.0.2.1", "port": 7600, "peer_init_url": f"{name}:1", **place}
        self.held: dict[str, set[int]] = {CPU: set(), DISK: set()}
        self.numbers = dict.fromkeys(self.held, 0)

    def register(self) -> Any:
        return self.rig.say(wire.Register(**self.who, **self.place))

    def heartbeat(self) -> list[str]:
        """Why a full synchronisation was asked for, if it was."""
        reply = self.rig.say(wire.Heartbeat(**self.who, **self.place))
        return [command.reason for command in reply.commands]

    def batch(
        self, kind: Literal["admit", "evict"], keys: Sequence[int], location: str = CPU
    ) -> wire.KvOperations:
        """The next message, not yet sent."""
        held = self.held[location]
        held.update(keys) if kind == "admit" else held.difference_update(keys)
        start = self.numbers[location]
        self.numbers[location] += len(keys)
        operations = [wire.Operation(kind, key, start + place) for place, key in enumerate(keys)]
        return wire.KvOperations(**self.who, location=location, operations=operations)

    def admit(self, *keys: int, location: str = CPU) -> None:
        self.rig.say(self.batch("admit", keys, location))

    def evict(self, *keys: int, location: str = CPU) -> None:
        self.rig.say(self.batch("evict", keys, location))

    def sync_messages(self, *, sync_id: str = "s1", size: int = 3) -> list[wire.Message]:
        keys = sorted(self.held[CPU])
        pieces = [keys[at : at + size] for at in range(0, len(keys), size)] or [[]]
        what = {**self.who, "location": CPU, "sync_id": sync_id}
        return [
            wire.FullSyncStart(**what, total_keys=len(keys), batch_count=len(pieces)),
            *(wire.FullSyncBatch(**what, batch_id=number, keys=piece) for number, piece in enumerate(pieces)),
            wire.FullSyncEnd(**what, actual_total_keys=len(keys)),
        ]

    def sync(self) -> None:
        for message in self.sync_messages():
            self.rig.say(message)

    def status(self, sync_id: str = "s1") -> wire.FullSyncStatusReply:
        reply = self.rig.say(wire.FullSyncStatus(**self.who, sync_id=sync_id))
        assert isinstance(reply, wire.FullSyncStatusReply)
        return reply

    @property
    def believed(self) -> set[int]:
        """What the index says of the instance, of all keys that were ever spoken of."""
        self.rig.settle()
        known = self.rig.controller._roster.known.get(str(self.who["instance_id"]))
        if known is None:
            return set()
        space = ChunkSpace(self.rig.controller.scheme)
        return {key for key in range(1000) if self.rig.index.holds(known.instance.holder, space, key)}


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def worker(rig: Rig) -> Worker:
    """Registered, with chunks 1 to 9."""
    worker = Worker(rig)
    worker.register()
    worker.admit(*range(1, 10))
    return worker


def capture() -> list[dict[str, Any]]:
    with CAPTURE.open() as lines:
        return [json.loads(line) for line in lines]


# What was captured from LMCache 0.5.6


def test_a_capture_replays_to_what_the_worker_held_at_each_point() -> None:
    rig = Rig()
    rig.controller.follow(1, "classic-a")
    lengths = []

    for record in capture():
        if record["dir"] == "in":
            rig.controller.handle(wire.decode(base64.b64decode(record["frames"][-1])))
            lengths.append(rig.matched(CAPTURED_PROMPT))

    # Nine chunks of 64 are stored, the last two evicted; then the worker leaves.
    assert [length for place, length in enumerate(lengths) if length != lengths[place - 1]] == [576, 448, 0]
    assert rig.counts.unreadable == rig.counts.gaps == rig.counts.failed == 0


def test_what_is_answered_in_the_capture_reads_and_writes_back() -> None:
    for record in capture():
        payload = base64.b64decode(record["frames"][-1])
        decoded = (wire.decode if record["dir"] == "in" else wire.decode_reply)(payload)
        again = wire.encode(decoded)
        known = (wire.decode if record["dir"] == "in" else wire.decode_reply)(again)
        assert known == decoded


# A life without losses


def test_a_worker_that_registers_is_told_where_to_send_heartbeats(rig: Rig) -> None:
    message = wire.Register(instance_id="a", worker_id=0)

    assert rig.controller.handle(message, "h:1") == wire.RegisterReply(extra_config={"heartbeat_url": "h:1"})
    assert rig.controller.handle(message) == wire.RegisterReply()


def test_chunks_count_from_admission_to_eviction(rig: Rig, worker: Worker) -> None:
    prompt = list(range(5 * CHUNK + 7))
    keys = rig.keys(prompt)

    worker.admit(*keys)
    assert rig.matched(prompt) == 5 * CHUNK

    worker.evict(keys[3])
    assert rig.matched(prompt) == 3 * CHUNK
    assert rig.controller.trust(1) is Trust.WHOLE
    assert worker.heartbeat() == []


def test_a_chunk_on_disk_counts_until_no_location_has_it(worker: Worker) -> None:
    worker.admit(1, 50, location=DISK)
    worker.evict(1, 2)
    assert worker.believed == {1, *range(3, 10), 50}

    worker.evict(1, location=DISK)
    assert worker.believed == {*range(3, 10), 50}


def test_a_chunk_counts_when_every_rank_has_it(rig: Rig, worker: Worker) -> None:
    other = Worker(rig, number=1)
    other.register()
    assert worker.believed == set()

    other.admit(3, 4, 70)
    worker.evict(4)
    assert worker.believed == {3}

    rig.say(wire.DeRegister(**other.who))
    assert worker.believed == worker.held[CPU]


def test_a_worker_that_leaves_takes_its_chunks_along(rig: Rig, worker: Worker) -> None:
    rig.say(wire.DeRegister(**worker.who))

    assert worker.believed == set()
    assert rig.index.size().held == rig.index.size().chunks == 0
    assert rig.controller.trust(1) is Trust.NONE
    assert rig.controller.figures().instances == 0


def test_messages_of_lmcache_0_3_are_taken_too(rig: Rig) -> None:
    who = {"instance_id": "a", "worker_id": 0}
    for fields in (
        {"type": "RegisterMsg", "ip": "192.0.2.1", "port": 1, "distributed_url": "d:1"},
        {"type": "KVAdmitMsg", "key": 5, "location": CPU},
        {"type": "KVAdmitMsg", "key": 6, "location": CPU, "a_field": "of the future"},
        {"type": "KVEvictMsg", "key": 5, "location": CPU},
        {"type": "HeartbeatMsg", "ip": "192.0.2.1", "port": 1, "distributed_url": "d:1"},
    ):
        rig.controller.handle(wire.decode(json.dumps({**fields, **who}).encode()))

    assert Worker(rig).believed == {6}
    asked = rig.say(wire.P2pLookup(instance_id="b", worker_id=0, hashes=[6]))
    assert asked.layout_info == [("a", CPU, 1, "d:1")]


# Losses


def test_a_lost_batch_forgets_all_before_it_until_a_full_sync(rig: Rig, worker: Worker) -> None:
    worker.batch("evict", [1, 2])
    worker.admit(20)

    assert worker.believed == {20}
    assert rig.controller.trust(1) is Trust.PARTIAL
    assert worker.heartbeat() == ["operations_missing"]
    assert worker.heartbeat() == []

    worker.sync()

    assert worker.believed == worker.held[CPU]
    assert rig.controller.trust(1) is Trust.WHOLE
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == []


def test_the_request_for_a_sync_is_repeated_when_none_begins(rig: Rig, worker: Worker) -> None:
    worker.batch("evict", [1])
    worker.admit(20)
    worker.heartbeat()

    rig.clock.time += rig.options.sync_timeout_s

    assert worker.heartbeat() == ["operations_missing"]


def test_a_batch_that_comes_twice_counts_once(rig: Rig, worker: Worker) -> None:
    first = wire.KvOperations(**worker.who, location=CPU, operations=[])
    again = worker.batch("admit", [30])
    rig.say(again)
    worker.evict(30)

    rig.say(again)
    rig.say(first)

    assert worker.believed == worker.held[CPU]
    assert rig.counts.duplicates == 1
    assert rig.controller.trust(1) is Trust.WHOLE


def test_the_first_batch_twice_is_no_new_beginning(rig: Rig) -> None:
    worker = Worker(rig)
    worker.register()
    first = worker.batch("admit", [1, 2])
    rig.say(first)
    for key in range(100, 300):
        worker.admit(key)
    worker.evict(1)

    rig.say(first)

    assert worker.believed == worker.held[CPU]


def test_batches_out_of_order_claim_nothing_that_is_gone(rig: Rig, worker: Worker) -> None:
    early, late = worker.batch("admit", [40]), worker.batch("evict", [40, 3])
    rig.say(late)
    rig.say(early)
    assert worker.believed <= worker.held[CPU]

    worker.admit(41)
    assert worker.believed == {41}
    assert rig.controller.trust(1) is Trust.PARTIAL


def test_a_restart_that_registers_begins_anew_and_stragglers_are_left_out(rig: Rig, worker: Worker) -> None:
    straggler = worker.batch("admit", [60])
    new = Worker(rig)
    new.register()
    rig.say(straggler)
    assert new.believed == set()

    new.admit(7)
    assert new.believed == {7}
    assert rig.controller.trust(1) is Trust.WHOLE


def test_a_worker_from_before_our_start_is_believed_in_part_and_synced(rig: Rig) -> None:
    worker = Worker(rig)
    worker.batch("admit", range(1, 10))
    worker.admit(10)
    worker.evict(9)
    assert worker.believed == {10}
    assert rig.controller.trust(1) is Trust.PARTIAL
    assert "heartbeat" in rig.controller.problems()[0]

    assert worker.heartbeat() == ["controller_restart"]
    assert rig.controller.problems() == []
    worker.sync()
    worker.admit(11)

    assert worker.believed == worker.held[CPU]
    assert rig.controller.trust(1) is Trust.WHOLE


def test_an_unreadable_batch_of_a_known_location_is_a_loss(rig: Rig, worker: Worker) -> None:
    broken = json.loads(json.dumps({"type": "BatchedKVOperationMsg", **worker.who, "location": CPU}))
    payload = json.dumps({**broken, "operations": [{"op_type": "melt", "key": 1, "seq_num": 9}]}).encode()
    with pytest.raises(wire.WireError):
        wire.decode(payload)

    rig.controller.unreadable(payload)

    assert worker.believed == set()
    assert rig.controller.trust(1) is Trust.PARTIAL


# Full synchronisation


def test_a_sync_with_a_missing_batch_asks_for_it_and_ends_when_it_comes(rig: Rig, worker: Worker) -> None:
    start, first, lost, last, end = worker.sync_messages()
    for message in (start, first, last, end):
        rig.say(message)
    reply = worker.status()
    assert (reply.can_exit_freeze, reply.missing_batches) == (False, [1])
    assert worker.believed < worker.held[CPU]

    rig.say(lost)
    rig.say(end)

    assert worker.status().is_complete
    assert worker.status().can_exit_freeze
    assert worker.believed == worker.held[CPU]


def test_a_frozen_worker_may_go_on_when_a_batch_never_comes(rig: Rig, worker: Worker) -> None:
    start, first, _, last, end = worker.sync_messages()
    for message in (start, first, last, end):
        rig.say(message)

    replies = [worker.status() for _ in range(10)]

    assert not replies[0].can_exit_freeze
    assert replies[-1].can_exit_freeze
    assert not replies[-1].is_complete
    assert rig.controller.trust(1) is Trust.PARTIAL
    assert worker.heartbeat() == ["operations_missing"]


def test_operations_from_before_the_freeze_may_come_during_the_sync(rig: Rig, worker: Worker) -> None:
    late = [worker.batch("evict", [1]), worker.batch("admit", [80]), worker.batch("evict", [80])]
    start, *rest = worker.sync_messages()

    for message in (start, late[0], rest[0], late[1], *rest[1:], late[2]):
        rig.say(message)

    assert worker.believed == worker.held[CPU]
    assert rig.controller.trust(1) is Trust.WHOLE


def test_a_loss_during_a_sync_ends_it(rig: Rig, worker: Worker) -> None:
    start, first, *rest = worker.sync_messages()
    rig.say(start)
    rig.say(first)
    worker.batch("evict", [1])
    worker.admit(90)
    for message in rest:
        rig.say(message)

    assert worker.believed <= worker.held[CPU]
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == ["operations_missing"]


def test_a_restart_in_the_middle_of_a_sync_leaves_nothing_of_it(rig: Rig, worker: Worker) -> None:
    start, first, *rest = worker.sync_messages()
    rig.say(start)
    rig.say(first)
    new = Worker(rig)
    new.register()
    for message in rest:
        rig.say(message)

    assert new.believed == set()
    assert rig.controller.trust(1) is Trust.WHOLE


def test_a_second_sync_takes_the_place_of_the_first(rig: Rig, worker: Worker) -> None:
    start, first, *_ = worker.sync_messages(sync_id="s0")
    rig.say(start)
    rig.say(first)
    worker.sync()

    assert worker.believed == worker.held[CPU]
    assert worker.status("s0").can_exit_freeze


def test_a_sync_with_another_total_than_announced_is_asked_for_again(rig: Rig, worker: Worker) -> None:
    *parts, _ = worker.sync_messages()
    end = wire.FullSyncEnd(**worker.who, location=CPU, sync_id="s1", actual_total_keys=10)
    for message in (*parts, end):
        rig.say(message)

    assert rig.counts.syncs_failed == 1
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == ["operations_missing"]


def test_a_sync_that_stops_is_given_up_in_time(rig: Rig, worker: Worker) -> None:
    start, first, *_ = worker.sync_messages()
    rig.say(start)
    rig.say(first)
    assert worker.heartbeat() == []

    rig.clock.time += rig.options.sync_timeout_s + 1
    rig.controller.tick()

    assert worker.heartbeat() == ["operations_missing"]


# Silence


def test_a_worker_whose_heartbeats_end_is_forgotten_and_others_stay(rig: Rig, worker: Worker) -> None:
    quiet = Worker(rig, "b")
    quiet.register()
    quiet.admit(5)
    worker.heartbeat()

    rig.clock.time += rig.options.worker_timeout_s + 1
    rig.controller.tick()

    assert worker.believed == set()
    assert quiet.believed == {5}
    assert rig.counts.timeouts == 1


# Peers


def test_a_lookup_names_the_peer_with_most_of_the_chunks(rig: Rig, worker: Worker) -> None:
    better = Worker(rig, "b")
    better.register()
    better.admit(1, 2, 3, 4)
    worker.evict(3)
    asker = {"instance_id": "c", "worker_id": 0}

    def ask(hashes: list[int], **who: Any) -> Any:
        return rig.say(wire.P2pLookup(**{**asker, **who}, hashes=hashes)).layout_info

    assert ask([1, 2, 3, 99]) == [("b", CPU, 3, "b:1")]
    assert ask([1, 2, 3], instance_id="b") == [("a", CPU, 2, "a:1")]
    assert ask([99, 1]) == ask([]) == ask([1], worker_id=1) == [("", "", 0, "")]


def test_a_peer_without_a_url_is_none(rig: Rig) -> None:
    worker = Worker(rig, peer_init_url=None)
    worker.register()
    worker.admit(1)

    reply = rig.say(wire.P2pLookup(instance_id="c", worker_id=0, hashes=[1]))

    assert reply.layout_info == [("", "", 0, "")]


# Whose chunks they are


def test_an_instance_is_joined_by_name_before_address(rig: Rig) -> None:
    rig.controller.follow(2, "b", addresses={"192.0.2.1"})
    named, other = Worker(rig), Worker(rig, "uuid", port=7601)
    prompt = list(range(CHUNK + 1))
    for each in (named, other):
        each.register()

    other.admit(*rig.keys(prompt))

    assert (rig.matched(prompt, 1), rig.matched(prompt, 2)) == (0, CHUNK)
    rig.controller.leave(2)
    assert rig.matched(prompt, 2) == 0


def test_an_instance_that_could_be_either_workers_is_nobodys(rig: Rig) -> None:
    rig.controller.follow(2, "b", addresses={"192.0.2.1"})
    rig.controller.follow(3, "c", addresses={"192.0.2.1"})
    unnamed = Worker(rig, "uuid")
    unnamed.register()
    prompt = list(range(CHUNK + 1))
    unnamed.admit(*rig.keys(prompt))

    assert rig.matched(prompt, 2) == rig.matched(prompt, 3) == 0
    assert "lmcache_instance_id" in rig.controller.problems()[0]


def test_of_two_instances_at_one_place_the_later_one_lives(rig: Rig) -> None:
    rig.controller.follow(2, "b", addresses={"192.0.2.1"})
    old, new = Worker(rig, "uuid-1"), Worker(rig, "uuid-2")
    prompt = list(range(CHUNK + 1))
    old.register()
    old.admit(*rig.keys(prompt))
    assert rig.matched(prompt, 2) == CHUNK

    rig.clock.time += 1
    new.register()

    assert rig.matched(prompt, 2) == 0


def test_data_parallel_ranks_have_instances_of_their_own(rig: Rig) -> None:
    for slot in (2, 3):
        rig.controller.follow(slot, "w", rank=slot - 2)
    prompt = list(range(CHUNK + 1))
    worker = Worker(rig, "w-1")
    worker.register()
    worker.admit(*rig.keys(prompt))

    assert (rig.matched(prompt, 2), rig.matched(prompt, 3)) == (0, CHUNK)


# The hash seed


def serve(rig: Rig, worker: Worker, theirs: Callable[[Sequence[int]], list[int]], count: int = 10) -> None:
    """Prompts that the worker serves, and stores under its own names."""
    for number in range(count):
        prompt = [number * 1000 + place for place in range(2 * CHUNK)]
        worker.admit(*theirs(prompt))
        rig.controller.saw_prompt(1, prompt)
        rig.clock.time += 1


@pytest.mark.parametrize(
    "theirs",
    [
        {"hash_seed": "1"},
        {"hash_seed": "00"},
        {"hash_algorithm": "sha256_cbor"},
        {"chunk_tokens": CHUNK // 2},
        {"hash_algorithm": "builtin_none"},
    ],
)
def test_hashes_that_are_not_ours_are_said_loudly(
    theirs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    worker = Worker(rig)
    worker.register()
    serve(rig, worker, Rig(**theirs).keys)

    assert rig.counts.mismatches == 1
    assert rig.controller.figures().mismatched == 1
    assert rig.controller.trust(1) is Trust.NONE
    (problem,) = rig.controller.problems()
    assert "PYTHONHASHSEED must be 0" in problem
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said.getMessage() == problem

    # The worker is started again with the right seed.
    right = Worker(rig)
    right.register()
    serve(rig, right, rig.keys, 1)
    assert rig.controller.problems() == []
    assert rig.controller.trust(1) is Trust.WHOLE


def test_hashes_of_a_worker_from_before_our_start_are_compared_too() -> None:
    for seed, mismatches in (("0", 0), ("1", 1)):
        rig = Rig()
        worker = Worker(rig)
        worker.batch("admit", range(1, 10))
        serve(rig, worker, Rig(hash_seed=seed).keys)

        assert rig.counts.mismatches == mismatches


def test_chats_that_go_on_after_our_start_are_no_mismatch(rig: Rig) -> None:
    worker = Worker(rig)
    chats = [[chat * 1000 + place for place in range(8 * CHUNK)] for chat in range(20)]
    worker.batch("admit", [key for chat in chats for key in rig.keys(chat[: 4 * CHUNK])])
    for length in range(4 * CHUNK, 8 * CHUNK, CHUNK // 2):
        for chat in chats:
            fresh = [key for key in rig.keys(chat[:length]) if key not in worker.held[CPU]]
            if fresh:
                worker.admit(*fresh)
            rig.controller.saw_prompt(1, chat[:length])
            rig.clock.time += 1

    assert rig.counts.mismatches == 0


def test_prompts_that_are_not_stored_are_no_mismatch(rig: Rig, worker: Worker) -> None:
    serve(rig, worker, lambda _: [])
    assert rig.controller.problems() == []

    worker.admit(*range(500, 600))
    serve(rig, worker, rig.keys, 1)
    assert rig.controller.problems() == []


def test_an_agreement_is_seen_although_the_chunk_is_gone_again(rig: Rig, worker: Worker) -> None:
    prompt = list(range(CHUNK))
    rig.controller.saw_prompt(1, prompt)
    worker.admit(*rig.keys(prompt))
    worker.evict(*rig.keys(prompt))
    serve(rig, worker, Rig(hash_seed="1").keys)

    assert rig.counts.mismatches == 0


def test_a_short_prompt_says_nothing(rig: Rig, worker: Worker) -> None:
    for number in range(20):
        rig.controller.saw_prompt(1, [number] * (CHUNK - 1))
        worker.admit(100 + number)
        rig.clock.time += 1

    assert rig.counts.mismatches == 0


# Anything at all


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_nothing_is_claimed_that_is_not_held(seed: int) -> None:
    """Batches are lost, doubled, reordered; workers restart and synchronise at any time."""
    rng = random.Random(seed)
    rig = Rig()
    worker = Worker(rig)
    worker.register()
    for _ in range(200):
        doing = rng.random()
        keys = rng.choices(range(40), k=rng.randrange(1, 5))
        location = rng.choice([CPU, CPU, DISK])
        if doing < 0.8:
            batch = worker.batch(
                "admit" if rng.random() < 0.6 else "evict", list(dict.fromkeys(keys)), location
            )
            fate = rng.random()
            if fate < 0.9:
                rig.say(batch)
            if fate < 0.05:
                rig.say(batch)
        elif doing < 0.85:
            worker = Worker(rig)
            worker.register()
        elif doing < 0.95 and worker.heartbeat():
            for message in worker.sync_messages(sync_id=f"s{rng.random()}"):
                if rng.random() < 0.95:
                    rig.say(message)
        else:
            rig.clock.time += 10
            rig.controller.tick()
            rig.controller.sweep(rng.randrange(20))
        # A loss shows with the next batch of that location.
        assert _has_unseen_loss(rig, worker) or worker.believed <= worker.held[CPU] | worker.held[DISK]

    for location in (CPU, DISK):
        worker.admit(900, location=location)
    assert worker.believed <= worker.held[CPU] | worker.held[DISK]


def _has_unseen_loss(rig: Rig, worker: Worker) -> bool:
    ranks = rig.controller._roster.known["a"].instance.ranks
    places = ranks[0].locations
    expected = {name: place.sequence.expected for name, place in places.items()}
    return any(expected.get(name, number) != number for name, number in worker.numbers.items())


# Over sockets


class Peer:
    """A worker's sockets."""

    def __init__(self, served: ControllerSockets) -> None:
        self.context = zmq.asyncio.Context()
        self.push = self._open(zmq.PUSH, served.pull)
        self.ask_at = self._open(zmq.DEALER, served.reply)
        self.beat_at = self._open(zmq.DEALER, served.heartbeat)

    def _open(self, kind: int, address: str) -> zmq.asyncio.Socket:
        made = self.context.socket(kind)
        made.connect(f"tcp://{address}")
        return made

    async def ask(self, message: wire.Message | bytes, at: zmq.asyncio.Socket | None = None) -> Any:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        asked = at or self.ask_at
        await asked.send_multipart([b"", payload])
        return wire.decode_reply((await asked.recv_multipart())[-1])

    async def tell(self, *messages: wire.Message | bytes) -> None:
        await self.push.send_multipart(
            [message if isinstance(message, bytes) else wire.encode(message) for message in messages]
        )


@pytest.fixture
async def served(rig: Rig) -> AsyncIterator[ControllerSockets]:
    options = ControllerOptions(
        pull="127.0.0.1:0", reply="127.0.0.1:0", heartbeat="127.0.0.1:0", chunk_tokens=CHUNK
    )
    sockets = ControllerSockets(rig.controller, SystemClock(), options)
    running = asyncio.create_task(sockets.run())
    await sockets.bound()
    yield sockets
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def peer(served: ControllerSockets) -> AsyncIterator[Peer]:
    peer = Peer(served)
    yield peer
    peer.context.destroy(linger=0)


async def test_a_worker_registers_stores_and_is_asked_over_sockets(
    rig: Rig, served: ControllerSockets, peer: Peer, until: Any
) -> None:
    worker = Worker(rig)
    who = worker.who
    registered = await peer.ask(wire.Register(**who, **worker.place))
    assert registered.extra_config == {"heartbeat_url": served.heartbeat}

    await peer.tell(worker.batch("admit", [1, 2]), worker.batch("evict", [1]))
    await until(lambda: rig.counts.operations == 3)
    assert worker.believed == {2}

    worker.batch("admit", [4])
    await peer.tell(worker.batch("admit", [3]))
    await until(lambda: rig.counts.gaps == 1)
    beat = await peer.ask(wire.Heartbeat(**who), peer.beat_at)
    assert [command.reason for command in beat.commands] == ["operations_missing"]

    start, *parts = worker.sync_messages()
    assert (await peer.ask(start)).accepted
    await peer.tell(*parts)
    await until(lambda: rig.counts.syncs_done == 1)
    assert (await peer.ask(wire.FullSyncStatus(**who, sync_id="s1"))).can_exit_freeze
    assert worker.believed == worker.held[CPU] == {2, 3, 4}
    found = await peer.ask(wire.P2pLookup(instance_id="b", worker_id=0, hashes=[2, 3, 9]))
    assert found.layout_info == [("a", CPU, 2, "a:1")]


async def test_garbage_is_counted_and_answered_and_ends_nothing(rig: Rig, peer: Peer, until: Any) -> None:
    half = wire.encode(Worker(rig).batch("admit", [1, 2, 3]))[:-5]
    deep = b'{"a":' * 100_000

    await peer.tell(b"", b"{", half, b"\xc1" * 50, deep)
    await until(lambda: rig.counts.unreadable == 5)
    for payload in (b"", b'{"type":"Other"}', half):
        assert isinstance(await peer.ask(payload), wire.ErrorReply)
    await peer.ask_at.send_multipart([b"\x00"])
    assert isinstance(wire.decode_reply((await peer.ask_at.recv_multipart())[-1]), wire.ErrorReply)
    told = await peer.ask(Worker(rig).batch("admit", [1]))
    assert "not a question" in told.error

    assert isinstance(await peer.ask(wire.Register(instance_id="a", worker_id=0)), wire.RegisterReply)
    assert rig.counts.failed == 0


async def test_a_burst_is_taken_in_while_others_get_their_turns(rig: Rig, peer: Peer, until: Any) -> None:
    worker = Worker(rig)
    await peer.ask(wire.Register(**worker.who, **worker.place))
    turns = 0

    await peer.tell(worker.batch("admit", range(100_000)))
    while rig.counts.operations < 100_000:
        await asyncio.sleep(0)
        turns += rig.counts.operations > 0

    assert turns > 20
    assert rig.controller.figures().chunks == 100_000
    assert rig.counts.gaps == 0


async def test_many_messages_do_not_hold_up_a_question(rig: Rig, peer: Peer) -> None:
    worker = Worker(rig)
    await peer.ask(wire.Register(**worker.who, **worker.place))
    batches = [worker.batch("admit", range(50)) for _ in range(2000)]

    telling = asyncio.gather(*(peer.tell(batch) for batch in batches))
    await peer.ask(wire.Heartbeat(**worker.who), peer.beat_at)
    seen = rig.counts.operations
    await telling

    assert seen < 2000 * 50


async def test_a_taken_address_is_named(served: ControllerSockets, rig: Rig) -> None:
    options = ControllerOptions(pull="127.0.0.1:0", reply=served.reply, heartbeat="")

    with pytest.raises(ConfigError, match=r"lmcache\.controller\.reply: 127\.0\.0\.1:\d+ is taken"):
        await ControllerSockets(rig.controller, SystemClock(), options).run()


async def test_without_a_heartbeat_address_workers_are_told_none(rig: Rig) -> None:
    options = ControllerOptions(pull="127.0.0.1:0", reply="127.0.0.1:0", heartbeat="")
    sockets = ControllerSockets(rig.controller, SystemClock(), options)
    running = asyncio.create_task(sockets.run())
    await sockets.bound()
    context = zmq.asyncio.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(f"tcp://{sockets.reply}")

    await asking.send_multipart([b"", wire.encode(wire.Register(instance_id="a", worker_id=0))])
    reply = wire.decode_reply((await asking.recv_multipart())[-1])

    assert reply == wire.RegisterReply()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    context.destroy(linger=0)


@pytest.mark.parametrize(
    ("bound", "advertise", "worker_ip", "told"),
    [
        ("0.0.0.0", "", "127.0.0.1", "127.0.0.1"),
        ("*", "", "::1", "[::1]"),
        ("0.0.0.0", "gateway.internal", "10.1.2.3", "gateway.internal"),
        ("127.0.0.1", "", "10.1.2.3", "127.0.0.1"),
    ],
)
async def test_the_heartbeat_address_can_be_reached_by_the_worker(
    rig: Rig, bound: str, advertise: str, worker_ip: str, told: str
) -> None:
    options = ControllerOptions(
        pull="127.0.0.1:0", reply="127.0.0.1:0", heartbeat=f"{bound}:0", advertise=advertise
    )
    sockets = ControllerSockets(rig.controller, SystemClock(), options)
    running = asyncio.create_task(sockets.run())
    await sockets.bound()

    url = sockets._heartbeat_url(wire.Register(instance_id="a", worker_id=0, ip=worker_ip))

    assert url == f"{told}:{sockets.heartbeat.rpartition(':')[2]}"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pull": "tcp://1.2.3.4:5"}, None),
        ({"pull": "8300"}, "host:port"),
        ({"reply": "127.0.0.1:99999"}, "host:port"),
        ({"hash_seed": "random"}, "0 to 4294967295"),
        ({"hash_seed": "4294967296"}, "0 to 4294967295"),
        ({"hash_seed": ""}, "random in every process"),
        ({"slice_ms": 3}, "less than or equal to 2"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str | None) -> None:
    with pytest.raises(ValueError, match=message or "host:port"):
        ControllerOptions(**options)


def test_without_a_seed_only_sha256_can_be_followed() -> None:
    assert ControllerOptions(hash_seed="", hash_algorithm="sha256_cbor").hash_seed == ""
