from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvroute.errors import WireError
from kvroute.wire.batch_split import LARGE_BYTES, MAX_WHOLE_BYTES, SMALL_BYTES, Piece, split_batch
from kvroute.wire.vllm import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    decode_batch,
)

MAP = DIALECTS["map-0.30"]


def split(payload: bytes) -> list[Piece]:
    return [piece for piece in split_batch(payload) if piece is not None]


def read(pieces: Sequence[Piece]) -> list[EventBatch]:
    return [decode_batch(piece.payload) for piece in pieces]


def joined(pieces: Sequence[Piece]) -> list[KvEvent]:
    """The events; divided ones are joined again."""
    events: list[KvEvent] = []
    for piece in pieces:
        batch = decode_batch(piece.payload)
        if not piece.continues:
            events.extend(batch.events)
            continue
        (part,), whole = batch.events, events[-1]
        if isinstance(part, BlockStored):
            assert isinstance(whole, BlockStored)
            assert part.parent_block_hash == whole.block_hashes[-1]
            whole.token_ids.extend(part.token_ids)
            if whole.extra_keys is not None:
                whole.extra_keys.extend(part.extra_keys or [])
            if whole.lookahead_token_ids is not None:
                whole.lookahead_token_ids.extend(part.lookahead_token_ids or [])
        else:
            assert isinstance(whole, BlockRemoved)
            assert isinstance(part, BlockRemoved)
        whole.block_hashes.extend(part.block_hashes)
    return events


def events(count: int, session: str | None = None) -> list[KvEvent]:
    return [
        AllBlocksCleared(),
        *(
            BlockStored([n], n - 1 if n else None, [70_000 + n] * 16, 16, session_id=session)
            for n in range(count)
        ),
        BlockRemoved([1]),
    ]


def prompt(blocks: int, size: int = 16, **fields: object) -> BlockStored:
    """One announcement of many blocks, with ids of every width."""
    ids = [(7, 200, 60_000, 70_000, 128_000)[n % 5] + n % 50 for n in range(blocks * size)]
    names = [(1 << 60) + n * 77 for n in range(blocks)]
    return BlockStored(names, None, ids, size, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("count", [1, 1000, 3000])
def test_the_pieces_of_a_batch_contain_the_same_events(dialect: str, count: int) -> None:
    payload = DIALECTS[dialect].encode(1.5, events(count), 3)

    pieces = split(payload)

    batches = read(pieces)
    whole = decode_batch(payload)
    assert [event for batch in batches for event in batch.events] == whole.events
    assert {(batch.ts, batch.dialect) for batch in batches} == {(1.5, whole.dialect)}
    assert batches[-1].dp_rank == 3
    assert not any(piece.is_whole or piece.continues for piece in pieces)
    if count > 1:
        assert len(pieces) > 3
        assert max(len(piece.payload) for piece in pieces) < SMALL_BYTES + 1000


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("size", "tokens"), [(16, 65_536), (16, 300_000), (48, 70_000), (784, 70_000), (4096, 70_000)]
)
def test_a_long_prompt_in_one_event_comes_in_parts_of_bounded_size(
    dialect: str, size: int, tokens: int
) -> None:
    stored = prompt(tokens // size, size)
    payload = DIALECTS[dialect].encode(1.5, [BlockRemoved([5]), stored, BlockRemoved([6])], 3)

    pieces = split(payload)

    assert joined(pieces) == decode_batch(payload).events
    assert read(pieces)[-1].dp_rank == 3
    assert not any(piece.is_whole for piece in pieces)
    for piece, batch in zip(pieces, read(pieces), strict=True):
        (event,) = batch.events
        if isinstance(event, BlockStored):
            assert len(event.token_ids) <= max(2048, size)
            assert event.block_size * len(event.block_hashes) == len(event.token_ids)
            assert piece.from_root
            assert piece.is_checked is (event.parent_block_hash is not None)


@pytest.mark.parametrize("tokens", [65_536, 1_000_000])
def test_between_two_chances_to_pause_little_is_walked(tokens: int) -> None:
    """By what is walked, not by time: every kind of step is counted where it is done."""
    from kvroute.wire import batch_split as dividing
    from kvroute.wire import msgpack_walk as walking

    walked: list[int] = [0]
    after_ids, after_hashes = dividing.after_ids, dividing.after_hashes
    with pytest.MonkeyPatch.context() as patch:

        def ids(data: bytes, at: int, count: int) -> int:
            walked[-1] += count
            return after_ids(data, at, count)

        def names(data: bytes, at: int, count: int) -> int:
            walked[-1] += count
            return after_hashes(data, at, count)

        patch.setattr(dividing, "after_ids", ids)
        patch.setattr(dividing, "after_hashes", names)
        for _ in split_batch(MAP.encode(1.5, [prompt(tokens // 16)], 3)):
            walked.append(0)

    assert sum(walked) == tokens + 2 * (tokens // 16)
    assert max(walked) <= walking.STEP_IDS


def test_every_piece_of_a_prompt_after_a_known_parent_has_its_parent() -> None:
    stored = msgspec.structs.replace(prompt(4096), parent_block_hash=b"\xc0" * 32)
    pieces = split(MAP.encode(1.5, [stored]))
    assert joined(pieces) == [stored]
    assert not any(piece.from_root for piece in pieces)


@pytest.mark.parametrize(
    "names",
    [
        [n.to_bytes(32, "big") for n in range(4096)],
        [n.to_bytes(16, "little") for n in range(4096)],
        [n.to_bytes(64, "little") for n in range(4096)],
        [-n for n in range(4096)],
        [n * 3 for n in range(4096)],
    ],
)
def test_hashes_of_all_forms_are_recognised(names: list[int | bytes]) -> None:
    stored = msgspec.structs.replace(prompt(4096), block_hashes=names)
    payload = MAP.encode(1.5, [stored])
    pieces = split(payload)
    assert joined(pieces) == [stored]
    assert len(pieces) == 32


@pytest.mark.parametrize(
    "extra",
    [
        [None] * 4096,
        [["adapter"]] * 4096,
        [["image", 3]] + [None] * 4000 + [["x" * 300, -4, 1.5, b"1"]] * 95,
        [None] * 100,
    ],
)
def test_extra_keys_go_with_their_blocks(extra: list[list[object] | None]) -> None:
    stored = prompt(4096, extra_keys=extra, lora_name="adapter", medium="GPU", session_id="s" * 100)
    pieces = split(MAP.encode(1.5, [stored], 0))
    assert joined(pieces) == [stored]
    assert len(pieces) == 32


@pytest.mark.parametrize("ahead", [1, 3])
def test_tokens_after_a_block_go_with_their_blocks(ahead: int) -> None:
    rows = [[number] * ahead for number in range(3000)]
    stored = msgspec.structs.replace(prompt(3000, 16), lookahead_token_ids=rows)
    payload = DIALECTS["map-0.33"].encode(1.5, [stored], 0)

    pieces = split(payload)

    assert len(pieces) > 3
    assert joined(pieces) == [stored]
    for batch in read(pieces):
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert len(event.lookahead_token_ids or []) == len(event.block_hashes)


def test_events_that_have_hashes_alone_are_divided_too() -> None:
    names: list[int | bytes] = [n.to_bytes(32, "big") for n in range(10_000)]
    placeholder = BlockStored(names, None, [], 0, medium="CPU")
    for event in (BlockRemoved(names, medium="CPU"), placeholder):
        pieces = split(MAP.encode(1.5, [event], 0))
        assert joined(pieces) == [event]
        assert len(pieces) == 20


def test_a_batch_that_does_not_match_its_hashes_stays_mismatched() -> None:
    """Of a group with a sliding window, or nonsense: the hashes are there to be counted."""
    for stored in (
        msgspec.structs.replace(prompt(4096), block_size=32),
        msgspec.structs.replace(prompt(4096), token_ids=prompt(5000).token_ids),
    ):
        pieces = split(MAP.encode(1.5, [stored], 0))
        parts = [event for batch in read(pieces) for event in batch.events if isinstance(event, BlockStored)]
        assert [name for part in parts for name in part.block_hashes] == stored.block_hashes
        assert all(len(part.token_ids) != part.block_size * len(part.block_hashes) for part in parts)
        assert all(part.token_ids for part in parts)


@pytest.mark.parametrize("prompts", [1, 2, 15, 16])
def test_long_prompts_are_recognised(prompts: int) -> None:
    tokens = [70_000] * 65_536
    stored: list[KvEvent] = [BlockStored(list(range(n, n + 4096)), None, tokens, 16) for n in range(prompts)]
    payload = MAP.encode(1.5, stored, 3)
    assert len(payload) > LARGE_BYTES

    pieces = split(payload)

    assert joined(pieces) == stored
    assert read(pieces)[-1].dp_rank == 3


def test_text_that_looks_like_the_start_of_an_event_is_not_read_as_one() -> None:
    for batch in (
        events(3000, session="\xa4type"),
        [prompt(4096, session_id="\xa4type"), *events(3000), prompt(4096, lora_name="\xa4type" * 9000)],
        [prompt(4096, session_id="x" * 40_000 + "\x81\xa4type\xabBlockStored")],
    ):
        payload = MAP.encode(1.5, batch, 0)
        assert len(payload) > LARGE_BYTES

        pieces = split(payload)

        assert joined(pieces) == decode_batch(payload).events
        assert len(pieces) > 5


def test_an_event_unlike_vllms_is_left_whole_and_marked() -> None:
    event = msgspec.to_builtins(prompt(4096))
    ids_first = {"type": "BlockStored", "token_ids": event["token_ids"], **event}
    names = [n.to_bytes(11, "big") for n in range(4096)]
    for odd in (ids_first, event | {"block_hashes": names}):
        payload = msgspec.msgpack.encode([1.5, [odd, {"type": "BlockRemoved", "block_hashes": [1]}], 0])

        first, *others = split(payload)

        assert first.is_whole
        assert decode_batch(first.payload).events == decode_batch(payload).events[:1]
        assert [event for batch in read(others) for event in batch.events] == [BlockRemoved([1])]


def test_unknown_types_and_fields_are_as_they_were() -> None:
    large = {"type": "BlockTeleported", "block_hashes": list(range(50_000)), "more": {"a": [1, 2]}}
    stored = msgspec.to_builtins(prompt(4096)) | {"shape": {"a": [None] * 100}, "other": "x" * 300}
    payload = msgspec.msgpack.encode([1.5, [large, stored], 0, "later"])

    pieces = split(payload)

    whole = decode_batch(payload)
    firsts = [decode_batch(piece.payload) for piece in pieces if not piece.continues]
    assert joined(pieces) == whole.events
    assert sum(batch.unknown_events for batch in firsts) == whole.unknown_events == 1
    assert sum(batch.unknown_fields for batch in firsts) == 2
    assert whole.unknown_fields == 3
    assert read(pieces)[-1].unknown_fields == 3


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("batch", [events(3000), [prompt(20_000)]], ids=["events", "prompt"])
def test_a_large_batch_that_is_cut_off_cannot_be_read(dialect: str, batch: list[KvEvent]) -> None:
    payload = DIALECTS[dialect].encode(1.5, batch, 0)
    for cut in (SMALL_BYTES + 100, LARGE_BYTES + 100, len(payload) - 70_000, len(payload) - 1):
        with pytest.raises(WireError):
            read([piece for piece in split(payload[:cut]) if not piece.is_checked])


def test_a_part_that_is_broken_is_found_before_the_end() -> None:
    payload = MAP.encode(1.5, [prompt(4096), BlockRemoved([1])], 0)
    at = payload.index(b"token_ids") + 100_000
    for broken in (b"\xc1" * 16, b"\xa3abc" * 4):
        with pytest.raises(WireError):
            read(
                [piece for piece in split(payload[:at] + broken + payload[at + 16 :]) if not piece.is_checked]
            )


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1" * 40_000,
        b"\x93\x01\x02\x03" + b"\0" * 400_000,
        b"\x82\xa2ts\x01\xa6events" + b"\xdd\xff\xff\xff\xff" + b"\x80" * 60_000,
        b"\x92\x01\xdd\xff\xff\xff\xff" + b"\x91" * 400_000,
        b"\x91" * 400_000,
        b"\x81\xa6events" + b"\x90" * 40_000,
    ],
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        read(split(payload))


def test_a_small_payload_comes_back_whatever_it_is() -> None:
    assert split(b"") == [Piece(b"")]


def test_too_deep_nesting_is_refused() -> None:
    nested = b"\x91" * SMALL_BYTES + b"\xc0"

    with pytest.raises(WireError):
        list(split_batch(b"\x92\xcb" + bytes(8) + b"\x91" + nested))


def test_what_cannot_be_divided_is_refused_when_it_is_long() -> None:
    ints = [1] * (MAX_WHOLE_BYTES + 1)
    for batch in (
        [1.5, [], 0, ints],
        [1.5, [["BlockTeleported", ints]], 0],
        [1.5, [["BlockStored", [1], None, [1], 1, None, None, ints]], 0],
    ):
        with pytest.raises(WireError):
            split(msgspec.msgpack.encode(batch))
