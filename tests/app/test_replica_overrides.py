from __future__ import annotations

import random
from itertools import permutations

import msgspec
import pytest
from tests.support.clocks import ManualClock

from kvroute.app.replica import OverrideLog
from kvroute.fleet.fleet import AdminOverrides, Fleet
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.replicas.messages import OverridesChanged

SPECS = [WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}") for n in range(4)]
ADDED = WorkerSpec(WorkerId("x"), "http://x", ("m",), 1000, "prefill", False, "node-1")


class Process:
    """A fleet whose changes by hand wait in `sent`, as between gateways that are cut off."""

    def __init__(self, author: str, workers=SPECS) -> None:
        self.fleet = Fleet()
        self.fleet.apply("test", workers)
        self.clock = ManualClock()
        self.log = OverrideLog(author)
        self.sent: list = []
        self.fleet.subscribe_admin_overrides(
            lambda *change: self.sent.append(self.log.changed(*change, self.clock.wall()))
        )

    def snapshot(self):
        return self.log.snapshot(self.fleet.admin_overrides())

    def lose_and_find(self, lost: str) -> None:
        """Let the worker leave and return."""
        self.fleet.apply("test", [spec for spec in SPECS if spec.id != lost])
        self.fleet.apply("test", SPECS)

    def receive(self, message) -> None:
        overrides = self.log.merge(message, self.fleet.admin_overrides())
        if overrides is not None:
            self.fleet.apply_admin_overrides(overrides)

    def seen(self) -> tuple:
        overrides = self.fleet.admin_overrides()
        return set(overrides.added), overrides.removed, overrides.drained


def test_changes_of_separated_gateways_are_merged():
    one, other = Process("one"), Process("other")
    one.fleet.drain("w0")
    other.fleet.drain("w1")
    other.fleet.remove("w2")
    other.fleet.add(ADDED)

    one.receive(other.snapshot())
    other.receive(one.snapshot())

    assert one.seen() == other.seen() == ({ADDED}, {"w2"}, {"w0", "w1"})


def test_the_end_of_a_drain_wins_over_the_drain_that_another_one_still_has():
    one, other = Process("one"), Process("other")
    one.fleet.drain("w0")
    other.receive(one.snapshot())
    other.fleet.undrain("w0")

    one.receive(other.snapshot())
    other.receive(one.snapshot())

    assert one.seen() == other.seen() == (set(), set(), set())


@pytest.mark.parametrize("seed", range(4))
def test_all_agree_after_random_changes_leaves_and_exchanges_in_any_order(seed):
    rng = random.Random(seed)
    all_ = [Process(str(number)) for number in range(3)]
    for _ in range(200):
        process, worker = rng.choice(all_), rng.choice(SPECS)
        known = {each.id for each in process.fleet.workers()}
        if rng.random() < 0.3:
            process.receive(rng.choice(all_).snapshot())
        elif rng.random() < 0.1:
            for each in all_:
                each.lose_and_find(worker.id)
        elif worker.id not in known:
            process.fleet.add(worker)
        elif rng.random() < 0.2:
            process.fleet.remove(worker.id)
        else:
            rng.choice([process.fleet.drain, process.fleet.undrain])(worker.id)
        process.clock.time += rng.choice([0.0, 0.01])

    all_.append(Process("joins"))
    for receiver in all_:
        for sender in rng.sample(all_, 4):
            receiver.receive(sender.snapshot())

    assert all_[0].seen() == all_[1].seen() == all_[2].seen() == all_[3].seen()


def test_a_removal_ends_everywhere_when_the_source_stops_to_list_the_worker():
    one, other = Process("one"), Process("other")
    one.fleet.remove("w0")
    other.receive(one.snapshot())
    for process in (one, other):
        process.lose_and_find("w0")

    other.fleet.drain("w1")
    one.receive(other.sent[-1])

    assert one.seen() == other.seen() == (set(), set(), {"w1"})


def test_a_message_that_changes_nothing_applies_nothing():
    one, other = Process("one"), Process("other")
    one.fleet.drain("w0")
    snapshot = one.snapshot()

    assert other.log.merge(snapshot, AdminOverrides()) is not None
    assert other.log.merge(snapshot, AdminOverrides(drained=frozenset([WorkerId("w0")]))) is None


@pytest.mark.parametrize("change", [Fleet.drain, Fleet.remove])
def test_what_ended_because_the_worker_left_does_not_return_with_a_process_that_joins(change):
    one, other, joins = Process("one"), Process("other"), Process("joins")
    change(one.fleet, "w0")
    other.receive(one.sent[-1])
    for process in (one, other):
        process.lose_and_find("w0")

    joins.receive(one.snapshot())
    joins.receive(other.snapshot())
    joins.fleet.drain("w3")
    for process in (one, other):
        process.receive(joins.sent[-1])

    assert one.seen() == other.seen() == joins.seen() == (set(), set(), {"w3"})


@pytest.mark.parametrize("change", [Fleet.drain, Fleet.remove])
def test_a_change_of_another_worker_ends_nothing_that_only_this_process_saw_leave(change):
    one, loses = Process("one"), Process("loses")
    change(one.fleet, "w0")
    held = one.seen()
    loses.receive(one.sent[-1])
    loses.lose_and_find("w0")

    loses.fleet.drain("w3")
    loses.fleet.undrain("w3")
    for message in [*loses.sent, loses.snapshot()]:
        one.receive(message)
    loses.receive(one.snapshot())

    assert one.seen() == held
    assert loses.seen() == (set(), set(), set())


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_process_that_joins_takes_a_drain_that_one_process_has_not_seen_end(order):
    one, loses, joined = all_ = [Process("one"), Process("loses"), Process("joined")]
    one.fleet.drain("w0")
    loses.receive(one.sent[-1])
    loses.lose_and_find("w0")
    joined.receive(loses.snapshot())
    joins = Process("joins")

    for sender in order:
        joins.receive(all_[sender].snapshot())

    assert joins.seen() == one.seen() == (set(), set(), {"w0"})


def test_an_end_that_was_seen_here_does_not_count_against_a_later_drain():
    one, loses, cut_off = Process("one"), Process("loses"), Process("cut off")
    one.fleet.drain("w0")
    cut_off.receive(one.sent[-1])
    cut_off.lose_and_find("w0")
    one.fleet.drain("w0")
    loses.receive(one.sent[-1])
    loses.lose_and_find("w0")

    cut_off.receive(loses.snapshot())
    cut_off.receive(one.snapshot())

    assert cut_off.seen() == one.seen() == (set(), set(), {"w0"})


@pytest.mark.parametrize("change", [Fleet.drain, Fleet.undrain, Fleet.remove])
@pytest.mark.parametrize("author", range(2))
def test_a_change_by_hand_holds_everywhere_also_if_the_drain_has_ended_in_one_process_only(change, author):
    one, loses = all_ = Process("one"), Process("loses")
    one.fleet.drain("w0")
    loses.receive(one.sent[-1])
    loses.lose_and_find("w0")

    change(all_[author].fleet, "w0")
    all_[not author].receive(all_[author].sent[-1])

    expected = Process("expected")
    change(expected.fleet, "w0")
    assert one.seen() == loses.seen() == expected.seen()


def test_a_drain_of_a_worker_that_is_not_known_yet_waits_for_it():
    one, late, last = Process("one"), Process("late", SPECS[1:]), Process("last", SPECS[1:])
    one.fleet.drain("w0")
    late.receive(one.sent[-1])
    late.fleet.drain("w1")

    last.receive(late.snapshot())
    for process in (late, last):
        process.fleet.apply("test", SPECS)

    assert late.seen() == last.seen() == (set(), set(), {"w0", "w1"})
    late.lose_and_find("w0")
    assert [each.drained for each in late.snapshot().entries] == [False, True]


def test_a_worker_with_the_id_of_a_drained_one_serves_everywhere():
    one, other, joins = Process("one"), Process("other"), Process("joins")
    one.fleet.drain("w0")
    other.receive(one.sent[-1])
    for process in (one, other, joins):
        process.fleet.apply("test", [WorkerSpec(WorkerId("w0"), "http://new"), *SPECS[1:]])

    joins.receive(other.snapshot())
    joins.receive(one.snapshot())

    assert one.seen() == other.seen() == joins.seen() == (set(), set(), set())


def test_a_removed_worker_that_is_added_again_serves_everywhere():
    one, other = Process("one"), Process("other")
    one.fleet.remove("w0")
    other.receive(one.sent[-1])
    one.lose_and_find("w0")
    other.fleet.add(SPECS[0])

    one.receive(other.sent[-1])
    joins = Process("joins")
    for sender in (one, other):
        joins.receive(sender.snapshot())

    assert one.seen() == other.seen() == joins.seen() == ({SPECS[0]}, set(), set())


def test_the_later_change_wins_after_a_separation_with_more_changes_on_the_other_side():
    one, busy = Process("one"), Process("busy")
    for _ in range(3):
        busy.fleet.drain("w0")
        busy.fleet.undrain("w0")
    one.clock.time += 1
    one.fleet.drain("w0")

    one.receive(busy.snapshot())
    busy.receive(one.snapshot())

    assert one.seen() == busy.seen() == (set(), set(), {"w0"})


def test_others_change_what_a_process_whose_clock_is_ahead_has_changed():
    ahead, one = Process("ahead"), Process("one")
    ahead.clock.time += 1e9
    ahead.fleet.drain("w0")
    one.receive(ahead.sent[-1])

    one.fleet.undrain("w0")
    ahead.receive(one.sent[-1])

    assert one.seen() == ahead.seen() == (set(), set(), set())


def test_stamps_are_integers_that_every_release_reads():
    one = Process("one")
    one.clock.time += 1e9
    one.fleet.drain("w0")

    sent = msgspec.msgpack.encode(one.sent[-1])

    assert msgspec.msgpack.decode(sent, type=OverridesChanged) == one.sent[-1]
    assert one.sent[-1].entries[0].stamp == (int(one.clock.wall() * 1000), "one")
