"""Workers listed in a YAML file that may change while the gateway runs.

    workers:
      - http://10.0.0.1:8000                # a URL alone, or:
      - id: gpu-2                           # default: host:port of the URL
        url: http://10.0.0.2:8000
        models: [llama]                     # only where /v1/models cannot be read
        capacity_tokens: 500000             # only where /metrics does not have it
        role: decode                        # or prefill; default: both

Unknown keys are errors. An unusable file changes nothing: the last good list stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from kvroute import yaml_text
from kvroute.clock import Clock
from kvroute.errors import ConfigError
from kvroute.fleet.options import Entries, FleetOptions
from kvroute.fleet.worker import WorkerSpec
from kvroute.options import Options, option

log = logging.getLogger(__name__)


class WorkersFile(Options):
    """The file as a whole."""

    workers: Entries = option(..., "Every worker of this source; the list may be empty.")


def parse_workers_file(text: str) -> tuple[WorkerSpec, ...]:
    """Parse a workers file. Raises ConfigError, whose path is the place in the file (`workers[1].url`)."""
    try:
        document = yaml_text.load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"line {mark.line + 1}" if mark else ""
        raise ConfigError(
            location, f"not YAML: {getattr(error, 'problem', None) or str(error) or 'unreadable'}"
        ) from error
    except RecursionError as error:
        raise ConfigError("", f"not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError("", "must be a mapping with the key `workers`")
    try:
        file = WorkersFile.model_validate(document)
    except ValidationError as error:
        first_error = error.errors(include_input=False, include_url=False)[0]
        raise ConfigError(
            _path(first_error["loc"]), first_error["msg"].removeprefix("Value error, ")
        ) from error
    return tuple(entry.spec() for entry in file.workers)


def read_workers_file(path: Path) -> tuple[WorkerSpec, ...]:
    """Read the workers in the file at `path`. Blocks. Raises ConfigError if it is unreadable or invalid."""
    try:
        return parse_workers_file(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("", f"{path} is not UTF-8") from error


_Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _PollResult:
    """The result of one poll of the file."""

    signature: _Signature | None
    """None if the next poll must read the file in any case."""
    specs: tuple[WorkerSpec, ...] | None = None
    """None if the file is unchanged or unusable."""
    trouble: str = ""


class FileDiscovery:
    """Polls a workers file every `poll_s`. Mutable: `errors` counts unusable contents.

    A list of fewer than half as many workers is applied only if the next poll finds the file unchanged.
    """

    # A program that writes the file in place may not have finished at the first poll.

    is_explicit = True
    recheck_s: float | None = None

    def __init__(self, path: Path, clock: Clock, *, poll_s: float = 1.0) -> None:
        self.errors = 0
        self._path = path
        self._clock = clock
        self._poll_s = poll_s

    @classmethod
    def configured(cls, options: FleetOptions, clock: Clock) -> FileDiscovery | None:
        """None if `options` name no file."""
        return cls(options.file, clock, poll_s=options.file_poll_s) if options.file is not None else None

    async def watch(self) -> AsyncGenerator[tuple[WorkerSpec, ...], None]:
        # Polling instead of inotify also works on network file systems and on mounted ConfigMaps, whose files
        # are symbolic links that are replaced.
        seen: _Signature | None = None
        listed = 0
        # A far smaller list that waits for the next poll.
        shrunk: tuple[WorkerSpec, ...] | None = None
        logged = ""
        while True:
            # In a thread: `stat` may hang for a long time on a network file system.
            result = await asyncio.to_thread(_poll, self._path, seen)
            if result.signature != seen:
                seen, logged = result.signature, ""
            if result.trouble and result.trouble != logged:
                logged = result.trouble
                self.errors += 1
                log.error("%s: %s; the known workers stay", self._path, result.trouble)
            specs, confirmed = result.specs, False
            if specs is None and result.signature is not None and not result.trouble:
                specs, confirmed = shrunk, True
            shrunk = None
            if specs is not None:
                if confirmed or len(specs) >= listed / 2:
                    listed = len(specs)
                    yield specs
                else:
                    shrunk = specs
            await self._clock.sleep(self._poll_s)


def _poll(path: Path, seen: _Signature | None) -> _PollResult:
    """Read the file unless its signature is `seen`. Blocks."""
    try:
        signature = _signature(path)
        if signature == seen:
            return _PollResult(seen)
        text = path.read_text(encoding="utf-8")
        if _signature(path) != signature:
            return _PollResult(None)  # the file was written during the read
    except OSError as error:
        return _PollResult(None, trouble=f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        return _PollResult(signature, trouble="is not UTF-8")
    try:
        return _PollResult(signature, parse_workers_file(text))
    except ConfigError as error:
        return _PollResult(signature, trouble=str(error))


def _signature(path: Path) -> _Signature:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _path(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
