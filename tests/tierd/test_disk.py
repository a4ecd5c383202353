from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.clocks import ManualClock
from tests.support.full_disk import full_disk

from kvroute.errors import ConfigError
from kvroute.tierd.daemon import Counts
from kvroute.tierd.disk import DiskLevel
from kvroute.tierd.pool import ObjectName

SIZE = 1000
FILE_BYTES = SIZE + 20 + 3
"""With its head and its name."""


def name(number: int) -> ObjectName:
    return ObjectName(b"b", str(number).encode())


def content(number: int) -> list[memoryview]:
    """In two pieces."""
    data = bytes([number]) * SIZE
    return [memoryview(data)[:300], memoryview(data)[300:]]


class Folder:
    """A directory and the levels that were opened on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.forgotten: list[ObjectName] = []
        self.levels: list[DiskLevel] = []

    async def open(self, files: int = 10) -> DiskLevel:
        level = DiskLevel(self.path, files * FILE_BYTES, Counts(), self.forgotten.append)
        self.levels.append(level)
        await level.open()
        return level

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.kv"))


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    made = Folder(tmp_path / "l3")
    yield made
    for level in made.levels:
        await level.close()


async def read(level: DiskLevel, number: int) -> bytes | None:
    target = memoryview(bytearray(level.size_of(name(number))))
    pieces = [target[:10], target[10:]]
    return bytes(target) if await level.read(name(number), pieces) else None


async def test_a_full_disk_is_counted_for_each_entry_and_logged_twice_a_minute(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    level = DiskLevel(folder.path, 100 * FILE_BYTES, counts := Counts(), folder.forgotten.append, clock.now)
    folder.levels.append(level)
    await level.open()

    with full_disk():
        for number in range(60):
            assert not await level.write(name(number), content(number))
            clock.time += 1.0
    assert await level.write(name(1), content(1))

    assert counts.disk["write_failed"] == 60
    assert [record.getMessage() for record in caplog.records] == [
        "the disk level could not write an object: File too large"
    ] * 2
    assert len(folder.files()) == 1
    assert not list(folder.path.glob("*.part"))


async def test_written_entries_can_be_read(folder: Folder) -> None:
    level = await folder.open()

    assert await level.write(name(1), content(1))

    assert name(1) in level
    assert name(2) not in level
    assert await read(level, 1) == bytes([1]) * SIZE
    assert level.used_bytes == folder.files()[0].stat().st_size == FILE_BYTES


async def test_the_directory_stays_within_its_bound_the_least_recently_used_go_first(folder: Folder) -> None:
    level = await folder.open(files=3)
    for number in (1, 2, 3):
        await level.write(name(number), content(number))
    await read(level, 1)

    await level.write(name(4), content(4))

    assert [number for number in range(5) if name(number) in level] == [1, 3, 4]
    assert folder.forgotten == [name(2)]
    assert len(folder.files()) == 3
    assert sum(path.stat().st_size for path in folder.files()) == level.used_bytes == 3 * FILE_BYTES


async def test_a_later_daemon_finds_the_entries_of_an_earlier_one(folder: Folder) -> None:
    first = await folder.open()
    for number in (1, 2, 3):
        await first.write(name(number), content(number))
    (folder.path / "x.kv.part").write_bytes(b"half")
    (folder.path / "foreign").write_bytes(b"not ours")

    level = await folder.open(files=2)

    assert len(level) == 2
    assert await read(level, 3) == bytes([3]) * SIZE
    assert {path.name for path in folder.path.iterdir()} == {path.name for path in folder.files()} | {
        "foreign"
    }


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "head", "gone"])
async def test_a_damaged_file_is_a_miss_and_is_removed(folder: Folder, damage: str) -> None:
    level = await folder.open()
    await level.write(name(1), content(1))
    (path,) = folder.files()
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "grow":
        path.write_bytes(data + b"x")
    else:
        data[0 if damage == "head" else 500] ^= 1
        path.write_bytes(data)

    assert await read(level, 1) is None

    assert name(1) not in level
    assert level.used_bytes == 0
    assert folder.forgotten == [name(1)]
    assert folder.files() == []


async def test_another_object_under_the_same_file_name_is_a_miss(folder: Folder) -> None:
    level = await folder.open()
    await level.write(name(1), content(1))
    await level.write(name(2), content(2))
    one, two = folder.files()
    one.write_bytes(two.read_bytes())
    two.write_bytes(one.read_bytes())

    found = [await read(level, number) for number in (1, 2)]

    assert sorted(found, key=str) == sorted([None, found[0] or found[1]], key=str)


async def test_an_entry_that_cannot_be_written_is_absent(folder: Folder) -> None:
    level = await folder.open(files=1)

    assert not await level.write(name(1), [memoryview(bytes(FILE_BYTES))])
    folder.path.rmdir()
    assert not await level.write(name(1), content(1))

    assert name(1) not in level
    assert level.used_bytes == 0


async def test_an_unusable_directory_is_reported_at_the_start(folder: Folder) -> None:
    folder.path.write_bytes(b"a file")

    with pytest.raises(ConfigError, match="disk_dir"):
        await folder.open()
