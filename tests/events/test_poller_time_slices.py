"""All streams together get one time slice per iteration of the event loop."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from typing import Any

import uvloop
from tests.support.clocks import ManualClock

from kvroute.events.inbox import Listener
from kvroute.events.poller import TimeSlicer
from kvroute.wire.zmq import MessageReader

PIECE_S = 1 / 1024
"""Time passes by work alone, in pieces whose sums are exact."""


class Loop:
    """Counts the iterations of the event loop and the work in each iteration."""

    def __init__(self) -> None:
        self.clock: Any = ManualClock(0.0)
        self.turns = TimeSlicer(self.clock, 5 * 1000 * PIECE_S)
        self.number = 0
        self.done: Counter[int] = Counter()
        self.by_worker: list[int] = []
        self._turn()

    def _turn(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> None:
        self._handle.cancel()

    async def work(self, worker: int, pieces: int) -> None:
        """A slice is five pieces."""
        for _ in range(pieces):
            if self.turns.exhausted():
                await self.turns.yield_to_loop()
            self.clock.time += PIECE_S
            self.done[self.number] += 1
            self.by_worker.append(worker)


async def _many_in_bulk() -> None:
    loop = Loop()
    async with asyncio.TaskGroup() as group:
        for worker in range(64):
            group.create_task(loop.work(worker, 50))
    loop.stop()

    assert sum(loop.done.values()) == 64 * 50
    assert max(loop.done.values()) <= 5
    assert loop.number <= 64 * 50 // 5 + 70
    # The queue is FIFO: each task has had a slice before any task has a second one, except the first task.
    assert [worker for worker in range(64) if loop.by_worker[: 65 * 5].count(worker) > 5] == [0]
    assert set(loop.by_worker[: 65 * 5]) == set(range(64))


async def test_many_busy_streams_share_one_slice_per_iteration() -> None:
    await _many_in_bulk()


def test_many_busy_streams_share_one_slice_per_iteration_on_uvloop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_many_in_bulk())


async def test_little_work_of_many_streams_is_done_in_one_iteration() -> None:
    loop = Loop()
    await asyncio.gather(*(loop.work(worker, 1) for worker in range(5)))
    loop.stop()
    assert list(loop.done.values()) == [5]


async def test_a_stream_with_little_work_waits_only_for_those_before_it() -> None:
    loop = Loop()
    bulk = [asyncio.create_task(loop.work(worker, 1000)) for worker in range(3)]
    for _ in range(20):
        await asyncio.sleep(0)
    before = loop.number
    await loop.work(99, 1)
    assert loop.number - before <= 4
    for task in bulk:
        task.cancel()
    await asyncio.gather(*bulk, return_exceptions=True)
    loop.stop()


async def test_a_cancelled_stream_does_not_block_the_others() -> None:
    """The task is cancelled while it waits, or in the iteration in which it would continue."""
    for leaving in range(6):
        for pauses in range(8):
            loop = Loop()
            tasks = [asyncio.create_task(loop.work(worker, 20)) for worker in range(6)]
            for _ in range(pauses):
                await asyncio.sleep(0)
            tasks[leaving].cancel()
            async with asyncio.timeout(10):
                await asyncio.gather(*tasks, return_exceptions=True)
                await loop.work(7, 20)
            loop.stop()
            assert [loop.by_worker.count(worker) for worker in range(6) if worker != leaving] == [20] * 5
            assert max(loop.done.values()) <= 5


async def test_a_listener_with_many_messages_yields_to_other_streams() -> None:
    loop = Loop()
    listener = Listener("tcp://127.0.0.1:0", 10)
    listener.close()
    inbox = listener.inbox("kv")

    def count(frames: Any) -> None:
        loop.clock.time += PIECE_S
        loop.done[loop.number] += 1

    inbox.put = count  # type: ignore[method-assign]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall((b"\x01\x02kv" + b"\x01\x08" + bytes(8) + b"\x00\x00") * 200)
        # Private: with a connection it is left to the kernel whether the data is there without a wait.
        task = asyncio.create_task(listener._receive(MessageReader(), ours, loop.turns))
        for _ in range(500):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    loop.stop()
    assert sum(loop.done.values()) > 100
    assert max(loop.done.values()) <= 5
