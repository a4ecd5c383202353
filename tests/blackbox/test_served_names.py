"""Several served names of one engine are one model, and equal roots of two workers are not."""

from __future__ import annotations

import hashlib
import json
import re

import httpx
import pytest
from tests.support.waiting import until
from tests.support.workers import scripted_worker

STRATEGIES = ("prefixaware", "kvaware", "session")
ROOT = "/opt/ml/model"


def prompt(number: int) -> str:
    return f"Document {number}. " + f"word{number} and more " * 200


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)


async def asked(gateway: httpx.AsyncClient, model: str, text: str, **headers: str) -> httpx.Response:
    answer = await gateway.post(
        "/v1/completions",
        json={"model": model, "prompt": text, "max_tokens": 1},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer


async def started(serve, sim, strategy: str, *workers: tuple[str, ...]):
    """A gateway before simulated workers with events, each with these names of one model. Its root is the
    first of them."""
    arguments = []
    for names in workers:
        flags = [flag for name in names for flag in ("--model", name)]
        arguments += ["--worker", await sim(*flags, "--time-scale", "0", "--events")]
    # Each prompt waits for its exact tokens, however busy the machine is.
    return await serve(*arguments, "--strategy", strategy, "--set", "tokens.timeout_ms=10000")


async def has_exact_tokens(gateway: httpx.AsyncClient) -> bool:
    return "no exact tokens" not in (await gateway.get("/ready")).text


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_prompt_that_comes_under_another_name_of_its_model_goes_to_its_worker(serve, sim, strategy):
    names = ("haiku", "sonnet", "opus")
    running = await started(serve, sim, strategy, names, names)
    async with client(running.url) as gateway:
        if strategy == "kvaware":
            await until(lambda: has_exact_tokens(gateway), within_s=60, every_s=0.05)
        for number in range(12):
            text, session = prompt(number), f"s{number}"
            first = await asked(gateway, "haiku", text, x_session_id=session)
            for name in ("sonnet", "opus"):
                again = await asked(gateway, name, text, x_session_id=session)
                assert again.headers["x-kvroute-worker"] == first.headers["x-kvroute-worker"]
                if strategy != "session":
                    assert int(again.headers["x-kvroute-hit-tokens"]) > 500, again.headers
                if strategy == "kvaware":
                    assert again.headers["x-kvroute-reason"] == "kv_hit"


async def test_the_metrics_have_the_name_that_the_client_sent(serve, sim):
    running = await started(serve, sim, "prefixaware", ("a", "b"))
    async with client(running.url) as gateway:
        for name in ("a", "b", "b"):
            await asked(gateway, name, "hello")
        page = (await gateway.get("/metrics")).text

    counted = re.findall(r'kvroute_requests_total\{model="(\w+)".*\} (\d+)\.0', page)
    assert sorted(counted) == [("a", "1"), ("b", "2")]


async def test_a_request_without_a_model_gets_the_main_name(serve, sim):
    running = await started(serve, sim, "prefixaware", ("b", "a"), ("b", "a"))
    async with client(running.url) as gateway:
        answer = await gateway.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        listed = [card["id"] for card in (await gateway.get("/v1/models")).json()["data"]]

    assert answer.json()["model"] == "b"
    assert sorted(listed) == ["a", "b"]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_models_of_two_workers_with_one_root_stay_apart(serve, sim, strategy):
    urls = [
        await sim("--model", ROOT, "--served-model-name", *names, "--time-scale", "0")
        for names in (("llama", "llama-3"), ("qwen", "qwen-3"))
    ]
    running = await serve("--worker", urls[0], "--worker", urls[1], "--strategy", strategy)
    async with client(running.url) as gateway:
        missing = await gateway.post("/v1/completions", json={"prompt": "hello"})
        assert missing.status_code == 400
        workers = set()
        for name in ("llama", "qwen"):
            first = await asked(gateway, name, prompt(1))
            again = await asked(gateway, f"{name}-3", prompt(1))
            assert again.headers["x-kvroute-worker"] == first.headers["x-kvroute-worker"]
            workers.add(first.headers["x-kvroute-worker"])
            if strategy == "prefixaware":
                assert first.headers["x-kvroute-hit-tokens"] == "0"
                assert int(again.headers["x-kvroute-hit-tokens"]) > 500

    assert len(workers) == 2


async def test_workers_are_joined_by_a_shared_name_and_get_only_names_that_they_know(serve, sim):
    urls = [
        await sim("--model", ROOT, "--served-model-name", *names, "--time-scale", "0")
        for names in (("a", "b"), ("b", "c"))
    ]
    running = await serve("--worker", urls[0], "--worker", urls[1])
    async with client(running.url) as gateway:
        of_a = {(await asked(gateway, "a", prompt(n))).headers["x-kvroute-worker"] for n in range(6)}
        of_c = {(await asked(gateway, "c", prompt(n))).headers["x-kvroute-worker"] for n in range(6, 12)}
        assert len(of_a) == len(of_c) == 1
        assert of_a != of_c
        for number in range(12):
            again = await asked(gateway, "b", prompt(number))
            assert again.headers["x-kvroute-worker"] in (of_a if number < 6 else of_c)
            assert int(again.headers["x-kvroute-hit-tokens"]) > 500


async def test_a_key_is_limited_to_the_names_that_it_lists(serve, sim, tmp_path):
    file = tmp_path / "keys.json"
    entry = {"name": "team", "hash": "sha256:" + hashlib.sha256(b"secret").hexdigest(), "models": ["a"]}
    file.write_text(json.dumps({"keys": [entry]}))
    url = await sim("--model", "a", "--model", "b", "--time-scale", "0")
    running = await serve("--worker", url, "--set", f"server.client_keys.file={file}")
    async with client(running.url) as gateway:
        statuses = [
            (
                await gateway.post(
                    "/v1/completions",
                    json={"model": name, "prompt": "hi", "max_tokens": 1},
                    headers={"authorization": "Bearer secret"},
                )
            ).status_code
            for name in ("a", "b")
        ]

    assert statuses == [200, 403]


async def test_a_line_says_that_a_worker_lists_more_models_than_count(serve):
    cards = [{"id": f"adapter-{number}", "object": "model"} for number in range(1003)]
    async with scripted_worker(*cards) as worker:
        gateway = await serve("--worker", f"w={worker.url}", "--set", "fleet.health.models_interval_s=0.1")
        line = await gateway.logged("lists 1003 models, of which 3 do not count")
        await until(lambda: worker.lists > 3, within_s=30)
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as client:
            listed = (await client.get("/v1/models")).json()["data"]

    assert "worker w " in line
    assert len(listed) == 1000
    assert gateway.log.count("do not count") == 1
