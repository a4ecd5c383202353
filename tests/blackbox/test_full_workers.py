"""Workers that are full: their requests go to other workers, and they stay in routing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from tests.support.sockets import tcp_server
from tests.support.waiting import until
from tests.support.workers import ScriptedWorker, scripted_worker

QUEUE_FULL = "The engine is currently busy and cannot accept new requests. "
TOKENS_FULL = "The engine has reached its prefill token backlog limit. "
LATER = "Please try again later or on a different instance."


def refusal(status: int, message: str = "no", headers: bytes = b"") -> bytes:
    """An answer as vLLM writes it."""
    error = {"message": message, "type": "Service Unavailable", "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    lines = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%b\r\n"
    return lines % (status, len(body), headers) + body


REFUSALS = {
    "queue": refusal(503, QUEUE_FULL + LATER),
    "tokens": refusal(503, TOKENS_FULL + LATER),
    "429": refusal(429),
    "retry-after": refusal(503, headers=b"retry-after: 7\r\n"),
    "date": refusal(503, headers=b"Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n"),
}


class FullWorker(ScriptedWorker):
    """Answers when it is told to, and refuses more than `slots` requests at a time. Mutable: `taken`."""

    slots = 8

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.refused = 0

    async def _answer_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lower = head.lower()
            length = int(lower.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            await reader.readexactly(length)
            if not head.startswith(b"POST"):
                models = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
                body = models if b" /v1/models " in head else b""
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            elif self.taken >= self.slots:
                self.refused += 1
                writer.write(REFUSALS["queue"])
            else:
                self.taken += 1
                await self.may_answer.wait()
                writer.write(self.answer)
            await writer.drain()


@asynccontextmanager
async def full_worker() -> AsyncIterator[FullWorker]:
    worker = FullWorker()
    async with tcp_server(worker.serve) as port:
        worker.url = f"http://127.0.0.1:{port}"
        yield worker


@pytest.fixture
async def workers() -> AsyncIterator[tuple[ScriptedWorker, ScriptedWorker, ScriptedWorker]]:
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(scripted_worker()),
            await stack.enter_async_context(scripted_worker()),
            await stack.enter_async_context(scripted_worker()),
        )


def before(serve, workers, *settings: str):
    """A round-robin gateway before these workers."""
    return serve(
        *[argument for worker in workers for argument in ("--worker", worker.url)],
        "--strategy", "roundrobin",
        *[argument for setting in settings for argument in ("--set", setting)],
    )  # fmt: skip


def post(client: httpx.AsyncClient, *, stream: bool = False):
    return client.post("/v1/completions", json={"model": "m", "prompt": "hi", "stream": stream})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("why", REFUSALS)
async def test_the_request_of_a_full_worker_goes_to_the_next_one(serve, workers, why, stream) -> None:
    full, other = workers[:2]
    full.answer = REFUSALS[why]
    gateway = await before(serve, [full, other], "retries.budget_percent=0", "retries.budget_min_per_s=0")

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        statuses = [(await post(client, stream=stream)).status_code for _ in range(40)]
        ready = (await client.get("/ready")).json()

    assert statuses == [200] * 40
    assert len(full.requests) >= 15, "it stays in routing"
    assert set(ready["workers"].values()) == {"healthy"}


async def test_a_refusal_whose_body_comes_later_is_recognised(serve, workers) -> None:
    full, other = workers[:2]
    head, _, body = REFUSALS["queue"].partition(b"\r\n\r\n")
    full.answer, full.rest = head + b"\r\n\r\n" + body[:20], body[20:]
    gateway = await before(serve, [full, other])

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        asked = [asyncio.create_task(post(client)) for _ in range(2)]
        await until(lambda: full.requests)
        full.may_finish.set()
        statuses = [(await each).status_code for each in asked]

    assert statuses == [200, 200]


async def test_any_other_503_is_a_failure_and_reaches_the_client(serve, workers) -> None:
    workers[0].answer = refusal(503, "EngineDeadError")
    gateway = await before(serve, workers[:1])

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        answer = await post(client)

    assert answer.status_code == 503
    assert "EngineDeadError" in answer.text


@pytest.mark.parametrize(
    ("refusals", "least", "most"),
    [(["retry-after", "queue", "queue"], 7, 7), (["queue", "429", "tokens"], 1, 60)],
)
async def test_when_every_worker_is_full_the_client_learns_when_to_come_again(
    serve, workers, refusals, least, most
) -> None:
    for worker, why in zip(workers, refusals, strict=True):
        worker.answer = REFUSALS[why]
    gateway = await before(serve, workers)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        answer = await post(client)
        metrics = (await client.get("/metrics")).text

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "workers_busy"
    assert least <= int(answer.headers["retry-after"]) <= most
    assert [len(worker.requests) for worker in workers] == [1, 1, 1]
    assert metrics.count("kvroute_busy_answers_total{") == 3


async def test_a_request_asks_no_more_full_workers_than_the_option_says(serve, workers) -> None:
    for worker in workers:
        worker.answer = REFUSALS["queue"]
    gateway = await before(serve, workers, "retries.busy_workers=2")

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        answer = await post(client)

    assert answer.status_code == 503
    assert sum(len(worker.requests) for worker in workers) == 2


async def test_goodput_stays_with_a_quarter_more_traffic_than_the_workers_can_do(serve) -> None:
    rounds, offered = 6, 30
    async with AsyncExitStack() as stack:
        fleet = [await stack.enter_async_context(full_worker()) for _ in range(3)]
        gateway = await before(serve, fleet)
        capacity = sum(worker.slots for worker in fleet)
        statuses: list[int] = []
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
            for _ in range(rounds):
                for worker in fleet:
                    worker.taken = 0
                    worker.may_answer.clear()
                asked: list[asyncio.Task[httpx.Response]] = []

                def is_settled(asked=asked) -> bool:
                    return sum(task.done() for task in asked) + sum(w.taken for w in fleet) == len(asked)

                # The second time, refused clients and new ones come while the workers are full.
                for _ in range(2):
                    asked += [asyncio.create_task(post(client)) for _ in range(offered)]
                    await until(is_settled)
                for worker in fleet:
                    worker.may_answer.set()
                statuses += [(await task).status_code for task in asked]

    assert statuses.count(200) >= 0.9 * capacity * rounds
    assert statuses.count(503) == len(statuses) - statuses.count(200)
    assert all(worker.refused for worker in fleet)
