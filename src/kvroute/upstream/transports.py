"""One transport per worker."""

from __future__ import annotations

import asyncio

from kvroute.fleet.worker import Worker
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.outbox import Outbox
from kvroute.upstream.transport import WorkerTransport


class Transports:
    """Worker -> its connections, opened on first use.

    Mutable: `of` adds, `forget` takes out; touched from the loop only. Connections of a forgotten worker
    close as soon as they are idle; running exchanges on them go on.
    """

    def __init__(self, options: UpstreamOptions, outbox: Outbox) -> None:
        self._options = options
        self._outbox = outbox
        self._transports: dict[Worker, WorkerTransport] = {}
        self._retired: list[WorkerTransport] = []

    def of(self, worker: Worker) -> WorkerTransport:
        """One dict lookup. Workers hash by identity: a new URL under an old id has a new transport."""
        transport = self._transports.get(worker)
        if transport is None:
            transport = WorkerTransport(worker.spec.url, self._options, outbox=self._outbox)
            self._transports[worker] = transport
        return transport

    def forget(self, worker: Worker) -> None:
        """Keep no more idle connections to a worker that left."""
        transport = self._transports.pop(worker, None)
        if transport is not None:
            transport.retire()
            self._retired = [t for t in self._retired if t.open_connections] + [transport]

    async def aclose(self) -> None:
        """Close every connection; exchanges under way break off."""
        every = [*self._transports.values(), *self._retired]
        await asyncio.gather(*(transport.aclose() for transport in every))
        self._transports.clear()
        self._retired.clear()
