"""Child processes that end with their owner, and probes of their servers."""

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

PROBE_TIMEOUT_S = 2.0


async def is_ready(url: str, http: httpx.AsyncClient) -> bool:
    """Return whether the server at `url` answers within `PROBE_TIMEOUT_S`.

    `http://...` and `https://...` must answer 200, `redis://HOST:PORT` must answer PING with PONG,
    `tcp://HOST:PORT` must accept a connection. Raises ValueError for any other scheme.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            match parts.scheme:
                case "http" | "https":
                    return (await http.get(url)).status_code == 200
                case "redis":
                    return (await _first_reply_line(parts.hostname, parts.port, b"PING\r\n")).startswith(
                        b"+PONG"
                    )
                case "tcp":
                    await _first_reply_line(parts.hostname, parts.port, b"")
                    return True
    except (OSError, TimeoutError, httpx.TransportError):
        return False  # not listening yet
    raise ValueError(f"{url} has an unknown scheme")


async def _first_reply_line(host: str | None, port: int | None, words: bytes) -> bytes:
    """Connect, send `words` and return the first line of the answer. With empty `words`, only connect."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(words)
        return await reader.readline() if words else b""
    finally:
        writer.close()


POLL_S = 0.2
# The guard kills the command after the grace period. The owner kills the guard this much later.
GUARD_MARGIN_S = 3.0
LAST_LINES_BYTES, FIRST_ERROR_BYTES = 16_384, 524_288
# As tracebacks end, alone or behind a logger's prefix: "ValueError: ...", "... [file.py:9] ValueError: ...".
NAMES_EXCEPTION = re.compile(r"(?:^|\] )[\w.]*(?:Error|Exception): ")


class ProcessFailed(KvrouteError):
    """A child process ended, or was not ready in time. The message contains the end of its log."""


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
    """One command that runs under `guard.py`. Mutable: the process handle and the log's start, set by
    `start`.

    When its owner dies, even by SIGKILL, the process and everything that it started end. Use it as an async
    context manager, or pair `start` with `stop`.
    """

    # It runs in its own session, so that a terminal's Ctrl-C does not reach it.

    def __init__(self, spec: ChildSpec, clock: Clock) -> None:
        self.spec = spec
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        """Start or restart the command. Raises OSError when the log cannot be written."""
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
        """Whether `start` was ever called."""
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
        """The command's exit code; -N after signal N; None while it runs."""
        return self._process.returncode if self._process is not None else None

    async def wait(self) -> int:
        """Wait until the command has ended. Returns its exit code; -N after signal N."""
        process = self._started()
        code = await process.wait()
        if code == -signal.SIGKILL:
            # The guard itself may have been killed. Then it could not end the command.
            self._signal(signal.SIGKILL, group=True)
        return code

    async def stop(self) -> int:
        """Send SIGTERM, and SIGKILL after the grace period. Returns the exit code.

        If the caller is cancelled, SIGKILL is sent immediately.
        """
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
        """Send SIGTERM without waiting. The guard sends SIGKILL after the grace period."""
        if self.running:
            self._signal(signal.SIGTERM, group=False)

    def kill(self) -> None:
        """Send SIGKILL to the command and all its processes, without waiting."""
        if self.running:
            self._signal(signal.SIGKILL, group=True)

    def last_log_lines(self, lines: int = 15) -> str:
        """The last lines in the log since the last start."""
        return "\n".join(self._lines(LAST_LINES_BYTES)[-lines:])

    def first_error(self) -> str:
        """The first line in the log since the last start that names an exception; empty if there is none.

        Later errors usually follow from the first one. Reads at most the last `FIRST_ERROR_BYTES`.
        """
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
        """Poll `url` (see `is_ready`) until its server is ready. Returns the seconds that it took.

        `on_wait` is called before each poll with the seconds waited so far. Raises `ProcessFailed`, with the
        end of the log, when the process ends first or `timeout_s` seconds have passed.
        """
        start = self._clock.now()
        # No keep-alive and no proxies: each poll opens a new connection on this machine.
        limits = httpx.Limits(max_keepalive_connections=0)
        # The certificate is not checked: the probe sends no secret, and the server is this process's child.
        async with httpx.AsyncClient(
            timeout=PROBE_TIMEOUT_S, limits=limits, trust_env=False, verify=False
        ) as client:
            while True:
                waited = self._clock.now() - start
                if on_wait is not None:
                    on_wait(waited)
                if not self.running:
                    raise self.failure(f"ended with {describe_exit(self.returncode)} before it was ready")
                if waited >= timeout_s:
                    raise self.failure(f"was not ready after {timeout_s:.0f} s")
                if await is_ready(url, client):
                    return self._clock.now() - start
                await self._clock.sleep(POLL_S)

    def failure(self, what: str) -> ProcessFailed:
        """A `ProcessFailed` that says `what` happened, with the end of the log and the log's path."""
        last = self.last_log_lines().splitlines()
        first_error = self.first_error()
        if first_error and first_error not in last:
            last = [first_error, "...", *last]
        words = "\n".join(f"  | {line}" for line in last) or "  (its log is empty)"
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
            pass  # the process has just ended


def describe_exit(code: int | None) -> str:
    """`code` as text: "exit code 3", "SIGKILL"."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
