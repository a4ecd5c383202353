"""A restarted gateway continues from a saved map if the worker is the same process and its replay confirms
it."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.waiting import until

from kvroute.blocks.keys import Tier
from kvroute.clock import SystemClock
from kvroute.events import subscriber
from kvroute.events.ingest import EventIngest
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions, ProbeOptions, SnapshotOptions
from kvroute.events.subscriber import Captured, SnapshotFile
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerFacts, WorkerId, WorkerSpec
from kvroute.index.map_trust import MapTrust
from kvroute.index.prefix_index import PrefixIndex
from kvroute.index.snapshot import Blocks, Copies, FrameKind, Runs, decode, encode, split
from kvroute.wire.vllm import BlockRemoved, BlockStored, EventBatch

Make = Callable[..., Any]
Tokens = Callable[[int, int], list[int]]


class Gateway:
    """An ingest that follows one worker while the block runs."""

    def __init__(self, engine: Any, options: KvEventsOptions, start_time: float | None) -> None:
        self.engine = engine
        self.index = PrefixIndex()
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.ingest = EventIngest(self.index, self.client, SystemClock(), options)
        self.fleet = Fleet()
        self.fleet.subscribe(self.ingest.fleet_changed)
        self.fleet.apply("test", [WorkerSpec(WorkerId("a"), "http://a.example")])
        self.worker: Worker = self.fleet.get("a")
        self.worker.facts = WorkerFacts(start_time=start_time)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=self.engine.publisher.sources())

    @property
    def stream(self) -> Any:
        return self.ingest.streams(self.worker)[0]

    @property
    def is_right(self) -> bool:
        return (
            self.ingest.trust(self.worker) is MapTrust.WHOLE
            and set(self.stream.ledger.indexed(Tier.GPU)) == self.engine.truth
        )


@asynccontextmanager
async def gateway(
    engine: Any, path: Path, start_time: float | None = 5.0, **more: Any
) -> AsyncIterator[Gateway]:
    options = KvEventsOptions(
        idle_check_s=0.05,
        replay_timeout_s=0.5,
        retry_s=0.02,
        discovery_timeout_s=0.3,
        probe=ProbeOptions(enabled=False),
        snapshot=SnapshotOptions(path=str(path), **more),
    )
    setup = Gateway(engine, options, start_time)
    task = asyncio.create_task(setup.ingest.run())
    try:
        yield setup
    finally:
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        await setup.client.aclose()
    if isinstance(outcome, Exception):
        raise outcome


async def test_a_new_process_continues_from_the_old_ones_snapshot(
    engine_of: Make, tokens_of: Tokens, tmp_path: Path
) -> None:
    # The buffer holds the last two batches: without the file all else would be lost.
    engine, path = engine_of(event_buffer_steps=4), tmp_path / "map"
    async with gateway(engine, path) as setup:
        for number in range(20):
            engine.serve(tokens_of(number, 100))
            await until(lambda: bool(setup.ingest.streams(setup.worker)) and setup.is_right)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    engine.serve(tokens_of(30, 100))
    engine.serve(tokens_of(5, 100) + tokens_of(31, 50))

    async with gateway(engine, path) as setup:
        await until(lambda: bool(setup.ingest.streams(setup.worker)) and setup.is_right)

        counts = setup.stream.subscriber.counts
        assert (counts.resumed, counts.restarts, counts.messages) == (1, 0, 2)
        engine.cache.clear()
        engine.serve(tokens_of(40, 100))
        await until(lambda: setup.is_right)


@pytest.mark.parametrize("change", ["incarnation", "unknown incarnation", "overrun", "restarted"])
async def test_a_snapshot_of_another_process_or_of_long_ago_is_not_used(
    engine_of: Make, tokens_of: Tokens, tmp_path: Path, change: str
) -> None:
    engine, path = engine_of(event_buffer_steps=4), tmp_path / "map"
    async with gateway(engine, path) as setup:
        for number in range(10):
            engine.serve(tokens_of(number, 100))
            await until(lambda: bool(setup.ingest.streams(setup.worker)) and setup.is_right)
    start_time: float | None = 5.0
    if change == "incarnation":
        start_time = 6.0
    elif change == "unknown incarnation":
        start_time = None
    elif change == "restarted":  # the gateway does not know it yet
        engine.restart()
    for number in range(50, 56):
        engine.serve(tokens_of(number, 20))

    async with gateway(engine, path, start_time) as setup:
        await until(lambda: setup.ingest.trust(setup.worker) is MapTrust.PARTIAL)
        believed = set(setup.stream.ledger.indexed(Tier.GPU))

    assert len(believed) == 4
    assert believed <= engine.truth


async def test_a_snapshot_is_written_on_a_timer(engine_of: Make, tokens_of: Tokens, tmp_path: Path) -> None:
    engine, path = engine_of(), tmp_path / "map"
    engine.serve(tokens_of(1, 100))
    async with gateway(engine, path, interval_s=0.01) as setup:
        await until(lambda: path.exists() and len(split(path.read_bytes())) == 1)
        assert setup.is_right
    ((head, frames),) = split(path.read_bytes())
    assert (head.worker, head.url, head.rank, head.incarnation) == ("a", "http://a.example", 0, 5.0)
    assert (head.next_seq, head.whole, head.block_tokens) == (1, True, 16)
    assert [frame.kind for frame in frames] == [FrameKind.RUNS, *[FrameKind.BLOCKS] * (len(frames) - 1)]
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("step", ["begin", "add", "finish"])
async def test_a_writing_that_is_cancelled_is_over_before_the_next_begins(
    engine_of: Make,
    tokens_of: Tokens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """At shutdown: the one of the timer is cut short, and the last one follows."""
    engine, path = engine_of(), tmp_path / "map"
    reached, may_continue, order = threading.Event(), threading.Event(), []
    real = getattr(subscriber._Writing, step)

    def slow(self: Any, *args: Any) -> None:
        if not reached.is_set():
            reached.set()
            may_continue.wait(20)
            real(self, *args)
            order.append("cut short")
        else:
            real(self, *args)
            order.append("last")

    monkeypatch.setattr(subscriber._Writing, step, slow)
    engine.serve(tokens_of(1, 100))
    async with gateway(engine, path) as setup:
        await until(lambda: bool(setup.ingest.streams(setup.worker)) and setup.is_right)
        file = SnapshotFile(str(path))
        streams = [Captured(setup.worker, 0, setup.stream.subscriber)]
        cut = asyncio.create_task(file.save(streams))
        await until(reached.is_set)
        cut.cancel()
        asyncio.get_running_loop().call_soon(may_continue.set)
        with pytest.raises(asyncio.CancelledError):
            await cut
        assert await file.save(streams) == 1

    assert order[:2] == ["cut short", "last"]
    assert len(split(path.read_bytes())) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["map"]


@pytest.mark.parametrize("content", [b"", b"garbage", None])
async def test_a_damaged_file_is_logged_and_replaced(
    engine_of: Make,
    tokens_of: Tokens,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    engine, path = engine_of(), tmp_path / "map"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    engine.serve(tokens_of(1, 100))
    async with gateway(engine, path) as setup:
        await until(lambda: bool(setup.ingest.streams(setup.worker)) and setup.is_right)

    messages = [record.getMessage() for record in caplog.records]
    assert any("is ignored" in message for message in messages)
    assert any("was not written" in message for message in messages) == (content is None)
    assert content is None or len(split(path.read_bytes())) == 1


def ledger_with_everything(index: PrefixIndex, slot: int) -> Ledger:
    ledger = Ledger(index, slot)
    ids = list(range(1, 50_000))
    events = [
        BlockStored(list(range(1000)), None, ids[:16_000], 16),
        BlockStored([b"x" * 32, -5, 2**63], 999, ids[16_000:16_048], 16),
        BlockStored([10, 11], 9, ids[160:192], 16),
        BlockStored([5000, 5001], None, ids[:512], 256, medium="CPU"),
        BlockStored([5002], None, ids[700:732], 32, medium="CPU"),
        BlockRemoved([500]),
    ]
    for _ in ledger.apply(EventBatch(0.0, list(events), 0, "map")):
        pass
    return ledger


def test_a_ledger_is_restored_with_tiers_sizes_and_copies_during_other_changes() -> None:
    index = PrefixIndex()
    ledger, other = ledger_with_everything(index, 0), ledger_with_everything(index, 1)
    parts = []
    for place, part in enumerate(ledger.dump()):
        parts.append(part)
        if place % 2:
            for _ in other.apply(EventBatch(0.0, [BlockRemoved([place * 7 % 1000])], 0, "map")):
                pass
    frames = [frame for _, frames in split_of(parts) for frame in frames]

    fresh = PrefixIndex()
    ledger_again = Ledger(fresh, 0)
    ledger_again.begin_restore(ledger.group, ledger.block_tokens)
    for frame in frames:
        ledger_again.restore(decode(frame))

    for tier in Tier:
        held = sorted(ledger.held_keys(tier))
        assert sorted(ledger_again.held_keys(tier)) == held
        assert sorted(ledger_again.indexed(tier)) == held
    twice = [BlockRemoved([10]), BlockRemoved([11])]
    for each in (ledger, ledger_again):
        for _ in each.apply(EventBatch(0.0, list(twice), 0, "map")):
            pass
        assert each.held_blocks(Tier.GPU) == 1002
        for _ in each.apply(EventBatch(0.0, list(twice), 0, "map")):
            pass
        assert each.held_blocks(Tier.GPU) == 1000
    assert fresh.size().runs <= index.size().runs


def split_of(parts: list[Runs | Blocks | Copies]) -> Any:
    from kvroute.index.snapshot import HEAD, StreamHead, encode_end

    head = StreamHead("a", "u", 0, 1.0, 1, 1, True, None, 16)
    return split(HEAD + encode(head) + b"".join(map(encode, parts)) + encode_end(1 + len(parts)))
