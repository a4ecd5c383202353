"""Workers listed in a YAML file that may change while the gateway runs.

    workers:
      - http://10.0.0.1:8000                # a URL alone, or:
      - id: gpu-2                           # default: host:port of the URL
        url: http://10.0.0.2:8000
        models: [llama]                     # only where /v1/models cannot be read
        capacity_tokens: 500000             # only where /metrics does not tell

Unknown keys are errors. A file that cannot be used changes nothing: the last good list stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml
from pydantic import ValidationError, model_validator

from kvroute.clock import Clock
from kvroute.errors import ConfigError
from kvroute.fleet.options import Entry, FleetOptions, repeated
from kvroute.fleet.worker import WorkerSpec
from kvroute.options import Options, option

log = logging.getLogger(__name__)


class WorkersFile(Options):
    """The file as a whole."""

    workers: tuple[Entry, ...] = option(..., "Every worker of this source; the list may be empty.")

    @model_validator(mode="after")
    def _differ(self) -> Self:
        wrong = repeated(self.workers)
        if wrong:
            raise ValueError(wrong)
        return self


def parse_workers_file(text: str) -> tuple[WorkerSpec, ...]:
    """Raises ConfigError; its path is the place in the file, such as `workers[1].url`."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark else ""
        raise ConfigError(place, f"not YAML: {getattr(error, 'problem', None) or 'unreadable'}") from error
    if not isinstance(document, dict):
        raise ConfigError("", "must be a mapping with the key `workers`")
    try:
        file = WorkersFile.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise ConfigError(_path(first["loc"]), first["msg"].removeprefix("Value error, ")) from error
    return tuple(entry.spec() for entry in file.workers)


def read_workers_file(path: Path) -> tuple[WorkerSpec, ...]:
    """The workers in the file at `path`. Blocks. Raises ConfigError, also where it cannot be read."""
    try:
        return parse_workers_file(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("", f"{path} is not UTF-8") from error


_Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at the file. `specs` is None where nothing new can be told; `signature` is None where the
    next look must read it in any case."""

    signature: _Signature | None
    specs: tuple[WorkerSpec, ...] | None = None
    trouble: str = ""


class FileDiscovery:
    """Looks at a file every `poll_s`. Mutable: `errors` counts.

    A list of fewer than half as many workers is believed at the second look that finds the file unchanged: a
    program that writes the file in place may have written only a part of it. What then stands there is the
    operator's decision.
    """

    is_explicit = True
    recheck_s: float | None = None

    def __init__(self, path: Path, clock: Clock, *, poll_s: float = 1.0) -> None:
        self.errors = 0
        self._path = path
        self._clock = clock
        self._poll_s = poll_s

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> FileDiscovery | None:
        """None if no file is named."""
        return cls(options.file, clock, poll_s=options.file_poll_s) if options.file is not None else None

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        """Polls instead of asking the kernel: that also works on network file systems and on mounted
        ConfigMaps, whose files are symbolic links that are swapped."""
        seen: _Signature | None = None
        known = 0
        # A far smaller list that waits for its second look.
        shrunk: tuple[WorkerSpec, ...] | None = None
        complaint = ""
        while True:
            # In a thread: a stat may hang for long on a file system of another machine.
            look = await asyncio.to_thread(_look, self._path, seen)
            if look.signature != seen:
                seen, complaint = look.signature, ""
            if look.trouble and look.trouble != complaint:
                complaint = look.trouble
                self.errors += 1
                log.error("%s: %s; the workers known so far stay", self._path, look.trouble)
            specs, confirmed = look.specs, False
            if specs is None and look.signature is not None and not look.trouble:
                specs, confirmed = shrunk, True
            shrunk = None
            if specs is not None:
                if confirmed or len(specs) >= known / 2:
                    known = len(specs)
                    yield specs
                else:
                    shrunk = specs
            await self._clock.sleep(self._poll_s)


def _look(path: Path, seen: _Signature | None) -> _Look:
    """Read the file unless it still is what was `seen`. Blocks."""
    try:
        before = _signature(path)
        if before == seen:
            return _Look(seen)
        text = path.read_text(encoding="utf-8")
        if _signature(path) != before:
            return _Look(None)  # caught while it is being written
    except OSError as error:
        return _Look(None, trouble=f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return _Look(before, trouble="is not UTF-8")
    try:
        return _Look(before, parse_workers_file(text))
    except ConfigError as error:
        return _Look(before, trouble=str(error))


def _signature(path: Path) -> _Signature:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
