"""What `server.isolation: per-key` costs in cache hits: tenants with one system prompt, simulated workers.

    python bench/tenants.py

Four simulated workers, the strategy `prefixaware`. Each conversation has the shared system prompt and three
turns of its own tokens; all conversations together are the same for every number of tenants. Prints the share
of prompt tokens that the workers served from their caches. No times are measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from kvroute.app.runtime import Runtime
from kvroute.app.server import GatewayServer, uvicorn_config
from kvroute.config.config import Config
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions

WORKERS, CONVERSATIONS, TURNS = 4, 96, 3
SYSTEM_TOKENS, TURN_TOKENS = 2048, 256
SEED = 1


def prompts() -> list[list[list[int]]]:
    """The prompts of every conversation, turn by turn."""
    chooser = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [chooser.randrange(10, 30_000) for _ in range(count)]

    system = tokens(SYSTEM_TOKENS)
    found = []
    for _ in range(CONVERSATIONS):
        turns, prompt = [], system
        for _ in range(TURNS):
            prompt = prompt + tokens(TURN_TOKENS)
            turns.append(prompt)
        found.append(turns)
    return found


async def cached_share(tenants: int, isolation: str, folder: Path) -> float:
    """The share of prompt tokens from caches, over all conversations."""
    names = [f"t{number}" for number in range(tenants)]
    keys = [{"name": name, "hash": "sha256:" + hashlib.sha256(name.encode()).hexdigest()} for name in names]
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    async with AsyncExitStack() as stack:
        sims = [
            await stack.enter_async_context(run_sim(SimOptions(time_scale=0, capacity_tokens=1_000_000)))
            for _ in range(WORKERS)
        ]
        server = {"port": 0, "client_keys": {"file": str(file)}, "isolation": isolation}
        workers = [{"id": f"w{number}", "url": sim.url} for number, sim in enumerate(sims)]
        sections: dict[str, Any] = {"server": server, "fleet": {"workers": workers}}
        config = Config.model_validate({**sections, "logging": {"requests": False}})
        runtime = await stack.enter_async_context(Runtime(config))
        settings = uvicorn_config(config, runtime)
        gateway = GatewayServer(settings, runtime, config.server)
        settings.load()
        gateway.lifespan = settings.lifespan_class(settings)
        await gateway.startup()
        loop = asyncio.create_task(gateway.main_loop())
        host, port = gateway.servers[0].sockets[0].getsockname()[:2]
        client = httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60, trust_env=False)
        for _ in range(600):
            states = (await client.get("/ready")).json()["workers"].values()
            if list(states) == ["healthy"] * WORKERS:
                break
            await asyncio.sleep(0.05)
        cached = total = 0
        conversations = prompts()
        for turn in range(TURNS):
            for number, turns in enumerate(conversations):
                answer = await client.post(
                    "/v1/completions",
                    json={"model": "sim-model", "prompt": turns[turn], "max_tokens": 1},
                    headers={"authorization": f"Bearer {names[number % tenants]}"},
                )
                usage = answer.raise_for_status().json()["usage"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                total += usage["prompt_tokens"]
        gateway.should_exit = True
        await loop
        await client.aclose()
        await gateway.shutdown()
    return cached / total


async def main() -> None:
    print(f"{'tenants':>7}  {'none':>6}  {'per-key':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for tenants in (1, 4, 16, 96):
            shares = [await cached_share(tenants, each, Path(folder)) for each in ("none", "per-key")]
            print(f"{tenants:>7}  {shares[0]:>6.1%}  {shares[1]:>7.1%}")


if __name__ == "__main__":
    asyncio.run(main())
