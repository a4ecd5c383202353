"""Named API keys, with the openai client and curl, on both ways through the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from tests.blackbox.conftest import command
from tests.support.proxies import curl

CHAT = {"model": "sim-model", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
KEYS = {name: f"kvr-test-{name}-0123456789abcdef" for name in ("old", "new", "other", "limited", "expired")}
LANES = pytest.mark.parametrize("lane", ["on", "off"])
LIMITS = {
    "requests": {"requests_per_minute": 2},
    "tokens": {"tokens_per_minute": 1},
    "streams": {"concurrent_requests": 1},
    "body": {"body_bytes": 20},
    "prompt": {"prompt_tokens": 1},
}


def hash_of(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, *keys: str, **fields: object) -> dict[str, object]:
    return {"name": name, "hash": [hash_of(key) for key in keys], **fields}


class KeysFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *entries: dict[str, object]) -> None:
        self.write_text(yaml.safe_dump({"keys": list(entries)}, sort_keys=False))

    def write_text(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)


@pytest.fixture
def file(tmp_path):
    return KeysFile(tmp_path / "keys.yaml")


@pytest.fixture
def keyed(serve, sim, file):
    """`await keyed(lane, ...)`: a gateway with the file's keys before a simulated worker."""

    async def start(lane: str, *arguments: str):
        worker = await sim("--time-scale", "0")
        return await serve(
            "--worker", worker, "--set", f"server.fast_lane={lane}",
            "--set", f"server.client_keys.file={file.path}",
            "--set", "server.client_keys.reload_interval_s=0.05",
            "--set", "admin.api_key=admin-key-0123456789", *arguments,
        )  # fmt: skip

    return start


def client_of(gateway, key: str) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False)
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, http_client=http, max_retries=0)


async def chat(gateway, key: str, **fields: object):
    async with client_of(gateway, key) as client:
        return await client.chat.completions.create(**{**CHAT, **fields})


async def get(gateway, path: str, key: str = "admin-key-0123456789") -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
        return await client.get(path, headers={"authorization": f"Bearer {key}"})


async def metric(gateway, line: str) -> float:
    found = re.search(rf"^{re.escape(line)} (\S+)$", (await get(gateway, "/metrics")).text, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def assert_no_key_leaked(gateway) -> None:
    decisions = (await get(gateway, "/admin/decisions")).text
    metrics = (await get(gateway, "/metrics")).text
    config = (await get(gateway, "/admin/config")).text
    for key in KEYS.values():
        for text in (gateway.log, decisions, metrics, config):
            assert key not in text
            assert hash_of(key).removeprefix("sha256:") not in text


@LANES
async def test_keys_are_checked_named_and_rotated(keyed, file, lane):
    file.write(
        entry("team", KEYS["old"], KEYS["new"]),
        entry("past", KEYS["expired"], expires="2001-01-01T00:00:00Z"),
        entry("small", KEYS["other"], models=["another-model"]),
    )
    gateway = await keyed(lane)

    assert (await chat(gateway, KEYS["old"])).usage.completion_tokens == 4
    assert (await chat(gateway, KEYS["new"])).usage.completion_tokens == 4
    async with client_of(gateway, KEYS["new"]) as client:  # closing it would cut the stream
        stream = await client.chat.completions.create(**CHAT, stream=True)
        assert len([chunk async for chunk in stream]) >= 4
    with pytest.raises(openai.AuthenticationError) as wrong:
        await chat(gateway, KEYS["limited"])
    assert wrong.value.body["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError) as expired:
        await chat(gateway, KEYS["expired"])
    assert expired.value.body["code"] == "expired_api_key"
    with pytest.raises(openai.PermissionDeniedError) as forbidden:
        await chat(gateway, KEYS["other"])
    assert (forbidden.value.body["code"], forbidden.value.body["param"]) == ("model_not_permitted", "model")
    assert (await get(gateway, "/v1/models", KEYS["old"])).json()["data"]
    assert (await get(gateway, "/v1/models", KEYS["other"])).json()["data"] == []

    decisions = (await get(gateway, "/admin/decisions")).json()
    entries = decisions["decisions"] if isinstance(decisions, dict) else decisions
    assert {each.get("key") for each in entries} >= {"team", "small"}
    assert await metric(gateway, 'kvroute_key_requests_total{key="team"}') == 3
    await gateway.logged('"key": "team"')
    await gateway.logged('"key": "small", "error": "model_not_permitted"')
    await assert_no_key_leaked(gateway)


@LANES
async def test_a_changed_file_is_loaded_and_an_invalid_one_is_refused_whole(keyed, file, lane):
    file.write(entry("team", KEYS["old"]))
    gateway = await keyed(lane)
    await chat(gateway, KEYS["old"])

    valid = f"keys:\n- name: other\n  hash: {hash_of(KEYS['new'])}\n"
    file.write_text(f"{valid}- name: x\n  hash: {KEYS['other']}\n")
    line = await gateway.logged("refused")

    assert f"{file.path}:5: keys[1].hash" in line
    assert await metric(gateway, 'kvroute_key_reloads_total{outcome="refused"}') == 1
    await chat(gateway, KEYS["old"])
    with pytest.raises(openai.AuthenticationError):
        await chat(gateway, KEYS["new"])
    file.write(entry("team", KEYS["new"]))
    await gateway.logged("the changed file of keys is loaded")
    await chat(gateway, KEYS["new"])
    with pytest.raises(openai.AuthenticationError):
        await chat(gateway, KEYS["old"])
    await assert_no_key_leaked(gateway)


@LANES
async def test_each_limit_is_refused_by_name(keyed, file, lane):
    file.write(*(entry(name, f"key-{name}", limits=limits) for name, limits in LIMITS.items()))
    gateway = await keyed(lane)

    await chat(gateway, "key-requests")
    await chat(gateway, "key-requests")
    await chat(gateway, "key-tokens")
    # The tokens are charged when the request is recorded, with the answer's last byte.
    refused = {}
    for name in ("requests", "tokens"):
        with pytest.raises(openai.RateLimitError) as caught:
            await chat(gateway, f"key-{name}")
        refused[name] = caught.value
    for name in ("body", "prompt"):
        with pytest.raises(openai.APIStatusError) as too_large:
            await chat(gateway, f"key-{name}")
        assert too_large.value.status_code == 413
        refused[name] = too_large.value

    for name, limits in LIMITS.items():
        if name != "streams":
            (limit,) = limits
            assert f"limits.{limit}" in refused[name].message
            line = f'kvroute_key_limited_total{{key="{name}",limit="{limit}"}}'
            assert await metric(gateway, line) == 1
    assert 1 <= int(refused["requests"].response.headers["retry-after"]) <= 30
    assert refused["tokens"].response.headers["retry-after"]
    assert refused["tokens"].body["code"] == "key_limit_reached"
    assert await metric(gateway, 'kvroute_key_tokens_total{key="tokens"}') > 4


@LANES
async def test_requests_in_flight_are_limited_until_their_end(serve, sim, file, lane):
    file.write(entry("streams", "key-streams", limits=LIMITS["streams"]))
    worker = await sim("--time-scale", "1")
    gateway = await serve(
        "--worker", worker, "--set", f"server.fast_lane={lane}",
        "--set", f"server.client_keys.file={file.path}",
    )  # fmt: skip
    async with client_of(gateway, "key-streams") as client:
        long = {**CHAT, "max_tokens": 100_000, "extra_body": {"ignore_eos": True}, "stream": True}
        stream = await client.chat.completions.create(**long)
        with pytest.raises(openai.RateLimitError, match="concurrent_requests"):
            await chat(gateway, "key-streams")
        await stream.close()

    async def is_free() -> bool:
        try:
            await chat(gateway, "key-streams")
        except openai.RateLimitError:
            return False
        return True

    async with asyncio.timeout(60.0):
        while not await is_free():
            await asyncio.sleep(0)


@LANES
async def test_curl_uses_a_new_key_of_the_command_line(keyed, file, run, lane):
    made = await asyncio.create_subprocess_exec(
        *command(), "keys", "new", "from-curl", stdout=asyncio.subprocess.PIPE
    )
    output, _ = await made.communicate()
    key = re.search(r"kvr-\S+", output.decode())[0]
    file.write(*yaml.safe_load(output))
    gateway = await keyed(lane)
    answers = []
    for given in (key, key[:-1]):
        code, answer = await curl(
            f"{gateway.url}/v1/chat/completions", "-H", f"authorization: Bearer {given}",
            "-H", "content-type: application/json", "-d", json.dumps(CHAT),
        )  # fmt: skip
        assert code == 0
        answers.append(json.loads(answer))

    assert answers[0]["usage"]["completion_tokens"] == 4
    assert answers[1]["error"]["code"] == "invalid_api_key"
    assert answers[1]["error"]["param"] == "authorization"
    assert key not in gateway.log


async def test_an_invalid_file_at_the_start_ends_the_gateway_with_line_and_reason(run, file):
    file.write_text("keys:\n- name: a\n  hash: sha256:no\n")

    process = await run(
        "serve", "--port", "0", "--worker", "http://127.0.0.1:1",
        "--set", f"server.client_keys.file={file.path}",
    )  # fmt: skip

    assert await process.ended() != 0
    assert f"server.client_keys.file: {file.path}:3: keys[0].hash" in process.log
    assert "Traceback" not in process.log
