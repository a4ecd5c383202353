"""`kvroute sim` finds in its cache what engines with today's models find."""

from __future__ import annotations

import random

import httpx
import pytest

MODEL = "sim-model"
STATES = ("--kv-group", "mamba:64", "--kv-group", "full_attention:64")
WINDOWS = ("--kv-group", "sliding_window:16:64", "--kv-group", "full_attention:16")
FULL = ("--kv-group", "full_attention:16")


def words(seed: int, count: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(1 << 24, 1 << 25) for _ in range(count)]


HEAD = words(0, 640)
FORKS = [HEAD[:320] + words(seed, 100) for seed in (1, 2, 3)]
REPEATS = [HEAD, HEAD, HEAD + words(4, 100)]


@pytest.mark.parametrize(
    ("flags", "prompts", "found"),
    [
        (STATES, [*REPEATS, *FORKS], [0, 576, 576, 0, 320, 320]),
        (WINDOWS, [HEAD, *FORKS[:2]], [0, 0, 320]),
        (("--kv-group", "chunked_local_attention:16:128", *FULL), REPEATS, [0, 624, 640]),
        ((*FULL, "--drafted-tokens", "2"), REPEATS, [0, 608, 624]),
        ((*STATES, "--prefix-match-unit", "16"), REPEATS, [0, 624, 624]),
    ],
    ids=["states", "a window", "chunks", "a drafter", "partial tails"],
)
async def test_a_simulated_worker_finds_what_its_groups_of_layers_have(sim, flags, prompts, found):
    url = await sim("--time-scale", "0", *flags)
    cached = []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == found


async def test_a_simulated_worker_renders_chats_otherwise_than_its_tokenize_shows(sim):
    """As vLLM does with gpt-oss."""
    url = await sim("--time-scale", "0", "--harmony", "--scale-out")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        shown = (await client.post("/tokenize", json=body)).json()["tokens"]
        rendered = (await client.post("/v1/chat/completions/render", json=body)).json()["token_ids"]
        answer = await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    assert answer.json()["prompt_token_ids"] == rendered != shown
