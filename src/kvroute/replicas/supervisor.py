"""The parent: starts the processes, replaces those that die, passes the end on. Blocks; has no event loop.

Processes are forked from a parent with one thread, so that they share what was loaded and a successor is
there at once. Linux only (PR_SET_PDEATHSIG, prctl(2)).
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

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
_STEADY_S: Final = 60.0
"""A process that has lived for so long is well: the next pause is the first one again."""
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_WATCHED: Final = _ENDING | {signal.SIGCHLD, signal.SIGHUP}
NEXT_STAGE: Final = signal.SIGUSR1
"""What the processes get for each SIGINT after the first signal. They ignore SIGINT itself: a terminal sends
it to the whole process group, so one Ctrl-C would come twice."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What a process is told of itself. `generation` is 0 for the first of its number; `ready` is to be
    called when it serves."""

    number: int
    generation: int
    ready: Callable[[], None]


@dataclass(slots=True)
class _Child:
    """One number's process. Mutable: by the supervisor."""

    number: int
    generation: int = -1
    pid: int | None = None
    born: float = 0.0
    due: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    ready: int = -1
    """Where it says that it serves; closed once it has."""


class Supervisor:
    """Keeps `processes` processes running `work`, whose result is their exit code. Mutable: `run`, once.

    `grace_s` is what is left for an orderly end after SIGTERM or SIGINT, before SIGKILL.
    """

    def __init__(
        self, processes: int, work: Callable[[ProcessSpec], int], clock: Clock, *, grace_s: float
    ) -> None:
        self._work = work
        self._clock = clock
        self._grace_s = grace_s
        self._children = [_Child(number) for number in range(processes)]
        self._kill_at: float | None = None
        self._code = 0

    def run(self) -> int:
        """Until SIGTERM or SIGINT: then all processes get SIGTERM, and NEXT_STAGE for each further SIGINT. 0
        after an orderly end. A process that ends before it has ever served is a start that failed: the others
        are ended, and its code is ours. SIGHUP is only logged."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        try:
            while self._kill_at is None or any(child.pid is not None for child in self._children):
                self._start_due(mask)
                told = signal.sigtimedwait(_WATCHED, self._until_next())
                if told is not None:
                    self._signalled(told.si_signo)
                self._reap()
                self._kill_late()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self._code

    def _signalled(self, number: int) -> None:
        if number == signal.SIGHUP:
            log.info("SIGHUP: there is nothing to reload yet; the gateway goes on")
        elif number in _ENDING and self._kill_at is None:
            log.info("ending %d processes", len(self._children))
            self._end()
        elif number == signal.SIGINT:
            self._send(NEXT_STAGE)

    def _start_due(self, mask: set[int | signal.Signals]) -> None:
        now = self._clock.now()
        for child in self._children:
            if child.pid is None and self._kill_at is None and now >= child.due:
                self._start(child, mask)

    def _start(self, child: _Child, mask: set[int | signal.Signals]) -> None:
        child.generation += 1
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            os.close(writing)
            child.pid, child.born, child.ready = pid, self._clock.now(), reading
            return
        code = 70
        try:
            os.close(reading)
            _end_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            code = self._work(ProcessSpec(child.number, child.generation, lambda: _say(writing)))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            log.exception("process %d failed", child.number)
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # nothing of the parent's is to be undone here

    def _until_next(self) -> float:
        now = self._clock.now()
        times = [child.due for child in self._children if child.pid is None and self._kill_at is None]
        if self._kill_at is not None:
            times.append(self._kill_at)
        return max(0.0, min(times) - now) if times else 3600.0

    def _reap(self) -> None:
        for child in self._children:
            if child.pid is None:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        pid, child.pid = child.pid, None
        served = _has_said(child.ready)
        os.close(child.ready)
        if self._kill_at is not None:
            # Those signals: it had hardly begun.
            if code not in (0, -signal.SIGTERM, -NEXT_STAGE) and not self._code:
                self._code = 1
            return
        if not served and child.generation == 0:
            log.error("process %d did not come up (exit code %d)", child.number, code)
            self._code = code if code > 0 else 1
            self._end()
            return
        now = self._clock.now()
        if served and now - child.born >= _STEADY_S:
            child.pause_s = _FIRST_PAUSE_S
        child.due = now + child.pause_s
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        log.error("process %d (%s) %s; it is replaced in %.1f s", child.number, pid, how, child.pause_s)
        child.pause_s = min(2 * child.pause_s, _LONGEST_PAUSE_S)

    def _end(self) -> None:
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
                log.error("process %d does not end; it is killed", child.number)
                os.kill(child.pid, signal.SIGKILL)
        self._kill_at = self._clock.now() + self._grace_s


def _end_with_parent(parent: int) -> None:
    """Get SIGTERM when the parent is gone, even by SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _say(writing: int) -> None:
    with contextlib.suppress(OSError):
        os.write(writing, b"1")


def _has_said(reading: int) -> bool:
    try:
        return bool(os.read(reading, 1))
    except BlockingIOError:
        return False
