"""`kvroute tierd` as a process: SIGKILL, restart, two on one machine, and what is refused at the start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.tierd.conftest import Client, remove_files

from kvroute.cli import main

FOLDER = Path("/dev/shm")


class Daemon:
    """A `kvroute tierd` process that is ready, and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, memory: str) -> None:
        self.process = process
        self.url = url
        self.client = Client(url, memory)

    async def end(self, number: signal.Signals) -> int:
        await self.client.http.aclose()
        self.process.send_signal(number)
        return await self.process.wait()


Start = Callable[..., Awaitable[Daemon]]


async def launch(*flags: str) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-m", "kvroute", "tierd", "--port", "0", "--size-gb", "0.01", *flags]
    return await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


@pytest.fixture
async def start(memory_name: str) -> AsyncIterator[Start]:
    """`(*flags)` -> a daemon with the test's shared memory."""
    started: list[Daemon] = []

    async def start_daemon(*flags: str, memory: str = memory_name) -> Daemon:
        process = await launch("--shared-memory-name", memory, *flags)
        assert process.stdout is not None
        printed = ""
        while not (match := re.search(r"ready at (\S+)", printed)):
            line = await process.stdout.readline()
            assert line, printed
            printed += line.decode()
        daemon = Daemon(process, match[1], memory)
        started.append(daemon)
        return daemon

    async with asyncio.timeout(100):
        yield start_daemon
    for daemon in started:
        with contextlib.suppress(ProcessLookupError):
            daemon.process.kill()
        await daemon.process.communicate()
        await daemon.client.http.aclose()


async def test_a_clean_end_gives_the_memory_back_and_keeps_the_inode(start: Start, memory_name: str) -> None:
    daemon = await start()
    await daemon.client.put("k", b"data")
    lease = await daemon.client.lease("k")
    await daemon.client.release(lease)
    inode = (FOLDER / memory_name).stat().st_ino

    assert await daemon.end(signal.SIGTERM) == 0
    assert (FOLDER / memory_name).stat().st_ino == inode
    assert (FOLDER / memory_name).stat().st_blocks == 0


async def test_after_sigkill_a_new_daemon_has_the_same_segment(start: Start, memory_name: str) -> None:
    daemon = await start()
    await daemon.client.put("k", b"data")
    inode = (FOLDER / memory_name).stat().st_ino
    await daemon.end(signal.SIGKILL)
    assert (FOLDER / memory_name).stat().st_ino == inode

    again = await start()

    assert (FOLDER / memory_name).stat().st_ino == inode
    assert await again.client.get("k") is None
    assert await again.client.put("k", b"other") == 200
    assert await again.client.get("k") == b"other"


async def test_a_lease_that_outlives_a_killed_daemon_is_readable_until_it_ends(
    start: Start, memory_name: str
) -> None:
    """The next daemon waits for it before it writes there."""
    daemon = await start()
    await daemon.client.put("k", b"data")
    lease = await daemon.client.lease("k", ttl_s=3)
    asked = asyncio.get_running_loop().time()
    await daemon.end(signal.SIGKILL)
    starting = asyncio.create_task(start())

    while not starting.done():
        with contextlib.suppress(FileNotFoundError, ValueError):
            data = daemon.client.read(lease)
            if asyncio.get_running_loop().time() < asked + 3:
                assert data == b"data"
        await asyncio.sleep(0.02)

    assert asyncio.get_running_loop().time() >= asked + 3
    assert await (await starting).client.put("other", b"x") == 200


async def test_two_daemons_of_one_machine_serve_each_other(start: Start, memory_name: str) -> None:
    first = await start()
    other = f"{memory_name}_b"
    try:
        second = await start("--peer", first.url, "--peer-timeout", "20", memory=other)
        await first.client.put("k", b"data" * 10_000)

        assert await second.client.get("k", wait_ms=20_000) == b"data" * 10_000

        await first.end(signal.SIGKILL)
        assert await second.client.get("k") == b"data" * 10_000
        assert await second.client.get("none", wait_ms=20_000) is None
        await second.end(signal.SIGTERM)
    finally:
        remove_files(other)


async def test_a_large_object_goes_through_uvloop(start: Start) -> None:
    """Several reads and writes of the kernel, in both directions."""
    daemon = await start()
    data = os.urandom(6 << 20)

    assert await daemon.client.put("k", data) == 200
    assert (await daemon.client.http.get("/v1/kv/b/k")).content == data
    assert await daemon.client.get("k") == data


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "localhost"], "--peer: 'localhost' is not the address of a daemon"),
        (["--peers-dns", "http://x"], "--peers-dns: 'http://x' is not NAME:PORT"),
        (["--peer-timeout", "0"], "--peer-timeout: Input should be greater than 0"),
        (["--size-gb", "0"], "--size-gb: Input should be greater than 0"),
        (["--size-gb", "1e-9"], "size_gb: less than a page"),
        (["--disk-dir", "/nowhere"], "disk_dir and disk_gb must be set together"),
        (["--shared-memory-mode", "9"], "'9' is not a number such as 644"),
        (["--longest-lease", "0"], "--longest-lease: Input should be greater than 0"),
        (["--port", "70000"], "--port: Input should be less than or equal to 65535"),
    ],
)
def test_wrong_flags_are_usage_errors_that_name_the_flag(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["tierd", *flags])

    assert result.exit_code == 2
    assert message in result.output


def test_a_key_file_must_hold_a_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("\n")

    result = CliRunner().invoke(main, ["tierd", "--peer-key-file", str(file)])

    assert result.exit_code == 2
    assert "--peer-key-file: the file is empty" in result.output


def test_a_key_file_must_be_text(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"\xff\xfe")

    result = CliRunner().invoke(main, ["tierd", "--peer-key-file", str(file)])

    assert result.exit_code == 2
    assert "--peer-key-file: cannot read" in result.output
    assert "not UTF-8" in result.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
        (["--size-gb", "1e6"], "do not fit"),
    ],
)
async def test_a_failed_start_gives_a_reason_and_leaves_no_memory(
    memory_name: str, flags: list[str], message: str
) -> None:
    process = await launch("--shared-memory-name", memory_name, *flags)

    output, _ = await process.communicate()

    assert process.returncode == 1
    assert message in output.decode()
    assert "Traceback" not in output.decode()
    path = FOLDER / memory_name
    assert not path.exists() or path.stat().st_blocks == 0


async def test_a_name_in_use_is_refused(start: Start, memory_name: str) -> None:
    daemon = await start()
    process = await launch("--shared-memory-name", memory_name)

    output, _ = await process.communicate()

    assert process.returncode == 1
    assert b"another daemon uses the shared memory" in output
    assert await daemon.client.put("k", b"data") == 200


async def test_a_signal_ends_a_start_that_waits(start: Start, memory_name: str) -> None:
    daemon = await start()
    await daemon.client.put("k", b"data")
    await daemon.client.lease("k", ttl_s=200)
    await daemon.end(signal.SIGKILL)
    process = await launch("--shared-memory-name", memory_name)
    assert process.stdout is not None
    assert b"until the leases of an earlier daemon have ended" in await process.stdout.readline()

    process.terminate()
    await process.communicate()

    assert process.returncode == 0
