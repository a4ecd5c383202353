"""Two real workers are restarted one after the other while clients send requests: none fails."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import openai
import pytest
from tests.engine.conftest import routable_gateway
from tests.engine.endpoints import ADMIN_KEY

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

MODEL = "tiny"
CLIENTS = 8
REQUESTS = 500
DRAIN_S = 60


class Clients:
    """Send one request after another until the update is over, at least `REQUESTS` together.

    Mutable: the counts, and `is_updated`.
    """

    def __init__(self, client: openai.AsyncOpenAI, words: list[str]) -> None:
        self.answered = 0
        self.failed: Counter[str] = Counter()
        self.is_updated = False
        self._client = client
        self._words = words

    async def send(self, seed: int) -> None:
        chooser = random.Random(seed)
        while not self.is_updated or self.answered + self.failed.total() < REQUESTS:
            prompt = "".join(chooser.choices(self._words, k=100))
            asked = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
            try:
                if chooser.random() < 0.5:
                    answer = await self._client.completions.create(**asked)
                    assert answer.usage.completion_tokens == 20
                else:
                    chunks = [
                        each async for each in await self._client.completions.create(**asked, stream=True)
                    ]
                    assert chunks[-1].choices[0].finish_reason == "length"
            except (openai.APIError, AssertionError, IndexError) as error:
                self.failed[repr(error)[:200]] += 1
            else:
                self.answered += 1


async def test_a_rolling_restart_of_both_workers_fails_no_request(
    own_engines, run_gateway, words, report
) -> None:
    """As `kubectl rollout restart`: drain, end, start, and the next worker once this one is ready."""
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with (
        routable_gateway(run_gateway, own_engines) as gateway,
        gateway.openai() as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=2 * DRAIN_S, trust_env=False, headers=admin) as http,
    ):
        clients = Clients(client, words)

        async def state_of(name: str) -> str:
            workers: dict[str, str] = (await http.get("/ready")).json()["workers"]
            return workers[name]

        async with asyncio.TaskGroup() as group:
            for seed in range(CLIENTS):
                group.create_task(clients.send(seed))
            for engine in own_engines:
                place = f"/admin/workers/{engine.name}/drain"
                drained = (await http.post(place, params={"wait_s": DRAIN_S})).json()
                assert drained["drained"], drained
                await engine.process.stop()
                await engine.restart()
                assert (await http.delete(place)).is_success
                async with asyncio.timeout(60):
                    while await state_of(engine.name) != "healthy":
                        await asyncio.sleep(0.05)
            clients.is_updated = True

        report(f"rolling restart: {clients.failed.total()} of {clients.answered} requests failed")
        assert not clients.failed
        assert clients.answered >= REQUESTS
