"""What a client can tell an engine about KV of others: where it lies, and whether it is shared."""

from __future__ import annotations

import hashlib
import json

import httpx
import pytest
import yaml
from tests.support.engines import MODEL, fake_engine
from tests.support.workers import scripted_worker

LANES = pytest.mark.parametrize("lane", ["on", "off"])
KEY = "kvr-test-tenant-0123456789abcdef"
REMOTE = {
    "do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80, "remote_block_ids": [[1]]
}  # fmt: skip
ADDRESS = "___prefill_addr_169.254.169.254:80___decode_addr_10.0.0.1:80_0123456789abcdef0123456789abcdef"
BODIES = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
    "/v1/responses": {"input": "p"},
    "/v1/messages": {"messages": [{"role": "user", "content": "p"}], "max_tokens": 1},
    "/invocations": {"prompt": "p"},
}
DIRECTING = {
    "kv": {"kv_transfer_params": REMOTE},
    "xargs": {"vllm_xargs": {"kv_transfer_params": REMOTE}},
    "encoder": {"ec_transfer_params": {"hash": {"peer_host": "169.254.169.254"}}},
    "xargs-encoder": {"vllm_xargs": {"ec_transfer_params": {"hash": {"peer_host": "169.254.169.254"}}}},
    "request-id": {"request_id": ADDRESS},
    "mixed": {"kv_transfer_params": {"lmcache.tag.a": "1", "remote_host": "169.254.169.254"}},
}


async def post(gateway, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(
            gateway.url + path, content=content, headers={"content-type": "application/json", **headers}
        )


@pytest.fixture
async def worker(processes):
    return await processes.enter_async_context(scripted_worker())


@pytest.fixture
def tenants(tmp_path):
    """The options of a gateway with one tenant."""
    path = tmp_path / "keys.yaml"
    hashed = "sha256:" + hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(yaml.safe_dump({"keys": [{"name": "tenant", "hash": hashed}]}))
    return ["--set", f"server.client_keys.file={path}"]


@LANES
async def test_no_client_names_the_host_that_an_engine_reads_kv_from(serve, worker, lane):
    gateway = await serve("--worker", worker.url, "--set", f"server.fast_lane={lane}")
    for path, body in BODIES.items():
        for name, members in DIRECTING.items():
            answer = await post(gateway, path, {**body, **members})
            assert answer.status_code == 400, (path, name)
            assert answer.json()["error"]["message"]
    assert worker.requests == []
    for members in (
        {"kv_transfer_params": {"lmcache.tag.a": "1"}},
        {"vllm_xargs": {"a": 1}},
        {"request_id": "r-1"},
    ):
        body = json.dumps({**BODIES["/v1/completions"], **members}).encode()
        assert (await post(gateway, "/v1/completions", body)).status_code == 200
        assert worker.bodies[-1] == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "p", "kv\\u005ftransfer_params": {"remote_host": "h"}}',
        b'{"prompt": "p", "x": NaN, "kv_transfer_params": {"remote_host": "h"}}',
        b'{"prompt": "p", "x": NaN, "vllm_xargs": {"kv_transfer_params": {"remote_host": "h"}}}',
        b'{"prompt": [' + b"[1]," * 5000 + b'[1]], "kv_transfer_params": {"remote_host": "h"}}',
        b'{"prompt": [' + b"[1]," * 5000 + b'[1]], "\\u0076llm_xargs": {"kv_transfer_params": {}}}',
        b'{"prompt": "' + b"x" * 2_000_000 + b'", "kv_transfer_params": {"remote_host": "h"}}',
        b'{"prompt": "'
        + b"x" * 2_000_000
        + b'", "vllm_xargs": {"kv_transfer_params": {"remote_host": "h"}}}',
    ],
    ids=["escaped", "nan", "nan-xargs", "over-a-limit", "over-a-limit-escaped", "large", "large-xargs"],
)
async def test_no_form_of_a_body_hides_it(serve, worker, body):
    gateway = await serve("--worker", worker.url)

    answer = await post(gateway, "/v1/completions", body)

    assert answer.status_code in (400, 413), answer.text[:300]
    assert worker.requests == []


async def test_an_option_trusts_clients(serve, worker):
    gateway = await serve("--worker", worker.url, "--set", "server.trust_clients=true")
    body = json.dumps({"prompt": "p", "kv_transfer_params": REMOTE}).encode()

    assert (await post(gateway, "/v1/completions", body)).status_code == 200

    assert worker.bodies == [body]


@LANES
async def test_an_address_is_no_request_id(serve, worker, lane):
    gateway = await serve("--worker", worker.url, "--set", f"server.fast_lane={lane}")

    for sent in (ADDRESS, "mine"):
        answer = await post(gateway, "/v1/completions", {"prompt": "p"}, **{"x-request-id": sent})
        assert answer.status_code == 200

    assert b"_addr_" not in worker.requests[0]
    assert b"x-request-id: mine" in worker.requests[1].lower()


@LANES
async def test_a_client_with_a_key_does_not_choose_its_rank(serve, processes, tenants, lane):
    engine = await processes.enter_async_context(fake_engine(ranks=2))
    body = {"model": MODEL, "prompt": "The same prompt on one rank. " * 100, "max_tokens": 1}
    key = {"authorization": f"Bearer {KEY}"}
    for options, expected in (([], False), (["--set", "server.trust_clients=true"], True)):
        gateway = await serve("--worker", engine.url, "--set", f"server.fast_lane={lane}", *tenants, *options)
        engine.received.clear()
        answers = [
            await post(gateway, "/v1/completions", body, **key, **{"X-Data-Parallel-Rank": rank})
            for rank in ("1", "0", "1", "0")
        ]
        given = [one.given_rank for one in engine.received]
        assert (given == ["1", "0", "1", "0"]) is expected
        if not expected:
            assert len(set(given)) == 1  # the rank that holds the prompt
            assert given[0] in ("0", "1")
            assert int(answers[1].headers["x-kvroute-hit-tokens"]) > 500


async def test_an_empty_object_stays_json(serve, worker, tenants):
    gateway = await serve(
        "--worker", worker.url, *tenants, "--set", "server.isolation=per-key",
        "--set", "server.isolation_checks_release=false",
    )  # fmt: skip
    for path in BODIES:
        for body in (b"{}", b" { \n } "):
            assert (await post(gateway, path, body, authorization=f"Bearer {KEY}")).status_code == 200
            assert "cache_salt" in json.loads(worker.bodies[-1])


async def test_workers_that_ignore_the_salt_of_an_endpoint_do_not_get_its_requests(serve, processes, tenants):
    old, new = [await processes.enter_async_context(scripted_worker()) for _ in range(2)]
    old.version, new.version = "0.19.1", "0.32.0"
    arguments = ["--strategy", "roundrobin", *tenants, "--set", "server.isolation=per-key"]
    bodies = {
        "/v1/messages": BODIES["/v1/messages"],
        "/v1/embeddings": {"input": "p"},
        "/invocations": {"input": "p"},
    }
    key = {"authorization": f"Bearer {KEY}"}
    both = await serve("--worker", old.url, "--worker", new.url, *arguments)
    alone = await serve("--worker", old.url, *arguments)
    for path, body in bodies.items():
        for _ in range(3):
            assert (await post(both, path, body, **key)).status_code == 200, path
        refused = await post(alone, path, body, **key)
        assert refused.status_code == 400
        assert "0.19.1" in refused.text
        assert path in refused.text
    assert old.requests == []
    assert len(new.requests) == 9

    for _ in range(6):
        assert (await post(both, "/v1/completions", {"prompt": "p"}, **key)).status_code == 200
    assert old.requests
