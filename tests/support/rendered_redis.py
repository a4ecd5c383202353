"""Runs the command of a rendered Redis container on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.sockets import free_port

PASSWORDS = ("plain-0123456789", 'with "quotes" and \\ and spaces', "it's $HOME `id` # no comment", " a ")


async def answers_to_auth(command: Sequence[str], password: str, folder: Path) -> list[bytes]:
    """What the Redis of `command` answers to the right password and to a wrong one."""
    executable = shutil.which("redis-server")
    if executable is None:
        pytest.skip("redis-server is not installed")
    port, shim = free_port(), folder / "redis-server"
    shim.write_text(f'#!/bin/sh\nexec {executable} "$@" --bind 127.0.0.1 --port {port} --dir {folder}\n')
    shim.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "REDIS_PASSWORD": password}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            log = b""
            while b"Ready to accept connections" not in log:
                line = await process.stdout.readline()
                assert line, log
                log += line
        return [_auth(port, given) for given in (password, password + "x")]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _auth(port: int, password: str) -> bytes:
    given = password.encode()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(given), given))
        return connection.recv(4096)[:6]
