"""Envelopes in slices: what one iteration of the event loop does is counted, not timed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvroute.replicas.inbox import SLICE, Inbox


class Reader:
    """Reads envelopes whose first bytes are their number of messages. Records what each iteration handled."""

    def __init__(self) -> None:
        self.handled: list[bytes] = []
        self.slices: list[int] = [0]
        self.states: list[str] = []
        self.inbox = Inbox(self.read, lambda: self.states.append("full"), lambda: self.states.append("empty"))

    def read(self, data: bytes) -> Iterator[None]:
        for _ in range(int(data.split(b" ")[0])):
            self.slices[-1] += 1
            yield
        self.handled.append(data)

    async def run(self, count: int) -> None:
        """Iterations of the loop until `count` envelopes are handled."""
        for _ in range(10_000):
            if len(self.handled) == count:
                return
            self.slices.append(0)
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.handled)} of {count} after so many iterations")


@pytest.fixture
def reader() -> Reader:
    return Reader()


async def test_little_is_handled_at_once(reader):
    for number in range(10):
        reader.inbox.add(b"%d " % number)

    assert reader.slices == [45]
    assert len(reader.handled) == 10


@pytest.mark.parametrize("envelopes", [[8192], [8192, 8192], [100] * 300, [0] * 5000, [1] * 5000, [1500] * 9])
async def test_no_iteration_handles_more_than_a_slice_whatever_arrived_at_once(reader, envelopes):
    sent = [b"%d " % count for count in envelopes]
    for data in sent:
        reader.inbox.add(data)
    at_once = len(reader.handled)
    await reader.run(len(sent))

    assert reader.handled == sent  # in order
    assert max(reader.slices) <= SLICE
    assert sum(reader.slices) == sum(envelopes)
    assert at_once <= SLICE // 2


async def test_long_envelopes_count_for_more(reader):
    for _ in range(10):
        reader.inbox.add(b"1 " + b"x" * 4_000_000)

    assert len(reader.handled) <= 3
    await reader.run(10)


async def test_what_arrives_meanwhile_comes_after_what_waits(reader):
    reader.inbox.add(b"3000 first")
    await asyncio.sleep(0)
    reader.inbox.add(b"1 second")
    await reader.run(2)

    assert reader.handled == [b"3000 first", b"1 second"]


async def test_nothing_more_is_received_while_much_waits(reader):
    reader.inbox.add(b"5000 ")
    assert reader.states == []
    reader.inbox.add(b"1 " + b"x" * 2_000_000)
    reader.inbox.add(b"1 ")
    assert reader.states == ["full"]
    await reader.run(3)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert reader.states == ["full", "empty"]


async def test_what_waits_at_the_end_is_dropped(reader):
    reader.inbox.add(b"5000 ")
    reader.inbox.close()
    for _ in range(10):
        await asyncio.sleep(0)

    assert not reader.handled
