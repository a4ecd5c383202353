"""The simulated engine finds and publishes what real vLLM 0.32 engines of several architectures did."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from tests import recordings

from kvroute.blocks.keys import CacheSpace, block_keys
from kvroute.sim.cache import Chain
from kvroute.sim.engine import EngineRequest, SimEngine
from kvroute.sim.groups import Group, GroupedCache, GroupedEngine, GroupKind, GroupLayout
from kvroute.sim.timing import TimingModel
from kvroute.wire.vllm import BlockRemoved, BlockStored, KvEvent, decode_batch


def layout_of(engine: dict[str, Any]) -> GroupLayout:
    groups = tuple(
        Group(GroupKind(each["kind"]), each["block_size"], each.get("window") or each.get("chunk") or 0)
        for each in engine["groups"]
    )
    return GroupLayout(
        groups,
        retention=engine["retention_interval"],
        match_unit=engine["hash_block_size"],
        drops_last=any(each["eagle"] for each in engine["groups"]),
        drafted_tokens=engine["lookahead_tokens"],
        checkpoints=any(each.get("checkpoint_blocks") for each in engine["groups"]),
    )


def engine_of(engine: dict[str, Any]) -> GroupedEngine:
    layout = layout_of(engine)
    cache = GroupedCache(engine["pool_blocks"] - 1, layout.unit, record=True, layout=layout)
    timing = TimingModel(
        max_batched_tokens=engine["max_num_batched_tokens"], max_sequences=engine["max_num_seqs"]
    )
    return GroupedEngine(cache, timing)


def request_of(asked: recordings.Asked, unit: int) -> EngineRequest:
    tokens = array("I", asked.prompt + asked.answer)
    keys = block_keys(tokens.tobytes(), block_bytes=4 * unit, seed=CacheSpace("", "").seed)
    return EngineRequest(Chain(keys, tokens), len(asked.prompt), len(asked.answer))


def serve(engine: SimEngine, requests: list[EngineRequest]) -> list[KvEvent]:
    events: list[KvEvent] = []
    for request in requests:
        engine.add(request)
    while engine.begin() is not None:
        events += engine.finish().events
    return events


class Named:
    """Gives each engine hash the number of its first appearance: so two engines' events can be compared."""

    def __init__(self) -> None:
        self._numbers: dict[int | bytes | None, int] = {None: -1}

    def __call__(self, key: int | bytes | None) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def describe(self, event: KvEvent) -> tuple[object, ...]:
        if isinstance(event, BlockStored):
            return (
                "stored",
                event.group_idx,
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
                event.block_size,
                self(event.parent_block_hash),
                tuple(self(key) for key in event.block_hashes),
                tuple(event.token_ids),
            )
        assert isinstance(event, BlockRemoved)
        return ("removed", event.group_idx, tuple(self(key) for key in event.block_hashes))


@pytest.mark.parametrize("name", recordings.names())
def test_every_request_finds_what_the_real_engine_found(name: str) -> None:
    recording = recordings.read(name)
    engine = engine_of(recording.engine)
    unit = recording.engine["hash_block_size"]
    wrong = []
    for number, step in enumerate(recording.steps):
        requests = [request_of(asked, unit) for asked in step.requests]
        serve(engine, requests)
        for request, asked in zip(requests, step.requests, strict=True):
            if request.cached_tokens != asked.cached_tokens:
                wrong.append((number, len(asked.prompt), request.cached_tokens, asked.cached_tokens))

    assert wrong == []


@pytest.mark.parametrize("name", recordings.names())
def test_every_request_publishes_what_the_real_engine_published(name: str) -> None:
    recording = recordings.read(name)
    engine = engine_of(recording.engine)
    unit = recording.engine["hash_block_size"]
    ours, theirs = Named(), Named()
    wrong = []
    for number, step in enumerate(recording.steps):
        events = serve(engine, [request_of(asked, unit) for asked in step.requests])
        real = [event for frames in step.messages for event in decode_batch(frames[2]).events]
        if list(map(ours.describe, events)) != list(map(theirs.describe, real)):
            wrong.append(number)

    assert wrong == []
