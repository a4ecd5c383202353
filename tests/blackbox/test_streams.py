"""Event streams as clients see them: until the first token, and when a worker is lost before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from tests.blackbox.raw import LANES, Client, connected, post
from tests.support.waiting import until
from tests.support.workers import ScriptedWorker, scripted_worker

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODIES = {
    "/v1/responses": b'{"model":"m","input":"hi","stream":true}',
    "/v1/messages": b'{"model":"m","max_tokens":9,"stream":true,"messages":[{"role":"user","content":"hi"}]}',
    "/v1/chat/completions": b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}',
}
PREAMBLES = {
    "/v1/responses": [
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"r-NAME"}}\n\n',
        b'event: response.in_progress\ndata: {"type":"response.in_progress"}\n\n',
    ],
    "/v1/messages": [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m-NAME"}}\n\n',
        b'event: ping\ndata: {"type": "ping"}\n\n: waiting\n\n',
    ],
    "/v1/chat/completions": [b": OPENROUTER PROCESSING NAME\n\n", b": again\n\n"],
}
TOKENS = {
    "/v1/responses": b'event: response.output_text.delta\ndata: {"delta":"tok-NAME"}\n\n',
    "/v1/messages": b'event: content_block_delta\ndata: {"type":"content_block_delta","text":"tok-NAME"}\n\n',
    "/v1/chat/completions": b'data: {"choices":[{"index":0,"delta":{"content":"tok-NAME"}}]}\n\n',
}
PATHS = list(BODIES)
END = b"0\r\n\r\n"
WAIT_S = 0.3
"""How long a worker computes before its first token: far longer than a local request takes."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def preamble(path: str, name: bytes) -> bytes:
    return b"".join(chunk(each.replace(b"NAME", name)) for each in PREAMBLES[path])


def token(path: str, name: bytes) -> bytes:
    return chunk(TOKENS[path].replace(b"NAME", name))


def body_of(received: bytes) -> bytes:
    """The body of a chunked answer, as far as it has come."""
    rest, body = received.split(b"\r\n\r\n", 1)[1], b""
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def request(path: str) -> bytes:
    return post(target=path.encode(), body=BODIES[path])


@pytest.fixture
async def two_workers() -> AsyncIterator[tuple[ScriptedWorker, ScriptedWorker]]:
    async with AsyncExitStack() as stack:
        yield (
            await stack.enter_async_context(scripted_worker()),
            await stack.enter_async_context(scripted_worker()),
        )


def between(serve, workers, *settings: str):
    """A round-robin gateway before these workers."""
    return serve(
        *[argument for worker in workers for argument in ("--worker", worker.url)],
        "--strategy", "roundrobin",
        *[argument for setting in settings for argument in ("--set", setting)],
    )  # fmt: skip


async def metric(url: str, name: str, *labels: str) -> float:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        page = (await client.get("/metrics")).text
    lines = [line for line in page.splitlines() if re.match(rf"{name}(\{{| )", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


@pytest.mark.parametrize("fast_lane", LANES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_worker_that_dies_after_the_preamble_is_replaced(serve, two_workers, path, fast_lane):
    dies, answers = two_workers
    dies.answer, dies.closes_after_answer = HEAD + preamble(path, b"dead"), True
    answers.answer = HEAD + preamble(path, b"good") + token(path, b"good") + END
    running = await between(serve, two_workers, f"server.fast_lane={fast_lane}")

    for _ in range(2):  # one of them is sent to the worker that dies
        async with connected(running.address) as client:
            await client.send(request(path))
            received = await client.until(END)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"tok-good" in received
        assert b"dead" not in received
        assert b"error" not in received

    assert dies.requests
    assert await metric(running.url, "kvroute_retries_total") == len(dies.requests)


@pytest.mark.parametrize("cut", [1, 7, 24, 60, -1])
async def test_a_worker_that_dies_within_a_preamble_event_is_replaced(serve, two_workers, cut):
    dies, answers = two_workers
    path = "/v1/responses"
    whole = PREAMBLES[path][0]
    dies.answer, dies.closes_after_answer = HEAD + chunk(whole[:cut]), True
    answers.answer = HEAD + preamble(path, b"good") + token(path, b"good") + END
    running = await between(serve, two_workers)

    for _ in range(2):
        async with connected(running.address) as client:
            await client.send(request(path))
            received = await client.until(END)
        assert b"tok-good" in received
        assert b"error" not in received

    assert dies.requests


@pytest.mark.parametrize("fast_lane", LANES)
@pytest.mark.parametrize("path", PATHS)
async def test_the_time_to_the_first_token_does_not_end_with_the_preamble(
    serve, two_workers, path, fast_lane
):
    worker = two_workers[0]
    worker.answer, worker.rest = HEAD + preamble(path, b"w"), token(path, b"w") + token(path, b"x") + END
    running = await between(serve, [worker], f"server.fast_lane={fast_lane}")

    async with connected(running.address) as client:
        await client.send(request(path))
        await until(lambda: len(worker.requests) == 1, within_s=20)
        await asyncio.sleep(WAIT_S)  # the worker computes the prompt
        worker.may_finish.set()
        received = await client.until(END)

    assert received.count(b"tok-w") == received.count(b"tok-x") == 1
    seconds = await metric(running.url, "kvroute_time_to_first_byte_seconds_sum", 'streamed="true"')
    assert seconds >= WAIT_S


async def test_a_preamble_comes_unchanged_before_the_first_token(serve, two_workers):
    worker, path = two_workers[0], "/v1/responses"
    events = [*PREAMBLES[path], TOKENS[path], TOKENS[path]]
    worker.answer = HEAD + b"".join(map(chunk, events)) + END
    running = await between(serve, [worker])

    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
        answer = await client.post(path, content=BODIES[path], headers={"content-type": "application/json"})

    assert answer.content == b"".join(events)


async def test_a_preamble_that_is_too_large_is_passed_on_and_is_still_no_token(serve, two_workers):
    worker, path = two_workers[0], "/v1/responses"
    large = PREAMBLES[path][0].replace(b"r-NAME", b"x" * 1_500_000)
    worker.answer, worker.rest = HEAD + chunk(large), token(path, b"w") + token(path, b"x") + END
    running = await between(serve, [worker])

    async with connected(running.address) as client:
        await client.send(request(path))
        await client.until(b'xxx"}}\n\n')
        await asyncio.sleep(WAIT_S)  # the worker computes the prompt
        worker.may_finish.set()
        received = await client.until(END)

    assert received.count(b"tok-w") == received.count(b"tok-x") == 1
    assert await metric(running.url, "kvroute_time_to_first_byte_seconds_sum", 'streamed="true"') >= WAIT_S


EARLY = "streams.head_wait_s=0.2"
ERRORS = {
    "/v1/responses": b'event: error\ndata: {"type": "error", "code": "worker_unreachable"',
    "/v1/messages": b'event: error\ndata: {"type": "error", "error": {',
    "/v1/chat/completions": b'data: {"error": {',
}


def held(worker: ScriptedWorker, start: bytes, rest: bytes) -> None:
    """The worker sends `start`, and `rest` when `may_finish` is set."""
    worker.answer, worker.rest = start, rest


def name_of(worker: ScriptedWorker) -> bytes:
    """The id of a worker of `--worker`."""
    return worker.url.removeprefix("http://").encode()


def died(worker: ScriptedWorker) -> None:
    """Let the worker end its connection in the middle of its answer."""
    worker.closes_after_answer = True
    worker.may_finish.set()


@pytest.mark.parametrize("fast_lane", LANES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_gets_the_head_and_the_preamble_while_the_worker_computes(
    serve, two_workers, path, fast_lane
):
    worker = two_workers[0]
    held(worker, HEAD + preamble(path, b"w"), token(path, b"w") + END)
    running = await between(serve, [worker], EARLY, f"server.fast_lane={fast_lane}")

    async with connected(running.address) as client:
        await client.send(request(path))
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"x-kvroute-worker: %b\r\n" % name_of(worker) in head
        if path != "/v1/chat/completions":
            await client.until(b'-w"')
        assert not worker.may_finish.is_set()
        worker.may_finish.set()
        received = await client.until(END)

    assert received.count(b"HTTP/1.1") == received.count(b"tok-w") == 1
    assert await metric(running.url, "kvroute_time_to_first_byte_seconds_sum", 'streamed="true"') >= 0.2


async def test_a_client_need_not_wait_for_a_head_until_a_long_prompt_is_computed(serve, two_workers):
    """With defaults. Clients give up after 10 s and more."""
    worker, path = two_workers[0], "/v1/chat/completions"
    held(worker, HEAD, token(path, b"w") + END)
    running = await between(serve, [worker])

    async with connected(running.address) as client:
        await client.send(request(path))
        head = await client.until(b"\r\n\r\n", within_s=10)
        worker.may_finish.set()
        received = await client.until(END)

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"tok-w" in received


async def test_only_the_head_of_a_stream_is_sent_early(serve, two_workers):
    worker = two_workers[0]
    sized = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"
    held(worker, sized, b"{}")
    running = await between(serve, [worker], EARLY)

    async with connected(running.address) as client:
        await client.send(request(PATHS[2]))
        await until(lambda: len(worker.requests) == 1, within_s=20)
        with pytest.raises(TimeoutError):
            await client.until(b"HTTP", within_s=3 * WAIT_S)
        worker.may_finish.set()
        received = await client.until(b"{}")

    assert received.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("fast_lane", LANES)
async def test_a_worker_that_is_lost_after_its_head_and_before_its_first_event_is_replaced(
    serve, two_workers, fast_lane
):
    path, (dies, answers) = "/v1/chat/completions", two_workers
    held(dies, HEAD, b"")
    dies.rest = b"5"  # a part of a chunk's size
    answers.may_answer.clear()
    running = await between(
        serve, two_workers, EARLY, f"server.fast_lane={fast_lane}", "logging.requests=true"
    )

    async with connected(running.address) as first, connected(running.address) as second:
        for client in (first, second):  # one of them gets the worker that dies
            await client.send(request(path))
        await until(lambda: dies.requests and answers.requests, within_s=20)
        lost = await _with_head(first, second)
        answers.answer = HEAD + token(path, b"good") + END
        answers.may_answer.set()
        died(dies)
        received = await lost.until(END)

    assert received.count(b"HTTP/1.1 200") == 1
    assert b"x-kvroute-worker: %b\r\n" % name_of(dies) in received
    assert (
        b": worker %b was lost before its first event, worker %b answers\n\n"
        % (
            name_of(dies),
            name_of(answers),
        )
        in received
    )
    assert b"tok-good" in received
    assert b'"error"' not in received
    assert await metric(running.url, "kvroute_streams_moved_total") == 1
    assert name_of(dies).decode() in await running.logged("head_worker")


async def _with_head(*clients: Client) -> Client:
    """The client that gets a head first."""
    waits = {asyncio.create_task(client.until(b"\r\n\r\n")): client for client in clients}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return waits[done.pop()]


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_after_the_early_head_is_one_error_event_in_the_form_of_the_endpoint(
    serve, two_workers, path
):
    worker = two_workers[0]
    held(worker, HEAD + preamble(path, b"w"), b"5")
    running = await between(serve, [worker], EARLY)

    async with connected(running.address) as client:
        await client.send(request(path))
        await client.until(b"\r\n\r\n")
        died(worker)
        received = await client.until(END)

    assert received.count(ERRORS[path]) == 1
    assert received.count(b"HTTP/1.1") == 1
    assert await metric(running.url, "kvroute_streams_aborted_total", 'by="worker"') == 1
    assert await metric(running.url, "kvroute_requests_in_flight") == 0


@pytest.mark.parametrize("fast_lane", LANES)
async def test_a_silent_stream_is_kept_alive_by_comments_between_its_events(serve, two_workers, fast_lane):
    worker, path = two_workers[0], "/v1/chat/completions"
    held(worker, HEAD + token(path, b"one"), token(path, b"two") + END)
    running = await between(serve, [worker], "streams.keep_alive_s=0.1", f"server.fast_lane={fast_lane}")

    async with connected(running.address) as client:
        await client.send(request(path))
        await client.until(chunk(b": keep-alive\n\n") * 2)
        worker.may_finish.set()
        received = await client.until(END)

    assert len(re.findall(rb"data: \{.*?\}\n\n", received)) == 2


async def test_a_comment_comes_before_an_event_that_has_begun_not_within_it(serve, two_workers):
    worker, path = two_workers[0], "/v1/chat/completions"
    whole = TOKENS[path]
    held(worker, HEAD + chunk(whole[:20]), chunk(whole[20:]) + token(path, b"two") + END)
    running = await between(serve, [worker], "streams.keep_alive_s=0.05")

    async with connected(running.address) as client:
        await client.send(request(path))
        await client.until(b": keep-alive\n\n")
        worker.may_finish.set()
        received = await client.until(END)

    assert body_of(received).replace(b": keep-alive\n\n", b"") == whole + TOKENS[path].replace(
        b"NAME", b"two"
    )


async def test_keep_alives_come_before_the_first_token_too_and_can_be_off(serve, two_workers):
    worker, path = two_workers[0], "/v1/chat/completions"
    held(worker, HEAD, token(path, b"one") + END)
    running = await between(serve, [worker], EARLY, "streams.keep_alive_s=0.1")
    silent = await between(serve, [worker], EARLY, "streams.keep_alive_s=0")

    async with connected(running.address) as client, connected(silent.address) as other:
        for each in (client, other):
            await each.send(request(path))
        await client.until(chunk(b": keep-alive\n\n"))
        await other.until(b"\r\n\r\n")
        worker.may_finish.set()
        await client.until(END)
        received = await other.until(END)

    assert b"keep-alive" not in received


def slow_client(address: tuple[str, int], buffer_bytes: int = 4096) -> socket.socket:
    """A connection whose client accepts little before it reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.connect(address)
    return client


ENDLESS = HEAD + chunk(b"data: {%b}\n\n" % (b"x" * 40_000)) * 400
"""16 MB: more than the sockets in between hold."""


@pytest.mark.parametrize("fast_lane", LANES)
async def test_a_client_that_does_not_read_gives_up_its_workers_slot(serve, two_workers, fast_lane):
    worker, path = two_workers[0], "/v1/chat/completions"
    held(worker, ENDLESS, END)
    running = await between(
        serve, [worker], "server.client_write_timeout_s=1", f"server.fast_lane={fast_lane}"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(slow_client(running.address)).sendall(request(path))

        async def are_gone() -> bool:
            return (
                await metric(running.url, "kvroute_client_timeouts_total", 'wait="write"') == 3
                and await metric(running.url, "kvroute_requests_in_flight") == 0
            )

        await until(are_gone, within_s=60, every_s=0.1)

    assert "server.client_write_timeout_s" in await running.logged("accepted no byte")


async def test_a_client_that_reads_slowly_gets_all_of_a_long_answer(serve, two_workers):
    worker, path = two_workers[0], "/v1/chat/completions"
    held(worker, ENDLESS, END)
    worker.may_finish.set()
    running = await between(serve, [worker], "server.client_write_timeout_s=0.4")
    loop, size = asyncio.get_running_loop(), 0
    with slow_client(running.address, 65_536) as client:
        client.setblocking(False)
        await loop.sock_sendall(client, request(path))
        tail, began = b"", time.monotonic()
        while not tail.endswith(END):
            is_slow = time.monotonic() - began < 4 * WAIT_S  # in all far longer than the limit
            data = await loop.sock_recv(client, 10_000 if is_slow else 1 << 20)
            assert data
            size, tail = size + len(data), (tail + data)[-8:]
            if is_slow:
                await asyncio.sleep(0.02)

    assert size > 400 * 40_000


@pytest.mark.parametrize("fast_lane", LANES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by", ["worker", "shutdown"])
async def test_a_stream_that_is_cut_inside_an_event_ends_with_a_whole_error_event_and_no_half_one(
    serve, two_workers, path, fast_lane, by
):
    worker, whole = two_workers[0], chunk(TOKENS[path].replace(b"NAME", b"w"))
    worker.answer = HEAD + preamble(path, b"w") + whole + whole + chunk(TOKENS[path][:24])
    worker.closes_after_answer = by == "worker"
    worker.rest = b"" if by == "worker" else END
    running = await between(
        serve, [worker], f"server.fast_lane={fast_lane}", "server.drain_timeout_s=0.1", "retries.refuse_s=0"
    )

    async with connected(running.address) as client:
        await client.send(request(path))
        await client.until(b"tok-w")
        if by == "shutdown":
            await running.stop(within_s=60)
        received = await client.until(END)

    events = [event for event in body_of(received).split(b"\n\n") if event]
    for event in events:
        for line in event.splitlines():
            assert line.startswith((b"data: ", b"event: ", b": ")), line
            if line.startswith(b"data: "):
                json.loads(line[6:])
    assert b"error" in events[-1]
    assert received.count(b"tok-w") == 2


@pytest.mark.parametrize("fast_lane", LANES)
async def test_events_that_come_in_parts_arrive_whole_and_unchanged(serve, two_workers, fast_lane):
    worker, path = two_workers[0], "/v1/chat/completions"
    sent = TOKENS[path] * 3 + b"data: [DONE]\n"
    worker.answer = HEAD + b"".join(chunk(sent[at : at + 7]) for at in range(0, 70, 7)) + chunk(sent[70:])
    worker.rest = END
    running = await between(serve, [worker], f"server.fast_lane={fast_lane}")

    async with connected(running.address) as client:
        await client.send(request(path))
        await client.until(b"200 OK")
        worker.may_finish.set()
        received = await client.until(END)

    assert body_of(received) == sent


async def test_a_large_event_that_is_cut_ends_the_connection(serve, two_workers):
    worker, path = two_workers[0], "/v1/chat/completions"
    large = TOKENS[path][:-4] + b"x" * 200_000
    worker.answer, worker.closes_after_answer = HEAD + chunk(TOKENS[path]) + chunk(large), True
    running = await between(serve, [worker], "retries.refuse_s=0")

    async with connected(running.address) as client:
        await client.send(request(path))
        received = await client.read_all()

    assert received.count(b"x") >= 200_000
    assert not received.endswith(END)
    assert b"error" not in received
