from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import respx
from tests.support.clocks import JumpingClock
from tests.support.waiting import until

from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.membership import ServedWorker
from kvroute.lmcache.options import LMCacheOptions, PrefetchOptions
from kvroute.lmcache.registration import ServerAddresses
from kvroute.lmcache.server_requests import Prefetcher, PrefetchOutcome
from kvroute.wire.lmcache_server import CacheEvents, EventEntry, ObjectKey, ServerRegistration

URL = "http://10.0.0.1:8080/cache/prefetches"
TOKENS = array("I", range(20_000))


def stored(model: str, world: int) -> CacheEvents:
    entries = [
        EventEntry(ObjectKey("ab" * 32, model, world << 24 | rank << 16 | world << 8 | rank))
        for rank in range(world)
    ]
    return CacheEvents("a", 1, 1, "store", "l1", "dram", entries)


class PrefetchRig:
    """A prefetcher whose requests respx answers; `done` waits until the given number is answered."""

    def __init__(self, servers: Sequence[str] = ("10.0.0.0/24",), **options: Any) -> None:
        self.clock = JumpingClock(100.0)
        self.coordinator = Coordinator(ChunkIndex(), self.clock, LMCacheOptions())
        self.client = httpx.AsyncClient(trust_env=False)
        self.prefetcher = Prefetcher(
            self.coordinator,
            self.client,
            self.clock,
            PrefetchOptions(enabled=True, **options),
            ServerAddresses(servers, lambda host: False),
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
        await until(lambda: sum(self.prefetcher.counts.values()) >= count)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        return {outcome.value: times for outcome, times in self.prefetcher.counts.items() if times}


@pytest.fixture
async def rig() -> AsyncIterator[PrefetchRig]:
    rig = PrefetchRig()
    rig.join()
    yield rig
    await rig.client.aclose()


@respx.mock
async def test_a_prompt_is_not_sent_to_an_address_that_is_neither_the_workers_nor_listed(caplog) -> None:
    """Whoever registers under a worker's id would get the token ids of its prompts."""
    rig = PrefetchRig(servers=())
    rig.join(address="10.0.0.66")
    server = respx.post("http://10.0.0.66:8080/cache/prefetches").respond(202)

    rig.ask()
    assert await rig.done() == {"unproven": 1}

    rig.join(address="10.0.0.9")  # the worker's own address
    own = respx.post("http://10.0.0.9:8080/cache/prefetches").respond(202, json={"chunks": 3})
    rig.ask()
    assert (await rig.done(2)).get("unproven") == 1
    assert (server.called, own.called) == (False, True)
    assert "10.0.0.66 is neither that of its worker" in caplog.text
    await rig.client.aclose()


@respx.mock
async def test_the_prefetch_has_the_form_of_the_workers_server(rig) -> None:
    """LMCache 0.5.6: v1/multiprocess/http_apis/schemas.py, `PrefetchRequest`."""
    answer = {"request_id": "r", "chunks": 2, "status": "submitted"}
    route = respx.post(URL).mock(return_value=httpx.Response(202, json=answer))
    rig.ask(salt="tenant")

    assert await rig.done() == {"submitted": 1}

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
async def test_outcomes_are_counted(rig, answer, outcome) -> None:
    effect = {"side_effect": answer} if isinstance(answer, Exception) else {"return_value": answer}
    respx.post(URL).mock(**effect)
    rig.ask()

    assert await rig.done() == {outcome.value: 1}


@respx.mock
async def test_a_failing_server_is_logged_once_until_it_works_again(rig, caplog) -> None:
    caplog.set_level(logging.INFO)
    answers = [httpx.Response(503), httpx.Response(503), httpx.Response(202, json={"chunks": 1})]
    respx.post(URL).mock(side_effect=answers)

    for number in range(3):
        rig.ask()
        await rig.done(number + 1)

    logged = [record.getMessage() for record in caplog.records if record.name.startswith("kvroute")]
    assert logged == [
        "LMCache server a did not accept a prefetch: status 503",
        "LMCache server a accepts prefetches again",
    ]


async def test_a_server_that_does_not_answer_counts_as_failed() -> None:
    rig = PrefetchRig(timeout_s=0.001)
    rig.join()

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with respx.mock:
        respx.post(URL).mock(side_effect=never)
        rig.ask()

        assert await rig.done() == {"failed": 1}
    await rig.client.aclose()


@respx.mock
async def test_a_prefetch_is_sent_after_the_delay() -> None:
    """After the delay an engine with free capacity has done its lookup, which could miss chunks being
    loaded."""
    rig = PrefetchRig(connections=1)
    rig.join()
    sent_at: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent_at.append(rig.clock.now())
        return httpx.Response(202, json={"chunks": 1})

    respx.post(URL).mock(side_effect=answer)
    rig.ask()
    rig.clock.time += 0.05
    rig.ask(spare_s=0.2)

    assert await rig.done(2) == {"submitted": 2}
    assert sent_at == pytest.approx([100.2, 100.25], abs=1e-6)
    await rig.client.aclose()


async def test_a_prefetch_that_would_be_too_late_is_not_sent(rig) -> None:
    rig.ask(spare_s=0.5)
    rig.clock.time += 1.0

    assert await rig.done() == {"late": 1}


async def test_a_prefetch_beyond_the_queues_size_is_dropped_and_counted() -> None:
    rig = PrefetchRig(max_waiting=1)
    rig.join()
    for _ in range(3):
        rig.ask(spare_s=-1.0)

    assert rig.prefetcher.counts[PrefetchOutcome.CROWDED] == 2
    assert await rig.done(3) == {"crowded": 2, "late": 1}
    await rig.client.aclose()


async def test_no_prefetch_is_sent_for_a_worker_whose_server_or_model_is_unknown() -> None:
    rig = PrefetchRig()
    rig.ask()
    assert not rig.prefetcher.has_server("a")
    assert not any(rig.prefetcher.counts.values())

    rig.coordinator.register(ServerRegistration("10.0.0.1", 8080, "a"))
    rig.coordinator.worker_changed(ServedWorker("a", "10.0.0.9", (0,), frozenset({"/models/m"})))
    rig.ask()

    assert rig.prefetcher.has_server("a")
    assert await rig.done() == {"unknown_model": 1}
    await rig.client.aclose()


@respx.mock
async def test_an_ipv6_server_gets_prefetches() -> None:
    rig = PrefetchRig(servers=("::1",))
    rig.join(address="::1")
    route = respx.post("http://[::1]:8080/cache/prefetches").mock(
        return_value=httpx.Response(202, json={"chunks": 1})
    )
    rig.ask()

    assert await rig.done() == {"submitted": 1}
    assert route.called
    await rig.client.aclose()
