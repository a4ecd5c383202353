"""Runs one command and ends all processes that it started. A separate script; standard library only.

    python guard.py GRACE_S COMMAND [ARG ...]      (standard input: a pipe that the owner holds open)

The command runs in the guard's process group. There are three ways in which it ends:

* By itself: processes that it left running get SIGTERM, and SIGKILL two seconds later. In these seconds
  Python's resource trackers free shared memory. The guard ends with the command's exit code or signal.
* The guard gets SIGTERM or SIGINT, or its standard input closes. The input closes when the owner dies,
  even by SIGKILL. The command gets SIGTERM, and all that still runs after GRACE_S seconds gets SIGKILL.
* The guard is killed: the kernel sends the command SIGKILL (PR_SET_PDEATHSIG, prctl(2)).

The guard adopts orphaned processes (PR_SET_CHILD_SUBREAPER), so it also finds a grandchild that left the
process group: vLLM 0.32 runs three processes per engine. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLEAN_UP_S = 2.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """Run and guard the command `argv[1:]`. Returns its exit code, or ends by the signal that ended it."""
    grace_s, command = float(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for watched in (*FORWARDED, signal.SIGCHLD):
        signal.signal(watched, lambda *_: None)

    child = _spawn(command, libc)
    status = _wait_for_exit(child, wakeup, grace_s)
    _signal_leftovers(signal.SIGTERM)
    kill_at = time.monotonic() + CLEAN_UP_S
    while _signal_leftovers(signal.SIGKILL if time.monotonic() >= kill_at else None):
        time.sleep(0.01)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


def _spawn(command: list[str], libc: ctypes.CDLL) -> int:
    # fork is safe here: this process has one thread.
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(137)
        signal.set_wakeup_fd(-1)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.execvp(command[0], command)
    except OSError as exc:
        os.write(2, f"cannot run {command[0]}: {exc.strerror}\n".encode())
    finally:
        os._exit(127)


def _wait_for_exit(child: int, wakeup: int, grace_s: float) -> int:
    """Wait for `child` and return its wait status. SIGTERM it after a signal or the owner's death."""
    watched, kill_at = [0, wakeup], None
    while True:
        timeout = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select(watched, [], [], timeout)
        stop = False
        if 0 in ready and not os.read(0, 4096):
            watched.remove(0)
            stop = True
        if wakeup in ready:
            stop = stop or any(number in FORWARDED for number in os.read(wakeup, 4096))
        status = _reap(child)
        if status is not None:
            return status
        if stop and kill_at is None:
            kill_at = time.monotonic() + grace_s
            os.kill(child, signal.SIGTERM)
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]


def _reap(child: int) -> int | None:
    """Collect every process that has ended. Returns the status of `child` if it has."""
    status = None
    try:
        while True:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return status
            if pid == child:
                status = code
    except ChildProcessError:
        return status


def _signal_leftovers(number: signal.Signals | None) -> bool:
    """Send `number` to the processes that the command left running. Returns whether any still runs."""
    me, group, any_running = os.getpid(), os.getpgrp(), False
    _reap(-1)
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                # pid (comm) state ppid pgrp ...; comm may hold spaces and brackets.
                state, parent, process_group = stat.read().rpartition(b")")[2].split()[:3]
            if state != b"Z" and (int(parent) == me or int(process_group) == group):
                any_running = True
                if number is not None:
                    os.kill(int(entry), number)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return any_running


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
