import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvroute.http.allocator import keep_freed_memory, use_huge_pages

BODY_BYTES = 1 << 20


def faults(bodies: int) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(bodies):
        bytes(bytearray(BODY_BYTES))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_large_bodies_are_made_of_kept_memory():
    if not keep_freed_memory():
        pytest.skip("another libc")
    faults(4)

    assert faults(100) < 100 * BODY_BYTES // 4096 // 10


MOVED = """
from kvroute.http.allocator import keep_freed_memory, use_huge_pages

def in_huge_pages():
    with open("/proc/self/smaps_rollup") as areas:
        return sum(int(line.split()[1]) << 10 for line in areas if line.startswith("AnonHugePages"))

keep_freed_memory()
kept, before = [bytes([number % 256]) * 100_000 for number in range(200)], in_huge_pages()
moved = use_huge_pages()
assert kept == [bytes([number % 256]) * 100_000 for number in range(200)]
print(moved, in_huge_pages() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_memory_in_use_moves_into_huge_pages_unchanged():
    done = subprocess.run([sys.executable, "-c", MOVED], capture_output=True, text=True, check=True)

    moved, gained = map(int, done.stdout.split())
    if not moved:
        pytest.skip("a system without them, or before Linux 6.1")
    assert moved >= 16 << 20
    assert gained >= moved // 2


@pytest.mark.parametrize("enabled", [None, "always madvise [never]\n"])
def test_where_huge_pages_are_not_to_be_had_nothing_moves(tmp_path: Path, enabled: str | None):
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled)
        (tmp_path / "hpage_pmd_size").write_text("2097152\n")

    assert use_huge_pages(tmp_path) == 0
