"""Keeping, limiting and expiring connections, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvroute.errors import ConnectRefused, PoolExhausted
from kvroute.upstream.connection import UpstreamConnection
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.pool import ConnectionPool

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
HELD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@pytest.fixture
def held_echo(read_request: Any) -> Any:
    """A script that answers /now immediately; it holds the body of every other answer until `released` is
    set."""
    released = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            writer.write(HELD)
            if b" /now " not in head:
                await released.wait()
            writer.write(b"hi")

    return script, released


async def test_an_unused_connection_is_closed_after_its_time(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(OK, OK))
    transport = connect(server.url, keepalive_s=0.03, spare_connections=0)
    await asyncio.gather(*[transport.send(b"GET", b"/", []) for _ in range(2)])
    assert server.accepted == 2

    await server.until_all_closed()

    assert transport.idle_connections == 0


async def test_the_idle_time_restarts_with_each_use(serve: Any, connect: Any, answers: Any) -> None:
    """The timer of the first use finds no connection to close, and is set again."""
    server = await serve(answers(*[OK] * 100_000))
    transport = connect(server.url, keepalive_s=0.1, spare_connections=0)
    loop = asyncio.get_running_loop()
    first_use = loop.time()

    while loop.time() < first_use + 0.02:
        await transport.send(b"GET", b"/", [])

    assert transport.open_connections == 1
    await server.until_all_closed()


async def test_no_more_than_max_idle_are_kept_and_the_oldest_go(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(*[OK] * 9))
    transport = connect(server.url, max_idle=2)

    await asyncio.gather(*[transport.send(b"GET", b"/", []) for _ in range(5)])
    await server.until(lambda: server.live == 2)

    assert server.accepted == 5
    assert transport.idle_connections == 2


async def test_max_idle_zero_keeps_none(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url, max_idle=0)

    response = await transport.send(b"GET", b"/", [])

    assert await response.next_chunk() == b"hi"
    await server.until_all_closed()


async def test_requests_above_the_limit_wait_in_order(serve: Any, connect: Any, held_echo: Any) -> None:
    script, released = held_echo
    server = await serve(script)
    transport = connect(server.url, max_connections=2)
    running = [await transport.send(b"GET", b"/held", []) for _ in range(2)]
    order: list[int] = []

    async def one(number: int) -> None:
        response = await transport.send(b"GET", b"/now", [])
        order.append(number)
        assert await response.next_chunk() == b"hi"

    waiting = [asyncio.ensure_future(one(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert order == []
    released.set()
    await asyncio.gather(*waiting)

    assert sorted(order) == list(range(6))
    assert order[0] == 0
    assert server.accepted == 2
    assert [await response.next_chunk() for response in running] == [b"hi", b"hi"]


async def test_waiting_for_a_connection_has_a_deadline(serve: Any, connect: Any, held_echo: Any) -> None:
    server = await serve(held_echo[0])
    transport = connect(server.url, max_connections=1)
    held = await transport.send(b"GET", b"/held", [])

    with pytest.raises(PoolExhausted) as exhausted:
        await transport.send(b"GET", b"/now", [], connect_timeout_s=0.03)

    assert not exhausted.value.was_sent
    held.abort()
    response = await transport.send(b"GET", b"/now", [])
    assert await response.next_chunk() == b"hi"


async def test_a_waiter_that_is_cancelled_takes_no_place(serve: Any, connect: Any, held_echo: Any) -> None:
    script, _ = held_echo
    server = await serve(script)
    transport = connect(server.url, max_connections=1)
    held = await transport.send(b"GET", b"/held", [])
    first, second = (asyncio.ensure_future(transport.send(b"GET", b"/now", [])) for _ in range(2))
    await asyncio.sleep(0)

    held.abort()  # the place goes to `first`, which is cancelled before it runs
    first.cancel()

    assert await (await second).next_chunk() == b"hi"


async def test_every_kind_of_failure_gives_its_place_back(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(b"nonsense\r\n"))
    transport = connect(server.url, max_connections=1)

    for _ in range(3):
        with pytest.raises(Exception, match="not HTTP"):
            await transport.send(b"GET", b"/", [])
    await server.close()
    for _ in range(3):
        with pytest.raises(ConnectRefused):
            await transport.send(b"GET", b"/", [])

    await transport.aclose()
    assert transport.open_connections == 0


async def test_a_fresh_connection_at_the_limit_replaces_an_idle_one(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(*[OK] * 9))
    transport = connect(server.url, max_connections=1)
    await transport.send(b"GET", b"/", [])

    response = await transport.send(b"GET", b"/", [], fresh=True)

    assert not response.reused
    await server.until(lambda: server.live == 1)
    assert server.accepted == 2


async def test_retiring_closes_idle_connections_and_is_idempotent(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url)
    await transport.send(b"GET", b"/", [])

    transport.retire()
    transport.retire()

    await server.until_all_closed()
    assert transport.idle_connections == 0


@pytest.mark.parametrize("steps", range(6))
async def test_a_transport_closed_while_connecting_leaves_nothing_open(
    serve: Any, connect: Any, answers: Any, steps: int
) -> None:
    server = await serve(answers())
    transport = connect(server.url)
    sending = asyncio.ensure_future(transport.send(b"GET", b"/", [], first_byte_timeout_s=0))
    for _ in range(steps):
        await asyncio.sleep(0)

    await transport.aclose()

    results = await asyncio.gather(sending, return_exceptions=True)
    assert results[0] is not None
    assert type(results[0]).__name__ in ("ConnectRefused", "ConnectionLost")
    assert transport.open_connections == 0
    await server.until_all_closed()


async def test_a_connection_lost_as_soon_as_it_opened_is_connect_refused(
    serve: Any, connect: Any, answers: Any
) -> None:
    """Nothing was sent on it, so any request may be tried elsewhere."""

    class LosingPool(ConnectionPool):
        def connection_opened(self, connection: UpstreamConnection) -> None:
            super().connection_opened(connection)
            connection.close()

    server = await serve(answers())
    pool = LosingPool(connect(server.url).origin, UpstreamOptions(), None)

    with pytest.raises(ConnectRefused) as refused:
        await pool.acquire(connect_timeout_s=0)

    assert not refused.value.was_sent
    await server.until(lambda: server.accepted == 1)
    await server.until_all_closed()
    assert pool.open_connections == 0
