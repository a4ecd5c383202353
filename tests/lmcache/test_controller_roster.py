"""Which worker an instance belongs to, and which peer has a prompt's chunks."""

from __future__ import annotations

from typing import Any

from kvroute.wire import lmcache_controller as wire

CHUNK = 64
CPU = "LocalCPUBackend"


def test_a_lookup_names_the_peer_with_most_of_the_chunks(rig: Any, worker: Any, worker_of: Any) -> None:
    better = worker_of(rig, "b")
    better.register()
    better.admit(1, 2, 3, 4)
    worker.evict(3)
    asker = {"instance_id": "c", "worker_id": 0}

    def ask(hashes: list[int], **sender: Any) -> Any:
        return rig.handle(wire.P2pLookup(**{**asker, **sender}, hashes=hashes)).layout_info

    assert ask([1, 2, 3, 99]) == [("b", CPU, 3, "b:1")]
    assert ask([1, 2, 3], instance_id="b") == [("a", CPU, 2, "a:1")]
    assert ask([99, 1]) == ask([]) == ask([1], worker_id=1) == [("", "", 0, "")]


def test_an_instance_without_a_peer_url_is_not_a_peer(rig: Any, worker_of: Any) -> None:
    worker = worker_of(rig, peer_init_url=None)
    worker.register()
    worker.admit(1)

    reply = rig.handle(wire.P2pLookup(instance_id="c", worker_id=0, hashes=[1]))

    assert reply.layout_info == [("", "", 0, "")]


def test_an_instance_is_found_by_name_before_address(rig: Any, worker_of: Any) -> None:
    rig.controller.add_slot(2, "b", addresses={"192.0.2.1"})
    named, other = worker_of(rig), worker_of(rig, "uuid", port=7601)
    prompt = list(range(CHUNK + 1))
    for each in (named, other):
        each.register()

    other.admit(*rig.keys(prompt))

    assert (rig.matched(prompt, 1), rig.matched(prompt, 2)) == (0, CHUNK)
    rig.controller.remove_slot(2)
    assert rig.matched(prompt, 2) == 0


def test_an_instance_that_fits_two_workers_belongs_to_neither(rig: Any, worker_of: Any) -> None:
    rig.controller.add_slot(2, "b", addresses={"192.0.2.1"})
    rig.controller.add_slot(3, "c", addresses={"192.0.2.1"})
    unnamed = worker_of(rig, "uuid")
    unnamed.register()
    prompt = list(range(CHUNK + 1))
    unnamed.admit(*rig.keys(prompt))

    assert rig.matched(prompt, 2) == rig.matched(prompt, 3) == 0
    assert "lmcache_instance_id" in rig.controller.problems()[0]


def test_of_two_instances_at_one_address_the_newer_one_counts(rig: Any, worker_of: Any) -> None:
    rig.controller.add_slot(2, "b", addresses={"192.0.2.1"})
    old, new = worker_of(rig, "uuid-1"), worker_of(rig, "uuid-2")
    prompt = list(range(CHUNK + 1))
    old.register()
    old.admit(*rig.keys(prompt))
    assert rig.matched(prompt, 2) == CHUNK

    rig.clock.time += 1
    new.register()

    assert rig.matched(prompt, 2) == 0
    assert rig.controller.gauges().instances == 1
    assert rig.index.size().held_chunks == 0


def test_an_instance_at_anothers_address_stays_if_it_has_a_workers_name_or_sends_heartbeats(
    rig: Any, worker_of: Any
) -> None:
    """Containers on two hosts may have the same address."""
    named, living = worker_of(rig, "a"), worker_of(rig, "uuid-1")
    for worker in (named, living):
        worker.register()
    living.heartbeat()

    worker_of(rig, "uuid-2").register()

    assert rig.controller.gauges().instances == 3


def test_each_data_parallel_rank_has_its_own_instance(rig: Any, worker_of: Any) -> None:
    for slot in (2, 3):
        rig.controller.add_slot(slot, "w", rank=slot - 2)
    prompt = list(range(CHUNK + 1))
    worker = worker_of(rig, "w-1")
    worker.register()
    worker.admit(*rig.keys(prompt))

    assert (rig.matched(prompt, 2), rig.matched(prompt, 3)) == (0, CHUNK)
