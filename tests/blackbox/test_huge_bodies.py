"""A request with a huge structure takes no more from others than its bytes: neither time nor memory.

The bodies are those of `bench/edge_bodies.py`. Bounds are wide: what a body takes of the gateway's CPU time
is asserted at several times of what it should be, and a tenth of what a naive reader takes. `bench/edge.py`
measures the exact figures.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from edge_bodies import BODIES, Shot

MODEL = "sim-model"
ALIAS = "other-name"
JSON = {"content-type": "application/json"}
pytestmark = pytest.mark.timeout(300)

ATTACKS = {
    # Name: the most CPU seconds. On 1fd48c2: 22, 3.3, 9.3, 1.2 and more.
    "prompts_20mb": 2.0,
    "messages_12mb": 1.0,
    "form_parts_52mb": 1.5,
    "content_in_messages_16mb": 1.0,
    "text_prompts_64mb": 2.0,
    "fields_16mb": 1.0,
    "repeated_64mb": 2.0,
    "nan_60mb": 2.0,
    "form_almost_64mb": 2.0,
    "blank_run_60mb": 2.0,
}
LEGITIMATE = ("token_ids_1m", "image_20mb", "chat_4000", "text_16mb")


async def post(url: str, shot: Shot) -> httpx.Response:
    async with httpx.AsyncClient(timeout=120) as client:
        return await client.post(url + shot.path, content=shot.body, headers=dict(shot.headers))


async def metric(url: str, start: str) -> float:
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(url + "/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(start))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_huge_structure_takes_little_time_and_memory(serve, sim, name):
    # Workers do not know an alias, so the gateway must read the body.
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"), "--set", f"fleet.aliases.{ALIAS}={MODEL}"
    )
    shot = BODIES[name](ALIAS)
    forget_peak(gateway.pid)
    cpu, idle_mb = gateway.cpu_s, gateway.rss_mb

    async def status_of() -> int:
        try:
            return (await post(gateway.url, shot)).status_code
        except httpx.ReadTimeout:  # perhaps the worker's fault; what the gateway took is asserted below
            return 0

    sent = asyncio.create_task(status_of())
    answered = 0
    async with httpx.AsyncClient(timeout=120) as client:
        while not sent.done():  # others are answered meanwhile
            answered += (await client.get(gateway.url + "/health")).status_code == 200
            await asyncio.sleep(0)
    status = await sent

    assert gateway.cpu_s - cpu - 0.002 * answered < ATTACKS[name]
    assert gateway.peak_rss_mb - idle_mb <= 4 * len(shot.body) / 1e6 + 8
    assert 0 < status < 500
    assert answered


async def test_above_a_limit_a_body_is_refused_where_its_content_matters(serve, sim):
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"), "--set", f"fleet.aliases.{ALIAS}={MODEL}"
    )

    answer = await post(gateway.url, BODIES["prompts_20mb"](ALIAS))

    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["code"] == "body_over_limit"
    assert "server.max_" in error["message"]
    few = Shot("/v1/completions", JSON, json.dumps({"model": ALIAS, "prompt": [[1]] * 5000}).encode())
    error = (await post(gateway.url, few)).json()["error"]
    assert "server.max_prompts" in error["message"]
    assert error["param"] == "prompt"
    assert (
        await metric(gateway.url, 'kvroute_bodies_over_limit_total{limit="max_prompts",outcome="refused"}')
        == 1
    )
    await gateway.logged("over the limit max_prompts and refused")


async def test_above_a_limit_a_body_travels_unread_where_nothing_depends_on_it(serve, sim):
    gateway = await serve("--worker", await sim("--time-scale", "0"))
    shot = Shot("/v1/completions", JSON, json.dumps(
        {"model": MODEL, "prompt": [[1]] * 5000, "max_tokens": 1}
    ).encode())  # fmt: skip

    answer = await post(gateway.url, shot)

    assert answer.status_code == 200, answer.text[:300]
    name = 'kvroute_bodies_over_limit_total{limit="max_prompts",outcome="forwarded"}'
    assert await metric(gateway.url, name) == 1
    await gateway.logged("forwarded unread")


REPEATED = [name for name in BODIES if name.startswith("repeated_")]


@pytest.mark.parametrize("name", REPEATED)
async def test_a_body_of_too_many_members_is_decoded_nowhere(serve, sim, name):
    """To decode them, or even to skip them, would hold all other requests in one piece."""
    worker = await sim("--time-scale", "0", "--max-model-len", "100000000")
    gateway = await serve("--worker", worker)
    answer = await post(gateway.url, BODIES[name](MODEL))
    by_name = await serve("--worker", worker, "--set", f"fleet.aliases.{ALIAS}={MODEL}")
    refused = await post(by_name.url, BODIES[name](MODEL))

    assert answer.status_code < 413, answer.text[:300]
    counted = 'kvroute_bodies_over_limit_total{limit="max_json_members",outcome="%s"}'
    assert await metric(gateway.url, counted % "forwarded") == 1
    assert refused.status_code == 413
    assert "server.max_json_members" in refused.json()["error"]["message"]
    assert await metric(by_name.url, counted % "refused") == 1


async def test_large_parameters_of_transfers_are_refused_before_they_are_decoded(serve, sim):
    gateway = await serve("--worker", await sim("--time-scale", "0"))
    params = b'{"lmcache.tag.a":[%b]}' % b",".join([b"1"] * 1_500_000)
    body = b'{"model":"%b","prompt":"hi","max_tokens":1,"kv_transfer_params":%b}' % (MODEL.encode(), params)

    answer = await post(gateway.url, Shot("/v1/completions", JSON, body))

    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"] == "kv_transfer_params"


def embeddings(model: str, inputs: int = 4_097) -> Shot:
    texts = [f"text {number}" for number in range(inputs)]
    return Shot("/v1/embeddings", JSON, json.dumps({"input": texts, "model": model}).encode())


async def test_of_several_models_a_batch_above_a_limit_goes_to_its_own_by_name_alone(serve, sim):
    one, two = await sim("--time-scale", "0"), await sim("--time-scale", "0", "--model", "second")
    gateway = await serve("--worker", one, "--worker", two)

    for model in (MODEL, "second"):
        answer = await post(gateway.url, embeddings(model))
        assert answer.status_code == 200, answer.text[:300]
        assert (answer.json()["model"], len(answer.json()["data"])) == (model, 4_097)
    missing = await post(gateway.url, embeddings("third"))
    unnamed = await post(gateway.url, Shot("/v1/embeddings", JSON, b'{"input": [%b"x"]}' % (b'"x",' * 5_000)))

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert unnamed.status_code == 400
    await gateway.logged("forwarded by the name of its model")


async def test_a_batch_above_a_limit_is_refused_to_a_key_with_a_limit_of_prompt_tokens(serve, sim, tmp_path):
    def entry(name: str, **limits: int) -> dict[str, object]:
        hashed = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
        return {"name": name, "hash": [hashed], **({"limits": limits} if limits else {})}

    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [entry("limited", prompt_tokens=1_000_000), entry("free")]}))
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"),
        "--worker", await sim("--time-scale", "0", "--model", "second"),
        "--set", f"server.client_keys.file={file}",
    )  # fmt: skip

    async def sent(key: str, inputs: int) -> httpx.Response:
        shot = embeddings(MODEL, inputs)
        headers = {**shot.headers, "authorization": f"Bearer {key}"}
        return await post(gateway.url, Shot(shot.path, headers, shot.body))

    assert (await sent("free", 4_097)).status_code == 200
    assert (await sent("limited", 4_096)).status_code == 200
    refused = await sent("limited", 4_097)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_over_limit")


async def test_a_session_id_in_bodies_is_no_reason_to_refuse_a_body_above_a_limit(serve, sim):
    gateway = await serve("--worker", await sim("--time-scale", "0"), "--strategy", "session")
    chat = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi."}] * 16_385}

    answer = await post(gateway.url, Shot("/v1/chat/completions", JSON, json.dumps(chat).encode()))

    assert answer.status_code == 200, answer.text[:300]


@pytest.mark.parametrize("name", LEGITIMATE)
async def test_large_requests_stay_routed_by_their_content(serve, sim, name):
    """Of two workers the one that has a prompt gets it again, and again."""
    gateway = await serve(
        "--worker", await sim("--time-scale", "0", "--max-model-len", "20000000"),
        "--worker", await sim("--time-scale", "0", "--max-model-len", "20000000"),
        "--set", f"fleet.aliases.{ALIAS}={MODEL}",
    )  # fmt: skip
    shot = BODIES[name](MODEL)
    async with httpx.AsyncClient(timeout=120) as client:
        first = await client.post(gateway.url + shot.path, content=shot.body, headers=dict(shot.headers))
        explained = await client.post(
            gateway.url + "/v1/route/explain", content=shot.body, headers=dict(shot.headers)
        )

    assert first.status_code < 413, first.text[:200]
    assert explained.status_code == 200, explained.text[:200]
    held = [candidate["matched_tokens"] for candidate in explained.json()["ranking"]]
    assert max(held) > min(held) == 0
    assert await metric(gateway.url, "kvroute_bodies_over_limit_total") == 0


@pytest.mark.parametrize("size", [10, 2_000_000])
async def test_of_equal_fields_the_last_wins_as_in_vllm(serve, sim, size):
    """Python's json, with which vLLM reads bodies, keeps the last; so does the gateway, in small bodies and
    large ones."""
    gateway = await serve(
        "--worker", await sim("--time-scale", "0"), "--set", f"fleet.aliases.{ALIAS}={MODEL}"
    )
    fields = b'"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"user":"%b"' % (b"a" * size)
    path = "/v1/chat/completions"

    async def ask(models: bytes) -> httpx.Response:
        return await post(gateway.url, Shot(path, JSON, b"{%b,%b}" % (models, fields)))

    assert (await ask(b'"model":"%b","model":"nobody"' % MODEL.encode())).status_code == 404
    assert (await ask(b'"model":"nobody","model":"%b"' % MODEL.encode())).status_code == 200
    # The alias that counts is replaced, and the worker reads the same one.
    answer = await ask(b'"model":"nobody","model":"%b"' % ALIAS.encode())
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["model"] == MODEL
