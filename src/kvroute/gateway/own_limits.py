"""What protects the gateway from too many or too slow clients: limits on its descriptors and memory, beyond
which it refuses new requests, and timeouts of connections that wait for bytes.

At the start the process also sets how its C library keeps and maps memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import mmap
import os
import resource
import termios
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from uvicorn.protocols.http.flow_control import FlowControl

from kvroute.clock import Clock
from kvroute.errors import OUT_OF_DESCRIPTORS, GatewayOverloaded
from kvroute.metrics import Metrics

log = logging.getLogger(__name__)

LOW_MEMORY = "low_memory"

_RESERVE_SHARE = 10
_LEAST_RESERVE = 16
_LOG_PAUSE_S = 10.0
_RESUME_SHARE = 0.95
"""Requests are served again below this share of the watermark, so that the state does not change often."""


class DescriptorLimit:
    """Refuses new clients while few descriptors are free, so that accepted requests can reach workers.

    The kernel gives each connection the lowest free number, so a high number means that all lower ones are in
    use: the check reads no table. `refused_from` is the first number that is refused, with an answer;
    connections from `closed_from` on are closed at once. Mutable: the time of the last log line.
    """

    # Without the reserve libuv would accept and close connections without an answer, and accepted requests
    # would fail because no connection to a worker can be opened.

    def __init__(self, clock: Clock, metrics: Metrics, limit: int | None = None) -> None:
        """`limit`: open files of this process; default: the soft limit of RLIMIT_NOFILE."""
        if limit is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = 1 << 62
        reserve = max(_LEAST_RESERVE, limit // _RESERVE_SHARE)
        self.limit = limit
        self.refused_from = max(0, limit - reserve)
        self.closed_from = max(0, limit - reserve // 2)
        self._clock = clock
        self._counts = metrics.out_of_descriptors
        for side in ("client", "worker"):
            self._counts.labels(side)
        self._next_line = float("-inf")

    def refusal(self, transport: Any, loop: asyncio.AbstractEventLoop) -> GatewayOverloaded | None:
        """The answer to a new client; None if it is accepted. About 1 us."""
        sock = transport.get_extra_info("socket")
        descriptor = -1 if sock is None else sock.fileno()
        if descriptor < self.refused_from:
            return None
        self.client_refused()
        if descriptor >= self.closed_from:
            loop.call_soon(transport.close)  # too few are left to wait until the client has read its answer
        return GatewayOverloaded(
            "The gateway has too few free descriptors for a new connection.", OUT_OF_DESCRIPTORS
        )

    def client_refused(self) -> None:
        """Count a client's connection that is refused."""
        self._counts.labels("client").inc()
        self._log(f"new clients are refused from descriptor {self.refused_from} on")

    def worker_unreachable(self, problem: str) -> None:
        """Count a connection to a worker that could not be opened."""
        self._counts.labels("worker").inc()
        self._log(problem)

    def _log(self, problem: str) -> None:
        now = self._clock.now()
        if now >= self._next_line:
            self._next_line = now + _LOG_PAUSE_S
            log.error(
                "out of descriptors: %s; running requests continue (limit of open files: %d, ulimit -n)",
                problem,
                self.limit,
            )


class MemoryUse(NamedTuple):
    """Used and allowed memory, in bytes."""

    used: int
    limit: int


def memory_reader(
    limit_bytes: int = 0, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> Callable[[], MemoryUse]:
    """The function that reads the memory in use.

    With `limit_bytes` it reads this process's resident memory; otherwise the cgroup's, or else the machine's.
    Each call blocks for about 0.1 ms, and raises OSError or ValueError if the files cannot be read.
    """
    if limit_bytes:
        return lambda: MemoryUse(_resident(proc), limit_bytes)
    for folder, limit_name, used_name, cache_name in _cgroup_folders(proc, cgroups):
        try:
            text = (folder / limit_name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _machine(proc).limit:
            limit = int(text)
            return lambda: MemoryUse(_cgroup_use(folder, used_name, cache_name), limit)
    return lambda: _machine(proc)


def _cgroup_folders(proc: Path, cgroups: Path) -> list[tuple[Path, str, str, str]]:
    """Where the limit may be: the process's own cgroup (v2, v1), and the root, which a container sees."""
    v2 = ("memory.max", "memory.current", "inactive_file")
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    found = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((cgroups / path.lstrip("/"), *v2))
        elif "memory" in controllers.split(","):
            found.append((cgroups / "memory" / path.lstrip("/"), *v1))
    return [*found, (cgroups, *v2), (cgroups / "memory", *v1)]


def _cgroup_use(folder: Path, used_name: str, cache_name: str) -> int:
    """The cgroup's memory without the file caches that the kernel can drop, as the kubelet counts it."""
    used = int((folder / used_name).read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name:
            return max(0, used - int(value))
    return used


def _resident(proc: Path) -> int:
    return int((proc / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _machine(proc: Path) -> MemoryUse:
    figures = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        figures[name] = int(value.split()[0]) * 1024
    return MemoryUse(figures["MemTotal"] - figures["MemAvailable"], figures["MemTotal"])


class MemoryWatch:
    """Sheds new requests while the memory in use is above the watermark.

    Mutable: `check` changes whether it sheds.
    """

    def __init__(
        self,
        read: Callable[[], MemoryUse],
        watermark: float,
        shed: Callable[[GatewayOverloaded | None], None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`watermark` is a share of the limit, above 0; `shed` gets the answer for new requests, or None."""
        self._read = read
        self._watermark = watermark
        self._shed = shed
        self._share = metrics.memory_share.labels()
        self._clock = clock
        self._is_shedding = False
        self._trouble = ""

    async def run(self, interval_s: float) -> None:
        """Check the memory every `interval_s` until cancelled."""
        while True:
            try:
                self.check(await asyncio.to_thread(self._read))
                self._trouble = ""
            except (OSError, ValueError, KeyError) as error:
                if not self._trouble:
                    log.error("the memory in use cannot be read: %s", error)
                self._trouble = str(error)
            await self._clock.sleep(interval_s)

    def check(self, use: MemoryUse) -> None:
        """Shed new requests, or serve them again, according to `use`."""
        share = self._share.value = use.used / use.limit
        if not self._is_shedding and share >= self._watermark:
            self._is_shedding = True
            log.error(
                "new requests are refused: %d of %d MiB of memory are used (server.memory_watermark)",
                use.used >> 20,
                use.limit >> 20,
            )
            self._shed(GatewayOverloaded("The gateway has too little free memory.", LOW_MEMORY))
        elif self._is_shedding and share < _RESUME_SHARE * self._watermark:
            self._is_shedding = False
            log.warning("new requests are served again: %d MiB of memory are used", use.used >> 20)
            self._shed(None)


def unacknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that the kernel has taken and the other side has not acknowledged; 0 where it does not say so."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    held = array("i", (0,))
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, held)  # SIOCOUTQ of tcp(7)
    except OSError:
        return 0
    return held[0]


class TimedFlow(FlowControl):
    """uvicorn's flow control, which also measures how long reading was paused."""

    def __init__(self, transport: Any, time: Any) -> None:
        super().__init__(transport)
        self._time = time
        self._paused_at = 0.0
        self._paused_s = 0.0
        self.is_blocked = False
        """While true, `resume_reading` does nothing."""

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at = self._time()
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_blocked:
            self._paused_s += self._time() - self._paused_at
            super().resume_reading()

    @property
    def paused_s(self) -> float:
        """Total time that reading was paused, so far."""
        return self._paused_s + (self._time() - self._paused_at if self.read_paused else 0.0)


_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
"""Parameter numbers from glibc's malloc.h."""

_KEPT_BYTES: Final = 64 << 20
_MAPPED_FROM_BYTES: Final = 16 << 20
_GROWS_BY_BYTES: Final = 64 << 20
"""Address space, not memory."""

_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
"""Constants from Linux's mman.h; the second one since Linux 6.1."""
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
_MIN_USED: Final = 0.5
"""Minimum share of a huge page that must be in use before the move; the unused rest costs memory."""


def keep_freed_memory() -> bool:
    """Make glibc keep up to 64 MiB of freed memory and grow the heap in steps of 64 MiB.

    False, without any change, where the libc is not glibc.
    """
    # By default a body of 256 KB costs about 40 page faults, a fifth of the CPU time of routing it. The heap
    # grows in large steps so that `use_huge_pages` can request huge pages for the new addresses in advance.
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = {_MMAP_THRESHOLD: _MAPPED_FROM_BYTES, _TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: _GROWS_BY_BYTES}
    return all(mallopt(parameter, number) for parameter, number in settings.items())


def use_huge_pages(system: Path = _HUGE_PAGES) -> int:
    """Move the memory that the process has allocated into transparent huge pages. Returns the moved bytes.

    0 where the system has no such pages, forbids them (`enabled` is `never`) or cannot move memory on request
    (Linux before 6.1). Takes 5 to 10 ms for 2 MiB.
    """
    # After a pause most of the memory that a request touches is not in the processor's caches, and each small
    # page also needs a walk through the page tables, and a second walk under a hypervisor.
    try:
        if "[never]" in (system / "enabled").read_text():
            return 0
        size = int((system / "hpage_pmd_size").read_text())
        areas = Path("/proc/self/maps").read_text().splitlines()
        libc = ctypes.CDLL(None)
        madvise, mincore = libc.madvise, libc.mincore
    except (AttributeError, OSError, ValueError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    small_pages = ctypes.create_string_buffer(size // mmap.PAGESIZE)
    moved = 0
    for start, end, is_heap in _own_memory(areas, size):
        if is_heap and start < end:
            madvise(start, end - start, _MADV_HUGEPAGE)  # for the memory that it will grow into
        for at in range(start, end, size):
            if mincore(at, size, small_pages) or small_pages.raw.count(1) < _MIN_USED * len(small_pages):
                continue
            if not madvise(at, size, _MADV_HUGEPAGE) and not madvise(at, size, _MADV_COLLAPSE):
                moved += size
    return moved


def _own_memory(areas: Iterable[str], size: int) -> Iterator[tuple[int, int, bool]]:
    """The heap and the anonymous private areas from the lines of /proc/self/maps.

    Yields start and end, rounded inwards to multiples of `size`, and whether the area is the heap.
    """
    for area in areas:
        addresses, access, _, _, _, *name = area.split(maxsplit=5)
        if access == "rw-p" and (not name or name[0] == "[heap]"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield -(-start // size) * size, end // size * size, bool(name)
