"""`/metrics` of all gateway processes together, with counters that survive a process.

Before a process reports its figures it writes its counters to a file, so no count that was ever scraped is
lost when it dies. Its successor continues from the file; until the successor runs, the file is used in a
scrape. The metrics of links between processes and gateways are here, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvroute.errors import WireError
from kvroute.replicas.mesh import Mesh
from kvroute.tallies import counter, gauge

Labels: TypeAlias = tuple[tuple[str, str], ...]

_CUMULATIVE_KINDS: Final = frozenset({"counter", "histogram", "summary"})
_SUMMED_GAUGES: Final = frozenset(
    {
        "kvroute_requests_in_flight",
        "kvroute_queue_waiting",
        "kvroute_tasks",
        "kvroute_index_bytes",
        "kvroute_map_bytes",
        "kvroute_lmcache_map_bytes",
        "process_virtual_memory_bytes",
        "process_resident_memory_bytes",
        "process_open_fds",
    }
)
"""Gauges of a process's own requests and resources: a scrape adds them up."""

_MINIMUM_GAUGES: Final = frozenset(
    {"process_start_time_seconds", "process_max_fds", "kvroute_certificate_expiry_timestamp_seconds"}
)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One line of a page: the full name of a series, its labels and its value."""

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
    """The present figures of `source`, without timestamps and exemplars: kvroute has none."""
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
    """The figures of one process for another one; see `decode`."""
    return _encode(page)


def decode(data: bytes) -> Page:
    """Raises WireError."""
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise WireError("a metrics page cannot be decoded") from error


def persistent_part(page: Page) -> Page:
    """The families that a successor continues: all except gauges."""
    return [family for family in page if family.kind in _CUMULATIVE_KINDS]


def merge_pages(pages: Sequence[Page]) -> Page:
    """Merge `pages` into one; families and samples keep the order of their first appearance.

    Counters, histograms and the gauges of a process's own resources are added up. Of another gauge, such as
    one about a worker, the first page that has the series counts. About 1 us per sample.
    """
    families: dict[str, tuple[ParsedFamily, dict[tuple[str, Labels], float]]] = {}
    for page in pages:
        for family in page:
            merged = families.get(family.name)
            if merged is None:
                merged = families[family.name] = family, {}
            _add(family, merged[1])
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
    is_summed = family.kind in _CUMULATIVE_KINDS or family.name in _SUMMED_GAUGES
    is_minimum = family.name in _MINIMUM_GAUGES
    for sample in family.samples:
        key = sample.name, sample.labels
        total = samples.get(key)
        if total is None:
            samples[key] = sample.value
        elif is_summed:
            samples[key] = total + sample.value
        elif is_minimum:
            samples[key] = min(total, sample.value)


class PageCollector(Collector):
    """Exposes a page through `prometheus_client`."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def collect(self) -> Iterable[Metric]:
        for family in self._page:
            metric = Metric(family.name, family.help_text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, dict(sample.labels), sample.value)
            yield metric


log = logging.getLogger(__name__)

_TOPIC: Final = "metrics"
_TIMEOUT_S: Final = 1.0
_SAVE_INTERVAL_S: Final = 10.0
_RESTARTS: Final = "kvroute_process_restarts"


class LinkFigures(NamedTuple):
    """Figures of one process's links to the others."""

    process: int
    linked: int
    restarts: int
    breaks: int
    messages_sent: int
    messages_received: int
    missing: int
    """Scrapes' processes that did not answer within a second."""


def link_metrics(figures: LinkFigures | None) -> Iterable[Metric]:
    """Metrics of the links between the processes; without samples for a gateway of one process."""
    number = "" if figures is None else str(figures.process)
    yield gauge(
        "kvroute_process_links",
        "Other gateway processes that each one is linked to.",
        ("process",),
        [] if figures is None else [((number,), float(figures.linked))],
    )
    yield counter(
        _RESTARTS,
        "Gateway processes that were replaced.",
        ("process",),
        [] if figures is None else [((number,), float(figures.restarts))],
    )
    yield counter(
        "kvroute_process_link_breaks",
        "Links between gateway processes that broke although neither process was shutting down.",
        (),
        [] if figures is None else [((), float(figures.breaks))],
    )
    yield counter(
        "kvroute_process_messages",
        "Messages between gateway processes.",
        ("direction",),
        []
        if figures is None
        else [(("sent",), float(figures.messages_sent)), (("received",), float(figures.messages_received))],
    )
    yield counter(
        "kvroute_processes_missing",
        "Gateway processes that did not answer a scrape within a second.",
        (),
        [] if figures is None else [((), float(figures.missing))],
    )


class GatewayMetrics:
    """Merges the figures of all processes for a scrape, and saves this process's counters for its successor.

    Mutable: the counters of this process's predecessors, which `load` reads.
    """

    def __init__(self, mesh: Mesh, registry: Collector, folder: Path, *, generation: int) -> None:
        """`generation` is how often this process was replaced."""
        self._mesh = mesh
        self._registry = registry
        self._folder = folder
        self._generation = generation
        self._predecessors: Page = []
        self._missing = 0
        self._write_lock = asyncio.Lock()
        mesh.handle(_TOPIC, self._own_page)

    async def load(self) -> None:
        """Read the predecessors' counters, to continue from them."""
        saved = await asyncio.to_thread(self._read, self._mesh.number)
        # `generation` is the sum of all restarts already.
        self._predecessors = [family for family in saved if family.name != _RESTARTS]

    async def run(self) -> None:
        """Save the counters every `_SAVE_INTERVAL_S`; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_SAVE_INTERVAL_S)
            await self.save()

    async def collect_all(self) -> PageCollector:
        """The merged figures of all processes.

        A process that does not answer within a second is counted as missing; its last saved counters are
        used.
        """
        own_page, peer_pages = await asyncio.gather(
            self._own_page(b""), self._mesh.request_all(_TOPIC, b"", _TIMEOUT_S)
        )
        encoded_pages = {self._mesh.number: own_page, **peer_pages}
        pages = {number: decode(page) for number, page in encoded_pages.items()}
        for number in self._mesh.peers:
            if number not in pages:
                self._missing += 1
                pages[number] = await asyncio.to_thread(self._read, number)
        return PageCollector(merge_pages([pages[number] for number in sorted(pages)]))

    async def save(self) -> None:
        """Write the present counters to the file."""
        await self._own_page(b"")

    def figures(self) -> Iterable[Metric]:
        """Figures of the links, for this process's own registry."""
        counts = self._mesh.counts
        return link_metrics(
            LinkFigures(
                self._mesh.number,
                len(self._mesh.linked_peers),
                self._generation,
                counts.breaks,
                counts.messages_sent,
                counts.messages_received,
                self._missing,
            )
        )

    async def _own_page(self, _: bytes) -> bytes:
        async with self._write_lock:
            page = merge_pages([read(self._registry), self._predecessors])
            await asyncio.to_thread(self._write, encode(persistent_part(page)))
            return encode(page)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.counters"

    def _read(self, number: int) -> Page:
        try:
            return decode(self._path(number).read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, WireError) as error:
            log.warning("the saved counters of process %d cannot be read and are lost: %s", number, error)
            return []

    def _write(self, page: bytes) -> None:
        path = self._path(self._mesh.number)
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(page)
            os.replace(fresh, path)
        except OSError as error:
            log.warning("the counters cannot be saved for a successor: %s", error)


def merge_decisions(processes: Sequence[Sequence[Mapping[str, Any]]], limit: int) -> list[dict[str, Any]]:
    """The newest `limit` decisions of all processes, newest first, by `time` in seconds since the epoch."""
    decisions = [dict(entry) for entries in processes for entry in entries]
    decisions.sort(key=lambda entry: entry["time"], reverse=True)
    return decisions[:limit]


def merge_predictions(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of several processes' `routing.audit.Audit.describe`."""
    demotions: dict[str, int] = {}
    for process in processes:
        for worker, times in process["demotions"].items():
            demotions[worker] = demotions.get(worker, 0) + times
    return {
        "predictions": _summed(
            [row for process in processes for row in process["predictions"]],
            ("strategy", "worker", "slowest_tier"),
        ),
        "latest": _summed([row for process in processes for row in process["latest"]], ("worker", "rank")),
        "demotions": demotions,
        "transfers": _summed([row for process in processes for row in process["transfers"]], ("worker",)),
    }


def _summed(rows: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each combination of the labels `names`, sorted by them; all other values are added up."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        total = sums.get(key)
        if total is None:
            sums[key] = dict(row)
            continue
        for name, value in row.items():
            if name not in names:
                total[name] += value
    return [sums[key] for key in sorted(sums)]
