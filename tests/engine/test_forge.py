"""A forked program behaves as if Python had started it; here with modules of the standard library."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.waiting import until

PROGRAM = Path(__file__).with_name("forge.py")
Run = Callable[..., Awaitable[Process]]


async def ended(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


@pytest.fixture
async def forge(tmp_path: Path) -> AsyncIterator[Process]:
    argv = [str(PROGRAM), "serve", str(tmp_path / "forge"), "decimal"]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, env=env, stdout=PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"ready")
    yield process
    await ended(process)


@pytest.fixture
async def run(forge: Process, tmp_path: Path) -> AsyncIterator[Run]:
    """`(code, *arguments, **environment)` -> a forked script of this code, running."""
    started = []

    async def begin(code: str, *arguments: str, **environment: str) -> Process:
        script = tmp_path / "script.py"
        script.write_text(code)
        argv = ["-S", "-E", str(PROGRAM), "run", str(tmp_path / "forge"), sys.executable, str(script)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *argv, *arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **environment},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        await ended(process)


async def said(process: Process) -> str:
    """Its next line."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_script_has_its_arguments_environment_folder_and_streams(run: Run, tmp_path: Path) -> None:
    code = """
import json, os, sys
import beside
facts = [sys.argv[1:], __name__, os.environ.get("MINE"), os.environ.get("HOME"), os.getcwd()]
print(json.dumps([*facts, sys.stdin.read(), "decimal" in sys.modules, beside.NAME]))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""
    (tmp_path / "beside.py").write_text("NAME = 'beside the script'")
    process = await run(code, "one", "two words", MINE="set")

    output, errors = await process.communicate(b"typed")

    facts = [["one", "two words"], "__main__", "set", None, str(tmp_path), "typed", True, "beside the script"]
    assert json.loads(output) == facts
    assert errors == b"to stderr\n"
    assert process.returncode == 7


async def test_an_error_is_printed_and_a_signal_is_passed_on(run: Run) -> None:
    failing = await run("raise ValueError('wrong')")
    assert b"ValueError: wrong" in (await failing.communicate())[1]
    assert failing.returncode == 1

    handling = await run(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    )
    await said(handling)
    handling.terminate()
    assert await handling.wait() == 5

    plain = await run("import signal\nprint('ready', flush=True)\nsignal.pause()")
    await said(plain)
    plain.terminate()
    assert await plain.wait() == -signal.SIGTERM


FAMILY = """
import os, signal
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
signal.pause()
"""


async def test_who_kills_a_script_ends_all_its_processes(run: Run) -> None:
    process = await run(FAMILY)
    pids = [int(pid) for pid in (await said(process)).split()]
    assert all(map(is_alive, pids))

    process.kill()

    await until(lambda: not any(map(is_alive, pids)))


async def test_what_a_script_leaves_running_ends_before_its_end_is_told(run: Run) -> None:
    process = await run(FAMILY.replace("signal.pause()", "child or signal.pause()"))
    pids = [int(pid) for pid in (await said(process)).split()]

    assert await process.wait() == 0

    assert not any(map(is_alive, pids))


async def test_the_end_of_the_forge_ends_its_scripts(run: Run, forge: Process) -> None:
    process = await run("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    pid = int(await said(process))

    forge.kill()

    await until(lambda: not is_alive(pid))
    assert await process.wait() == 1


async def test_a_script_with_another_hash_seed_is_started_by_python_itself(run: Run) -> None:
    code = "import sys\nprint('decimal' in sys.modules, hash('a') == int(sys.argv[1]))"
    alone = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print(hash('a'))", env={**os.environ, "PYTHONHASHSEED": "7"}, stdout=PIPE
    )
    wanted = (await alone.communicate())[0].decode().strip()

    process = await run(code, wanted, PYTHONHASHSEED="7")

    assert await said(process) == "False True"


async def test_a_shim_on_the_path_is_imported_first(run: Run, tmp_path: Path) -> None:
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "sitecustomize.py").write_text("import decimal\ndecimal.CHANGED = True")

    process = await run("import decimal\nprint(decimal.CHANGED)", PYTHONPATH=str(shim))

    assert await said(process) == "True"
