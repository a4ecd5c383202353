"""The locked file beside a segment.

It keeps a second daemon away from the name, and tells the next one what a killed daemon cannot tell.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("kvroute.tierd")

_RECORD = struct.Struct("<ddQQQQ8s")
"""Date, longest lease, then the layout, then the magic. Version 0.1 wrote the date alone."""
_DATES = struct.Struct("<dd")
_OLD_RECORD = struct.Struct("<d")
_MAGIC = b"kvguard2"


class GuardTaken(Exception):
    """A living daemon has the lock."""


class Layout(NamedTuple):
    """The range of offsets that a segment uses, in bytes, and the inode for which it is valid."""

    start: int
    """The first offset that its daemons hand out."""
    end: int
    """The size of the file: no mapping of this inode or an earlier one reaches further."""
    device: int
    inode: int

    @property
    def identity(self) -> tuple[int, int]:
        """As `os.stat` has it."""
        return self.device, self.inode


class Guard:
    """Mutable: the record in the file, which outlives a SIGKILL."""

    def __init__(self, path: Path, longest_lease_s: float) -> None:
        """Take the lock and read the record. Raises GuardTaken, or OSError when the file cannot be opened."""
        self._path = path
        self._file = _locked(path)
        written = os.fstat(self._file).st_size
        os.ftruncate(self._file, _RECORD.size)
        self._mapped = mmap.mmap(self._file, _RECORD.size)
        until, longest_s, start, end, device, inode, magic = _RECORD.unpack_from(self._mapped)
        self.is_known = magic == _MAGIC
        """Whether `layout` is an earlier daemon's record. False: no record, or one of version 0.1."""
        self.layout = Layout(start, end, device, inode) if self.is_known else Layout(0, 0, 0, 0)
        self.has_date = written >= _OLD_RECORD.size
        """Whether `until` is an earlier daemon's word. Without it leases may run that nobody noted."""
        self.until: float = until if self.has_date else 0.0
        """When the last lease ends, by the system's monotonic clock, which all processes share; 0: none."""
        # The earlier daemon's own limit counts: this one may be configured to a shorter one.
        self._earlier_longest_s = longest_s if self.is_known else longest_lease_s
        self._longest_s = longest_lease_s

    def wait_s(self, now: float) -> float:
        """How long leases of the earlier daemon may still run; 0 or less: none does."""
        return min(self.until - now, self._earlier_longest_s) if self.until else 0.0

    def note(self, layout: Layout) -> None:
        """Write the record of the segment that is about to appear."""
        self.layout, self.is_known = layout, True
        _RECORD.pack_into(self._mapped, 0, self.until, self._longest_s, *layout, _MAGIC)

    def hold_until(self, moment: float) -> None:
        """Note a lease that ends at `moment`."""
        if moment > self.until:
            self.until = moment
            _DATES.pack_into(self._mapped, 0, moment, self._longest_s)

    def lift(self) -> None:
        """No lease runs any more."""
        if self.until:
            self.until = 0.0
            _DATES.pack_into(self._mapped, 0, 0.0, self._longest_s)

    def restore(self) -> bool:
        """Write the file again if it was removed; whether that was so. One system call when it was not."""
        if os.fstat(self._file).st_nlink or not self.is_known:
            return False
        try:
            file = _locked(self._path)
        except (GuardTaken, OSError):
            return False  # a second daemon has made its own
        mapped = mmap.mmap(file, _resized(file, _RECORD.size))
        mapped[:] = self._mapped[:]
        self._mapped.close()
        os.close(self._file)
        self._file, self._mapped = file, mapped
        log.warning("%s was removed by another process; it is back", self._path.name)
        return True

    def close(self) -> None:
        """Unlock. The file stays, unless there has never been a segment that it could tell of."""
        if not self.is_known and not self.until:
            self._path.unlink(missing_ok=True)
        self._mapped.close()
        os.close(self._file)


def _locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise GuardTaken from None
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # removed meanwhile: another process would lock another file


def _resized(file: int, size_bytes: int) -> int:
    os.ftruncate(file, size_bytes)
    return size_bytes
