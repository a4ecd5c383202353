"""Prefill and decode workers: what happens to the blocks of a prompt that no decode worker takes."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from tests.support.workers import scripted_worker

BODY = {"prompt": "A long prompt for two workers. " * 200, "max_tokens": 2}
KEPT = re.compile(r"^kvroute_handover_blocks_kept_total (\S+)$", re.MULTILINE)


@pytest.mark.parametrize("decoders", [1, 2])
async def test_blocks_of_decode_workers_that_break_off_are_counted(serve, sim, processes, decoders):
    """Each decode worker closes the connection before its head, also when it should only free the blocks."""
    prefill = await sim("--time-scale", "0", "--nixl", "--model", "m")
    broken = [await processes.enter_async_context(scripted_worker()) for _ in range(decoders)]
    for worker in broken:
        worker.refuses_posts = True
    workers = [f"{{id: p, url: '{prefill}', role: prefill}}"]
    workers += [f"{{id: d{place}, url: '{each.url}', role: decode}}" for place, each in enumerate(broken)]
    gateway = await serve(
        "--set", f"fleet.workers=[{', '.join(workers)}]", "--set", "fleet.health.failures_to_eject=50",
        "--set", "routing.prefill_decode.threshold_tokens=256", workers=1 + decoders,
    )  # fmt: skip

    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client:
        answer = await client.post("/v1/completions", json=BODY)
        # With two, two workers have begun to compute it: the prefill worker is no third one.
        assert answer.status_code == (200 if decoders == 1 else 502)
        if decoders == 1:
            assert answer.headers["x-kvroute-worker"] == "p"
        async with asyncio.timeout(30):
            while not (found := KEPT.search((await client.get("/metrics")).text)) or float(found[1]) < 1:
                await asyncio.sleep(0.05)
    assert float(found[1]) == 1
