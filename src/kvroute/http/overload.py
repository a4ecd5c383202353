"""Watches the memory of the gateway: above a share of its limit, new requests are refused."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvroute.clock import Clock
from kvroute.errors import GatewayOverloaded
from kvroute.metrics import Metrics

log = logging.getLogger(__name__)

LOW_MEMORY = "low_memory"

_RESUME_SHARE = 0.95
"""Requests are served again below this share of the watermark, so that the state does not change often."""


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
