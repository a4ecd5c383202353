from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from kvroute.deploy.up_state import ProcessState, StateFolder, supervisor
from kvroute.errors import ConfigError

PROCESS = ProcessState("redis", "ready", 12.5, 1, 4711, "redis://127.0.0.1:6379", "/logs/redis.log")


def test_running_processes_are_listed_while_they_run(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    assert folder.read() is None

    with folder.hold(supervisor("demo", "http://127.0.0.1:8080")):
        folder.write(supervisor("demo", "http://127.0.0.1:8080", [PROCESS]))
        state = StateFolder(tmp_path / "state").read()

    assert state is not None
    assert (state.name, state.pid, state.processes) == ("demo", os.getpid(), (PROCESS,))
    assert folder.read() is None


def test_a_folder_has_one_holder(tmp_path: Path) -> None:
    with (
        StateFolder(tmp_path).hold(supervisor("one", "")),
        pytest.raises(ConfigError, match="another `kvroute up` runs in"),
        StateFolder(tmp_path).hold(supervisor("two", "")),
    ):
        pass

    with StateFolder(tmp_path).hold(supervisor("two", "")):
        state = StateFolder(tmp_path).read()
    assert state is not None
    assert state.name == "two"


def test_an_error_of_the_holder_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="mine"), StateFolder(tmp_path).hold(supervisor("one", "")):
        raise PermissionError("mine")


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with (
        pytest.raises(ConfigError, match="state-dir: cannot write to"),
        StateFolder(tmp_path / "file" / "state").hold(supervisor("one", "")),
    ):
        pass


def test_logs_go_by_the_names_of_their_processes(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.log_files() == {}
    folder.logs.mkdir()
    for name in ("redis", "gateway"):
        (folder.logs / f"{name}.log").touch()

    assert folder.log_files() == {
        "gateway": tmp_path / "logs/gateway.log",
        "redis": tmp_path / "logs/redis.log",
    }


def test_a_reader_does_not_keep_anybody_from_starting(tmp_path: Path) -> None:
    """A reader holds the lock for an instant."""
    folder = StateFolder(tmp_path)
    with folder.hold(supervisor("before", "")):
        pass
    with (tmp_path / "up.lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        done = threading.Timer(0.05, fcntl.flock, (reader, fcntl.LOCK_UN))
        done.start()

        with folder.hold(supervisor("now", "")):
            state = folder.read()
        done.join()

    assert state is not None
    assert state.name == "now"
