"""The event loop reads the sockets while batches are rare; a poll or a timer does while they are frequent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.clocks import ManualClock
from tests.support.waiting import until

from kvroute.events.poller import MOST_BEHIND_S, SocketPoller, TimeSlicer

LONG_S = 10.0
"""Batches this far apart are rare."""


class Stream:
    """A socket pair; the poller reads the bytes sent at the far end. Mutable: `received`, `reads`."""

    def __init__(self, poller: SocketPoller, clock: ManualClock) -> None:
        self.far, self.near = socket.socketpair()
        self.near.setblocking(False)
        self.received = b""
        self.reads = 0
        self.most_bytes, self.read_s = 100, 0.0
        self.on_read: Callable[[], object] = lambda: None
        self._poller, self._clock = poller, clock
        poller.add(self.near.fileno(), self.read)

    def read(self, deadline: float) -> bool | None:
        self.reads += 1
        self.on_read()
        self._clock.time += self.read_s
        try:
            data = self.near.recv(self.most_bytes)
        except BlockingIOError:
            return None
        self.received += data
        return len(data) == self.most_bytes

    async def is_read_by_loop(self) -> bool:
        """Whether the event loop reads a byte by itself, before any timer: within five iterations."""
        reads = self.reads
        self.far.send(b"?")
        for _ in range(5):
            await asyncio.sleep(0)
        return self.reads > reads

    def close(self) -> None:
        self._poller.remove(self.near.fileno())
        self.near.close()
        self.far.close()


class Setup:
    def __init__(self) -> None:
        self.clock: Any = ManualClock()
        self.poller = SocketPoller(self.clock, 0.5, TimeSlicer(self.clock, 0.5))
        self.streams = [Stream(self.poller, self.clock) for _ in range(3)]

    async def make_frequent(self) -> None:
        """Send batches without a pause until the event loop stops watching the sockets."""
        first = self.streams[0]
        for _ in range(100):
            if not await first.is_read_by_loop():
                break
        else:
            pytest.fail("the event loop still watches")
        self.poller.poll()
        first.received = b""


@pytest.fixture
async def setup() -> Any:
    made = Setup()
    yield made
    for stream in made.streams:
        stream.close()


async def test_rare_messages_are_read_as_they_arrive(setup: Setup) -> None:
    for stream in setup.streams * 5:
        assert await stream.is_read_by_loop()
        setup.clock.time += LONG_S


async def test_frequent_messages_are_not_read_by_the_loop(setup: Setup) -> None:
    await setup.make_frequent()
    for stream in setup.streams:
        assert not await stream.is_read_by_loop()


async def test_frequent_messages_are_read_by_a_poll(setup: Setup) -> None:
    await setup.make_frequent()
    for stream in setup.streams:
        stream.far.send(b"y")
    setup.poller.poll()
    assert [stream.received for stream in setup.streams] == [b"y"] * 3


async def test_frequent_messages_are_read_soon_without_a_poll(setup: Setup) -> None:
    await setup.make_frequent()
    setup.streams[1].far.send(b"y")
    await until(lambda: setup.streams[1].received == b"y")


async def test_the_loop_watches_again_when_messages_are_rare(setup: Setup) -> None:
    await setup.make_frequent()

    # Five times as long as the timer: it fires in between, and finds nothing the second time.
    await until(setup.streams[2].is_read_by_loop, every_s=0.1)


async def test_a_poll_without_messages_reads_no_socket(setup: Setup) -> None:
    await setup.make_frequent()
    before = [stream.reads for stream in setup.streams]
    setup.poller.poll()
    assert [stream.reads for stream in setup.streams] == before


async def test_a_poll_takes_at_most_one_slice_and_the_loop_reads_the_rest(setup: Setup) -> None:
    await setup.make_frequent()
    for stream in setup.streams:
        stream.far.send(b"y")
        stream.read_s = 0.0003

    setup.poller.poll()

    assert [stream.received for stream in setup.streams] == [b"y", b"y", b""]
    setup.poller.poll()  # the loop reads the rest, not a second poll
    assert setup.streams[2].received == b""
    await until(lambda: setup.streams[2].received == b"y")
    setup.streams[0].far.send(b"z")
    await until(lambda: setup.streams[0].received == b"yz")


async def test_many_bytes_of_one_stream_are_read_over_several_iterations(setup: Setup) -> None:
    await setup.make_frequent()
    first = setup.streams[0]
    first.far.send(b"y" * 1000)

    setup.poller.poll()

    assert len(first.received) == 100
    await until(lambda: len(first.received) == 1000)


async def test_streams_are_added_and_removed_in_both_modes(setup: Setup) -> None:
    await setup.make_frequent()
    late = Stream(setup.poller, setup.clock)
    late.far.send(b"y")
    setup.poller.poll()
    assert late.received == b"y"
    setup.streams[0].far.send(b"y")
    setup.streams[0].close()
    setup.poller.poll()

    late.close()
    for stream in setup.streams:
        stream.close()

    setup.poller.poll()
    setup.clock.time += LONG_S
    setup.streams = [Stream(setup.poller, setup.clock)]
    assert await setup.streams[0].is_read_by_loop()


async def test_a_stream_removed_during_a_poll_is_not_read(setup: Setup) -> None:
    await setup.make_frequent()
    first, second, _ = setup.streams
    first.far.send(b"y")
    second.far.send(b"y")
    first.on_read = second.close

    setup.poller.poll()

    assert (first.received, second.received) == (b"y", b"")


async def test_a_poll_says_that_something_is_left_while_a_reader_holds_messages(setup: Setup) -> None:
    poller, reader = setup.poller, object()
    assert poller.poll()
    poller.set_behind(reader, True)
    assert not poller.poll()
    setup.streams[0].far.send(b"x")
    assert not poller.poll()
    poller.set_behind(reader, False)
    assert poller.poll()


async def test_a_reader_that_is_behind_for_long_is_not_waited_for(setup: Setup) -> None:
    poller, reader = setup.poller, object()
    poller.set_behind(reader, True)
    setup.clock.time += MOST_BEHIND_S + 0.1
    assert poller.poll()
    poller.set_behind(object(), True)  # another one, just now
    assert not poller.poll()
