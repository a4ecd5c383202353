"""A gateway whose disk is full answers requests, and says what it could not write."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.blackbox.conftest import EXECUTABLE, command, spawn
from tests.support.full_disk import full_disk
from tests.support.sockets import free_port
from tests.support.waiting import until

MANY = 50


def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str = "", after: str = "") -> None:
    """From now on `kvroute` is a shell script that runs `before` and then kvroute with `after`."""
    script = tmp_path / "kvroute"
    # Python before 3.12.8 keeps a bytecode file that the limit has cut off.
    script.write_text(
        f'#!/bin/sh\nexport PYTHONDONTWRITEBYTECODE=1\n{before}\nexec {shlex.join(command())} "$@" {after}\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv(EXECUTABLE, str(script))


def with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


async def complete(client: httpx.AsyncClient, count: int) -> None:
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    for _ in range(count):
        body = {"model": model, "prompt": "Hi.", "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("number", ["1", "2"])
async def test_requests_are_answered_while_the_log_cannot_be_written(run, sim, tmp_path, monkeypatch, number):
    """With two processes they cannot save their counters for a successor either."""
    worker = await sim("--time-scale", "0")
    file = tmp_path / "log"
    wrapped(tmp_path, monkeypatch, after=f"2>>{file}")
    port = free_port()
    gateway = await run("serve", "--port", str(port), "--worker", worker, "--processes", number)

    async def is_ready() -> bool:
        try:
            return (await client.get("/ready")).status_code == 200
        except httpx.TransportError:
            assert gateway.process.returncode is None, file.read_text()
            return False

    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, headers={"connection": "close"}
    ) as client:
        await until(is_ready, within_s=60)
        await until(lambda: file.read_text().count("is healthy") >= int(number), within_s=60)
        await complete(client, 1)
        with ExitStack() as full:
            for pid in with_children(gateway.pid):
                full.enter_context(full_disk(pid, longest_file=file.stat().st_size))
            await complete(client, MANY)

            async def failed_lines() -> float:
                page = (await client.get("/metrics")).text
                [line] = [
                    each for each in page.splitlines() if each.startswith("kvroute_log_lines_failed_total ")
                ]
                return float(line.split()[1])

            await until(lambda: _at_least(failed_lines, MANY))
        told = "lines of the log could not be written when they came: File too large"

        async def is_told() -> bool:
            await complete(client, 1)
            return told in file.read_text()

        await until(is_told)
    assert await gateway.stop() == 0
    assert "Traceback" not in file.read_text()


@pytest.mark.parametrize("number", ["1", "2"])
async def test_requests_are_answered_and_the_gateway_ends_while_nobody_reads_its_log(
    run, sim, tmp_path, monkeypatch, number
):
    worker = await sim("--time-scale", "0")
    pipe, port = tmp_path / "pipe", free_port()
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with contextlib.closing(os.fdopen(reading, "rb", buffering=0)) as log:
        size = fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, 4096)
        wrapped(tmp_path, monkeypatch, after=f"2>{pipe}")
        gateway = await run("serve", "--port", str(port), "--worker", worker, "--processes", number)

        async def is_ready() -> bool:
            try:
                return (await client.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False, headers={"connection": "close"}
        ) as client:
            await until(is_ready, within_s=60)
            await complete(client, MANY)
            text = bytearray()

            def is_complete() -> bool:
                text.extend(log.read(1 << 16) or b"")
                return text.count(b" kvroute.access ") == MANY

            await until(is_complete, within_s=60)
            assert len(text) > size
            await complete(client, MANY)
        assert await gateway.stop() == 0
    assert b"Traceback" not in text


async def _at_least(value, least: float) -> bool:
    return await value() >= least


async def test_a_gateway_that_cannot_store_its_admin_key_does_not_start_and_leaves_nothing(
    run, tmp_path, monkeypatch
):
    state = tmp_path / "state"
    wrapped(tmp_path, monkeypatch, before="ulimit -f 0")
    gateway = await run("serve", "--port", "0", "--worker", "http://127.0.0.1:9", "--state-dir", str(state))

    assert await gateway.ended() == 2
    assert "admin.api_key_file: is not set, and the gateway cannot keep a key of its own" in gateway.log
    assert "File too large" in gateway.log
    assert "Traceback" not in gateway.log
    assert list(state.iterdir()) == []


async def test_up_continues_without_its_state(processes, tmp_path, monkeypatch):
    """`kvroute ps` then shows the state of an earlier moment."""
    wrapped(tmp_path, monkeypatch, before="ulimit -f 1")
    state, port = tmp_path / "state", free_port()
    up = await spawn(processes, "up", "--state-dir", str(state), "--port", str(port), stdout=True)
    assert up.process.stdout is not None
    shown = ""
    async with asyncio.timeout(60):
        while "kvroute is ready at" not in shown:
            line = await up.process.stdout.readline()
            assert line, up.log
            shown += line.decode()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        await complete(client, 1)

    assert f"cannot write the state for `kvroute ps`: {state}: File too large" in shown
    assert await up.stop() == 0
    assert "Traceback" not in shown + up.log


async def test_a_command_that_cannot_write_a_temporary_file_says_so(run, tmp_path, monkeypatch):
    spec = tmp_path / "spec.yaml"
    spec.write_text((Path(__file__).parents[2] / "configs" / "session.yaml").read_text())
    wrapped(tmp_path, monkeypatch, before="ulimit -f 0")
    check = await run("check", "-f", str(spec))

    assert await check.ended() == 1
    assert check.log.startswith("Error: cannot write")
    assert "Traceback" not in check.log
