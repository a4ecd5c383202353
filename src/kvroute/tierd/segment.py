"""The POSIX shared memory segment. Clients may read it through mappings that are older than the daemon.

LMCache 0.5.6's in-process connector (`SageMakerHyperPodConnector`) maps the segment by name once, at its
start. A lease names only offsets, so such a client reads from its own mapping, which may be very old. Daemons
may restart in any order and with any size. Two rules make sure that an old mapping shows either the right
bytes or a miss:

1. All daemons of a name use the same inode while the inode can be found. So old mappings show what is
   written today. The file is sparse and has the length of this machine's memory, so that a larger daemon
   still fits into old mappings. The file never gets shorter: an access beyond its end would be a SIGBUS.
2. If the inode is lost, the new inode uses only offsets beyond the end of every earlier inode. An old mapping
   does not reach these offsets, and the client treats that as a miss.

The next daemon overwrites the bytes of a killed daemon only after the last lease of that daemon has ended.

Three files in `/dev/shm` outlive the daemon. LMCache maps NAME. `.NAME.kept` is a second link to the same
inode, because before Python 3.13 a process that opened NAME through `multiprocessing` unlinks it when it
ends. A living daemon locks `.NAME.guard`, which contains the record that both rules need. After a clean end
the three files occupy only the memory of leases that still run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvroute.clock import Clock
from kvroute.errors import ConfigError
from kvroute.tierd.pool import PAGE_BYTES, Extents

_DELETED = " (deleted)"


def furthest_foreign_mapping(folder: Path, names: set[str], inode: int) -> int:
    """The furthest end, in bytes, of any process's mapping of files with these names in `folder`; 0 if none.

    Removed files count, `inode` does not. Sees the processes of this PID namespace whose `maps` this user may
    read. Takes milliseconds to a second.
    """
    end, device = 0, folder.stat().st_dev
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                with open(process / "maps", encoding="utf-8", errors="replace") as lines:
                    end = max(end, furthest_mapping(lines, device, names, inode))
            except OSError:
                continue  # the process has ended, or belongs to another user
    return end


def furthest_mapping(lines: Iterable[str], device: int, names: set[str], inode: int) -> int:
    """The furthest end for one process, given the lines of its `/proc/PID/maps`."""
    end = 0
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    for line in lines:
        if wanted not in line:
            continue
        addresses, _, offset, found_device, found_inode, *path = line.rstrip("\n").split(maxsplit=5)
        if found_device != wanted or int(found_inode) == inode or not path:
            continue
        if path[0].removesuffix(_DELETED).rpartition("/")[2] in names:
            start_address, end_address = (int(address, 16) for address in addresses.split("-"))
            end = max(end, int(offset, 16) + end_address - start_address)
    return end


log = logging.getLogger("kvroute.tierd")

_RECORD = struct.Struct("<ddQQQQ8s")
"""End of the last lease, longest lease (both in seconds), the layout, the magic. Version 0.1 wrote only the
first."""
_LEASE_DATES = struct.Struct("<dd")
_RECORD_0_1 = struct.Struct("<d")
_MAGIC = b"kvguard2"


class GuardLocked(Exception):
    """Another living daemon holds the lock of the guard file."""


class SegmentLayout(NamedTuple):
    """The range of offsets, in bytes, that a segment uses, and the inode for which it is valid."""

    start: int
    """The first offset that leases of this inode may name."""
    end: int
    """The size of the file: no mapping of this inode or of an earlier inode reaches further."""
    device: int
    inode: int

    @property
    def identity(self) -> tuple[int, int]:
        """`(st_dev, st_ino)` of `os.stat`."""
        return self.device, self.inode


class GuardFile:
    """The lock and the record of `.NAME.guard`. Mutable: the record, which survives a SIGKILL."""

    def __init__(self, path: Path, longest_lease_s: float) -> None:
        """Lock the file and read the record. Raises GuardLocked, or OSError when the file cannot be
        opened."""
        self._path = path
        self._file = _locked(path)
        written = os.fstat(self._file).st_size
        os.ftruncate(self._file, _RECORD.size)
        self._mapped = mmap.mmap(self._file, _RECORD.size)
        last_lease_end, longest_s, start, end, device, inode, magic = _RECORD.unpack_from(self._mapped)
        self.has_layout = magic == _MAGIC
        """Whether `layout` is an earlier daemon's record. False without a record, or with one of version
        0.1."""
        self.layout = (
            SegmentLayout(start, end, device, inode) if self.has_layout else SegmentLayout(0, 0, 0, 0)
        )
        self.has_lease_end = written >= _RECORD_0_1.size
        """Whether an earlier daemon wrote `last_lease_end`. If False, unrecorded leases may run."""
        self.last_lease_end: float = last_lease_end if self.has_lease_end else 0.0
        """When the last lease ends, by the monotonic clock, which all processes share; 0 without leases."""
        # The earlier daemon's limit counts: this daemon's limit may be shorter.
        self._earlier_longest_s = longest_s if self.has_layout else longest_lease_s
        self._longest_s = longest_lease_s

    def wait_s(self, now: float) -> float:
        """Seconds for which leases of the earlier daemon may still run; 0 or less if none runs."""
        return min(self.last_lease_end - now, self._earlier_longest_s) if self.last_lease_end else 0.0

    def write_layout(self, layout: SegmentLayout) -> None:
        """Write the layout of the segment that is about to be created."""
        self.layout, self.has_layout = layout, True
        _RECORD.pack_into(self._mapped, 0, self.last_lease_end, self._longest_s, *layout, _MAGIC)

    def record_lease_end(self, moment: float) -> None:
        """Record that a lease runs until `moment`."""
        if moment > self.last_lease_end:
            self.last_lease_end = moment
            _LEASE_DATES.pack_into(self._mapped, 0, moment, self._longest_s)

    def clear_lease_end(self) -> None:
        """Record that no lease runs."""
        if self.last_lease_end:
            self.last_lease_end = 0.0
            _LEASE_DATES.pack_into(self._mapped, 0, 0.0, self._longest_s)

    def restore(self) -> bool:
        """Write the file again if it was removed. Returns whether it was. One system call if it was not."""
        if os.fstat(self._file).st_nlink or not self.has_layout:
            return False
        try:
            file = _locked(self._path)
        except (GuardLocked, OSError):
            return False  # a second daemon has made its own file
        mapped = mmap.mmap(file, _resize(file, _RECORD.size))
        mapped[:] = self._mapped[:]
        self._mapped.close()
        os.close(self._file)
        self._file, self._mapped = file, mapped
        log.warning("another process removed %s; it is restored", self._path.name)
        return True

    def close(self) -> None:
        """Unlock the file. The file stays, unless it records neither a segment nor a lease."""
        if not self.has_layout and not self.last_lease_end:
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
            raise GuardLocked from None
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # the file was removed meanwhile: another process would lock another file


def _resize(file: int, size_bytes: int) -> int:
    os.ftruncate(file, size_bytes)
    return size_bytes


FOLDER = Path("/dev/shm")
MODE = 0o644
UNKNOWN_LEASE_S = 30.0
"""How long a lease may still run if there is no record: LMCache's default lifetime."""
_RESERVE_BYTES = 256 << 20
"""Memory reserved in one step. Steps make an interrupted start end soon."""
_ROUNDED_BYTES = 1 << 30


class SegmentError(ConfigError):
    """The segment cannot be created; the message says why and what to do."""


class SharedSegment:
    """The locked and mapped memory of a daemon: `size_bytes` of the file from `start` on.

    `open_segment` makes it. Offset 0 of `memory` is offset `start` of the file.
    """

    def __init__(
        self, paths: Paths, file: int, layout: SegmentLayout, size_bytes: int, guard: GuardFile
    ) -> None:
        self.start = layout.start
        self.size_bytes = size_bytes
        self._paths = paths
        self._file = file
        self._identity = os.fstat(file)
        self._guard = guard
        self._is_lost = False
        self._mapped = mmap.mmap(file, size_bytes, offset=layout.start)
        with contextlib.suppress(OSError, AttributeError):
            self._mapped.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._mapped)

    def restore_names(self) -> int:
        """Link removed names again. Returns the number of restored names. Costs a few system calls."""
        restored = int(self._guard.restore())
        path, kept = (_is_same(name, self._identity) for name in (self._paths.name, self._paths.kept))
        if path and kept:
            return restored
        if self._is_lost:
            return restored
        missing, source = (
            (self._paths.name, self._paths.kept) if kept else (self._paths.kept, self._paths.name)
        )
        try:
            if not path and not kept:
                raise FileNotFoundError(errno.ENOENT, "both names were removed")
            os.link(source, missing)
        except OSError as exc:
            # An inode without a name cannot get a name again. Clients with a mapping can still read it.
            self._is_lost = True
            text = "the shared memory %s cannot be found by new clients until this daemon restarts: %s"
            log.error(text, self._paths.name.name, exc.strerror)
            return restored
        log.warning("another process removed the shared memory %s; it is restored", missing.name)
        return restored + 1

    def close(self, leased: Iterable[Extents] = ()) -> None:
        """Unmap the memory and free it, except the `leased` extents. The names stay."""
        self.memory.release()
        leased_ranges = [(self.start + offset, length) for extents in leased for offset, length in extents]
        with contextlib.suppress(BufferError):  # a transport still has a piece to send
            self._mapped.close()
        with contextlib.suppress(OSError):
            _free_except(self._file, leased_ranges)
        os.close(self._file)


class Paths:
    """The paths of a segment's three files."""

    def __init__(self, name: str) -> None:
        """Raises SegmentError when `name` cannot be the name of a segment."""
        plain = name.removeprefix("/")
        if not plain or "/" in plain or plain.startswith("."):
            raise SegmentError("shared_memory_name", f"{name!r} is not the name of a shared memory segment")
        self.name = FOLDER / plain
        self.kept = FOLDER / f".{plain}.kept"
        self.guard = FOLDER / f".{plain}.guard"


async def open_segment(
    name: str, size_bytes: int, clock: Clock, *, mode: int = MODE, longest_lease_s: float
) -> tuple[SharedSegment, GuardFile]:
    """Open or create the segment `name` with `size_bytes` of reserved memory.

    Returns the segment and its guard file, which must be closed after it. Waits until the leases of an
    earlier daemon have ended. Raises SegmentError when the name is wrong or belongs to another program, or
    when there is not enough memory.
    """
    paths = Paths(name)
    try:
        guard = GuardFile(paths.guard, longest_lease_s)
    except GuardLocked:
        raise _locked_error(paths) from None
    except OSError as exc:
        raise SegmentError("shared_memory_name", f"{paths.guard}: {exc.strerror}") from exc
    try:
        return await _make_or_reuse(paths, size_bytes, clock, mode, guard), guard
    except BaseException:
        guard.close()
        raise


async def _make_or_reuse(
    paths: Paths, size_bytes: int, clock: Clock, mode: int, guard: GuardFile
) -> SharedSegment:
    file = _open_existing(paths, guard)
    existing = None if file is None else os.fstat(file)
    may_free = False
    try:
        layout = await _choose_layout(paths, guard, existing)
        wait_s = guard.wait_s(clock.now())
        if not guard.has_lease_end and layout.start:
            wait_s = UNKNOWN_LEASE_S
        if wait_s > 0:
            log.warning("waiting %.1f s until the leases of an earlier daemon have ended", wait_s)
            await clock.sleep(wait_s)
        guard.clear_lease_end()
        may_free = True
        if file is None:
            file = os.open(paths.kept, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await _reserve(file, layout.start, size_bytes)
        end = _round_up(layout.start + max(size_bytes, _machine_bytes()))
        status = os.fstat(file)
        layout = SegmentLayout(
            layout.start, max(layout.end, end, status.st_size), status.st_dev, status.st_ino
        )
        # Written before a client can map the file: a daemon that starts after a crash must know the end.
        guard.write_layout(layout)
        if status.st_size < layout.end:
            os.ftruncate(file, layout.end)
        os.fchmod(file, mode)
        segment = SharedSegment(paths, file, layout, size_bytes, guard)
        for path in (paths.name, paths.kept):
            if not _is_same(path, status):
                os.link(paths.kept if path is paths.name else paths.name, path)
    except BaseException as exc:
        if file is not None:
            if existing is None:
                paths.kept.unlink(missing_ok=True)  # no client has mapped it yet
            if may_free:  # otherwise clients may still read leases of an earlier daemon
                with contextlib.suppress(OSError):
                    _free_except(file, ())
            os.close(file)
        if isinstance(exc, OSError):
            text = f"cannot reserve {size_bytes} bytes in {FOLDER}: {exc.strerror}"
            raise SegmentError("size_gb", text) from exc
        raise
    return segment


def _open_existing(paths: Paths, guard: GuardFile) -> int | None:
    """Open and lock the file that earlier daemons used; None if there is none."""
    kept, name = _identity(paths.kept), _identity(paths.name)
    recorded = guard.layout.identity
    if name is not None and name != (kept or recorded):
        text = f"{paths.name} exists and does not belong to kvroute tierd: remove it or choose another name"
        raise SegmentError("shared_memory_name", text)
    path = paths.kept if kept is not None else paths.name if name is not None else None
    if path is None:
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise SegmentError("shared_memory_name", f"{path}: {exc.strerror}") from exc
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            text = f"{path} belongs to another user: remove it or choose another name"
            raise SegmentError("shared_memory_name", text)
        try:
            # The guard file may have been removed and made again by this daemon. The inode stays locked.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked_error(paths) from None
        if kept is None:
            os.link(paths.name, paths.kept)
        elif name is None:
            os.link(paths.kept, paths.name)
    except BaseException:
        os.close(file)
        raise
    return file


def _locked_error(paths: Paths) -> SegmentError:
    text = f"another daemon uses the shared memory {paths.name.name!r}: stop it or choose another name"
    return SegmentError("shared_memory_name", text)


async def _choose_layout(paths: Paths, guard: GuardFile, existing: os.stat_result | None) -> SegmentLayout:
    """Choose the range of offsets for this daemon: `start`, and the lowest possible `end`."""
    recorded = guard.layout
    if guard.has_layout and existing is not None and recorded.identity == (existing.st_dev, existing.st_ino):
        return recorded
    if guard.has_layout and existing is None:
        start = recorded.end
    else:
        # The record is lost or older than rule 2. So `start` lies beyond every old mapping that can be seen,
        # and beyond the end of the inode, which was itself made beyond the end of earlier inodes.
        names = {paths.name.name, paths.kept.name}
        inode = 0 if existing is None else existing.st_ino
        mapped = await asyncio.to_thread(furthest_foreign_mapping, FOLDER, names, inode)
        start = max(recorded.end, mapped, 0 if existing is None else existing.st_size)
    if start:
        log.warning(
            "clients that mapped an earlier %s find no entries until they map it again", paths.name.name
        )
    start = _round_up(start)
    return SegmentLayout(start, start, 0, 0)


async def _reserve(file: int, start: int, size_bytes: int) -> None:
    """Reserve memory for `size_bytes` of the file from `start` on, and free all other memory of the file."""
    _free_except(file, [(start, size_bytes)])
    room_bytes = _available_bytes() + os.fstat(file).st_blocks * 512
    if size_bytes > room_bytes:
        text = f"{size_bytes} bytes do not fit: {room_bytes} are free in {FOLDER} and this machine's memory"
        raise SegmentError("size_gb", text)
    # All memory is reserved at the start: a full /dev/shm is then an error here, not a SIGBUS in a request.
    for offset in range(start, start + size_bytes, _RESERVE_BYTES):
        length = min(_RESERVE_BYTES, start + size_bytes - offset)
        await asyncio.to_thread(os.posix_fallocate, file, offset, length)


def _free_except(file: int, leased_ranges: Sequence[tuple[int, int]]) -> None:
    """Free the memory of the whole file except `leased_ranges` (offset, length). Keeps the file's size."""
    size_bytes = os.fstat(file).st_size
    if not size_bytes or not os.fstat(file).st_blocks:
        return
    with mmap.mmap(file, size_bytes) as mapped:
        position = 0
        for offset, length in [*sorted(leased_ranges), (size_bytes, 0)]:
            last_lease_end = min(offset, size_bytes) // PAGE_BYTES * PAGE_BYTES
            if last_lease_end > position:
                mapped.madvise(mmap.MADV_REMOVE, position, last_lease_end - position)
            position = max(position, -(-(offset + length) // PAGE_BYTES) * PAGE_BYTES)


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // _ROUNDED_BYTES) * _ROUNDED_BYTES


def _available_bytes() -> int:
    """Memory that can be reserved. If more were reserved, the kernel would kill processes, maybe others."""
    room = os.statvfs(FOLDER)
    room_bytes = room.f_bavail * room.f_frsize
    memory = _meminfo_bytes("MemAvailable:")
    return room_bytes if memory is None else min(room_bytes, memory)


def _machine_bytes() -> int:
    """This machine's total memory, an upper bound for every daemon."""
    return _meminfo_bytes("MemTotal:") or 0


def _meminfo_bytes(name: str) -> int | None:
    with open("/proc/meminfo", encoding="ascii") as lines:
        line = next((line for line in lines if line.startswith(name)), None)
    return None if line is None else int(line.split()[1]) * 1024


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        existing = path.lstat()
    except FileNotFoundError:
        return None
    return existing.st_dev, existing.st_ino


def _is_same(path: Path, identity: os.stat_result) -> bool:
    return _identity(path) == (identity.st_dev, identity.st_ino)
