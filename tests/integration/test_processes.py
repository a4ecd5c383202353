"""Several gateway processes on one port: real processes and sockets in front of simulated workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.sockets import listening
from tests.support.waiting import until

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

MODEL = "sim-model"
LONG_ANSWER = {"max_tokens": 60, "ignore_eos": True, "stream": True}
ADMIN = {"authorization": "Bearer admin-key-of-the-tests"}
DEADLINE_S = 60
PROMPT_TOKENS = 400


def prompt(seed: int) -> str:
    chooser = random.Random(seed)
    return " ".join(f"{chooser.getrandbits(40):x}" for _ in range(PROMPT_TOKENS))


@dataclass
class Processes:
    """A gateway of two processes. `clients` has one client for each, which keeps its one connection."""

    parent: asyncio.subprocess.Process
    url: str
    folder: Path
    log: list[str]
    clients: list[httpx.AsyncClient]
    headers: dict[str, str]

    def pids(self) -> list[int]:
        """By process number, the newest ones."""
        found = dict(re.findall(r"process (\d) of 2 has pid (\d+)", "\n".join(self.log)))
        return [int(found[number]) for number in sorted(found)]

    async def fresh_client(self, stack: AsyncExitStack) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=600)
        client = httpx.AsyncClient(
            base_url=self.url, limits=limits, timeout=DEADLINE_S, trust_env=False, headers=self.headers
        )
        return await stack.enter_async_context(client)

    async def connect(self, stack: AsyncExitStack) -> None:
        """Connections go to whichever process the kernel likes: open some until both were met."""
        met: dict[str, httpx.AsyncClient] = {}
        async with asyncio.timeout(DEADLINE_S):
            while len(met) < 2:
                client = await self.fresh_client(stack)
                answer = await chat(client, "Who are you?", max_tokens=1)
                met.setdefault(process_of(answer), client)
        self.clients = list(met.values())


def process_of(answer: httpx.Response) -> str:
    """Request ids begin alike within a process."""
    return answer.headers["x-request-id"][:16]


async def chat(client: httpx.AsyncClient, content: str, **fields: Any) -> httpx.Response:
    answer = await client.post("/v1/chat/completions", json=body(content, **fields))
    assert answer.status_code == 200, answer.text
    return answer


def body(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


async def explain(client: httpx.AsyncClient, content: str) -> dict[str, Any]:
    answer = await client.post("/v1/route/explain", json=body(content))
    assert answer.status_code == 200, answer.text
    explained: dict[str, Any] = answer.json()
    return explained


async def counted(client: httpx.AsyncClient, name: str) -> float:
    """The sum of a family's samples on `/metrics`."""
    page = (await client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if re.match(name + r"[ {]", line))


@asynccontextmanager
async def processes(
    workers: list[str], *arguments: str, headers: dict[str, str] = ADMIN
) -> AsyncIterator[Processes]:
    with tempfile.TemporaryDirectory() as folder:
        named = [flag for number, url in enumerate(workers) for flag in ("--worker", f"w{number}={url}")]
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvroute", "serve", "--port", "0", "--processes", "2", *named),
            *("--set", "logging.format=json", "--set", "fleet.health.interval_s=0.2", *arguments),
            stderr=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                "TMPDIR": folder,
                "KVROUTE__ADMIN__API_KEY": ADMIN["authorization"].removeprefix("Bearer "),
            },
        )
        running = Processes(parent, "", Path(folder), [], [], headers)
        reading = asyncio.create_task(read_log(parent, running.log))
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not running.url:
                    found = re.search(r"listens on (\S+)", "\n".join(running.log))
                    running.url = found[1] if found else ""
                    assert parent.returncode is None, running.log
                    await asyncio.sleep(0.02)
            async with AsyncExitStack() as stack:
                client = await running.fresh_client(stack)

                async def is_ready() -> bool:
                    try:
                        return (await client.get("/ready")).status_code == 200
                    except httpx.TransportError:
                        return False

                await until(is_ready, within_s=DEADLINE_S)
                await running.connect(stack)
                yield running
        finally:
            if parent.returncode is None:
                parent.terminate()
            await parent.wait()
            await reading


async def read_log(parent: asyncio.subprocess.Process, log: list[str]) -> None:
    assert parent.stderr is not None
    async for line in parent.stderr:
        log.append(json.loads(line)["message"] if line.startswith(b"{") else line.decode())


@pytest.fixture
async def sims() -> AsyncIterator[list[RunningSim]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_sim(SimOptions(time_scale=0))) for _ in range(2)]


@pytest.fixture
async def slow_sims() -> AsyncIterator[list[RunningSim]]:
    """An answer of 60 tokens takes about two seconds."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_sim(SimOptions(time_scale=2))) for _ in range(2)]


async def test_one_process_knows_the_prompts_that_another_sent(sims):
    async with processes([sim.url for sim in sims]) as running:
        one, other = running.clients
        sent = await chat(one, prompt(1))

        async def is_known() -> dict[str, Any] | None:
            explained = await explain(other, prompt(1))
            return explained if explained["ranking"][0]["matched_tokens"] else None

        explained = await until(is_known, within_s=DEADLINE_S)
        followed = await chat(other, prompt(1))

        assert explained["worker"] == sent.headers["x-kvroute-worker"]
        assert process_of(followed) != process_of(sent)
        assert followed.headers["x-kvroute-reason"] == "prefix_hit"
        assert followed.headers["x-kvroute-worker"] == sent.headers["x-kvroute-worker"]


async def test_load_admin_and_metrics_are_those_of_both(slow_sims):
    compat = ("--set", "metrics.compat=vllm-router")
    async with processes([sim.url for sim in slow_sims], *compat) as running:
        one, other = running.clients

        async def in_flight(client: httpx.AsyncClient) -> int:
            workers = (await client.get("/admin/workers")).json()["workers"]
            return sum(worker["running_requests"] for worker in workers)

        async with one.stream("POST", "/v1/chat/completions", json=body("Go on.", **LONG_ANSWER)) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)

            async def is_seen() -> bool:
                return await in_flight(other) == 1

            await until(is_seen, within_s=DEADLINE_S)
            assert await counted(other, "kvroute_requests_in_flight") == 1
            assert await counted(other, "vllm:num_requests_running") == 1
            async for _ in chunks:
                pass

        async def is_over() -> bool:
            return await in_flight(other) == 0

        await until(is_over, within_s=DEADLINE_S)
        mine, yours = await chat(one, prompt(1)), await chat(other, prompt(2))
        pages = [await counted(client, "kvroute_requests_total") for client in (one, other)]
        assert pages[0] == pages[1] >= 5
        assert await counted(one, "kvroute_time_to_first_byte_seconds_count") == pages[0]
        assert await counted(one, "vllm:request_latency_seconds_count") == pages[0]
        decisions = (await one.get("/admin/decisions")).json()["decisions"]
        assert {mine.headers["x-request-id"], yours.headers["x-request-id"]} <= {
            each["request_id"] for each in decisions
        }
        assert [each["time"] for each in decisions] == sorted(
            (each["time"] for each in decisions), reverse=True
        )

        await one.post("/admin/workers/w0/drain")

        async def state(client: httpx.AsyncClient, worker: str) -> str | None:
            answer = await client.get(f"/admin/workers/{worker}")
            return answer.json()["state"] if answer.status_code == 200 else None

        async def is_drained() -> bool:
            return await state(other, "w0") == "draining"

        await until(is_drained, within_s=DEADLINE_S)
        assert (await explain(other, "x"))["worker"] == "w1"
        await other.delete("/admin/workers/w0/drain")

        async def is_back() -> bool:
            return await state(one, "w0") == "healthy"

        await until(is_back, within_s=DEADLINE_S)
        await other.delete("/admin/workers/w1")

        async def is_removed() -> bool:
            return await state(one, "w1") is None

        await until(is_removed, within_s=DEADLINE_S)


async def test_the_live_page_shows_both_as_one(slow_sims):
    async with processes([sim.url for sim in slow_sims]) as running:
        one, other = running.clients
        async with AsyncExitStack() as stack:
            page = await running.fresh_client(stack)
            answer = await stack.enter_async_context(page.stream("GET", "/admin/live"))
            lines = answer.aiter_lines()
            first = json.loads(await anext(lines))
            names = {(await chat(client, prompt(5))).headers["x-request-id"] for client in (one, other)}
            seen: set[str] = set()
            requests = 0
            while not names <= seen:
                line = json.loads(await anext(lines))
                seen |= {row["id"] for row in line["requests"]}
                requests += line["bucket"]["requests"]

            again = (await other.get("/admin/what-if?strategy=prefixaware")).json()
            found = [
                (await client.get(f"/admin/decisions?request_id={name}")).json()["decisions"]
                for client in (one, other)
                for name in names
            ]

    assert first["processes"] == {"all": 2, "missing": 0}
    assert requests == 2
    assert (again["made_again"], again["same"]) == (2, 2)
    assert [len(each) for each in found] == [1, 1, 1, 1]


async def test_the_live_page_adds_up_the_clients_of_both(slow_sims, tmp_path):
    """Each process counts the requests, waits and refusals of a key for itself; the page shows one row."""
    limits = {"team": {}, "small": {"requests_per_minute": 2, "tokens_per_minute": 1_000_000}}
    hashes = {name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in limits}
    keys = [{"name": name, "hash": f"sha256:{hashes[name]}", "limits": limits[name]} for name in limits]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    options = {"server.client_keys.file": tmp_path / "keys.json", "admission.max_concurrent": 2}
    arguments = [flag for name, value in options.items() for flag in ("--set", f"{name}={value}")]
    team, small = ({"authorization": f"Bearer {name}-key"} for name in ("team", "small"))
    async with (
        processes([slow_sims[0].url], *arguments, headers=team) as running,
        AsyncExitStack() as stack,
    ):
        met = {0: list(running.clients[:1]), 1: list(running.clients[1:])}
        ids = [process_of(await chat(client, "Who?", max_tokens=1)) for client in running.clients]
        async with asyncio.timeout(DEADLINE_S):
            while min(len(each) for each in met.values()) < 2:
                client = await running.fresh_client(stack)
                met[ids.index(process_of(await chat(client, "Who?", max_tokens=1)))].append(client)
        page = await running.fresh_client(stack)
        stream = page.stream("GET", "/admin/live", headers=ADMIN)
        lines = (await stack.enter_async_context(stream)).aiter_lines()
        clients: dict[str, dict[str, float]] = {}

        async def until_shown(key: str, **figures: float) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not figures.items() <= clients.get(key, {}).items():
                    clients.update(json.loads(await anext(lines)).get("clients", {}))

        await until_shown("team", waiting=0)
        before = clients["team"]["requests"]
        # Each process has a permit: one of its two requests runs, the other one waits.
        asked = [
            stack.enter_async_context(
                client.stream("POST", "/v1/chat/completions", json=body("Go", **LONG_ANSWER))
            )
            for pair in met.values()
            for client in pair[:2]
        ]
        answering = asyncio.gather(*asked)
        await until_shown("team", requests=before + 4, waiting=2)
        for answer in await answering:
            await answer.aread()
        await until_shown("team", requests=before + 4, started=before + 4, waiting=0)

        statuses = [
            (await client.post("/v1/chat/completions", json=body("Hi"), headers=small)).status_code
            for pair in met.values()
            for client in pair[:2]
        ]
        await until_shown("small", requests=2, limited=2)

    assert clients["team"]["waited_s"] > 0
    assert clients["team"]["shed"] == 0
    assert sorted(statuses) == [200, 200, 429, 429]
    assert clients["small"]["tokens"] > 0


async def test_a_killed_process_ends_its_own_streams_only_and_its_successor_is_synced(slow_sims):
    async with processes([sim.url for sim in slow_sims]) as running, AsyncExitStack() as stack:
        sent = await chat(running.clients[0], prompt(1))
        drained = "w1" if sent.headers["x-kvroute-worker"] == "w0" else "w0"
        await running.clients[0].post(f"/admin/workers/{drained}/drain")
        before = await counted(running.clients[1], "kvroute_requests_total")
        first = running.pids()

        async def stream(client: httpx.AsyncClient, started: asyncio.Event) -> bool:
            """Whether it came to its end."""
            received = b""
            try:
                async with client.stream(
                    "POST", "/v1/chat/completions", json=body("Go on.", **LONG_ANSWER)
                ) as answer:
                    async for chunk in answer.aiter_raw():
                        received += chunk
                        started.set()
            except httpx.TransportError:
                return False
            return received.endswith(b"data: [DONE]\n\n")

        started = [asyncio.Event(), asyncio.Event()]
        streams = [
            asyncio.create_task(stream(client, event))
            for client, event in zip(running.clients, started, strict=True)
        ]
        for event in started:
            await event.wait()
        os.kill(first[0], signal.SIGKILL)
        outcomes = await asyncio.gather(*streams)

        assert sorted(outcomes) == [False, True]
        survivor = running.clients[outcomes.index(True)]
        assert await counted(survivor, "kvroute_requests_total") >= before

        async def is_replaced() -> bool:
            return await counted(survivor, "kvroute_process_links") == 2

        await until(is_replaced, within_s=DEADLINE_S)
        await running.connect(stack)
        assert running.pids()[0] != first[0]
        assert running.pids()[1] == first[1]
        for client in running.clients:
            explained = await explain(client, prompt(1))
            assert explained["ranking"][0]["matched_tokens"] > PROMPT_TOKENS
            assert explained["filtered"] == [{"worker": drained, "filter": "draining"}]
            assert await counted(client, "kvroute_requests_total") > before
            assert await counted(client, "kvroute_process_restarts_total") == 1
            assert await counted(client, "kvroute_process_link_breaks_total") == 1


async def test_sigterm_lets_both_finish_and_nothing_is_left(slow_sims):
    async with processes([sim.url for sim in slow_sims]) as running:

        async def stream(client: httpx.AsyncClient, started: asyncio.Event) -> bytes:
            received = b""
            async with client.stream(
                "POST", "/v1/chat/completions", json=body("Go on.", **LONG_ANSWER)
            ) as answer:
                async for chunk in answer.aiter_raw():
                    received += chunk
                    started.set()
            return received

        started = [asyncio.Event(), asyncio.Event()]
        streams = [
            asyncio.create_task(stream(client, event))
            for client, event in zip(running.clients, started, strict=True)
        ]
        for event in started:
            await event.wait()
        running.parent.terminate()

        assert [received[-14:] for received in await asyncio.gather(*streams)] == [b"data: [DONE]\n\n"] * 2
        async with asyncio.timeout(DEADLINE_S):
            assert await running.parent.wait() == 0
        assert list(running.folder.iterdir()) == []
        assert "broke" not in "\n".join(running.log)


async def test_processes_end_with_a_killed_parent(sims):
    async with processes([sim.url for sim in sims]) as running:
        running.parent.kill()
        await running.parent.wait()

        async def have_ended() -> bool:
            return not any(Path(f"/proc/{pid}").exists() for pid in running.pids())

        await until(have_ended, within_s=DEADLINE_S)
        assert list(running.folder.iterdir()) == []


KVAWARE = ("--strategy", "kvaware", "--set", "tokens.timeout_ms=10000")


async def until_nothing_is_noted(client: httpx.AsyncClient) -> None:
    async def has_no_notes() -> bool:
        return not (await client.get("/ready")).json()["notes"]

    await until(has_no_notes, within_s=DEADLINE_S)


async def until_mapped(client: httpx.AsyncClient, content: str) -> str:
    """The worker that the map says to hold it."""

    async def is_mapped() -> str | None:
        best = (await explain(client, content))["ranking"][0]
        mapped = best["believed_from"] == "cache events" and best["map"] == "whole"
        held = best["matched_tokens"] > PROMPT_TOKENS and not best["requests_in_flight"]
        return str(best["worker"]) if mapped and held else None

    return str(await until(is_mapped, within_s=DEADLINE_S))


async def test_events_of_the_workers_reach_the_process_that_does_not_follow_them(sims):
    async with processes([sim.url for sim in sims], *KVAWARE) as running:
        for client in running.clients:
            await until_nothing_is_noted(client)
        sent = await chat(running.clients[0], prompt(1))

        for client in running.clients:
            assert await until_mapped(client, prompt(1)) == sent.headers["x-kvroute-worker"]

        async def are_synced() -> bool:
            explained = [(await client.get("/admin/index")).json()["caches"] for client in running.clients]
            return bool(explained[0]["held_blocks"] == explained[1]["held_blocks"] > PROMPT_TOKENS // 16)

        await until(are_synced, within_s=DEADLINE_S)


async def test_the_process_that_follows_events_can_be_replaced(sims):
    async with processes([sim.url for sim in sims], *KVAWARE) as running, AsyncExitStack() as stack:
        for client in running.clients:
            await until_nothing_is_noted(client)
        sent = await chat(running.clients[0], prompt(1))
        for client in running.clients:
            await until_mapped(client, prompt(1))
        first = running.pids()

        os.kill(first[0], signal.SIGKILL)
        client = await running.fresh_client(stack)

        async def is_replaced() -> bool:
            try:
                return await counted(client, "kvroute_process_restarts_total") == 1
            except httpx.TransportError:  # it had got to the one that was killed
                return False

        await until(is_replaced, within_s=DEADLINE_S)
        await running.connect(stack)
        for client in running.clients:
            await until_nothing_is_noted(client)
            assert await until_mapped(client, prompt(1)) == sent.headers["x-kvroute-worker"]
        assert running.pids()[1] == first[1]


async def test_an_address_in_use_is_reported_and_no_process_starts():
    with listening() as port:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvroute", "serve", "--worker", "http://127.0.0.1:9", "--processes", "2"),
            *("--port", str(port)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()

    assert process.returncode == 2
    assert b"server.port" in errors
    assert b"Traceback" not in errors
