"""Simulated workers of the real-time comparison in one process: one port each, real times.

    python bench/realtime_workers.py MODEL PORT [PORT ...]

One event loop runs all workers: an iteration of an engine takes at least 14 ms and costs about 0.1 ms of CPU.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack

import uvloop

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions


async def serve(model: str, ports: list[int]) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        for port in ports:
            await stack.enter_async_context(
                run_sim(SimOptions(port=port, models=(model,), recorded_requests=0))
            )
        await stop.wait()


def main() -> None:
    model, *ports = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(model, [int(port) for port in ports]))


if __name__ == "__main__":
    main()
