"""How long a gateway's event loop is held, and how much memory it takes, seen from outside."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gateway_machine import PROC, parse_kib, parse_schedstat

PROBE = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
PROBE_TIMEOUT_S = 300.0
NICE = -10
"""Of the probe's thread, where that is allowed: a late probe counts CPU of more than one turn of the loop."""


def cpu_ns(pid: int) -> int:
    """CPU time of all threads that exist now, in nanoseconds."""
    total = 0
    folder = PROC / str(pid) / "task"
    for task in os.listdir(folder):
        with contextlib.suppress(OSError):  # the thread has ended
            total += parse_schedstat((folder / task / "schedstat").read_text())
    return total


def _status_mb(pid: int, field: str) -> float:
    return parse_kib((PROC / str(pid) / "status").read_text(), field) * 1024 / 1e6


def rss_mb(pid: int) -> float:
    return _status_mb(pid, "VmRSS")


def peak_rss_mb(pid: int) -> float:
    return _status_mb(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Make the present resident memory the peak."""
    Path(PROC / str(pid) / "clear_refs").write_text("5")


@dataclass(slots=True)
class Watched:
    """Mutable while the block of `watching` runs; complete behind it.

    `held_ms`: the most CPU time the gateway spent between a question on `/health` and its answer, which is
    about the longest that one turn of its loop took. `silent_ms`: the longest wait for such an answer by the
    clock. `memory_mb`: the peak of resident memory above that at the start.
    """

    held_ms: float = 0.0
    silent_ms: float = 0.0
    cpu_ms: float = 0.0
    memory_mb: float = 0.0
    probes: int = 0
    failure: str = ""


@contextlib.contextmanager
def watching(pid: int, port: int) -> Iterator[Watched]:
    """Asks for `/health` on a connection of its own, without pauses, while the block runs."""
    watched, stop, probing = Watched(), threading.Event(), threading.Event()
    forget_peak(pid)
    rss_before, cpu_before = rss_mb(pid), cpu_ns(pid)
    thread = threading.Thread(target=_probe, args=(pid, port, watched, probing, stop))
    thread.start()
    probing.wait()
    try:
        yield watched
    finally:
        stop.set()
        thread.join()
        if not watched.failure:
            watched.cpu_ms = (cpu_ns(pid) - cpu_before) / 1e6
            watched.memory_mb = max(0.0, peak_rss_mb(pid) - rss_before)


def _probe(pid: int, port: int, watched: Watched, probing: threading.Event, stop: threading.Event) -> None:
    """At least one question is asked after `stop`, so that the shortest block is seen whole."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _ask(connection)  # the first one makes the route
            probing.set()
            is_last = False
            while not is_last:
                is_last = stop.is_set()
                cpu, began = cpu_ns(pid), time.monotonic()
                _ask(connection)
                watched.silent_ms = max(watched.silent_ms, (time.monotonic() - began) * 1e3)
                watched.held_ms = max(watched.held_ms, (cpu_ns(pid) - cpu) / 1e6)
                watched.probes += 1
    except (OSError, ValueError) as error:
        watched.failure = f"/health was not answered: {error!r}"
    finally:
        probing.set()


def _ask(connection: socket.socket) -> None:
    """Raises OSError or ValueError unless the answer is whole and 200."""
    connection.sendall(PROBE)
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := connection.recv(65536)):
            raise ConnectionError("closed")
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0]:
        raise ValueError(head[:80])
    sizes = [
        line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    ]
    while len(body) < int(sizes[0]):
        if not (part := connection.recv(65536)):
            raise ConnectionError("closed")
        body += part
