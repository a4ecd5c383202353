"""Logs as they grow, on one screen: each line with the name of the process that wrote it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from zlib import crc32

from rich.console import Console
from rich.text import Text

from kvroute.clock import Clock

POLL_S = 0.2
CHUNK_BYTES = 65_536
# Further behind than this, the oldest lines are skipped: a screen must not hold up what it shows.
MAX_BEHIND_BYTES = 1_048_576
COLORS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


class GrowingFile:
    """The new lines of a file that others append to. Mutable: how far it has been read."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    @classmethod
    def at_end(cls, path: Path) -> GrowingFile:
        """Of a file that is there, only what comes from now on."""
        return cls(path, offset=_size(path))

    def new_lines(self) -> list[str]:
        """At most `CHUNK_BYTES` of whole lines; none when there is nothing new, or no file yet."""
        size = _size(self._path)
        if size < self._offset:
            self._offset, self._rest = 0, b""
        skipped = max(0, size - self._offset - MAX_BEHIND_BYTES)
        if skipped:
            self._offset, self._rest = self._offset + skipped, b""
        if size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read(CHUNK_BYTES)
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        if len(self._rest) >= CHUNK_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        told = [f"... {skipped:,} bytes more are in {self._path}"] if skipped else []
        return told + [line.decode(errors="replace").rstrip("\r") for line in lines]


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last `count` whole lines within `MAX_BEHIND_BYTES`, and where in the file they end."""
    size = _size(path)
    if size == 0:
        return [], 0
    with path.open("rb") as file:
        file.seek(max(0, size - MAX_BEHIND_BYTES))
        text = file.read(size - file.tell())
    whole = text[: text.rfind(b"\n") + 1]
    lines = whole.decode(errors="replace").splitlines()
    return lines[-count:] if count else [], size - len(text) + len(whole)


class Screen:
    """Prints lines behind the names of their processes, a colour each."""

    def __init__(self, console: Console, names: Iterable[str]) -> None:
        self._console = console
        self._width = max(map(len, names), default=0)

    def show(self, name: str, lines: Sequence[str]) -> None:
        prefix = Text(f"{name:<{self._width}} | ", style=COLORS[crc32(name.encode()) % len(COLORS)])
        for line in lines:
            # What a process writes for terminals becomes colour, or nothing.
            self._console.print(prefix + Text.from_ansi(line), soft_wrap=True, highlight=False)


async def follow(files: Mapping[str, GrowingFile], screen: Screen, clock: Clock) -> None:
    """Show what each process writes, until cancelled."""
    while True:
        show_new(files, screen)
        await clock.sleep(POLL_S)


def show_new(files: Mapping[str, GrowingFile], screen: Screen) -> bool:
    """Show what has been written since the last time; whether that was anything."""
    found = False
    for name, file in files.items():
        lines = file.new_lines()
        screen.show(name, lines)
        found = found or bool(lines)
    return found


@asynccontextmanager
async def following(console: Console, logs: Mapping[str, Path], *, clock: Clock) -> AsyncIterator[None]:
    """Show the logs for as long as the block runs, and what its end has added to them."""
    files = {name: GrowingFile.at_end(path) for name, path in logs.items()}
    screen = Screen(console, logs)
    task = asyncio.create_task(follow(files, screen, clock))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        while show_new(files, screen):
            pass


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
