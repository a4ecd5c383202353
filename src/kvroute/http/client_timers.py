"""Bytes that a client has not acknowledged, and the flow control that counts them."""

from __future__ import annotations

import asyncio
import fcntl
import termios
from array import array
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl


def unacknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that the kernel has taken and the other side has not acknowledged; 0 where it does not say so."""
    connection = transport.get_extra_info("socket")
    if connection is None:
        return 0
    held = array("i", (0,))
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, held)  # SIOCOUTQ of tcp(7)
    except OSError:
        return 0
    return held[0]


class TimedFlow(FlowControl):
    """uvicorn's flow control, which also measures how long reading was paused."""

    def __init__(self, transport: Any, time: Any) -> None:
        super().__init__(transport)
        self._time = time
        self._paused_at = 0.0
        self._paused_s = 0.0
        self.is_blocked = False
        """While true, `resume_reading` does nothing."""

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._paused_at = self._time()
            super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.is_blocked:
            self._paused_s += self._time() - self._paused_at
            super().resume_reading()

    @property
    def paused_s(self) -> float:
        """Total time that reading was paused, so far."""
        return self._paused_s + (self._time() - self._paused_at if self.read_paused else 0.0)
