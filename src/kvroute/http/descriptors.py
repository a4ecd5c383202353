"""A limit on connections, below that of the process's descriptors."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from kvroute.clock import Clock
from kvroute.errors import OUT_OF_DESCRIPTORS, GatewayOverloaded
from kvroute.metrics import Metrics

log = logging.getLogger(__name__)

_RESERVE_SHARE = 10
_LEAST_RESERVE = 16
_LOG_PAUSE_S = 10.0


class DescriptorLimit:
    """Refuses new clients while few descriptors are free, so that accepted requests can reach workers.

    The kernel gives each connection the lowest free number, so a high number means that all lower ones are in
    use: the check reads no table. `refused_from` is the first number that is refused, with an answer;
    connections from `closed_from` on are closed at once. Mutable: the time of the last log line.
    """

    # Without the reserve libuv would accept and close connections without an answer, and accepted requests
    # would fail because no connection to a worker can be opened.

    def __init__(self, clock: Clock, metrics: Metrics, limit: int | None = None) -> None:
        """`limit`: open files of this process; default: the soft limit of RLIMIT_NOFILE."""
        if limit is None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            limit = 1 << 62
        reserve = max(_LEAST_RESERVE, limit // _RESERVE_SHARE)
        self.limit = limit
        self.refused_from = max(0, limit - reserve)
        self.closed_from = max(0, limit - reserve // 2)
        self._clock = clock
        self._counts = metrics.out_of_descriptors
        for side in ("client", "worker"):
            self._counts.labels(side)
        self._next_line = float("-inf")

    def refusal(self, transport: Any, loop: asyncio.AbstractEventLoop) -> GatewayOverloaded | None:
        """The answer to a new client; None if it is accepted. About 1 us."""
        sock = transport.get_extra_info("socket")
        descriptor = -1 if sock is None else sock.fileno()
        if descriptor < self.refused_from:
            return None
        self.client_refused()
        if descriptor >= self.closed_from:
            loop.call_soon(transport.close)  # too few are left to wait until the client has read its answer
        return GatewayOverloaded(
            "The gateway has too few free descriptors for a new connection.", OUT_OF_DESCRIPTORS
        )

    def client_refused(self) -> None:
        """Count a client's connection that is refused."""
        self._counts.labels("client").inc()
        self._log(f"new clients are refused from descriptor {self.refused_from} on")

    def worker_unreachable(self, problem: str) -> None:
        """Count a connection to a worker that could not be opened."""
        self._counts.labels("worker").inc()
        self._log(problem)

    def _log(self, problem: str) -> None:
        now = self._clock.now()
        if now >= self._next_line:
            self._next_line = now + _LOG_PAUSE_S
            log.error(
                "out of descriptors: %s; running requests continue (limit of open files: %d, ulimit -n)",
                problem,
                self.limit,
            )
