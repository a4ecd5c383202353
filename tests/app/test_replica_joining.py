"""From whom a process that joins gets the state of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.clocks import ManualClock
from tests.support.waiting import until

from kvroute.app.replica import Replica
from kvroute.fleet.fleet import Fleet
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.options import LMCacheOptions
from kvroute.replicas.cache_reports import CacheReports
from kvroute.replicas.messages import InSync, SnapshotRequest
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router


class Channel:
    """The channel as a `Replica` uses it: records what is sent."""

    name = "one/0"
    reporting_peers = ("tracker",)

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


def joining(channel: Channel, *, has_reports: bool = True) -> Replica:
    clock, index, fleet = ManualClock(0.0), CopyableChunkIndex(), Fleet()
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
