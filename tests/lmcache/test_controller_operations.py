"""Operations that workers report, and the chunks that remain in the index when messages are lost."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvroute.index.map_trust import MapTrust
from kvroute.wire import lmcache_controller as wire

CAPTURE = Path(__file__).parents[1] / "data" / "captures" / "lmcache-classic-controller.jsonl"
CAPTURED_PROMPT = [2000 + place for place in range(600)]
CHUNK = 64
CPU = "LocalCPUBackend"
DISK = "LocalDiskBackend"


def capture() -> list[dict[str, Any]]:
    with CAPTURE.open() as lines:
        return [json.loads(line) for line in lines]


def test_a_capture_replays_to_what_the_worker_held_at_each_point(rig_of: Any) -> None:
    rig = rig_of()
    rig.controller.add_slot(1, "classic-a")
    lengths = []

    for record in capture():
        if record["dir"] == "in":
            rig.controller.handle(wire.decode(base64.b64decode(record["frames"][-1])))
            lengths.append(rig.matched(CAPTURED_PROMPT))

    # Nine chunks of 64 are stored, the last two evicted; then the worker leaves.
    assert [length for place, length in enumerate(lengths) if length != lengths[place - 1]] == [576, 448, 0]
    assert rig.counts.unreadable == rig.counts.gaps == rig.counts.failed == 0


def test_the_captures_replies_decode_and_encode_to_the_same_bytes() -> None:
    for record in capture():
        payload = base64.b64decode(record["frames"][-1])
        decoded = (wire.decode if record["dir"] == "in" else wire.decode_reply)(payload)
        again = wire.encode(decoded)
        known = (wire.decode if record["dir"] == "in" else wire.decode_reply)(again)
        assert known == decoded


def test_a_worker_that_registers_gets_the_heartbeat_address(rig: Any) -> None:
    message = wire.Register(instance_id="a", worker_id=0)

    assert rig.controller.handle(message, "h:1") == wire.RegisterReply(extra_config={"heartbeat_url": "h:1"})
    assert rig.controller.handle(message) == wire.RegisterReply()


def test_chunks_count_from_admission_to_eviction(rig: Any, worker: Any) -> None:
    prompt = list(range(5 * CHUNK + 7))
    keys = rig.keys(prompt)

    worker.admit(*keys)
    assert rig.matched(prompt) == 5 * CHUNK

    worker.evict(keys[3])
    assert rig.matched(prompt) == 3 * CHUNK
    assert rig.controller.trust(1) is MapTrust.WHOLE
    assert worker.heartbeat() == []


def test_a_chunk_on_disk_counts_until_no_location_has_it(worker: Any) -> None:
    worker.admit(1, 50, location=DISK)
    worker.evict(1, 2)
    assert worker.in_index == {1, *range(3, 10), 50}

    worker.evict(1, location=DISK)
    assert worker.in_index == {*range(3, 10), 50}


def test_a_chunk_counts_when_every_rank_has_it(rig: Any, worker: Any, worker_of: Any) -> None:
    other = worker_of(rig, number=1)
    other.register()
    assert worker.in_index == set()

    other.admit(3, 4, 70)
    worker.evict(4)
    assert worker.in_index == {3}

    rig.handle(wire.DeRegister(**other.sender))
    assert worker.in_index == worker.held[CPU]


def test_a_worker_that_leaves_loses_its_chunks(rig: Any, worker: Any) -> None:
    rig.handle(wire.DeRegister(**worker.sender))

    assert worker.in_index == set()
    assert rig.index.size().held_chunks == rig.index.size().chunks == 0
    assert rig.controller.trust(1) is MapTrust.NONE
    assert rig.controller.gauges().instances == 0


def test_messages_of_lmcache_0_3_are_accepted(rig: Any, worker_of: Any) -> None:
    sender = {"instance_id": "a", "worker_id": 0}
    for fields in (
        {"type": "RegisterMsg", "ip": "192.0.2.1", "port": 1, "distributed_url": "d:1"},
        {"type": "KVAdmitMsg", "key": 5, "location": CPU},
        {"type": "KVAdmitMsg", "key": 6, "location": CPU, "a_field": "of the future"},
        {"type": "KVEvictMsg", "key": 5, "location": CPU},
        {"type": "HeartbeatMsg", "ip": "192.0.2.1", "port": 1, "distributed_url": "d:1"},
    ):
        rig.controller.handle(wire.decode(json.dumps({**fields, **sender}).encode()))

    assert worker_of(rig).in_index == {6}
    reply = rig.handle(wire.P2pLookup(instance_id="b", worker_id=0, hashes=[6]))
    assert reply.layout_info == [("a", CPU, 1, "d:1")]


def test_a_lost_batch_drops_all_earlier_chunks_until_a_full_sync(rig: Any, worker: Any) -> None:
    worker.batch("evict", [1, 2])
    worker.admit(20)

    assert worker.in_index == {20}
    assert rig.controller.trust(1) is MapTrust.PARTIAL
    assert worker.heartbeat() == ["operations_missing"]
    assert worker.heartbeat() == []

    worker.sync()

    assert worker.in_index == worker.held[CPU]
    assert rig.controller.trust(1) is MapTrust.WHOLE
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == []


def test_the_request_for_a_sync_is_repeated_when_none_starts(rig: Any, worker: Any) -> None:
    worker.batch("evict", [1])
    worker.admit(20)
    worker.heartbeat()

    rig.clock.time += rig.options.sync_timeout_s

    assert worker.heartbeat() == ["operations_missing"]


def test_a_batch_that_arrives_twice_is_applied_once(rig: Any, worker: Any) -> None:
    first = wire.KvOperations(**worker.sender, location=CPU, operations=[])
    again = worker.batch("admit", [30])
    rig.handle(again)
    worker.evict(30)

    rig.handle(again)
    rig.handle(first)

    assert worker.in_index == worker.held[CPU]
    assert rig.counts.duplicates == 1
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_a_copy_of_the_first_batch_is_not_taken_for_a_restart(rig: Any, worker_of: Any) -> None:
    worker = worker_of(rig)
    worker.register()
    first = worker.batch("admit", [1, 2])
    rig.handle(first)
    for key in range(100, 300):
        worker.admit(key)
    worker.evict(1)

    rig.handle(first)

    assert worker.in_index == worker.held[CPU]


def test_batches_out_of_order_add_no_chunk_that_was_evicted(rig: Any, worker: Any) -> None:
    early, late = worker.batch("admit", [40]), worker.batch("evict", [40, 3])
    rig.handle(late)
    rig.handle(early)
    assert worker.in_index <= worker.held[CPU]

    worker.admit(41)
    assert worker.in_index == {41}
    assert rig.controller.trust(1) is MapTrust.PARTIAL


def test_a_restart_that_registers_starts_empty_and_late_messages_are_ignored(
    rig: Any, worker: Any, worker_of: Any
) -> None:
    straggler = worker.batch("admit", [60])
    new = worker_of(rig)
    new.register()
    rig.handle(straggler)
    assert new.in_index == set()

    new.admit(7)
    assert new.in_index == {7}
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_a_worker_that_started_before_the_controller_is_partial_until_synced(
    rig: Any, worker_of: Any
) -> None:
    worker = worker_of(rig)
    worker.batch("admit", range(1, 10))
    worker.admit(10)
    worker.evict(9)
    assert worker.in_index == {10}
    assert rig.controller.trust(1) is MapTrust.PARTIAL
    assert "heartbeat" in rig.controller.problems()[0]

    assert worker.heartbeat() == ["controller_restart"]
    assert rig.controller.problems() == []
    worker.sync()
    worker.admit(11)

    assert worker.in_index == worker.held[CPU]
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_an_unreadable_batch_of_a_known_location_is_a_loss(rig: Any, worker: Any) -> None:
    broken = json.loads(json.dumps({"type": "BatchedKVOperationMsg", **worker.sender, "location": CPU}))
    payload = json.dumps({**broken, "operations": [{"op_type": "melt", "key": 1, "seq_num": 9}]}).encode()
    with pytest.raises(wire.WireError):
        wire.decode(payload)

    rig.controller.on_unreadable(payload)

    assert worker.in_index == set()
    assert rig.controller.trust(1) is MapTrust.PARTIAL


def test_a_worker_whose_heartbeats_stop_is_removed_and_others_stay(
    rig: Any, worker: Any, worker_of: Any
) -> None:
    quiet = worker_of(rig, "b")
    quiet.register()
    quiet.admit(5)
    worker.heartbeat()

    rig.clock.time += rig.options.worker_timeout_s + 1
    rig.controller.tick()

    assert worker.in_index == set()
    assert quiet.in_index == {5}
    assert rig.counts.timeouts == 1


@pytest.mark.parametrize("seed", range(10))
def test_the_index_never_has_a_chunk_that_the_worker_does_not_hold(
    seed: int, rig_of: Any, worker_of: Any
) -> None:
    """Batches are lost, duplicated and reordered; workers restart and synchronise at any time."""
    rng = random.Random(seed)
    rig = rig_of()
    worker = worker_of(rig)
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
                rig.handle(batch)
            if fate < 0.05:
                rig.handle(batch)
        elif doing < 0.85:
            worker = worker_of(rig)
            worker.register()
        elif doing < 0.95 and worker.heartbeat():
            for message in worker.sync_messages(sync_id=f"s{rng.random()}"):
                if rng.random() < 0.95:
                    rig.handle(message)
        else:
            rig.clock.time += 10
            rig.controller.tick()
            rig.controller.sweep(rng.randrange(20))
        # A loss shows with the next batch of that location.
        assert _has_unseen_loss(rig, worker) or worker.in_index <= worker.held[CPU] | worker.held[DISK]

    for location in (CPU, DISK):
        worker.admit(900, location=location)
    assert worker.in_index <= worker.held[CPU] | worker.held[DISK]


def _has_unseen_loss(rig: Any, worker: Any) -> bool:
    ranks = rig.controller._roster.by_name["a"].instance.ranks
    places = ranks[0].locations
    expected = {name: place.sequence.expected for name, place in places.items()}
    return any(expected.get(name, number) != number for name, number in worker.numbers.items())
