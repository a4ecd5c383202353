"""Claude Code's own npm package through the gateway: a second turn goes to the worker of the first one.

npm installs the package into a folder of the user's cache, once, and runs none of its scripts. The process
gets a home of its own and an address of loopback. All else that it might ask goes to a proxy of the test,
which refuses it. The pinned release begins its system prompt with a billing header of other digits each time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.programs import program
from tests.support.sockets import tcp_server

VERSION = "2.1.177"
INSTALL_S, TURN_S = 240, 120
MODEL = "sim-model"
REQUEST = '"path": "/v1/messages"'
SWITCHED_OFF = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_AUTOUPDATER",
    "DISABLE_BUG_COMMAND",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_TELEMETRY",
)
pytestmark = pytest.mark.timeout(INSTALL_S + 3 * TURN_S)


async def run(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode("utf-8", "replace")


async def installed() -> Path:
    """The package's launcher. Installs the package unless that was done before."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvroute-tests"
    folder = cache / f"claude-code-{VERSION}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache))
        words = ["--prefix", str(fresh), "--ignore-scripts", "--no-audit", "--no-fund", "--no-save"]
        async with asyncio.timeout(INSTALL_S):
            package = f"@anthropic-ai/claude-code@{VERSION}"
            code, output = await run(program("npm"), "install", *words, package)
        assert code == 0, output[-2_000:]
        try:
            fresh.rename(folder)
        except OSError:  # another run was first
            shutil.rmtree(fresh)
    return folder / "node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs"


@pytest.fixture
async def others():
    """A proxy that refuses everything: its URL, and the first line of each request."""
    asked: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode("latin-1").strip())
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with tcp_server(refuse) as port:
        yield f"http://127.0.0.1:{port}", asked


async def messages_of(url: str) -> list[dict[str, Any]]:
    """The bodies of `/v1/messages` that a worker has received."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        received = (await client.get(url + "/sim/requests")).json()["requests"]
    return [
        json.loads(base64.b64decode(each["body"]))
        for each in received
        if each["target"].startswith("/v1/messages?")
    ]


async def test_claude_codes_second_turn_hits_the_cache_of_the_first(serve, sim, others, tmp_path):
    node, launcher = program("node"), await installed()
    proxy, asked = others
    options = ("--time-scale", "0", "--record-requests", "200", "--max-model-len", "400000")
    workers = [await sim(*options) for _ in range(4)]
    gateway = await serve(*[word for url in workers for word in ("--worker", url)])
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home / "config"),
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
        "HTTP_PROXY": proxy,
        "HTTPS_PROXY": proxy,
        "NO_PROXY": "127.0.0.1",
        **dict.fromkeys(SWITCHED_OFF, "1"),
    }

    async def turn(*words: str) -> list[dict[str, Any]]:
        """Run one turn; the gateway's lines of its requests. The worker's answers end at their limit."""
        before = [line for line in gateway.lines if REQUEST in line]
        async with asyncio.timeout(TURN_S):
            _, output = await run(node, str(launcher), "-p", *words, env=env, cwd=work)
        sent = sum([len(await messages_of(url)) for url in workers])
        assert sent > len(before), output[-2_000:]
        await gateway.logged(REQUEST, sent)  # lines of requests are written together, a little later
        return [json.loads(line) for line in gateway.lines if REQUEST in line][len(before) :]

    first = await turn("Say hello.")
    second = await turn("--continue", "Say it again.")

    assert {line["status"] for line in first + second} == {200}
    assert len({line["worker"] for line in first + second}) == 1
    assert second[0]["matched_tokens"] > 0.9 * second[0]["prompt_tokens"]
    bodies = [body for url in workers for body in await messages_of(url)]
    headers = [body["system"][0]["text"] for body in bodies]
    assert all(header.startswith("x-anthropic-billing-header") for header in headers), "forwarded as sent"
    assert len(set(headers)) == len(headers) > 1
    assert asked == []
