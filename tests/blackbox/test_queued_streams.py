"""Event streams that wait in the gateway's queue, with and without a head that is sent meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from tests.blackbox.raw import LANES, Client, connected, post
from tests.blackbox.test_streams import BODIES, END, HEAD, TOKENS, body_of, chunk, metric, name_of
from tests.support.waiting import until
from tests.support.workers import ScriptedWorker, scripted_worker

BODIES = {**BODIES, "/v1/completions": b'{"model":"m","prompt":"hi","stream":true}'}
TOKENS = {**TOKENS, "/v1/completions": b'data: {"choices":[{"index":0,"text":"tok-NAME"}]}\n\n'}
PATHS = list(BODIES)
CHAT = "/v1/chat/completions"
COMMENT = chunk(b": keep-alive\n\n")
EARLY = "streams.head_while_queued=true", "streams.head_wait_s=0.1", "streams.keep_alive_s=0.1"


class Queue(NamedTuple):
    """A gateway whose only worker computes one request, and one more that waits."""

    gateway: Any
    worker: ScriptedWorker
    first: Client
    second: Client
    """The client of the request that waits."""


@asynccontextmanager
async def queue(serve, path: str, *settings: str, sent: bytes = b"") -> AsyncIterator[Queue]:
    sent = sent or post(target=path.encode(), body=BODIES[path])
    async with scripted_worker() as worker:
        worker.answer, worker.rest = HEAD + chunk(TOKENS[path].replace(b"NAME", b"one")), END
        gateway = await serve(
            "--worker", worker.url, "--set", "admission.max_concurrent=1",
            *[argument for setting in settings for argument in ("--set", setting)],
        )  # fmt: skip
        async with connected(gateway.address) as first, connected(gateway.address) as second:
            await first.send(post(target=path.encode(), body=BODIES[path]))
            await first.until(b"tok-one")
            await second.send(sent)
            yield Queue(gateway, worker, first, second)


async def release(found: Queue, answer: bytes, rest: bytes, *, closes: bool = False) -> None:
    """Let the worker end its first request, and answer the second one with `answer` and `rest`.

    `closes`: it then ends the connection.
    """
    worker = found.worker
    worker.may_answer.clear()
    worker.may_finish.set()
    await found.first.until(END)
    await until(lambda: len(worker.requests) == 2, within_s=20)
    worker.answer, worker.rest, worker.closes_after_answer = answer, rest, closes
    worker.may_answer.set()


def events(received: bytes) -> list[bytes]:
    return [event for event in body_of(received).split(b"\n\n") if event and not event.startswith(b":")]


@pytest.mark.parametrize("fast_lane", LANES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_waits_gets_its_head_then_comments_then_the_answer(serve, path, fast_lane):
    async with queue(serve, path, *EARLY, f"server.fast_lane={fast_lane}") as found:
        head = (await found.second.until(COMMENT * 2)).split(b"\r\n\r\n")[0]
        assert len(found.worker.requests) == 1
        await release(found, HEAD + chunk(TOKENS[path].replace(b"NAME", b"two")), END)
        received = await found.second.until(END)

        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: text/event-stream" in head
        assert b"x-request-id: " in head
        assert b"x-kvroute-" not in head
        assert received.count(b"HTTP/1.1") == 1
        assert b": worker %b answers\n\n" % name_of(found.worker) in received
        assert events(received) == [TOKENS[path].replace(b"NAME", b"two")[:-2]]
        url = found.gateway.url
        assert await metric(url, "kvroute_queue_heads_total", 'end="answer"') == 1
        assert '"queued_head": true' in await found.gateway.logged("queue_wait_s")
        assert await metric(url, "kvroute_requests_in_flight") == 0


FORMS = {
    "/v1/responses": b'event: error\ndata: {"type": "error", "code": "%b"',
    "/v1/messages": b'event: error\ndata: {"type": "error", "error": {"message": "',
    "/v1/chat/completions": b'data: {"error": {"message": "',
    "/v1/completions": b'data: {"error": {"message": "',
}


def assert_one_error(received: bytes, path: str, code: bytes, message: str) -> None:
    (event,) = events(received)
    form = FORMS[path]
    assert event.startswith(form % code if b"%b" in form else form)
    data = json.loads(event.split(b"data: ", 1)[1])
    inner = data if path == "/v1/responses" else data["error"]
    assert message in inner["message"]
    assert str(inner["code"]) == code.decode()
    assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("fast_lane", LANES)
@pytest.mark.parametrize("path", PATHS)
async def test_when_the_wait_ends_the_refusal_is_one_error_event(serve, path, fast_lane):
    lane = f"server.fast_lane={fast_lane}"
    async with queue(serve, path, *EARLY, lane, "admission.max_wait_s=1") as found:
        received = await found.second.until(END)

        assert_one_error(received, path, b"queue_timeout", "admission.max_wait_s")
        url = found.gateway.url
        assert await metric(url, "kvroute_queue_heads_total", 'end="error"') == 1
        assert await metric(url, "kvroute_queue_shed_total", 'cause="deadline"') == 1
        assert await metric(url, "kvroute_requests_rejected_total", 'code="queue_timeout"') == 1
        assert await metric(url, "kvroute_requests_total", 'status="429"') == 1
        line = await found.gateway.logged("queue_timeout")
        assert '"status": 429' in line
        assert '"queued_head": true' in line
        # The connection can be used again.
        await release_first(found)
        await found.second.send(post(target=path.encode(), body=BODIES[path]))
        await found.second.until(END + b"HTTP/1.1 200 ")


async def release_first(found: Queue) -> None:
    found.worker.may_finish.set()
    await found.first.until(END)


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_of_the_worker_is_one_error_event_with_its_message(serve, path):
    refusal = b'{"error":{"message":"too long","type":"BadRequestError","param":"x","code":400}}'
    answer = b"HTTP/1.1 400 No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(refusal)
    async with queue(serve, path, *EARLY) as found:
        await found.second.until(COMMENT)
        await release(found, answer + refusal, b"")
        received = await found.second.until(END)

        assert_one_error(received, path, b"400", "too long")
        assert await metric(found.gateway.url, "kvroute_requests_total", 'status="400"') == 1


async def test_an_answer_that_is_no_event_stream_is_an_error_event(serve):
    async with queue(serve, CHAT, *EARLY) as found:
        await found.second.until(COMMENT)
        await release(found, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"")
        received = await found.second.until(END)

    assert_one_error(received, CHAT, b"200", "no event stream")


@pytest.mark.parametrize("fast_lane", LANES)
async def test_a_worker_that_is_lost_while_the_client_has_only_a_head_is_an_error_event(serve, fast_lane):
    async with queue(serve, CHAT, *EARLY, f"server.fast_lane={fast_lane}") as found:
        await found.second.until(COMMENT)
        await release(found, b"", b"", closes=True)
        received = await found.second.until(END)

        assert_one_error(received, CHAT, b"worker_unreachable", "")
        assert await metric(found.gateway.url, "kvroute_requests_total", 'status="502"') == 1


async def test_a_shutdown_ends_a_stream_that_waits_with_an_error_event(serve):
    async with queue(serve, CHAT, *EARLY, "server.drain_timeout_s=0.1") as found:
        await found.second.until(COMMENT)
        await found.gateway.stop(within_s=60)
        received = await found.second.until(END)

    assert_one_error(received, CHAT, b"shutting_down", "shutting down")


@pytest.mark.parametrize("fast_lane", LANES)
async def test_a_client_that_leaves_with_a_head_leaves_the_queue(serve, fast_lane):
    async with queue(serve, CHAT, *EARLY, f"server.fast_lane={fast_lane}") as found:
        await found.second.until(COMMENT)
        found.second.writer.transport.abort()

        async def has_left() -> bool:
            url = found.gateway.url
            return (
                await metric(url, "kvroute_queue_heads_total", 'end="client"') == 1
                and await metric(url, "kvroute_queue_waiting") == 0
            )

        await until(has_left, within_s=20)
        await release_first(found)
        assert len(found.worker.requests) == 1


PLAIN = {
    "off": ((), post(target=CHAT.encode(), body=BODIES[CHAT])),
    "not streamed": (EARLY, post(body=b'{"model":"m","prompt":"hi"}')),
    "no text": (EARLY, post(target=b"/v1/embeddings", body=b'{"model":"m","input":"hi","stream":true}')),
    "no head": (("streams.head_while_queued=true", "streams.head_wait_s=0"), post(
        target=CHAT.encode(), body=BODIES[CHAT]
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
async def test_every_other_request_that_waits_too_long_is_answered_429(serve, name):
    settings, sent = PLAIN[name]
    async with queue(serve, CHAT, *settings, "admission.max_wait_s=1", sent=sent) as found:
        received = await found.second.until(b"queue_timeout")

    assert received.startswith(b"HTTP/1.1 429 ")
    assert re.search(rb"\r\nretry-after: \d+\r\n", received)


async def test_a_stream_that_is_sent_before_its_head_is_due_has_the_head_of_its_worker(serve):
    settings = "streams.head_while_queued=true", "streams.head_wait_s=60"
    async with queue(serve, CHAT, *settings) as found:

        async def waits() -> bool:
            return await metric(found.gateway.url, "kvroute_queue_waiting") == 1

        await until(waits, within_s=20)
        await release(found, HEAD + chunk(TOKENS[CHAT]), END)
        received = await found.second.until(END)

    assert b"x-kvroute-worker: %b\r\n" % name_of(found.worker) in received
    assert b" answers\n\n" not in received
