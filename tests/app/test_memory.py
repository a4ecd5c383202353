import resource
import sys

import pytest

from kvroute.app.memory import keep_freed_memory

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
