"""A daemon over real sockets and real shared memory, asked as LMCache asks, and as it never would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.clocks import QuickClock
from tests.support.waiting import until
from tests.tierd.conftest import Client, Node, StartNode

from kvroute.clock import SystemClock
from kvroute.tierd.pool import PAGE_BYTES
from kvroute.tierd.protocol import Connection, Connections


class Raw:
    """A connection that is written byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split()[1])
        length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await self.reader.readexactly(int(length[0].split(b":")[1])) if length else b""
        return status, body

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:  # it closed with bytes of ours unread
            return True


Connect = Callable[[Node], Awaitable[Raw]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`(node)` -> a connection that is closed with the test."""
    made: list[Raw] = []

    async def connect_to(node: Node) -> Raw:
        made.append(Raw(*await asyncio.open_connection("127.0.0.1", node.running.port)))
        return made[-1]

    yield connect_to
    for raw in made:
        raw.writer.close()
        with contextlib.suppress(ConnectionError):
            await raw.writer.wait_closed()


@pytest.fixture
async def raw(node: Node, connect: Connect) -> Raw:
    return await connect(node)


async def test_a_stored_object_is_leased_and_read(client: Client) -> None:
    data = bytes(range(256)) * 100
    assert await client.put("org%2Fmodel@00000000@0@ab", data) == 200

    lease = await client.lease("org%2Fmodel%4000000000@0@ab", wait_ms=1000)

    assert client.read(lease) == data
    assert await client.release(lease)
    assert await client.get("org%2Fmodel@00000000@0@ab", bucket="other") is None


async def test_a_second_put_of_a_name_changes_nothing(client: Client) -> None:
    await client.put("k", b"first")

    assert await client.put("k", b"second") == 409
    assert await client.get("k") == b"first"


async def test_a_miss_is_answered_immediately_when_no_object_can_arrive(client: Client) -> None:
    """With `wait_ms` far above the test's own limit."""
    assert await client.lease("k", wait_ms=100_000) is None


async def test_a_release_can_be_repeated(client: Client) -> None:
    """LMCache repeats a release until it receives 200; an ended lease needs no release."""
    await client.put("k", b"data")
    lease = await client.lease("k")

    assert await client.release(lease)
    assert not await client.release(lease)
    assert not await client.release({"id": "0123456789ab-1"})


async def test_a_lease_also_ends_with_the_call_of_older_lmcache(client: Client) -> None:
    """LMCache 0.3.9.post2; its classic connector accepts 200, 204 and 404."""
    await client.put("org%2Fmodel@ab", b"data")
    lease = await client.lease("org%2Fmodel%40ab")

    path = f"/v1/kv/b/org%2Fmodel%40ab/leases/{lease['id']}"
    answers = [await client.http.delete(path) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.json()["released"] for answer in answers] == [True, False]
    assert not await client.release(lease)


async def test_old_entries_make_room_but_leased_ones_do_not(client: Client) -> None:
    for number in range(16):
        await client.put(str(number), bytes([number]) * PAGE_BYTES)
    lease = await client.lease("0")

    for number in range(16, 31):
        assert await client.put(str(number), bytes([number]) * PAGE_BYTES) == 200

    assert client.read(lease) == bytes(PAGE_BYTES)
    assert await client.get("1") is None
    assert await client.get("30") == bytes([30]) * PAGE_BYTES
    leases = [await client.lease(str(number)) for number in range(16, 31)]
    assert await client.put("x", b"x") == 507
    await client.release(leases[0])
    assert await client.put("x", b"x") == 200


async def test_an_object_may_be_in_pieces(client: Client) -> None:
    for number in range(16):
        await client.put(str(number), bytes([number]) * PAGE_BYTES)
    held = [await client.lease(str(number)) for number in range(0, 16, 2)]
    data = bytes(range(251)) * 100

    assert await client.put("pieces", data) == 200

    lease = await client.lease("pieces")
    assert len(lease["offsets"]) == -(-len(data) // PAGE_BYTES)
    assert client.read(lease) == data
    assert (await client.http.get("/v1/kv/b/pieces")).content == data
    for number, each in zip(range(0, 16, 2), held, strict=True):
        assert client.read(each) == bytes([number]) * PAGE_BYTES


async def test_an_unreleased_lease_ends_with_its_time(start_node: StartNode) -> None:
    clock = QuickClock()
    node = await start_node(pages=1, clock=clock)
    await node.client.put("k", b"data")
    assert await node.client.lease("k", ttl_s=20)
    assert await node.client.put("other", b"data") == 507

    clock.ahead_s = 20.0

    assert await node.client.put("other", b"data") == 200
    assert await node.client.metric("kvroute_tierd_expired_leases_total") == 1


async def test_a_lease_waits_for_an_object_that_is_being_sent(node: Node, raw: Raw) -> None:
    await raw.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 8\r\n\r\nhalf")
    await until(lambda: node.running.store.incoming_count == 1)
    waiting = asyncio.create_task(node.client.lease("k", wait_ms=20_000))
    second = asyncio.create_task(node.client.put("k", b"other"))

    assert await second == 409
    assert not waiting.done()
    await raw.send(b"done")

    assert node.client.read(await waiting) == b"halfdone"


async def test_a_sender_that_leaves_is_a_miss_and_its_room_is_free(node: Node, raw: Raw) -> None:
    await raw.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 65536\r\n\r\nhalf")
    await until(lambda: node.running.store.incoming_count == 1)
    waiting = asyncio.create_task(node.client.lease("k", wait_ms=20_000))
    await asyncio.sleep(0)

    raw.writer.transport.abort()

    assert await waiting is None
    assert await node.client.put("k", bytes(16 * PAGE_BYTES)) == 200


async def test_a_wait_ends_in_time(node: Node, raw: Raw) -> None:
    await raw.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 8\r\n\r\nhalf")
    await until(lambda: node.running.store.incoming_count == 1)

    assert await node.client.lease("k", wait_ms=1) is None


async def test_with_holds_misses_a_reader_may_come_before_the_writer(start_node: StartNode) -> None:
    node = await start_node(holds_misses=True)
    waiting = [asyncio.create_task(node.client.lease("k", wait_ms=20_000)) for _ in range(2)]
    hasty = await node.client.lease("k", wait_ms=1)

    assert await node.client.put("k", b"data") == 200

    assert hasty is None
    assert [node.client.read(await each) for each in waiting] == [b"data", b"data"]


async def test_a_reader_that_leaves_while_it_waits_leaves_no_lease(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node(holds_misses=True)
    raw = await connect(node)
    await raw.send(b"POST /v1/kv/b/k/leases?timeout_ms=60000 HTTP/1.1\r\n\r\n")
    await node.client.health()
    raw.writer.transport.abort()
    # Private: no answer shows that the daemon has noticed the disconnect.
    await until(lambda: node.running.store._commit_waiters == {})

    await node.client.put("k", b"data")

    assert node.running.store.pool.leases == {}


async def test_requests_in_one_segment_are_answered_in_order(raw: Raw, client: Client) -> None:
    """Among them one whose answer takes a task."""
    await raw.send(
        b"PUT /v1/kv/b/a HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"
        b"GET /v1/kv/b/a HTTP/1.1\r\n\r\n"
        b"PUT /v1/kv/b/a HTTP/1.1\r\ncontent-length: 4\r\n\r\nmore"
        b"GET /v1/kv/b/none HTTP/1.1\r\n\r\n"
        b"POST /v1/leases/ab-1/release HTTP/1.1\r\n\r\n"
    )

    answers = [await raw.answer() for _ in range(5)]

    assert [status for status, _ in answers] == [200, 200, 409, 404, 200]
    assert answers[1][1] == b"abc"


async def test_a_request_may_come_in_single_bytes(raw: Raw, client: Client) -> None:
    for byte in b"PUT /v1/kv/b/k HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello":
        await raw.send(bytes([byte]))
        await asyncio.sleep(0)

    assert (await raw.answer())[0] == 200
    assert await client.get("k") == b"hello"


async def test_more_requests_than_the_buffer_holds_are_all_answered(raw: Raw) -> None:
    request = b"GET /v1/kv/b/none HTTP/1.1\r\npadding: " + b"x" * 1000 + b"\r\n\r\n"
    sending = asyncio.create_task(raw.send(request * 200))

    answers = [await raw.answer() for _ in range(200)]

    assert {status for status, _ in answers} == {404}
    await sending


async def test_a_client_that_takes_no_answers_is_not_answered_on(node: Node) -> None:
    """Else what is written for it would fill the memory."""

    class Transport(asyncio.Transport):
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
            assert high == 0

        def is_closing(self) -> bool:
            return False

    store = node.running.store
    connections = Connections(
        store,
        SystemClock(),
        incarnation="x",
        longest_lease_s=60,
        start=0,
        peer_key=None,
        status_page=lambda name: (200, "text/plain", name.encode()),
    )
    connection, transport = Connection(connections), Transport()
    connection.connection_made(transport)
    request = b"GET /health HTTP/1.1\r\n\r\n"
    connection.pause_writing()

    connection.get_buffer(-1)[: len(request)] = request
    connection.buffer_updated(len(request))
    assert transport.written == b""

    connection.resume_writing()
    assert transport.written.endswith(b"\r\n\r\nhealth")


async def test_a_client_that_expects_100_continue_gets_it(raw: Raw, client: Client) -> None:
    await raw.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
    assert await raw.answer() == (100, b"")
    await raw.send(b"abc")
    assert (await raw.answer())[0] == 200

    await raw.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
    assert (await raw.answer())[0] == 409
    assert await raw.is_closed()


async def test_connection_close_closes_after_the_answer(raw: Raw) -> None:
    await raw.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc")
    assert (await raw.answer())[0] == 200
    assert await raw.is_closed()


async def test_an_object_is_sent_to_its_end_before_the_connection_closes(
    node: Node, connect: Connect
) -> None:
    await node.client.put("k", b"abc")
    raw = await connect(node)
    await raw.send(b"GET /v1/kv/b/k HTTP/1.0\r\n\r\n")
    assert await raw.answer() == (200, b"abc")
    assert await raw.is_closed()


@pytest.mark.parametrize(
    ("request_bytes", "status", "param"),
    [
        (b"PUT /v1/kv/b/k HTTP/1.1\r\n\r\n", 411, "Content-Length"),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 411, "Content-Length"),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: -3\r\n\r\n", 400, "head"),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400, "head"),
        (b"HELLO\r\n\r\n", 400, "head"),
        (b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 400, "Upgrade"),
        (b"GET /health HTTP/1.1\r\npadding: " + b"x" * 20_000, 431, "head"),
    ],
)
async def test_an_unparsable_request_is_refused_and_ends_the_connection(
    raw: Raw, client: Client, request_bytes: bytes, status: int, param: str
) -> None:
    await raw.send(request_bytes)

    answered, body = await raw.answer()

    assert (answered, json.loads(body)["error"]["param"]) == (status, param)
    assert await raw.is_closed()
    assert await client.health()
    assert await client.metric(f'kvroute_tierd_refused_total{{status="{status}"}}') == 1


@pytest.mark.parametrize(
    ("head", "body", "status", "param"),
    [
        (b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 0\r\n\r\n", b"", 400, "Content-Length"),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 65537\r\n\r\n", b"x" * 65537, 413, "Content-Length"),
        (b"POST /v1/kv/b/k/leases?ttl_s=-1 HTTP/1.1\r\n\r\n", b"", 400, "ttl_s"),
        (b"POST /health HTTP/1.1\r\ncontent-length: 3\r\n\r\n", b"abc", 405, "method"),
        (b"GET /v1/kv/b/k HTTP/1.1\r\ncontent-length: 3\r\n\r\n", b"abc", 400, "Content-Length"),
    ],
)
async def test_a_wrong_call_is_answered_and_the_connection_lives(
    raw: Raw, head: bytes, body: bytes, status: int, param: str
) -> None:
    await raw.send(head + body)

    answered, answer_body = await raw.answer()

    assert (answered, json.loads(answer_body)["error"]["param"]) == (status, param)
    await raw.send(b"HEAD /health HTTP/1.1\r\n\r\n")
    assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_client_that_stops_in_the_middle_is_cut(start_node: StartNode, connect: Connect) -> None:
    node = await start_node(stall_timeout_s=0.001)
    idle, stopped = await connect(node), await connect(node)
    await stopped.send(b"PUT /v1/kv/b/k HTTP/1.1\r\ncontent-length: 8\r\n\r\nhalf")

    assert await stopped.is_closed()

    await until(lambda: node.running.store.incoming_count == 0)
    await idle.send(b"HEAD /health HTTP/1.1\r\n\r\n")
    assert (await idle.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


STEP = 64 << 10


async def begin_put(raw: Raw, key: str, length: int, sent: bytes) -> None:
    await raw.send(f"PUT /v1/kv/b/{key} HTTP/1.1\r\ncontent-length: {length}\r\n\r\n".encode() + sent)


async def test_a_put_holds_memory_as_its_bytes_arrive(start_node: StartNode, connect: Connect) -> None:
    """At most twice what has come, and one step."""
    node = await start_node(pages=256, put_step_mb=STEP / (1 << 20))
    space = node.running.store.pool.space
    raw = await connect(node)
    data = bytes(range(251)) * 4000

    await begin_put(raw, "k", len(data), data[:1])
    await until(lambda: node.running.store.incoming_count == 1)
    assert space.size_bytes - space.free_bytes == STEP
    await raw.send(data[1 : STEP + 1])
    await until(lambda: space.size_bytes - space.free_bytes == 2 * STEP)
    await raw.send(data[STEP + 1 :])

    assert (await raw.answer())[0] == 200
    lease = await node.client.lease("k")
    assert len(lease["offsets"]) == 1
    assert node.client.read(lease) == data


async def test_puts_that_grow_at_the_same_time_keep_their_bytes(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node(pages=256, put_step_mb=STEP / (1 << 20))
    parts = {key: [key.encode() * STEP, key.upper().encode() * STEP * 2] for key in "abc"}
    raws = {key: await connect(node) for key in parts}
    for number in (0, 1):
        for key, raw in raws.items():
            if number == 0:
                await begin_put(raw, key, STEP * 3, b"")
            await raw.send(parts[key][number])

    assert [(await raw.answer())[0] for raw in raws.values()] == [200] * 3
    assert {key: await node.client.get(key) for key in parts} == {
        key: b"".join(part) for key, part in parts.items()
    }


async def test_a_put_that_finds_no_more_room_is_refused_and_read_to_its_end(
    start_node: StartNode, connect: Connect
) -> None:
    node = await start_node(pages=64, put_step_mb=STEP / (1 << 20))
    store, raw = node.running.store, await connect(node)
    await begin_put(raw, "k", 3 * STEP, b"x")
    await until(lambda: store.incoming_count == 1)
    assert await node.client.put("held", bytes(2 * STEP)) == 200
    assert await node.client.lease("held") is not None

    await raw.send(b"x" * (3 * STEP - 1) + b"HEAD /health HTTP/1.1\r\n\r\n")

    status, body = await raw.answer()
    assert (status, json.loads(body)["error"]["param"]) == (507, "Content-Length")
    assert (await raw.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert store.pool.space.free_bytes == 2 * STEP
    assert await node.client.metric("kvroute_tierd_lost_total") == 1
    assert await node.client.metric('kvroute_tierd_puts_total{outcome="no_room"}') == 1


async def test_a_put_waits_for_the_disk_in_the_middle(
    start_node: StartNode, tmp_path: Path, connect: Connect
) -> None:
    """So nothing is lost, although all memory is in use."""
    node = await start_node(
        pages=64, put_step_mb=STEP / (1 << 20), disk_dir=tmp_path, disk_gb=0.01, room_timeout_s=100
    )
    for number in range(4):
        assert await node.client.put(str(number), bytes([number]) * STEP) == 200
    raw = await connect(node)

    await begin_put(raw, "k", 3 * STEP, b"k" * 3 * STEP)

    assert (await raw.answer())[0] == 200
    assert await node.client.get("k") == b"k" * 3 * STEP
    assert await node.client.metric("kvroute_tierd_lost_total") == 0
    assert await node.client.get("0", wait_ms=10_000) == bytes(STEP)


async def test_a_sender_that_is_too_slow_is_cut(start_node: StartNode, connect: Connect) -> None:
    node = await start_node(put_grace_s=0, put_least_rate=1e12)
    raw = await connect(node)

    await begin_put(raw, "k", 8, b"half")

    assert await raw.is_closed()
    await until(lambda: node.running.store.incoming_count == 0)


async def test_health_and_metrics_show_the_figures(client: Client) -> None:
    await client.put("k", bytes(5000))
    lease = await client.lease("k")
    await client.lease("none")

    health = await client.health()

    assert (health["status"], health["objects"]) == ("ok", 1)
    assert health["free_bytes"] == health["memory_bytes"] - 2 * PAGE_BYTES
    assert await client.metric('kvroute_tierd_memory_bytes{state="held"}') == 2 * PAGE_BYTES
    assert await client.metric("kvroute_tierd_leases") == 1
    await client.release(lease)
    assert await client.metric('kvroute_tierd_memory_bytes{state="evictable"}') == 2 * PAGE_BYTES
    assert await client.metric('kvroute_tierd_puts_total{outcome="stored"}') == 1
    assert await client.metric('kvroute_tierd_lease_requests_total{outcome="miss"}') == 1


async def test_peers_need_the_key_where_there_is_one(start_node: StartNode) -> None:
    node = await start_node(peers={"key": "secret"})
    await node.client.put("k", b"data")

    answers = [
        await node.client.http.get("/v1/kv/b/k", headers=headers)
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer secret"})
    ]

    assert [answer.status_code for answer in answers] == [401, 401, 200]
    assert answers[0].json()["error"]["param"] == "Authorization"
    assert answers[2].content == b"data"
    assert "secret" not in (await node.client.http.get("/metrics")).text
