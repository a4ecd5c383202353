"""What the kernel still holds of what was written to a socket."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios

_NO_BYTES = bytes(4)


def unacknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that were written and that the other side's kernel has not acknowledged; 0 if that is unknown.

    For a socket that the other side has closed: with more than 0 it was closed before the last bytes of what
    was written had arrived (Linux, tcp(7), SIOCOUTQ). After a reset the figure is 0. One system call.
    """
    raw = transport.get_extra_info("socket")
    if raw is None:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, _NO_BYTES))[0])
    except (OSError, ValueError):  # no TCP socket, or it is closed here
        return 0
