"""The real supervisor in a process of its own, with the work that each test chooses."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.waiting import until

PARENT = r"""
import logging, os, signal, sys, time
from kvroute.clock import SystemClock
from kvroute.replicas.supervisor import Supervisor

logging.basicConfig(format="%(message)s", stream=sys.stderr)
kind = sys.argv[1]

forks, real_fork = [], os.fork

def fork():
    forks.append(1)
    if kind == "third fork fails" and len(forks) == 3:
        raise OSError(11, "Resource temporarily unavailable")
    return real_fork()

os.fork = fork

def work(spec):
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    if kind == "refuses" and spec.number == 1:
        return 2
    spec.ready()
    sys.stderr.write(f"started {spec.number} {spec.generation} {os.getpid()}\n")  # one write: no mixed lines
    while kind == "stubborn" or not stop:
        time.sleep(0.01)
    return 0

sys.exit(Supervisor(2, work, SystemClock(), grace_s=0.5).run())
"""


class Running:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output = ""

    async def until(self, pattern: str, times: int = 1) -> list[str]:
        """The matches of the pattern's group, once the output has `times` of them."""
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            while len(found := re.findall(pattern, self.output)) < times:
                line = await self.process.stderr.readline()
                assert line, self.output
                self.output += line.decode()
        return found

    async def exit_code(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(30):
            self.output += (await self.process.stderr.read()).decode()
            return await self.process.wait()


@asynccontextmanager
async def supervisor(kind: str) -> AsyncIterator[Running]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, kind, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_successor_that_cannot_be_forked_ends_no_other_process():
    async with supervisor("third fork fails") as running:
        pids = await running.until(r"started \d 0 (\d+)", 2)
        os.kill(int(pids[0]), signal.SIGKILL)
        await running.until(r"(cannot be replaced: Resource temporarily unavailable; again in)")

        (successor,) = await running.until(r"started \d 1 (\d+)")
        assert all(Path(f"/proc/{pid}").exists() for pid in (pids[1], successor))
        running.process.terminate()
        assert await running.exit_code() == 0


async def test_a_process_that_dies_is_replaced_and_the_other_keeps_running():
    async with supervisor("plain") as running:
        pids = await running.until(r"started \d 0 (\d+)", 2)

        os.kill(int(pids[0]), signal.SIGKILL)
        (successor,) = await running.until(r"started \d 1 (\d+)")

        assert successor not in pids
        assert Path(f"/proc/{pids[1]}").exists()
        assert "was killed by SIGKILL; it is replaced in 0.1 s" in running.output
        running.process.terminate()
        assert await running.exit_code() == 0


async def test_a_process_that_keeps_dying_is_replaced_later_each_time():
    async with supervisor("plain") as running:
        for generation in range(3):
            (pid,) = await running.until(rf"started 0 {generation} (\d+)")
            os.kill(int(pid), signal.SIGKILL)

        assert (await running.until(r"replaced in ([\d.]+) s", 3)) == ["0.1", "0.2", "0.4"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_is_passed_on(number):
    async with supervisor("plain") as running:
        pids = await running.until(r"started \d 0 (\d+)", 2)
        running.process.send_signal(number)

        assert await running.exit_code() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_a_process_that_does_not_stop_is_killed():
    async with supervisor("stubborn") as running:
        await running.until(r"started \d 0 (\d+)", 2)
        running.process.terminate()

        assert await running.exit_code() == 1
        assert "does not stop in time; it is killed" in running.output


async def test_a_failed_start_stops_all_with_its_exit_code():
    async with supervisor("refuses") as running:
        assert await running.exit_code() == 2
        assert "process 1 failed to start (exit code 2)" in running.output


async def test_children_end_with_a_killed_parent():
    async with supervisor("plain") as running:
        pids = await running.until(r"started \d 0 (\d+)", 2)
        running.process.kill()

        await running.exit_code()  # standard error closes when the last child ends
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), within_s=30)
