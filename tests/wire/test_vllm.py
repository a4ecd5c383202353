from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import WireError
from kvroute.wire.vllm import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    Medium,
    decode_batch,
    medium_of,
)
from kvroute.wire.zmq import unpack_live

Capture = Callable[[str], list[list[bytes]]]

LIVE = {
    "vllm-0.32-stores": "map-0.30",
    "vllm-0.32-evict-clear": "map-0.30",
    "vllm-0.32-restart": "map-0.30",
    "vllm-0.32-duplicates": "map-0.30",
    "vllm-0.32-dp2": "map-0.30",
    "vllm-0.32-lora": "map-0.30",
    "lmcache-mp-lmcache-driven": "map-0.30",
    "synthetic-vllm-0.11.1-stores": "array-0.10",
    "synthetic-vllm-0.11.1-evict-clear": "array-0.10",
    "synthetic-vllm-0.19.1-stores": "array-0.19",
    "synthetic-vllm-0.19.1-evict-clear": "array-0.19",
    "synthetic-vllm-0.23.0-stores": "array-0.22",
    "synthetic-vllm-0.23.0-evict-clear": "array-0.22",
}


def payloads(capture: Capture, name: str) -> list[bytes]:
    return [unpack_live(frames).payload for frames in capture(name)]


@pytest.mark.parametrize(("name", "dialect"), LIVE.items())
def test_captured_batches_decode_whole_and_encode_to_the_same_bytes(
    capture: Capture, name: str, dialect: str
) -> None:
    for payload in payloads(capture, name):
        batch = decode_batch(payload)

        assert (batch.unknown_events, batch.unknown_fields) == (0, 0)
        assert batch.dialect == dialect.split("-")[0]
        assert DIALECTS[dialect].encode(batch.ts, batch.events, batch.dp_rank) == payload


def test_a_captured_conversation_has_its_blocks_in_a_chain(capture: Capture) -> None:
    batches = [decode_batch(payload) for payload in payloads(capture, "vllm-0.32-stores")]
    stored = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]

    first, second, third = stored[:3]

    assert first.parent_block_hash is None
    assert second.parent_block_hash == first.block_hashes[-1]
    assert third.parent_block_hash == second.block_hashes[-1]
    assert len(first.token_ids) == first.block_size * len(first.block_hashes) == 128
    assert {event.session_id for event in stored} == {None, "sess-42"}
    assert any(event.extra_keys == [["tenant-A"], None, None, None] for event in stored)


@pytest.mark.parametrize("release", ["0.11.1", "0.19.1", "0.23.0"])
def test_older_layouts_have_the_same_blocks_as_the_recording(capture: Capture, release: str) -> None:
    def blocks(name: str) -> list[tuple[object, ...]]:
        return [
            (type(e).__name__, getattr(e, "block_hashes", None), getattr(e, "token_ids", None))
            for payload in payloads(capture, name)
            for e in decode_batch(payload).events
        ]

    assert blocks(f"synthetic-vllm-{release}-stores") == blocks("vllm-0.32-stores")
    assert blocks(f"synthetic-vllm-{release}-evict-clear") == blocks("vllm-0.32-evict-clear")


def test_byte_hashes_ranks_adapters_and_cpu_blocks_come_through(capture: Capture) -> None:
    duplicates = [decode_batch(p) for p in payloads(capture, "vllm-0.32-duplicates")]
    ranks = {decode_batch(p).dp_rank for p in payloads(capture, "vllm-0.32-dp2")}
    lora = [e for p in payloads(capture, "vllm-0.32-lora") for e in decode_batch(p).events]
    tiers = [
        medium_of(event.medium)
        for payload in payloads(capture, "lmcache-mp-lmcache-driven")
        for event in decode_batch(payload).events
        if isinstance(event, BlockStored | BlockRemoved)
    ]

    assert isinstance(duplicates[0].events[0], AllBlocksCleared)
    assert all(
        isinstance(key, bytes) and len(key) == 32
        for batch in duplicates
        for event in batch.events
        if isinstance(event, BlockStored | BlockRemoved)
        for key in event.block_hashes
    )
    assert ranks == {0, 1}
    assert [(e.lora_name, e.lora_id) for e in lora if isinstance(e, BlockStored)] == [
        (None, None),
        ("ada", 1),
        ("ada", 1),
    ]
    assert set(tiers) == {Medium.GPU, Medium.CPU}


HASHES = st.one_of(st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32))
TEXT = st.one_of(st.none(), st.text(max_size=5))
SMALL = st.one_of(st.none(), st.integers(0, 9))
STORED = st.builds(
    BlockStored,
    block_hashes=st.lists(HASHES, min_size=1, max_size=3),
    parent_block_hash=st.one_of(st.none(), HASHES),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=8),
    block_size=st.integers(0, 512),
    lora_id=SMALL,
    medium=st.sampled_from([None, "GPU", "CPU", "STORAGE", "cpu"]),
    lora_name=TEXT,
    extra_keys=st.one_of(st.none(), st.lists(st.one_of(st.none(), st.lists(TEXT, max_size=2)), max_size=3)),
    group_idx=SMALL,
    kv_cache_spec_kind=TEXT,
    kv_cache_spec_sliding_window=SMALL,
    locality=TEXT,
    ownership=TEXT,
    session_id=TEXT,
)
REMOVED = st.builds(
    BlockRemoved,
    block_hashes=st.lists(HASHES, min_size=1, max_size=3),
    medium=TEXT,
    group_idx=SMALL,
    locality=TEXT,
    ownership=TEXT,
)
EVENTS = st.lists(st.one_of(STORED, REMOVED, st.just(AllBlocksCleared())), max_size=4)
RANKS = st.one_of(st.none(), st.integers(0, 7))


@pytest.mark.parametrize("dialect", ["map-0.30", "batch-map"])
@given(events=EVENTS, rank=RANKS)
def test_the_newest_dialects_bring_back_every_event(
    dialect: str, events: list[KvEvent], rank: int | None
) -> None:
    batch = decode_batch(DIALECTS[dialect].encode(1.5, events, rank))

    assert (batch.ts, batch.events, batch.dp_rank) == (1.5, events, rank)


@pytest.mark.parametrize("dialect", DIALECTS)
@given(events=EVENTS, rank=RANKS)
def test_every_dialect_brings_back_the_fields_that_it_knows(
    dialect: str, events: list[KvEvent], rank: int | None
) -> None:
    encode = DIALECTS[dialect].encode

    batch = decode_batch(encode(1.5, events, rank))

    assert [type(event) for event in batch.events] == [type(event) for event in events]
    assert encode(batch.ts, batch.events, batch.dp_rank) == encode(1.5, events, rank)
    assert (batch.unknown_events, batch.unknown_fields) == (0, 0)


STORE_MAP = {
    "type": "BlockStored",
    "block_hashes": [7],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
}
STORE_ROW = ["BlockStored", [7], None, [1, 2], 2]


def test_missing_optional_fields_take_their_defaults() -> None:
    for event in (STORE_MAP, STORE_ROW):
        batch = decode_batch(msgspec.msgpack.encode([1.0, [event]]))

        assert batch.events == [BlockStored([7], None, [1, 2], 2)]
        assert batch.dp_rank is None


def test_unknown_fields_and_event_types_are_skipped_and_counted() -> None:
    new_map = {**STORE_MAP, "planet": "mars"}
    full_row = [*STORE_ROW, None, "GPU", None, None, 0, None, None, None, None, None, None, "mars", 9]
    for event, strange in ((new_map, {"type": "BlockMoved", "to": 1}), (full_row, ["BlockMoved", 1])):
        batch = decode_batch(msgspec.msgpack.encode([1.0, [event, strange], 0]))

        assert [type(e) for e in batch.events] == [BlockStored]
        assert batch.unknown_events == 1
        assert batch.unknown_fields == (1 if event is new_map else 2)


def test_unknown_parts_of_a_batch_are_counted() -> None:
    as_map = {"ts": 1, "events": [STORE_MAP], "data_parallel_rank": 3, "new": 1}
    assert decode_batch(msgspec.msgpack.encode(as_map)).unknown_fields == 1
    for event in (STORE_ROW, STORE_MAP):
        assert decode_batch(msgspec.msgpack.encode([1, [event], 3, "new"])).unknown_fields == 1


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        [],
        [1.0],
        ["soon", []],
        [1.0, None],
        [1.0, [7]],
        [1.0, [{}]],
        [1.0, [[]]],
        [1.0, [[7]]],
        [1.0, [{"type": 7}]],
        [1.0, [{"type": "BlockStored"}]],
        [1.0, [{**STORE_MAP, "token_ids": ["a"]}]],
        [1.0, [{**STORE_MAP, "token_ids": [-1]}]],
        [1.0, [{**STORE_MAP, "token_ids": [1 << 32]}]],
        [1.0, [{**STORE_MAP, "block_hashes": [None]}]],
        [1.0, [["BlockStored", "not hashes"]]],
        [1.0, [["BlockRemoved"]]],
        [1.0, [], "rank"],
        {"ts": 1.0},
        {"events": []},
    ],
)
def test_a_payload_that_is_no_batch_raises_wire_error(message: object) -> None:
    with pytest.raises(WireError):
        decode_batch(msgspec.msgpack.encode(message))


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_the_one_error(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except WireError:
        pass


REAL = [
    frames
    for name in ("vllm-0.32-stores", "synthetic-vllm-0.19.1-evict-clear")
    for frames in (Path(__file__).parent.parent / "data" / "captures" / f"{name}.jsonl")
    .read_text()
    .splitlines()
]


@settings(max_examples=300)
@given(st.sampled_from(REAL), st.integers(0, 4000), st.integers(0, 255), st.integers(0, 4000))
def test_damaged_captures_raise_nothing_but_the_one_error(
    line: str, place: int, value: int, length: int
) -> None:
    payload = bytearray(base64.b64decode(json.loads(line)["frames"][-1]))
    payload[place % len(payload)] = value
    try:
        decode_batch(bytes(payload[: max(1, length)]))
    except WireError:
        pass


def test_deep_nesting_is_an_error_like_any_other() -> None:
    with pytest.raises(WireError):
        decode_batch(b"\x91" * 100_000)


def test_an_error_does_not_carry_the_message() -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "secret"}]]))

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "medium"),
    [
        (None, Medium.GPU),
        ("GPU", Medium.GPU),
        ("cpu", Medium.CPU),
        ("Storage", Medium.DISK),
        ("FS", Medium.DISK),
        ("OBJ", Medium.REMOTE),
        ("tape", Medium.OTHER),
    ],
)
def test_media_are_known_by_alias_without_regard_to_case(name: str | None, medium: Medium) -> None:
    assert medium_of(name) is medium
