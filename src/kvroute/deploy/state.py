"""What runs, as the process that supervises it tells others: a lock and a file in its state folder.

The lock is held for as long as the supervisor lives, however it ends; without its holder, the file
only tells what ran last.
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
LOGS = "logs"
# Whoever reads the state holds the lock for an instant.
READER_TRIES, READER_PAUSE_S = 10, 0.02


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One kept process. It has no command line: that may hold a password."""

    name: str
    phase: str
    since: float
    """When the phase began, in seconds since the Unix epoch."""
    restarts: int
    pid: int | None
    """Of the guard, whose children are the process."""
    url: str
    log: str


@dataclass(frozen=True, slots=True)
class UpState:
    """What one `kvroute up` runs."""

    name: str
    pid: int
    """Of the supervisor: SIGTERM ends everything."""
    gateway: str
    processes: tuple[ProcessState, ...] = ()
    admin_key_file: str = ""
    """Of the gateway, where it makes its own key."""


class StateFolder:
    """The folder of one `kvroute up`: `hold` for its owner, `read` for everybody else."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    @contextmanager
    def hold(self, state: UpState) -> Iterator[None]:
        """Be the one who runs here. Raises `ConfigError` when somebody else does, or when the folder
        cannot be written."""
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((self.path / LOCK).open("w"))
                _lock(lock)
                self.write(state)
            except BlockingIOError:
                raise ConfigError(
                    "state-dir",
                    f"another `kvroute up` runs in {self.path}: `kvroute down` ends it, "
                    "--state-dir gives this one a folder of its own",
                ) from None
            except OSError as exc:
                raise ConfigError("state-dir", f"cannot write to {self.path}: {exc.strerror}") from exc
            yield

    def write(self, state: UpState) -> None:
        """Replace what is told, in one go. Raises OSError."""
        new = self.path / f"{STATE}.new"
        new.write_text(json.dumps(asdict(state), indent=1))
        new.replace(self.path / STATE)

    def read(self) -> UpState | None:
        """What runs here now; None when nothing does."""
        try:
            with (self.path / LOCK).open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _parsed(json.loads((self.path / STATE).read_text()))
        except FileNotFoundError:
            pass  # nothing ever ran here
        return None

    def log_files(self) -> dict[str, Path]:
        """Process -> its log, also of those that ran last."""
        return {file.stem: file for file in sorted(self.logs.glob("*.log"))}


def _lock(file: TextIO) -> None:
    """Raises BlockingIOError when another holds it for longer than a reader does."""
    for _ in range(READER_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(READER_PAUSE_S)
        else:
            return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def supervisor(name: str, gateway: str, processes: Sequence[ProcessState] = ()) -> UpState:
    """The state that this process tells."""
    return UpState(name, os.getpid(), gateway, tuple(processes))


def _parsed(data: dict[str, Any]) -> UpState:
    processes = tuple(ProcessState(**each) for each in data.pop("processes"))
    return UpState(**data, processes=processes)
