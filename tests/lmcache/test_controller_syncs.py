"""A worker stands still and says all it holds: until it may go on, and whatever gets lost of it."""

from __future__ import annotations

from typing import Any

from kvroute.index.trust import MapTrust
from kvroute.wire import lmcache_controller as wire

CPU = "LocalCPUBackend"


def test_a_sync_with_a_missing_batch_asks_for_it_and_ends_when_it_comes(rig: Any, worker: Any) -> None:
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


def test_a_frozen_worker_may_go_on_when_a_batch_never_comes(rig: Any, worker: Any) -> None:
    start, first, _, last, end = worker.sync_messages()
    for message in (start, first, last, end):
        rig.say(message)

    replies = [worker.status() for _ in range(10)]

    assert not replies[0].can_exit_freeze
    assert replies[-1].can_exit_freeze
    assert not replies[-1].is_complete
    assert rig.controller.trust(1) is MapTrust.PARTIAL
    assert worker.heartbeat() == ["operations_missing"]


def test_operations_from_before_the_freeze_may_come_during_the_sync(rig: Any, worker: Any) -> None:
    late = [worker.batch("evict", [1]), worker.batch("admit", [80]), worker.batch("evict", [80])]
    start, *rest = worker.sync_messages()

    for message in (start, late[0], rest[0], late[1], *rest[1:], late[2]):
        rig.say(message)

    assert worker.believed == worker.held[CPU]
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_a_loss_during_a_sync_ends_it(rig: Any, worker: Any) -> None:
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


def test_a_restart_in_the_middle_of_a_sync_leaves_nothing_of_it(
    rig: Any, worker: Any, worker_of: Any
) -> None:
    start, first, *rest = worker.sync_messages()
    rig.say(start)
    rig.say(first)
    new = worker_of(rig)
    new.register()
    for message in rest:
        rig.say(message)

    assert new.believed == set()
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_a_second_sync_takes_the_place_of_the_first(rig: Any, worker: Any) -> None:
    start, first, *_ = worker.sync_messages(sync_id="s0")
    rig.say(start)
    rig.say(first)
    worker.sync()

    assert worker.believed == worker.held[CPU]
    assert worker.status("s0").can_exit_freeze


def test_a_sync_with_another_total_than_announced_is_asked_for_again(rig: Any, worker: Any) -> None:
    *parts, _ = worker.sync_messages()
    end = wire.FullSyncEnd(**worker.who, location=CPU, sync_id="s1", actual_total_keys=10)
    for message in (*parts, end):
        rig.say(message)

    assert rig.counts.syncs_failed == 1
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == ["operations_missing"]


def test_a_sync_that_stops_is_given_up_in_time(rig: Any, worker: Any) -> None:
    start, first, *_ = worker.sync_messages()
    rig.say(start)
    rig.say(first)
    assert worker.heartbeat() == []

    rig.clock.time += rig.options.sync_timeout_s + 1
    rig.controller.tick()

    assert worker.heartbeat() == ["operations_missing"]
