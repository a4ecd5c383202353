"""Daemons on one machine that serve each other's entries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.support.sockets import free_port, listening, tcp_server
from tests.tierd.conftest import StartNode

from kvroute.tierd.pool import PAGE_BYTES

DATA = bytes(range(256)) * 50


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of something that takes connections and never answers."""
    with listening() as port:
        yield f"http://127.0.0.1:{port}"


async def test_an_entry_of_another_daemon_is_fetched_and_leased_here(start_node: StartNode) -> None:
    far = await start_node()
    near = await start_node(peers={"urls": [far.url]})
    await far.client.put("org%2Fm@0", DATA)

    assert await near.client.get("org%2Fm@0", wait_ms=10_000) == DATA

    await far.client.http.aclose()
    assert near.running.store.counts.peer_fetches == {"fetched": 1}
    assert near.running.store.counts.peer_questions == {(far.url, "yes"): 1}
    assert await near.client.get("org%2Fm@0") == DATA


async def test_each_of_two_daemons_serves_the_other(start_node: StartNode) -> None:
    port = free_port()
    first = await start_node(peers={"urls": [f"http://127.0.0.1:{port}"]})
    second = await start_node(port=port, peers={"urls": [first.url]})
    await first.client.put("a", b"from a")
    await second.client.put("b", b"from b")

    assert await second.client.get("a", wait_ms=10_000) == b"from a"
    assert await first.client.get("b", wait_ms=10_000) == b"from b"
    assert await first.client.get("none", wait_ms=10_000) is None


async def test_a_question_does_not_travel_on(start_node: StartNode) -> None:
    third = await start_node()
    second = await start_node(peers={"urls": [third.url]})
    first = await start_node(peers={"urls": [second.url]})
    await third.client.put("k", DATA)

    assert await first.client.get("k", wait_ms=10_000) is None
    assert await second.client.get("k", wait_ms=10_000) == DATA
    assert await first.client.get("k", wait_ms=10_000) == DATA


async def test_many_readers_of_one_entry_fetch_it_once(start_node: StartNode) -> None:
    far = await start_node()
    near = await start_node(peers={"urls": [far.url]})
    await far.client.put("k", DATA)

    found = await asyncio.gather(*(near.client.get("k", wait_ms=10_000) for _ in range(8)))

    assert found == [DATA] * 8
    assert near.running.store.counts.peer_fetches == {"fetched": 1}


async def test_a_fetched_entry_may_be_in_pieces(start_node: StartNode) -> None:
    far = await start_node()
    near = await start_node(peers={"urls": [far.url]}, pages=8)
    for number in range(8):
        await near.client.put(str(number), bytes(PAGE_BYTES))
    for number in (1, 3, 5, 7):
        await near.client.lease(str(number))
    await far.client.put("k", DATA)

    assert await near.client.get("k", wait_ms=10_000) == DATA


async def test_without_room_the_entry_stays_with_the_peer(start_node: StartNode) -> None:
    far = await start_node()
    near = await start_node(peers={"urls": [far.url]}, pages=1)
    await far.client.put("k", DATA)

    assert await near.client.get("k", wait_ms=10_000) is None
    assert near.running.store.counts.peer_fetches == {"no_room": 1}


async def test_our_own_address_is_recognised(start_node: StartNode) -> None:
    port = free_port()
    node = await start_node(port=port, peers={"dns": f"localhost:{port}"})

    assert await node.client.get("k", wait_ms=10_000) is None

    peers = node.running.store.peers
    assert peers is not None
    assert f"http://127.0.0.1:{port}" not in peers.urls


async def test_the_addresses_of_a_name_are_peers(start_node: StartNode) -> None:
    far = await start_node()
    near = await start_node(peers={"dns": f"localhost:{far.running.port}"})
    await far.client.put("k", DATA)

    assert await near.client.get("k", wait_ms=10_000) == DATA
    assert (await near.client.health())["peers"] >= 1


async def test_a_peer_that_left_costs_only_its_entries(start_node: StartNode) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    far = await start_node()
    near = await start_node(peers={"urls": [absent, far.url], "rest_s": 1000})
    await far.client.put("k", DATA)

    assert await near.client.get("k", wait_ms=10_000) == DATA
    assert await near.client.get("none", wait_ms=10_000) is None
    assert await near.client.get("nothing", wait_ms=10_000) is None
    assert near.running.store.counts.peer_questions[absent, "failed"] == 1


async def test_a_silent_peer_does_not_delay_the_others(start_node: StartNode, silent: str) -> None:
    far = await start_node()
    near = await start_node(peers={"urls": [silent, far.url], "answer_timeout_s": 1000})
    await far.client.put("k", DATA)

    assert await near.client.get("k", wait_ms=10_000) == DATA
    assert await near.client.get("none", wait_ms=1) is None


async def test_a_silent_peer_is_a_miss_after_its_time(start_node: StartNode, silent: str) -> None:
    near = await start_node(peers={"urls": [silent], "answer_timeout_s": 0.001, "rest_s": 1000})

    assert await near.client.get("none", wait_ms=100_000) is None
    assert near.running.store.counts.peer_questions == {(silent, "failed"): 1}


async def test_a_peer_that_breaks_off_leaves_nothing_behind(start_node: StartNode) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 65536\r\n\r\n")
        writer.write(b"" if head.startswith(b"HEAD") else b"half")
        await writer.drain()

    async with tcp_server(half) as port:
        near = await start_node(peers={"urls": [f"http://127.0.0.1:{port}"]})

        assert await near.client.get("k", wait_ms=10_000) is None

    assert near.running.store.counts.peer_fetches == {"failed": 1}
    assert near.running.store.pool.space.free_bytes == near.running.store.pool.space.size_bytes
    assert await near.client.put("k", DATA) == 200


async def test_a_put_during_a_search_wins(start_node: StartNode, silent: str) -> None:
    near = await start_node(peers={"urls": [silent], "answer_timeout_s": 0.5})
    waiting = asyncio.create_task(near.client.lease("k", wait_ms=20_000))
    await near.client.health()

    assert await near.client.put("k", DATA) == 200

    assert near.client.read(await waiting) == DATA


async def test_peers_with_a_key_understand_each_other(start_node: StartNode) -> None:
    far = await start_node(peers={"key": "secret"})
    near = await start_node(peers={"urls": [far.url], "key": "secret"})
    stranger = await start_node(peers={"urls": [far.url], "key": "wrong"})
    await far.client.put("k", DATA)

    assert await near.client.get("k", wait_ms=10_000) == DATA
    assert await stranger.client.get("k", wait_ms=10_000) is None
    assert stranger.running.store.counts.peer_questions == {(far.url, "failed"): 1}


async def test_a_peer_reads_entries_on_the_disk(start_node: StartNode, tmp_path: object) -> None:
    far = await start_node(pages=4, disk_dir=tmp_path, disk_gb=0.01)
    near = await start_node(peers={"urls": [far.url]})
    for number in range(12):
        await far.client.put(str(number), bytes([number]) * PAGE_BYTES)

    assert [await near.client.get(str(number), wait_ms=10_000) for number in range(12)] == [
        bytes([number]) * PAGE_BYTES for number in range(12)
    ]
