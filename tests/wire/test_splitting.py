from __future__ import annotations

import pytest

from kvroute.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvroute.wire.splitting import SMALL_BYTES, split_batch
from kvroute.wire.vllm import DIALECTS, decode_batch


def events(count: int) -> list[KvEvent]:
    return [
        AllBlocksCleared(),
        *(BlockStored([n], n - 1 if n else None, [70_000 + n] * 16, 16) for n in range(count)),
        BlockRemoved([1]),
    ]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("count", [1, 3000])
def test_the_pieces_of_a_batch_say_what_it_says(dialect: str, count: int) -> None:
    payload = DIALECTS[dialect].encode(1.5, events(count), 3)

    pieces = list(split_batch(payload))

    batches = [decode_batch(piece) for piece in pieces]
    assert [event for batch in batches for event in batch.events] == decode_batch(payload).events
    assert {(batch.ts, batch.dp_rank) for batch in batches} == {(1.5, 3)}
    if count > 1 and dialect != "batch-map":
        assert len(pieces) > 3
        assert max(map(len, pieces)) < SMALL_BYTES + 1000


@pytest.mark.parametrize("payload", [b"", b"\xc1" * 40_000, b"\x93\x01\x02\x03" + b"\0" * 40_000])
def test_what_is_no_batch_comes_back_whole(payload: bytes) -> None:
    assert list(split_batch(payload)) == [payload]
