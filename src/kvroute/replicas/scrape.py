"""One process's `/metrics` for all of them, with counters that outlive the processes that counted.

Before a process tells its figures it writes its counters to a file, so nothing that was ever scraped can be
lost with it; its successor counts on from there, and while there is none, the file speaks for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvroute.errors import WireError
from kvroute.metrics import counter, gauge
from kvroute.replicas.mesh import Mesh
from kvroute.replicas.pages import Page, PageCollector, counted, decode, encode, merged, read

log = logging.getLogger(__name__)

_ASKED: Final = "metrics"
_DEADLINE_S: Final = 1.0
_SAVE_EVERY_S: Final = 10.0
_RESTARTS: Final = "kvroute_process_restarts"


class Scrape:
    """Mutable: the counters of this process's predecessors, read by `begin`."""

    def __init__(self, mesh: Mesh, registry: Collector, folder: Path, *, generation: int) -> None:
        """`generation` says how often this process was replaced."""
        self._mesh = mesh
        self._registry = registry
        self._folder = folder
        self._generation = generation
        self._before: Page = []
        self._missing = 0
        self._writing = asyncio.Lock()
        mesh.answers(_ASKED, self._own)

    async def begin(self) -> None:
        """Go on from what the process's predecessors have counted."""
        before = await asyncio.to_thread(self._read, self._mesh.number)
        self._before = [family for family in before if family.name != _RESTARTS]  # it tells the sum itself

    async def run(self) -> None:
        """Write the counters down now and then; ends only by cancellation."""
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            await self.save()

    async def gathered(self) -> PageCollector:
        """All processes' figures. One that does not answer within a second is counted as missing, and
        stands with what it has last told."""
        own, others = await asyncio.gather(self._own(b""), self._mesh.ask(_ASKED, b"", _DEADLINE_S))
        found = {self._mesh.number: own, **others}
        pages = {number: decode(page) for number, page in found.items()}
        for number in self._mesh.others:
            if number not in pages:
                self._missing += 1
                pages[number] = await asyncio.to_thread(self._read, number)
        return PageCollector(merged([pages[number] for number in sorted(pages)]))

    async def save(self) -> None:
        """Write down the figures as of now."""
        await self._own(b"")

    def figures(self) -> Iterable[Metric]:
        """For this process's own registry."""
        mesh, number = self._mesh, str(self._mesh.number)
        yield gauge(
            "kvroute_process_links",
            "Other gateway processes that each one is linked to.",
            ("process",),
            [((number,), float(len(mesh.peers)))],
        )
        yield counter(
            _RESTARTS,
            "Gateway processes that were replaced.",
            ("process",),
            [((number,), float(self._generation))],
        )
        yield counter(
            "kvroute_process_link_breaks",
            "Links between gateway processes that ended while both should have gone on.",
            (),
            [((), float(mesh.counts.breaks))],
        )
        yield counter(
            "kvroute_process_messages",
            "Messages between gateway processes.",
            ("direction",),
            [(("sent",), float(mesh.counts.sent)), (("received",), float(mesh.counts.received))],
        )
        yield counter(
            "kvroute_processes_missing",
            "Gateway processes that a scrape could not ask.",
            (),
            [((), float(self._missing))],
        )

    async def _own(self, _: bytes) -> bytes:
        async with self._writing:
            page = merged([read(self._registry), self._before])
            await asyncio.to_thread(self._write, encode(counted(page)))
            return encode(page)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.counters"

    def _read(self, number: int) -> Page:
        try:
            return decode(self._path(number).read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, WireError) as error:
            log.warning("the counters of process %d before its end are lost: %s", number, error)
            return []

    def _write(self, page: bytes) -> None:
        path = self._path(self._mesh.number)
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(page)
            os.replace(fresh, path)
        except OSError as error:
            log.warning("the counters cannot be kept for a successor: %s", error)
