"""An engine with two served names is one model: a hit does not depend on the name of the request before."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from tests.engine.conftest import both_routable
from tests.engine.pool import EngineKind
from tests.engine.workload import Workload, by_map, hit_share, wrong_of

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

KIND = EngineKind(args=("--served-model-name", "tiny", "sonnet"))
REQUESTS, WARM_UP, EXACT = 60, 5, 0.99


@pytest.mark.engines(KIND, replace(KIND, number=1, core=1))
@pytest.mark.parametrize("strategy", ["kvaware", "prefixaware"])
async def test_two_names_of_one_engine_share_their_hits(strategy, leased, run_gateway, words, capsys) -> None:
    for engine, name in zip(leased, "ab", strict=True):
        engine.name = name
    async with run_gateway(leased, strategy, "--set", "tokens.timeout_ms=5000") as gateway:
        await both_routable(gateway.url, len(leased))
        workload = Workload(gateway.url, words, "names", models=("tiny", "sonnet"))
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            await workload.run(http, REQUESTS)

    log = workload.log[WARM_UP:]
    decided, wrong, hits = by_map(log), wrong_of(by_map(log)), hit_share(log)
    with capsys.disabled():
        print(
            f"\n{strategy}: {hit_share(log):.3f} of the prompt tokens were hits, {len(wrong)} wrong {wrong}"
        )
    assert hits >= 0.4
    if strategy == "kvaware":
        assert len(decided) >= 0.95 * len(log)
        assert len(wrong) <= (1 - EXACT) * len(decided)
