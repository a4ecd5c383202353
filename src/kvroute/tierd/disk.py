"""Objects that are not in the daemon's memory: on the node's disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import xxhash

from kvroute.errors import ConfigError
from kvroute.lru import Lru
from kvroute.tierd.pool import Counts, ObjectName

log = logging.getLogger("kvroute.tierd")

_HEAD = struct.Struct("<8sIQ")
_MAGIC = b"kvtierd1"
_SUFFIX, _UNFINISHED = ".kv", ".part"
_THREADS = 4
_LOG_EVERY_S = 30.0
_T = TypeVar("_T")


class _File(NamedTuple):
    size_bytes: int
    name: ObjectName | None
    """None for a file of an earlier process, until it is read."""


class DiskLevel:
    """Files in `folder`, together at most `size_bytes`. Mutable, used from the event loop; threads do the
    I/O.

    `on_eviction` is called with each name that leaves the disk. Call `open` before use and `close` after it.
    """

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        counts: Counts,
        on_eviction: Callable[[ObjectName], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now`: monotonic seconds."""
        self.size_bytes = size_bytes
        self._folder = folder
        self._counts = counts
        self._on_eviction = on_eviction
        # `_evict` alone evicts: it must remove files from the disk before a new one is written.
        self._files = Lru[str, _File](sys.maxsize, lambda _, file: file.size_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, "tierd-disk")
        self._now = now
        self._logged_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        """Size of all files together."""
        return self._files.weight

    def __contains__(self, name: ObjectName) -> bool:
        return _file_name(name) in self._files

    def names(self) -> Iterator[ObjectName]:
        """The objects on the disk. Files of an earlier process are left out until they are read."""
        return (file.name for _, file in self._files.items() if file.name is not None)

    async def open(self) -> None:
        """List the files of the directory. Raises ConfigError when the directory cannot be used."""
        try:
            files = await self._in_thread(lambda: _scan(self._folder))
        except OSError as exc:
            raise ConfigError("disk_dir", f"{self._folder}: {exc.strerror}") from exc
        for file_name, size_bytes in files:
            self._files.put(file_name, _File(size_bytes, None))
        to_remove = self._evict(self.size_bytes)
        await self._in_thread(lambda: _remove(self._folder, to_remove))

    def size_of(self, name: ObjectName) -> int:
        """The object's size in bytes. Raises KeyError when it is not on the disk."""
        file = self._files.peek(_file_name(name))
        if file is None:
            raise KeyError(name)
        return file.size_bytes - _HEAD.size - len(_name_bytes(name))

    async def write(self, name: ObjectName, pieces: Sequence[memoryview]) -> bool:
        """Write an object. Returns False if the write failed or the object is too large.

        The bytes must not change during the write. The caller must await one write before the next.
        """
        file_name, name_bytes = _file_name(name), _name_bytes(name)
        size_bytes = _HEAD.size + len(name_bytes) + sum(map(len, pieces))
        if size_bytes > self.size_bytes:
            self._counts.disk["skipped"] += 1
            return False
        self._files.pop(file_name)
        to_remove = self._evict(self.size_bytes - size_bytes)

        def work() -> None:
            _remove(self._folder, to_remove)
            _write(self._folder, file_name, name_bytes, pieces)

        try:
            await self._in_thread(work)
        except OSError as exc:
            self._counts.disk["write_failed"] += 1
            self._log_failure("write", exc)
            return False
        self._files.put(file_name, _File(size_bytes, name))
        self._counts.disk["written"] += 1
        self._counts.disk_written_bytes += size_bytes
        return True

    async def read(self, name: ObjectName, pieces: Sequence[memoryview]) -> bool:
        """Fill `pieces` with the object. Returns False, with undefined contents, if the file is missing or
        wrong.

        The caller must not cancel it: the thread would continue to write into `pieces`.
        """
        file_name = _file_name(name)
        try:
            is_whole = await self._in_thread(
                lambda: _read(self._folder, file_name, _name_bytes(name), pieces)
            )
        except OSError as exc:
            self._log_failure("read", exc)
            is_whole = False
        if not is_whole:
            self._counts.disk["read_failed"] += 1
            file = self._files.pop(file_name)
            if file is not None:
                self._notify_evicted(file)
            with contextlib.suppress(OSError):
                await self._in_thread(lambda: _remove(self._folder, [file_name]))
            return False
        file = self._files.peek(file_name)
        if file is not None:
            self._files.put(file_name, file._replace(name=name))
        self._counts.disk["read"] += 1
        self._counts.disk_read_bytes += sum(map(len, pieces))
        return True

    def _log_failure(self, action: str, error: OSError) -> None:
        # A full disk fails for every object.
        if self._now() - self._logged_at.get(action, -math.inf) >= _LOG_EVERY_S:
            self._logged_at[action] = self._now()
            log.warning("the disk level could not %s an object: %s", action, error.strerror)

    async def close(self) -> None:
        """Wait until the threads have finished. The files stay."""
        await asyncio.to_thread(self._threads.shutdown)

    def _evict(self, limit_bytes: int) -> list[str]:
        """Evict the oldest files until at most `limit_bytes` are used. Returns the files to remove."""
        evicted = self._files.evict(limit_bytes)
        self._counts.disk["evicted"] += len(evicted)
        for _, file in evicted:
            self._notify_evicted(file)
        return [file_name for file_name, _ in evicted]

    def _notify_evicted(self, file: _File) -> None:
        if file.name is not None:
            self._on_eviction(file.name)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _name_bytes(name: ObjectName) -> bytes:
    return name.bucket + b"\0" + name.key


def _file_name(name: ObjectName) -> str:
    return xxhash.xxh3_128_hexdigest(_name_bytes(name)) + _SUFFIX


def _scan(folder: Path) -> list[tuple[str, int]]:
    """The directory's object files and their sizes, oldest first. Removes unfinished files."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX):
                seen = entry.stat()
                files.append((seen.st_mtime, entry.name, seen.st_size))
            elif entry.name.endswith(_UNFINISHED):
                os.unlink(entry.path)
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "not writable")
    return [(name, size) for _, name, size in sorted(files)]


def _remove(folder: Path, file_names: Sequence[str]) -> None:
    for file_name in file_names:
        (folder / file_name).unlink(missing_ok=True)


def _checksum(pieces: Sequence[memoryview]) -> int:
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def _write(folder: Path, file_name: str, name_bytes: bytes, pieces: Sequence[memoryview]) -> None:
    unfinished = folder / (file_name + _UNFINISHED)
    try:
        with open(unfinished, "wb", buffering=0) as file:
            head = _HEAD.pack(_MAGIC, len(name_bytes), _checksum(pieces)) + name_bytes
            for unwritten in (memoryview(head), *pieces):
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
        unfinished.rename(folder / file_name)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _read(folder: Path, file_name: str, name_bytes: bytes, pieces: Sequence[memoryview]) -> bool:
    with open(folder / file_name, "rb", buffering=0) as file:
        head = file.read(_HEAD.size + len(name_bytes))
        if len(head) != _HEAD.size + len(name_bytes):
            return False
        magic, name_length, checksum = _HEAD.unpack_from(head)
        if magic != _MAGIC or name_length != len(name_bytes) or head[_HEAD.size :] != name_bytes:
            return False
        for piece in pieces:
            unfilled = piece
            while unfilled:
                count = file.readinto(unfilled)
                if not count:
                    return False
                unfilled = unfilled[count:]
        return not file.read(1) and _checksum(pieces) == checksum


# By this header a daemon finds its own address among those of its peers.
