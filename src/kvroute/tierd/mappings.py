"""Which processes have an old shared memory segment mapped, by `/proc/PID/maps`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_DELETED = " (deleted)"


def foreign_end(folder: Path, names: set[str], inode: int) -> int:
    """The furthest end of all mappings of files of these names in `folder`, also of removed ones, except for
    `inode`; 0: there is none.

    Sees the processes that this user may look into and this PID namespace has. Milliseconds to a second.
    """
    end, device = 0, folder.stat().st_dev
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                with open(process / "maps", encoding="utf-8", errors="replace") as lines:
                    end = max(end, mapped_end(lines, device, names, inode))
            except OSError:
                continue  # it has ended, or belongs to another user
    return end


def mapped_end(lines: Iterable[str], device: int, names: set[str], inode: int) -> int:
    """The same for one process, by the lines of its `maps`."""
    end = 0
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    for line in lines:
        if wanted not in line:
            continue
        addresses, _, offset, found_device, found_inode, *path = line.rstrip("\n").split(maxsplit=5)
        if found_device != wanted or int(found_inode) == inode or not path:
            continue
        if path[0].removesuffix(_DELETED).rpartition("/")[2] in names:
            first, last = (int(address, 16) for address in addresses.split("-"))
            end = max(end, int(offset, 16) + last - first)
    return end
