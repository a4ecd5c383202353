"""What clients and log readers of production-stack's router find here."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from tests.support.sockets import tcp_server

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

COMPLETION = {"model": "sim-model", "prompt": "Hello!", "max_tokens": 4}

# As that router's end-to-end test reads it.
line = re.compile(
    r"Routing request ([^ ]*) with session id ([^ ]*) to ([^ ]*) at (\d+\.\d+), process time = (\d+\.\d{4})$"
).match


@pytest.fixture
async def worker():
    async with run_sim(SimOptions(time_scale=0)) as running:
        yield running


def routed(caplog) -> list[re.Match[str]]:
    found = [line(record.getMessage()) for record in caplog.records if record.name == "kvroute.routing"]
    assert all(found)
    return found


async def test_each_decision_is_logged_before_its_request_is_sent(run_gateway, worker, caplog):
    caplog.set_level(logging.INFO, "kvroute.routing")
    routing = {"strategy": "session", "session": {"keys": ["header:x-user-id", "body:x-user-id"]}}
    async with run_gateway([worker.url], routing=routing, logging={"routing_lines": True}) as gateway:
        before = gateway.runtime._clock.wall()
        with_session = {"x-request-id": "r1", "x-user-id": "a user"}
        await gateway.client.post("/v1/completions", json=COMPLETION, headers=with_session)
        await gateway.client.post("/v1/completions", json={**COMPLETION, "x-user-id": "bob\u00e9\n"})
        await gateway.client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": "r3"})
        after = gateway.runtime._clock.wall()

    first, second, third = routed(caplog)
    assert (first[1], first[2], first[3]) == ("r1", "a%20user", worker.url)
    assert second[2] == "bob%C3%A9%0A"
    assert (third[1], third[2]) == ("r3", "None")
    assert before <= float(first[4]) <= float(third[4]) <= after


async def test_a_session_key_that_may_be_a_credential_is_hashed(run_gateway, worker, caplog):
    caplog.set_level(logging.INFO, "kvroute.routing")
    routing = {"strategy": "session", "session": {"keys": ["header:Authorization"]}}
    async with run_gateway([worker.url], routing=routing, logging={"routing_lines": True}) as gateway:
        for token in ("secret-one", "secret-one", "secret-two"):
            headers = {"authorization": f"Bearer {token}"}
            await gateway.client.post("/v1/completions", json=COMPLETION, headers=headers)

    sessions = [match[2] for match in routed(caplog)]
    assert sessions[0] == sessions[1] != sessions[2]
    assert "secret" not in caplog.text


async def test_a_request_that_reaches_no_worker_has_no_line(run_gateway, worker, caplog):
    caplog.set_level(logging.INFO, "kvroute.routing")
    async with run_gateway([worker.url], logging={"routing_lines": True}) as gateway:
        await gateway.client.post("/v1/completions", json={**COMPLETION, "model": "unknown"})

    assert routed(caplog) == []


async def test_without_the_option_no_decision_is_logged(run_gateway, worker, caplog):
    caplog.set_level(logging.INFO)
    async with run_gateway([worker.url]) as gateway:
        await gateway.client.post("/v1/completions", json=COMPLETION)

    assert "Routing request" not in caplog.text


async def test_both_kinds_of_lines_may_be_on(run_gateway, worker, caplog):
    caplog.set_level(logging.INFO)
    both = {"routing_lines": True, "hyperpod_lines": True}
    async with run_gateway([worker.url], routing={"strategy": "kvaware"}, logging=both) as gateway:
        await gateway.client.post("/v1/completions", json=COMPLETION)

    assert len(routed(caplog)) == 1
    assert "Matched instance url None" in caplog.text


async def test_a_root_path_is_served_with_and_without_the_prefix(run_gateway, worker):
    async with run_gateway([worker.url], server={"root_path": "/vllm"}) as gateway:
        client = gateway.client
        plain = await client.post("/v1/completions", json=COMPLETION)
        prefixed = await client.post("/vllm/v1/completions?x=1", json=COMPLETION)
        models = await client.get("/vllm/v1/models/sim-model")
        others = [await client.get(path) for path in ("/vllm", "/vllmx/health", "/vllm/vllm/health")]
        misleading = await client.get("/vllm/%2e%2e/admin/workers")
        no_key = await client.get("/vllm/admin/workers", headers={"authorization": ""})
        targets = [received.target for received in worker.worker.received if received.method == "POST"]

    assert plain.status_code == prefixed.status_code == models.status_code == 200
    assert prefixed.json()["choices"] == plain.json()["choices"]
    assert [answer.status_code for answer in others] == [404, 404, 404]
    assert misleading.status_code == 400
    assert no_key.status_code == 401
    assert targets == ["/v1/completions", "/v1/completions?x=1"]


class PathServer:
    """Two workers at one address, below `/models/a` and `/models/b`, each with a model of its own."""

    def __init__(self) -> None:
        self.posts: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, target, _ = head.split(" ", 2)
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            worker, path = target[: len("/models/a")], target[len("/models/a") :]
            body, status = b"{}", 200
            if method == "POST":
                self.posts.append(target)
            elif path == "/v1/models":
                body = json.dumps({"data": [{"id": worker[-1], "object": "model"}]}).encode()
            elif path != "/health":
                status = 404
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(body), body)
            )
            await writer.drain()


async def test_workers_may_be_below_paths_of_one_address(run_gateway):
    server = PathServer()
    async with tcp_server(server.serve) as port:
        urls = [{"url": f"http://127.0.0.1:{port}/models/{name}/"} for name in "ab"]
        async with run_gateway(urls) as gateway:
            answers = [
                await gateway.client.post("/v1/completions", json={**COMPLETION, "model": name})
                for name in "bab"
            ]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert server.posts == [f"/models/{name}/v1/completions" for name in "bab"]
    assert answers[0].headers["x-kvroute-worker"] == f"127.0.0.1:{port}.models.b"


async def test_engines_lists_routable_workers_with_their_models(run_gateway, worker):
    async with run_gateway([worker.url]) as gateway:
        engines = (await gateway.client.get("/engines")).json()

    assert [(each["engine_id"], each["serving_models"]) for each in engines] == [("w0", ["sim-model"])]
    assert engines[0]["created"] > 1_600_000_000


async def test_engines_needs_a_key_where_the_models_do(run_gateway, worker, tmp_path):
    async with run_gateway([worker.url], server={"api_keys": ["key"]}) as gateway:
        refused = await gateway.client.get("/engines")
        allowed = await gateway.client.get("/engines", headers={"authorization": "Bearer key"})

    assert (refused.status_code, allowed.status_code) == (401, 200)


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/v1/files", "no files and no batches"),
        ("POST", "/v1/files", "no files and no batches"),
        ("GET", "/v1/files/file-1/content", "no files and no batches"),
        ("POST", "/v1/batches", "no files and no batches"),
        ("DELETE", "/v1/batches/b1", "no files and no batches"),
        ("POST", "/v1/uploads", "no files and no batches"),
        ("POST", "/sleep", "for a single worker"),
        ("GET", "/is_sleeping", "for a single worker"),
        ("GET", "/v1", "There is no GET /v1 here."),
        ("GET", "/v1/filesystem", "There is no GET /v1/filesystem here."),
    ],
)
async def test_apis_that_are_not_offered_are_refused_in_words(run_gateway, worker, method, path, words):
    async with run_gateway([worker.url]) as gateway:
        answer = await gateway.client.request(method, path)

    error = json.loads(answer.content)["error"]
    assert answer.status_code == 404
    assert words in error["message"]
    assert path in error["message"]
    assert (error["code"] == "unsupported_api") == ("There is no" not in words)
