"""Mutated messages from engines and from LMCache, through the decoders and through what believes them.

A message may be refused, but only with `WireError`; one that is refused changes nothing that is believed; one
that is taken in changes the same, whichever way it took.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tests.fuzz.lanes import Finding, Report

from kvroute.blocks.keys import Tier
from kvroute.clock import SystemClock
from kvroute.errors import WireError
from kvroute.events.intake import Intake
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import TimeSlicer
from kvroute.fleet.worker import parse_metrics, parse_models
from kvroute.index.chunk_index import ChunkIndex
from kvroute.index.prefix_index import PrefixIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.listeners import ControllerSockets, CoordinatorApp
from kvroute.lmcache.options import ControllerOptions, LMCacheOptions
from kvroute.wire import lmcache_controller
from kvroute.wire import lmcache_server as lmcache_mp
from kvroute.wire import zmq as zmtp
from kvroute.wire.batch_split import split_batch
from kvroute.wire.lmcache_server import read_load_rates
from kvroute.wire.vllm import (
    DIALECTS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    decode_batch,
    decode_newest,
)
from kvroute.wire.zmq import (
    EventMessage,
    pack_live,
    pack_replay,
    pack_replay_end,
    unpack_live,
    unpack_replay,
    unpack_replay_request,
)

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
DEADLINE_S = 5.0
"""For one frame; the largest takes some milliseconds."""

ODD_BINARY = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc1", b"\xc0", b"\xc2", b"\x90", b"\x80",
    b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\0\0\0\0\0\0\0", b"\xa4type",
    b"\xacBlockRemoved", b"\xd9\xff", b"\xa2\xff\xfe", b"\x91" * 1000, b"\x81\xa1a" * 500, b"\xc7\x08\xff" + bytes(8),
    b"\xd6\xff\xff\xff\xff\xff", b"\xabBlockStored", b"\xb0AllBlocksCleared",
)  # fmt: skip
ODD_JSON = (
    b"null", b"-1", b"1e999", b"99999999999999999999", b"[]", b"{}", b'"\\ud800"', b"\xff", b'"', b"[" * 2000,
    b'{"a":' * 1000, b"NaN", b"true", b'""', b"0.5", b"18446744073709551615",
    b"9" * 400, b"-" + b"9" * 5000,
)  # fmt: skip


class Mutator:
    """Changes bytes; mostly a little, so that what comes is nearly right."""

    def __init__(self, rng: random.Random, odd: Sequence[bytes]) -> None:
        self._rng = rng
        self._odd = odd

    def change(self, data: bytes, others: Sequence[bytes]) -> bytes:
        rng = self._rng
        for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
            at, way = rng.randrange(len(data) + 1), rng.random()
            if way < 0.35 and at < len(data):
                data = data[:at] + bytes((data[at] ^ 1 << rng.randrange(8),)) + data[at + 1 :]
            elif way < 0.5 and at < len(data):
                data = data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]
            elif way < 0.65:
                data = data[:at] + rng.choice(self._odd) + data[at + rng.choice([0, 1, 1, 5, 9]) :]
            elif way < 0.72:
                data = data[:at]
            elif way < 0.8:
                data = data[:at] + data[at + rng.choice([1, 2, 9, 50]) :]
            elif way < 0.88:
                piece = data[at : at + rng.choice([1, 9, 60, 400])]
                data = data[:at] + piece * rng.choice([2, 2, 5, 40]) + data[at:]
            elif others:
                other = rng.choice(others)
                data = data[:at] + other[rng.randrange(len(other) + 1) :]
        return data


def _captured(pattern: str) -> Iterator[dict[str, Any]]:
    for file in sorted(CAPTURES.glob(pattern)):
        with file.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def event_payloads(rng: random.Random) -> list[bytes]:
    """What engines published, and batches of every dialect and of many sizes."""
    found = [
        base64.b64decode(message["frames"][-1])
        for message in _captured("*vllm-0*.jsonl")
        if "frames" in message
    ]
    made = [
        dialect.encode(1.5, events, rank) for dialect in DIALECTS.values() for events, rank in _batches(rng)
    ]
    return [
        payload for payload in [*rng.sample(found, min(len(found), 250)), *made] if len(payload) < 100_000
    ]


def _batches(rng: random.Random) -> Iterator[tuple[list[KvEvent], int | None]]:
    def stored(first: int, blocks: int, parent: int | bytes | None, **more: Any) -> BlockStored:
        tokens = [rng.randrange(50_000) for _ in range(16 * blocks)]
        return BlockStored(list(range(first, first + blocks)), parent, tokens, 16, **more)

    yield [stored(1, 8, None)], None
    yield [stored(9, 1, 8), BlockRemoved([3], "GPU"), BlockRemoved([99])], 1
    yield [stored(20, 40, 2, medium="CPU", lora_name="ada", lora_id=1, extra_keys=[["ada"]] * 40)], 0
    yield [BlockStored([b"x" * 32, b"y" * 32], None, list(range(32)), 16, medium="GPU", group_idx=0)], None
    yield [BlockStored([7], None, [], 16, medium="disk"), AllBlocksCleared(), stored(1, 2, None)], None
    yield [BlockRemoved(list(range(300)), "GPU")], None
    yield [stored(1000, 500, None)], None
    yield [stored(2000 + 20 * number, 20, None) for number in range(40)], None
    yield [], 3


@dataclass
class _Streams:
    """The same batches through an engine's `Intake`, which has three ways, and plainly into a ledger."""

    intake: Intake
    subject: Ledger
    reference: Ledger

    @classmethod
    def make(cls) -> _Streams:
        clock = SystemClock()
        subject, reference = Ledger(PrefixIndex(), 0), Ledger(PrefixIndex(), 0)
        intake = Intake("w", subject, clock, KvEventsOptions(), TimeSlicer(clock, 0.5), lambda: None)
        intake.sequence.start_replay()
        intake.sequence.end_replay()
        return cls(intake, subject, reference)

    async def feed(self, payload: bytes) -> str:
        """The outcome of a payload. AssertionError if the fast and the complete way differ."""
        seq = self.intake.sequence.expected
        before = self.sizes(self.subject)
        unreadable = self.intake.counts.unreadable
        try:
            batch = decode_batch(payload)
        except WireError:
            batch = None
        if not self.intake.apply_fast([pack_live(EventMessage(b"", seq, payload))]):
            await self.intake.apply(EventMessage(b"", seq, payload), seq)
        if batch is None:
            if self.intake.counts.unreadable == unreadable:
                raise AssertionError("an unreadable batch was taken in")
            if self.sizes(self.subject) != before or self.intake.sequence.expected != seq:
                raise AssertionError("an unreadable batch changed what is believed")
            return "refused"
        if self.intake.counts.unreadable != unreadable:
            raise AssertionError("a readable batch was refused")
        for _ in self.reference.apply(batch):
            pass
        if self.sizes(self.subject) != self.sizes(self.reference):
            raise AssertionError(f"{self.sizes(self.subject)} believed, {self.sizes(self.reference)} told")
        return "taken in"

    @staticmethod
    def sizes(ledger: Ledger) -> tuple[int, ...]:
        return (*(ledger.held_blocks(tier) for tier in Tier), ledger.orphan_blocks)

    def check(self) -> None:
        for tier in Tier:
            if set(self.subject.held_keys(tier)) != set(self.reference.held_keys(tier)):
                raise AssertionError(f"other blocks of {tier} are believed than were told")
            # Two engine hashes may have one key: after the first is removed, fewer blocks are believed, never more.
            if not set(self.subject.indexed(tier)) <= set(self.subject.held_keys(tier)):
                raise AssertionError(f"the index holds blocks of {tier} that the ledger does not")


class Frames:
    """All that comes from engines and LMCache. `step` feeds one frame to one target."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.last: bytes = b""
        self._binary, self._json = Mutator(rng, ODD_BINARY), Mutator(rng, ODD_JSON)
        self._events = event_payloads(rng)
        self._controller_messages = _controller_messages()
        self._reports, self._registrations = _coordinator_bodies()
        self._streams = _Streams.make()
        self._fed = 0
        self._begin()
        self.targets: dict[str, Callable[[], Any]] = {
            "stream": self.stream,
            "decoders": self.decoders,
            "framing": self.framing,
            "zmtp": self.zmtp,
            "controller": self.controller,
            "coordinator": self.coordinator,
            "pages": self.pages,
        }
        self._weighted = [
            *("stream",) * 9, *("decoders",) * 3, *("framing",) * 2, *("zmtp",) * 3, *("controller",) * 4,
            *("coordinator",) * 3, "pages",
        ]  # fmt: skip

    def _begin(self) -> None:
        clock = SystemClock()
        index, options = ChunkIndex(), LMCacheOptions()
        self._controller = Controller(index, clock, ControllerOptions())
        self._controller.add_slot(1, "classic-a")
        self._sockets = ControllerSockets(self._controller, clock, ControllerOptions())
        self._coordinator = Coordinator(index, clock, options)
        self._app = CoordinatorApp(self._coordinator, clock, options.coordinator)

    async def step(self) -> tuple[str, str]:
        """Target and outcome. Raises what the target raises."""
        name = self.rng.choice(self._weighted)
        outcome = self.targets[name]()
        if asyncio.iscoroutine(outcome):
            outcome = await outcome
        self._fed += 1
        if self._fed % 4000 == 0:
            self._begin()
        return name, str(outcome)

    # Engines

    async def stream(self) -> str:
        rng = self.rng
        payload = rng.choice(self._events)
        if rng.random() < 0.7:
            payload = self._binary.change(payload, self._events)
        self.last = payload
        outcome = await self._streams.feed(payload)
        if rng.random() < 0.004 or sum(self._streams.sizes(self._streams.subject)) > 20_000:
            self._streams.check()
            self._streams = _Streams.make()
        return outcome

    def decoders(self) -> str:
        self.last = payload = self._binary.change(self.rng.choice(self._events), self._events)
        decode_newest(payload)
        try:
            whole = decode_batch(payload)
        except WireError:
            whole = None
        try:
            pieces = [decode_batch(piece.payload) for piece in split_batch(payload) if piece is not None]
        except WireError:
            pieces = []
        if whole is not None and not pieces:
            raise AssertionError("a batch can be decoded, but its pieces cannot")
        if whole is None and pieces:
            raise AssertionError("pieces of a batch can be decoded that cannot be as a whole")
        return "decoded" if whole else "refused"

    def framing(self) -> str:
        rng = self.rng
        message = EventMessage(b"kv", rng.randrange(1 << 32), b"payload")
        frames = rng.choice(
            [pack_live(message), pack_replay(message, with_topic=True), pack_replay(message, with_topic=False),
             pack_replay_end(with_topic=True), pack_replay_end(with_topic=False)]
        )  # fmt: skip
        frames = list(frames)
        for _ in range(rng.randrange(3)):
            way, at = rng.random(), rng.randrange(len(frames) or 1)
            if way < 0.3 and frames:
                frames[at] = self._binary.change(frames[at], frames)
            elif way < 0.6 and frames:
                del frames[at]
            else:
                frames.insert(at, rng.randbytes(rng.choice([0, 1, 7, 8, 9, 300])))
        self.last = repr(frames).encode()
        outcomes = ""
        for unpack in (unpack_live, unpack_replay, unpack_replay_request):
            try:
                unpack(frames)
                outcomes += "1"
            except WireError:
                outcomes += "0"
        return "decoded" if "1" in outcomes else "refused"

    def zmtp(self) -> str:
        rng = self.rng
        data = b""
        for _ in range(rng.randrange(1, 6)):
            frames = [
                rng.randbytes(rng.choice([0, 2, 2, 2])),
                rng.randbytes(8),
                rng.choice(self._events)[:2000],
            ]
            for place, frame in enumerate(frames):
                more = place < len(frames) - 1
                if len(frame) > 255 or rng.random() < 0.1:
                    data += bytes((more | 2,)) + len(frame).to_bytes(8) + frame
                else:
                    data += bytes((more, len(frame))) + frame
            if rng.random() < 0.2:
                data += zmtp.command(
                    rng.choice([b"PING", b"ERROR", b"READY", b"?"]), rng.randbytes(rng.choice([0, 2, 30]))
                )
        if rng.random() < 0.7:
            data = self._binary.change(data, self._events)
        self.last = data
        whole = _read(zmtp.MessageReader(), [data])
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([1, 2, 8, 40])))
        parts = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        reader = zmtp.MessageReader()
        pieces = _read(reader, parts)
        if whole[1] != pieces[1] or (not whole[1] and whole[0] != pieces[0]):
            raise AssertionError("what is read depends on how it was cut")
        for body in reader.commands:
            try:
                zmtp.split_command(body)
            except WireError:
                pass
        greeting = self._binary.change(zmtp.GREETING, [data])[:64].ljust(64, b"\0")
        try:
            zmtp.check_greeting(greeting)
        except WireError:
            pass
        return "refused" if whole[1] else "read"

    # LMCache

    def controller(self) -> str:
        payload = self.rng.choice(self._controller_messages)
        if self.rng.random() < 0.85:
            mutator = self._json if payload[:1] == b"{" else self._binary
            payload = mutator.change(payload, self._controller_messages)
        self.last = payload
        failed, unreadable = self._controller.counts.failed, self._controller.counts.unreadable
        for piece in lmcache_controller.split(payload):
            # Private: a million frames through real sockets would take hours.
            reply = self._sockets._handle_message(piece)
            if reply is not None:
                lmcache_controller.decode_reply(lmcache_controller.encode(reply))
        try:
            lmcache_controller.decode_reply(payload)
        except WireError:
            pass
        if self.rng.random() < 0.01:
            self._controller.tick()
            self._controller.gauges()
            self._controller.problems()
            self._controller.sweep()
        if self._controller.counts.failed > failed:
            raise AssertionError("a message failed, see the log")
        return "refused" if self._controller.counts.unreadable > unreadable else "handled"

    async def coordinator(self) -> str:
        rng = self.rng
        method, path, body = rng.choice(
            [("POST", "/events", rng.choice(self._reports)), ("POST", "/events", rng.choice(self._reports)),
             ("POST", "/instances", rng.choice(self._registrations)), ("PUT", "/instances/a/heartbeat", b""),
             ("DELETE", "/instances/a", b""), ("GET", "/instances", b""), ("GET", "/instances/%ff", b"")]
        )  # fmt: skip
        if rng.random() < 0.85:
            body = self._json.change(body, self._reports)
        if rng.random() < 0.1:
            path = "/" + rng.choice(["instances/", "instances//heartbeat", "events/", "x" * 5000, ""])
        self.last = f"{method} {path}\n".encode("utf-8", "replace") + body
        for decode in (lmcache_mp.decode_status, lmcache_mp.read_prefetch_answer):
            try:
                decode(body)
            except WireError:
                pass
        status = await _asked(self._app, method, path, body)
        # 403, 409, 429: the sender may not register this address, or this server, or so many.
        if status not in (200, 204, 400, 403, 404, 409, 413, 422, 429):
            raise AssertionError(f"answered {status}")
        if rng.random() < 0.01:
            self._coordinator.expire()
            self._coordinator.instances()
        return str(status)

    def pages(self) -> str:
        """What workers and LMCache's servers show about themselves."""
        rng = self.rng
        page = rng.choice(_PAGES)
        self.last = page = self._json.change(page, _PAGES)
        read_load_rates(page.decode("utf-8", "replace"))
        parse_metrics(page)
        try:
            parse_models(page)
        except ValueError:
            return "refused"
        return "read"


_PAGES = (
    b'process_start_time_seconds 1.7e9\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n',
    b'{"object":"list","data":[{"id":"m","object":"model","root":"/m","parent":null,"max_model_len":4096},{"id":"ada","parent":"m"}]}',
    b'lmcache_mp:l1_load_bandwidth_gbps_sum{gpu="0"} 12.5\nlmcache_mp:l1_load_bandwidth_gbps_count{gpu="0"} 3\n',
)


def _controller_messages() -> list[bytes]:
    found = {
        base64.b64decode(frame)
        for message in _captured("lmcache-classic-controller.jsonl")
        for frame in message["frames"]
        if len(frame) > 40
    }
    wire = lmcache_controller
    sender: dict[str, Any] = {"instance_id": "classic-a", "worker_id": 0}
    place = {**sender, "location": "LocalCPUBackend"}
    made: list[Any] = [
        wire.Register(**sender, ip="127.0.0.1", port=1),
        wire.Heartbeat(**sender, ip="127.0.0.1", port=1),
        wire.KvOperations(
            **place, operations=[wire.Operation("admit", number, number) for number in range(30)]
        ),
        wire.KvOperations(
            **place, operations=[wire.Operation("evict", -number, number) for number in range(600)]
        ),
        wire.KvAdmit(**place, key=5),
        wire.KvEvict(**place, key=5),
        wire.FullSyncStart(**place, sync_id="s", total_keys=3, batch_count=2),
        wire.FullSyncBatch(**place, sync_id="s", batch_id=0, keys=[1, 2]),
        wire.FullSyncBatch(**place, sync_id="s", batch_id=1, keys=list(range(4000))),
        wire.FullSyncEnd(**place, sync_id="s", actual_total_keys=3),
        wire.FullSyncStatus(**sender, sync_id="s"),
        wire.P2pLookup(**sender, hashes=[1, 2, 3]),
        wire.DeRegister(**sender),
    ]
    return sorted(found | {wire.encode(each) for each in made} | {msgspec.json.encode(each) for each in made})


def _coordinator_bodies() -> tuple[list[bytes], list[bytes]]:
    reports, registrations = [], []
    for call in _captured("*.coordinator.jsonl"):
        if call.get("body"):
            body = json.dumps(call["body"], separators=(",", ":")).encode()
            if call["path"] == "/events" and len(body) < 200_000:
                reports.append(body)
            elif call["path"] == "/instances":
                registrations.append(body)
    registrations.append(b'{"instance_id":"a","ip":"127.0.0.1","http_port":8080,"mq_port":0}')
    return reports, registrations


def _read(reader: zmtp.MessageReader, parts: Iterable[bytes]) -> tuple[list[list[bytes]], bool]:
    messages: list[list[bytes]] = []
    try:
        for part in parts:
            messages.extend(list(message) for message in reader.feed(part))
    except WireError:
        return messages, True
    return messages, False


async def _asked(app: CoordinatorApp, method: str, path: str, body: bytes) -> int:
    status = 0
    parts = [body[: len(body) // 2], body[len(body) // 2 :]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    await app({"type": "http", "method": method, "path": path}, receive, send)
    return status


async def fuzz_frames(
    count: int, seed: int, *, folder: Path | None = None, progress: Callable[[Report], None] = lambda _: None
) -> Report:
    """Feed `count` frames. Frames that show a defect are saved in `folder`."""
    report, frames, kept = Report(), Frames(seed), Counter[str]()
    while report.inputs < count:
        report.inputs += 1
        began = time.process_time()
        finding: Finding | None = None
        try:
            name, outcome = await frames.step()
            report.outcomes[f"{name}: {outcome}"] += 1
        except Exception as error:
            own = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {Path(own.filename).name} {own.name}"
            finding = Finding(kind, "".join(traceback.format_exception(error)))
            frames._streams = _Streams.make()
        if (took := time.process_time() - began) > DEADLINE_S:
            finding = Finding("slow", f"{took:.1f} s")
        if finding is not None:
            report.findings[finding.kind] += 1
            kept[finding.kind] += 1
            if folder is not None and kept[finding.kind] <= 3:
                folder.mkdir(parents=True, exist_ok=True)
                file = folder / f"frame-{finding.kind.replace(' ', '-')}.{kept[finding.kind]}.bin"
                file.write_bytes(frames.last)
                report.saved.append(file)
                print(f"! {finding.kind}: saved as {file}\n{finding.text}")
        if report.inputs % 1000 == 0:
            progress(report)
            await asyncio.sleep(0)
    return report
