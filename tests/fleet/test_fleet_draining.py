from __future__ import annotations

import asyncio
from typing import Any

from kvroute.fleet.fleet import DrainProgress, progress_of, until_drained
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec


def busy(requests: int) -> tuple[Worker, list[Any]]:
    worker = Worker(WorkerSpec(WorkerId("a"), "http://a"))
    return worker, [worker.load.reserve(0.0, prefill_s=1.0, tokens=10) for _ in range(requests)]


def test_progress_counts_running_requests() -> None:
    worker, running = busy(2)

    assert progress_of(worker) == DrainProgress(WorkerId("a"), 2)
    for reservation in running:
        reservation.finish(1.0)
    assert progress_of(worker).is_done


async def test_waiting_ends_when_the_last_request_does(clock: Any) -> None:
    worker, running = busy(1)
    waiting = asyncio.create_task(until_drained(worker, clock, timeout_s=60.0))
    await clock.advance(1.0)
    assert not waiting.done()

    running[0].finish(clock.now())
    await clock.advance(0.2)

    assert (await waiting).is_done


async def test_waiting_ends_at_its_deadline(clock: Any) -> None:
    worker, _running = busy(1)
    waiting = asyncio.create_task(until_drained(worker, clock, timeout_s=5.05))

    await clock.advance(5.1)

    assert await waiting == DrainProgress(WorkerId("a"), 1)


async def test_an_idle_worker_is_drained_immediately(clock: Any) -> None:
    assert (await until_drained(busy(0)[0], clock, timeout_s=60.0)).is_done
