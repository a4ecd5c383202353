"""Limits of the queue, as vLLM's --max-num-queued-reqs and --max-num-queued-tokens."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.support.waiting import until

from kvroute.sim.app import RunningSim
from kvroute.sim.options import SimOptions

ASK = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture
def options(request: pytest.FixtureRequest) -> SimOptions:
    return SimOptions(time_scale=0, **request.param)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_queued_requests": 2}, "The engine is currently busy"),
        ({"max_queued_tokens": 4}, "prefill token backlog limit"),
    ],
    indirect=["options"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_full_queue_is_answered_503_without_retry_after(
    sim: RunningSim, http: httpx.AsyncClient, text: str, path: str
) -> None:
    sim.worker.driver.pause()
    asked = [asyncio.create_task(http.post("/v1/completions", json=ASK)) for _ in range(2)]
    await until(
        lambda: sim.engine.waiting >= 1 and sum(task.done() for task in asked) + sim.engine.waiting == 2
    )

    refused = await http.post(path, json={**ASK, "input": "hello"})
    sim.worker.driver.resume()
    await asyncio.gather(*asked)

    assert refused.status_code == 503
    assert text in refused.json()["error"]["message"]
    assert "retry-after" not in refused.headers
    assert (await http.post(path, json={**ASK, "input": "hello"})).status_code == 200
