"""Routing on the workers' own cache events, end to end: simulated workers, real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions

MODEL = "sim-model"
SECTIONS: dict[str, Any] = {"routing": {"strategy": "kvaware"}, "tokens": {"timeout_ms": 10_000}}
MUCH = 500


@pytest.fixture
async def sims() -> AsyncIterator[list[RunningSim]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run_sim(SimOptions(time_scale=0))) for _ in range(2)]


@pytest.fixture
async def kvaware(run_gateway, sims):
    """A gateway that follows both workers and knows their model's tokens."""
    async with run_gateway([sim.url for sim in sims], **SECTIONS) as running:
        await until_ready(running)
        yield running


async def until_ready(running) -> None:
    await running.until(lambda: not running.runtime.cache_tracker.notes())


def text(seed: int, words: int = MUCH) -> str:
    chooser = random.Random(seed)
    return " ".join(f"{chooser.getrandbits(40):x}" for _ in range(words))


async def ask(client: httpx.AsyncClient, *contents: str, **fields: Any) -> httpx.Response:
    messages = [
        {"role": "assistant" if place % 2 else "user", "content": each} for place, each in enumerate(contents)
    ]
    answer = await client.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 4, **fields}
    )
    assert answer.status_code == 200, answer.text
    return answer


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def predicted(answer: httpx.Response) -> int:
    return int(answer.headers["x-kvroute-hit-tokens"])


async def until_held(running, blocks: int) -> None:
    """Events travel on their own: wait until the map has as many blocks."""
    await running.until(lambda: running.runtime.cache_tracker.describe()["held_blocks"] >= blocks)


async def direct(sim: RunningSim, *contents: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=sim.url, trust_env=False) as client:
        return await ask(client, *contents)


async def test_blocks_of_requests_that_bypassed_the_gateway_are_found(kvaware, sims) -> None:
    """For both workers. A strategy that only knows its own requests would not find these blocks."""
    for number, sim in enumerate(sims):
        known = await direct(sim, text(number))
        await until_held(kvaware, (number + 1) * (known.json()["usage"]["prompt_tokens"] // 16))

    for number in range(len(sims)):
        answer = await ask(kvaware.client, text(number))

        assert answer.headers["x-kvroute-worker"] == f"w{number}"
        assert answer.headers["x-kvroute-reason"] == "kv_hit"
        assert predicted(answer) == cached(answer) > MUCH
        assert answer.headers["x-kvroute-hit-tiers"] == f"gpu={cached(answer)};l1=0;l2=0"


async def test_predictions_equal_the_cached_tokens_of_every_turn(kvaware) -> None:
    """Exactly: the next turn's prompt has the generated answer in it, which no prompt has shown yet."""
    contents = [text(3)]
    for turn in range(4):
        answer = await ask(kvaware.client, *contents)

        assert predicted(answer) == cached(answer)
        assert bool(cached(answer)) == bool(turn)
        total = answer.json()["usage"]["total_tokens"]
        await until_held(kvaware, (total - 1) // 16)
        contents += [answer.json()["choices"][0]["message"]["content"], text(100 + turn, 40)]

    [entry] = kvaware.runtime.audit.describe()["predictions"][:1]
    assert (entry["strategy"], entry["over"], entry["under"]) == ("kvaware", 0, 0)


async def test_a_reset_cache_is_no_longer_predicted(kvaware, sims) -> None:
    first = await ask(kvaware.client, text(5))
    await until_held(kvaware, first.json()["usage"]["prompt_tokens"] // 16)
    async with httpx.AsyncClient(trust_env=False) as client:
        for sim in sims:
            await client.post(f"{sim.url}/reset_prefix_cache")
            await direct(sim, "wake up")  # vLLM publishes a reset with its next step
    await kvaware.until(lambda: kvaware.runtime.cache_tracker.describe()["held_blocks"] < MUCH // 16)

    again = await ask(kvaware.client, text(5))

    assert predicted(again) == cached(again) <= 16, "at most the template's own beginning"


async def test_explain_shows_tiers_and_agrees_with_the_request_that_follows(kvaware) -> None:
    first = await ask(kvaware.client, text(6))
    await until_held(kvaware, first.json()["usage"]["prompt_tokens"] // 16)
    body = {"model": MODEL, "messages": [{"role": "user", "content": text(6)}], "max_tokens": 4}

    explained = (await kvaware.client.post("/v1/route/explain", json=body)).json()
    answer = await kvaware.client.post("/v1/chat/completions", json=body)

    best = explained["ranking"][0]
    assert explained["reason"] == "kv_hit"
    assert best["worker"] == answer.headers["x-kvroute-worker"]
    assert best["tiers"] == {"gpu": cached(answer), "l1": 0, "l2": 0}
    assert (best["believed_from"], best["map"]) == ("cache events", "whole")


async def test_a_worker_without_events_is_ranked_by_the_prompts_sent_to_it(run_gateway, sims) -> None:
    """And `/ready` says so, while the other one's map is used."""
    silent = SimOptions(time_scale=0, kv_events=False)
    async with (
        run_sim(silent) as mute,
        run_gateway([sims[0].url, mute.url], **SECTIONS) as running,
    ):
        await running.until(lambda: len(running.runtime.cache_tracker.notes()) == 1)
        answers = [await ask(running.client, text(seed)) for seed in range(8)]
        again = [await ask(running.client, text(seed)) for seed in range(8)]
        notes = (await running.client.get("/ready")).json()["notes"]

    on_mute = [place for place, answer in enumerate(answers) if answer.headers["x-kvroute-worker"] == "w1"]
    assert on_mute
    assert all(again[place].headers["x-kvroute-worker"] == "w1" for place in on_mute)
    assert all(predicted(again[place]) > 0 for place in on_mute)
    assert notes == ["kvaware: worker 'w1': no_events"]


async def test_a_prompt_that_cannot_be_tokenized_is_routed_on_the_approximate_view(kvaware) -> None:
    picture = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
    }
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [picture, {"type": "text", "text": text(8)}]}],
        "max_tokens": 4,
    }

    answer = await kvaware.client.post("/v1/chat/completions", json=body)

    assert answer.status_code == 200
    assert answer.headers["x-kvroute-reason"] == "kv_approximate"
    assert kvaware.metric("kvroute_inexact_prompts_total", cause="media") == 1


async def test_several_prompts_are_predicted_together(kvaware) -> None:
    prompts = [text(20), text(21)]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 2}
    first = await kvaware.client.post("/v1/completions", json=body)
    await until_held(kvaware, (first.json()["usage"]["prompt_tokens"] - 2) // 16 - 1)

    explained = (await kvaware.client.post("/v1/route/explain", json=body)).json()

    total = first.json()["usage"]["prompt_tokens"]
    assert explained["prompt_tokens"] == total
    assert total - 2 * 16 <= explained["ranking"][0]["tiers"]["gpu"] <= total - 2


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_costs_nothing(
    run_gateway, sims, monkeypatch
) -> None:
    """The tokenizer never answers; the request was never sent."""
    async with run_gateway([sim.url for sim in sims], **SECTIONS) as running:
        await until_ready(running)
        asked = _Never()
        monkeypatch.setattr(running.runtime.cache_tracker.preparer, "prepare", asked)
        with pytest.raises(httpx.ReadTimeout):
            await running.client.post(
                "/v1/chat/completions",
                json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
                timeout=0.2,
            )
        await running.until(lambda: running.metric("kvroute_requests_in_flight") == 0)

    assert asked.was_cancelled
    assert running.metric("kvroute_requests_total", status="499") == 1
    assert all(worker.load.in_flight == 0 for worker in running.runtime.fleet.workers())


class _Never:
    was_cancelled = False

    async def __call__(self, *_: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


@pytest.mark.parametrize("ahead", [0, 1, 3])
async def test_predictions_are_exact_at_a_fork_of_hashes_with_lookahead(run_gateway, ahead: int) -> None:
    """vLLM 0.33 with EAGLE-style speculation: a block's hash covers the next tokens too. So a block that
    ends where two prompts fork is of one of them only."""
    options = SimOptions(time_scale=0, lookahead_tokens=ahead, event_dialect="map-0.33")
    chooser = random.Random(ahead)
    base = [chooser.randrange(1000, 30_000) for _ in range(16 * 12 + 5)]
    forks = [(base, 0), (base, len(base) - max(1, ahead))]  # a prompt, and the tokens that it shares
    for position in (15, 16, 17, 31, 32, 33, 34, 35, 36, 100, 128, 129, 131, 16 * 12, len(base)):
        other = [chooser.randrange(30_001, 60_000) for _ in range(chooser.randrange(1, 40))]
        forks += [(base[:position], position - max(1, ahead)), (base[:position] + other, position - ahead)]
    async with run_sim(options) as sim, run_gateway([sim.url], **SECTIONS) as running:
        await until_ready(running)
        for number, (prompt, shared) in enumerate(forks):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            answer = await running.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

            assert cached(answer) == max(0, shared) // 16 * 16
            if number > 1:  # the first events show that the hashes have lookahead
                assert (number, predicted(answer)) == (number, cached(answer))
            await until_held(running, len(sim.worker.engine.cache.held_keys))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify"])
async def test_prompts_of_pooling_requests_are_known_token_by_token(kvaware, path) -> None:
    """Of models that cache: the map says which worker holds the beginning of a text."""
    first = text(71)
    body = {"model": MODEL, "input": first + text(72)}
    answer = await kvaware.client.post(path, json=body)
    assert answer.headers["x-kvroute-reason"] == "kv_miss"
    await until_held(kvaware, answer.json()["usage"]["prompt_tokens"] // 16)

    again = await kvaware.client.post(path, json={"model": MODEL, "input": [first + text(73)]})

    assert again.headers["x-kvroute-reason"] in ("kv_hit", "kv_spill")
    explained = await kvaware.client.post("/v1/route/explain", json=body)
    holder = max(explained.json()["ranking"], key=lambda each: each["matched_tokens"])
    assert holder["matched_tokens"] > answer.json()["usage"]["prompt_tokens"] - 32
    assert holder["worker"] == answer.headers["x-kvroute-worker"]
    assert holder["believed_from"] == "cache events"


@pytest.mark.parametrize(
    "fields", [{"truncate_prompt_tokens": 8}, {"padding": "max_length"}, {"messages": []}]
)
async def test_pooling_prompts_that_only_the_engine_can_make_are_approximate(kvaware, fields) -> None:
    answer = await kvaware.client.post("/v1/embeddings", json={"model": MODEL, "input": text(74), **fields})

    assert answer.headers.get("x-kvroute-reason") in ("kv_approximate", "no_prompt"), answer.text
