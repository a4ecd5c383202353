from __future__ import annotations

import asyncio
import base64
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import waiting

from kvroute.blocks.keys import KEY_TOKENS, Tier, adapter_space, token_keys
from kvroute.clock import SystemClock
from kvroute.events.ledger import Ledger
from kvroute.sim.cache import Chain, PagedCache
from kvroute.sim.options import SimOptions
from kvroute.sim.publisher import EventPublisher
from kvroute.wire.zmq import EventMessage, pack_live
from kvroute.wire.zmq import unpack_live as unpack

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


class Engine:
    """A worker's cache and its event sockets, one request a step; the truth that an index is held to."""

    def __init__(self, **options: Any) -> None:
        self.options = SimOptions(**{"event_topic": "kv", "block_size": 16, **options})
        self.publisher = EventPublisher(self.options, SystemClock())
        self.cache = self._empty()
        self.sent: list[EventMessage] = []
        """Every batch since the start, sent or held back."""
        self._server = asyncio.create_task(self.publisher.serve())

    def _empty(self) -> PagedCache:
        blocks = self.options.capacity_tokens // self.options.block_size
        return PagedCache(blocks, self.options.block_size, record=True)

    @property
    def truth(self) -> set[int]:
        """Keys of what is held."""
        return self.cache.held_keys

    def serve(
        self, tokens: Sequence[int], *, salt: str = "", report: bool = False, hold_back: bool = False
    ) -> None:
        """One request: what it adds to the cache, and the batch that says so."""
        size, cache = self.options.block_size, self.cache
        seed = adapter_space(None, salt).seed
        ids = array("I", tokens)
        keys = token_keys(ids, seed)[size // KEY_TOKENS - 1 :: size // KEY_TOKENS]
        chain = Chain(keys, ids, cache_salt=salt or None)
        hits = cache.match(keys, (len(ids) - 1) // size)
        blocks = cache.take(keys, hits) + cache.allocate(len(keys) - hits)
        if report:
            cache.reannounce(chain, hits)
        cache.store(blocks, chain, hits, len(keys))
        cache.free(blocks)
        self.publish(hold_back=hold_back)

    def hits(self, tokens: Sequence[int], *, salt: str = "") -> int:
        """Tokens of a prompt that it would not compute."""
        size = self.options.block_size
        keys = token_keys(array("I", tokens), adapter_space(None, salt).seed)
        return size * self.cache.match(
            keys[size // KEY_TOKENS - 1 :: size // KEY_TOKENS], (len(tokens) - 1) // size
        )

    def publish(self, *, hold_back: bool = False) -> None:
        """The batch of what has changed; held back, it is only there to be replayed."""
        events = self.cache.take_events()
        if events:
            self.publisher.publish(events, [DROP] if hold_back else [])
            # Private, as below: the publisher shows its messages on its sockets only.
            self.sent.append(self.publisher._buffer[-1])

    def send(self, message: EventMessage) -> None:
        self.send_frames(pack_live(message))

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self.publisher._pub.send_multipart(frames)

    def restart(self) -> None:
        self.cache = self._empty()
        self.publisher.restart()
        self.sent.clear()

    def stop_replays(self) -> None:
        """Leave requests for replays unanswered."""
        self._server.cancel()

    async def stop(self) -> None:
        self._server.cancel()
        await asyncio.gather(self._server, return_exceptions=True)
        self.publisher.close()


class _Drop:
    kind = "drop_events"


DROP: Any = _Drop()


@pytest.fixture
async def engine_of() -> Any:
    """Makes engines with the given options; stops them at the end."""
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield make
    for engine in made:
        await engine.stop()


@pytest.fixture
def until() -> Callable[..., Any]:
    """`tests.support.waiting.until`."""
    return waiting.until


@pytest.fixture
def tokens_of() -> Callable[[int, int], list[int]]:
    """Token ids of a prompt: its number and its length. Prompts of different numbers share nothing."""
    return lambda number, length: [1 + number * 10_000 + place for place in range(length)]


@pytest.fixture
def messages_of() -> Callable[[str], list[tuple[float, str, EventMessage]]]:
    """A capture: time, source and message of each line."""

    def load(name: str) -> list[tuple[float, str, EventMessage]]:
        with (CAPTURES / f"{name}.jsonl").open() as lines:
            records = [json.loads(line) for line in lines]
        return [
            (record["t"], record["src"], unpack([base64.b64decode(frame) for frame in record["frames"]]))
            for record in records
        ]

    return load


@pytest.fixture
def requests_of() -> Callable[[str], list[dict[str, Any]]]:
    """The requests that led to a capture."""

    def load(name: str) -> list[dict[str, Any]]:
        with (CAPTURES / f"{name}.requests.jsonl").open() as lines:
            return [json.loads(line) for line in lines]

    return load


@pytest.fixture
def run_ledger() -> Callable[[Ledger, Iterable[Any]], None]:
    """Apply decoded batches as a whole."""

    def run(ledger: Ledger, batches: Iterable[Any]) -> None:
        for batch in batches:
            for _ in ledger.apply(batch):
                pass

    return run


@pytest.fixture
def gpu_keys() -> Callable[[Ledger], list[int]]:
    """What a ledger believes its GPU to hold, sorted."""
    return lambda ledger: sorted(ledger.held_keys(Tier.GPU))
