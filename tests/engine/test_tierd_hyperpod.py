"""HyperPod's rendering with tierd in the daemon's place: LMCache inside two engines, one daemon for both.

The connector, the keys and the settings are those of HyperPod's image; the engine is vLLM's on a CPU, for
which `classic_shim` adds the copy between engine and cache that LMCache has only for GPUs.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.engine.endpoints import ROOT, Endpoint, Run

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

SHIM = Path(__file__).with_name("classic_shim")
CHUNK, BLOCK = 256, 32
# The last chunk is not full, but consists of whole blocks, as the shim needs it.
FIRST_TOKENS, MORE_TOKENS = 5 * CHUNK + 7 * BLOCK, 3 * BLOCK
SHARED = FIRST_TOKENS // CHUNK * CHUNK
"""A longer prompt finds whole chunks only."""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """configs/tieredstorage.yaml with LMCache inside the engines, as HyperPod's image has it."""
    document = yaml.safe_load((ROOT / "configs" / "tieredstorage.yaml").read_text())
    document["metadata"]["name"] = "hyperpod"
    document["spec"]["intelligentRoutingSpec"]["routingStrategy"] = "kvaware"
    document["spec"]["worker"] = {"environmentVariables": [{"name": "PYTHONPATH", "value": str(SHIM)}]}
    document["x-kvroute"]["lmcache"] = {"mode": "classic", "chunkSize": CHUNK}
    file = tmp_path / "hyperpod.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def token_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 7000), k=count)


async def ask(endpoint: Endpoint, prompt: list[int]) -> tuple[str, str, int, int]:
    """Worker, text, cached tokens and predicted tokens."""
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = await endpoint.http.post(f"{endpoint.url}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found, headers = reply.json(), reply.headers
    cached = (found["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return (
        headers["x-kvroute-worker"],
        found["choices"][0]["text"],
        cached,
        int(headers["x-kvroute-hit-tokens"]),
    )


async def until_stored(endpoint: Endpoint, entries: int) -> None:
    url = endpoint.state_of("tierd").url.replace("/health", "/metrics")
    async with asyncio.timeout(60):
        stored = 0
        while stored < entries:
            await asyncio.sleep(0.05)
            page = (await endpoint.http.get(url)).text
            (value,) = re.findall(r"^kvroute_tierd_objects (\S+)$", page, re.MULTILINE)
            stored = int(float(value))


async def until_known(endpoint: Endpoint, prompt: list[int], worker: str) -> None:
    """Until the gateway knows that the worker finds all of the prompt, and has its whole blocks itself."""
    tiers: dict[str, int] = {}
    blocks, usable = (len(prompt) - 1) // BLOCK * BLOCK, len(prompt) - 1
    async with asyncio.timeout(60):
        while tiers.get("gpu") != blocks or sum(tiers.values()) != usable:
            await asyncio.sleep(0.05)
            place: dict[str, Any] = await endpoint.place(prompt, worker)  # type: ignore[arg-type]
            tiers = place.get("tiers", {})


async def test_one_engine_finds_in_tierd_what_the_other_computed(
    run_endpoint: Run, spec: Path, report: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shim copies whole blocks only, and entries in tierd are counted.
    monkeypatch.setenv("KVROUTE__TOKENS__COMPUTED_SAMPLES", "false")
    first = token_ids(1, FIRST_TOKENS)
    longer = first + token_ids(2, MORE_TOKENS)
    async with run_endpoint(str(spec)) as endpoint:
        computed_on, _, cached, predicted = await ask(endpoint, first)
        assert (cached, predicted) == (0, 0)
        # LMCACHE_SAVE_UNFULL_CHUNK: the last chunk is there, too.
        await until_stored(endpoint, FIRST_TOKENS // CHUNK + 1)

        async with endpoint.drained(computed_on):
            other, text, cached, predicted = await ask(endpoint, longer)
            report(f"tierd, classic: {other} found {cached} of {len(longer)} tokens, predicted {predicted}")
            assert other != computed_on
            # The gateway follows what tierd holds: LMCache in the engine reports only its first tier.
            assert (cached, predicted) == (SHARED, SHARED)

            await until_known(endpoint, longer, other)
            again = await ask(endpoint, longer)
            # LMCache also has the last chunk, which is not full: all tokens but the last are found.
            assert again == (other, text, len(longer) - 1, len(longer) - 1)

        async with endpoint.drained(other):
            # The first engine computed the beginning, and finds the rest in tierd.
            assert await ask(endpoint, longer) == (computed_on, text, len(longer) - 1, len(longer) - 1)
