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
    is_up = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    def send(self, peer: str, *messages: Any) -> bool:
        self.sent += [(peer, message) for message in messages]
        return True

    def publish(self, *messages: Any) -> None: ...
    async def start(self, listener: Any) -> None: ...
    async def joined(self, timeout_s: float) -> bool:
        return True

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
    replica.on_message("other", InSync())

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


async def test_the_first_gateway_of_a_fleet_asks_nobody_later():
    """A separated gateway has counted the use of limits by the others already."""
    channel = Channel()
    replica = joining(channel)
    await replica.wait_until_synced(60.0, 60.0)

    replica.on_linked("other", is_synced=True)

    assert replica.is_synced
    assert channel.sent == []


async def test_a_gateway_that_started_without_redis_asks_when_it_reaches_others():
    channel = Channel()
    channel.is_up = False
    replica = joining(channel)
    await replica.wait_until_synced(60.0, 60.0)

    channel.is_up = True
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

    assert channel.sent == [("mirror", InSync())]
    channel.sent.clear()
    replica.on_message("joins", SnapshotRequest())
    await until(lambda: channel.sent and channel.sent[-1] == ("joins", InSync()))
    await replica.aclose()
