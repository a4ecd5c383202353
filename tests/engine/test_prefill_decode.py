"""Prefill and decode on different real engines, whose KV vLLM's NixlConnector moves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.engine.endpoints import ADMIN_KEY
from tests.engine.roles_fleet import CHAT, TOOLS, RolesFleet, choices, greedy_chat, texts_of

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, install_nixl, separate_environment, write_tiny_model
from kvroute.deploy.plan import Engine, HostFacts, UpSpec, plan_up, port_count
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MODEL = "small"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
REQUESTS = int(os.environ.get("PREFILL_DECODE_REQUESTS", "10"))
"""Requests of each kind."""


@dataclass
class Pair(RolesFleet):
    """A prefill and a decode worker with a gateway, as `kvroute up` starts them."""

    async def prompt_tokens_by_source(self) -> tuple[float, float]:
        """Prompt tokens that the decode worker has got by transfer, and those that it has computed."""
        name = "vllm:prompt_tokens_by_source_total"
        return (
            await self.metric("decode-0", name, source="external_kv_transfer"),
            await self.metric("decode-0", name, source="local_compute"),
        )

    async def until_no_block_is_kept(self) -> None:
        async with asyncio.timeout(10):
            while await self.metric("prefill-0", "vllm:kv_cache_usage_perc") > 0:
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(engine_venv: EngineVenv, logs: Path, tmp_path_factory: Any) -> AsyncIterator[Pair]:
    await install_nixl(engine_venv, report=print, clock=SystemClock())
    (gateway_port,) = free_ports(1)
    state = tmp_path_factory.mktemp("up")
    spec = UpSpec(
        engine=Engine.VLLM,
        model=MODEL,
        prefill_workers=1,
        decode_workers=1,
        port=gateway_port,
        state_dir=state,
        engine_venv=engine_venv.path,
    )
    environ = {
        **os.environ,
        "KVROUTE__ADMIN__API_KEY": ADMIN_KEY,
        "KVROUTE__ROUTING__PREFILL_DECODE__THRESHOLD_TOKENS": "512",
    }
    cores = tuple(sorted(os.sched_getaffinity(0)))
    facts = HostFacts(
        environ,
        separate_environment(environ),
        cores,
        (),
        free_ports(port_count(spec, ())),
        (str(engine_venv.script("vllm")),),
    )
    plan = plan_up(spec, facts)
    assert plan.tiny_model is not None
    write_tiny_model(plan.tiny_model, plan.model_folder)
    planned = {each.child.name: each for stage in plan.stages for each in stage}
    processes = {name: ChildProcess(each.child, SystemClock()) for name, each in planned.items()}
    try:
        for stage in plan.stages:
            for each in stage:
                await processes[each.child.name].start()
            for each in stage:
                await processes[each.child.name].wait_ready(each.ready_url, timeout_s=300)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=120, trust_env=False, limits=limits) as http:
            yield Pair(plan, processes, http)
    finally:
        await asyncio.gather(*(each.stop() for each in processes.values() if each.running))


@pytest.fixture(scope="module")
def text(pair: Pair) -> Any:
    return texts_of(pair.plan)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return greedy_chat(MODEL, text, **more)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True},
    "two answers": {"n": 2, "temperature": 1, "top_k": 1},  # greedy sampling takes no n
    "tools": {"tools": TOOLS},
    "guided": {"response_format": {"type": "json_object"}, "max_tokens": 30},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_cold_prompts_arrive_by_transfer_and_answers_are_those_of_one_worker(
    pair: Pair, text: Any, kind: str
) -> None:
    before = await pair.prompt_tokens_by_source()
    prompt_tokens = 0
    for number in range(REQUESTS):
        body = chat(text(f"{kind} {number}", 600 + 40 * number), **KINDS[kind])
        answer = await pair.ask(body)
        alone = await pair.http.post(pair.url("prefill-0") + CHAT, json=body)

        assert answer.headers["x-kvroute-prefill-worker"] == "prefill-0"
        assert answer.headers["x-kvroute-worker"] == "decode-0"
        assert choices(answer) == choices(alone)
        assert "remote_" not in answer.text
        count = {**body, "max_tokens": 1, "stream": False, "n": 1}
        usage = (await pair.http.post(pair.url("prefill-0") + CHAT, json=count)).json()["usage"]
        prompt_tokens += usage["prompt_tokens"]

    moved, computed = (
        now - then for now, then in zip(await pair.prompt_tokens_by_source(), before, strict=True)
    )
    share = moved / prompt_tokens
    print(f"{kind}: {REQUESTS} requests, {share:.3f} of their prompt tokens by transfer")
    # The second answer of a request may find the blocks of the first one on the decode worker.
    assert share >= 0.95
    assert computed <= 0.05 * prompt_tokens * KINDS[kind].get("n", 1)
    await pair.until_no_block_is_kept()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", lambda words: {**GREEDY, "prompt": words}),
        ("/v1/responses", lambda words: {"model": MODEL, "input": words, "max_output_tokens": 12}),
        (
            "/v1/messages",
            lambda words: {**GREEDY, "messages": [{"role": "user", "content": words}]},
        ),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_every_api_hands_over(pair: Pair, text: Any, path: str, body: Any, streamed: bool) -> None:
    before = await pair.metric("decode-0", "vllm:external_prefix_cache_hits_total")

    answer = await pair.ask({**body(text(f"{path} {streamed}", 700)), "stream": streamed}, path)

    assert answer.headers["x-kvroute-prefill-worker"] == "prefill-0"
    assert await pair.metric("decode-0", "vllm:external_prefix_cache_hits_total") - before >= 700
    await pair.until_no_block_is_kept()


async def test_short_follow_ups_stay_on_the_decode_worker(pair: Pair, text: Any) -> None:
    body = chat(text("a chat", 700))
    answer = (await pair.ask(body)).json()
    computed = await pair.metric("prefill-0", "vllm:prompt_tokens_total")

    for turn in range(5):
        body["messages"] += [
            answer["choices"][0]["message"],
            {"role": "user", "content": text(f"turn {turn}", 30)},
        ]
        response = await pair.ask(body)
        answer = response.json()
        assert "x-kvroute-prefill-worker" not in response.headers
        assert response.headers["x-kvroute-worker"] == "decode-0"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 640

    assert await pair.metric("prefill-0", "vllm:prompt_tokens_total") == computed


async def test_clients_that_leave_leave_no_blocks(pair: Pair, text: Any) -> None:
    for number in range(8):
        body = chat(text(f"leaving {number}", 1500), stream=True, max_tokens=500)
        asked = asyncio.create_task(pair.ask(body))
        await asyncio.sleep(0.15 * number)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    await pair.until_no_block_is_kept()


async def test_a_prefill_worker_that_is_killed_costs_no_request(pair: Pair, text: Any) -> None:
    """Runs last: the prefill worker stays dead."""

    async def client(number: int) -> list[int]:
        statuses = []
        for turn in range(6):
            body = chat(text(f"killed {number} {turn}", 650), stream=turn % 2 == 1)
            answer = await pair.http.post(pair.plan.gateway.url + CHAT, json=body)
            statuses.append(answer.status_code if "error" not in answer.text else 599)
        return statuses

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    await asyncio.sleep(1.0)
    pair.processes["prefill-0"].kill()
    statuses = [status for each in clients for status in await each]

    print(f"prefill worker killed: {len(statuses)} requests, {statuses.count(200)} answered")
    assert statuses == [200] * 24
    assert await pair.metric("gateway", "kvroute_handover_fallbacks_total") >= 1
