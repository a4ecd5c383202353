"""A worker whose events are lost and cannot be replayed: the map recovers, and contains only true entries."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx
import pytest
from tests.engine.event_tap import EventTap
from tests.engine.pool import EngineKind

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

MODEL = "tiny"
BLOCK = 32
POOL_BLOCKS = 40
BUFFER_STEPS = 2
PROBE_S = 0.2


FORGETFUL = EngineKind(blocks=POOL_BLOCKS, buffer_steps=BUFFER_STEPS)
"""It can repeat its last two batches of events only."""


class Asking:
    """One-token completions of token ids, at the engine itself or through a gateway."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http = http
        self.url = url

    async def __call__(self, ids: list[int]) -> tuple[int, int]:
        """Tokens of the prompt that were cached, and that were predicted to be (-1 past the gateway)."""
        body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "temperature": 0}
        answer = await self.http.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        return cached, int(answer.headers.get("x-kvroute-hit-tokens", -1))

    async def map(self) -> dict[str, Any]:
        """What the gateway believes of its only worker."""
        text = (await self.http.get(f"{self.url}/metrics")).text
        held = re.search(r'^kvroute_map_held_blocks\{.*tier="gpu".*\} (\S+)$', text, re.MULTILINE)
        orphans = re.search(r"^kvroute_map_orphan_blocks\{.*\} (\S+)$", text, re.MULTILINE)
        trust = re.search(r'^kvroute_map_trust\{.*trust="(\w+)".*\} 1.0$', text, re.MULTILINE)
        assert held is not None
        assert orphans is not None
        assert trust is not None
        return {
            "held": int(float(held.group(1))),
            "orphans": int(float(orphans.group(1))),
            "trust": trust.group(1),
        }

    async def until_exact(self) -> None:
        """Until the gateway knows prompts token by token."""
        async with asyncio.timeout(60):
            while True:
                ready = (await self.http.get(f"{self.url}/ready")).json()
                known = not any("exact tokens" in note for note in ready["notes"])
                if known and set(ready["workers"].values()) == {"healthy"}:
                    return
                await asyncio.sleep(0.05)

    async def until(self, **wanted: Any) -> dict[str, Any]:
        """Until the map is like this."""
        seen: dict[str, Any] = {}
        try:
            async with asyncio.timeout(60):
                while not seen or any(seen[name] != value for name, value in wanted.items()):
                    await asyncio.sleep(0.05)
                    seen = await self.map()
        except TimeoutError:
            raise AssertionError(f"the map should be {wanted}, it is {seen}") from None
        return seen


def drawn(name: str, blocks: int) -> list[int]:
    """Token ids of `blocks` blocks, and one more: the last token is never served from the cache."""
    return random.Random(f"repair {name}").choices(range(100, 7000), k=blocks * BLOCK + 1)


@pytest.mark.engines(FORGETFUL)
async def test_lost_blocks_are_placed_by_a_request_and_by_probes(leased, run_gateway, report) -> None:
    (forgetful,) = leased
    ours, others, third = drawn("ours", 9), drawn("others", 8), drawn("third", 4)
    with EventTap(await forgetful.events()) as tap:
        directly = Asking(forgetful.http, forgetful.url)
        async with asyncio.timeout(30):
            while not tap.times_cleared:
                await forgetful.forget()
                await directly([5])
        for prompt in (third, ours[: 6 * BLOCK + 1], others[: 6 * BLOCK + 1]):
            assert await directly(prompt) == (0, -1)
        # All that can be announced again: two blocks after each of two prompts whose events are lost.
        for prompt in (ours[: 8 * BLOCK + 1], others):
            assert await directly(prompt) == (6 * BLOCK, -1)
        # The engine may keep the cores busy that tokenizing wants.
        patient = ("--set", "tokens.timeout_ms=5000")
        options = (*patient, "--set", "kv_events.probe.enabled=false")
        async with run_gateway([forgetful], "kvaware", *options) as gateway:
            through = Asking(forgetful.http, gateway.url)
            await through.until_exact()
            await through.until(held=0, orphans=4, trust="partial")

            # A request continues blocks without a place.
            assert await through(ours) == (8 * BLOCK, 0)

            seen = await through.until(held=9, orphans=2)
            assert (await through(ours))[1] == 9 * BLOCK
            report(f"placed by a request that continued them: {seen}")
        options = (*patient, "--set", f"kv_events.probe.interval_s={PROBE_S}")
        async with run_gateway([forgetful], "kvaware", *options) as gateway:
            through = Asking(forgetful.http, gateway.url)
            await through.until_exact()
            # The last batches of events are those of `others` and of the request above.
            await through.until(held=0, orphans=3, trust="partial")

            # Nothing is computed behind what these find: only the worker can say more.
            assert await through(others) == (8 * BLOCK, 0)
            assert await through(third) == (4 * BLOCK, 0)
            assert await through(ours) == (9 * BLOCK, 0)

            held = tap.held()
            assert len(held) == 9 + 8 + 4
            seen = await through.until(held=len(held), orphans=0)
            for prompt in (ours, others, third):
                found, predicted = await through(prompt)
                assert found == predicted == len(prompt) - 1
            report(f"placed by probes: {seen}")

            # Their names are known again, too: what is evicted is taken out of the map.
            for number in range(POOL_BLOCKS // 8 + 1):
                await directly(drawn(f"filler {number}", 8))
            await through.until(trust="whole")
            now = tap.held()
            assert not held & now
            await through.until(held=len(now), orphans=0)
            for prompt in (ours, others, third):
                assert await through(prompt) == (0, 0)
