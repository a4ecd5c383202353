"""The POSIX shared memory segment: made before anybody connects, never reused, never taken from others.

Three files in `/dev/shm`: NAME, which LMCache maps; `.NAME.kept`, a second link to it, because a Python
process that opened NAME through `multiprocessing` before 3.13 unlinks it when it ends (LMCache's in-process
connector does); and `.NAME.guard`, which is locked while a daemon lives and holds until when leases run.

That date matters to the next daemon. LMCache reads a lease's offsets from whatever segment has the name at
that moment (0.5.6, `sagemaker_hyperpod_client.py`, `copy_from_lease`), so a new segment must not appear
before the last lease of the old one has ended: what it would read then is another object.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import struct
from pathlib import Path

from kvroute.clock import Clock
from kvroute.errors import ConfigError

log = logging.getLogger("kvroute.tierd")

FOLDER = Path("/dev/shm")
MODE = 0o644
_DATE = struct.Struct("<d")
_RESERVE_BYTES = 256 << 20
"""Reserved at a time, so that an interrupted start ends soon."""


class SegmentError(ConfigError):
    """The segment cannot be made; the message says why and what to do."""


class Guard:
    """The locked file beside a segment. Mutable: the date in it, which outlives a SIGKILL."""

    def __init__(self, path: Path, name: str) -> None:
        """Take the lock. Raises SegmentError when a living daemon has it."""
        self._path = path
        while True:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._file)
                text = f"another daemon has the shared memory {name!r}: end it or choose another name"
                raise SegmentError("shared_memory_name", text) from None
            if _is_same(path, os.fstat(self._file)):
                break
            os.close(self._file)  # removed by the daemon that ended just now
        os.ftruncate(self._file, _DATE.size)
        self._date = mmap.mmap(self._file, _DATE.size)
        (self.until,) = _DATE.unpack_from(self._date)
        """When the last lease ends, by the system's monotonic clock, which all processes share; 0: none."""

    def hold_until(self, moment: float) -> None:
        """Note a lease that ends at `moment`."""
        if moment > self.until:
            self.until = moment
            _DATE.pack_into(self._date, 0, moment)

    def lift(self) -> None:
        """No lease runs any more."""
        if self.until:
            self.until = 0.0
            _DATE.pack_into(self._date, 0, 0.0)

    def close(self) -> None:
        """Unlock; the file stays only while it has a date."""
        if not self.until:
            self._path.unlink(missing_ok=True)
        self._date.close()
        os.close(self._file)


class Segment:
    """A mapped segment of `size_bytes`, made by `open_segment`."""

    def __init__(self, path: Path, kept: Path, file: int, size_bytes: int) -> None:
        self._path = path
        self._kept = kept
        self._identity = os.fstat(file)
        self._mapped = mmap.mmap(file, size_bytes)
        with contextlib.suppress(OSError, AttributeError):
            self._mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._mapped)
        self.size_bytes = size_bytes

    def restore_name(self) -> bool:
        """Link the segment again if somebody has removed its name; whether that was so. Two system calls."""
        if os.path.lexists(self._path):
            return False
        try:
            os.link(self._kept, self._path)
        except OSError as exc:
            log.error("the shared memory %s has lost its name for good: %s", self._path.name, exc)
            return False
        log.warning("somebody removed the shared memory %s; it is back", self._path.name)
        return True

    def close(self) -> None:
        """Remove the names. The memory goes when the last client unmaps it."""
        for path in (self._path, self._kept):
            if _is_same(path, self._identity):
                path.unlink(missing_ok=True)
        self.memory.release()
        with contextlib.suppress(BufferError):  # a transport still has a piece to send
            self._mapped.close()


async def open_segment(
    name: str, size_bytes: int, clock: Clock, *, mode: int = MODE, longest_lease_s: float
) -> tuple[Segment, Guard]:
    """Make the segment, and the guard that must be closed after it.

    Waits until the leases of a daemon that had the name before have ended, `longest_lease_s` at most. Raises
    SegmentError when the name is wrong or another's, or when there is not enough memory.
    """
    plain = name.removeprefix("/")
    if not plain or "/" in plain or plain.startswith("."):
        raise SegmentError("shared_memory_name", f"{name!r} is not the name of a shared memory segment")
    path, kept = FOLDER / plain, FOLDER / f".{plain}.kept"
    guard = Guard(FOLDER / f".{plain}.guard", plain)
    try:
        if path.exists() and not (kept.exists() and path.samefile(kept)):
            text = f"{path} exists and is not of kvroute tierd: remove it or choose another name"
            raise SegmentError("shared_memory_name", text)
        wait_s = min(guard.until - clock.now(), longest_lease_s)
        if wait_s > 0:
            log.warning("the daemon before left leases that end in %.1f s: waiting for them", wait_s)
            await clock.sleep(wait_s)
        guard.lift()
        path.unlink(missing_ok=True)
        kept.unlink(missing_ok=True)
        return await _make(path, kept, size_bytes, mode), guard
    except BaseException:
        guard.close()
        raise


async def _make(path: Path, kept: Path, size_bytes: int, mode: int) -> Segment:
    room_bytes = _available_bytes()
    if size_bytes > room_bytes:
        text = f"{size_bytes} bytes do not fit: {FOLDER} and this machine's memory have {room_bytes} left"
        raise SegmentError("size_gb", text)
    file = os.open(kept, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, size_bytes)
        # Reserved now: a full /dev/shm is an error at the start, not a SIGBUS in the middle of a request.
        for start in range(0, size_bytes, _RESERVE_BYTES):
            length = min(_RESERVE_BYTES, size_bytes - start)
            await asyncio.to_thread(os.posix_fallocate, file, start, length)
        os.fchmod(file, mode)
        segment = Segment(path, kept, file, size_bytes)
        os.link(kept, path)  # it appears with its full size
    except OSError as exc:
        os.unlink(kept)
        text = f"cannot reserve {size_bytes} bytes in {FOLDER}: {exc.strerror}"
        raise SegmentError("size_gb", text) from exc
    except BaseException:
        os.unlink(kept)
        raise
    finally:
        os.close(file)
    return segment


def _available_bytes() -> int:
    """What can be reserved: beyond it the kernel would end processes, perhaps not this one."""
    room = os.statvfs(FOLDER)
    with open("/proc/meminfo", encoding="ascii") as lines:
        memory = next((line for line in lines if line.startswith("MemAvailable:")), None)
    room_bytes = room.f_bavail * room.f_frsize
    return room_bytes if memory is None else min(room_bytes, int(memory.split()[1]) * 1024)


def _is_same(path: Path, identity: os.stat_result) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (identity.st_dev, identity.st_ino)
