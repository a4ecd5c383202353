"""One process's `/metrics` for all of them, with counters that outlive the processes that counted.

Before a process tells its figures it writes its counters to a file, so nothing that was ever scraped can be
lost with it; its successor counts on from there, and while there is none, the file speaks for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvroute.errors import WireError
from kvroute.metrics import counter, gauge
from kvroute.replicas.mesh import Mesh

Labels: TypeAlias = tuple[tuple[str, str], ...]

_COUNTED: Final = frozenset({"counter", "histogram", "summary"})
_SUMMED: Final = frozenset(
    {
        "kvroute_requests_in_flight",
        "kvroute_index_bytes",
        "kvroute_map_bytes",
        "kvroute_lmcache_map_bytes",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
    }
)
"""Gauges of what each process has for itself."""
_LEAST: Final = frozenset({"process_start_time_seconds", "process_max_fds"})


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: Labels
    value: float


class ParsedFamily(msgspec.Struct, frozen=True, array_like=True):
    """A `prometheus_client` metric family."""

    name: str
    help_text: str
    kind: str
    samples: list[Sample]


Page: TypeAlias = list[ParsedFamily]

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Page).decode


def read(source: Collector) -> Page:
    """What `source` says now. Timestamps and exemplars are left out: kvroute has none."""
    return [
        ParsedFamily(
            family.name,
            family.documentation,
            family.type,
            [
                Sample(sample.name, tuple(sorted(sample.labels.items())), sample.value)
                for sample in family.samples
            ],
        )
        for family in source.collect()
    ]


def encode(page: Page) -> bytes:
    return _encode(page)


def decode(data: bytes) -> Page:
    """Raises WireError."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise WireError("a metrics page that cannot be read") from error


def counted(page: Page) -> Page:
    """What of a page outlives its process: everything but gauges."""
    return [family for family in page if family.kind in _COUNTED]


def merged(pages: Sequence[Page]) -> Page:
    """One page of all of them; families and samples in the order in which they first come. A gauge that is
    one process's word is that of the first page that has the series. About 1 us a sample."""
    families: dict[str, tuple[ParsedFamily, dict[tuple[str, Labels], float]]] = {}
    for page in pages:
        for family in page:
            known = families.get(family.name)
            if known is None:
                known = families[family.name] = family, {}
            _add(family, known[1])
    return [
        ParsedFamily(
            family.name,
            family.help_text,
            family.kind,
            [Sample(name, labels, value) for (name, labels), value in samples.items()],
        )
        for family, samples in families.values()
    ]


def _add(family: ParsedFamily, samples: dict[tuple[str, Labels], float]) -> None:
    sums = family.kind in _COUNTED or family.name in _SUMMED
    takes_least = family.name in _LEAST
    for sample in family.samples:
        key = sample.name, sample.labels
        before = samples.get(key)
        if before is None:
            samples[key] = sample.value
        elif sums:
            samples[key] = before + sample.value
        elif takes_least:
            samples[key] = min(before, sample.value)


class PageCollector(Collector):
    """A page as `prometheus_client` exposes it."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def collect(self) -> Iterable[Metric]:
        for family in self._page:
            metric = Metric(family.name, family.help_text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


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


def merged_decisions(of_each: Sequence[Sequence[Mapping[str, Any]]], limit: int) -> list[dict[str, Any]]:
    """The newest `limit` of all, newest first; each has its `time`, in seconds since the epoch."""
    together = [dict(entry) for entries in of_each for entry in entries]
    together.sort(key=lambda entry: entry["time"], reverse=True)
    return together[:limit]


def merged_predictions(of_each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `routing.audit.Audit.describe` gives, summed."""
    demotions: dict[str, int] = {}
    for each in of_each:
        for worker, times in each["demotions"].items():
            demotions[worker] = demotions.get(worker, 0) + times
    return {
        "predictions": _summed(
            [row for each in of_each for row in each["predictions"]], ("strategy", "worker", "slowest_tier")
        ),
        "latest": _summed([row for each in of_each for row in each["latest"]], ("worker", "rank")),
        "demotions": demotions,
    }


def _summed(rows: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each combination of `names`, in their order; everything else is added up."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        known = sums.get(key)
        if known is None:
            sums[key] = dict(row)
            continue
        for name, value in row.items():
            if name not in names:
                known[name] += value
    return [sums[key] for key in sorted(sums)]
