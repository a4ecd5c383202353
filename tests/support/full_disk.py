"""A full disk without a file system of its own: the kernel lets no file grow (RLIMIT_FSIZE, EFBIG)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(pid: int = 0, *, longest_file: int = 0) -> Iterator[None]:
    """While the block runs, no file of a process can be written beyond `longest_file` bytes.

    `pid` 0 is the test's own process. Pipes and sockets are not affected.
    """
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (longest_file, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
