"""SageMaker's `/invocations`: the model and the session are those of its headers, as vLLM reads them."""

from __future__ import annotations

import asyncio
import hashlib
import json

import httpx
import pytest
import yaml
from tests.support.sagemaker import ADAPTER, SESSION, sagemaker_worker

LANES = pytest.mark.parametrize("lane", ["on", "off"])
PROMPT = "A prompt that the base model and its adapters share. " * 30
BODY = {"prompt": PROMPT, "max_tokens": 1}
NEW, CLOSE = {"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}
KEYS = {name: f"kvr-test-{name}-0123456789abcdef" for name in ("base", "lora", "both")}
PERMITTED = {"base": ["tiny"], "lora": ["ada"], "both": ["tiny", "ada"]}


@pytest.fixture
def start(serve, processes):
    """`await start(count, ...)` runs workers with an adapter and a gateway before them: (client, workers)."""

    async def run(count: int, *arguments: str, bases: tuple[str, ...] = ()):
        workers = [
            await processes.enter_async_context(
                sagemaker_worker(
                    f"w{number}", bases[number] if bases else "tiny", ("ada",) if not bases else ()
                )
            )
            for number in range(count)
        ]
        urls = [part for worker in workers for part in ("--worker", worker.url)]
        running = await serve(*urls, "--set", "admin.api_key=admin-key-0123456789", *arguments)
        client = httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False)
        return await processes.enter_async_context(client), workers

    return run


@pytest.fixture
def keyed(start, tmp_path):
    async def run(count: int, *arguments: str):
        entries = [
            {
                "name": name,
                "hash": "sha256:" + hashlib.sha256(key.encode()).hexdigest(),
                "models": PERMITTED[name],
            }
            for name, key in KEYS.items()
        ]
        path = tmp_path / "keys.yaml"
        path.write_text(yaml.safe_dump({"keys": entries}))
        return await start(count, "--set", f"server.client_keys.file={path}", *arguments)

    return run


def as_key(name: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}", **headers}


@LANES
@pytest.mark.parametrize("more", [{}, {"model": "tiny"}])
async def test_a_key_must_permit_the_headers_adapter(keyed, lane, more):
    client, (worker,) = await keyed(1, "--set", f"server.fast_lane={lane}")

    async def status(key: str, **headers: str) -> int:
        answer = await client.post("/invocations", json={**BODY, **more}, headers=as_key(key, **headers))
        return answer.status_code

    assert await status("base", **{ADAPTER: "ada"}) == 403
    assert worker.computed == []
    assert await status("lora", **{ADAPTER: "ada"}) == 200
    assert await status("lora", **{ADAPTER: "tiny"}) == 403
    assert await status("base") == 200
    assert [one.model for one in worker.computed] == ["ada", "tiny"]
    assert await status("both", **{ADAPTER: "unknown"}) == 404


async def test_of_several_headers_the_first_one_counts(start):
    client, (worker,) = await start(1)

    headers = [(ADAPTER, "ada"), (ADAPTER, "tiny"), ("X-Amzn-SageMaker-Adapter-Identifier", "tiny")]
    answer = await client.post("/invocations", json=BODY, headers=headers)

    assert answer.status_code == 200
    assert worker.computed[0].model == "ada"
    assert "cache_salt" in worker.computed[0].body
    assert [value for name, value in worker.computed[0].headers if name == ADAPTER] == ["ada"]


async def test_a_header_that_connection_names_is_computed_all_the_same(start):
    client, (worker,) = await start(1)

    await client.post("/invocations", json=BODY, headers={ADAPTER: "ada", "connection": ADAPTER})

    assert [one.model for one in worker.computed] == ["ada"]
    assert "cache_salt" in worker.computed[0].body


@LANES
async def test_the_headers_adapter_gets_its_key_space_and_its_own_predictions(start, lane):
    client, (worker,) = await start(1, "--set", f"server.fast_lane={lane}")

    async def invoke(**headers: str) -> httpx.Response:
        return await client.post("/invocations", json={"model": "tiny", **BODY}, headers=headers)

    first = await invoke()
    lora = await invoke(**{ADAPTER: "ada"})
    assert int(lora.headers["x-kvroute-hit-tokens"]) == 0
    again = [await invoke(), await invoke(**{ADAPTER: "ada"})]
    assert int(first.headers["x-kvroute-hit-tokens"]) == 0
    assert all(int(one.headers["x-kvroute-hit-tokens"]) > 100 for one in again)

    assert [one.model for one in worker.computed] == ["tiny", "ada", "tiny", "ada"]
    plain, adapted = worker.computed[0].body, worker.computed[1].body
    assert plain == {"model": "tiny", **BODY}
    await client.post("/v1/completions", json={"model": "ada", **BODY})
    chat_salt = worker.computed[-1].body
    assert adapted["cache_salt"] == chat_salt["cache_salt"]
    assert adapted["kv_transfer_params"] == chat_salt["kv_transfer_params"]

    text = (await client.get("/metrics", headers={"authorization": "Bearer admin-key-0123456789"})).text
    counted = [line for line in text.splitlines() if line.startswith("kvroute_requests_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counted if 'model="ada"' in line) == 3


async def test_without_the_header_the_base_model_is_computed_whatever_the_body_names(start):
    client, (worker,) = await start(1)
    await client.post("/invocations", json=BODY)

    answer = await client.post("/invocations", json={"model": "ada", **BODY})

    assert answer.status_code == 200
    assert worker.computed[-1].model == "tiny"
    assert worker.computed[-1].body == {"model": "tiny", **BODY}
    assert int(answer.headers["x-kvroute-hit-tokens"]) > 100


async def test_a_key_must_also_permit_an_adapter_that_the_body_names(keyed):
    client, (worker,) = await keyed(1)

    for key, status in (("base", 403), ("lora", 403), ("both", 200)):
        answer = await client.post("/invocations", json={"model": "ada", **BODY}, headers=as_key(key))
        assert answer.status_code == status, key

    assert [one.model for one in worker.computed] == ["tiny"]


async def test_an_alias_in_the_header_is_replaced(start):
    client, (worker,) = await start(1, "--set", "fleet.aliases={friendly: ada}")

    answer = await client.post("/invocations", json=BODY, headers={ADAPTER: "friendly"})

    assert answer.status_code == 200, answer.text
    assert worker.computed[0].model == "ada"
    assert worker.computed[0].body["model"] == "ada"


async def test_explain_resolves_the_header_too(keyed):
    client, _ = await keyed(1)

    async def explain(key: str, **headers: str) -> httpx.Response:
        return await client.post("/v1/route/explain", json=BODY, headers=as_key(key, **headers))

    assert (await explain("both", **{ADAPTER: "ada"})).json()["model"] == "ada"
    assert (await explain("base", **{ADAPTER: "ada"})).status_code == 403


@pytest.mark.parametrize("body", [b'{"prompt": "p", "x": NaN}', '{"prompt": "p"}'.encode("utf-16")])
async def test_a_body_that_cannot_be_changed_is_refused_for_the_headers_adapter(start, body):
    client, (worker,) = await start(1)

    json_type = {"content-type": "application/json"}
    answer = await client.post("/invocations", content=body, headers={ADAPTER: "ada", **json_type})

    assert answer.status_code == 400
    assert worker.computed == []


@LANES
async def test_the_header_chooses_among_models_and_other_paths_ignore_it(start, lane):
    client, (one, two) = await start(2, "--set", f"server.fast_lane={lane}", bases=("tiny", "other"))

    for _ in range(2):
        assert (await client.post("/invocations", json=BODY, headers={ADAPTER: "other"})).status_code == 200
    assert (len(one.computed), len(two.computed)) == (0, 2)

    body = {"model": "tiny", **BODY}
    await client.post("/v1/completions", json=body, headers={ADAPTER: "other"})
    assert [each.model for each in one.computed] == ["tiny"]


@LANES
@pytest.mark.parametrize("processes_arguments", [(), ("--processes", "2")], ids=["one", "two"])
async def test_a_session_stays_on_its_worker(start, lane, processes_arguments):
    client, workers = await start(
        3, "--strategy", "roundrobin", "--set", f"server.fast_lane={lane}", *processes_arguments
    )
    opened = []
    for _ in range(3):
        answer = await client.post("/invocations", json=NEW)
        assert answer.status_code == 200, answer.text
        opened.append(answer.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0])
    assert len({session[:2] for session in opened}) == 3

    for _ in range(4):
        for session in opened:
            headers = {SESSION: session, "connection": "close"}
            async with asyncio.timeout(30):  # the other process learns of a session a moment later
                while (await client.post("/invocations", json=BODY, headers=headers)).status_code != 200:
                    pass
    assert [len(worker.computed) for worker in workers] == [4, 4, 4]

    for session in opened:
        answer = await client.post("/invocations", json=CLOSE, headers={SESSION: session})
        assert answer.headers["x-amzn-sagemaker-closed-session-id"] == session
        assert (await client.post("/invocations", json=BODY, headers={SESSION: session})).status_code == 400
    assert not any(worker.sessions for worker in workers)


async def test_a_session_among_several_models_needs_no_name(start):
    client, (_, two) = await start(2, bases=("tiny", "other"))

    answer = await client.post("/invocations", json=NEW, headers={ADAPTER: "other"})
    session = answer.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]

    for body in (BODY, CLOSE):
        assert (await client.post("/invocations", json=body, headers={SESSION: session})).status_code == 200
    assert [one.model for one in two.computed] == ["other"]


async def test_a_tenant_cannot_use_another_ones_session(keyed):
    client, (worker,) = await keyed(
        1, "--set", "server.isolation=per-key", "--set", "server.isolation_checks_release=false"
    )
    answer = await client.post("/invocations", json=NEW, headers=as_key("both"))
    session = answer.headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]

    for key, status in (("base", 404), ("both", 200)):
        answer = await client.post("/invocations", json=BODY, headers=as_key(key, **{SESSION: session}))
        assert answer.status_code == status, answer.text
    assert len(worker.computed) == 1
    assert json.dumps(worker.computed[0].body["cache_salt"])
