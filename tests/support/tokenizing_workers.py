"""Workers of tests that make token ids with kvroute's own code, in the process of the test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engines import FakeEngine

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model


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

    @classmethod
    def of(cls, folder: Path) -> TokenizingEngine:
        """An engine with the model in `folder`."""
        return cls(tokenizer=LocalTokenizer(load_model(folder), SegmentCache(1_000_000)))


def simulated_ranks(ranks: int) -> AbstractAsyncContextManager[Any]:
    """A simulated worker with data-parallel ranks, whose time does not pass."""
    return run_sim(SimOptions(time_scale=0, data_parallel_size=ranks))
