"""Requests that kill their workers: how many they get, and what happens when they come again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer an-admin-key-of-the-tests"}
MARKER = "kill"
LOST = "request_lost_workers"


class MortalWorker:
    """A worker that dies when a body with MARKER comes, if it `is_mortal`. Mutable: tests set the attributes.

    It computes until `may_die` is set, and closes all its connections as a process does that was killed.
    """

    def __init__(self) -> None:
        self.begun = 0
        """Bodies with MARKER that it has read."""
        self.may_die = asyncio.Event()
        self.may_die.set()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
                body = await reader.readexactly(int(length[1])) if length else b""
                answer = b"{}" if head.startswith(b"POST") else b""
                if MARKER.encode() in body:
                    self.begun += 1
                    await self.may_die.wait()
                    self.die()
                    return
                if b" /v1/models " in head:
                    answer = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@asynccontextmanager
async def fleet_of(count: int) -> AsyncIterator[list[MortalWorker]]:
    workers = [MortalWorker() for _ in range(count)]
    for worker in workers:
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers:
            worker.die()


def before(serve, workers, *settings: str, arguments: tuple[str, ...] = ()):
    """A round-robin gateway before these workers."""
    return serve(
        *[argument for worker in workers for argument in ("--worker", worker.url)],
        "--strategy", "roundrobin",
        "--set", f"admin.api_key={ADMIN['authorization'].split()[1]}",
        *[argument for setting in settings for argument in ("--set", setting)],
        *arguments,
    )  # fmt: skip


def ask(client: httpx.AsyncClient, prompt: str, **headers: str):
    return client.post("/v1/completions", json={"model": "m", "prompt": prompt}, headers=headers)


async def warm(client: httpx.AsyncClient, count: int) -> None:
    """Let the gateway have an idle connection to each worker."""
    for _ in range(count):
        assert (await ask(client, "warm")).status_code == 200


@pytest.mark.parametrize(("setting", "most"), [("retries.lost_workers=2", 2), ("retries.lost_workers=1", 1)])
async def test_a_request_that_kills_workers_takes_few_of_them(serve, setting, most) -> None:
    async with fleet_of(4) as workers:
        gateway = await before(serve, workers, *([setting] if most != 2 else []))
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
            await warm(client, 8)
            killed = await ask(client, MARKER)
            innocent = await ask(client, "hi")

        assert killed.status_code == 502
        assert sum(worker.begun for worker in workers) == most
        assert innocent.status_code == 200


async def test_a_worker_that_dies_after_computing_on_a_kept_connection_gets_the_request_once(serve) -> None:
    async with fleet_of(4) as workers:
        for worker in workers:
            worker.may_die.clear()
        gateway = await before(serve, workers)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
            await warm(client, 8)
            asked = asyncio.create_task(ask(client, MARKER))
            for count in (1, 2):
                await until(lambda count=count: sum(worker.begun for worker in workers) == count)
                for worker in workers:
                    if worker.begun:
                        worker.may_die.set()
            killed = await asked

        assert killed.status_code == 502
        assert sorted(worker.begun for worker in workers) == [0, 0, 1, 1]


async def test_a_body_that_has_lost_two_workers_is_refused_until_it_is_cleared(serve) -> None:
    async with fleet_of(4) as workers:
        gateway = await before(serve, workers)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
            await ask(client, MARKER)
            again = await ask(client, MARKER)
            other = await ask(client, "hi")
            listed = (await client.get("/admin/lost-requests", headers=ADMIN)).json()["lost_requests"]
            metrics = (await client.get("/metrics")).text
            begun = sum(worker.begun for worker in workers)
            wrong = await client.delete("/admin/lost-requests/00", headers=ADMIN)
            one = await client.delete(f"/admin/lost-requests/{listed[0]['hash']}", headers=ADMIN)
            await ask(client, MARKER)

        assert (again.status_code, again.json()["error"]["code"]) == (502, LOST)
        assert listed[0]["hash"] in again.json()["error"]["message"]
        assert other.status_code == 200
        assert begun == 2
        assert len(listed) == 1
        assert listed[0]["refused"] is True
        assert len(listed[0]["workers"]) == 2
        assert MARKER not in json.dumps(listed)
        assert "kvroute_lost_requests_refused_total 1.0" in metrics
        assert (wrong.status_code, one.json()) == (404, {"cleared": 1})
        assert sum(worker.begun for worker in workers) == 4, "it is sent again once it is cleared"
        assert "has lost 2 workers" in gateway.log
        assert MARKER not in gateway.log


async def test_the_body_of_another_key_is_not_refused(serve, tmp_path) -> None:
    keys = tmp_path / "keys.yaml"
    texts = {"one": "the-key-of-the-first-one", "two": "the-key-of-the-second-one"}
    hashes = {name: f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" for name, text in texts.items()}
    keys.write_text(json.dumps({"keys": [{"name": name, "hash": each} for name, each in hashes.items()]}))
    keys.chmod(0o600)
    async with fleet_of(4) as workers:
        gateway = await before(serve, workers, f"server.client_keys.file={keys}")
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
            mine = {"authorization": "Bearer the-key-of-the-first-one"}
            theirs = {"authorization": "Bearer the-key-of-the-second-one"}
            await ask(client, MARKER, **mine)
            refused = await ask(client, MARKER, **mine)
            other = await ask(client, MARKER, **theirs)

        assert refused.json()["error"]["code"] == LOST
        assert other.json()["error"]["code"] != LOST
        assert sum(worker.begun for worker in workers) == 4


async def test_workers_that_were_to_leave_do_not_count(serve) -> None:
    async with fleet_of(2) as workers:
        for worker in workers:
            worker.may_die.clear()
        gateway = await before(serve, workers)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
            asked = asyncio.create_task(ask(client, MARKER))
            for count in (1, 2):
                await until(lambda count=count: sum(worker.begun for worker in workers) == count)
                for row in (await client.get("/admin/workers", headers=ADMIN)).json()["workers"]:
                    worker = next(each for each in workers if each.url == row["url"])
                    if worker.begun and not worker.may_die.is_set():
                        await client.post(f"/admin/workers/{row['id']}/drain", headers=ADMIN)
                        worker.may_die.set()
            await asked
            listed = (await client.get("/admin/lost-requests", headers=ADMIN)).json()

        assert listed == {"lost_requests": []}


async def test_all_processes_refuse_the_body(serve) -> None:
    async with fleet_of(6) as workers:
        gateway = await before(serve, workers, arguments=("--processes", "2"))
        async with AsyncExitStack() as stack:
            # Each connection may be that of another process.
            clients = [
                await stack.enter_async_context(httpx.AsyncClient(base_url=gateway.url, timeout=20.0))
                for _ in range(8)
            ]
            await ask(clients[0], MARKER)

            async def all_know() -> bool:
                rows = [await client.get("/admin/lost-requests", headers=ADMIN) for client in clients]
                return all(row.json()["lost_requests"] for row in rows)

            await until(all_know)
            codes = [(await ask(client, MARKER)).json()["error"]["code"] for client in clients]
            await clients[0].delete("/admin/lost-requests", headers=ADMIN)

            async def all_forget() -> bool:
                rows = [await client.get("/admin/lost-requests", headers=ADMIN) for client in clients]
                return not any(row.json()["lost_requests"] for row in rows)

            await until(all_forget)

        assert codes == [LOST] * 8
        assert sum(worker.begun for worker in workers) == 2


async def test_a_worker_that_dies_while_it_tokenizes_the_prompt_counts(serve, sim) -> None:
    """The gateway asks workers for a prompt's tokens where it has no tokenizer: they read the body, too."""
    urls = [await sim("--events", own=True) for _ in range(5)]
    named = [part for url in urls for part in ("--worker", url)]
    gateway = await serve(*named, "--strategy", "kvaware")
    await gateway.logged("come from: remote")
    async with httpx.AsyncClient(timeout=20.0) as client:
        for url in urls:
            fault = {"kind": "kill", "marker": MARKER, "count": None, "delay_s": 0}
            assert (await client.post(f"{url}/sim/faults", json=fault)).status_code == 200
        body = {"model": "sim-model", "prompt": f"{MARKER} {'word ' * 40}", "max_tokens": 1}
        answers = [await client.post(f"{gateway.url}/v1/completions", json=body) for _ in range(3)]
        innocent = {**body, "prompt": "hi"}
        other = await client.post(f"{gateway.url}/v1/completions", json=innocent)
        dead = 0
        for url in urls:
            try:
                await client.get(f"{url}/health")
            except httpx.ConnectError:
                dead += 1

    assert dead == 2
    assert [answer.status_code for answer in answers] == [502, 502, 502]
    assert answers[-1].json()["error"]["code"] == LOST
    assert other.status_code == 200
