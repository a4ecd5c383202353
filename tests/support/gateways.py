"""Gateways that share, as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tests.support.sockets import free_port
from tests.support.waiting import until

ADMIN = "an admin key for the tests"
KEY = "a secret of all members"
DEADLINE_S = 60.0


@dataclass
class Gateway:
    """One `kvroute serve`, and a client of it."""

    name: str
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    log: list[str] = field(default_factory=list)

    async def answer(self, path: str) -> Any:
        return (await self.client.get(path)).json()

    async def notes(self) -> list[str]:
        notes: list[str] = (await self.answer("/ready"))["notes"]
        return [note for note in notes if "sharing" in note]

    async def members(self) -> dict[str, dict[str, Any]]:
        """By name and process."""
        rows = (await self.answer("/admin/members"))["members"]
        return {f"{row['name']}/{row['process']}": row for row in rows}

    async def in_flight(self) -> int:
        workers = (await self.answer("/admin/workers"))["workers"]
        return sum(worker["running_requests"] for worker in workers)

    async def knows(self, content: str) -> bool:
        body = {"model": "sim-model", "messages": [{"role": "user", "content": content}]}
        explained = (await self.client.post("/v1/route/explain", json=body)).json()
        return bool(explained["ranking"][0]["matched_tokens"])


@asynccontextmanager
async def gateway(
    name: str,
    url: str,
    workers: Sequence[str],
    *arguments: str,
    env: dict[str, str] | None = None,
    port: int | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway that is ready."""
    port = port or free_port()
    named = [flag for number, worker in enumerate(workers) for flag in ("--worker", f"w{number}={worker}")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "serve", "--port", str(port), "--share", url, *named),
        *("--set", f"sharing.member={name}", "--set", "logging.format=json", *arguments),
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "KVROUTE__ADMIN__API_KEY": ADMIN,
            "KVROUTE__SHARING__KEY": KEY,
            **(env or {}),
        },
    )
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        timeout=DEADLINE_S,
        trust_env=False,
        headers={"authorization": f"Bearer {ADMIN}"},
    ) as client:
        running = Gateway(name, process, client)

        async def read_log() -> None:
            assert process.stderr is not None
            async for line in process.stderr:
                running.log.append(json.loads(line)["message"] if line.startswith(b"{") else line.decode())

        async def is_ready() -> bool:
            assert process.returncode is None, running.log
            try:
                return (await client.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        reading = asyncio.create_task(read_log())
        try:
            await until(is_ready, within_s=DEADLINE_S)
            yield running
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            await reading


async def enter(stack: AsyncExitStack, *gateways: Any) -> list[Gateway]:
    """Start gateways at one time, and wait until each knows all others."""
    running = list(await asyncio.gather(*(stack.enter_async_context(each) for each in gateways)))
    await until(lambda: all_alive(running), within_s=DEADLINE_S)
    return running


async def all_alive(gateways: Sequence[Gateway]) -> bool:
    found = [await each.members() for each in gateways]
    return all(
        len(members) >= len(gateways) and all(row["state"] == "alive" for row in members.values())
        for members in found
    )
