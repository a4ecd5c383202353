"""Which batches the fast path applies synchronously."""

from __future__ import annotations

import pytest

from kvroute.clock import SystemClock
from kvroute.events.intake import Intake
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import TimeSlicer
from kvroute.index.prefix_index import PrefixIndex
from kvroute.wire.vllm import DIALECTS, BlockRemoved, BlockStored, KvEvent


def stored(blocks: int) -> BlockStored:
    return BlockStored(list(range(1, blocks + 1)), None, list(range(16 * blocks)), 16)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(PrefixIndex(), 0)


@pytest.fixture
def intake(ledger: Ledger) -> Intake:
    """A stream that has been read to its end and is empty."""
    clock = SystemClock()
    made = Intake("w", ledger, clock, KvEventsOptions(), TimeSlicer(clock, 0.5), lambda: None)
    made.sequence.start_replay()
    made.sequence.end_replay()
    return made


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("events", "newest_only"),
    [
        pytest.param([stored(8), BlockRemoved([3])], False, id="few of any kind"),
        pytest.param([stored(75)], True, id="the blocks of a turn"),
    ],
)
def test_small_batches_are_applied_synchronously(
    intake: Intake, dialect: str, events: list[KvEvent], newest_only: bool
) -> None:
    payload = DIALECTS[dialect].encode(1.0, events)
    frames = (b"", (0).to_bytes(8), payload)

    taken = intake.apply_fast([frames])

    assert taken == (dialect.startswith("map-") or not newest_only)
    assert intake.sequence.expected == taken


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([stored(200)], id="too many blocks"),
        pytest.param([stored(75), BlockRemoved([3])], id="many and a removal"),
    ],
)
def test_larger_batches_are_left_untouched(intake: Intake, ledger: Ledger, events: list[KvEvent]) -> None:
    payload = DIALECTS["map-0.30"].encode(1.0, events)

    assert intake.apply_fast([(b"", (0).to_bytes(8), payload)]) == 0
    assert (intake.sequence.expected, ledger.counts.stored) == (0, 0)


def test_the_fast_path_ends_soon_after_its_deadline(intake: Intake) -> None:
    encode = DIALECTS["map-0.30"].encode
    messages = [
        (b"", seq.to_bytes(8), encode(1.0, [BlockStored([seq + 1], seq or None, list(range(16)), 16)]))
        for seq in range(200)
    ]

    taken = intake.apply_fast(messages, deadline=0.0)

    assert 0 < taken * len(messages[-1][2]) < 4096
    assert intake.apply_fast(messages[taken:]) == len(messages) - taken
