"""The map in a file: written while the streams run, read once at the start."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple, ParamSpec

import msgspec

from kvroute.errors import WireError
from kvroute.events.subscriber import KvEventSubscriber
from kvroute.fleet.worker import Worker
from kvroute.index.snapshot import HEAD, Frame, StreamHead, encode, encode_end, split

log = logging.getLogger(__name__)

_BUFFER_BYTES: Final = 1 << 20


class Captured(NamedTuple):
    """A stream whose map goes into the file."""

    worker: Worker
    rank: int
    subscriber: KvEventSubscriber


class SnapshotFile:
    """The snapshot file. Mutable: `load` reads streams, `take` and `discard` remove them.

    Errors with the file are logged and not raised: the map is then read from the workers.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._found: dict[tuple[str, str, int], tuple[StreamHead, Sequence[Frame]]] = {}

    async def load(self) -> None:
        """Read and check the file, off the event loop."""
        try:
            data = await asyncio.to_thread(self._path.read_bytes)
            streams = await asyncio.to_thread(split, data)
        except FileNotFoundError:
            return
        except (OSError, WireError) as error:
            log.warning("the snapshot of the map is ignored: %s", error)
            return
        self._found = {(head.worker, head.url, head.rank): (head, frames) for head, frames in streams}
        log.info("a snapshot of the map has %d streams", len(self._found))

    def knows(self, worker: Worker) -> bool:
        """Does the snapshot have a stream of this worker, of any incarnation?"""
        return any((known, url) == (worker.id, worker.spec.url) for known, url, _ in self._found)

    def take(self, worker: Worker, rank: int) -> tuple[StreamHead, Sequence[Frame]] | None:
        """Remove and return this stream's snapshot; None if the worker is another process by now."""
        found = self._found.pop((worker.id, worker.spec.url, rank), None)
        if found is None or found[0].incarnation != worker.facts.start_time:
            return None
        return found

    def discard(self) -> None:
        """Forget all streams that were loaded."""
        self._found = {}

    async def save(self, streams: Iterable[Captured]) -> int:
        """Write all streams that can be resumed, and replace the file atomically; returns how many were
        written."""
        writing = _Writing(self._path)
        written, frames = 0, 0
        try:
            try:
                await _in_thread(writing.begin)
                for worker, rank, subscriber in streams:
                    incarnation = worker.facts.start_time
                    captured = None if incarnation is None else await subscriber.capture()
                    if captured is None or incarnation != worker.facts.start_time:
                        continue
                    head = msgspec.structs.replace(
                        captured[0], worker=worker.id, url=worker.spec.url, rank=rank, incarnation=incarnation
                    )
                    await _in_thread(writing.add, [encode(head), *captured[1]])
                    written += 1
                    frames += 1 + len(captured[1])
                await _in_thread(writing.finish, encode_end(frames))
            finally:
                await _in_thread(writing.close)
        except OSError as error:
            log.warning("the snapshot of the map was not written: %s", error)
            return 0
        return written


class _Writing:
    """Writes a new file and renames it to `path` when it is complete. Blocks: for threads, one call at a
    time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fresh = path.with_name(path.name + ".new")
        self._file: IO[bytes] | None = None

    def begin(self) -> None:
        descriptor = os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._file.write(HEAD)

    def add(self, frames: Sequence[bytes]) -> None:
        assert self._file is not None
        self._file.writelines(frames)

    def finish(self, end: bytes) -> None:
        assert self._file is not None
        self._file.write(end)
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._fresh, self._path)

    def close(self) -> None:
        """Close the file, and delete it if it is not complete."""
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self._file = None
                self._fresh.unlink(missing_ok=True)


_P = ParamSpec("_P")


async def _in_thread(work: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
    """Run `work` in a thread, and wait for its end even when cancelled: two writes must not overlap."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise
