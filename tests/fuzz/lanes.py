"""Requests through both lanes of a gateway within one process, with clients' connections in memory.

The protocol classes, the data plane and the connections to workers are the gateway's own; the worker listens
on a real socket. Both lanes get the same segments, and must give the same answers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tests.fuzz.answers import Answer, Unreadable, read_answers
from tests.fuzz.cases import ADMIN_KEY, KEY, MARKED_KEYS, OWN_KEYS, Case, Cases, marked, strange_marks
from tests.fuzz.worker import EchoWorker
from tests.support.waiting import until
from uvicorn.server import ServerState

from kvroute.app.runtime import Runtime
from kvroute.app.server import uvicorn_config
from kvroute.config.config import Config

LANES = ("fast lane", "ASGI path")
DEADLINE_S = 20.0
"""For a whole batch to end once its clients have left; far more than it takes."""
_QUIET_ROUNDS = 8
_BATCH = 64
_ROUND_S = 0.0008
_KEPT_PER_KIND = 3
_CUT = "ASGI callable returned without completing response."
"""uvicorn's word for an answer that had to be cut, which `kvroute.logs` leaves out."""
_STRAY = b"@stray-answer@"

PROFILES: dict[str, dict[str, Any]] = {
    "open": {"routing": {"strategy": "roundrobin"}},
    "keys": {
        "routing": {"strategy": "prefixaware"},
        "server": {"api_keys": [KEY.decode()], "max_body_bytes": 100_000},
        "fleet": {"aliases": {"alias": "m"}, "worker_api_key": "workers-own-key"},
    },
    "session": {"routing": {"strategy": "session"}, "fleet": {"aliases": {"alias": "m"}}},
    "kvaware": {
        "routing": {"strategy": "kvaware"},
        "server": {"api_keys": [KEY.decode()], "allow_strategy_header": True},
        "kv_events": {"endpoint": "tcp://127.0.0.1:9", "retry_s": 3600},
    },
    "limits": {
        "routing": {"strategy": "prefixaware"},
        "server": {
            "client_keys": {"file": str(Path(__file__).parents[1] / "data" / "fuzz-keys.yaml")},
            "allow_strategy_header": True,
        },
        "admission": {"max_concurrent": 1000},
    },
}


def hides_keys(profile: str) -> bool:
    """Whether the gateway checks keys, so that workers must not get them."""
    return not {"api_keys", "client_keys"}.isdisjoint(PROFILES[profile].get("server", {}))


def configuration(profile: str, workers: Sequence[str]) -> dict[str, Any]:
    """The gateway's configuration as of its file. No worker is ejected: which one is routable would depend on
    what other clients sent."""
    sections = {name: dict(section) for name, section in PROFILES[profile].items()}
    fleet = sections.setdefault("fleet", {})
    fleet["workers"] = [{"id": f"w{place}", "url": url} for place, url in enumerate(workers)]
    fleet["health"] = {"interval_s": 600, "recheck_s": 600, "burst_failures": 1_000_000}
    sections["admin"] = {"api_key": ADMIN_KEY.decode()}
    sections["upstream"] = {"first_byte_timeout_s": 5, "idle_timeout_s": 5}
    sections["retries"] = {"budget_percent": 100, "budget_min_per_s": 1_000_000}
    return sections


@dataclass(frozen=True)
class Finding:
    """`kind` is the same for findings with the same visible cause."""

    kind: str
    text: str


@dataclass
class Report:
    """What came of it so far. Mutable."""

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    saved: list[Path] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """What came of other inputs."""
        self.inputs += other.inputs
        self.outcomes += other.outcomes
        self.findings += other.findings
        self.saved += other.saved


class Client(asyncio.Transport):
    """The transport of one client's connection, as uvloop's behaves: once it is closed, writing raises.

    Mutable: `written` is the answer so far.
    """

    def __init__(self, segments: list[bytes], case: Case, activity: Callable[[], None]) -> None:
        super().__init__()
        self.written = bytearray()
        self.was_closed = False
        """By the gateway."""
        self._segments = segments
        self._case = case
        self._active = activity
        self._protocol: Any = None
        self._is_paused = self._is_closing = self._is_lost = self._has_stalled = False
        self._is_scheduled = False
        self._loop = asyncio.get_running_loop()

    def begin(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._resume()

    def leave(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._lost()

    def _resume(self) -> None:
        if not self._is_scheduled and not self._is_paused and not self._is_closing:
            self._is_scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        if self._is_paused or self._is_closing:
            return
        if not self._segments:
            if self._case.leaves:
                self.leave()
            return
        self._active()
        self._protocol.data_received(self._segments.pop(0))
        self._resume()

    def _lost(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._active()
            self._protocol.connection_lost(None)

    # As of asyncio

    def write(self, data: Any) -> None:
        if self._is_lost:
            raise RuntimeError(
                "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
            )
        if self._is_closing:
            return
        self._active()
        self.written += data
        if self._case.stalls and not self._has_stalled:
            self._has_stalled = True
            self._protocol.pause_writing()
            self._loop.call_later(_ROUND_S, self._read_again)

    def _read_again(self) -> None:
        if not self._is_lost:
            self._active()
            self._protocol.resume_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = self.was_closed = True
            self._active()
            self._loop.call_soon(self._lost)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused and not self._is_closing:
            self._is_paused = False
            self._resume()

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 65_536

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 40_000), "sockname": ("127.0.0.1", 8080)}.get(name, default)


class _Log(logging.Handler):
    """Keeps what must not be in a log: tracebacks, and what asyncio says of tasks and callbacks."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.findings: list[Finding] = []
        self.lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        text = record.getMessage()
        # What comes first is the client's own x-request-id, into which a mutation may have put anything.
        if OWN_KEYS.search(text.partition(" /")[2].encode()):
            self.findings.append(Finding("key in the log", text))
        if record.exc_info and record.exc_info[1]:
            self.findings.append(_of_exception(record.exc_info[1], text))
        elif record.levelno >= logging.ERROR and record.msg != _CUT:
            self.findings.append(Finding(f"log: {record.msg[:60]}", text))


def _of_exception(error: BaseException, text: str) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "kvroute" in frame.filename] or list(frames[-1:])
    where = f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "nowhere"
    full = "".join(traceback.format_exception(error))
    return Finding(f"traceback: {type(error).__name__} in {where}", f"{text}\n{full}")


class Lanes:
    """A gateway whose two lanes are asked. Made by `lanes`."""

    def __init__(
        self, profile: str, config: Config, runtime: Runtime, workers: list[EchoWorker], log: _Log
    ) -> None:
        self.profile = profile
        self.runtime = runtime
        self.workers = workers
        self.log = log
        self.activity = 0
        self.state = ServerState()
        self._number = 0
        self._settings = {}
        for lane in LANES:
            server = config.server.model_copy(update={"fast_lane": lane == LANES[0]})
            settings = uvicorn_config(config.model_copy(update={"server": server}), runtime)
            settings.load()
            self._settings[lane] = settings

    def _active(self) -> None:
        self.activity += 1

    async def run(self, cases: Sequence[Case]) -> tuple[list[list[Finding]], list[Finding], Counter[str]]:
        """Findings of each case, findings of unknown cases, and the outcomes."""
        before = len(self.log.findings)
        faults = [len(worker.faults) for worker in self.workers]
        clients: list[tuple[Case, bytes, bytes, list[Client]]] = []
        for case in cases:
            self._number += 1
            data, mark = marked(case.data, self._number)
            pair = []
            for lane in LANES:
                client = Client(case.segments(data), case, self._active)
                settings = self._settings[lane]
                make = cast(Any, settings.http_protocol_class)
                protocol = make(config=settings, server_state=self.state, app_state={})
                try:
                    client.begin(protocol)
                except Exception as error:
                    self.log.findings.append(_of_exception(error, "connection_made"))
                pair.append(client)
            clients.append((case, data, mark, pair))
        await self._quiet()
        for *_, pair in clients:
            for client in pair:
                client.leave()
        common = [] if await self._ended() else [self._hang()]
        common += self.log.findings[before:]
        for worker, known in zip(self.workers, faults, strict=True):
            common += [
                Finding(f"forwarded: {fault.partition(' ')[0]}", fault) for fault in worker.faults[known:]
            ]
        outcomes: Counter[str] = Counter()
        each = [self._judge(*one, outcomes) for one in clients]
        return each, common, outcomes

    async def _quiet(self) -> None:
        """Until nothing has moved for some rounds of the loop, in which all that is ready is worked off."""
        seen, rounds = None, 0
        while rounds < _QUIET_ROUNDS:
            await asyncio.sleep(_ROUND_S)
            now = (self.activity, *(worker.activity for worker in self.workers))
            rounds = rounds + 1 if now == seen else 0
            seen = now

    async def _ended(self) -> bool:
        """Whether all requests in flight end after their clients have left."""
        plane, loop = self.runtime.plane, asyncio.get_running_loop()
        until = loop.time() + DEADLINE_S
        while plane.entry_control.in_flight or self.state.tasks or self.state.connections:
            if loop.time() > until:
                return False
            await asyncio.sleep(_ROUND_S)
        return True

    def _hang(self) -> Finding:
        state = self.state
        text = f"{self.runtime.plane.entry_control.in_flight} requests, {len(state.tasks)} tasks, "
        text += f"{len(state.connections)} connections are left"
        for task in list(self.state.tasks):
            text += "\n" + repr(task.get_coro())
            task.cancel()
        self.state.connections.clear()
        self.runtime.plane.entry_control.cut()
        return Finding("hang", text)

    def _judge(
        self, case: Case, data: bytes, mark: bytes, pair: list[Client], outcomes: Counter[str]
    ) -> list[Finding]:
        findings: list[Finding] = []
        read: list[list[Answer]] = []
        for lane, client in zip(LANES, pair, strict=True):
            written = bytes(client.written)
            strange = strange_marks(written, data, mark)
            if strange or _STRAY in written:
                findings.append(Finding("another's bytes", f"{lane}: {strange!r} in {written[:2000]!r}"))
            if OWN_KEYS.search(written) and not OWN_KEYS.search(MARKED_KEYS.sub(b"", data)):
                findings.append(Finding("key in an answer", f"{lane}: {written[:2000]!r}"))
            try:
                answers = read_answers(written, was_closed=client.was_closed, may_be_head=b"HEAD" in data)
            except Unreadable as error:
                if not case.leaves:
                    findings.append(Finding("unreadable answer", f"{lane}: {error}: {written[:2000]!r}"))
                continue
            read.append(answers)
            statuses = [answer.status for answer in answers]
            outcomes.update(f"{status}" for status in statuses)
            if not answers:
                outcomes["left" if case.leaves else "closed" if client.was_closed else "unfinished"] += 1
            hostile = b"x-fuzz-worker" in data.lower()
            if 500 in statuses and not hostile:
                findings.append(Finding("status 500", f"{lane}: {answers!r}"[:3000]))
            if any(b"Internal error" in answer.body for answer in answers):
                findings.append(Finding("internal error", f"{lane}: {answers!r}"[:3000]))
            if any(not answer.is_complete for answer in answers) and not (case.leaves or hostile):
                findings.append(Finding("cut answer", f"{lane}: {written[:2000]!r}"))
            if case.is_valid and (statuses != [200] or mark not in answers[0].body) and not case.leaves:
                findings.append(Finding("refused", f"{lane}: {written[:2000]!r}"))
        if len(read) == 2 and not case.leaves:
            fast, complete = ([_shown(answer) for answer in answers] for answers in read)
            if fast != complete:
                findings.append(
                    Finding("lanes differ", f"fast lane: {fast!r}\nASGI path: {complete!r}"[:4000])
                )
            elif pair[0].was_closed != pair[1].was_closed and fast:
                findings.append(
                    Finding("lanes differ in closing", f"{[c.was_closed for c in pair]} {fast!r}"[:3000])
                )
        return findings


_VARYING = (
    b"x-request-id",
    b"x-kvroute-worker",
    b"x-kvroute-reason",
    b"x-kvroute-hit-tokens",
    b"x-kvroute-hit-tiers",
)
_CONTROL = re.compile(rb'"(?:running_requests|at|time|age_s|seconds|ready)"|# HELP')


def _shown(answer: Answer) -> tuple[int, tuple[tuple[bytes, bytes], ...], bytes]:
    """Without what may differ between two times of asking."""
    headers = tuple(pair for pair in answer.headers if pair[0] not in _VARYING)
    body = re.sub(rb"[0-9a-f]{32}|'w\d'", b"<id>", answer.body)
    if _CONTROL.search(body) or (b"x-kvroute-strategy" not in dict(headers) and answer.status == 200):
        body, headers = b"", ()
    return answer.status, headers, body


@asynccontextmanager
async def lanes(profile: str) -> AsyncIterator[Lanes]:
    """A gateway with two echo workers."""
    log = _Log()
    root = logging.getLogger()
    level = logging.getLogger("kvroute").level
    root.addHandler(log)
    logging.getLogger("kvroute").setLevel(logging.INFO)
    loop = asyncio.get_running_loop()

    def failed(_: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        text = str(context.get("message"))
        log.findings.append(
            _of_exception(error, text) if error else Finding(f"loop: {text[:60]}", repr(context))
        )

    loop.set_exception_handler(failed)
    try:
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(EchoWorker()) for _ in range(2)]
            for worker in workers:
                worker.hides_keys = hides_keys(profile)
            config = Config.model_validate(configuration(profile, [worker.url for worker in workers]))
            runtime = await stack.enter_async_context(Runtime(config))
            await until(lambda: not list(runtime.fleet.reasons_not_ready()), within_s=DEADLINE_S)
            yield Lanes(profile, config, runtime, workers, log)
    finally:
        loop.set_exception_handler(None)
        root.removeHandler(log)
        logging.getLogger("kvroute").setLevel(level)


class Recorder:
    """Finds out whose a finding is, and saves the first inputs of each kind. Mutable."""

    def __init__(
        self, folder: Path | None, report: Report, seed: int, report_line: Callable[[str], None] = print
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._report = report
        self._report_line = report_line
        self._reported: set[str] = set()

    async def batch(self, target: Lanes, cases: Sequence[Case]) -> None:
        each, common, outcomes = await target.run(cases)
        report = self._report
        report.inputs += len(cases)
        report.outcomes += outcomes
        unsure = [number for number, findings in enumerate(each) if findings]
        if common:
            report.findings.update(finding.kind for finding in common)
            new = {finding.kind for finding in common if report.findings[finding.kind] <= 20}
            unsure = list(range(len(cases))) if new else unsure
            for finding in common:
                if finding.kind not in self._reported:
                    self._reported.add(finding.kind)
                    self._report_line(f"! {finding.kind}\n{finding.text}")
        for number in unsure:
            if not common and all(report.findings[f.kind] > 20 for f in each[number]):
                report.findings.update(f.kind for f in each[number])
                continue
            again, also, _ = await target.run([cases[number]])
            confirmed = [*again[0], *also]
            if not confirmed and each[number]:
                report.outcomes["not repeated"] += 1
            report.findings.update({finding.kind for finding in again[0]})
            for finding in confirmed:
                self._save(finding, target.profile, cases[number])

    def _save(self, finding: Finding, profile: str, case: Case) -> None:
        if self._folder is None:
            return
        name = re.sub(r"\W+", "-", finding.kind).strip("-")
        if len(list(self._folder.glob(f"{name}.*.json"))) >= _KEPT_PER_KIND:
            return
        file = self._folder / f"{name}.{self._seed}.{len(self._report.saved)}.json"
        case.save(file, profile=profile, finding=finding.text[:4000])
        self._report.saved.append(file)
        self._report_line(f"! {finding.kind}: saved as {file}")


async def fuzz_requests(inputs: int, seed: int, profile: str, folder: Path | None = None) -> Report:
    """Send `inputs` cases to both lanes of one gateway."""
    report, cases = Report(), Cases(seed)
    recorder = Recorder(folder, report, seed)
    async with lanes(profile) as target:
        while report.inputs < inputs:
            batch = [cases.case() for _ in range(min(_BATCH, inputs - report.inputs))]
            await recorder.batch(target, batch)
    return report
