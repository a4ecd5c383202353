"""Streams come and go with the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import zmq
from tests.support.waiting import until

from kvroute.blocks.keys import Tier, adapter_space, prompt_keys
from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.events.ingest import EventIngest
from kvroute.events.options import KvEventsOptions, KvEventSource, configured_sources, parse_sources
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import WorkerFacts, WorkerId, WorkerSpec
from kvroute.index.map_trust import MapTrust, TrustReason
from kvroute.index.prefix_index import PrefixIndex, TierMatch
from kvroute.wire.vllm import BlockStored

QUICK = KvEventsOptions(idle_check_s=0.05, replay_timeout_s=0.5, retry_s=0.02)
A = WorkerSpec(WorkerId("a"), "http://a.example:8000")
B = WorkerSpec(WorkerId("b"), "http://b.example:8000")


class Setup:
    """A fleet, its ingest and what each worker answers to `/kv_event_sources`."""

    def __init__(self, options: KvEventsOptions) -> None:
        self.pages: dict[str, Any] = {}
        self.index = PrefixIndex()
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.ingest = EventIngest(self.index, self.client, SystemClock(), options)
        self.fleet = Fleet()
        self.fleet.subscribe(self.ingest.fleet_changed)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        page = self.pages.get(request.url.host)
        return httpx.Response(503) if page is None else httpx.Response(200, json=page)

    def match(self, tokens: list[int]) -> dict[int, TierMatch]:
        return self.index.match(prompt_keys(tokens, adapter_space(None)))


@asynccontextmanager
async def running(options: KvEventsOptions = QUICK) -> AsyncIterator[Setup]:
    setup = Setup(options)
    task = asyncio.create_task(setup.ingest.run())
    try:
        await asyncio.wait(
            {task, bound := asyncio.create_task(setup.ingest.bound())}, return_when="FIRST_COMPLETED"
        )
        bound.cancel()
        yield setup
    finally:
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        await setup.client.aclose()
    if isinstance(outcome, Exception):
        raise outcome


Make = Callable[..., Any]
Tokens = Callable[[int, int], list[int]]


async def test_workers_are_followed_from_joining_to_leaving(engine_of: Make, tokens_of: Tokens) -> None:
    one, two, prompt = engine_of(), engine_of(), tokens_of(1, 100)
    one.serve(prompt)
    async with running() as setup:
        setup.fleet.apply("test", [A, B])
        a, b = setup.fleet.get("a"), setup.fleet.get("b")
        assert setup.ingest.trust(a) is MapTrust.NONE
        setup.pages = {"a.example": one.publisher.sources(), "b.example": two.publisher.sources()}
        await until(lambda: all(setup.ingest.trust(worker) is MapTrust.WHOLE for worker in (a, b)))
        slot = setup.ingest.streams(a)[0].slot

        assert setup.match(prompt) == {slot: TierMatch(96)}
        two.serve(prompt[:50])
        await until(lambda: len(setup.match(prompt)) == 2)

        setup.fleet.apply("test", [B])
        assert setup.ingest.streams(a) == ()
        assert setup.match(prompt) == {setup.ingest.streams(b)[0].slot: TierMatch(48)}
        one.serve(tokens_of(2, 100))
        await until(lambda: setup.index.size().blocks == 3)


async def test_a_restarted_workers_map_is_emptied_immediately_and_its_sources_are_read_again(
    engine_of: Make, tokens_of: Tokens
) -> None:
    old, new, prompt = engine_of(), engine_of(), tokens_of(1, 100)
    old.serve(prompt)
    new.serve(prompt[:33])
    async with running() as setup:
        setup.pages = {"a.example": old.publisher.sources()}
        setup.fleet.apply("test", [A])
        worker = setup.fleet.get("a")
        await until(lambda: setup.match(prompt) != {})
        setup.pages = {"a.example": new.publisher.sources()}

        setup.fleet.update_facts(worker, WorkerFacts(start_time=2.0), restarted=True)

        assert setup.match(prompt) == {}
        await until(lambda: list(setup.match(prompt).values()) == [TierMatch(32)])


async def test_a_slot_is_not_reused_until_its_worker_has_another(engine_of: Make, tokens_of: Tokens) -> None:
    """Its sources change; between its old streams' end and its new ones' beginning others come and go."""
    old, new, other = engine_of(), engine_of(), engine_of()
    old.serve(tokens_of(1, 100))
    seen: list[tuple[str, list[int], list[int]]] = []
    async with running() as setup:
        setup.ingest._streams_changed = lambda worker, before, now: seen.append(
            (worker.id, [stream.slot for stream in before], [stream.slot for stream in now])
        )
        setup.pages = {"a.example": old.publisher.sources()}
        setup.fleet.apply("test", [A])
        a = setup.fleet.get("a")
        await until(lambda: setup.match(tokens_of(1, 100)) != {})
        asked, known = asyncio.Event(), asyncio.Event()

        async def wait(_: object) -> None:
            asked.set()
            await known.wait()

        # Private: no input holds the ingest between the old streams' end and the new ones' start.
        setup.ingest._wait_for_start_time = wait  # type: ignore[assignment,method-assign]
        setup.pages = {"a.example": new.publisher.sources()}
        setup.fleet.update_facts(a, WorkerFacts(start_time=2.0), restarted=True)
        (shown,) = setup.ingest.streams(a)
        await until(lambda: shown.ledger._closed and asked.is_set())
        assert setup.ingest.trust(a) is MapTrust.NONE
        setup.ingest._wait_for_start_time = lambda _: asyncio.sleep(0)  # type: ignore[assignment,method-assign]
        setup.pages["b.example"] = other.publisher.sources()
        setup.fleet.apply("test", [A, B])
        await until(lambda: bool(setup.ingest.streams(setup.fleet.get("b"))))
        known.set()
        await until(lambda: setup.ingest.streams(a)[0] is not shown)

    assert seen[0] == ("a", [], [0])
    assert seen[1:3] == [("b", [], [1]), ("a", [0], [2])]


async def test_an_internal_error_is_logged_and_polling_continues(
    engine_of: Make, tokens_of: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    engine.serve(tokens_of(1, 100))
    async with running() as setup:
        setup.pages = {"a.example": b"no JSON"}  # httpx.Response raises TypeError for it
        setup.fleet.apply("test", [A])
        await until(lambda: "following the KV events of worker a failed" in caplog.text)

        setup.pages = {"a.example": engine.publisher.sources()}

        await until(lambda: setup.match(tokens_of(1, 100)) != {})


async def test_a_worker_without_events_is_logged_once_and_polled_again(
    engine_of: Make, tokens_of: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of()
    engine.serve(tokens_of(1, 100))
    async with running() as setup:
        setup.fleet.apply("test", [A])
        worker = setup.fleet.get("a")
        assert (setup.ingest.trust(worker), setup.ingest.reason(worker)) == (
            MapTrust.NONE,
            TrustReason.REPLAYING,
        )
        setup.pages = {"a.example": {}}
        await until(lambda: setup.ingest.reason(worker) is TrustReason.NO_EVENTS)
        assert setup.ingest.trust(worker) is MapTrust.NONE

        setup.pages = {"a.example": engine.publisher.sources()}

        await until(lambda: setup.ingest.reason(worker) is None)
        assert setup.ingest.trust(worker) is MapTrust.WHOLE
    assert sum("publishes no KV events" in record.getMessage() for record in caplog.records) == 1


async def test_figures_are_shown_by_worker_and_rank(engine_of: Make, tokens_of: Tokens) -> None:
    engine = engine_of()
    engine.serve(tokens_of(1, 100))
    async with running() as setup:
        assert setup.ingest.figures() == []
        setup.pages = {"a.example": engine.publisher.sources()}
        setup.fleet.apply("test", [A])
        worker = setup.fleet.get("a")
        await until(lambda: setup.ingest.trust(worker) is MapTrust.WHOLE)

        setup.ingest.distrust(worker, 1, "audit")
        assert setup.ingest.trust(worker) is MapTrust.WHOLE
        setup.ingest.distrust(worker, 0, "audit")

        (figures,) = setup.ingest.figures()
        assert (figures.worker, figures.rank, figures.reason) == ("a", 0, TrustReason.AUDIT)
        assert (figures.held_blocks[Tier.GPU], figures.blocks.stored, figures.counts.messages) == (6, 6, 1)
        await until(lambda: setup.ingest.trust(worker) is MapTrust.WHOLE)
        with pytest.raises(ValueError, match="nonsense"):
            setup.ingest.distrust(worker, 0, "nonsense")


async def test_workers_that_connect_to_the_gateway_are_separated_by_topic(tokens_of: Tokens) -> None:
    from kvroute.wire.vllm import DIALECTS
    from kvroute.wire.zmq import EventMessage, pack_live

    options = QUICK.model_copy(update={"bind": ("tcp://127.0.0.1:0",), "topic": "kv@{id}"})
    prompt = tokens_of(1, 32)
    store = BlockStored([1, 2], None, prompt, 16)
    payload = DIALECTS["map-0.30"].encode(1.0, [store], 0)
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        async with running(options) as setup:
            setup.fleet.apply("test", [A, B])
            publisher.connect(setup.ingest.listening[0])
            b = setup.fleet.get("b")
            await until(lambda: bool(setup.ingest.streams(b)))
            seq = 1  # not the engine's first batch, so the map may have gaps
            while not setup.match([*prompt, 1]):
                for topic in (b"kv@b", b"kv@stranger"):
                    publisher.send_multipart(pack_live(EventMessage(topic, seq, payload)))
                seq += 1
                await asyncio.sleep(0.01)

            assert setup.match([*prompt, 1]) == {setup.ingest.streams(b)[0].slot: TierMatch(32)}
            assert setup.ingest.trust(b) is MapTrust.PARTIAL


async def test_an_address_that_is_taken_is_an_error() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=rf"kv_events\.bind\.0: tcp://127\.0\.0\.1:{port}"):
            async with running(QUICK.model_copy(update={"bind": (f"tcp://127.0.0.1:{port}",)})):
                pass


def test_sources_name_the_workers_host_and_every_rank() -> None:
    body = (
        b'{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": "kv"},'
        b' "1": {"endpoint": "tcp://10.0.0.9:5558", "replay_endpoint": null, "topic": "kv"},'
        b' "2": {"enable_kv_cache_events": false, "endpoint": ""},'
        b' "3": {"publisher": "null"}}'
    )

    assert parse_sources(body, KvEventsOptions(), A) == [
        KvEventSource(0, "tcp://a.example:5557", "tcp://a.example:5657", "kv"),
        KvEventSource(1, "tcp://10.0.0.9:5558", None, "kv"),
    ]
    bound = parse_sources(body, KvEventsOptions(bind=("tcp://*:5557",)), A)
    assert [source.bind_index for source in bound] == [0, None]


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b'{"0": {"endpoint": 5}}', b'{"x": {"endpoint": "tcp://*:1"}}']
)
def test_other_pages_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_sources(body, KvEventsOptions(), A)


def test_configured_ranks_count_their_ports_up() -> None:
    options = KvEventsOptions(endpoint="tcp://{host}:5557", replay_endpoint="tcp://{host}:5657", ranks=2)

    assert configured_sources(options, A) == [
        KvEventSource(0, "tcp://a.example:5557", "tcp://a.example:5657", ""),
        KvEventSource(1, "tcp://a.example:5558", "tcp://a.example:5658", ""),
    ]
    assert configured_sources(KvEventsOptions(), A) == []
    with pytest.raises(ValueError, match="host"):
        KvEventsOptions(endpoint="tcp://{nobody}:1")
