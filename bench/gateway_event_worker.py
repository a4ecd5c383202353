"""A simulated vLLM worker with the test model's tokenizer and chat template, so that prompts have exact ids.

    python bench/gateway_event_worker.py PORT FOLDER MODEL

kvroute's simulator (real HTTP, real cache, KV events over ZMQ, no simulated time) has its own simple
tokenizer. This worker tokenizes prompts and `/tokenize` with the files in FOLDER, which the gateway under
test also reads.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

import kvroute.sim.app as sim_text
import kvroute.sim.completions
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.sim.app import run_sim
from kvroute.sim.http import ApiError
from kvroute.sim.options import SimOptions
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model
from kvroute.tokens.options import Inexact


class ModelTokens:
    """Replaces the simulator's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = LocalTokenizer(load_model(folder), SegmentCache(256 * 1024 * 1024))

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        generate: bool = True,
        open_end: bool = False,
    ) -> array[int]:
        body = {
            "messages": messages,
            "add_generation_prompt": generate,
            "continue_final_message": open_end,
            **({"tools": tools} if tools else {}),
        }
        return self._ids("/v1/chat/completions", body)

    def text(self, text: str) -> array[int]:
        return self._ids("/v1/completions", {"prompt": text})

    def _ids(self, path: str, body: dict[str, Any]) -> array[int]:
        request = parse_request(ENDPOINTS[path], json.dumps({"model": "any", **body}).encode())
        try:
            (ids,) = self._tokenizer.prompts(request)
        except Inexact as error:
            raise ApiError.invalid(f"not tokenized: {error.reason}") from None
        return array("I", ids)


async def serve(port: int, model: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    options = SimOptions(
        port=port, models=(model,), time_scale=0, recorded_requests=0, capacity_tokens=4_000_000
    )
    async with run_sim(options):
        await stop.wait()


def main() -> None:
    port, folder, model = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    tokens = ModelTokens(folder)
    # The simulator has no seam for a tokenizer, because only this benchmark needs one.
    for module, name, replacement in (
        (kvroute.sim.completions, "chat_tokens", tokens.chat),
        (sim_text, "chat_tokens", tokens.chat),
        (sim_text, "encode", tokens.text),
    ):
        setattr(module, name, replacement)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(port, model))


if __name__ == "__main__":
    main()
