"""Prefix caches that are emptied while the engine goes on: resets, sleep mode, pauses, new weights."""

from __future__ import annotations

import httpx
import pytest
from tests.support.engines import MODEL, fake_engine
from tests.support.waiting import until

ADMIN = {"authorization": "Bearer admin-secret-0123"}
PROMPT = {"model": MODEL, "prompt": "A prompt that is long enough for many blocks. " * 60, "max_tokens": 1}
FAST = ("--set", "fleet.health.metrics_interval_s=0.2", "--set", "fleet.health.interval_s=0.2")


@pytest.fixture
def start(serve, processes):
    """`await start(count, *arguments)` runs engines and a gateway before them: (client, engines)."""

    async def run(count: int, *arguments: str, **settings):
        engines = [await processes.enter_async_context(fake_engine(**settings)) for _ in range(count)]
        workers = [part for engine in engines for part in ("--worker", engine.url)]
        running = await serve(*workers, "--set", "admin.api_key=admin-secret-0123", *arguments)
        client = httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False)
        return await processes.enter_async_context(client), engines

    return run


async def hit_tokens(client: httpx.AsyncClient) -> int:
    answer = await client.post("/v1/completions", json=PROMPT)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-kvroute-hit-tokens"])


async def predicted(client: httpx.AsyncClient) -> int:
    answer = await client.post("/v1/route/explain", json=PROMPT)
    return max(each["matched_tokens"] for each in answer.json()["ranking"])


async def awake_again(client: httpx.AsyncClient, worker: str, *actions: str) -> None:
    """End a sleep or a pause: until then the worker is in no ranking."""
    for action in actions:
        await client.post(f"/admin/workers/{worker}/{action}", headers=ADMIN)

    async def is_ranked() -> bool:
        return (await client.post("/v1/route/explain", json=PROMPT)).status_code == 200

    await until(is_ranked, within_s=20)


@pytest.mark.parametrize("action", ["reset_prefix_cache", "sleep?level=1", "pause"])
@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_what_the_admin_api_empties_is_not_predicted_any_more(start, action, strategy):
    client, engines = await start(1, "--strategy", strategy)
    await hit_tokens(client)
    assert await predicted(client) > 500

    (worker,) = (await client.get("/admin/workers", headers=ADMIN)).json()["workers"]
    answer = await client.post(f"/admin/workers/{worker['id']}/{action}", headers=ADMIN)

    assert answer.status_code == 200, answer.text
    assert answer.json() == {"worker": worker["id"], "answer": {"success": True}}
    assert engines[0].posts == [f"/{action}"]
    await awake_again(client, worker["id"], *{"sleep": ["wake_up"], "pause": ["resume"]}.get(action[:5], []))
    assert await predicted(client) == 0


@pytest.mark.parametrize("action", ["pause?clear_cache=false", "resume", "wake_up"])
async def test_what_stays_in_the_cache_is_still_predicted(start, action):
    client, _ = await start(1)
    await hit_tokens(client)

    (worker,) = (await client.get("/admin/workers", headers=ADMIN)).json()["workers"]
    answer = await client.post(f"/admin/workers/{worker['id']}/{action}", headers=ADMIN)

    assert answer.status_code == 200, answer.text
    await awake_again(client, worker["id"], *{"sleep": ["wake_up"], "pause": ["resume"]}.get(action[:5], []))
    assert await predicted(client) > 500


async def test_a_reset_of_every_worker_reaches_every_worker(start):
    client, engines = await start(3)

    answer = await client.post("/admin/reset_prefix_cache?reset_external=true", headers=ADMIN)

    outcomes = answer.json()["workers"]
    assert [each["ok"] for each in outcomes.values()] == [True] * 3
    assert [engine.posts for engine in engines] == [["/reset_prefix_cache?reset_external=true"]] * 3


async def test_the_other_processes_forget_too(start):
    client, _ = await start(1, "--processes", "2")
    for _ in range(8):
        await client.post("/v1/completions", json=PROMPT, headers={"connection": "close"})

    answer = await client.post("/admin/reset_prefix_cache", headers={**ADMIN, "connection": "close"})
    assert answer.status_code == 200

    async def all_forgot() -> bool:
        answers = [
            await client.post("/v1/route/explain", json=PROMPT, headers={"connection": "close"})
            for _ in range(8)
        ]
        return all(answer.json()["ranking"][0]["matched_tokens"] == 0 for answer in answers)

    await until(all_forgot, within_s=10)


async def test_an_unknown_parameter_is_named_and_nothing_is_sent(start):
    client, engines = await start(1)

    answer = await client.post("/admin/reset_prefix_cache?level=1", headers=ADMIN)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "level"
    assert engines[0].posts == []


async def test_an_engine_without_development_mode_is_explained(start):
    client, _ = await start(1, has_dev_mode=False)
    await hit_tokens(client)
    (worker,) = (await client.get("/admin/workers", headers=ADMIN)).json()["workers"]

    answer = await client.post(f"/admin/workers/{worker['id']}/reset_prefix_cache", headers=ADMIN)

    assert answer.status_code == 502
    assert "VLLM_SERVER_DEV_MODE=1" in answer.json()["error"]["message"]
    assert await predicted(client) > 500


async def test_the_admin_key_is_needed(start):
    client, engines = await start(1)

    assert (await client.post("/admin/sleep")).status_code == 401
    assert engines[0].posts == []


@pytest.mark.parametrize("seen", ["asleep", "slept between two reads"])
async def test_sleep_that_only_the_metrics_show_is_noticed(start, seen):
    client, engines = await start(1, *FAST)
    await hit_tokens(client)
    assert await predicted(client) > 500

    engines[0].clear()
    engines[0].sleeps += 1
    engines[0].asleep = seen == "asleep"

    async def forgot() -> bool:
        answer = await client.post("/v1/route/explain", json=PROMPT)
        if answer.status_code != 200:
            engines[0].asleep = False
            return False
        return max(each["matched_tokens"] for each in answer.json()["ranking"]) == 0

    await until(forgot, within_s=20)
    await hit_tokens(client)
    assert await predicted(client) > 500
