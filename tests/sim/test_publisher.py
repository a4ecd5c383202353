"""Events as a subscriber and a replay client see them, over real ZMQ sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import zmq
import zmq.asyncio

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions
from kvroute.sim.prompts import encode
from kvroute.sim.publisher import Fault
from kvroute.wire.vllm import DIALECTS, AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvroute.wire.zmq import EventMessage, pack_replay_request, unpack_live, unpack_replay


@asynccontextmanager
async def subscribed(sim: RunningSim) -> AsyncIterator[zmq.asyncio.Socket]:
    """A SUB socket whose subscription has reached the publisher."""
    assert sim.worker.publisher is not None
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(sim.worker.publisher.endpoint)
        await monitor.recv_multipart()
        socket.disable_monitor()
        monitor.close(linger=0)
        # The subscription follows the handshake; a message that comes back proves that it has arrived.
        probe = None
        while probe is None:
            sim.worker.publisher._pub.send_multipart([b"probe"])
            if await socket.poll(5):
                probe = await socket.recv_multipart()
        while await socket.poll(5):
            await socket.recv_multipart()
        yield socket


async def replay(sim: RunningSim, start: int) -> list[EventMessage]:
    assert sim.worker.publisher is not None
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(sim.worker.publisher.replay_endpoint)
        await socket.send_multipart([b"only one frame"])
        await socket.send_multipart(pack_replay_request(start))
        messages = []
        while (message := unpack_replay(await socket.recv_multipart())) is not None:
            messages.append(message)
        return messages


async def ask(http: httpx.AsyncClient, text: str, **extra: object) -> None:
    answer = await http.post("/v1/completions", json={"prompt": text, "max_tokens": 2, **extra})
    assert answer.status_code == 200


async def test_stored_blocks_carry_the_prompts_first_full_blocks(
    sim: RunningSim, http: httpx.AsyncClient
) -> None:
    text = "hello " * 40
    async with subscribed(sim) as socket:
        await ask(http, text)
        message = unpack_live(await socket.recv_multipart())

    batch = decode_batch(message.payload)
    (event,) = batch.events
    assert (message.topic, message.seq, batch.dp_rank) == (b"kv", 0, 0)
    assert isinstance(event, BlockStored)
    assert event.token_ids == list(encode(text)[:80])
    assert (event.block_size, len(event.block_hashes), event.parent_block_hash) == (16, 5, None)


async def test_equal_prompts_have_equal_hashes_on_all_workers(options: SimOptions) -> None:
    hashes = []
    for _ in range(2):
        async with run_sim(options) as sim, httpx.AsyncClient(base_url=sim.url) as http:
            await ask(http, "hello " * 40)
            hashes.append(sim.engine.cache.held_keys)

    assert hashes[0] == hashes[1] != set()


async def test_the_session_of_a_request_is_named_by_body_or_header(
    sim: RunningSim, http: httpx.AsyncClient
) -> None:
    await ask(http, "a" * 60, session_id="body")
    await http.post(
        "/v1/completions", json={"prompt": "b" * 60, "max_tokens": 1}, headers={"X-Session-ID": "head"}
    )
    await ask(http, "c" * 60, vllm_xargs={"session_id": "xargs"})

    names = [
        event.session_id
        for message in await replay(sim, 0)
        for event in decode_batch(message.payload).events
        if isinstance(event, BlockStored)
    ]
    assert names == ["body", "head", "xargs"]


async def test_a_dropped_batch_leaves_a_gap_that_replay_fills(
    sim: RunningSim, http: httpx.AsyncClient
) -> None:
    async with subscribed(sim) as socket:
        sim.worker.faults.add(Fault(kind="drop_events"))
        await ask(http, "a" * 60)
        await ask(http, "b" * 60)
        first = unpack_live(await socket.recv_multipart())

    assert first.seq == 1
    assert [message.seq for message in await replay(sim, 0)] == [0, 1]
    assert [message.seq for message in await replay(sim, 1)] == [1]
    assert await replay(sim, 2) == []


async def test_a_duplicated_batch_comes_twice_under_one_number(
    sim: RunningSim, http: httpx.AsyncClient
) -> None:
    async with subscribed(sim) as socket:
        sim.worker.faults.add(Fault(kind="duplicate_events"))
        await ask(http, "a" * 60)
        await ask(http, "b" * 60)
        seqs = [unpack_live(await socket.recv_multipart()).seq for _ in range(3)]

    assert seqs == [0, 0, 1]


async def test_a_restart_numbers_from_0_with_nothing_to_replay(
    sim: RunningSim, http: httpx.AsyncClient
) -> None:
    async with subscribed(sim) as socket:
        await ask(http, "a" * 60)
        sim.worker.restart()
        assert await replay(sim, 0) == []
        await ask(http, "a" * 60)
        seqs = [unpack_live(await socket.recv_multipart()).seq for _ in range(2)]

    assert seqs == [0, 0]


async def test_a_full_buffer_drops_the_oldest_batches() -> None:
    options = SimOptions(time_scale=0, event_buffer_steps=2)
    async with run_sim(options) as sim, httpx.AsyncClient(base_url=sim.url) as http:
        for text in "abcd":
            await ask(http, text * 60)

        assert [message.seq for message in await replay(sim, 0)] == [2, 3]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_carries_the_same_events_live_and_replayed(dialect: str) -> None:
    options = SimOptions(
        time_scale=0, event_dialect=dialect, capacity_tokens=64, byte_hashes=True, event_topic="kv@here"
    )
    async with (
        run_sim(options) as sim,
        httpx.AsyncClient(base_url=sim.url) as http,
        subscribed(sim) as socket,
    ):
        await ask(http, "a" * 150)
        await http.post("/reset_prefix_cache")
        await ask(http, "b" * 150)
        await ask(http, "c" * 150)
        live = [unpack_live(await socket.recv_multipart()) for _ in range(3)]
        again = await replay(sim, 0)

        held: set[int | bytes] = set()
        kinds = []
        for message in live:
            for event in decode_batch(message.payload).events:
                kinds.append(type(event))
                if isinstance(event, AllBlocksCleared):
                    held.clear()
                elif isinstance(event, BlockStored):
                    held.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    held.difference_update(event.block_hashes)

        assert [message.payload for message in live] == [message.payload for message in again]
        assert {message.topic for message in again} == {b"kv@here" if DIALECTS[dialect].replay_topic else b""}
        assert {BlockStored, BlockRemoved, AllBlocksCleared} == set(kinds)
        assert held == {sim.engine.cache.external_hash(key) for key in sim.engine.cache.held_keys}


async def test_the_bound_endpoints_are_published(sim: RunningSim, http: httpx.AsyncClient) -> None:
    source = (await http.get("/kv_event_sources")).json()["0"]

    assert sim.worker.publisher is not None
    assert source["endpoint"] == sim.worker.publisher.endpoint
    assert source["replay_endpoint"] == sim.worker.publisher.replay_endpoint
    assert source["endpoint"] != source["replay_endpoint"]
    assert not source["endpoint"].endswith(":0")


async def test_an_endpoint_in_use_is_an_error(sim: RunningSim) -> None:
    assert sim.worker.publisher is not None
    options = SimOptions(event_endpoint=sim.worker.publisher.endpoint)

    with pytest.raises(zmq.ZMQError):
        async with asyncio.timeout(5), run_sim(options):
            pass
