"""The engines that tests share are in one known state, and the check of it would see if they were not."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.engine import pool as pool_module
from tests.engine.adapters import write_adapter
from tests.engine.conftest import PAIR
from tests.engine.event_tap import EventTap
from tests.engine.pool import RESETS, WEIGHTED, Engine, EngineKind, EnginePool, differences, reset

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

CHANGEABLE = EngineKind(
    WEIGHTED,
    blocks=64,
    has_weights=True,
    args=("--enable-lora", "--max-lora-rank", "8"),
    env=(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"),),
)
"""An engine with which a test can do all that `RESETS` undoes."""
SEEN = {
    "requests": "requests are running",
    "sleep": "asleep",
    "adapters": "it serves ['left', 'tiny']",
    "cache": "tokens of an earlier prompt are cached",
}
"""What the check says when a reset was left out."""


async def disturb(engine: Engine, what: str, adapter: Path) -> asyncio.Task[httpx.Response] | None:
    """What a test may leave behind."""
    url = engine.url
    match what:
        case "requests":
            body = {"model": "tiny", "prompt": [7], "max_tokens": 1900, "ignore_eos": True}
            asking = asyncio.create_task(engine.http.post(f"{url}/v1/completions", json=body))
            async with asyncio.timeout(30):
                while not await engine.metric("vllm:num_requests_running"):
                    await asyncio.sleep(0.01)
            return asking
        case "sleep":
            (await engine.http.post(f"{url}/sleep", params={"level": 1})).raise_for_status()
        case "adapters":
            body = {"lora_name": "left", "lora_path": str(adapter)}
            (await engine.http.post(f"{url}/v1/load_lora_adapter", json=body)).raise_for_status()
    return None


@pytest.mark.engines(CHANGEABLE)
@pytest.mark.parametrize("left_out", RESETS)
async def test_the_check_fails_when_one_reset_is_left_out(
    leased: list[Engine], left_out: str, pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,) = leased
    adapter = write_adapter(pool.site.model_folder(WEIGHTED), tmp_path / "adapter", seed=1)
    assert await reset(engine) == []
    if left_out == "requests":
        # The cache cannot be emptied while a request holds blocks of it.
        monkeypatch.setattr(pool_module, "RESETS", {"requests": RESETS["requests"]})
    asking = await disturb(engine, left_out, adapter)

    found = await reset(engine, without=left_out)

    assert any(SEEN[left_out] in what for what in found), found
    if asking is not None:
        await asking
    monkeypatch.undo()
    assert await reset(engine) == []


async def test_the_check_fails_when_an_engine_was_restarted_or_has_ended(
    start_engine, tmp_path: Path
) -> None:
    engine = await start_engine(EngineKind(blocks=64), "restarted")
    assert await differences(engine) == []

    await engine.process.stop()
    assert await differences(engine) == ["it has ended"]

    await engine.restart()
    assert "it was restarted" in await differences(engine)


@pytest.mark.engines(EngineKind(blocks=64))
async def test_an_engine_that_cannot_be_reset_fails_its_test_and_is_replaced(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = EngineKind(blocks=64)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "RESETS", {})
        with pytest.raises(AssertionError, match=r"not in its known state: .* are cached"):
            async with pool.lease([kind]) as (engine,):
                await engine.ask([9] * 40)
    async with pool.lease([kind]) as (new,):
        assert new.url != engine.url
        assert await differences(new) == []


@pytest.mark.full
@pytest.mark.engines(PAIR[0], replace(PAIR[0], is_real=True))
async def test_a_forked_engine_is_the_one_that_vllm_serve_starts(leased: list[Engine]) -> None:
    """The same answers, addresses, metrics and KV events."""
    prompt = {
        "model": "tiny",
        "prompt": list(range(100, 300)),
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 1,
    }
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8, "seed": 3}
    seen = []
    for engine in leased:
        with EventTap(await engine.events()) as tap:
            while not tap.times_cleared:
                await engine.forget()
                await engine.ask([5])
            asked = [
                await engine.http.post(f"{engine.url}/v1/completions", json=prompt),
                await engine.http.post(f"{engine.url}/v1/completions", json=prompt),
                await engine.http.post(f"{engine.url}/v1/chat/completions", json=chat),
            ]
            async with asyncio.timeout(30):
                while len(tap.held()) < 6:
                    await asyncio.sleep(0.02)
        answers = [[answer.json()[part] for part in ("choices", "usage")] for answer in asked]
        routes = (await engine.http.get(f"{engine.url}/openapi.json")).json()["paths"]
        metrics = (await engine.http.get(f"{engine.url}/metrics")).text
        names = re.findall(r"^# TYPE (vllm:\S+) ", metrics, re.MULTILINE)
        seen.append((answers, sorted(routes), sorted(names), tap.held()))

    forked, real = seen

    assert forked == real
