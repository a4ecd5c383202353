"""The simulated engine does, event by event, what a real vLLM 0.32 did with the same requests."""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from typing import Any

from kvroute.blocks.keys import CacheSpace, block_keys
from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.engine import EngineRequest, SimEngine
from kvroute.wire.vllm import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, decode_batch

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
NAMES = ("vllm-0.32-stores", "vllm-0.32-evict-clear")
BLOCK, POOL = 32, 32


def lines(suffix: str) -> list[Any]:
    return [
        json.loads(line) for name in NAMES for line in (CAPTURES / f"{name}{suffix}").read_text().splitlines()
    ]


def by_tokens(events: list[KvEvent]) -> list[tuple[object, ...]]:
    """Events whose blocks are identified by the tokens up to their end, not by a hash."""
    prefixes: dict[int | bytes, tuple[int, ...]] = {}
    described: list[tuple[object, ...]] = []
    for event in events:
        if isinstance(event, BlockStored):
            prefix = () if event.parent_block_hash is None else prefixes[event.parent_block_hash]
            for place, key in enumerate(event.block_hashes):
                prefix += tuple(event.token_ids[place * BLOCK : (place + 1) * BLOCK])
                prefixes[key] = prefix
            described.append(
                ("stored", prefix, len(event.block_hashes), event.session_id, str(event.extra_keys))
            )
        elif isinstance(event, BlockRemoved):
            described += [("removed", prefixes[key]) for key in event.block_hashes]
        else:
            assert isinstance(event, AllBlocksCleared)
            described.append(("cleared",))
    return described


def requests_of(line: dict[str, Any]) -> list[EngineRequest]:
    """The engine requests of one recorded HTTP request."""
    body = line["body"]
    prompts = [line["prompt_token_ids"]]
    if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], list):
        prompts = body["prompt"]
    salt = body.get("cache_salt")
    requests = []
    for prompt, output in zip(prompts, line["output_token_ids"], strict=True):
        tokens = array("I", prompt + output)
        keys = block_keys(tokens.tobytes(), block_bytes=4 * BLOCK, seed=CacheSpace("", salt or "").seed)
        session = line["headers"].get("X-Session-ID")
        chain = Chain(keys, tokens, cache_salt=salt, session_id=session)
        full = "vllm_xargs" in body
        requests.append(EngineRequest(chain, len(prompt), len(output), report_full=full))
    return requests


def test_the_same_requests_lead_to_the_same_events_evictions_and_hits() -> None:
    engine = SimEngine(PagedCache(POOL, BLOCK, record=True))
    events: list[KvEvent] = []
    for line in lines(".requests.jsonl"):
        if line["path"].startswith("/reset_prefix_cache"):
            assert engine.reset_prefix_cache()
            continue
        requests = requests_of(line)
        for request in requests:
            engine.add(request)
        while engine.begin() is not None:
            events += engine.finish().events
        details = line["usage"]["prompt_tokens_details"]
        assert sum(request.cached_tokens for request in requests) == details["cached_tokens"]
        if details["created_cache_tokens"] is not None:
            assert sum(request.stored_tokens for request in requests) == details["created_cache_tokens"]

    recorded = [base64.b64decode(frame) for line in lines(".jsonl") for frame in line["frames"][2:]]
    real = [event for payload in recorded for event in decode_batch(payload).events]
    assert by_tokens(events) == by_tokens(real)
    assert {kind for kind, *_ in by_tokens(events)} == {"stored", "removed", "cleared"}
