from __future__ import annotations

import random

from kvroute.app.replica import OverrideLog
from kvroute.fleet.fleet import AdminOverrides, Fleet
from kvroute.fleet.worker import WorkerId, WorkerSpec

SPECS = [WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}") for n in range(4)]
ADDED = WorkerSpec(WorkerId("x"), "http://x", ("m",), 1000, "prefill", False, "node-1")


class Process:
    """A fleet whose changes by hand wait in `sent`, as between gateways that are cut off."""

    def __init__(self, author: str) -> None:
        self.fleet = Fleet()
        self.fleet.apply("test", SPECS)
        self.log = OverrideLog(author)
        self.sent: list = []
        self.fleet.subscribe_admin_overrides(lambda overrides: self.sent.append(self.log.changed(overrides)))

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

    one.receive(other.log.snapshot())
    other.receive(one.log.snapshot())

    assert one.seen() == other.seen() == ({ADDED}, {"w2"}, {"w0", "w1"})


def test_the_end_of_a_drain_wins_over_the_drain_that_another_one_still_has():
    one, other = Process("one"), Process("other")
    one.fleet.drain("w0")
    other.receive(one.log.snapshot())
    other.fleet.undrain("w0")

    one.receive(other.log.snapshot())
    other.receive(one.log.snapshot())

    assert one.seen() == other.seen() == (set(), set(), set())


def test_all_agree_after_random_changes_and_exchanges_in_any_order():
    rng = random.Random(8)
    all_ = [Process(str(number)) for number in range(3)]
    for _ in range(200):
        process, worker = rng.choice(all_), rng.choice(SPECS)
        known = {each.id for each in process.fleet.workers()}
        if rng.random() < 0.3:
            process.receive(rng.choice(all_).log.snapshot())
        elif worker.id not in known:
            process.fleet.add(worker)
        elif rng.random() < 0.2:
            process.fleet.remove(worker.id)
        else:
            rng.choice([process.fleet.drain, process.fleet.undrain])(worker.id)

    for receiver in all_:
        for sender in rng.sample(all_, 3):
            receiver.receive(sender.log.snapshot())

    assert all_[0].seen() == all_[1].seen() == all_[2].seen()


def test_a_removal_ends_everywhere_when_the_source_stops_to_list_the_worker():
    one, other = Process("one"), Process("other")
    one.fleet.remove("w0")
    other.receive(one.log.snapshot())
    for process in (one, other):
        process.fleet.apply("test", SPECS[1:])
        process.fleet.apply("test", SPECS)

    other.fleet.drain("w1")
    one.receive(other.sent[-1])

    assert one.seen() == other.seen() == (set(), set(), {"w1"})


def test_a_message_that_changes_nothing_applies_nothing():
    one, other = Process("one"), Process("other")
    one.fleet.drain("w0")
    snapshot = one.log.snapshot()

    assert other.log.merge(snapshot, AdminOverrides()) is not None
    assert other.log.merge(snapshot, AdminOverrides(drained=frozenset([WorkerId("w0")]))) is None
