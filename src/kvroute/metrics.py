"""The Prometheus families that kvroute exports, and the cheap way to record into them.

Names start with `kvroute_`, units are base units, labels are bounded: worker, model (known models
only), strategy, reason, status, kind. One `Metrics` belongs to one runtime and its own registry, so that
several gateways can live in one process.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute import __version__

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROUTING_S = (25e-6, 50e-6, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.05)
_BYTES = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


class Outcome(NamedTuple):
    """The labels that a finished request is counted under; "-" where there is none."""

    model: str
    worker: str
    strategy: str
    reason: str
    status: str


class _OutcomeSeries(NamedTuple):
    requests: Counter
    duration: Histogram
    first_byte: Histogram


class Gauges(Collector):
    """Figures that are read when scraped, not counted when they change.

    Each source yields ready metric families; registered once by the runtime.
    """

    def __init__(self, *sources: Callable[[], Iterable[Metric]]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        for source in self._sources:
            yield from source()

    def describe(self) -> Iterable[Metric]:
        return ()


def gauge(
    name: str, help_text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """A gauge family read at scrape time, one row per label set."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counter(
    name: str, help_text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """A counter family read at scrape time, one row per label set."""
    family = CounterMetricFamily(name, help_text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


class Metrics:
    """All families. Mutable: the families count; `_series` remembers label children (a lookup of
    `.labels()` costs about 1 us, one in a dict 0.1 us)."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        info = Gauge(
            "kvroute_build_info", "Version of kvroute; always 1.", ["version", "python"], registry=registry
        )
        info.labels(__version__, platform.python_version()).set(1)

        outcome = Outcome._fields
        self._requests = Counter(
            "kvroute_requests", "Finished inference requests.", outcome, registry=registry
        )
        self._duration = Histogram(
            "kvroute_request_duration_seconds",
            "From the complete request to the last byte of its answer.",
            ["model", "worker", "strategy"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._first_byte = Histogram(
            "kvroute_time_to_first_byte_seconds",
            "From the complete request to the first body byte of its answer: the first token, when streamed.",
            ["model", "worker", "strategy"],
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.in_flight = Gauge(
            "kvroute_requests_in_flight", "Inference requests being served now.", registry=registry
        )
        self.routing_time = Histogram(
            "kvroute_routing_duration_seconds",
            "Reading the body, matching its prefix and ranking the workers.",
            buckets=_ROUTING_S,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "kvroute_prompt_tokens",
            "Prompt tokens routed, as estimated before forwarding.",
            ["model", "strategy"],
            registry=registry,
        )
        self._hit_tokens = Counter(
            "kvroute_predicted_hit_tokens",
            "Prompt tokens that the chosen worker was believed to hold.",
            ["model", "strategy"],
            registry=registry,
        )
        self._reported_prompt_tokens = Counter(
            "kvroute_reported_prompt_tokens",
            "Prompt tokens according to the workers' own `usage`.",
            ["model", "worker"],
            registry=registry,
        )
        self._cached_tokens = Counter(
            "kvroute_reported_cached_tokens",
            "Cached prompt tokens according to the workers' own `usage`.",
            ["model", "worker"],
            registry=registry,
        )
        self.retries = Counter(
            "kvroute_retries", "Attempts repeated on another worker.", ["cause"], registry=registry
        )
        self.retries_denied = Counter(
            "kvroute_retries_denied",
            "Attempts that the retry budget forbade to repeat.",
            registry=registry,
        )
        self.ejections = Counter(
            "kvroute_worker_ejections",
            "Workers taken out of routing.",
            ["worker", "cause"],
            registry=registry,
        )
        self.streams_aborted = Counter(
            "kvroute_streams_aborted",
            "Exchanges that ended early, by who ended them.",
            ["by"],
            registry=registry,
        )
        self.rejected = Counter(
            "kvroute_requests_rejected",
            "Requests that the gateway answered itself, by error code.",
            ["code"],
            registry=registry,
        )
        self.request_bytes = Histogram(
            "kvroute_request_body_bytes", "Size of request bodies.", buckets=_BYTES, registry=registry
        )
        for by in ("client", "worker", "shutdown"):
            self.streams_aborted.labels(by)
        self._series: dict[tuple[str, ...], _OutcomeSeries] = {}
        self._tokens: dict[tuple[str, str], tuple[Counter, Counter]] = {}
        self._reported: dict[tuple[str, str], tuple[Counter, Counter]] = {}

    def finished(self, outcome: Outcome, duration_s: float, first_byte_s: float | None) -> None:
        """Count one finished request; `first_byte_s` is None where no body byte came."""
        series = self._series.get(outcome)
        if series is None:
            pool = (outcome.model, outcome.worker, outcome.strategy)
            series = self._series[outcome] = _OutcomeSeries(
                self._requests.labels(*outcome), self._duration.labels(*pool), self._first_byte.labels(*pool)
            )
        series.requests.inc()
        series.duration.observe(duration_s)
        if first_byte_s is not None:
            series.first_byte.observe(first_byte_s)

    def routed(self, model: str, strategy: str, prompt_tokens: int, hit_tokens: int) -> None:
        """Count what was predicted for one dispatched request."""
        pair = self._tokens.get((model, strategy))
        if pair is None:
            pair = self._prompt_tokens.labels(model, strategy), self._hit_tokens.labels(model, strategy)
            self._tokens[model, strategy] = pair
        pair[0].inc(prompt_tokens)
        pair[1].inc(hit_tokens)

    def reported(self, model: str, worker: str, prompt_tokens: int, cached_tokens: int | None) -> None:
        """Count what a worker's `usage` said."""
        pair = self._reported.get((model, worker))
        if pair is None:
            pair = (
                self._reported_prompt_tokens.labels(model, worker),
                self._cached_tokens.labels(model, worker),
            )
            self._reported[model, worker] = pair
        pair[0].inc(prompt_tokens)
        if cached_tokens:
            pair[1].inc(cached_tokens)

    def forget_worker(self, worker: str) -> None:
        """Drop the remembered children of a worker that left; its series stay until the process ends."""
        self._series = {key: series for key, series in self._series.items() if key[1] != worker}
        self._reported = {key: pair for key, pair in self._reported.items() if key[1] != worker}
