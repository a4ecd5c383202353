"""Shared memory that engines leave behind.

On CPUs, LMCache's connector (0.5.6, `lmcache_driven`) moves an engine's whole KV cache into a POSIX segment
`/dev/shm/lmcache_kv_<pid>_<n>`. An engine that ends in any way other than by itself does not remove it: the
memory stays taken until the host restarts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
OF_AN_ENGINE = re.compile(r"lmcache_kv_(\d+)_\d+")


def sweep(folder: Path = SHARED_MEMORY) -> int:
    """Remove what ended engines have left; the bytes that are free again.

    Only segments of this user, whose creator has ended and that no process maps. Blocking; a listing
    of one folder where there is nothing to remove.
    """
    freed = 0
    for segment in _orphans(folder):
        try:
            size = segment.stat().st_size
            segment.unlink()
        except OSError:
            continue  # gone already, or not to be had: what is swept must not end what runs
        freed += size
    return freed


def _orphans(folder: Path) -> list[Path]:
    found = []
    for segment in folder.glob("lmcache_kv_*"):
        name = OF_AN_ENGINE.fullmatch(segment.name)
        try:
            if name and segment.stat().st_uid == os.getuid() and not Path(f"/proc/{name[1]}").exists():
                found.append(segment)
        except FileNotFoundError:
            continue
    if not found:
        return []
    mapped = _mapped(folder)
    return [segment for segment in found if str(segment) not in mapped]


def _mapped(folder: Path) -> set[str]:
    """Files of `folder` that a process of this user maps."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            # address perms offset dev inode pathname
            lines = maps.read_text().splitlines()
        except OSError:
            continue  # it has ended, or is another user's
        mapped |= {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}
    return mapped
