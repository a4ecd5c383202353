"""What is read from the fleet and the router when metrics are scraped."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric

from kvroute.blocks.keys import Tier
from kvroute.fleet.discovery.base import Discoverer
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.worker import HealthState
from kvroute.metrics import counter, gauge
from kvroute.routing.router import Router
from kvroute.routing.strategy import CacheMap


def fleet_gauges(fleet: Fleet, health: HealthMonitor, discoverer: Discoverer) -> Iterable[Metric]:
    """Of the workers, their probes and where they are found."""
    workers = fleet.workers()
    yield gauge(
        "kvroute_worker_state",
        "1 for the state that each worker is in.",
        ("worker", "state"),
        [((w.id, state.value), float(w.state is state)) for w in workers for state in HealthState],
    )
    yield gauge(
        "kvroute_worker_capacity_tokens",
        "KV cache of each worker.",
        ("worker",),
        [((w.id,), float(w.capacity_tokens)) for w in workers],
    )
    yield counter(
        "kvroute_worker_probe_failures",
        "Health probes that failed.",
        ("worker",),
        [((worker,), float(n)) for worker, n in health.counts.probe_failures.items()],
    )
    yield counter(
        "kvroute_worker_ejections_held_back",
        "Ejections that fleet.health.max_ejected_share prevented.",
        (),
        [((), float(health.counts.held_back))],
    )
    yield counter(
        "kvroute_discovery_errors",
        "Worker lists that could not be read or applied.",
        ("source",),
        [((source,), float(n)) for source, n in discoverer.errors().items()],
    )
    yield counter(
        "kvroute_discovery_shrinks_held_back",
        "Worker lists that named far fewer workers than answer, and were not believed until repeated.",
        ("source",),
        [((source,), float(discoverer.shrinks[source])) for source in discoverer.kept()],
    )
    yield gauge(
        "kvroute_discovery_kept_workers",
        "Workers that a source no longer names and that stay until it has repeated that.",
        ("source",),
        [((source,), float(n)) for source, n in discoverer.kept().items()],
    )


def index_gauges(fleet: Fleet, router: Router) -> Iterable[Metric]:
    """Of the history of what was sent."""
    size = router.index_size()
    yield gauge(
        "kvroute_index_blocks", "Different blocks in the prefix index.", (), [((), float(size.blocks))]
    )
    yield gauge("kvroute_index_bytes", "Estimated memory of the prefix index.", (), [((), float(size.bytes))])
    yield gauge(
        "kvroute_worker_index_blocks",
        "Blocks that the prefix index believes each worker to hold.",
        ("worker",),
        [((w.id,), float(router.describe_worker(w)["tracked_blocks"])) for w in fleet.workers()],
    )


def tier_gauges(fleet: Fleet, router: Router, caches: CacheMap) -> Iterable[Metric]:
    """Of the links between the caches' tiers."""
    yield gauge(
        "kvroute_tier_bandwidth_bytes_per_second",
        "Bandwidth reckoned with from slower tiers to each worker: as its LMCache server measured it, else "
        "as configured.",
        ("worker", "rank", "tier"),
        [
            ((worker.id, str(place.rank), tier.name.lower()), 1e9 * router.rate(place.slot, tier))
            for worker in fleet.workers()
            for place in caches.places(worker)
            for tier in (Tier.L1, Tier.L2)
        ],
    )


_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
"""Numbers of glibc's malloc.h."""

_KEPT_BYTES: Final = 64 << 20
_MAPPED_FROM_BYTES: Final = 16 << 20
_GROWS_BY_BYTES: Final = 64 << 20
"""Addresses, not memory."""

_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
"""Numbers of Linux' mman.h; the second is of 6.1."""
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage")
_LEAST_USED: Final = 0.5
"""Share of a huge page that was in use before: the rest is memory that the move costs."""


def keep_freed_memory() -> bool:
    """Let glibc keep up to 64 MiB that was freed, instead of giving it back and asking for it anew, and let
    the heap grow by as many addresses at a time, so that `use_huge_pages` can speak for them beforehand.

    By default a body of 256 KB costs some 40 page faults, a fifth of what routing it costs. False, and
    nothing changed, with another libc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = {_MMAP_THRESHOLD: _MAPPED_FROM_BYTES, _TRIM_THRESHOLD: _KEPT_BYTES, _TOP_PAD: _GROWS_BY_BYTES}
    return all(mallopt(what, number) for what, number in settings.items())


def use_huge_pages(system: Path = _HUGE_PAGES) -> int:
    """Move what the process has allocated by now into transparent huge pages; how many bytes were moved. 0
    where the system has no such pages, forbids them (`enabled` is `never`) or cannot be asked to move
    anything (Linux before 6.1).

    A request after a pause finds little of what it touches in the processor's caches, and each page of it
    takes a walk through the page tables besides, under a hypervisor through two of them. Takes 5 to 10 ms
    for 2 MiB.
    """
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
            madvise(start, end - start, _MADV_HUGEPAGE)  # for what it grows into
        for at in range(start, end, size):
            if mincore(at, size, small_pages) or small_pages.raw.count(1) < _LEAST_USED * len(small_pages):
                continue
            if not madvise(at, size, _MADV_HUGEPAGE) and not madvise(at, size, _MADV_COLLAPSE):
                moved += size
    return moved


def _own_memory(areas: Iterable[str], size: int) -> Iterator[tuple[int, int, bool]]:
    """Start and end, multiples of `size`, of the heap and of nameless private memory, and whether it is the
    heap, by the lines of /proc/self/maps."""
    for area in areas:
        place, access, _, _, _, *name = area.split(maxsplit=5)
        if access == "rw-p" and (not name or name[0] == "[heap]"):
            start, end = (int(address, 16) for address in place.split("-"))
            yield -(-start // size) * size, end // size * size, bool(name)
