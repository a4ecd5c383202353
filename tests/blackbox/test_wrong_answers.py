"""Workers whose answers are wrong: no HTTP, redirects, absurd figures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from tests.support.workers import ScriptedWorker, scripted_worker

INTERNAL = b"http://10.0.0.7:8000/elsewhere"
NO_HTTP = {
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(64),
    "version": b"HTTP/3.7 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "status": b"HTTP/1.1 999 What\r\ncontent-length: 2\r\n\r\n{}",
    "switch": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
}
DIGITS = b"9" * 400


@pytest.fixture
async def two_workers() -> AsyncIterator[tuple[ScriptedWorker, ScriptedWorker]]:
    async with AsyncExitStack() as stack:
        yield (
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


def ask(client: httpx.AsyncClient, prompt: str = "hi", *, stream: bool = False):
    return client.post("/v1/completions", json={"model": "m", "prompt": prompt, "stream": stream})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", NO_HTTP)
async def test_a_worker_that_answers_no_http_is_replaced_by_another_one(
    serve, two_workers, kind, stream
) -> None:
    two_workers[0].answer = NO_HTTP[kind]
    gateway = await before(serve, two_workers)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        statuses = [(await ask(client, stream=stream)).status_code for _ in range(2)]

    assert statuses == [200, 200]
    assert two_workers[0].requests


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_of_a_worker_stays_behind_the_gateway(serve, two_workers, status) -> None:
    for worker in two_workers:
        worker.answer = b"HTTP/1.1 %d Moved\r\nlocation: %b\r\ncontent-length: 2\r\n\r\nhi" % (
            status,
            INTERNAL,
        )
    gateway = await before(serve, two_workers)

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        answer = await ask(client)
        two_workers[1].answer = b"HTTP/1.1 200 OK\r\nLocation: %b\r\ncontent-length: 2\r\n\r\n{}" % INTERNAL
        others = [await ask(client) for _ in range(2)]

    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "worker_unreachable"
    assert [other.status_code for other in others] == [200, 200]
    for each in (answer, *others):
        assert INTERNAL not in each.content
        assert not {"location", "content-location"} & set(each.headers)


@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens":%b,"completion_tokens":1}' % DIGITS,
        b'{"prompt_tokens":3,"completion_tokens":%b}' % DIGITS,
        b'{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":%b}}' % DIGITS,
    ],
    ids=["prompt", "completion", "cached"],
)
@pytest.mark.parametrize("padding", [0, 4000])
async def test_absurd_figures_in_usage_harm_nothing(serve, two_workers, usage, padding) -> None:
    body = b'{"choices":[{"text":"%b"}],"usage":%b}' % (b"x" * padding, usage)
    two_workers[0].answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    gateway = await before(serve, two_workers[:1])

    async with httpx.AsyncClient(base_url=gateway.url, timeout=20.0) as client:
        answers = [await ask(client) for _ in range(3)]
        metrics = await client.get("/metrics")

    assert [answer.content for answer in answers] == [body] * 3
    assert metrics.status_code == 200
    assert "kvroute_requests_in_flight 0.0" in metrics.text
    counted = [line for line in metrics.text.splitlines() if line.startswith("kvroute_requests_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted) == 3
    assert "Traceback" not in gateway.log
