"""Who sees that something has come: the loop while that is seldom, whoever looks while it is often."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from tests.support.clocks import ManualClock
from tests.support.waiting import until

from kvroute.events.poller import FREQUENT_BATCHES, TIMER_S, SocketPoller, TimeSlicer


class Stream:
    """One end of a pair; what is sent to it is taken in when its reader is called. Mutable: what came."""

    def __init__(self, poller: SocketPoller, clock: ManualClock) -> None:
        self.far, self.near = socket.socketpair()
        self.near.setblocking(False)
        self.came = b""
        self.reads = 0
        self.at_most, self.takes_s = 100, 0.0
        self._poller, self._clock = poller, clock
        poller.add(self.near.fileno(), self.read)

    def read(self, until: float) -> bool | None:
        self.reads += 1
        self._clock.time += self.takes_s
        try:
            data = self.near.recv(self.at_most)
        except BlockingIOError:
            return None
        self.came += data
        return len(data) == self.at_most

    def close(self) -> None:
        self._poller.remove(self.near.fileno())
        self.near.close()
        self.far.close()


class Setup:
    def __init__(self) -> None:
        self.clock: Any = ManualClock()
        self.poller = SocketPoller(self.clock, 0.5, TimeSlicer(self.clock, 0.5))
        self.streams = [Stream(self.poller, self.clock) for _ in range(3)]

    @property
    def is_watched(self) -> bool:
        """Whether the loop looks for itself."""
        return self.poller._timer is None

    async def busy(self) -> None:
        """Something has come as often as it takes within a moment."""
        first = self.streams[0]
        for number in range(1 + FREQUENT_BATCHES):
            assert self.is_watched
            first.far.send(b"x")
            await until(lambda number=number: len(first.came) > number)
        first.came = b""
        assert not self.is_watched


@pytest.fixture
async def setup() -> Any:
    made = Setup()
    yield made
    for stream in made.streams:
        stream.close()


async def test_rare_messages_are_read_as_they_arrive(setup: Setup) -> None:
    for stream in setup.streams:
        stream.far.send(b"x")
        await until(lambda stream=stream: stream.came == b"x")
        assert setup.is_watched
        setup.clock.time += 2 * TIMER_S


async def test_frequent_messages_are_read_by_a_poll(setup: Setup) -> None:
    await setup.busy()
    for stream in setup.streams:
        stream.far.send(b"y")
    setup.poller.poll()
    assert [stream.came for stream in setup.streams] == [b"y"] * 3


async def test_frequent_messages_are_read_soon_without_a_poll(setup: Setup) -> None:
    await setup.busy()
    setup.streams[1].far.send(b"y")
    await until(lambda: setup.streams[1].came == b"y")


async def test_the_loop_watches_again_when_messages_are_rare(setup: Setup) -> None:
    await setup.busy()
    await until(lambda: setup.is_watched)
    setup.clock.time += 2 * TIMER_S

    setup.streams[2].far.send(b"y")

    await until(lambda: setup.streams[2].came == b"y")
    assert setup.is_watched


async def test_a_poll_without_messages_reads_no_socket(setup: Setup) -> None:
    await setup.busy()
    before = [stream.reads for stream in setup.streams]
    setup.poller.poll()
    assert [stream.reads for stream in setup.streams] == before


async def test_a_poll_takes_at_most_one_slice_and_the_loop_reads_the_rest(setup: Setup) -> None:
    await setup.busy()
    for stream in setup.streams:
        stream.far.send(b"y")
        stream.takes_s = 0.0003

    setup.poller.poll()

    assert [stream.came for stream in setup.streams] == [b"y", b"y", b""]
    setup.poller.poll()  # no more of it before the loop has been through
    assert setup.streams[2].came == b""
    await until(lambda: setup.streams[2].came == b"y")
    setup.streams[0].far.send(b"z")
    await until(lambda: setup.streams[0].came == b"yz")


async def test_many_bytes_of_one_stream_are_read_over_several_iterations(setup: Setup) -> None:
    await setup.busy()
    first = setup.streams[0]
    first.far.send(b"y" * 1000)

    setup.poller.poll()

    assert len(first.came) == 100
    assert setup.is_watched
    await until(lambda: len(first.came) == 1000)


async def test_streams_are_added_and_removed_in_both_modes(setup: Setup) -> None:
    await setup.busy()
    late = Stream(setup.poller, setup.clock)
    late.far.send(b"y")
    setup.poller.poll()
    assert late.came == b"y"
    setup.streams[0].far.send(b"y")
    setup.streams[0].close()
    setup.poller.poll()

    late.close()
    for stream in setup.streams:
        stream.close()

    assert setup.is_watched
    setup.poller.poll()
    setup.streams = [Stream(setup.poller, setup.clock)]
    setup.streams[0].far.send(b"z")
    await until(lambda: setup.streams[0].came == b"z")


async def test_a_stream_removed_during_a_poll_is_not_read(setup: Setup) -> None:
    await setup.busy()
    first, second, _ = setup.streams
    first.far.send(b"y")
    second.far.send(b"y")
    read, setup.poller._readers[first.near.fileno()] = first.read, lambda _: bool(second.close())
    setup.poller.poll()
    assert second.came == b""
    setup.poller._readers[first.near.fileno()] = read
