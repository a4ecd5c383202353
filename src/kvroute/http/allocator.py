"""Memory of the process: freed pages that are kept, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

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
