"""What arrives through the fleet's Redis: answers of Redis, envelopes, and messages of members and of others.

A message may be refused or change something, but no exception leaves the channel or is logged by it, loads
stay finite, and nothing is left of members that are gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
from msgspec import inspect
from pydantic import SecretStr
from tests.fuzz.frames import ODD_BINARY, Mutator
from tests.fuzz.lanes import Report
from tests.fuzz.probes import save
from tests.support.clocks import ManualClock

from kvroute.app.replica import Replica
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.options import HealthOptions
from kvroute.fleet.probe import Prober
from kvroute.fleet.worker import WorkerId, WorkerSpec
from kvroute.index.snapshot import CopyableChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.options import LMCacheOptions
from kvroute.metrics import Metrics
from kvroute.relay.poison import LostRequests
from kvroute.replicas.cache_reports import CacheReports
from kvroute.replicas.channel import Channel
from kvroute.replicas.envelope import TO_ALL, Envelope, Kind, pack
from kvroute.replicas.messages import MemberState, SharedMessage, StateBegins, StateEnds
from kvroute.replicas.options import SharingOptions
from kvroute.replicas.redis_link import AnswerReader
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Router
from kvroute.upstream.options import RetryOptions

DEADLINE_S = 1.0
"""For one envelope. Many messages take some 20 us each."""
KEY = b"a key of all members of the fleet"
_MESSAGES: tuple[type, ...] = get_args(SharedMessage)
_WORKERS = ("w0", "w1", "w2", "nobody", "", "w" * 300)
_NUMBERS = (0, 1, 2, 5, 15, 16, 1000, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
_FIGURES = (0.0, 1.0, 0.25, 30.0, -1.0, 1e9, 1e300, math.inf, -math.inf, math.nan, 5e-324)
_ODD_REPLIES = (
    b"$-1\r\n", b"$99999999999\r\n", b"*3\r\n", b"*99999999\r\n", b"*1\r\n" * 5000, b"-ERR no\r\n",
    b"$" + b"9" * 5000 + b"\r\n", b"-NOPERM no\r\n", b":1\r\n", b"+OK\r\n", b"\r\n", b"*-1\r\n", b"%2\r\n",
    b"x" * 70_000,
)  # fmt: skip


class Link:
    """A link that keeps what the channel writes away."""

    def __init__(self, owner: Channel) -> None:
        self._owner = owner

    def wake(self) -> None:
        while self._owner.next_command() is not None:
            pass

    def reconnect(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    async def run(self) -> None: ...


class _Noted(logging.Handler):
    """Exceptions that were logged. Mutable."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(record.exc_info[1])


class Envelopes:
    """A process of a fleet, and what may be written to it. `last` was written last. Mutable."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.last = b""
        self._bytes, self._replies = Mutator(rng, ODD_BINARY), Mutator(rng, _ODD_REPLIES)
        self._recent: list[bytes] = []
        self._seq = 0
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200)))
        self.begin()

    def begin(self) -> None:
        """Start a process with workers; members are met anew."""
        self.clock = ManualClock(1000.0)
        self.fleet = Fleet()
        self.fleet.apply("static", [WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}:8000") for n in range(3)])
        self.router = Router(RoutingOptions())
        options = SharingOptions(url=SecretStr("redis://x"), member="one", key=SecretStr(KEY.decode()))
        self.channel = Channel(options, os.urandom(8), 0, self.clock, lambda owner, _: Link(owner))
        index = CopyableChunkIndex()
        coordinator = Coordinator(index, self.clock, LMCacheOptions())
        reports = CacheReports(index, coordinator, None, self.channel, "one", self.clock)
        self.replica = Replica(0, None, self.channel, generation=0)
        health = HealthMonitor(self.fleet, Prober(self.client, timeout_s=1.0), self.clock, HealthOptions())
        self.replica.attach_services(self.fleet, self.router, health, self.clock, None, None, reports)
        self.lost = LostRequests(RetryOptions(), self.clock, Metrics())
        self.replica.share_lost_requests(self.lost)
        self.channel._listener = self.replica  # `start` would connect
        self._members = [(self.rng.randbytes(8), self.rng.randbytes(8)) for _ in range(4)]
        state = MemberState("x", 0, "0.1.0", True, True, 0.0, True, signs_all=True)
        for gateway, member in self._members[:3]:
            for kind, to in ((Kind.BATCH, TO_ALL), (Kind.PRIVATE, self.channel.id)):
                self.channel.on_data(
                    self._packed([state, StateBegins(), StateEnds()], gateway, member, kind, to, signed=True)
                )

    def _packed(
        self, messages: Sequence[Any], gateway: bytes, member: bytes, kind: Kind, to: bytes, *, signed: bool
    ) -> bytes:
        self._seq += kind is Kind.BATCH
        payload = msgspec.msgpack.encode(messages)
        return pack(Envelope(kind, gateway, member, to, self._seq, 0.0, payload, signed), KEY)

    def step(self) -> str:
        """Deliver something; the kind of it."""
        rng = self.rng
        way = rng.random()
        if way < 0.15:
            self.last = self._replies.change(
                b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$3\r\nabc\r\n" * 3, _ODD_REPLIES
            )
            return self.answers(self.last)
        gateway, member = rng.choice(self._members)
        messages = [
            self.value(inspect.type_info(rng.choice(_MESSAGES))) for _ in range(rng.choice((1, 1, 3)))
        ]
        data = self._packed(
            messages,
            gateway,
            member,
            rng.choice((Kind.BATCH, Kind.BATCH, Kind.MISSED, Kind.PRIVATE)),
            rng.choice((TO_ALL, self.channel.id)),
            signed=rng.random() < 0.7,
        )
        if way < 0.4:
            data = self._bytes.change(data, self._recent)
        self._recent = [*self._recent[-20:], data]
        self.last = data
        before = self.channel.counts.messages_received
        self.channel.on_data(data)
        self.check()
        if rng.random() < 0.01:
            self.clock.time += rng.choice((0.1, 3.0, 100.0))
            self.channel._check(self.clock.now())
        return "refused" if self.channel.counts.messages_received == before else "read"

    def answers(self, data: bytes) -> str:
        """What Redis answers, in pieces of any length."""
        cut = self.rng.randrange(len(data) + 1)
        whole, pieces = list[str](), list[str]()
        ends = [
            _fed(AnswerReader(1000), [data], whole),
            _fed(AnswerReader(1000), [data[:cut], data[cut:]], pieces),
        ]
        if whole != pieces or ends[0] != ends[1]:
            raise AssertionError("what is read depends on how it was cut")
        return f"answers {ends[0]}"

    def check(self) -> None:
        """Raise AssertionError if a load is no number, or below zero."""
        for worker in self.fleet.workers():
            load = worker.load
            figures = (load.in_flight, load.active_tokens, load.unanswered, load.wait(self.clock.now()))
            if not all(0 <= figure < 1e30 for figure in figures):
                raise AssertionError(f"load of a worker: {figures}")

    def end(self) -> None:
        """Let all members be gone. Raises AssertionError if something of them is left."""
        for member in self.channel.describe()[1:]:
            self.replica.on_peer_gone(member["member"])
        for worker in self.fleet.workers():
            if worker.load.in_flight or worker.load.active_tokens:
                raise AssertionError(f"{worker.load.in_flight} requests of members that are gone")
        self.lost.describe()

    def value(self, kind: inspect.Type) -> Any:
        """A value of a type: mostly a usual one."""
        rng = self.rng
        match kind:
            case inspect.StructType():
                tag = () if kind.tag is None else (kind.tag,)  # as a list: values may be those of no message
                return [*tag, *(self.value(each.type) for each in kind.fields)]
            case inspect.UnionType():
                return self.value(rng.choice(kind.types))
            case inspect.ListType() | inspect.CollectionType():
                return [self.value(kind.item_type) for _ in range(rng.choice((0, 1, 2, 5)))]
            case inspect.VarTupleType():
                return tuple(self.value(kind.item_type) for _ in range(rng.choice((0, 1, 2, 5))))
            case inspect.NamedTupleType():
                return [self.value(each.type) for each in kind.fields]
            case inspect.TupleType():
                return tuple(self.value(each) for each in kind.item_types)
            case inspect.DictType():
                return {
                    self.value(kind.key_type): self.value(kind.value_type) for _ in range(rng.choice((0, 2)))
                }
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.IntType():
                return rng.choice(_NUMBERS[:6]) if rng.random() < 0.7 else rng.choice(_NUMBERS)
            case inspect.FloatType():
                return rng.choice(_FIGURES[:4]) if rng.random() < 0.7 else rng.choice(_FIGURES)
            case inspect.StrType():
                return rng.choice(
                    (*_WORKERS, *_WORKERS[:3], *_WORKERS[:3], "m", "\ud7ff", "10.0.0.1", "tcp://x:1")
                )
            case inspect.BytesType():
                return rng.randbytes(rng.choice((0, 1, 7, 8, 16, 16, 64, 800)))
            case inspect.EnumType():
                return rng.choice(list(kind.cls))
            case inspect.LiteralType():
                return rng.choice(kind.values)
            case inspect.AnyType() | inspect.RawType():
                return None
        raise TypeError(kind)


def _fed(reader: AnswerReader, parts: Sequence[bytes], found: list[str]) -> str:
    try:
        for part in parts:
            reader.feed(part, lambda answer: found.append(repr(answer)))
    except ValueError:
        return "refused"
    return "read"


async def fuzz_envelopes(count: int, seed: int, *, folder: Path | None = None) -> Report:
    """Deliver `count` envelopes. Those that show a defect are saved in `folder`."""
    report, noted = Report(), _Noted()
    logger = logging.getLogger("kvroute")
    logger.addHandler(noted)
    envelopes = Envelopes(seed)
    try:
        for number in range(1, count + 1):
            report.inputs += 1
            began, error = time.process_time(), None
            try:
                report.outcomes[envelopes.step()] += 1
                await asyncio.sleep(0)  # the next slice of what waits
                if number % 500 == 0:
                    envelopes.end()
                    envelopes.begin()
                    await asyncio.sleep(0)
            except Exception as raised:
                error = raised
            if noted.found:
                error = noted.found[0]
                noted.found.clear()
            if error is None and time.process_time() - began > DEADLINE_S:
                error = TimeoutError("one envelope took too long")
            if error is not None:
                save(report, "envelope", error, envelopes.last, folder)
                envelopes.begin()
    finally:
        logger.removeHandler(noted)
    return report
