"""What no prefix cache can answer: requests that do not read it, and workers that have none."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.support.engines import MODEL, fake_engine

LONG = "The quick brown fox jumps over the lazy dog. " * 100


@pytest.fixture
def start(serve, processes):
    """`await start(count, **settings)` runs engines and a gateway before them: (client, engines)."""

    async def run(count: int, *arguments: str, **settings):
        engines = [await processes.enter_async_context(fake_engine(**settings)) for _ in range(count)]
        workers = [part for engine in engines for part in ("--worker", engine.url)]
        running = await serve(*workers, *arguments)
        client = httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False)
        return await processes.enter_async_context(client), engines

    return run


async def at_once(
    client: httpx.AsyncClient, path: str, bodies: list[dict], most: int
) -> list[httpx.Response]:
    """Send the bodies, `most` at the same time."""
    gate = asyncio.Semaphore(most)

    async def send(body: dict) -> httpx.Response:
        async with gate:
            return await client.post(path, json={"model": MODEL, **body})

    return await asyncio.gather(*map(send, bodies))


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
@pytest.mark.parametrize("shows_caching", [True, False], ids=["label", "no label"])
async def test_encoder_workers_with_a_pool_of_8_blocks_share_the_requests(start, strategy, shows_caching):
    """A pool of 8 blocks made the worker dear that had not finished a request yet."""
    client, engines = await start(
        2, "--strategy", strategy, caches=False, shows_caching=shows_caching, blocks=8, seconds=0.05
    )

    await at_once(client, "/v1/embeddings", [{"input": "the first text"}], 1)  # one worker has finished one
    texts = [{"input": f"text {number} " + "of some words " * 20} for number in range(40)]

    answers = await at_once(client, "/v1/embeddings", texts, 8)

    assert {answer.status_code for answer in answers} == {200}
    counts = sorted(len(engine.received) for engine in engines)
    assert counts[1] <= 1.2 * counts[0], counts


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_no_hit_is_predicted_on_workers_without_prefix_caching(start, strategy):
    client, engines = await start(2, "--strategy", strategy, caches=False)

    hits = []
    for _ in range(6):
        body = {"model": MODEL, "prompt": LONG, "max_tokens": 1}
        hits.append((await client.post("/v1/completions", json=body)).headers["x-kvroute-hit-tokens"])

    assert set(hits) == {"0"}
    assert max(len(engine.received) for engine in engines) < 6, "the hot prompt goes by load"


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {"prompt_logprobs": 1}),
        ("/v1/completions", {"prompt_logprobs": 0}),
        ("/v1/completions", {"echo": True, "logprobs": 0}),
        ("/v1/completions", {"use_beam_search": True}),
        ("/v1/chat/completions", {"prompt_logprobs": 0}),
        ("/v1/chat/completions", {"echo": True}),
    ],
)
async def test_requests_that_do_not_read_the_cache_are_predicted_0_and_not_judged(start, path, extra):
    client, _ = await start(1)
    chat = [{"role": "user", "content": LONG}]
    prompt = {"messages": chat} if "chat" in path else {"prompt": LONG}
    plain = {"model": MODEL, "max_tokens": 1, **prompt}
    await client.post(path, json=plain)

    own = await client.post(path, json={**plain, **extra})
    after = await client.post(path, json=plain)

    assert own.headers["x-kvroute-hit-tokens"] == "0"
    assert int(after.headers["x-kvroute-hit-tokens"]) > 1000
    page = (await client.get("/metrics")).text
    counted = [line for line in page.splitlines() if line.startswith("kvroute_predictions_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == 2, counted


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"prompt_logprobs": None, "use_beam_search": False}),
        ("/v1/chat/completions", {"echo": True, "top_logprobs": None}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
    ],
)
async def test_requests_that_read_the_cache_are_predicted_as_before(start, path, extra):
    client, _ = await start(1)
    chat = [{"role": "user", "content": LONG}]
    plain = {"model": MODEL, "max_tokens": 1, **({"messages": chat} if "chat" in path else {"prompt": LONG})}
    await client.post(path, json=plain)

    own = await client.post(path, json={**plain, **extra})

    assert int(own.headers["x-kvroute-hit-tokens"]) > 1000


async def test_an_evaluation_with_prompt_logprobs_is_spread_over_the_workers(start):
    """45 completions with one long beginning went to one of two workers."""
    client, engines = await start(2, seconds=0.02)
    shared = LONG * 8
    bodies = [
        {"prompt": f"{shared} question {number}", "prompt_logprobs": 0, "max_tokens": 1}
        for number in range(45)
    ]

    await at_once(client, "/v1/completions", bodies, 1)

    counts = sorted(len(engine.received) for engine in engines)
    assert counts[1] <= 1.2 * counts[0], counts
