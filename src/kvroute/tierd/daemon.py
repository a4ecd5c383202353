"""Starts and stops the daemon: first the segment, then the listener; at the end in reverse order.

`Exposition` answers `/metrics` and `/health`: figures are read when a page is requested.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvroute import __version__
from kvroute.clock import Clock
from kvroute.dual_stack import EVERY_ADDRESS, dual_stack_socket
from kvroute.errors import ConfigError
from kvroute.tallies import Gauges, counter, gauge
from kvroute.tierd.options import TierdOptions
from kvroute.tierd.peers import Peers
from kvroute.tierd.pool import Counts, MemoryPool
from kvroute.tierd.protocol import Connection, Connections, StallLimits
from kvroute.tierd.segment import SharedSegment, open_segment
from kvroute.tierd.store import ChangeList, Refusal, Store


class Exposition:
    """Renders the figures of one store. Has its own registry, because tests run several daemons in a
    process."""

    def __init__(self, store: Store, incarnation: str) -> None:
        self._store = store
        self._incarnation = incarnation
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(Gauges(self._memory, self._calls, self._disk, self._peers))

    def page(self, name: str) -> tuple[int, str, bytes]:
        """Status, content type and body of `health` or `metrics`."""
        if name == "metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        pool = self._store.pool
        health = {
            "status": "ok",
            "version": __version__,
            "incarnation": self._incarnation,
            "objects": len(pool.entries),
            "memory_bytes": pool.space.size_bytes,
            "free_bytes": pool.space.free_bytes,
            "peers": len(self._store.peers.urls) if self._store.peers is not None else 0,
        }
        return 200, "application/json", json.dumps(health).encode()

    def _memory(self) -> Iterable[Metric]:
        pool = self._store.pool
        size, free = pool.space.size_bytes, pool.space.free_bytes
        yield gauge(
            "kvroute_tierd_memory_bytes",
            "Memory by state: total size, free, evictable, held by leases, readers and incoming objects.",
            ("state",),
            [
                (("size",), size),
                (("free",), free),
                (("evictable",), pool.evictable_bytes),
                (("held",), size - free - pool.evictable_bytes),
            ],
        )
        yield _one("kvroute_tierd_objects", "Objects in memory.", len(pool.entries))
        yield _one("kvroute_tierd_arriving", "Objects that are being received.", self._store.incoming_count)
        yield _one("kvroute_tierd_leases", "Leases that run now.", len(pool.leases))
        yield _sum("kvroute_tierd_evictions", "Objects that were evicted from memory.", pool.evicted_entries)
        yield _sum("kvroute_tierd_evicted_bytes", "Bytes of evicted objects.", pool.evicted_bytes)
        puts = self._store.counts.puts
        lost = pool.lost_entries + puts[Refusal.NO_ROOM.value] + puts[Refusal.TOO_LARGE.value]
        text = (
            "Objects that were evicted and not on the disk, or refused because they did not fit into memory."
        )
        yield _sum("kvroute_tierd_lost", text, lost)
        text = "Leases that expired before a client released them."
        yield _sum("kvroute_tierd_expired_leases", text, pool.expired_leases)

    def _calls(self) -> Iterable[Metric]:
        counts = self._store.counts
        yield _by("kvroute_tierd_puts", "Objects that clients sent.", "outcome", counts.puts)
        yield _sum("kvroute_tierd_stored_bytes", "Bytes of stored objects.", counts.put_bytes)
        yield _by("kvroute_tierd_lease_requests", "Lease requests.", "outcome", counts.leases)
        yield _by("kvroute_tierd_releases", "Release requests.", "outcome", counts.releases)
        refused = {str(status): number for status, number in counts.refused.items()}
        yield _by("kvroute_tierd_refused", "Requests that the protocol does not allow.", "status", refused)
        yield _sum("kvroute_tierd_served_bytes", "Bytes sent to peers.", counts.served_bytes)
        text = "Names of the segment that another process removed and the daemon restored."
        yield _sum("kvroute_tierd_names_restored", text, counts.names_restored)

    def _disk(self) -> Iterable[Metric]:
        disk, counts = self._store.disk, self._store.counts
        if disk is None:
            return
        yield _one("kvroute_tierd_disk_size_bytes", "Largest size of the directory.", disk.size_bytes)
        yield _one("kvroute_tierd_disk_used_bytes", "Present size of the directory.", disk.used_bytes)
        yield _one("kvroute_tierd_disk_objects", "Objects on the disk.", len(disk))
        yield _by("kvroute_tierd_disk_files", "Files by event.", "event", counts.disk)
        yield _sum("kvroute_tierd_disk_written_bytes", "Bytes written.", counts.disk_written_bytes)
        yield _sum("kvroute_tierd_disk_read_bytes", "Bytes read.", counts.disk_read_bytes)

    def _peers(self) -> Iterable[Metric]:
        peers, counts = self._store.peers, self._store.counts
        if peers is None:
            return
        yield _one("kvroute_tierd_peers", "Known other daemons.", len(peers.urls))
        yield counter(
            "kvroute_tierd_peer_questions",
            "Queries to peers whether they have an object.",
            ("peer", "answer"),
            ((labels, number) for labels, number in counts.peer_questions.items()),
        )
        yield _by("kvroute_tierd_peer_fetches", "Fetches from peers.", "outcome", counts.peer_fetches)
        yield _sum("kvroute_tierd_fetched_bytes", "Bytes received from peers.", counts.fetched_bytes)


def _one(name: str, text: str, value: float) -> Metric:
    return gauge(name, text, (), [((), value)])


def _sum(name: str, text: str, value: float) -> Metric:
    return counter(name, text, (), [((), value)])


def _by(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return counter(name, text, (label,), (((key,), number) for key, number in values.items()))


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
    changes = ChangeList()
    pool = MemoryPool(options.size_bytes, incarnation, on_change=changes.note)
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
        store = Store(options, pool, segment.memory, guard, counts, clock, changes=changes, peers=peers)
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
            loop, protocol = asyncio.get_running_loop(), lambda: Connection(connections)
            if options.host == EVERY_ADDRESS:
                both = dual_stack_socket(options.port)
                server = await loop.create_server(protocol, sock=both, backlog=_BACKLOG)
            else:
                server = await loop.create_server(protocol, options.host, options.port, backlog=_BACKLOG)
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
