"""KV events over ZMQ as vLLM publishes them, with a replay socket; and the faults that tests switch on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import zmq
import zmq.asyncio
from pydantic import Field

from kvroute.clock import Clock
from kvroute.errors import WireError
from kvroute.options import Options
from kvroute.sim.options import SimOptions
from kvroute.wire.vllm import DIALECTS, KvEvent
from kvroute.wire.zmq import EventMessage, pack_live, pack_replay, pack_replay_end, unpack_replay_request

CONTROL = ("/sim/", "/metrics", "/health", "/ping", "/version", "/v1/models", "/kv_event_sources", "/is_")
"""Paths that a fault without `path` does not affect."""


class Fault(Options):
    """One fault. Which other fields count depends on `kind`:

    - `status`: answer with `status`, and `retry_after_s` as Retry-After
    - `slow`: wait `delay_s` before the engine gets the request
    - `hang`, `reset`: after `after_chunks` chunks of the answer send nothing more, or reset the connection
      (`after_chunks` None: before the answer's head)
    - `kill`: `delay_s` after a body with `marker` has come, reset all connections and refuse new ones
    - `bomb`: answer with 1 MiB of gzip that is 1 GiB of text
    - `endless`: answer with text that has no end
    - `drop_events`, `duplicate_events`: publish a batch of events not at all, or twice
    """

    kind: Literal[
        "status", "slow", "hang", "reset", "kill", "bomb", "endless", "drop_events", "duplicate_events"
    ]
    count: int | None = Field(default=1, ge=1)
    """Number of requests or batches that the fault affects; None: all, until the fault is cleared."""
    path: str | None = None
    """Affects only requests whose path starts with this; None: all except those in `CONTROL`."""
    status: int = Field(default=503, ge=400, le=599)
    retry_after_s: int | None = None
    delay_s: float = Field(default=1.0, ge=0)
    marker: str = ""
    """Affects only requests whose body contains this."""
    after_chunks: int | None = Field(default=None, ge=0)


class Faults:
    """Active faults, oldest first. Mutable: changed by `add`, `clear` and each use, which lowers the
    count."""

    def __init__(self) -> None:
        self._active: list[tuple[Fault, int | None]] = []

    def add(self, fault: Fault) -> None:
        self._active.append((fault, fault.count))

    def clear(self) -> None:
        self._active.clear()

    def listing(self) -> list[dict[str, object]]:
        """Active faults with their remaining counts."""
        return [{**fault.model_dump(), "count": remaining} for fault, remaining in self._active]

    def for_request(self, path: str, body: bytes = b"") -> list[Fault]:
        """The faults to apply to this request, at most one of each kind; lowers their counts."""
        if not self._active:
            return []
        exempt = path.startswith(CONTROL)
        return self._use(
            lambda fault: (
                not fault.kind.endswith("_events")
                and fault.marker.encode() in body
                and not path.startswith("/sim/")
                and (not exempt if fault.path is None else path.startswith(fault.path))
            )
        )

    def for_batch(self) -> list[Fault]:
        """The faults to apply to this batch of events; lowers their counts."""
        return self._use(lambda fault: fault.kind.endswith("_events")) if self._active else []

    def _use(self, applies: Callable[[Fault], bool]) -> list[Fault]:
        used: dict[str, Fault] = {}
        kept: list[tuple[Fault, int | None]] = []
        for fault, remaining in self._active:
            if fault.kind not in used and applies(fault):
                used[fault.kind] = fault
                remaining = None if remaining is None else remaining - 1
            if remaining != 0:
                kept.append((fault, remaining))
        self._active = kept
        return list(used.values())


def _of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: as in vLLM its port is higher by the rank; port 0 stays."""
    address, separator, port = endpoint.rpartition(":")
    return (
        f"{address}:{int(port) + rank}" if rank and separator and port.isdigit() and port != "0" else endpoint
    )


class EventPublisher:
    """The PUB socket and the replay ROUTER of one worker's rank. Mutable: next sequence number, replay
    buffer.

    `endpoint` and `replay_endpoint` are the bound addresses. The owner runs `serve` for replays, and calls
    `close` at the end.
    """

    def __init__(self, options: SimOptions, clock: Clock, rank: int = 0) -> None:
        self._clock = clock
        self._rank = rank
        self._dialect = DIALECTS[options.event_dialect]
        self._topic = options.event_topic.encode()
        self._options = options
        self._buffer: deque[EventMessage] = deque(maxlen=options.event_buffer_steps)
        self._seq = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        try:
            for socket, endpoint in (
                (self._pub, options.event_endpoint),
                (self._router, options.replay_endpoint),
            ):
                socket.setsockopt(zmq.SNDHWM, 100_000)
                if socket is self._pub and options.event_connects:
                    socket.connect(endpoint)
                elif endpoint:
                    socket.bind(_of_rank(endpoint, rank))
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def sources(self) -> dict[str, Any]:
        """The answer of GET /kv_event_sources (vLLM 0.27 and later)."""
        return {
            str(self._rank): {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self.endpoint,
                "replay_endpoint": self.replay_endpoint or None,
                "buffer_steps": self._options.event_buffer_steps,
                "hwm": 100_000,
                "max_queue_size": 100_000,
                "topic": self._options.event_topic,
            }
        }

    def publish(self, events: Sequence[KvEvent], faults: Sequence[Fault] = ()) -> None:
        """Send one batch and keep it for replay. A batch dropped by a fault is numbered and replayed too."""
        payload = self._dialect.encode(self._clock.wall(), events, self._rank)
        message = EventMessage(self._topic, self._seq, payload)
        self._seq += 1
        self._buffer.append(message)
        kinds = {fault.kind for fault in faults}
        copies = 0 if "drop_events" in kinds else 2 if "duplicate_events" in kinds else 1
        for _ in range(copies):
            self._pub.send_multipart(pack_live(message), flags=zmq.NOBLOCK)

    def restart(self) -> None:
        """Simulate a new process: numbers start at 0, the replay buffer is empty. Subscribers get no
        message."""
        self._seq = 0
        self._buffer.clear()

    async def serve(self) -> None:
        """Answer replay requests until cancelled."""
        with_topic = self._dialect.replay_topic
        while True:
            frames = await self._router.recv_multipart()
            try:
                client, start = unpack_replay_request(frames)
            except WireError:
                continue  # vLLM logs it and does not answer
            for message in list(self._buffer):
                if message.seq >= start:
                    await self._router.send_multipart([client, *pack_replay(message, with_topic=with_topic)])
            await self._router.send_multipart([client, *pack_replay_end(with_topic=with_topic)])

    def close(self) -> None:
        """Close both sockets without waiting."""
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()
