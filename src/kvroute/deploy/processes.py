"""A child process that its owner can wait for, stop, and never leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

from kvroute.clock import Clock
from kvroute.deploy import guard
from kvroute.errors import KvrouteError

VISIT_TIMEOUT_S = 2.0


async def is_ready(url: str, http: httpx.AsyncClient) -> bool:
    """True when the server behind `url` answers as it should within `VISIT_TIMEOUT_S`.

    `http://...` answers 200; `redis://HOST:PORT` answers PING with PONG; `tcp://HOST:PORT` accepts a
    connection. Raises ValueError for any other scheme.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(VISIT_TIMEOUT_S):
            match parts.scheme:
                case "http":
                    return (await http.get(url)).status_code == 200
                case "redis":
                    return (await _said(parts.hostname, parts.port, b"PING\r\n")).startswith(b"+PONG")
                case "tcp":
                    await _said(parts.hostname, parts.port, b"")
                    return True
    except (OSError, TimeoutError, httpx.TransportError):
        return False  # not listening yet
    raise ValueError(f"nobody knows how to ask {url}")


async def _said(host: str | None, port: int | None, words: bytes) -> bytes:
    """The first line of the answer to `words`; nothing is waited for when there are none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(words)
        return await reader.readline() if words else b""
    finally:
        writer.close()


POLL_S = 0.2
# The guard kills after the grace; this much later the owner kills the guard.
GUARD_MARGIN_S = 3.0
LAST_WORDS_BYTES, FIRST_ERROR_BYTES = 16_384, 524_288
# As tracebacks end, alone or behind a logger's prefix: "ValueError: ...", "... [file.py:9] ValueError: ...".
NAMES_EXCEPTION = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception): ")


class ProcessFailed(KvrouteError):
    """A child process ended, or was not ready in time. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One command to run. `env` is the whole environment; output goes to `log_path` (appended)."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    cwd: Path | None = None
    stop_grace_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""


class ChildProcess:
    """`spec` running under `guard.py`, in a session of its own (a terminal's Ctrl-C does not reach it).

    Mutable: the process handle and the log's start, set by `start`. An owner that dies, even by
    SIGKILL, takes the process and everything that it started with it. Use as an async context
    manager, or pair `start` with `stop`.
    """

    def __init__(self, spec: ChildSpec, clock: Clock) -> None:
        self.spec = spec
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        """Start it (again). Raises OSError when the log cannot be written."""
        if self.running:
            raise RuntimeError(f"{self.spec.name} is already running")
        self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-S",
                "-E",
                guard.__file__,
                str(self.spec.stop_grace_s),
                *self.spec.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(self.spec.env),
                cwd=self.spec.cwd,
                start_new_session=True,
            )

    @property
    def started(self) -> bool:
        """True from the first `start` on."""
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """The guard's process id, which is also the process group of the command."""
        return self._started().pid

    @property
    def returncode(self) -> int | None:
        """The command's exit code, -N after signal N, None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def wait(self) -> int:
        """Wait for the end; the exit code, -N after signal N."""
        process = self._started()
        code = await process.wait()
        if code == -signal.SIGKILL:
            # Perhaps the guard itself was killed, and could not end what it guarded.
            self._signal(signal.SIGKILL, group=True)
        return code

    async def stop(self) -> int:
        """SIGTERM, SIGKILL after the grace; the exit code. Cancelled: SIGKILL at once."""
        try:
            self.terminate()
            async with asyncio.timeout(self.spec.stop_grace_s + GUARD_MARGIN_S):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()
        except BaseException:
            self.kill()
            raise

    def terminate(self) -> None:
        """SIGTERM, and SIGKILL after the grace, without waiting."""
        if self.running:
            self._signal(signal.SIGTERM, group=False)

    def kill(self) -> None:
        """SIGKILL the command and all its processes, without waiting."""
        if self.running:
            self._signal(signal.SIGKILL, group=True)

    def last_words(self, lines: int = 15) -> str:
        """The last lines that it wrote since its last start."""
        return "\n".join(self._lines(LAST_WORDS_BYTES)[-lines:])

    def first_error(self) -> str:
        """The first line since its last start that names an exception, as far as the log is read:
        what others follow from. Empty when there is none."""
        return next((line for line in self._lines(FIRST_ERROR_BYTES) if NAMES_EXCEPTION.search(line)), "")

    def _lines(self, most_bytes: int) -> list[str]:
        try:
            with self.spec.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - most_bytes))
                text = log.read(most_bytes).decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()]

    async def wait_ready(
        self, url: str, *, timeout_s: float, on_wait: Callable[[float], None] | None = None
    ) -> float:
        """Poll `url` (see `readiness.py`) until its server is ready; the seconds that it took.

        `on_wait` gets the seconds waited so far before each poll. Raises `ProcessFailed`, with the
        end of the log, when the process ends first or `timeout_s` have passed.
        """
        began = self._clock.now()
        # No keep-alive and no proxies: each poll is a new visitor on this machine.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=VISIT_TIMEOUT_S, limits=limits, trust_env=False) as client:
            while True:
                waited = self._clock.now() - began
                if on_wait is not None:
                    on_wait(waited)
                if not self.running:
                    raise self.failure(f"ended with {describe_exit(self.returncode)} before it was ready")
                if waited >= timeout_s:
                    raise self.failure(f"was not ready after {timeout_s:.0f} s")
                if await is_ready(url, client):
                    return self._clock.now() - began
                await self._clock.sleep(POLL_S)

    def failure(self, what: str) -> ProcessFailed:
        """`what` happened to this process, with its last words and where to read the rest."""
        last = self.last_words().splitlines()
        first = self.first_error()
        if first and first not in last:
            last = [first, "...", *last]
        words = "\n".join(f"  | {line}" for line in last) or "  (it said nothing)"
        return ProcessFailed(f"{self.spec.name} {what}\n{words}\n  log: {self.spec.log_path}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.spec.name} was never started")
        return self._process

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        pid = self.pid
        try:
            os.killpg(pid, number) if group else os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended


def describe_exit(code: int | None) -> str:
    """`code` in words: "exit code 3", "SIGKILL"."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
