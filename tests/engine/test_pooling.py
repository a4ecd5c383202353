"""Two engines with an encoder model, which has no prefix cache to speak of, share the requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import httpx
import pytest
from tests.engine.conftest import both_routable
from tests.engine.models import write_model
from tests.engine.pool import EngineKind, Model

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


def _bert(folder) -> None:
    write_model("bert", folder)


KIND = EngineKind(
    Model("bert", _bert),
    blocks=8,
    block_size=None,
    max_model_len=512,
    args=("--runner", "pooling"),
    generates=False,
    has_events=False,
)
REQUESTS, AT_ONCE = 120, 8


@pytest.mark.engines(KIND, replace(KIND, number=1, core=1))
@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_encoder_engines_share_the_requests(strategy, leased, run_gateway, words) -> None:
    for engine, name in zip(leased, "ab", strict=True):
        engine.name = name
    gate = asyncio.Semaphore(AT_ONCE)
    async with run_gateway(leased, strategy) as gateway:
        await both_routable(gateway.url, len(leased), ("cache map", "exact tokens", "kv_events", "events"))
        async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=120) as http:

            async def embed(number: int) -> str:
                text = f"text {number}" + "".join(words[:100])
                async with gate:
                    answer = await http.post("/v1/embeddings", json={"model": "tiny", "input": text})
                assert answer.status_code == 200, answer.text
                return answer.headers["x-kvroute-worker"]

            served = Counter(await asyncio.gather(*map(embed, range(REQUESTS))))

    assert max(served.values()) <= 1.2 * min(served.values()), served
    assert len(served) == 2
