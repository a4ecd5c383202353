"""Full synchronisations: when the frozen worker may continue, and what happens if messages are lost."""

from __future__ import annotations

from typing import Any

from kvroute.index.map_trust import MapTrust
from kvroute.wire import lmcache_controller as wire

CPU = "LocalCPUBackend"


def test_a_sync_requests_a_missing_batch_and_ends_when_it_arrives(rig: Any, worker: Any) -> None:
    start, first, lost, last, end = worker.sync_messages()
    for message in (start, first, last, end):
        rig.handle(message)
    reply = worker.status()
    assert (reply.can_exit_freeze, reply.missing_batches) == (False, [1])
    assert worker.in_index < worker.held[CPU]

    rig.handle(lost)
    rig.handle(end)

    assert worker.status().is_complete
    assert worker.status().can_exit_freeze
    assert worker.in_index == worker.held[CPU]


def test_a_frozen_worker_may_continue_when_a_batch_never_arrives(rig: Any, worker: Any) -> None:
    start, first, _, last, end = worker.sync_messages()
    for message in (start, first, last, end):
        rig.handle(message)

    replies = [worker.status() for _ in range(10)]

    assert not replies[0].can_exit_freeze
    assert replies[-1].can_exit_freeze
    assert not replies[-1].is_complete
    assert rig.controller.trust(1) is MapTrust.PARTIAL
    assert worker.heartbeat() == ["operations_missing"]


def test_operations_from_before_the_freeze_may_arrive_during_the_sync(rig: Any, worker: Any) -> None:
    late = [worker.batch("evict", [1]), worker.batch("admit", [80]), worker.batch("evict", [80])]
    start, *rest = worker.sync_messages()

    for message in (start, late[0], rest[0], late[1], *rest[1:], late[2]):
        rig.handle(message)

    assert worker.in_index == worker.held[CPU]
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_lost_operations_fail_a_sync(rig: Any, worker: Any) -> None:
    start, first, *rest = worker.sync_messages()
    rig.handle(start)
    rig.handle(first)
    worker.batch("evict", [1])
    worker.admit(90)
    for message in rest:
        rig.handle(message)

    assert worker.in_index <= worker.held[CPU]
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == ["operations_missing"]


def test_a_restart_during_a_sync_drops_its_chunks(rig: Any, worker: Any, worker_of: Any) -> None:
    start, first, *rest = worker.sync_messages()
    rig.handle(start)
    rig.handle(first)
    new = worker_of(rig)
    new.register()
    for message in rest:
        rig.handle(message)

    assert new.in_index == set()
    assert rig.controller.trust(1) is MapTrust.WHOLE


def test_a_second_sync_replaces_the_first(rig: Any, worker: Any) -> None:
    start, first, *_ = worker.sync_messages(sync_id="s0")
    rig.handle(start)
    rig.handle(first)
    worker.sync()

    assert worker.in_index == worker.held[CPU]
    assert worker.status("s0").can_exit_freeze


def test_a_sync_whose_total_differs_is_requested_again(rig: Any, worker: Any) -> None:
    *parts, _ = worker.sync_messages()
    end = wire.FullSyncEnd(**worker.sender, location=CPU, sync_id="s1", actual_total_keys=10)
    for message in (*parts, end):
        rig.handle(message)

    assert rig.counts.syncs_failed == 1
    assert worker.status().can_exit_freeze
    assert worker.heartbeat() == ["operations_missing"]


def test_a_sync_without_progress_fails_after_the_timeout(rig: Any, worker: Any) -> None:
    start, first, *_ = worker.sync_messages()
    rig.handle(start)
    rig.handle(first)
    assert worker.heartbeat() == []

    rig.clock.time += rig.options.sync_timeout_s + 1
    rig.controller.tick()

    assert worker.heartbeat() == ["operations_missing"]
