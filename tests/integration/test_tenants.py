"""Tenants end to end: equal prompts of two tenants share no KV, no session and no stored response."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.config.config import Config
from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

MODEL, ADAPTER = "sim-model", "ada"
PROMPT = list(range(10, 650))
CACHED = len(PROMPT) - 16
TEXT = "one two three " * 300
CHAT = [{"role": "user", "content": TEXT}]
KVAWARE: dict[str, Any] = {
    "routing": {"strategy": "kvaware"},
    "tokens": {"timeout_ms": 10_000, "computed_samples": False},
}
TENANTS = {"a": {}, "b": {}, "c": {"tenant": "pair"}, "d": {"tenant": "pair"}}
"""Names of keys: `a` and `b` are tenants, `c` and `d` are one together. Each key is its name and `-key`."""
NAMES = (*TENANTS, "plain")


@pytest.fixture
async def sims() -> AsyncIterator[list[RunningSim]]:
    options = SimOptions(time_scale=0, loras={ADAPTER: MODEL})
    async with run_sim(options) as one, run_sim(options) as other:
        yield [one, other]


@pytest.fixture
def sections(tmp_path) -> dict[str, Any]:
    entries = [
        {"name": name, "hash": "sha256:" + hashlib.sha256(f"{name}-key".encode()).hexdigest(), **fields}
        for name, fields in TENANTS.items()
    ]
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": entries}))
    server = {"isolation": "per-key", "client_keys": {"file": str(file)}, "api_keys": ["plain-key"]}
    return {"server": server}


async def post(running: Any, name: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {name}-key"}
    if path == "/invocations":  # there vLLM ignores the body's model
        headers["x-amzn-sagemaker-adapter-identifier"] = body.get("model", MODEL)
    answer: httpx.Response = await running.client.post(
        path, json={"model": MODEL, "max_tokens": 1, **body}, headers=headers
    )
    return answer


async def ask(running: Any, name: str, **body: Any) -> tuple[int, int]:
    """Cached tokens of the answer, and the gateway's prediction."""
    answer = await post(running, name, **body)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(cached), int(answer.headers["x-kvroute-hit-tokens"])


async def received(sim: RunningSim) -> list[dict[str, Any]]:
    """The bodies that the worker got since the last call, oldest first."""
    async with httpx.AsyncClient(base_url=sim.url, trust_env=False) as client:
        requests = (await client.get("/sim/requests")).json()["requests"]
        await client.delete("/sim/requests")
    return [json.loads(base64.b64decode(each["body"])) for each in requests if each["method"] == "POST"]


@pytest.mark.parametrize("routing", [KVAWARE, {"routing": {"strategy": "prefixaware"}}])
async def test_equal_prompts_of_tenants_hit_only_their_own_blocks_as_predicted(
    run_gateway, sims, sections, routing
) -> None:
    async with run_gateway([sims[0].url], **sections, **routing) as running:
        following = running.runtime.cache_tracker
        if following is not None:
            await running.until(lambda: not following.notes())
        spaces = [(name, more) for more in ({}, {"cache_salt": "t"}) for name in ("a", "b", "c", "plain")]
        for name, more in spaces:
            assert await ask(running, name, prompt=PROMPT, **more) == (0, 0)
        if following is not None:
            blocks = len(spaces) * len(PROMPT) // 16
            await running.until(lambda: following.describe()["held_blocks"] >= blocks)

        for name, more in [*spaces, ("d", {})]:
            cached, predicted = await ask(running, name, prompt=PROMPT, **more)

            assert cached == CACHED
            assert predicted == cached if following is not None else predicted > 0
        assert running.metric("kvroute_isolated_requests_total") == 2 * len(spaces) + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT, "n": 2, "stream": True}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT[:100]]}),
        ("/v1/chat/completions", {"messages": CHAT * 4, "stream": True}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/messages", {"messages": CHAT}),
        ("/invocations", {"prompt": TEXT}),
        ("/v1/embeddings", {"input": TEXT}),
    ],
)
async def test_every_form_of_a_request_gets_its_tenants_key_space(
    run_gateway, sims, sections, path, body
) -> None:
    async with run_gateway([sims[0].url], **sections) as running:
        for model in (MODEL, ADAPTER):
            salts = []
            for name in NAMES:
                await received(sims[0])
                answer = await post(running, name, path, **body, model=model)
                assert answer.status_code == 200, answer.text
                (got,) = await received(sims[0])
                salts.append(got.pop("cache_salt"))
                if path != "/v1/embeddings":
                    assert got.pop("kv_transfer_params") == {"lmcache.tag.kvroute": salts[-1]}
                if path == "/v1/responses":
                    assert got.pop("request_id") == answer.json()["id"]
                assert got == {"model": model, "max_tokens": 1, **body}
            assert all(salt.startswith("kvroute-tenant-") for salt in salts)
            assert len(set(salts)) == 4
            assert salts[2] == salts[3]


@pytest.mark.parametrize(
    "forged",
    [
        {"cache_salt": "kvroute-tenant-" + "0" * 40},
        {"kv_transfer_params": {"lmcache.tag.kvroute": "x"}},
        {"kv_transfer_params": {"lmcache.tag.x": "y@kvroute%kvroute-tenant-1"}},
    ],
)
async def test_a_client_cannot_name_a_key_space(run_gateway, sims, sections, forged) -> None:
    async with run_gateway([sims[0].url], **sections) as running:
        answer = await post(running, "a", prompt="p", **forged)

        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(forged))
    assert await received(sims[0]) == []


async def test_a_request_that_cannot_get_a_key_space_is_refused_in_words(run_gateway, sims, sections) -> None:
    headers = {"authorization": "Bearer a-key"}
    async with run_gateway([sims[0].url], **sections) as running:
        unreadable = await running.client.post(
            "/v1/completions", content=b'{"prompt":"p","temperature":NaN}', headers=headers
        )
        form = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"model": MODEL}, "headers": headers}
        audio = await running.client.post("/v1/audio/transcriptions", **form)

        for answer in (unreadable, audio):
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "tenant_not_isolated"
            assert "server.isolation" in answer.json()["error"]["message"]
    assert await received(sims[0]) == []


async def test_pooling_requests_are_refused_where_workers_report_as_lmcache_in_classic_mode(
    run_gateway, sims, sections
) -> None:
    controller = {"enabled": True, "pull": "127.0.0.1:0", "reply": "127.0.0.1:0", "heartbeat": "127.0.0.1:0"}
    async with run_gateway(
        [sims[0].url], **sections, **KVAWARE, lmcache={"controller": controller}
    ) as running:
        answer = await post(running, "a", "/v1/embeddings", input="p")

        assert answer.status_code == 400
        assert "kv_transfer_params" in answer.json()["error"]["message"]


async def test_a_body_over_a_limit_is_never_forwarded_unread(run_gateway, sims, sections) -> None:
    sections["server"]["max_prompts"] = 1
    async with run_gateway([sims[0].url], **sections) as running:
        answer = await post(running, "a", prompt=["p", "q"])

        assert answer.status_code == 413
    assert await received(sims[0]) == []


async def test_equal_session_keys_of_tenants_are_two_sessions(run_gateway, sims, sections) -> None:
    routing = {"routing": {"strategy": "session"}}
    async with run_gateway([sim.url for sim in sims], **sections, **routing) as running:
        homes = set()
        for number in range(20):
            answers = [await post(running, name, prompt="p", user=f"u{number}") for name in ("a", "b")]
            homes.add(tuple(answer.headers["x-kvroute-worker"] for answer in answers))
        assert len(homes) == 4  # the homes of one key's two sessions do not depend on each other

        forget = [
            (await running.client.delete("/sessions/u0", headers={"authorization": f"Bearer {name}-key"}))
            for name in ("plain", "a", "a", "b")
        ]
        assert [answer.json()["forgotten"] for answer in forget] == [False, True, False, True]


async def test_a_stored_response_exists_for_its_own_tenant_only(run_gateway, sims, sections) -> None:
    async with run_gateway([sim.url for sim in sims], **sections) as running:
        first = (await post(running, "c", "/v1/responses", input="p", request_id="resp_mine")).json()
        stored = f"/v1/responses/{first['id']}"

        assert first["id"] != "resp_mine"
        for name, status in (("a", 404), ("plain", 404), ("c", 200), ("d", 200)):
            headers = {"authorization": f"Bearer {name}-key"}
            got = await running.client.get(stored, headers=headers)
            next_turn = await post(
                running, name, "/v1/responses", input="q", previous_response_id=first["id"]
            )
            explained = await post(
                running, name, "/v1/route/explain", input="q", previous_response_id=first["id"]
            )
            answers = [got, next_turn, explained]
            if status == 404:
                answers.append(await running.client.delete(stored, headers=headers))
                answers.append(await running.client.post(f"{stored}/cancel", headers=headers))
            assert [answer.status_code for answer in answers] == [status] * len(answers)


async def test_requests_that_wait_for_a_permit_keep_their_tenant(run_gateway, sims, sections) -> None:
    admission = {"max_concurrent": 1}
    async with run_gateway([sims[0].url], **sections, admission=admission) as running:
        names = NAMES * 4
        answers = await asyncio.gather(*(post(running, name, prompt=name, user=name) for name in names))

        assert {answer.status_code for answer in answers} == {200}
        salts: dict[str, set[str]] = {}
        for body in await received(sims[0]):
            salts.setdefault(body["user"], set()).add(body["cache_salt"])
        assert [len(salts[name]) for name in NAMES] == [1] * len(NAMES)
        assert len(set.union(*salts.values())) == 4


async def test_explain_predicts_for_the_tenant_that_asks(run_gateway, sims, sections) -> None:
    async with run_gateway([sims[0].url], **sections, routing={"strategy": "prefixaware"}) as running:
        await ask(running, "a", prompt=PROMPT)

        matched = {}
        for name in NAMES:
            explained = await post(running, name, "/v1/route/explain", prompt=PROMPT)
            matched[name] = explained.json()["ranking"][0]["matched_tokens"]
        assert matched.pop("a") > 0
        assert set(matched.values()) == {0}


@pytest.mark.parametrize("lane", ["fast lane"])
async def test_no_request_reaches_a_worker_whose_release_may_ignore_salts(
    run_gateway, sims, sections
) -> None:
    old_options = SimOptions(time_scale=0, version="0.11.0")
    async with run_sim(old_options) as old:
        async with run_gateway([old.url, sims[0].url], wait=False, **sections) as running:
            await running.until_healthy(1)
            await running.until(lambda: running.metric("kvroute_workers_not_isolated") == 1)
            for _ in range(4):
                assert (await post(running, "a", prompt=PROMPT)).status_code == 200

            ready = (await running.client.get("/ready")).json()

            assert ready["ready"]
            assert "vLLM 0.11.0 may ignore `cache_salt`" in " ".join(ready["notes"])
        async with run_gateway([old.url], wait=False, **sections) as running:
            await running.until(lambda: running.metric("kvroute_workers_not_isolated") == 1)
            refused = await post(running, "a", prompt=PROMPT)

            assert refused.status_code == 503
            assert "vLLM 0.11.0 may ignore `cache_salt`" in refused.json()["error"]["message"]
        assert await received(old) == []
        sections["server"]["isolation_checks_release"] = False
        async with run_gateway([old.url], **sections) as running:
            assert (await post(running, "a", prompt=PROMPT)).status_code == 200
            assert running.metric("kvroute_workers_not_isolated") == 0


def test_isolation_without_named_keys_is_a_configuration_error(lane) -> None:
    with pytest.raises(ValueError, match=r"server\.client_keys\.file"):
        Config.model_validate({"server": {"isolation": "per-key", "api_keys": ["k"]}})
