"""Next turns of chats are tokenized from memory, for templates in the manner of seven public models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import pytest
from tests.support.chat_templates import MANNERS, write_model
from tests.support.engines import MODEL, FakeEngine
from tests.support.sockets import tcp_server
from tests.support.waiting import until

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model

TURNS = 20


@dataclass
class TokenizingEngine(FakeEngine):
    """An engine whose `/tokenize` renders every chat as a whole."""

    tokenizer: LocalTokenizer | None = None

    async def _answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        if target != "/tokenize":
            return await super()._answer(method, target, headers, body)
        assert self.tokenizer is not None
        path = "/v1/chat/completions" if "messages" in json.loads(body) else "/v1/completions"
        (ids,) = self.tokenizer.prompts(parse_request(ENDPOINTS[path], body))
        return 200, json.dumps({"tokens": list(ids), "count": len(ids), "max_model_len": 1 << 17}).encode()


@pytest.mark.parametrize("manner", MANNERS)
async def test_most_turns_of_a_long_chat_are_served_from_memory(serve, processes, tmp_path, manner):
    folder = write_model(manner, tmp_path / manner)
    engine = TokenizingEngine(tokenizer=LocalTokenizer(load_model(folder), SegmentCache(1_000_000)))
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
