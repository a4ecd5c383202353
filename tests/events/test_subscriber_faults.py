"""After every fault of a stream the index has only blocks that the worker holds, and repairs all that it
can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq.asyncio
from tests.support.waiting import until

from kvroute.blocks.keys import Tier
from kvroute.clock import SystemClock
from kvroute.events.inbox import ConnectedInbox
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import SocketPoller, TimeSlicer
from kvroute.events.subscriber import KvEventSubscriber
from kvroute.index.map_trust import MapTrust, TrustReason
from kvroute.index.prefix_index import PrefixIndex
from kvroute.wire.vllm import DIALECTS
from kvroute.wire.zmq import EventMessage, pack_live

QUICK = KvEventsOptions(idle_check_s=0.05, replay_timeout_s=0.5, replay_attempts=1, retry_s=0.05)


class Followed:
    """An engine and the subscriber that follows it."""

    def __init__(
        self,
        engine: Any,
        context: zmq.asyncio.Context,
        replays: bool,
        options: Any,
        pool: int | None,
        max_blocks: int,
    ) -> None:
        self.engine = engine
        self.index = PrefixIndex(max_blocks=max_blocks)
        self.ledger = Ledger(self.index, 0)
        turns = TimeSlicer(SystemClock(), options.slice_ms)
        self.poller = SocketPoller(SystemClock(), options.slice_ms, turns)
        self.subscriber = KvEventSubscriber(
            "w",
            self.ledger,
            lambda: ConnectedInbox(self.poller, engine.publisher.endpoint, "kv", 1000),
            engine.publisher.replay_endpoint if replays else None,
            context,
            SystemClock(),
            options,
            turns,
            pool_blocks=lambda: pool,
        )
        self.task = asyncio.create_task(self.subscriber.run())

    @property
    def believed(self) -> set[int]:
        return set(self.ledger.indexed(Tier.GPU))

    @property
    def is_right(self) -> bool:
        if self.task.done():
            self.task.result()
        return self.subscriber.trust is MapTrust.WHOLE and self.believed == self.engine.truth

    @property
    def last(self) -> int:
        """The sequence number of the last applied batch."""
        return self.subscriber._sequence.expected - 1  # private: no figure shows it


@asynccontextmanager
async def followed(
    engine: Any,
    *,
    replays: bool = True,
    options: Any = QUICK,
    pool: int | None = None,
    max_blocks: int = 1_000_000,
) -> AsyncIterator[Followed]:
    context = zmq.asyncio.Context()
    follower = Followed(engine, context, replays, options, pool, max_blocks)
    try:
        yield follower
    finally:
        follower.task.cancel()
        await asyncio.gather(follower.task, return_exceptions=True)
        context.destroy(linger=0)


Make = Callable[..., Any]
Tokens = Callable[[int, int], list[int]]


@pytest.fixture
def busy(tokens_of: Tokens) -> Callable[[Any, range], None]:
    """Serve numbered prompts that overflow a cache of 1,000 tokens after five."""

    def serve(engine: Any, numbers: range) -> None:
        for number in numbers:
            engine.serve(tokens_of(number, 200))

    return serve


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_is_replayed_from_its_start_and_followed(
    engine_of: Make, busy: Any, dialect: str
) -> None:
    engine = engine_of(capacity_tokens=1000, event_dialect=dialect)
    busy(engine, range(3))
    async with followed(engine) as follower:
        await until(lambda: follower.is_right)
        busy(engine, range(3, 12))
        await until(lambda: follower.is_right)

    assert follower.believed == set()
    assert follower.ledger.held_blocks(Tier.GPU) == 0


async def test_dropped_batches_are_replayed(engine_of: Make, busy: Any, tokens_of: Tokens) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        busy(engine, range(3))
        await until(lambda: follower.is_right)
        for number in range(3, 8):
            engine.serve(tokens_of(number, 200), hold_back=True)
        busy(engine, range(8, 9))
        await until(lambda: follower.is_right)

    assert follower.subscriber.counts.losses == follower.subscriber.counts.restarts == 0


async def test_the_loss_of_the_last_batch_is_found_in_the_silence_after_it(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        engine.serve(tokens_of(1, 100))
        await until(lambda: follower.is_right)
        engine.serve(tokens_of(2, 900), hold_back=True)

        await until(lambda: follower.is_right)


async def test_duplicates_reordered_and_late_batches_count_once(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        busy(engine, range(4))
        await until(lambda: follower.is_right)
        for message in engine.sent:
            engine.send(message)
        for number in range(4, 8):
            engine.serve(tokens_of(number, 200), hold_back=True)
        late = engine.sent[-4:]
        for message in (late[1], late[0], late[3], late[1], late[2]):
            engine.send(message)
        busy(engine, range(8, 10))
        engine.send(late[0])
        engine.send(engine.sent[0])
        await until(lambda: follower.is_right and follower.last == 9)
        await until(lambda: follower.subscriber.counts.duplicates >= 4)

        assert follower.is_right
    assert follower.ledger.counts.copies == 0
    assert follower.subscriber.counts.restarts == 0


async def test_garbage_and_half_messages_change_nothing(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        busy(engine, range(4))
        await until(lambda: follower.is_right)
        whole = engine.sent[-1]
        engine.serve(tokens_of(5, 300), hold_back=True)
        true = engine.sent[-1]
        for frames in (
            [b"kv"],
            [b"kv", b"\0\0\0\1"],
            [b"kv", b"12345678", b"\xc1", b""],
            pack_live(EventMessage(b"kv", true.seq, true.payload[: len(true.payload) // 2])),
            pack_live(EventMessage(b"kv", true.seq, b"")),
            pack_live(EventMessage(b"kv", true.seq + 1, b"\xc1\xc1")),
            pack_live(EventMessage(b"kv", 2**63, whole.payload)),
            pack_live(EventMessage(b"kv", 0, b"other")),
        ):
            engine.send_frames(frames)
        busy(engine, range(6, 8))

        await until(lambda: follower.subscriber.counts.unreadable >= 3 and follower.last == 6)
        await until(lambda: follower.is_right)
    assert follower.subscriber.counts.restarts == 0


async def test_a_restart_is_found_by_its_numbers_and_in_silence(engine_of: Make, busy: Any) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        busy(engine, range(4))
        await until(lambda: follower.is_right)
        engine.restart()
        await until(lambda: follower.is_right)
        assert follower.believed == set()

        busy(engine, range(3))
        await until(lambda: follower.is_right)
        engine.restart()
        busy(engine, range(10, 12))
        await until(lambda: follower.is_right)

    assert follower.subscriber.counts.restarts == 2


async def test_a_restart_that_has_caught_up_with_the_numbers_is_still_found(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    """No live message of the new process comes before its sequence number fits; only the overlap shows the
    restart."""
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine, options=QUICK.model_copy(update={"idle_check_s": 30.0})) as follower:
        busy(engine, range(3))
        await until(lambda: follower.is_right)
        engine.restart()
        for number in range(10, 14):
            engine.serve(tokens_of(number, 100), hold_back=True)
        engine.serve(tokens_of(14, 100))

        await until(lambda: follower.is_right)
    assert follower.subscriber.counts.restarts == 1


async def test_a_restart_reported_by_the_fleet_empties_the_map_immediately(
    engine_of: Make, busy: Any
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        busy(engine, range(3))
        await until(lambda: follower.is_right)
        engine.restart()

        follower.subscriber.restarted()

        assert follower.believed == set()
        assert follower.subscriber.trust is MapTrust.NONE
        await until(lambda: follower.is_right)


async def test_a_gap_beyond_the_buffer_drops_the_map_until_a_clear(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000, event_buffer_steps=2)
    async with followed(engine) as follower:
        engine.serve(tokens_of(0, 100))
        await until(lambda: follower.is_right)
        for number in range(1, 6):
            engine.serve(tokens_of(number, 100), hold_back=True)
        engine.serve(tokens_of(6, 100))
        await until(lambda: follower.last == 6 and follower.subscriber.trust is MapTrust.PARTIAL)

        assert follower.believed < engine.truth
        assert follower.subscriber.reason is TrustReason.GAP
        engine.cache.clear()
        engine.serve(tokens_of(7, 100))
        await until(lambda: follower.is_right)
    assert follower.subscriber.counts.gaps >= 1


async def test_a_lost_history_ends_when_the_cache_has_turned_over(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000, event_buffer_steps=2)
    async with followed(engine, pool=62) as follower:
        engine.serve(tokens_of(0, 100))
        await until(lambda: follower.is_right)
        for number in range(1, 6):
            engine.serve(tokens_of(number, 100), hold_back=True)
        engine.serve(tokens_of(6, 100))
        await until(lambda: follower.last == 6 and follower.subscriber.reason is TrustReason.GAP)
        for number in range(10, 14):
            engine.serve(tokens_of(number, 200))
            await until(lambda number=number: follower.last == number - 3)
        assert follower.subscriber.trust is MapTrust.PARTIAL

        engine.serve(tokens_of(14, 200))
        await until(lambda: follower.is_right)
    assert follower.subscriber.counts.healed == 1


async def test_a_distrusted_map_is_replayed_from_the_start(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine) as follower:
        busy(engine, range(7))
        await until(lambda: follower.is_right)
        # What it believes is wrong, however that came about.
        follower.ledger.drop()
        follower.subscriber.distrust(TrustReason.AUDIT)
        assert follower.subscriber.reason is TrustReason.AUDIT

        await until(lambda: follower.is_right)
        # The next reading waits.
        follower.subscriber.distrust(TrustReason.AUDIT)
        busy(engine, range(7, 9))
        await until(lambda: follower.last == 8)
        assert follower.subscriber.reason is TrustReason.AUDIT
        engine.cache.clear()
        engine.serve(tokens_of(10, 100))
        await until(lambda: follower.is_right)
    assert follower.subscriber.counts.rereads == 1


async def test_a_distrusted_map_that_cannot_be_replayed_begins_from_nothing(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine, replays=False) as follower:
        number = 0
        while not follower.believed:
            engine.serve(tokens_of(number, 100))
            number += 1
            await asyncio.sleep(0.01)

        follower.subscriber.distrust(TrustReason.AUDIT)
        await until(lambda: not follower.believed)
        engine.serve(tokens_of(50, 100))
        last = engine.sent[-1].seq
        await until(lambda: follower.last == last)

        assert follower.subscriber.reason is TrustReason.GAP
        assert len(follower.believed) == 6
        assert follower.believed <= engine.truth


async def test_a_map_without_room_is_not_called_whole(engine_of: Make, tokens_of: Tokens) -> None:
    engine = engine_of(capacity_tokens=1600)
    async with followed(engine, pool=100, max_blocks=40) as follower:
        engine.serve(tokens_of(0, 400))
        await until(lambda: follower.is_right)
        engine.serve(tokens_of(1, 400))
        await until(lambda: follower.subscriber.reason is TrustReason.FULL)
        assert follower.subscriber.trust is MapTrust.PARTIAL
        assert len(follower.believed) == 40
        assert follower.believed < engine.truth

        engine.cache.clear()
        engine.serve(tokens_of(10, 15))
        engine.publish()
        await until(lambda: follower.last == engine.sent[-1].seq and not follower.index.size().blocks)
        engine.serve(tokens_of(10, 100))
        await until(lambda: follower.is_right)


async def test_refused_blocks_are_forgotten_after_the_pool_was_recycled(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=800)
    async with followed(engine, pool=50, max_blocks=45) as follower:
        engine.serve(tokens_of(0, 800))
        await until(lambda: follower.subscriber.reason is TrustReason.FULL)
        assert len(follower.believed) == 45
        # Private: simulates that another worker's blocks leave the index at this moment.
        follower.index._max_blocks = 1000

        for number in range(1, 6):
            engine.serve(tokens_of(number, 200))

        await until(lambda: follower.is_right)


async def test_an_internal_error_drops_the_map_which_is_then_rebuilt(
    engine_of: Make,
    busy: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, failing = engine_of(), True
    async with followed(engine) as follower:
        busy(engine, range(2))
        await until(lambda: follower.is_right)
        for way in ("apply", "store"):
            works = getattr(follower.ledger, way)

            def fails(batch: Any, *, works: Any = works, **how: Any) -> Any:
                if failing:
                    raise KeyError("a defect")
                return works(batch, **how)

            monkeypatch.setattr(follower.ledger, way, fails, raising=False)
        busy(engine, range(2, 4))
        await until(lambda: follower.subscriber.counts.failures >= 2)
        assert follower.subscriber.trust is MapTrust.NONE
        assert follower.believed == set()

        failing = False
        await until(lambda: follower.is_right)
    assert "an error while applying them" in caplog.text
    assert follower.subscriber.trust is MapTrust.NONE  # no task follows it any more


async def test_a_worker_that_serves_without_events_is_not_trusted(engine_of: Make, tokens_of: Tokens) -> None:
    engine = engine_of(capacity_tokens=1000)
    options = QUICK.model_copy(update={"silent_requests": 3, "silent_s": 0.01})
    async with followed(engine, options=options) as follower:
        engine.serve(tokens_of(0, 100))
        await until(lambda: follower.is_right)
        await asyncio.sleep(0.02)
        now = SystemClock().now()
        for _ in range(9):
            follower.subscriber.on_answer(16, now)  # no full block for certain
        follower.subscriber.on_answer(17, now)
        follower.subscriber.on_answer(17, now)
        assert follower.is_right
        follower.subscriber.on_answer(17, now)
        assert follower.subscriber.reason is TrustReason.SILENT

        engine.serve(tokens_of(1, 100))
        await until(lambda: follower.is_right)


async def test_blocks_with_unknown_parents_wait_for_their_re_announcement(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000, event_buffer_steps=2)
    first, second = tokens_of(1, 100), tokens_of(2, 100)
    engine.serve(first)
    engine.serve(second)
    engine.serve(tokens_of(3, 50))
    engine.serve(first + tokens_of(4, 60))
    async with followed(engine) as follower:
        await until(lambda: follower.subscriber.last_message is not None and follower.last == 3)
        await until(lambda: follower.subscriber.trust is MapTrust.PARTIAL)
        assert follower.ledger.orphan_blocks == 4
        assert len(follower.believed) == 3
        assert follower.subscriber.reason is TrustReason.GAP

        engine.serve(first, report=True)
        await until(lambda: follower.last == 4)
        assert follower.ledger.orphan_blocks == 0
        engine.serve(second, report=True)
        await until(lambda: follower.believed == engine.truth)
        # Evictions take what was announced again, although it was announced twice.
        for number in range(10, 14):
            engine.serve(tokens_of(number, 320))
        await until(lambda: follower.believed == engine.truth)
    assert follower.ledger.counts.unknown_removed == 0


async def test_without_a_replay_socket_a_gap_costs_the_map(
    engine_of: Make, busy: Any, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine, replays=False) as follower:
        engine.serve(tokens_of(60, 16), hold_back=True)
        number = 0
        while follower.subscriber.last_message is None:
            engine.serve(tokens_of(number, 100))
            number += 1
            await asyncio.sleep(0.01)
        assert follower.subscriber.trust is MapTrust.PARTIAL
        assert follower.believed <= engine.truth
        engine.serve(tokens_of(50, 900), hold_back=True)
        engine.serve(tokens_of(51, 100))
        last = engine.sent[-1].seq
        await until(lambda: follower.last == last)

        assert len(follower.believed) == 6
        assert follower.believed <= engine.truth
        engine.cache.clear()
        engine.serve(tokens_of(52, 100))
        await until(lambda: follower.is_right)


async def test_without_a_replay_socket_an_engines_first_batch_begins_a_whole_map(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    async with followed(engine, replays=False) as follower:
        engine.serve(tokens_of(60, 16), hold_back=True)
        number = 0
        while follower.subscriber.last_message is None:
            engine.serve(tokens_of(number, 100))
            number += 1
            await asyncio.sleep(0.01)
        assert follower.subscriber.reason is TrustReason.GAP
        assert (follower.subscriber.counts.losses, follower.subscriber.counts.restarts) == (1, 0)

        engine.restart()
        engine.serve(tokens_of(61, 100))

        await until(lambda: follower.is_right)
        assert (follower.subscriber.counts.losses, follower.subscriber.counts.restarts) == (1, 1)


async def test_a_replay_socket_that_does_not_answer_costs_the_map_and_no_more(
    engine_of: Make, tokens_of: Tokens
) -> None:
    engine = engine_of(capacity_tokens=1000)
    options = QUICK.model_copy(update={"replay_timeout_s": 0.05})
    async with followed(engine, options=options) as follower:
        engine.serve(tokens_of(0, 100))
        await until(lambda: follower.is_right)
        engine.stop_replays()
        await until(lambda: follower.subscriber.trust is MapTrust.NONE)
        engine.serve(tokens_of(1, 900), hold_back=True)
        engine.serve(tokens_of(2, 100))
        await until(lambda: follower.last == 2)

        assert follower.believed <= engine.truth
        assert len(follower.believed) == 6


async def test_a_burst_is_applied_completely_and_in_slices(engine_of: Make, tokens_of: Tokens) -> None:
    """100,000 blocks: others get their turn many times meanwhile."""
    engine = engine_of(capacity_tokens=1_600_000)
    async with followed(engine) as follower:
        engine.serve(tokens_of(0, 16))
        await until(lambda: follower.is_right)
        for number in range(1, 196):
            engine.serve(list(range(number, number + 8192)))
        turns = 0
        async with asyncio.timeout(60):
            while follower.last < 195:
                turns += 1
                await asyncio.sleep(0)
        assert follower.is_right

    assert len(engine.truth) > 99_000
    assert turns > 100


@pytest.mark.parametrize("dialect", ["array-0.20", "map-0.30"])
async def test_a_long_prompt_announced_as_one_event_is_stored_and_evicted(
    engine_of: Make, tokens_of: Tokens, dialect: str
) -> None:
    engine = engine_of(capacity_tokens=80_000, event_dialect=dialect)
    async with followed(engine) as follower:
        engine.serve(tokens_of(1, 65_536))
        await until(lambda: follower.is_right)
        if dialect == "map-0.30":
            engine.serve(tokens_of(1, 65_536), report=True)  # announces all blocks again
            await until(lambda: follower.last == 1)
            # The last block was computed again: that one is a copy.
            assert (follower.ledger.counts.repeated, follower.ledger.counts.copies) == (4095, 1)
        engine.serve(tokens_of(20, 40_000))
        await until(lambda: follower.is_right)

    assert follower.subscriber.counts.undivided == 0


async def test_an_endpoint_that_comes_up_late_is_followed(engine_of: Make, tokens_of: Tokens) -> None:
    first = engine_of()
    endpoint, replay = first.publisher.endpoint, first.publisher.replay_endpoint
    await first.stop()
    context = zmq.asyncio.Context()
    ledger = Ledger(PrefixIndex(), 0)
    turns = TimeSlicer(SystemClock(), 0.5)
    poller = SocketPoller(SystemClock(), 0.5, turns)
    subscriber = KvEventSubscriber(
        "w",
        ledger,
        lambda: ConnectedInbox(poller, endpoint, "kv", 1000),
        replay,
        context,
        SystemClock(),
        QUICK.model_copy(update={"replay_timeout_s": 0.1}),
        turns,
    )
    task = asyncio.create_task(subscriber.run())
    try:
        await until(lambda: subscriber.counts.replay_failures > 0)
        assert subscriber.trust is MapTrust.NONE
        engine = engine_of(event_endpoint=endpoint, replay_endpoint=replay)
        engine.serve(tokens_of(1, 100))

        await until(
            lambda: subscriber.trust is MapTrust.WHOLE and set(ledger.held_keys(Tier.GPU)) == engine.truth
        )
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)
