from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import respx

from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.membership import ServedWorker
from kvroute.lmcache.options import LMCacheOptions, PrefetchOptions
from kvroute.lmcache.prefetch import Prefetcher, PrefetchOutcome
from kvroute.wire.lmcache_server import CacheEvents, EventEntry, ObjectKey, ServerRegistration

URL = "http://10.0.0.1:8080/cache/prefetches"
TOKENS = array("I", range(20_000))


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        end = self.time + seconds
        await asyncio.sleep(0)
        self.time = max(self.time, end)


def stored(model: str, world: int) -> CacheEvents:
    entries = [
        EventEntry(ObjectKey("ab" * 32, model, world << 24 | rank << 16 | world << 8 | rank))
        for rank in range(world)
    ]
    return CacheEvents("a", 1, 1, "store", "l1", "dram", entries)


class Asking:
    """A prefetcher whose questions are answered by respx; `done` waits until one was."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.coordinator = Coordinator(ChunkIndex(), self.clock, LMCacheOptions())
        self.client = httpx.AsyncClient(trust_env=False)
        self.prefetcher = Prefetcher(
            self.coordinator, self.client, self.clock, PrefetchOptions(enabled=True, **options)
        )

    def join(self, *, model: str = "/models/m", world: int = 2, address: str = "10.0.0.1") -> None:
        self.coordinator.register(ServerRegistration(address, 8080, "a"))
        self.coordinator.worker_changed(ServedWorker("a", "10.0.0.9", (0,), frozenset({"/models/m"})))
        batch = stored(model, world)
        self.coordinator.admit(batch)
        self.coordinator.apply(batch)

    def ask(self, *, spare_s: float = 1.0, salt: str = "") -> None:
        self.prefetcher.request("a", TOKENS, salt, spare_s)

    async def done(self, count: int = 1) -> dict[str, int]:
        work = asyncio.create_task(self.prefetcher.run())
        async with asyncio.timeout(20):
            while sum(self.prefetcher.counts.values()) < count:
                await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return {outcome.value: times for outcome, times in self.prefetcher.counts.items() if times}


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    asking = Asking()
    asking.join()
    yield asking
    await asking.client.aclose()


@respx.mock
async def test_the_workers_server_is_asked_in_its_own_words(asking) -> None:
    """LMCache 0.5.6: v1/multiprocess/http_apis/schemas.py, `PrefetchRequest`."""
    answer = {"request_id": "r", "chunks": 2, "status": "submitted"}
    route = respx.post(URL).mock(return_value=httpx.Response(202, json=answer))
    asking.ask(salt="tenant")

    assert await asking.done() == {"submitted": 1}

    assert json.loads(route.calls[0].request.content) == {
        "model_name": "/models/m",
        "world_size": 2,
        "token_ids": list(TOKENS),
        "cache_salt": "tenant",
        "source_tier": "l2",
        "target_tier": "l1",
    }
    assert route.calls[0].request.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (httpx.Response(202, json={"chunks": 0, "status": "noop"}), PrefetchOutcome.NOTHING),
        (httpx.Response(404), PrefetchOutcome.REFUSED),
        (httpx.Response(503, json={"detail": "no layout registered"}), PrefetchOutcome.REFUSED),
        (httpx.Response(202, text="?"), PrefetchOutcome.REFUSED),
        (httpx.ConnectError("refused"), PrefetchOutcome.FAILED),
    ],
)
@respx.mock
async def test_what_became_of_it_is_counted(asking, answer, outcome) -> None:
    effect = {"side_effect": answer} if isinstance(answer, Exception) else {"return_value": answer}
    respx.post(URL).mock(**effect)
    asking.ask()

    assert await asking.done() == {outcome.value: 1}


@respx.mock
async def test_a_failing_server_is_named_once_until_it_works_again(asking, caplog) -> None:
    caplog.set_level(logging.INFO)
    answers = [httpx.Response(503), httpx.Response(503), httpx.Response(202, json={"chunks": 1})]
    respx.post(URL).mock(side_effect=answers)

    for number in range(3):
        asking.ask()
        await asking.done(number + 1)

    told = [record.getMessage() for record in caplog.records if record.name.startswith("kvroute")]
    assert told == ["LMCache server a does not prefetch: status 503", "LMCache server a prefetches again"]


async def test_a_server_that_does_not_answer_is_given_up() -> None:
    asking = Asking(timeout_s=0.001)
    asking.join()

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with respx.mock:
        respx.post(URL).mock(side_effect=never)
        asking.ask()

        assert await asking.done() == {"failed": 1}
    await asking.client.aclose()


@respx.mock
async def test_it_is_asked_for_after_the_delay() -> None:
    """An engine with room has looked into LMCache by then; chunks that came meanwhile it would not find."""
    asking = Asking(connections=1)
    asking.join()
    asked: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(asking.clock.now())
        return httpx.Response(202, json={"chunks": 1})

    respx.post(URL).mock(side_effect=answer)
    asking.ask()
    asking.clock.time += 0.05
    asking.ask(spare_s=0.2)

    assert await asking.done(2) == {"submitted": 2}
    assert asked == pytest.approx([100.2, 100.25], abs=1e-6)
    await asking.client.aclose()


async def test_what_would_come_too_late_is_not_asked_for(asking) -> None:
    asking.ask(spare_s=0.5)
    asking.clock.time += 1.0

    assert await asking.done() == {"late": 1}


async def test_what_is_beyond_the_queue_is_dropped_and_counted() -> None:
    asking = Asking(max_waiting=1)
    asking.join()
    for _ in range(3):
        asking.ask(spare_s=-1.0)

    assert asking.prefetcher.counts[PrefetchOutcome.CROWDED] == 2
    assert await asking.done(3) == {"crowded": 2, "late": 1}
    await asking.client.aclose()


async def test_a_worker_whose_server_or_model_is_not_known_is_left_alone() -> None:
    asking = Asking()
    asking.ask()
    assert not asking.prefetcher.has_server("a")
    assert not any(asking.prefetcher.counts.values())

    asking.coordinator.register(ServerRegistration("10.0.0.1", 8080, "a"))
    asking.coordinator.worker_changed(ServedWorker("a", "10.0.0.9", (0,), frozenset({"/models/m"})))
    asking.ask()

    assert asking.prefetcher.has_server("a")
    assert await asking.done() == {"unknown_model": 1}
    await asking.client.aclose()


@respx.mock
async def test_an_ipv6_server_is_asked() -> None:
    asking = Asking()
    asking.join(address="::1")
    route = respx.post("http://[::1]:8080/cache/prefetches").mock(
        return_value=httpx.Response(202, json={"chunks": 1})
    )
    asking.ask()

    assert await asking.done() == {"submitted": 1}
    assert route.called
    await asking.client.aclose()
