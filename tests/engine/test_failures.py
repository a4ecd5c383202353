"""A worker dies by SIGKILL in the middle of its work, and comes back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import openai
import pytest
from tests.engine.conftest import routable_gateway

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

MODEL = "tiny"
CLIENTS = 16
REQUESTS_AFTER_THE_KILL = 4


class Load:
    """Clients that ask one question after another. Mutable: the counts and the signal to finish."""

    def __init__(self, client: openai.AsyncOpenAI, words: list[str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.killed = False
        self._client = client
        self._words = words

    async def send_requests(self, seed: int) -> None:
        chooser = random.Random(seed)
        left = REQUESTS_AFTER_THE_KILL
        while left:
            left -= self.killed
            await self._send(chooser, stream=chooser.random() < 0.5)

    async def _send(self, chooser: random.Random, *, stream: bool) -> None:
        prompt = "".join(chooser.choices(self._words, k=200))
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
        has_started = False
        try:
            if not stream:
                answer = await self._client.completions.create(**asked)
                assert answer.usage.completion_tokens == 40
            else:
                async for _ in await self._client.completions.create(**asked, stream=True):
                    has_started = True
        except openai.APIStatusError as exc:
            self.outcomes[f"lost: {exc.status_code}"] += 1
        except openai.APIConnectionError:
            self.outcomes["lost: connection"] += 1
        except openai.APIError:
            # An error event in the stream: the only loss that is allowed.
            self.outcomes["cut" if has_started else "lost: error event before any answer"] += 1
        else:
            self.outcomes["answered"] += 1


async def test_killing_a_worker_loses_no_request_that_had_not_started(
    own_engines, run_gateway, words, capsys
) -> None:
    doomed, survivor = own_engines
    async with (
        routable_gateway(run_gateway, own_engines) as gateway,
        gateway.openai() as client,
        httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as http,
    ):
        load = Load(client, words)
        async with asyncio.TaskGroup() as group:
            for seed in range(CLIENTS):
                group.create_task(load.send_requests(seed))
            async with asyncio.timeout(60):
                while await doomed.metric("vllm:num_requests_running") < 2:
                    await asyncio.sleep(0.01)
            doomed.process.kill()
            await doomed.process.wait()
            load.killed = True

        with capsys.disabled():
            print(f"\nSIGKILL of a worker under the load of {CLIENTS} clients: {dict(load.outcomes)}")
        assert not {outcome for outcome in load.outcomes if outcome.startswith("lost")}
        assert load.outcomes["answered"] >= CLIENTS * REQUESTS_AFTER_THE_KILL - load.outcomes["cut"]
        assert load.outcomes["cut"] <= CLIENTS
        assert (await http.get("/ready")).json()["workers"][doomed.name] == "unhealthy"

        await doomed.restart()
        async with asyncio.timeout(60):
            while (await http.get("/ready")).json()["workers"][doomed.name] != "healthy":
                await asyncio.sleep(0.05)
        used = set()
        async with asyncio.timeout(60):
            while used != {doomed.name, survivor.name}:
                prompts = [{"model": MODEL, "prompt": [400 + n] * 200, "max_tokens": 1} for n in range(8)]
                answers = await asyncio.gather(*(http.post("/v1/completions", json=each) for each in prompts))
                used |= {answer.headers["x-kvroute-worker"] for answer in answers}
