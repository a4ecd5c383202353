"""Counters survive their processes: two processes' scrapes in one loop."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from kvroute.metrics import Metrics
from kvroute.replicas.mesh import Mesh
from kvroute.replicas.metrics import GatewayMetrics
from kvroute.tallies import Gauges


class SilentMember:
    is_synced = True

    def greeting(self, number):
        return ()

    def on_linked(self, number, *, is_synced):
        pass

    def on_message(self, number, message):
        raise AssertionError(message)

    def on_peer_gone(self, number):
        pass


class Process:
    """A process with its counters and its scrape."""

    def __init__(self, number, folder, generation=0):
        self.mesh = Mesh(number, 2, folder)
        self.metrics = Metrics()
        self.scrape = GatewayMetrics(self.mesh, self.metrics.registry, folder, generation=generation)
        self.metrics.registry.register(Gauges(self.scrape.figures))

    async def __aenter__(self):
        await self.scrape.load()
        await self.mesh.start(SilentMember())
        return self

    async def __aexit__(self, *_):
        await self.mesh.aclose()

    def count(self, times):
        for _ in range(times):
            self.metrics.retries.labels("refused").inc()

    async def shown(self, name="kvroute_retries_total"):
        page = await self.scrape.collect_all()
        return sum(
            sample.value for family in page.collect() for sample in family.samples if sample.name == name
        )


@pytest.fixture
async def two(tmp_path):
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(Process(number, tmp_path)) for number in range(2)]
        for process in made:
            await process.mesh.all_linked()
        yield made


async def test_any_process_shows_the_sum(two):
    two[0].count(3)
    two[1].count(4)

    assert await two[0].shown() == await two[1].shown() == 7


async def test_counts_stay_when_a_process_dies(two):
    two[1].count(4)
    assert await two[0].shown() == 4

    await two[1].mesh.aclose()

    assert await two[0].shown() == 4
    assert await two[0].shown("kvroute_processes_missing_total") == 1


async def test_a_successor_continues_the_counters(two, tmp_path):
    two[1].count(4)
    assert await two[0].shown() == 4
    await two[1].mesh.aclose()

    async with Process(1, tmp_path, generation=1) as successor:
        await successor.mesh.all_linked()
        await two[0].mesh.all_linked()
        successor.count(2)

        assert await two[0].shown() == await successor.shown() == 6
        assert await two[0].shown("kvroute_process_restarts_total") == 1
        await successor.mesh.aclose()

    async with Process(1, tmp_path, generation=2) as next_one:
        assert await next_one.shown() == 6
        assert await next_one.shown("kvroute_process_restarts_total") == 2


async def test_an_unreadable_file_loses_only_its_own_counters(two, tmp_path, caplog):
    two[1].count(4)
    await two[1].scrape.save()
    (tmp_path / "1.counters").write_bytes(b"\xc1")

    async with Process(1, tmp_path, generation=1) as successor:
        successor.count(1)

        assert await successor.shown() == 1
    assert "are lost" in caplog.text
