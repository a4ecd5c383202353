from __future__ import annotations

import pytest

from kvroute.errors import WireError
from kvroute.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvroute.wire.splitting import LARGE_BYTES, SMALL_BYTES, split_batch
from kvroute.wire.vllm import DIALECTS, decode_batch


def events(count: int, session: str | None = None) -> list[KvEvent]:
    return [
        AllBlocksCleared(),
        *(
            BlockStored([n], n - 1 if n else None, [70_000 + n] * 16, 16, session_id=session)
            for n in range(count)
        ),
        BlockRemoved([1]),
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("count", [1, 1000, 3000])
def test_the_pieces_of_a_batch_say_what_it_says(dialect: str, count: int) -> None:
    payload = DIALECTS[dialect].encode(1.5, events(count), 3)

    pieces = list(split_batch(payload))

    batches = [decode_batch(piece) for piece in pieces]
    assert [event for batch in batches for event in batch.events] == decode_batch(payload).events
    assert {batch.ts for batch in batches} == {1.5}
    assert batches[-1].dp_rank == 3
    if count > 1 and dialect != "batch-map":
        assert len(pieces) > 3
        assert max(map(len, pieces)) < SMALL_BYTES + 1000


@pytest.mark.parametrize("prompts", [1, 2, 15, 16])
def test_long_prompts_are_told_apart(prompts: int) -> None:
    tokens = [70_000] * 65_536
    stored = [BlockStored(list(range(n, n + 4096)), None, tokens, 16) for n in range(prompts)]
    payload = DIALECTS["map-0.30"].encode(1.5, stored, 3)
    assert len(payload) > LARGE_BYTES

    batches = [decode_batch(piece) for piece in split_batch(payload)]

    assert [batch.events for batch in batches] == [[event] for event in stored]
    assert batches[-1].dp_rank == 3


def test_text_that_looks_like_the_beginning_of_an_event_misleads_nobody() -> None:
    payload = DIALECTS["map-0.30"].encode(1.5, events(3000, session="\xa4type"), 0)
    assert len(payload) > LARGE_BYTES

    batches = [decode_batch(piece) for piece in split_batch(payload)]

    assert [event for batch in batches for event in batch.events] == decode_batch(payload).events
    assert len(batches) > 5


def test_of_a_large_batch_that_is_cut_off_the_last_piece_is_no_batch() -> None:
    payload = DIALECTS["map-0.30"].encode(1.5, events(3000), 0)
    for cut in (LARGE_BYTES + 100, len(payload) - 1):
        *_, last = split_batch(payload[:cut])
        assert last == payload[:cut]
        with pytest.raises(WireError):
            decode_batch(last)


@pytest.mark.parametrize("payload", [b"", b"\xc1" * 40_000, b"\x93\x01\x02\x03" + b"\0" * 400_000])
def test_what_is_no_batch_comes_back_whole(payload: bytes) -> None:
    assert list(split_batch(payload)) == [payload]
