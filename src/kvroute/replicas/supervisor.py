"""The parent process: starts the gateway processes, replaces those that die, and passes signals on.

It blocks and has no event loop. It forks the processes while it has one thread: so they share the memory of
the loaded modules, and a successor starts without loading them again. Linux only (PR_SET_PDEATHSIG,
prctl(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvroute.clock import Clock
from kvroute.logs import drain

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 30.0
_STABLE_S: Final = 60.0
"""After a process has run this long, the pause before its next restart is `_FIRST_PAUSE_S` again."""
_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_HANDLED_SIGNALS: Final = _STOP_SIGNALS | {signal.SIGCHLD, signal.SIGHUP}
NEXT_STAGE: Final = signal.SIGUSR1
"""Sent to the processes for each SIGINT after the first signal. They ignore SIGINT itself: a terminal sends
SIGINT to the whole process group, so they would receive one Ctrl-C twice."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process's identity.

    `generation` counts how often the process of this number was replaced; the process calls `ready` when it
    serves.
    """

    number: int
    generation: int
    ready: Callable[[], None]


@dataclass(slots=True)
class _Child:
    """The process of one number. Mutable: by the supervisor."""

    number: int
    generation: int = -1
    pid: int | None = None
    started: float = 0.0
    restart_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    ready: int = -1
    """The reading end of the pipe on which the process reports that it serves."""


class Supervisor:
    """Keeps `processes` processes running; each runs `work`, whose result is its exit code.

    After SIGTERM or SIGINT the processes have `grace_s` to end before they get SIGKILL. Mutable; `run` is
    called once.
    """

    def __init__(
        self,
        processes: int,
        work: Callable[[ProcessSpec], int],
        clock: Clock,
        *,
        grace_s: float,
        on_hangup: Callable[[], None] | None = None,
    ) -> None:
        """`on_hangup` is called on SIGHUP, before all processes get this signal. It may block."""
        self._on_hangup = on_hangup
        self._work = work
        self._clock = clock
        self._grace_s = grace_s
        self._children = [_Child(number) for number in range(processes)]
        self._kill_at: float | None = None
        self._code = 0

    def run(self) -> int:
        """Supervise until SIGTERM or SIGINT. Returns the exit code, 0 after an orderly shutdown.

        Then all processes get SIGTERM, and NEXT_STAGE for each further SIGINT. If a process ends before it
        has served for the first time, the start has failed: the others are stopped, and its exit code is
        returned. SIGHUP calls `on_hangup` and goes to all processes.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        try:
            while self._kill_at is None or any(child.pid is not None for child in self._children):
                self._start_due(mask)
                received = signal.sigtimedwait(_HANDLED_SIGNALS, self._seconds_to_next())
                if received is not None:
                    self._on_signal(received.si_signo)
                self._reap()
                self._kill_late()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self._code

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            if self._on_hangup is not None:
                self._on_hangup()
                self._send(signal.SIGHUP)
        elif number in _STOP_SIGNALS and self._kill_at is None:
            log.info("stopping %d processes", len(self._children))
            self._stop_all()
        elif number == signal.SIGINT:
            self._send(NEXT_STAGE)

    def _start_due(self, mask: set[int | signal.Signals]) -> None:
        now = self._clock.now()
        for child in self._children:
            if child.pid is None and self._kill_at is None and now >= child.restart_at:
                self._start(child, mask)

    def _start(self, child: _Child, mask: set[int | signal.Signals]) -> None:
        parent = os.getpid()
        try:
            pid, reading, writing = _fork()
        except OSError as error:
            if child.generation < 0:
                raise
            # The other processes serve: a lack of memory or of process ids must not end them.
            pause_s = self._postpone(child)
            log.error(
                "process %d cannot be replaced: %s; again in %.1f s", child.number, error.strerror, pause_s
            )
            return
        child.generation += 1
        if pid:
            os.close(writing)
            child.pid, child.started, child.ready = pid, self._clock.now(), reading
            return
        code = 70
        try:
            os.close(reading)
            _end_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = self._work(ProcessSpec(child.number, child.generation, lambda: _report_ready(writing)))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            log.exception("process %d failed", child.number)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            drain()
            os._exit(code)  # skips the cleanup of objects that belong to the parent

    def _seconds_to_next(self) -> float:
        now = self._clock.now()
        times = [child.restart_at for child in self._children if child.pid is None and self._kill_at is None]
        if self._kill_at is not None:
            times.append(self._kill_at)
        return max(0.0, min(times) - now) if times else 3600.0

    def _reap(self) -> None:
        for child in self._children:
            if child.pid is None:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._on_exit(child, os.waitstatus_to_exitcode(status))

    def _on_exit(self, child: _Child, code: int) -> None:
        pid, child.pid = child.pid, None
        served = _is_reported_ready(child.ready)
        os.close(child.ready)
        if self._kill_at is not None:
            # A process that has no signal handlers yet dies from these signals: no failure.
            if code not in (0, -signal.SIGTERM, -NEXT_STAGE) and not self._code:
                self._code = 1
            return
        if not served and child.generation == 0:
            log.error("process %d failed to start (exit code %d)", child.number, code)
            self._code = code if code > 0 else 1
            self._stop_all()
            return
        now = self._clock.now()
        if served and now - child.started >= _STABLE_S:
            child.pause_s = _FIRST_PAUSE_S
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        pause_s = self._postpone(child)
        log.error("process %d (pid %s) %s; it is replaced in %.1f s", child.number, pid, how, pause_s)

    def _postpone(self, child: _Child) -> float:
        """Let the next start of this process wait. Returns the pause in seconds; the next pause is longer."""
        pause_s = child.pause_s
        child.restart_at, child.pause_s = self._clock.now() + pause_s, min(2 * pause_s, _MAX_PAUSE_S)
        return pause_s

    def _stop_all(self) -> None:
        if self._kill_at is None:
            self._kill_at = self._clock.now() + self._grace_s
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.pid is not None:
                os.kill(child.pid, number)

    def _kill_late(self) -> None:
        if self._kill_at is None or self._clock.now() < self._kill_at:
            return
        for child in self._children:
            if child.pid is not None:
                log.error("process %d does not stop in time; it is killed", child.number)
                os.kill(child.pid, signal.SIGKILL)
        self._kill_at = self._clock.now() + self._grace_s


def _fork() -> tuple[int, int, int]:
    """Fork. Returns the child's pid, 0 in the child, and the ends of a pipe for reading and writing."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return os.fork(), reading, writing
    except OSError:
        os.close(reading)
        os.close(writing)
        raise


def _end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when the parent dies, even by SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _report_ready(writing: int) -> None:
    with contextlib.suppress(OSError):
        os.write(writing, b"1")


def _is_reported_ready(reading: int) -> bool:
    try:
        return bool(os.read(reading, 1))
    except BlockingIOError:
        return False
