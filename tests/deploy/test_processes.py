from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.sockets import free_ports
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.deploy.processes import ChildProcess, ChildSpec, ProcessFailed, describe_exit

MakeChild = Callable[..., ChildProcess]
Ended = Callable[[int], bool]

WAIT_FOR_EVER = "import signal, sys; print('up', flush=True); signal.pause()"
IGNORE_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while 1: signal.pause()"
)
# Leaves a grandchild that has a session of its own; argv[1] says where to write its process id.
ORPHAN = """
import os, signal, subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(grandchild.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
print("up", flush=True)
if sys.argv[2] == "stay":
    signal.pause()
os._exit(3)
"""
OWNER = """
import asyncio, os, sys
from pathlib import Path
from kvroute.clock import SystemClock
from kvroute.deploy.processes import ChildProcess, ChildSpec

async def main():
    spec = ChildSpec("stand-in", (sys.executable, "-c", *sys.argv[2:]), dict(os.environ), Path(sys.argv[1]))
    async with ChildProcess(spec, SystemClock()) as child:
        print(child.pid, flush=True)
        await child.wait()

asyncio.run(main())
"""


async def until_up(child: ChildProcess) -> None:
    await until(lambda: "up" in child.last_log_lines(), within_s=30)


async def test_the_exit_code_of_the_command_is_the_childs(child: MakeChild) -> None:
    async with child("raise SystemExit(7)") as process:
        assert await process.wait() == 7
        assert process.returncode == 7
        assert not process.running


async def test_a_command_that_dies_by_a_signal_shows_the_signal(child: MakeChild) -> None:
    async with child("import os, signal; os.kill(os.getpid(), signal.SIGABRT)") as process:
        assert await process.wait() == -signal.SIGABRT


async def test_stopping_sends_sigterm_first(child: MakeChild) -> None:
    process = child(f"import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); {WAIT_FOR_EVER}")
    await process.start()
    await until_up(process)

    assert await process.stop() == 5


async def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(child: MakeChild) -> None:
    process = child(IGNORE_SIGTERM, grace_s=0.1)
    await process.start()
    await until_up(process)

    assert await process.stop() == -signal.SIGKILL


async def test_cancelling_a_stop_kills_immediately(child: MakeChild) -> None:
    process = child(IGNORE_SIGTERM, grace_s=600.0)
    await process.start()
    await until_up(process)
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0)

    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping

    assert await process.wait() == -signal.SIGKILL


async def test_kill_ends_the_whole_group(child: MakeChild) -> None:
    process = child(WAIT_FOR_EVER)
    await process.start()
    await until_up(process)

    process.kill()

    assert await process.wait() == -signal.SIGKILL
    process.kill()  # again: nothing to do


async def test_a_grandchild_that_left_the_group_does_not_outlive_the_command(
    child: MakeChild, tmp_path: Path, ended: Ended
) -> None:
    process = child(ORPHAN, str(tmp_path / "pid"), "leave")
    async with process:
        assert await process.wait() == 3

    assert ended(int((tmp_path / "pid").read_text()))


async def test_stopping_ends_a_grandchild_that_left_the_group(
    child: MakeChild, tmp_path: Path, ended: Ended
) -> None:
    async with child(ORPHAN, str(tmp_path / "pid"), "stay") as process:
        await until_up(process)

    assert ended(int((tmp_path / "pid").read_text()))


async def test_nothing_outlives_a_guard_that_dies_by_sigkill(
    child: MakeChild, tmp_path: Path, ended: Ended
) -> None:
    source = ORPHAN.replace(", start_new_session=True", "")
    process = child(source, str(tmp_path / "pid"), "stay")
    await process.start()
    await until_up(process)

    os.kill(process.pid, signal.SIGKILL)

    assert await process.wait() == -signal.SIGKILL
    assert ended(int((tmp_path / "pid").read_text()))


def test_nothing_outlives_an_owner_that_dies_by_sigkill(tmp_path: Path, ended: Ended) -> None:
    arguments = [str(tmp_path / "log"), ORPHAN, str(tmp_path / "pid"), "stay"]
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        guard = int(owner.stdout.readline())
        deadline = SystemClock().now() + 30
        while not (tmp_path / "pid").exists():
            assert SystemClock().now() < deadline
        grandchild = int((tmp_path / "pid").read_text())

        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()

    assert ended(guard)
    assert ended(grandchild)


async def test_a_missing_command_is_reported(tmp_path: Path, clock: SystemClock) -> None:
    spec = ChildSpec("worker", (str(tmp_path / "nothing"),), dict(os.environ), tmp_path / "log")
    async with ChildProcess(spec, clock) as process:
        assert await process.wait() == 127

    assert "cannot run" in process.last_log_lines()


async def test_ready_once_the_url_answers(
    tmp_path: Path, clock: SystemClock, server_argv: Callable[..., tuple[str, ...]]
) -> None:
    (port,) = free_ports(1)
    spec = ChildSpec("worker", server_argv(port), dict(os.environ), tmp_path / "log")
    waits: list[float] = []
    async with ChildProcess(spec, clock) as process:
        await process.wait_ready(f"http://127.0.0.1:{port}/health", timeout_s=30, on_wait=waits.append)

        assert process.running
        assert waits == sorted(waits)


async def test_a_process_that_ends_before_it_is_ready_fails_with_its_last_words(child: MakeChild) -> None:
    (port,) = free_ports(1)
    async with child("print('no such model'); raise SystemExit(2)") as process:
        with pytest.raises(
            ProcessFailed, match=r"exit code 2 before it was ready\n  \| no such model\n  log: "
        ):
            await process.wait_ready(f"http://127.0.0.1:{port}/", timeout_s=30)


async def test_a_process_that_is_not_ready_in_time_fails(child: MakeChild) -> None:
    (port,) = free_ports(1)
    async with child(WAIT_FOR_EVER) as process:
        with pytest.raises(ProcessFailed, match="was not ready after 0 s"):
            await process.wait_ready(f"http://127.0.0.1:{port}/", timeout_s=0)


async def test_last_words_are_those_of_the_last_start(child: MakeChild, tmp_path: Path) -> None:
    process = child("import sys; print(open(sys.argv[1]).read())", str(tmp_path / "words"))
    assert process.last_log_lines() == ""
    for words in ("first", "second\n\nthird"):
        (tmp_path / "words").write_text(words)
        await process.start()
        await process.wait()

    assert process.last_log_lines() == "second\nthird"
    assert process.last_log_lines(1) == "third"


async def test_a_running_process_cannot_be_started_again(child: MakeChild) -> None:
    async with child(WAIT_FOR_EVER) as process:
        with pytest.raises(RuntimeError, match="already running"):
            await process.start()


async def test_a_process_that_was_never_started_cannot_be_waited_for(child: MakeChild) -> None:
    with pytest.raises(RuntimeError, match="never started"):
        await child(WAIT_FOR_EVER).wait()


def test_exits_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "SIGKILL"
