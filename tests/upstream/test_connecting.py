"""Connecting to names with several addresses, of which some do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from kvroute.upstream.connecting import Address, Connector, in_order, race

V4 = [Address(socket.AF_INET, (f"10.0.0.{n}", 80)) for n in range(3)]
V6 = [Address(socket.AF_INET6, (f"fd00::{n}", 80, 0, 0)) for n in range(2)]


class Network:
    """Connects to some addresses, refuses others, and never answers for the rest."""

    def __init__(self, *, connects=(), refuses=()) -> None:
        self.connects, self.refuses = connects, refuses
        self.tried: list[Address] = []
        self.cancelled: list[Address] = []
        self.sockets: dict[Address, socket.socket] = {}

    async def __call__(self, address: Address) -> socket.socket:
        self.tried.append(address)
        if address in self.refuses:
            raise ConnectionRefusedError(str(address))
        if address in self.connects:
            self.sockets[address] = opened = socket.socket()
            return opened
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append(address)
        raise AssertionError


def test_the_families_take_turns_and_addresses_that_were_silent_come_last():
    assert in_order([*V6, *V4], frozenset()) == [V6[0], V4[0], V6[1], V4[1], V4[2]]
    assert in_order([*V6, *V4], frozenset([V6[0], V4[1]])) == [V4[0], V6[1], V4[2], V6[0], V4[1]]
    assert in_order([V4[0], V4[0]], frozenset()) == [V4[0]]


async def test_the_next_address_is_tried_while_the_first_is_silent():
    network = Network(connects=V4[1:2])

    connected, place = await race(V4, network, 0.001)

    assert (connected, place) == (network.sockets[V4[1]], 1)
    assert (network.tried, network.cancelled) == (V4[:2], V4[:1])
    connected.close()


async def test_an_address_that_refuses_does_not_wait_for_the_delay():
    network = Network(connects=V4[2:], refuses=V4[:2])

    async with asyncio.timeout(30.0):
        connected, place = await race(V4, network, 3600.0)

    assert place == 2
    connected.close()


async def test_only_the_first_is_tried_if_it_answers():
    network = Network(connects=V4)

    connected, place = await race(V4, network, 3600.0)

    assert (place, network.tried) == (0, V4[:1])
    connected.close()


async def test_if_all_fail_the_refusal_is_the_error():
    async def connect(address: Address) -> socket.socket:
        if address == V4[1]:
            raise ConnectionRefusedError
        raise OSError(99, "Cannot assign requested address")

    with pytest.raises(ConnectionRefusedError):
        await race(V4, connect, 0.001)


async def test_a_second_connection_of_the_same_moment_is_closed():
    begin = asyncio.Event()
    opened: list[socket.socket] = []

    async def connect(address: Address) -> socket.socket:
        await begin.wait()
        opened.append(socket.socket())
        return opened[-1]

    racing = asyncio.create_task(race(V4[:2], connect, 0.0))
    while len(asyncio.all_tasks()) < 4:  # the test, the race, two attempts
        await asyncio.sleep(0)
    begin.set()
    connected, _ = await racing

    assert sorted(each.fileno() < 0 for each in opened) == [False, True]
    connected.close()


async def test_a_cancelled_race_leaves_no_attempt():
    network = Network()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await race(V4, network, 0.001)

    assert sorted(network.cancelled) == sorted(network.tried)
    assert len(asyncio.all_tasks()) == 1


async def test_an_address_needs_no_choice():
    assert await Connector("127.0.0.1", 80).connect() is None
    assert await Connector("fe80::1%eth0", 80).connect() is None
