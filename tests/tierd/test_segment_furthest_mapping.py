from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvroute.tierd.segment import furthest_foreign_mapping, furthest_mapping

FOLDER = Path("/dev/shm")
DEVICE = os.makedev(0, 0x1A)
MAPS = """\
5581c7a00000-5581c7a2c000 r--p 00000000 fd:01 1234                       /usr/bin/python3.11
7f0000000000-7f0000001000 rw-s 00000000 00:1a 77                         /dev/shm/kv (deleted)
7f0000002000-7f0000004000 rw-s 00003000 00:1a 78                         /dev/shm/kv
7f0000010000-7f0000090000 rw-s 00000000 00:1a 79                         /dev/shm/another
7f0000100000-7f0000900000 rw-s 00000000 00:1b 77                         /dev/shm/kv
7f0001000000-7f0002000000 rw-p 00000000 00:00 0
7f0003000000-7f0004000000 rw-p 00000000 00:1a 80
"""


def test_the_furthest_end_of_the_named_files_of_a_device_counts() -> None:
    assert furthest_mapping(MAPS.splitlines(), DEVICE, {"kv"}, 0) == 0x5000
    assert furthest_mapping(MAPS.splitlines(), DEVICE, {"kv"}, 78) == 0x1000
    assert furthest_mapping(MAPS.splitlines(), DEVICE, {"another"}, 0) == 0x80000
    assert furthest_mapping(MAPS.splitlines(), DEVICE, {"none"}, 0) == 0


def test_a_removed_file_that_this_process_maps_is_seen(memory_name: str) -> None:
    path = FOLDER / memory_name
    with open(path, "w+b") as file:
        os.ftruncate(file.fileno(), 5 * 4096)
        with mmap.mmap(file.fileno(), 0):
            inode = os.fstat(file.fileno()).st_ino
            path.unlink()
            assert furthest_foreign_mapping(FOLDER, {memory_name}, 0) == 5 * 4096
            assert furthest_foreign_mapping(FOLDER, {memory_name}, inode) == 0
    assert furthest_foreign_mapping(FOLDER, {memory_name}, 0) == 0
