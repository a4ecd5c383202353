"""The metrics of several processes as those of one. Pure.

A page is a registry's families as plain data, which travels between processes and lies in files. Merging
sums what counts; of gauges it depends on what they say (`_SUMMED`, `_LEAST`): by default they describe
workers or caches, of which all processes believe the same, and one process's word is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvroute.errors import WireError

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


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A `prometheus_client` metric family."""

    name: str
    help_text: str
    kind: str
    samples: list[Sample]


Page: TypeAlias = list[Family]

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Page).decode


def read(source: Collector) -> Page:
    """What `source` says now. Timestamps and exemplars are left out: kvroute has none."""
    return [
        Family(
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
    families: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for page in pages:
        for family in page:
            known = families.get(family.name)
            if known is None:
                known = families[family.name] = family, {}
            _add(family, known[1])
    return [
        Family(
            family.name,
            family.help_text,
            family.kind,
            [Sample(name, labels, value) for (name, labels), value in samples.items()],
        )
        for family, samples in families.values()
    ]


def _add(family: Family, samples: dict[tuple[str, Labels], float]) -> None:
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
