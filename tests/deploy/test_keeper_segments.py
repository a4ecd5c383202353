from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvroute.deploy.keeper import remove_orphan_segments


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def make(path: Path) -> Path:
    path.write_bytes(bytes(4096))
    return path


def test_segments_of_an_ended_engine_are_removed(tmp_path: Path, ended_pid: int) -> None:
    left = [make(tmp_path / f"lmcache_kv_{ended_pid}_{number}") for number in range(2)]

    assert remove_orphan_segments(tmp_path) == 8192
    assert not any(segment.exists() for segment in left)
    assert remove_orphan_segments(tmp_path) == 0


def test_a_living_engine_keeps_its_segment(tmp_path: Path) -> None:
    segment = make(tmp_path / f"lmcache_kv_{os.getpid()}_0")

    assert remove_orphan_segments(tmp_path) == 0
    assert segment.exists()


def test_mapped_segments_stay(tmp_path: Path, ended_pid: int) -> None:
    segment = make(tmp_path / f"lmcache_kv_{ended_pid}_0")

    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert remove_orphan_segments(tmp_path) == 0
    assert segment.exists()
    assert remove_orphan_segments(tmp_path) == 4096


def test_other_files_are_left_alone(tmp_path: Path, ended_pid: int) -> None:
    others = [make(tmp_path / name) for name in (f"psm_{ended_pid}_0", "lmcache_kv_x_0", "lmcache_kv_1")]

    assert remove_orphan_segments(tmp_path) == 0
    assert all(other.exists() for other in others)


def test_a_segment_that_cannot_be_removed_causes_no_error(
    tmp_path: Path, ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = make(tmp_path / f"lmcache_kv_{ended_pid}_0")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)

    assert remove_orphan_segments(tmp_path) == 0
    assert segment.exists()
