"""From whom a process that joins gets the state of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.clocks import AdvancingClock, ManualClock
from tests.support.waiting import until

from kvroute.app.replica import Replica
from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.options import LMCacheOptions
from kvroute.replicas.cache_reports import CacheReports
from kvroute.replicas.messages import InSync, PlacedSessions, SnapshotRequest
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router


class Channel:
    """The channel as a `Replica` uses it: records what is sent."""

    name = "one/0"
    reporting_peers = ("tracker",)
    has_joined = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, peer: str, *messages: Any) -> bool:
        self.sent += [(peer, message) for message in messages]
        return True

    def publish(self, *messages: Any) -> None: ...
    async def start(self, listener: Any) -> None: ...
    async def joined(self, timeout_s: float) -> bool:
        return self.has_joined

    async def has_room(self) -> None: ...
    async def aclose(self) -> None: ...


def joining(channel: Channel, *, has_reports: bool = True, clock: Clock | None = None) -> Replica:
    clock = clock or ManualClock(0.0)
    index, fleet = CopyableChunkIndex(), Fleet()
    coordinator = Coordinator(index, clock, LMCacheOptions())
    reports = CacheReports(index, coordinator, None, channel, "one", clock) if has_reports else None
    replica = Replica(0, None, channel, generation=0)  # type: ignore[arg-type]
    replica.attach_services(fleet, Router(RoutingOptions()), None, clock, None, None, reports)  # type: ignore[arg-type]
    return replica


@pytest.mark.parametrize("order", [("mirror", "tracker"), ("tracker", "mirror")])
async def test_reports_come_from_a_process_that_has_them(order):
    channel = Channel()
    replica = joining(channel)

    for peer in order:
        replica.on_linked(peer, is_synced=True)

    first, second = order
    wanted = [(first, SnapshotRequest())]
    if second == "tracker":
        wanted.append((second, SnapshotRequest(only_reports=True)))
    assert channel.sent == wanted
    waiting = asyncio.ensure_future(replica.wait_until_synced(60.0, 60.0))
    for peer, _ in wanted:
        assert not replica.is_synced
        replica.on_message(peer, InSync())
    await waiting
    assert replica.is_synced


async def test_reports_are_asked_of_another_process_when_the_first_one_is_lost():
    channel = Channel()
    replica = joining(channel)
    replica.on_linked("mirror", is_synced=True)
    replica.on_linked("tracker", is_synced=True)
    replica.on_peer_gone("tracker")
    channel.reporting_peers = ("other",)

    replica.on_linked("other", is_synced=True)
    replica.on_message("mirror", InSync())
    assert not replica.is_synced
    replica.on_message("other", InSync(only_reports=True))

    assert channel.sent[-1] == ("other", SnapshotRequest(only_reports=True))
    assert replica.is_synced


async def test_another_process_is_asked_when_the_first_one_is_lost():
    channel = Channel()
    replica = joining(channel, has_reports=False)
    replica.on_linked("one", is_synced=True)
    replica.on_linked("starts too", is_synced=False)
    replica.on_linked("other", is_synced=True)

    replica.on_peer_gone("one")
    assert channel.sent == [("one", SnapshotRequest()), ("other", SnapshotRequest())]
    replica.on_message("other", InSync())
    assert replica.is_synced


async def test_processes_are_asked_in_turn_until_one_answers():
    channel, clock = Channel(), AdvancingClock()
    replica = joining(channel, has_reports=False, clock=clock)
    await replica.start()
    for peer in ("one", "other"):
        replica.on_linked(peer, is_synced=True)
    await clock.advance(5.0)
    assert [peer for peer, _ in channel.sent] == ["one"]

    await clock.advance(5.0)  # nothing came
    assert [peer for peer, _ in channel.sent] == ["one", "other"]
    replica.on_message("one", PlacedSessions([]))  # too late
    await clock.advance(10.0)
    assert [peer for peer, _ in channel.sent] == ["one", "other", "one"]
    replica.on_message("one", PlacedSessions([]))  # its answer is long
    await clock.advance(9.0)
    replica.on_message("one", PlacedSessions([]))
    await clock.advance(5.0)
    assert len(channel.sent) == 3
    replica.on_message("one", InSync())
    await clock.advance(20.0)

    assert len(channel.sent) == 3
    assert replica.is_synced
    await replica.aclose()


async def test_the_end_of_an_answer_about_reports_is_not_the_end_of_the_state():
    channel, clock = Channel(), AdvancingClock()
    replica = joining(channel, clock=clock)
    await replica.start()
    replica.on_linked("mirror", is_synced=True)
    replica.on_linked("tracker", is_synced=True)
    await clock.advance(10.0)  # neither has answered
    assert channel.sent == [
        ("mirror", SnapshotRequest()),
        ("tracker", SnapshotRequest(only_reports=True)),
        ("mirror", SnapshotRequest()),
        ("tracker", SnapshotRequest(only_reports=True)),
    ]
    replica.on_peer_gone("mirror")
    assert channel.sent[-1] == ("tracker", SnapshotRequest())

    replica.on_message("tracker", InSync(only_reports=True))
    assert not replica.is_synced
    replica.on_message("tracker", InSync())

    assert replica.is_synced
    await replica.aclose()


async def test_reports_of_a_silent_process_are_asked_of_another_one():
    channel, clock = Channel(), AdvancingClock()
    channel.reporting_peers = ("one", "other")
    replica = joining(channel, clock=clock)
    await replica.start()
    replica.on_linked("one", is_synced=True)
    replica.on_linked("other", is_synced=True)
    await clock.advance(10.0)

    assert channel.sent == [("one", SnapshotRequest()), ("other", SnapshotRequest())]
    waiting = asyncio.ensure_future(replica.wait_until_synced(60.0, 60.0))
    replica.on_message("other", InSync())
    await waiting
    assert replica.is_synced
    await clock.advance(60.0)
    assert len(channel.sent) == 2
    await replica.aclose()


async def test_a_start_does_not_wait_for_a_process_that_is_gone():
    channel = Channel()
    replica = joining(channel, has_reports=False)
    replica.on_linked("one", is_synced=True)
    waiting = asyncio.ensure_future(replica.wait_until_synced(60.0, 60.0))
    await asyncio.sleep(0)

    replica.on_peer_gone("one")
    await waiting

    assert replica.is_synced
    replica.on_linked("other", is_synced=True)  # it may have what was lost
    assert channel.sent[-1] == ("other", SnapshotRequest())


async def test_a_question_is_not_answered_twice_at_the_same_time():
    channel = Channel()
    replica = joining(channel, has_reports=False)

    for _ in range(3):
        replica.on_message("joins", SnapshotRequest())
    await until(lambda: InSync() in [message for _, message in channel.sent])
    assert sum(isinstance(message, InSync) for _, message in channel.sent) == 1
    await until(lambda: not asyncio.all_tasks() - {asyncio.current_task()})
    replica.on_message("joins", SnapshotRequest())
    await until(lambda: sum(isinstance(message, InSync) for _, message in channel.sent) == 2)
    await replica.aclose()


async def test_the_first_gateway_of_a_fleet_asks_nobody_later():
    """A separated gateway has counted the use of limits by the others already."""
    channel = Channel()
    replica = joining(channel)
    await replica.wait_until_synced(60.0, 60.0)

    replica.on_linked("other", is_synced=True)

    assert replica.is_synced
    assert channel.sent == []


async def test_a_gateway_that_met_no_member_at_its_start_asks_when_it_reaches_others():
    channel = Channel()
    channel.has_joined = False
    replica = joining(channel)
    await replica.wait_until_synced(60.0, 60.0)

    replica.on_linked("other", is_synced=True)

    assert channel.sent == [("other", SnapshotRequest())]


async def test_a_process_that_mirrors_the_map_needs_no_reports():
    channel = Channel()
    replica = joining(channel, has_reports=False)
    replica.on_linked("tracker", is_synced=True)
    replica.on_linked("mirror", is_synced=True)

    replica.on_message("tracker", InSync())

    assert channel.sent == [("tracker", SnapshotRequest())]
    assert replica.is_synced


async def test_a_question_for_reports_alone_is_not_answered_with_the_history():
    channel = Channel()
    replica = joining(channel)

    replica.on_message("mirror", SnapshotRequest(only_reports=True))
    await until(lambda: channel.sent)

    assert channel.sent == [("mirror", InSync(only_reports=True))]
    channel.sent.clear()
    replica.on_message("joins", SnapshotRequest())
    await until(lambda: channel.sent and channel.sent[-1] == ("joins", InSync()))
    await replica.aclose()
