"""The whole daemon: segment first, then the listener; at the end the other way round."""

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

_SWEEP_S = 1.0
_BACKLOG = 1024


class RunningTierd:
    """A daemon that listens; made by `run_tierd`."""

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
        site = Connections(
            store,
            clock,
            incarnation=incarnation,
            longest_lease_s=options.longest_lease_s,
            start=segment.start,
            peer_key=None if key is None else key.get_secret_value().encode(),
            page=Exposition(store, incarnation).page,
        )
        background = [
            asyncio.create_task(store.run()),
            asyncio.create_task(_sweep(site, segment, options, clock)),
        ]
        stack.push_async_callback(_end, background)
        if peers is not None:
            await peers.refresh()
            background.append(asyncio.create_task(peers.run()))
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: Connection(site), options.host, options.port, backlog=_BACKLOG
            )
        except OSError as exc:
            raise ConfigError(
                "port", f"cannot listen on {options.host}:{options.port}: {exc.strerror}"
            ) from exc
        stack.push_async_callback(site.hang_up)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        yield RunningTierd(store, segment, options.host, port)


async def _sweep(site: Connections, segment: SharedSegment, options: TierdOptions, clock: Clock) -> None:
    """What must happen also while nobody asks for anything."""
    limits = StallLimits(options.stall_timeout_s, options.put_grace_s, options.put_least_rate)
    while True:
        await clock.sleep(_SWEEP_S)
        site.store.tick()
        site.sweep(limits)
        site.store.counts.names_restored += segment.restore_names()


def _close(segment: SharedSegment, pool: MemoryPool) -> None:
    segment.close([lease.entry.extents for lease in pool.leases.values()])


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            log.error("a background task had failed", exc_info=outcome)
