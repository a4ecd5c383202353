"""Where the daemon finds objects that are not in its memory: on the node's disk, and at its peers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import xxhash

from kvroute.clock import Clock
from kvroute.errors import ConfigError
from kvroute.lru import Lru
from kvroute.tierd.options import PeerOptions
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


INCARNATION_HEADER = "x-kvroute-tierd"
"""A header of every answer to a peer: the incarnation of the daemon that answers."""
# By this header a daemon finds its own address among those of its peers.


class FoundObject(NamedTuple):
    """An object that a peer has."""

    url: str
    """The object's URL."""
    size_bytes: int


class Peers:
    """The other daemons. Mutable: their resolved addresses, which are skipped, and which is our own.

    `run` keeps the addresses up to date; `close` ends the running queries.
    """

    def __init__(self, options: PeerOptions, incarnation: str, counts: Counts, clock: Clock) -> None:
        self._options = options
        self._incarnation = incarnation
        self._counts = counts
        self._clock = clock
        self._resolved: tuple[str, ...] = ()
        self._own_urls: set[str] = set()
        self._skipped_until: dict[str, float] = {}
        self._search_slots = asyncio.Semaphore(options.questions)
        self._queries: set[asyncio.Task[FoundObject | None]] = set()
        headers = {}
        if options.key is not None:
            headers["authorization"] = f"Bearer {options.key.get_secret_value()}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=options.fetch_timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=options.questions),
            trust_env=False,
        )

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all known peers, without our own."""
        both = dict.fromkeys((*self._options.urls, *self._resolved))
        return tuple(url for url in both if url not in self._own_urls)

    async def run(self) -> None:
        """Resolve the DNS name every `refresh_s` seconds. Returns immediately when none is configured."""
        while self._options.dns is not None:
            await self.refresh()
            await self._clock.sleep(self._options.refresh_s)

    async def refresh(self) -> None:
        """Resolve the DNS name now. If that fails, the known addresses stay."""
        if self._options.dns is None:
            return
        host, _, port = self._options.dns.rpartition(":")
        try:
            async with asyncio.timeout(self._options.refresh_s):
                address_infos = await asyncio.get_running_loop().getaddrinfo(
                    host, int(port), type=socket.SOCK_STREAM
                )
        except (OSError, TimeoutError) as exc:
            log.debug("peers.dns: cannot resolve %s: %s", host, exc)
            return
        urls = tuple(sorted({_url(*address[:2]) for *_, address in address_infos}))
        if urls != self._resolved:
            log.info("peers.dns: %s resolves to %d addresses", host, len(urls))
            # The address may belong to another daemon now.
            self._own_urls.difference_update(set(self._resolved) - set(urls))
            self._resolved = urls

    async def find(self, name: ObjectName) -> FoundObject | None:
        """Query all peers that are not skipped. Returns None if no peer reports the object in time."""
        async with self._search_slots:
            now = self._clock.now()
            urls = [url for url in self.urls if self._skipped_until.get(url, 0.0) <= now]
            queries = {asyncio.create_task(self._query(url, name)) for url in urls}
            for query in queries:
                self._queries.add(query)
                query.add_done_callback(self._queries.discard)
            while queries:
                # Slower queries run to their end: cancelling one would close its connection.
                done, queries = await asyncio.wait(queries, return_when=asyncio.FIRST_COMPLETED)
                for found_object in (query.result() for query in done):
                    if found_object is not None:
                        return found_object
            return None

    async def _query(self, url: str, name: ObjectName) -> FoundObject | None:
        target = f"{url}/v1/kv/{quote(name.bucket, safe='')}/{quote(name.key, safe='')}"
        try:
            async with asyncio.timeout(self._options.answer_timeout_s):
                answer = await self._http.head(target)
            if answer.headers.get(INCARNATION_HEADER) == self._incarnation:
                self._own_urls.add(url)
                return None
            is_found = answer.status_code == 200
            size_bytes = int(answer.headers["content-length"]) if is_found else 0
            if answer.status_code not in (200, 404):
                raise ValueError(f"status {answer.status_code}")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, KeyError, ValueError) as exc:
            self._skip_peer(url, exc)
            return None
        self._counts.peer_questions[url, "yes" if is_found else "no"] += 1
        return FoundObject(target, size_bytes) if is_found and size_bytes > 0 else None

    async def fetch(self, found_object: FoundObject, pieces: Sequence[memoryview]) -> bool:
        """Fill `pieces`, whose total size is the object's. Returns False, with undefined contents, on
        failure."""
        try:
            async with (
                asyncio.timeout(self._options.fetch_timeout_s),
                self._http.stream("GET", found_object.url) as answer,
            ):
                if answer.status_code != 200:
                    return False
                filled = await _fill(pieces, answer.aiter_raw())
        except (httpx.HTTPError, TimeoutError) as exc:
            peer = httpx.URL(found_object.url).netloc.decode()
            log.warning("fetching an object from %s failed: %s", peer, _error_text(exc))
            return False
        self._counts.fetched_bytes += found_object.size_bytes
        return filled == found_object.size_bytes

    async def close(self) -> None:
        """Cancel the running queries and close the connections."""
        for query in self._queries:
            query.cancel()
        await asyncio.gather(*self._queries, return_exceptions=True)
        await self._http.aclose()

    def _skip_peer(self, url: str, exc: Exception) -> None:
        self._counts.peer_questions[url, "failed"] += 1
        now = self._clock.now()
        if self._skipped_until.get(url, 0.0) <= now:
            log.warning(
                "peer %s failed; it is skipped for %.0f s: %s", url, self._options.rest_s, _error_text(exc)
            )
            self._skipped_until[url] = now + self._options.rest_s


async def _fill(pieces: Sequence[memoryview], chunks: AsyncIterator[bytes]) -> int:
    """Write `chunks` into `pieces`. Returns the bytes written, plus one if there were more than fit."""
    room = list(reversed(pieces))
    filled = 0
    async with contextlib.aclosing(chunks) as received:  # type: ignore[type-var]
        async for chunk in received:
            unread = memoryview(chunk)
            while unread:
                if not room:
                    return filled + 1
                piece = room.pop()
                count = min(len(piece), len(unread))
                piece[:count] = unread[:count]
                unread = unread[count:]
                filled += count
                if count < len(piece):
                    room.append(piece[count:])
    return filled


def _url(host: str | int, port: str | int) -> str:
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def _error_text(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
