"""A controller without sockets, and workers that record the chunks that they really hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from tests.support.clocks import AdvancingClock

from kvroute.blocks.chunks import ChunkSpace, PromptChunks, chunk_keys
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.options import ControllerOptions
from kvroute.wire import lmcache_controller as wire

CHUNK = 64
CPU = "LocalCPUBackend"
DISK = "LocalDiskBackend"


class Rig:
    """A controller with an index, and slot 1 for worker `a`."""

    def __init__(self, **options: Any) -> None:
        self.clock = AdvancingClock(100.0)
        self.index = ChunkIndex()
        self.options = ControllerOptions(**{"chunk_tokens": CHUNK, **options})
        self.controller = Controller(self.index, self.clock, self.options)
        self.controller.add_slot(1, "a")

    @property
    def counts(self) -> Any:
        return self.controller.counts

    def handle(self, message: wire.Message) -> Any:
        """Encode, decode and handle a message; returns the reply."""
        return self.controller.handle(wire.decode(wire.encode(message)))

    def sweep(self) -> None:
        while self.controller.sweep():
            pass

    def keys(self, tokens: Sequence[int]) -> list[int]:
        return list(chunk_keys(tokens, self.controller.scheme))

    def matched(self, tokens: Sequence[int], slot: int = 1) -> int:
        """Tokens that the index finds in L1 for the slot."""
        self.sweep()
        return self.index.match(PromptChunks(tokens), "", {}).get(slot, (0, 0))[0]


class Worker:
    """A rank of an instance, and the chunks that it really holds."""

    def __init__(self, rig: Rig, name: str = "a", number: int = 0, **address: Any) -> None:
        self.rig = rig
        self.sender = {"instance_id": name, "worker_id": number}
        self.address = {"ip": "192.0.2.1", "port": 7600, "peer_init_url": f"{name}:1", **address}
        self.held: dict[str, set[int]] = {CPU: set(), DISK: set()}
        self.numbers = dict.fromkeys(self.held, 0)

    def register(self) -> Any:
        return self.rig.handle(wire.Register(**self.sender, **self.address))

    def heartbeat(self) -> list[str]:
        """Send a heartbeat. Returns the reasons of the full synchronisations that the reply requests."""
        reply = self.rig.handle(wire.Heartbeat(**self.sender, **self.address))
        return [command.reason for command in reply.commands]

    def batch(
        self, kind: Literal["admit", "evict"], keys: Sequence[int], location: str = CPU
    ) -> wire.KvOperations:
        """The next message; the test decides whether to send it."""
        held = self.held[location]
        held.update(keys) if kind == "admit" else held.difference_update(keys)
        start = self.numbers[location]
        self.numbers[location] += len(keys)
        operations = [wire.Operation(kind, key, start + place) for place, key in enumerate(keys)]
        return wire.KvOperations(**self.sender, location=location, operations=operations)

    def admit(self, *keys: int, location: str = CPU) -> None:
        self.rig.handle(self.batch("admit", keys, location))

    def evict(self, *keys: int, location: str = CPU) -> None:
        self.rig.handle(self.batch("evict", keys, location))

    def sync_messages(self, *, sync_id: str = "s1", size: int = 3) -> list[wire.Message]:
        keys = sorted(self.held[CPU])
        pieces = [keys[at : at + size] for at in range(0, len(keys), size)] or [[]]
        what = {**self.sender, "location": CPU, "sync_id": sync_id}
        return [
            wire.FullSyncStart(**what, total_keys=len(keys), batch_count=len(pieces)),
            *(wire.FullSyncBatch(**what, batch_id=number, keys=piece) for number, piece in enumerate(pieces)),
            wire.FullSyncEnd(**what, actual_total_keys=len(keys)),
        ]

    def sync(self) -> None:
        for message in self.sync_messages():
            self.rig.handle(message)

    def status(self, sync_id: str = "s1") -> wire.FullSyncStatusReply:
        reply = self.rig.handle(wire.FullSyncStatus(**self.sender, sync_id=sync_id))
        assert isinstance(reply, wire.FullSyncStatusReply)
        return reply

    @property
    def in_index(self) -> set[int]:
        """The keys below 1,000 that the index has for the instance."""
        self.rig.sweep()
        known = self.rig.controller._roster.by_name.get(str(self.sender["instance_id"]))
        if known is None:
            return set()
        space = ChunkSpace(self.rig.controller.scheme)
        return {key for key in range(1000) if self.rig.index.holds(known.instance.holder, space, key)}


@pytest.fixture
def rig_of() -> type[Rig]:
    """Creates a controller with the given options."""
    return Rig


@pytest.fixture
def worker_of() -> type[Worker]:
    """Creates a worker of a rig that has not registered yet."""
    return Worker


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def worker(rig: Rig) -> Worker:
    """A registered worker with chunks 1 to 9."""
    worker = Worker(rig)
    worker.register()
    worker.admit(*range(1, 10))
    return worker
