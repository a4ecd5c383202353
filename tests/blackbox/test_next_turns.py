"""Next turns of chats are tokenized from memory, for templates in the manner of seven public models."""

from __future__ import annotations

import httpx
import pytest
from tests.support.chat_templates import MANNERS, write_model
from tests.support.engines import MODEL
from tests.support.sockets import tcp_server
from tests.support.tokenizing_workers import TokenizingEngine
from tests.support.waiting import until

TURNS = 20


@pytest.mark.parametrize("manner", MANNERS)
async def test_most_turns_of_a_long_chat_are_served_from_memory(serve, processes, tmp_path, manner):
    folder = write_model(manner, tmp_path / manner)
    engine = TokenizingEngine.of(folder)
    port = await processes.enter_async_context(tcp_server(engine.serve))
    worker = f"http://127.0.0.1:{port}"
    running = await serve(
        *("--worker", worker, "--strategy", "kvaware", "--set", f"tokens.models.{MODEL}={folder}")
    )
    messages = [{"role": "system", "content": "You are helpful. " * 90}]
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:

        async def has_tokens() -> bool:
            page = (await client.get("/ready")).text
            return "not checked yet" not in page and "no exact tokens" not in page

        await until(has_tokens, within_s=60, every_s=0.05)
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Question {turn}? " * 40})
            body = {"model": MODEL, "messages": messages, "max_tokens": 1}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            messages.append({"role": "assistant", "content": f"Answer {turn}. " * 40})
        page = (await client.get("/metrics")).text

    counts = {
        outcome: float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        for outcome in ("continued", "compared", "differed")
        if line.startswith("kvroute_next_turns_total") and f'outcome="{outcome}"' in line
    }
    assert counts.get("differed", 0) == 0
    assert counts.get("continued", 0) >= 0.6 * TURNS, counts
