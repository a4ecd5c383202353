from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvroute.sim.app import RunningSim, run_sim
from kvroute.sim.options import SimOptions


@pytest.fixture
def options() -> SimOptions:
    """Options of the worker; a module or a test may override this fixture."""
    return SimOptions(models=("sim-model", "alias"), loras={"ada": "sim-model"}, time_scale=0)


@pytest.fixture
async def sim(options: SimOptions) -> AsyncIterator[RunningSim]:
    async with asyncio.timeout(60), run_sim(options) as running:
        yield running


@pytest.fixture
async def http(sim: RunningSim) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=sim.url, timeout=20, verify=False) as client:
        yield client


@pytest.fixture
async def client(sim: RunningSim) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{sim.url}/v1", api_key="x", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
async def claude(sim: RunningSim) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=sim.url, api_key="x", max_retries=0, timeout=20) as made:
        yield made


@pytest.fixture
def weather() -> dict[str, Any]:
    """A function with one required and one optional argument."""
    return {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
