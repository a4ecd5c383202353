from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest
from tests.support.clocks import JumpingClock
from tests.tierd.conftest import crash

from kvroute.clock import Clock, SystemClock
from kvroute.tierd.pool import Extent
from kvroute.tierd.segment import UNKNOWN_LEASE_S, GuardFile, SegmentError, SharedSegment, open_segment

FOLDER = Path("/dev/shm")
SIZE = 8192


async def opened(
    name: str, size_bytes: int = SIZE, clock: Clock | None = None, longest: float = 300.0
) -> tuple[SharedSegment, GuardFile]:
    return await open_segment(name, size_bytes, clock or SystemClock(), longest_lease_s=longest)


def files(name: str) -> set[str]:
    return {path.name for path in FOLDER.iterdir() if name in path.name}


def inode(name: str) -> int:
    return (FOLDER / name).stat().st_ino


def mapped(name: str) -> mmap.mmap:
    """As LMCache's in-process connector maps it."""
    with open(FOLDER / name, "r+b") as file:
        return mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)


def leave_as_version_0_1(name: str, until: float) -> None:
    """What a killed daemon of that version leaves, whose leases ran until then."""
    (FOLDER / f".{name}.kept").write_bytes(b"old" * 1000)
    os.link(FOLDER / f".{name}.kept", FOLDER / name)
    (FOLDER / f".{name}.guard").write_bytes(struct.pack("<d", until))


async def test_a_segment_has_all_its_memory_when_it_appears_and_none_at_the_end(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    path = FOLDER / memory_name

    segment.memory[5:8] = b"abc"
    with mapped(memory_name) as seen:
        assert seen[5:8] == b"abc"
    assert path.stat().st_blocks * 512 >= SIZE

    segment.close()
    guard.close()
    assert path.stat().st_blocks == 0
    assert files(memory_name) == {memory_name, f".{memory_name}.kept", f".{memory_name}.guard"}


async def test_the_file_is_as_long_as_the_memory_of_the_machine(memory_name: str) -> None:
    """So a later daemon with more memory still lies inside of today's mappings."""
    segment, guard = await opened(memory_name)

    assert (FOLDER / memory_name).stat().st_size >= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    segment.close()
    guard.close()


async def test_a_living_daemon_keeps_its_name(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    before = inode(memory_name)

    with pytest.raises(SegmentError, match="another daemon uses the shared memory"):
        await opened(memory_name)
    (FOLDER / f".{memory_name}.guard").unlink()
    with pytest.raises(SegmentError, match="another daemon uses the shared memory"):
        await opened(memory_name)

    assert inode(memory_name) == before
    segment.close()
    guard.close()


@pytest.mark.parametrize("size_bytes", [SIZE // 2, SIZE, 4 * SIZE])
@pytest.mark.parametrize("is_killed", [True, False])
async def test_an_old_mapping_shows_the_next_daemons_writes(
    memory_name: str, is_killed: bool, size_bytes: int
) -> None:
    segment, guard = await opened(memory_name)
    old = mapped(memory_name)
    segment.memory[:] = b"o" * SIZE
    if is_killed:
        crash(segment, guard)
    else:
        segment.close()
        guard.close()
    clock = JumpingClock(1000.0)

    segment, guard = await opened(memory_name, size_bytes, clock)
    segment.memory[:] = b"n" * size_bytes

    assert clock.slept == []
    assert old[segment.start : segment.start + size_bytes] == b"n" * size_bytes
    assert (FOLDER / memory_name).stat().st_blocks * 512 == size_bytes
    segment.close()
    guard.close()
    old.close()


async def test_the_memory_of_a_killed_daemon_stays_until_its_leases_have_ended(memory_name: str) -> None:
    clock = JumpingClock(1000.0)
    segment, guard = await opened(memory_name, clock=clock)
    segment.memory[:3] = b"old"
    guard.record_lease_end(1012.5)
    crash(segment, guard)
    seen: list[bytes] = []
    old = mapped(memory_name)
    clock = JumpingClock(1000.0, on_sleep=lambda: seen.append(old[:3]))

    segment, guard = await opened(memory_name, 2 * SIZE, clock)

    assert clock.slept == [12.5]
    assert seen == [b"old"]
    segment.close()
    guard.close()
    old.close()


async def test_leased_bytes_outlive_a_daemon_that_ends(memory_name: str) -> None:
    clock = JumpingClock(1000.0)
    segment, guard = await opened(memory_name, clock=clock)
    segment.memory[:] = b"x" * SIZE
    guard.record_lease_end(1030.0)
    segment.close([(Extent(4096, 100),)])
    guard.close()
    seen: list[bytes] = []
    old = mapped(memory_name)
    assert old[:4096] == bytes(4096)
    clock = JumpingClock(1000.0, on_sleep=lambda: seen.append(old[4096:4196]))

    segment, guard = await opened(memory_name, SIZE // 2, clock)

    assert clock.slept == [30.0]
    assert seen == [b"x" * 100]
    segment.close()
    guard.close()
    assert (FOLDER / memory_name).stat().st_blocks == 0
    old.close()


async def test_a_start_that_is_ended_while_it_waits_leaves_the_leased_bytes(memory_name: str) -> None:
    clock = JumpingClock(1000.0)
    segment, guard = await opened(memory_name, clock=clock)
    segment.memory[:3] = b"old"
    guard.record_lease_end(1012.5)
    crash(segment, guard)

    class Ended(Exception):
        pass

    def end() -> None:
        raise Ended

    with pytest.raises(Ended):
        await opened(memory_name, clock=JumpingClock(1000.0, on_sleep=end))

    with mapped(memory_name) as old:
        assert old[:3] == b"old"
    clock = JumpingClock(1000.0)
    segment, guard = await opened(memory_name, clock=clock)
    assert clock.slept == [12.5]
    segment.close()
    guard.close()


@pytest.mark.parametrize(("longest", "later", "waited"), [(60.0, 300.0, 60.0), (60.0, 10.0, 60.0)])
async def test_no_wait_is_longer_than_a_lease_of_the_earlier_daemon(
    memory_name: str, longest: float, later: float, waited: float
) -> None:
    """What the next daemon allows its own clients does not matter."""
    segment, guard = await opened(memory_name, longest=longest)
    guard.record_lease_end(9e9)
    crash(segment, guard)
    clock = JumpingClock(1000.0)

    segment, guard = await opened(memory_name, clock=clock, longest=later)

    assert clock.slept == [waited]
    segment.close()
    guard.close()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_name_that_was_removed_while_no_daemon_ran_is_back(memory_name: str, is_killed: bool) -> None:
    segment, guard = await opened(memory_name)
    before = inode(memory_name)
    if is_killed:
        crash(segment, guard)
    else:
        segment.close()
        guard.close()
    for removed in (memory_name, f".{memory_name}.kept"):
        (FOLDER / removed).unlink()

        segment, guard = await opened(memory_name)

        assert inode(memory_name) == inode(f".{memory_name}.kept") == before
        assert segment.start == 0
        crash(segment, guard)


async def test_a_lost_inode_is_followed_by_offsets_beyond_its_end(memory_name: str) -> None:
    """Old mappings do not reach the new offsets: a miss."""
    segment, guard = await opened(memory_name)
    old = mapped(memory_name)
    crash(segment, guard)
    (FOLDER / memory_name).unlink()
    (FOLDER / f".{memory_name}.kept").unlink()

    segment, guard = await opened(memory_name)

    assert segment.start >= len(old)
    segment.memory[:3] = b"new"
    with mapped(memory_name) as new:
        assert new[segment.start : segment.start + 3] == b"new"
    segment.close()
    guard.close()
    old.close()


async def test_without_the_record_the_mappings_of_processes_give_the_end(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    old = mapped(memory_name)
    crash(segment, guard)
    for name in files(memory_name):
        (FOLDER / name).unlink()
    clock = JumpingClock(1000.0)

    segment, guard = await opened(memory_name, clock=clock)

    assert segment.start >= len(old)
    assert clock.slept == [UNKNOWN_LEASE_S]
    segment.close()
    guard.close()
    old.close()


async def test_an_inode_without_a_record_is_used_beyond_its_old_end(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    before, end = inode(memory_name), (FOLDER / memory_name).stat().st_size
    crash(segment, guard)
    (FOLDER / f".{memory_name}.guard").unlink()

    segment, guard = await opened(memory_name, clock=JumpingClock(1000.0))

    assert inode(memory_name) == before
    assert segment.start >= end
    segment.close()
    guard.close()


async def test_a_segment_of_version_0_1_is_used_beyond_its_end(memory_name: str) -> None:
    """That version made a new inode at each start, so older ones may be mapped."""
    leave_as_version_0_1(memory_name, until=1012.5)
    clock = JumpingClock(1000.0)

    segment, guard = await opened(memory_name, clock=clock)

    assert clock.slept == [12.5]
    assert segment.start >= 3000
    segment.close()
    guard.close()


async def test_the_segment_of_another_program_is_left_alone(memory_name: str) -> None:
    (FOLDER / memory_name).write_bytes(b"theirs")

    with pytest.raises(SegmentError, match="does not belong to kvroute tierd"):
        await opened(memory_name)

    assert (FOLDER / memory_name).read_bytes() == b"theirs"
    assert files(memory_name) == {memory_name}


async def test_a_link_to_elsewhere_is_not_followed(memory_name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"theirs")
    (FOLDER / f".{memory_name}.kept").symlink_to(victim)

    with pytest.raises(SegmentError, match=r"\.kept"):
        await opened(memory_name)

    assert victim.read_bytes() == b"theirs"


@pytest.mark.parametrize("removed", ["{}", ".{}.kept", ".{}.guard"])
async def test_a_file_that_is_removed_under_a_living_daemon_comes_back(
    memory_name: str, removed: str
) -> None:
    """Before Python 3.13, `multiprocessing` unlinks what it attached when the process ends."""
    segment, guard = await opened(memory_name)
    before = inode(memory_name)
    assert segment.restore_names() == 0
    (FOLDER / removed.format(memory_name)).unlink()

    assert segment.restore_names() == 1
    assert segment.restore_names() == 0

    assert inode(memory_name) == inode(f".{memory_name}.kept") == before
    with pytest.raises(SegmentError, match="another daemon"):
        await opened(memory_name)
    crash(segment, guard)
    segment, guard = await opened(memory_name)
    assert (segment.start, inode(memory_name)) == (0, before)
    segment.close()
    guard.close()


async def test_a_living_daemon_whose_inode_has_lost_its_names_leaves_a_record(
    memory_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    segment, guard = await opened(memory_name)
    end = (FOLDER / memory_name).stat().st_size
    for name in files(memory_name):
        (FOLDER / name).unlink()

    for _ in range(3):
        segment.restore_names()

    assert files(memory_name) == {f".{memory_name}.guard"}
    assert sum("cannot be found by new clients" in line for line in caplog.messages) == 1
    crash(segment, guard)
    segment, guard = await opened(memory_name)
    assert segment.start >= end
    segment.close()
    guard.close()


async def test_more_than_there_is_is_refused_before_anything_is_reserved(memory_name: str) -> None:
    room = os.statvfs(FOLDER)
    with pytest.raises(SegmentError, match=r"size_gb: .* do not fit"):
        await opened(memory_name, (room.f_blocks + 1) * room.f_frsize)

    assert files(memory_name) == set()


async def test_a_restart_with_more_than_there_is_keeps_the_inode_without_memory(memory_name: str) -> None:
    segment, guard = await opened(memory_name)
    before = inode(memory_name)
    crash(segment, guard)
    room = os.statvfs(FOLDER)

    with pytest.raises(SegmentError, match=r"size_gb: .* do not fit"):
        await opened(memory_name, (room.f_blocks + 1) * room.f_frsize)

    assert inode(memory_name) == before
    assert (FOLDER / memory_name).stat().st_blocks == 0


@pytest.mark.parametrize("name", ["", "/", "a/b", "..", ".hidden"])
async def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(SegmentError, match="is not the name"):
        await opened(name)
