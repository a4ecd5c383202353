"""The POSIX shared memory segment, which stays readable through every mapping that a client ever made of it.

LMCache 0.5.6's in-process connector (`SageMakerHyperPodConnector`) maps the segment by its name at its start
and never again. A lease names only offsets, so what such a client reads is whatever its own, perhaps very old
mapping has there. Two rules keep that right or a miss, whatever restarts in whatever order and size:

1. Every daemon of a name uses the same inode, as long as the inode can be found. So old mappings show what is
   written today. The file is as long as this machine's memory, most of it a hole, so that a daemon with more
   memory still lies inside old mappings. It never gets shorter: an access beyond the end is a SIGBUS.
2. Where the inode is lost, the new one hands out only offsets beyond the end of every earlier one. An old
   mapping does not reach them, and the client takes that for a miss.

Bytes of a killed daemon are not overwritten before its last lease has ended; the next one waits for that.

Three files in `/dev/shm` outlive the daemon. NAME is what LMCache maps. `.NAME.kept` is a second link to the
same inode, because a Python process that opened NAME through `multiprocessing` before 3.13 unlinks it when it
ends. `.NAME.guard` is locked by a living daemon and holds the record that both rules need. After a clean end
they have no memory but that of running leases.
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


log = logging.getLogger("kvroute.tierd")

_RECORD = struct.Struct("<ddQQQQ8s")
"""Date, longest lease, then the layout, then the magic. Version 0.1 wrote the date alone."""
_DATES = struct.Struct("<dd")
_OLD_RECORD = struct.Struct("<d")
_MAGIC = b"kvguard2"


class GuardTaken(Exception):
    """A living daemon has the lock."""


class SegmentLayout(NamedTuple):
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
        self.layout = SegmentLayout(start, end, device, inode) if self.is_known else SegmentLayout(0, 0, 0, 0)
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

    def note(self, layout: SegmentLayout) -> None:
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


FOLDER = Path("/dev/shm")
MODE = 0o644
UNKNOWN_LEASE_S = 30.0
"""How long a lease may still run when no record says it: LMCache's default lifetime."""
_RESERVE_BYTES = 256 << 20
"""Reserved at a time, so that an interrupted start ends soon."""
_ROUNDED_BYTES = 1 << 30


class SegmentError(ConfigError):
    """The segment cannot be made; the message says why and what to do."""


class SharedSegment:
    """The locked and mapped memory of a daemon: `size_bytes` of the file from `start` on.

    Made by `open_segment`. Offsets of `memory` are those of the file less `start`.
    """

    def __init__(self, paths: Paths, file: int, layout: SegmentLayout, size_bytes: int, guard: Guard) -> None:
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
        """Link the segment again where a name was removed; how many were. A few system calls."""
        restored = int(self._guard.restore())
        path, kept = (_is_same(each, self._identity) for each in (self._paths.name, self._paths.kept))
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
            # An inode without a name cannot get one again. Who has it mapped reads on.
            self._is_lost = True
            text = "the shared memory %s cannot be found by new clients until this daemon restarts: %s"
            log.error(text, self._paths.name.name, exc.strerror)
            return restored
        log.warning("the shared memory %s was removed by another process; it is back", missing.name)
        return restored + 1

    def close(self, leased: Iterable[Extents] = ()) -> None:
        """Unmap the memory and give it back to the machine, but for the `leased` extents; names stay."""
        self.memory.release()
        held = [(self.start + offset, length) for extents in leased for offset, length in extents]
        with contextlib.suppress(BufferError):  # a transport still has a piece to send
            self._mapped.close()
        with contextlib.suppress(OSError):
            _free_all_but(self._file, held)
        os.close(self._file)


class Paths:
    """The files of a segment."""

    def __init__(self, name: str) -> None:
        """Raises SegmentError when `name` is not one of a segment."""
        plain = name.removeprefix("/")
        if not plain or "/" in plain or plain.startswith("."):
            raise SegmentError("shared_memory_name", f"{name!r} is not the name of a shared memory segment")
        self.name = FOLDER / plain
        self.kept = FOLDER / f".{plain}.kept"
        self.guard = FOLDER / f".{plain}.guard"


async def open_segment(
    name: str, size_bytes: int, clock: Clock, *, mode: int = MODE, longest_lease_s: float
) -> tuple[SharedSegment, Guard]:
    """The segment of that name with `size_bytes` of reserved memory, and the guard, to be closed after it.

    Waits until the leases of an earlier daemon have ended. Raises SegmentError when the name is wrong or
    another program's, or when there is not enough memory.
    """
    paths = Paths(name)
    try:
        guard = Guard(paths.guard, longest_lease_s)
    except GuardTaken:
        raise _taken(paths) from None
    except OSError as exc:
        raise SegmentError("shared_memory_name", f"{paths.guard}: {exc.strerror}") from exc
    try:
        return await _open(paths, size_bytes, clock, mode, guard), guard
    except BaseException:
        guard.close()
        raise


async def _open(paths: Paths, size_bytes: int, clock: Clock, mode: int, guard: Guard) -> SharedSegment:
    file = _find(paths, guard)
    found = None if file is None else os.fstat(file)
    is_ours = False
    try:
        layout = await _layout(paths, guard, found)
        wait_s = guard.wait_s(clock.now())
        if not guard.has_date and layout.start:
            wait_s = UNKNOWN_LEASE_S
        if wait_s > 0:
            log.warning("an earlier daemon left leases that end in %.1f s: waiting for them", wait_s)
            await clock.sleep(wait_s)
        guard.lift()
        is_ours = True
        if file is None:
            file = os.open(paths.kept, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await _reserve(file, layout.start, size_bytes)
        end = _rounded(layout.start + max(size_bytes, _machine_bytes()))
        seen = os.fstat(file)
        layout = SegmentLayout(layout.start, max(layout.end, end, seen.st_size), seen.st_dev, seen.st_ino)
        # Noted before a client can map it: a daemon that starts after a crash must know the end.
        guard.note(layout)
        if seen.st_size < layout.end:
            os.ftruncate(file, layout.end)
        os.fchmod(file, mode)
        segment = SharedSegment(paths, file, layout, size_bytes, guard)
        for path in (paths.name, paths.kept):
            if not _is_same(path, seen):
                os.link(paths.kept if path is paths.name else paths.name, path)
    except BaseException as exc:
        if file is not None:
            if found is None:
                paths.kept.unlink(missing_ok=True)  # nobody has seen it
            if is_ours:  # before that an earlier daemon's leases may still be read
                with contextlib.suppress(OSError):
                    _free_all_but(file, ())
            os.close(file)
        if isinstance(exc, OSError):
            text = f"cannot reserve {size_bytes} bytes in {FOLDER}: {exc.strerror}"
            raise SegmentError("size_gb", text) from exc
        raise
    return segment


def _find(paths: Paths, guard: Guard) -> int | None:
    """The inode that earlier daemons used, open and locked; None if there is none."""
    kept, name = _identity(paths.kept), _identity(paths.name)
    noted = guard.layout.identity
    if name is not None and name != (kept or noted):
        text = f"{paths.name} exists and is not of kvroute tierd: remove it or choose another name"
        raise SegmentError("shared_memory_name", text)
    path = paths.kept if kept is not None else paths.name if name is not None else None
    if path is None:
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise SegmentError("shared_memory_name", f"{path}: {exc.strerror}") from exc
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid():
            text = f"{path} belongs to another user: remove it or choose another name"
            raise SegmentError("shared_memory_name", text)
        try:
            # The guard may have been removed, and made anew by this daemon; the inode is the same.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _taken(paths) from None
        if kept is None:
            os.link(paths.name, paths.kept)
        elif name is None:
            os.link(paths.kept, paths.name)
    except BaseException:
        os.close(file)
        raise
    return file


def _taken(paths: Paths) -> SegmentError:
    text = f"another daemon has the shared memory {paths.name.name!r}: end it or choose another name"
    return SegmentError("shared_memory_name", text)


async def _layout(paths: Paths, guard: Guard, found: os.stat_result | None) -> SegmentLayout:
    """Where this daemon may hand out offsets: `start` and what is known of `end`."""
    noted = guard.layout
    if guard.is_known and found is not None and noted.identity == (found.st_dev, found.st_ino):
        return noted
    if guard.is_known and found is None:
        start = noted.end
    else:
        # The record is lost or older than rule 2. What can be seen of old mappings counts, and all that
        # the inode had: it was made beyond the end of earlier ones.
        names = {paths.name.name, paths.kept.name}
        inode = 0 if found is None else found.st_ino
        mapped = await asyncio.to_thread(foreign_end, FOLDER, names, inode)
        start = max(noted.end, mapped, 0 if found is None else found.st_size)
    if start:
        log.warning("clients of an earlier %s miss until they map it again", paths.name.name)
    start = _rounded(start)
    return SegmentLayout(start, start, 0, 0)


async def _reserve(file: int, start: int, size_bytes: int) -> None:
    """Give the file memory from `start` on, and take all other memory from it."""
    _free_all_but(file, [(start, size_bytes)])
    room_bytes = _available_bytes() + os.fstat(file).st_blocks * 512
    if size_bytes > room_bytes:
        text = f"{size_bytes} bytes do not fit: {FOLDER} and this machine's memory have {room_bytes} left"
        raise SegmentError("size_gb", text)
    # Reserve all memory at the start: a full /dev/shm is then an error here, not a SIGBUS during a request.
    for offset in range(start, start + size_bytes, _RESERVE_BYTES):
        length = min(_RESERVE_BYTES, start + size_bytes - offset)
        await asyncio.to_thread(os.posix_fallocate, file, offset, length)


def _free_all_but(file: int, held: Sequence[tuple[int, int]]) -> None:
    """Free the memory of the whole file except the `held` ranges (offset, length). Keeps the file's size."""
    size_bytes = os.fstat(file).st_size
    if not size_bytes or not os.fstat(file).st_blocks:
        return
    with mmap.mmap(file, size_bytes) as mapped:
        position = 0
        for offset, length in [*sorted(held), (size_bytes, 0)]:
            until = min(offset, size_bytes) // PAGE_BYTES * PAGE_BYTES
            if until > position:
                mapped.madvise(mmap.MADV_REMOVE, position, until - position)
            position = max(position, -(-(offset + length) // PAGE_BYTES) * PAGE_BYTES)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ROUNDED_BYTES) * _ROUNDED_BYTES


def _available_bytes() -> int:
    """What can be reserved: beyond it the kernel would end processes, perhaps not this one."""
    room = os.statvfs(FOLDER)
    room_bytes = room.f_bavail * room.f_frsize
    memory = _memory_figure("MemAvailable:")
    return room_bytes if memory is None else min(room_bytes, memory)


def _machine_bytes() -> int:
    """More memory than this a daemon cannot have."""
    return _memory_figure("MemTotal:") or 0


def _memory_figure(name: str) -> int | None:
    with open("/proc/meminfo", encoding="ascii") as lines:
        line = next((line for line in lines if line.startswith(name)), None)
    return None if line is None else int(line.split()[1]) * 1024


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_same(path: Path, identity: os.stat_result) -> bool:
    return _identity(path) == (identity.st_dev, identity.st_ino)
