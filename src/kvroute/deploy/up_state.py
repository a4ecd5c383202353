"""The state of what `kvroute up` runs: a lock and a file in a folder, for other commands.

The supervisor holds the lock until it ends, even by SIGKILL. If no process holds the lock, the file describes
the last run.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from kvroute.errors import ConfigError

LOCK, STATE = "up.lock", "up.json"
# A reader of the state holds the lock for a moment, so the supervisor tries several times.
READER_TRIES, READER_PAUSE_S = 10, 0.02
LOGS = "logs"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One kept process. Contains no command line, which may contain a password."""

    name: str
    phase: str
    since: float
    """When the phase began, in seconds since the Unix epoch."""
    restarts: int
    pid: int | None
    """The process id of the guard, under which the process runs."""
    url: str
    log: str


@dataclass(frozen=True, slots=True)
class UpState:
    """The processes and addresses of one `kvroute up`."""

    name: str
    pid: int
    """The supervisor's process id. SIGTERM to it ends everything."""
    gateway: str
    processes: tuple[ProcessState, ...] = ()
    admin_key_file: str = ""
    """The file of the admin key that the gateway makes; empty when a key is configured."""


class StateFolder:
    """The folder of one `kvroute up`: the supervisor calls `hold`, all other commands call `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @contextmanager
    def hold(self, state: UpState) -> Iterator[None]:
        """Hold the folder's lock and publish `state` while the block runs.

        Raises `ConfigError` when another supervisor holds the lock, or when the folder cannot be written.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.path / LOCK).open("w"))
                _lock(lock)
                self.write(state)
            except BlockingIOError:
                raise ConfigError(
                    "state-dir",
                    f"another `kvroute up` runs in {self.path}: `kvroute down` ends it, "
                    "or use another folder with --state-dir",
                ) from None
            except OSError as exc:
                raise ConfigError("state-dir", f"cannot write to {self.path}: {exc.strerror}") from exc
            yield

    def write(self, state: UpState) -> None:
        """Replace the published state atomically. Raises OSError."""
        new = self.path / f"{STATE}.new"
        new.write_text(json.dumps(asdict(state), indent=1))
        new.replace(self.path / STATE)

    def read(self) -> UpState | None:
        """The state of the supervisor that runs here now; None when none runs."""
        try:
            with (self.path / LOCK).open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _parse(json.loads((self.path / STATE).read_text()))
        except FileNotFoundError:
            pass  # no supervisor ever ran here
        return None

    def log_files(self) -> dict[str, Path]:
        """The log file of each process by name. Includes processes of the last run."""
        return {file.stem: file for file in sorted(self.logs.glob("*.log"))}


def _lock(file: TextIO) -> None:
    """Lock `file`. Raises BlockingIOError when another process holds the lock for longer than a reader
    would."""
    for _ in range(READER_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(READER_PAUSE_S)
        else:
            return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def supervisor(name: str, gateway: str, processes: Sequence[ProcessState] = ()) -> UpState:
    """The state of this process as supervisor."""
    return UpState(name, os.getpid(), gateway, tuple(processes))


def _parse(data: dict[str, Any]) -> UpState:
    processes = tuple(ProcessState(**process) for process in data.pop("processes"))
    return UpState(**data, processes=processes)
