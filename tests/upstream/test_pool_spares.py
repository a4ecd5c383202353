"""Connections opened ahead of need, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.waiting import until

from kvroute.upstream import pool as spares

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
KEEPALIVE_S = 0.02


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_OPEN_INTERVAL_S", 0.0)


async def together(transport: Any, requests: int) -> list[Any]:
    return await asyncio.gather(*[transport.send(b"GET", b"/", []) for _ in range(requests)])


async def ready(server: Any, transport: Any, requests: int, spares: int) -> None:
    """Wait until the connections of `requests` requests have been replaced by `spares` new ones."""
    await server.until(lambda: server.accepted == requests + spares and server.live == spares)
    await until(lambda: transport.open_connections == transport.idle_connections == spares)


async def test_requests_after_a_pause_find_as_many_open_as_they_needed(
    serve: Any, connect: Any, answers: Any
) -> None:
    server = await serve(answers(OK, OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S)
    await together(transport, 3)
    await ready(server, transport, 3, 3)
    assert transport.idle_connections == 3

    responses = await together(transport, 3)

    assert [response.reused for response in responses] == [True] * 3
    await server.until(lambda: server.live == 3)
    assert server.accepted == 6


async def test_a_request_that_does_not_wait_takes_a_spare_too(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S)
    await together(transport, 1)
    await ready(server, transport, 1, 1)

    pool = transport._pool  # private: the transport calls it without waiting only in the middle of a request
    assert pool.take_idle() is not None
    assert pool.take_idle() is None


async def test_no_more_spares_than_the_option_allows(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(OK, OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S, spare_connections=2)
    await together(transport, 5)
    await ready(server, transport, 5, 2)

    responses = await together(transport, 3)

    assert sorted(response.reused for response in responses) == [False, True, True]
    assert server.accepted == 8


@pytest.mark.parametrize("options", [{"spare_connections": 0}, {"max_connections": 4}, {"max_idle": 0}])
async def test_no_spares_with_these_options(
    serve: Any, connect: Any, answers: Any, options: dict[str, int]
) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S, **options)
    responses = await together(transport, 2)
    assert [await response.next_chunk() for response in responses] == [b"hi"] * 2

    await server.until_all_closed()
    for _ in range(20):
        await asyncio.sleep(0)

    assert transport.open_connections == 0
    assert server.accepted == 2


async def test_a_spare_lives_for_a_time_and_is_replaced_until_it_was_needed_too_long_ago(
    serve: Any, connect: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "_MAX_AGE_S", 0.02)
    monkeypatch.setattr(spares, "_REPLACE_FOR_S", 0.5)
    server = await serve(answers(OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S)
    loop = asyncio.get_running_loop()
    needed_at = loop.time()
    await together(transport, 1)
    await server.until(lambda: server.accepted >= 4)

    while loop.time() < needed_at + 0.5:
        await asyncio.sleep(0.01)
    await server.until_all_closed()

    assert transport.open_connections == 0


async def test_a_spare_that_the_worker_closes_is_not_replaced(serve: Any, connect: Any, answers: Any) -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 1:
            await answers(OK)(reader, writer)
        else:
            writer.close()

    server = await serve(script)
    transport = connect(server.url, keepalive_s=KEEPALIVE_S)
    await together(transport, 1)

    await server.until(lambda: server.accepted == 2)
    await server.until_all_closed()

    while transport.open_connections:
        await asyncio.sleep(0)
    assert transport.idle_connections == 0


async def test_a_worker_that_refuses_is_left_alone(serve: Any, connect: Any, answers: Any) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url, keepalive_s=0.1)
    await together(transport, 2)
    await server.close()

    # Private: no answer shows that the transport has tried once, and no more.
    opener = transport._pool._spares
    await until(lambda: not transport.open_connections and opener._opening is None)

    assert len(opener._to_open) == 0


async def test_a_spare_counts_as_a_kept_connection(serve: Any, connect: Any, answers: Any) -> None:
    """The worker may have closed it a moment ago: the request may be sent again on a fresh one."""
    server = await serve(answers(OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S)
    await together(transport, 1)
    await ready(server, transport, 1, 1)

    assert (await transport.send(b"GET", b"/", [])).reused
    assert not (await transport.send(b"GET", b"/", [], fresh=True)).reused


@pytest.mark.parametrize("turns", range(6))
async def test_closing_the_pool_at_any_moment_leaves_nothing_open(
    serve: Any, connect: Any, answers: Any, turns: int
) -> None:
    server = await serve(answers(OK))
    transport = connect(server.url, keepalive_s=KEEPALIVE_S)
    await together(transport, 2)
    # Private: the server sees a connection only after the moments that this test is about.
    # Each iteration of the loop is checked: a connect on loopback takes only a few.
    async with asyncio.timeout(20):
        while transport._pool._spares._opening is None:
            await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)

    await transport.aclose()

    assert transport.open_connections == 0
    await server.until_all_closed()
