"""Prompts with images on workers whose render endpoints show the identifiers of media."""

from __future__ import annotations

import httpx
import pytest
from tests.blackbox.conftest import EXECUTABLE
from tests.support.waiting import until

MODEL = "sim-model"
TEXT = "The quick brown fox jumps over the lazy dog. " * 150


def image(content: str) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def chat(*parts: dict | str) -> dict:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}


@pytest.fixture
def start(serve, sim, processes, monkeypatch):
    """`await start(block_size=32)`: a client of a gateway with `kvaware` before a worker.

    The worker is that of this checkout: an older `kvroute sim` has no render endpoints.
    """

    async def run(*arguments: str, block_size: int = 16) -> httpx.AsyncClient:
        with monkeypatch.context() as patch:
            patch.delenv(EXECUTABLE, raising=False)
            flags = ("--events", "--scale-out", "--time-scale", "0", "--block-size", str(block_size))
            url = await sim(*flags)
        running = await serve(
            "--worker", url, "--strategy", "kvaware", "--set", "tokens.timeout_ms=5000", *arguments
        )
        client = await processes.enter_async_context(
            httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False)
        )

        async def is_ready() -> bool:
            await client.post("/v1/chat/completions", json=chat("ready?"))
            return "kvroute_exact_prompts_total{" in (await client.get("/metrics")).text

        await until(is_ready, within_s=60, every_s=0.05)
        return client

    return run


async def asked(client: httpx.AsyncClient, body: dict) -> tuple[int, int]:
    """The predicted and the reported cached tokens."""
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(answer.headers["x-kvroute-hit-tokens"]), cached


async def without_ids(client: httpx.AsyncClient) -> list[str]:
    """The reasons why prompts had no exact token ids, since the worker's ids were compared."""
    page = (await client.get("/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("kvroute_inexact_prompts_total{")]
    return [line.partition('cause="')[2].partition('"')[0] for line in lines if "no_source" not in line]


@pytest.mark.parametrize("block_size", [16, 32, 64])
async def test_a_hit_is_predicted_up_to_another_image_and_never_beyond(start, block_size):
    client = await start(block_size=block_size)
    first = chat(TEXT, image("AAAA"), TEXT, image("BBBB"), TEXT)
    await asked(client, first)

    figures = {
        "the same": await asked(client, first),
        "another second image": await asked(client, chat(TEXT, image("AAAA"), TEXT, image("CCCC"), TEXT)),
        "another first image": await asked(client, chat(TEXT, image("CCCC"), TEXT, image("BBBB"), TEXT)),
        "no image": await asked(client, chat(TEXT)),
        "one more turn": await asked(
            client, {**first, "messages": [*first["messages"], {"role": "user", "content": TEXT}]}
        ),
    }

    assert {name: predicted for name, (predicted, _) in figures.items()} == {
        name: cached for name, (_, cached) in figures.items()
    }
    hits = {name: cached for name, (_, cached) in figures.items()}
    assert 0 < hits["no image"] <= hits["another first image"] < hits["another second image"]
    assert hits["another second image"] < hits["the same"] <= hits["one more turn"]
    assert await without_ids(client) == []


async def test_where_workers_are_not_asked_for_media_the_history_decides(start):
    client = await start("--set", "tokens.media_keys=false")
    with_image = chat(TEXT, image("AAAA"))

    await asked(client, with_image)
    assert await without_ids(client) == ["media"]
