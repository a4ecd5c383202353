"""Whole endpoints, as `kvroute up -f` runs them: what two engines have computed, and share or do not.

With Redis as the tier that they share: test_kvaware_tiers.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.endpoints import SHARED_TOKENS, Run, passed_on_through_l2, served_by_l1

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]


async def test_without_a_second_tier_each_worker_computes_for_itself(
    run_real_endpoint: Run, prompt: Callable[[int], str]
) -> None:
    """With engines and LMCache servers that are started, and restarted, as a user's are."""
    async with run_real_endpoint("redis-l2.yaml", enableL2Cache=False) as endpoint:
        first = await endpoint.ask(prompt(1))
        second = await endpoint.ask_the_other(prompt(1), than=first.worker)

        assert second.worker != first.worker
        assert (first.cached_tokens, second.cached_tokens) == (0, 0)
        assert second.text == first.text
        await served_by_l1(endpoint, prompt(1), first.worker, first.text)

        # An engine that dies comes back, and finds in its server's memory what it had computed.
        await endpoint.kill(first.worker)
        await endpoint.until_healthy()
        again = await endpoint.ask_the_other(prompt(1), than=second.worker)
        assert (again.worker, again.text) == (first.worker, first.text)
        assert again.cached_tokens == SHARED_TOKENS


async def test_tierd_serves_one_workers_blocks_to_another(
    run_endpoint: Run, prompt: Callable[[int], str], report: Callable[[str], None]
) -> None:
    async with run_endpoint("tieredstorage.yaml") as endpoint:
        await passed_on_through_l2(endpoint, prompt(1), l2_name="sagemaker-hyperpod", report=report)
        await endpoint.kill("tierd")
        await passed_on_through_l2(endpoint, prompt(2), l2_name="sagemaker-hyperpod", report=report)
