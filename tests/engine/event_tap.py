"""Listening to an engine's KV events beside the gateway: when they came, and what they leave in the cache."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

_POLL_MS = 50


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of the engine changed. `made` is when the engine handed it to its publisher, `arrived`
    when it was here; both `time.time()`."""

    seq: int
    made: float
    arrived: float
    events: list[dict[str, Any]] = field(repr=False)


class EventTap:
    """Reads what an engine publishes from when it is entered until it is left, in a thread of its own: how
    busy anyone's event loop is does not show in `arrived`. Mutable: `batches` grows."""

    def __init__(self, endpoint: str) -> None:
        self.batches: list[Batch] = []
        self._endpoint = endpoint
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="event tap", daemon=True)

    def __enter__(self) -> EventTap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def times_cleared(self) -> int:
        """The number of received events that say that the cache is empty."""
        return sum(event["type"] == "AllBlocksCleared" for each in self.batches for event in each.events)

    def held(self) -> set[int]:
        """The hashes in the engine's cache, from the events since the cache was last empty. Right if the
        engine never computed a block twice at the same time. AssertionError if the cache was never reported
        empty."""
        held: set[int] | None = None
        for batch in list(self.batches):
            for event in batch.events:
                if event["type"] == "AllBlocksCleared":
                    held = set()
                elif held is not None and event["type"] == "BlockStored":
                    held.update(event["block_hashes"])
                elif held is not None:
                    held.difference_update(event["block_hashes"])
        assert held is not None
        return held

    def _listen(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            while not self._stopped.is_set():
                if not socket.poll(_POLL_MS):
                    continue
                _, seq, payload = socket.recv_multipart()
                arrived = time.time()
                made, events, *_ = msgspec.msgpack.decode(payload)
                self.batches.append(Batch(int.from_bytes(seq, "big"), made, arrived, events))
