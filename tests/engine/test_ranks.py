"""One engine with two data-parallel ranks: every strategy chooses and sends the rank that has the prefix."""

from __future__ import annotations

import httpx
import pytest
from tests.engine.conftest import both_routable
from tests.engine.pool import EngineKind
from tests.engine.workload import Workload, hit_share, wrong_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(900),
]

KIND = EngineKind(
    args=("--data-parallel-size", "2"), env=(("VLLM_CPU_OMP_THREADS_BIND", "0|1"),), is_real=True
)
"""A core for each rank."""
REQUESTS, WARM_UP, EXACT = 80, 5, 0.99
LEAST_HITS = {"kvaware": 0.4, "prefixaware": 0.4, "session": 0.4}


@pytest.mark.engines(KIND)
@pytest.mark.parametrize("strategy", LEAST_HITS)
async def test_prompts_meet_their_prefix_in_one_of_two_ranks(
    strategy, leased, run_gateway, words, capsys
) -> None:
    (engine,) = leased
    async with run_gateway([engine], strategy, "--set", "tokens.timeout_ms=5000") as gateway:
        await both_routable(gateway.url, 1)
        workload = Workload(gateway.url, words, "ranks")
        async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
            await workload.run(http, REQUESTS)

    log = workload.log[WARM_UP:]
    wrong, hits = wrong_of(log), hit_share(log)
    with capsys.disabled():
        print(
            f"\n{strategy}: {hits:.3f} of the prompt tokens were hits, {len(wrong)} of {len(log)} wrong "
            f"{wrong[:8]}"
        )
    assert hits >= LEAST_HITS[strategy]
    if strategy == "kvaware":
        assert {each.reason for each in log} == {"only_worker"}  # the map chose the rank only
        assert len(wrong) <= (1 - EXACT) * len(log)
