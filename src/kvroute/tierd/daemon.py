"""Starts and stops the daemon: first the segment, then the listener; at the end in reverse order."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvroute.clock import Clock
from kvroute.errors import ConfigError
from kvroute.tierd.counts import Counts
from kvroute.tierd.exposition import Exposition
from kvroute.tierd.options import TierdOptions
from kvroute.tierd.peers import Peers
from kvroute.tierd.pool import MemoryPool
from kvroute.tierd.protocol import Connection, Connections, StallLimits
from kvroute.tierd.segment import SharedSegment, open_segment
from kvroute.tierd.store import Store

log = logging.getLogger("kvroute.tierd")

_PERIOD_S = 1.0
_BACKLOG = 1024


class RunningTierd:
    """A daemon that accepts connections. `run_tierd` makes it."""

    def __init__(self, store: Store, segment: SharedSegment, host: str, port: int) -> None:
        self.store = store
        self.segment = segment
        self.port = port
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def run_tierd(options: TierdOptions, clock: Clock) -> AsyncIterator[RunningTierd]:
    """Run a daemon until the block ends. Raises ConfigError when it cannot start."""
    incarnation = secrets.token_hex(6)
    pool = MemoryPool(options.size_bytes, incarnation)
    async with AsyncExitStack() as stack:
        segment, guard = await open_segment(
            options.shared_memory_name,
            options.size_bytes,
            clock,
            mode=options.shared_memory_mode,
            longest_lease_s=options.longest_lease_s,
        )
        stack.callback(guard.close)
        stack.callback(_close, segment, pool)
        counts = Counts()
        peers = None
        if options.peers.urls or options.peers.dns is not None:
            peers = Peers(options.peers, incarnation, counts, clock)
            stack.push_async_callback(peers.close)
        store = Store(options, pool, segment.memory, guard, counts, clock, peers=peers)
        stack.push_async_callback(store.close)
        if store.disk is not None:
            await store.disk.open()
        key = options.peers.key
        connections = Connections(
            store,
            clock,
            incarnation=incarnation,
            longest_lease_s=options.longest_lease_s,
            start=segment.start,
            peer_key=None if key is None else key.get_secret_value().encode(),
            status_page=Exposition(store, incarnation).page,
        )
        background = [
            asyncio.create_task(store.run()),
            asyncio.create_task(_run_periodic_work(connections, segment, options, clock)),
        ]
        stack.push_async_callback(_end, background)
        if peers is not None:
            await peers.refresh()
            background.append(asyncio.create_task(peers.run()))
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(connections), options.host, options.port, backlog=_BACKLOG
            )
        except OSError as exc:
            raise ConfigError(
                "port", f"cannot listen on {options.host}:{options.port}: {exc.strerror}"
            ) from exc
        stack.push_async_callback(connections.abort_all)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        yield RunningTierd(store, segment, options.host, port)


async def _run_periodic_work(
    connections: Connections, segment: SharedSegment, options: TierdOptions, clock: Clock
) -> None:
    """Once a second: end leases, abort stalled connections, restore removed names."""
    limits = StallLimits(options.stall_timeout_s, options.put_grace_s, options.put_least_rate)
    while True:
        await clock.sleep(_PERIOD_S)
        connections.store.expire_leases()
        connections.abort_stalled(limits)
        connections.store.counts.names_restored += segment.restore_names()


def _close(segment: SharedSegment, pool: MemoryPool) -> None:
    segment.close([lease.entry.extents for lease in pool.leases.values()])


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("a background task failed", exc_info=outcome)
