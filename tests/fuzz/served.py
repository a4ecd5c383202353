"""A `kvroute serve` of its own process in front of echo workers, over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.answers import Unreadable, read_answers
from tests.fuzz.cases import MARKED_KEYS, OWN_KEYS, Case, Cases, marked, strange_marks
from tests.fuzz.lanes import Finding, Report, configuration, hides_keys
from tests.fuzz.worker import EchoWorker

START_S = 60.0
DEADLINE_S = 20.0
"""For any step of a client: connecting, being read from, being answered or closed."""
_QUIET_S = 0.3
"""An answer is over when nothing has come for so long; before its first byte it may take `_FIRST_S`."""
_FIRST_S = 1.5
_CLIENTS = 256
_STRAY = b"@stray-answer@"


@dataclass
class Served:
    """A running gateway. `lines` are those of its log so far."""

    host: str
    port: int
    process: asyncio.subprocess.Process
    workers: list[EchoWorker]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        return int(found[1]) * 1024 / 1e6 if found else 0.0

    def findings(self) -> list[Finding]:
        """What must not be: in the log, in what was forwarded, and its end."""
        log, found = self.log, list[Finding]()
        if "Traceback" in log:
            at = log.index("Traceback")
            found.append(Finding("traceback in the log", log[max(0, at - 300) : at + 3000]))
        for line in self.lines:
            if OWN_KEYS.search(line.partition(" /")[2].encode()):  # as in `lanes`
                found.append(Finding("key in the log", line[:600]))
        for worker in self.workers:
            found += [Finding(f"forwarded: {fault.partition(' ')[0]}", fault) for fault in worker.faults]
        if self.process.returncode is not None:
            found.append(Finding("the gateway ended", f"exit code {self.process.returncode}\n{log[-3000:]}"))
        return found


@asynccontextmanager
async def served(profile: str) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(EchoWorker()) for _ in range(2)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sections = configuration(profile, [worker.url for worker in workers])
        sections.setdefault("server", {}).update(host="127.0.0.1", port=0, drain_timeout_s=2)
        for worker in workers:
            worker.hides_keys = hides_keys(profile)
        file = folder / "kvroute.yaml"
        file.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvroute", "serve", "-c", str(file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            limit=1 << 24,
        )
        running = Served("", 0, process, workers)
        listening: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(_read(process, running.lines, listening))
        try:
            async with asyncio.timeout(START_S):
                running.host, running.port = await listening
                while b"200" not in (await _once(running, b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n"))[:15]:
                    await asyncio.sleep(0.02)
            yield running
        finally:
            if process.returncode is None:
                process.terminate()
                with suppress(TimeoutError):
                    async with asyncio.timeout(DEADLINE_S):
                        await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            await reader


async def _read(
    process: asyncio.subprocess.Process, lines: list[str], listening: asyncio.Future[tuple[str, int]]
) -> None:
    assert process.stderr is not None
    async for line in process.stderr:
        lines.append(line.decode("utf-8", "replace"))
        found = re.search(r"listens on http://([\d.]+):(\d+)", lines[-1])
        if found and not listening.done():
            listening.set_result((found[1], int(found[2])))
    if not listening.done():
        listening.set_exception(RuntimeError("".join(lines)))


async def _once(to: Served, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(to.host, to.port)
    try:
        writer.write(request)
        return await reader.read(65_536)
    finally:
        writer.close()


class _Client(asyncio.Protocol):
    """Mutable: what came so far, and when it last did."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.was_closed = False
        self.last = asyncio.get_running_loop().time()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.last = asyncio.get_running_loop().time()

    def connection_lost(self, exc: Exception | None) -> None:
        self.was_closed = True


async def ask(to: Served, case: Case, number: int) -> tuple[list[Finding], list[str]]:
    """Send one case; what is wrong with the answers, and their statuses."""
    loop = asyncio.get_running_loop()
    data, mark = marked(case.data, number)
    async with asyncio.timeout(DEADLINE_S):
        _, client = await loop.create_connection(_Client, to.host, to.port)
    transport = client.transport
    assert transport is not None
    try:
        for segment in case.segments(data):
            if client.was_closed:
                break
            transport.write(segment)
            await asyncio.sleep(0)
        client.last = loop.time()
        while not case.leaves and not client.was_closed:
            if loop.time() - client.last > (_QUIET_S if client.data else _FIRST_S):
                break
            await asyncio.sleep(_QUIET_S / 5)
    finally:
        transport.abort()
    written = bytes(client.data)
    strange = strange_marks(written, data, mark)
    if strange or _STRAY in written:
        return [Finding("another's bytes", f"{strange!r} in {written[:2000]!r}")], []
    if OWN_KEYS.search(written) and not OWN_KEYS.search(MARKED_KEYS.sub(b"", data)):
        return [Finding("key in an answer", repr(written[:2000]))], []
    try:
        answers = read_answers(written, was_closed=client.was_closed, may_be_head=b"HEAD" in data)
    except Unreadable as error:
        return ([] if case.leaves else [Finding("unreadable answer", f"{error}: {written[:2000]!r}")]), []
    statuses = [str(answer.status) for answer in answers]
    if "500" in statuses and b"x-fuzz-worker" not in data.lower():
        return [Finding("status 500", repr(answers)[:3000])], statuses
    return [], statuses or ["closed" if client.was_closed else "unfinished"]


async def fuzz_served(
    count: int,
    seed: int,
    profile: str,
    *,
    folder: Path | None = None,
    progress: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Send cases to one gateway from many concurrent clients. It must answer `/health` after each wave."""
    report, cases, kept = Report(), Cases(seed), Counter[str]()

    def note(finding: Finding, case: Case | None) -> None:
        report.findings[finding.kind] += 1
        kept[finding.kind] += 1
        if kept[finding.kind] <= 3:
            print(f"! {finding.kind}\n{finding.text}")
            if folder is not None and case is not None:
                file = (
                    folder / f"{re.sub(r'[^a-z0-9]+', '-', finding.kind.lower())}.{kept[finding.kind]}.json"
                )
                case.save(file, profile=profile, finding=finding.text)
                report.saved.append(file)

    async with served(profile) as gateway:
        number = 0
        while report.inputs < count and not report.findings["the gateway ended"]:
            wave = [cases.case() for _ in range(min(_CLIENTS, count - report.inputs))]
            numbers = range(number, number + len(wave))
            number += len(wave)
            results = await asyncio.gather(
                *(ask(gateway, case, each) for case, each in zip(wave, numbers, strict=True)),
                return_exceptions=True,
            )
            for case, result in zip(wave, results, strict=True):
                report.inputs += 1
                if isinstance(result, BaseException):
                    note(Finding(f"client: {type(result).__name__}", repr(result)), case)
                    continue
                report.outcomes.update(result[1])
                for finding in result[0]:
                    note(finding, case)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    health = await _once(gateway, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                if not health.startswith(b"HTTP/1.1 200"):
                    note(Finding("health", repr(health)), None)
            except (TimeoutError, OSError) as error:
                note(Finding("health", repr(error)), None)
            for finding in gateway.findings():
                if not report.findings[finding.kind]:
                    note(finding, None)
            progress(report)
        report.outcomes["MB resident at the end"] = round(gateway.rss_mb)
    return report
