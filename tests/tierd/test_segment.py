from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvroute.clock import SystemClock
from kvroute.tierd.segment import Guard, SegmentError, open_segment

FOLDER = Path("/dev/shm")


class StoppedClock(SystemClock):
    """Remembers how long it was asked to sleep, and does not. Mutable: `slept`, and the time with it."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:  # type: ignore[override]
        return 1000.0 + sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


async def opened(name: str, size_bytes: int = 8192, clock: SystemClock | None = None, longest: float = 300.0):
    return await open_segment(name, size_bytes, clock or SystemClock(), longest_lease_s=longest)


def files(name: str) -> set[str]:
    return {path.name for path in FOLDER.iterdir() if name in path.name}


def leave_as_killed(name: str, until: float) -> None:
    """What a daemon leaves that was killed while leases ran until then."""
    (FOLDER / f".{name}.kept").write_bytes(b"old" * 1000)
    os.link(FOLDER / f".{name}.kept", FOLDER / name)
    guard = Guard(FOLDER / f".{name}.guard", name)
    guard.hold_until(until)
    guard.close()


async def test_the_segment_has_its_size_when_it_appears_and_goes_at_the_end(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    path = FOLDER / memory_name

    segment.memory[5:8] = b"abc"
    assert path.stat().st_size == 8192
    assert path.read_bytes()[5:8] == b"abc"
    assert path.stat().st_blocks * 512 >= 8192

    segment.close()
    guard.close()
    assert files(memory_name) == set()


async def test_a_living_daemon_keeps_its_name(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    inode = (FOLDER / memory_name).stat().st_ino

    with pytest.raises(SegmentError, match="another daemon has the shared memory"):
        await opened(memory_name)

    assert (FOLDER / memory_name).stat().st_ino == inode
    segment.close()
    guard.close()


async def test_what_a_killed_daemon_left_is_replaced_by_another_file(memory_name: str) -> None:
    leave_as_killed(memory_name, until=0.0)
    clock = StoppedClock()
    inode = (FOLDER / memory_name).stat().st_ino

    segment, guard = await opened(memory_name, clock=clock)

    assert clock.slept == []
    assert (FOLDER / memory_name).stat().st_ino != inode
    assert bytes(segment.memory) == bytes(8192)
    segment.close()
    guard.close()


async def test_a_new_segment_waits_for_the_leases_of_the_old_one(memory_name: str) -> None:
    """LMCache would read offsets of the old segment in the new one."""
    leave_as_killed(memory_name, until=1012.5)
    seen: list[bytes] = []

    class Clock(StoppedClock):
        async def sleep(self, seconds: float) -> None:
            seen.append((FOLDER / memory_name).read_bytes()[:3])
            await super().sleep(seconds)

    clock = Clock()
    segment, guard = await opened(memory_name, clock=clock)

    assert clock.slept == [12.5]
    assert seen == [b"old"]
    segment.close()
    guard.close()


async def test_a_date_that_no_lease_can_have_is_not_waited_for(memory_name: str) -> None:
    leave_as_killed(memory_name, until=9e9)
    clock = StoppedClock()

    segment, guard = await opened(memory_name, clock=clock, longest=60.0)

    assert clock.slept == [60.0]
    segment.close()
    guard.close()


async def test_leases_that_outlive_a_daemon_are_remembered_after_it(memory_name: str) -> None:
    clock = StoppedClock()
    segment, guard = await opened(memory_name, clock=clock)
    guard.hold_until(1030.0)
    segment.close()
    guard.close()
    assert files(memory_name) == {f".{memory_name}.guard"}

    segment, guard = await opened(memory_name, clock=clock)

    assert clock.slept == [30.0]
    guard.hold_until(2000.0)
    guard.lift()
    segment.close()
    guard.close()
    assert files(memory_name) == set()


async def test_the_segment_of_another_program_is_left_alone(memory_name: str) -> None:
    (FOLDER / memory_name).write_bytes(b"theirs")

    with pytest.raises(SegmentError, match="is not of kvroute tierd"):
        await opened(memory_name)

    assert (FOLDER / memory_name).read_bytes() == b"theirs"
    assert files(memory_name) == {memory_name}


async def test_a_removed_name_comes_back_with_the_same_memory(memory_name: str) -> None:
    """Before Python 3.13, `multiprocessing` unlinks what it attached when the process ends."""
    segment, guard = await opened(memory_name)
    segment.memory[:3] = b"abc"
    assert not segment.restore_name()
    (FOLDER / memory_name).unlink()

    assert segment.restore_name()

    with open(FOLDER / memory_name, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        segment.memory[3:6] = b"def"
        assert mapped[:6] == b"abcdef"
    segment.close()
    guard.close()


async def test_more_than_there_is_is_refused_before_anything_is_reserved(memory_name: str) -> None:
    room = os.statvfs(FOLDER)
    with pytest.raises(SegmentError, match=r"size_gb: .* do not fit"):
        await opened(memory_name, (room.f_blocks + 1) * room.f_frsize)

    assert files(memory_name) == set()


@pytest.mark.parametrize("name", ["", "/", "a/b", "..", ".hidden"])
async def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(SegmentError, match="is not the name"):
        await opened(name)
