"""Measure from outside how long a gateway's event loop is blocked, and how much memory the gateway uses."""

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
"""Priority of the probe's thread, if allowed: a late probe measures more than one iteration of the loop."""


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
    """Reset the peak to the current resident memory."""
    Path(PROC / str(pid) / "clear_refs").write_text("5")


@dataclass(slots=True)
class Watched:
    """Measured figures. Mutable while the block of `watching` runs; complete after it.

    `held_ms`: the most CPU time that the gateway used between a request for `/health` and its answer, about
    the longest iteration of its event loop. `silent_ms`: the longest wait for such an answer in wall-clock
    time. `memory_mb`: the peak of resident memory minus the resident memory at the start.
    """

    held_ms: float = 0.0
    silent_ms: float = 0.0
    cpu_ms: float = 0.0
    memory_mb: float = 0.0
    probes: int = 0
    failure: str = ""


@contextlib.contextmanager
def watching(pid: int, port: int) -> Iterator[Watched]:
    """Request `/health` on its own connection, without pauses, while the block runs."""
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
    """Send at least one request after `stop`, so that even the shortest block is measured to its end."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _ask(connection)  # the first request creates the route
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
    """Send one request. Raises OSError or ValueError unless the answer is complete and 200."""
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
