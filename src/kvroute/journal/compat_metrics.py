"""The metrics of production-stack's router under their own names, for existing dashboards.

Names, types and labels as in `vllm_router/services/metrics_service/__init__.py` and
`vllm_router/routers/metrics_router.py` of vllm-project/production-stack (read in November 2026). All values
are computed from kvroute's own metrics at a scrape. docs/migration/production-stack.md explains each name and
lists the missing ones.
"""

from __future__ import annotations

import shutil
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute.clock import Clock
from kvroute.fleet.fleet import Fleet
from kvroute.metrics import Metrics
from kvroute.options import Options, option
from kvroute.tallies import counter, gauge

_BUCKETS: Final = ("0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "60.0", "120.0", "+Inf")
"""The bounds of that router's histograms; kvroute's own histograms have these bounds too."""
_NO_WORKER: Final = "-"
"""The worker label of requests that reached no worker."""
_NO_VALUE: Final = -1.0
"""An average without any value, as that router reports it."""
_MIN_SPACING: Final = 1 / 60
"""Minimum time between two stored scrapes, as a share of the window."""


class _Totals(NamedTuple):
    """Sums of one worker over all models since the start."""

    requests: float = 0.0
    duration_s: float = 0.0
    answers: float = 0.0
    first_byte_s: float = 0.0

    def plus(self, other: _Totals) -> _Totals:
        return _Totals(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: _Totals) -> _Totals:
        return _Totals(*(a - b for a, b in zip(self, other, strict=True)))


class _Histogram(NamedTuple):
    """One histogram series: cumulative counts by bound, and the sum."""

    buckets: dict[str, float]
    sum: list[float]


@dataclass(slots=True)
class _Figures:
    """kvroute's own counts at one scrape, by worker id."""

    requests: dict[tuple[str, str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(worker, model, status)."""
    prompt_tokens: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(worker, model); the workers' own count."""
    cached_tokens: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    durations: dict[tuple[str, str], _Histogram] = field(
        default_factory=lambda: defaultdict(lambda: _Histogram(defaultdict(float), [0.0]))
    )
    totals: dict[str, _Totals] = field(default_factory=lambda: defaultdict(_Totals))


class VllmRouterMetrics:
    """A source for `Gauges`. Mutable: stores the scrapes of one window.

    A scrape costs as much as another collection of kvroute's own metrics. Only present workers have series,
    so their number is bounded.
    """

    def __init__(self, metrics: Metrics, fleet: Fleet, clock: Clock, *, window_s: float = 60.0) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._clock = clock
        self._window_s = window_s
        self._scrapes: deque[tuple[float, Mapping[str, _Totals]]] = deque()
        self._host = _HostUse()

    def __call__(self) -> Iterator[Metric]:
        return self.of(self._metrics)

    def of(self, metrics: Collector) -> Iterator[Metric]:
        """The metrics computed from another collector with kvroute's names, such as that of all processes.

        One object must always be used with the same collector, because rates compare two scrapes.
        """
        servers: dict[str, str] = {worker.id: worker.spec.url for worker in self._fleet.workers()}
        figures = _read(metrics.collect())
        yield from self._loads()
        yield from self._averages(servers, figures)
        yield from _caches(servers, figures)
        yield from _models(servers, figures)
        yield from self._host.gauges()

    def _loads(self) -> Iterator[Metric]:
        workers = self._fleet.workers()
        rows = [((w.spec.url,), w.load.in_flight, min(w.load.queued, w.load.in_flight)) for w in workers]
        label = ("server",)
        yield gauge(
            "vllm:num_requests_running",
            "Requests that were sent and have not finished.",
            label,
            [(s, n) for s, n, _ in rows],
        )
        yield gauge(
            "vllm:num_prefill_requests",
            "Unfinished requests without a first token.",
            label,
            [(s, q) for s, _, q in rows],
        )
        yield gauge(
            "vllm:num_decoding_requests",
            "Unfinished requests with a first token.",
            label,
            [(s, n - q) for s, n, q in rows],
        )
        yield gauge(
            "vllm:num_requests_swapped",
            "Always 0: vLLM V1 does not swap.",
            label,
            [(s, 0.0) for s, _, _ in rows],
        )
        yield gauge(
            "vllm:healthy_pods_total",
            "1 for workers that receive requests.",
            label,
            [((w.spec.url,), float(w.is_routable)) for w in workers],
        )

    def _averages(self, servers: Mapping[str, str], figures: _Figures) -> Iterator[Metric]:
        now = self._clock.now()
        since, before = self._start_of_window(now, figures.totals)
        recent = {
            server: figures.totals[worker].minus(before.get(worker, _Totals()))
            for worker, server in servers.items()
        }
        passed = now - since
        label = ("server",)
        yield gauge(
            "vllm:current_qps",
            "Requests finished per second.",
            label,
            [((s,), each.requests / passed if passed > 0 else 0.0) for s, each in recent.items()],
        )
        yield gauge(
            "vllm:avg_latency",
            "Seconds to the last byte; -1 if no request has finished.",
            label,
            [((s,), _ratio(each.duration_s, each.requests)) for s, each in recent.items()],
        )
        yield gauge(
            "vllm:avg_decoding_length",
            "Seconds from the first byte to the last; -1 if no request has finished.",
            label,
            [((s,), _ratio(each.duration_s - each.first_byte_s, each.answers)) for s, each in recent.items()],
        )

    def _start_of_window(
        self, now: float, totals: Mapping[str, _Totals]
    ) -> tuple[float, Mapping[str, _Totals]]:
        """The last scrape before the window, or the oldest one inside it. Stores this scrape."""
        scrapes = self._scrapes
        if not scrapes or now - scrapes[-1][0] >= self._window_s * _MIN_SPACING:
            scrapes.append((now, dict(totals)))
        while len(scrapes) > 1 and scrapes[1][0] <= now - self._window_s:
            scrapes.popleft()
        return scrapes[0]


def _read(families: Iterable[Metric]) -> _Figures:
    figures = _Figures()
    for family in families:
        for sample in family.samples:
            labels, value = sample.labels, sample.value
            worker, model = labels.get("worker", ""), labels.get("model", "")
            match sample.name:
                case "kvroute_requests_total":
                    figures.requests[worker, model, labels["status"]] += value
                case "kvroute_reported_prompt_tokens_total":
                    figures.prompt_tokens[worker, model] += value
                case "kvroute_reported_cached_tokens_total":
                    figures.cached_tokens[worker] += value
                case "kvroute_request_duration_seconds_bucket":
                    figures.durations[worker, model].buckets[labels["le"]] += value
                case "kvroute_request_duration_seconds_sum":
                    figures.durations[worker, model].sum[0] += value
                    figures.totals[worker] = figures.totals[worker].plus(_Totals(duration_s=value))
                case "kvroute_request_duration_seconds_count":
                    figures.totals[worker] = figures.totals[worker].plus(_Totals(requests=value))
                case "kvroute_time_to_first_byte_seconds_sum":
                    figures.totals[worker] = figures.totals[worker].plus(_Totals(first_byte_s=value))
                case "kvroute_time_to_first_byte_seconds_count":
                    figures.totals[worker] = figures.totals[worker].plus(_Totals(answers=value))
                case _:
                    pass
    return figures


def _caches(servers: Mapping[str, str], figures: _Figures) -> Iterator[Metric]:
    queries: dict[str, float] = defaultdict(float)
    for (worker, _), tokens in figures.prompt_tokens.items():
        queries[worker] += tokens
    label = ("server",)
    yield gauge(
        "vllm:gpu_prefix_cache_queries_total",
        "Prompt tokens that the workers reported in `usage`.",
        label,
        [((s,), queries[w]) for w, s in servers.items()],
    )
    yield gauge(
        "vllm:gpu_prefix_cache_hits_total",
        "Cached prompt tokens that the workers reported in `usage`.",
        label,
        [((s,), figures.cached_tokens[w]) for w, s in servers.items()],
    )
    yield gauge(
        "vllm:gpu_prefix_cache_hit_rate",
        "Share of cached tokens in the reported prompt tokens.",
        label,
        [((s,), figures.cached_tokens[w] / queries[w] if queries[w] else 0.0) for w, s in servers.items()],
    )


def _models(servers: Mapping[str, str], figures: _Figures) -> Iterator[Metric]:
    places = {**servers, _NO_WORKER: _NO_WORKER}
    incoming: dict[str, float] = defaultdict(float)
    errors: dict[tuple[str, str, str], float] = defaultdict(float)
    for (worker, model, status), number in figures.requests.items():
        incoming[model] += number
        if worker in places and status.isdigit() and int(status) >= 400:
            errors[places[worker], model, f"http_{status}"] += number
    yield counter(
        "vllm:num_incoming_requests",
        "Finished requests.",
        ("model",),
        [((model,), number) for model, number in incoming.items()],
    )
    yield counter(
        "vllm:input_tokens",
        "Prompt tokens that the workers reported in `usage`.",
        ("server", "model"),
        [((servers[w], model), n) for (w, model), n in figures.prompt_tokens.items() if w in servers],
    )
    yield counter(
        "vllm:request_errors",
        "Requests that were answered with a 4xx or 5xx status.",
        ("server", "model", "error_type"),
        errors.items(),
    )
    latency = HistogramMetricFamily(
        "vllm:request_latency_seconds",
        "From the complete request to the last byte of its answer.",
        labels=("server", "model", "status"),
    )
    for (worker, model), histogram in figures.durations.items():
        if worker in servers:
            buckets = [(bound, histogram.buckets[bound]) for bound in _BUCKETS]
            latency.add_metric((servers[worker], model, "all"), buckets, histogram.sum[0])
    yield latency


def _ratio(amount: float, number: float) -> float:
    return amount / number if number else _NO_VALUE


class _HostUse:
    """CPU, memory and disk use of the gateway's machine; values that Linux does not provide are left out.

    Mutable: CPU use is measured between two scrapes.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before = self._cpu()

    def gauges(self) -> Iterator[Metric]:
        now = self._cpu()
        if now is not None and self._before is not None and now[1] > self._before[1]:
            idle, passed = now[0] - self._before[0], now[1] - self._before[1]
            yield _percent("router_cpu_usage_percent", "CPU use since the last scrape.", 1 - idle / passed)
            self._before = now
        memory = self._memory()
        if memory is not None:
            yield _percent("router_memory_usage_percent", "Memory use.", memory)
        disk = shutil.disk_usage("/")
        yield _percent(
            "router_disk_usage_percent", "Disk use.", disk.used / disk.total if disk.total else 0.0
        )

    def _cpu(self) -> tuple[float, float] | None:
        """Idle time and total time, from the first line of `stat`: user nice system idle iowait ..."""
        text = self._text("stat")
        times = [float(word) for word in text.partition("\n")[0].split()[1:9]]
        return (times[3] + times[4], sum(times)) if len(times) >= 5 else None

    def _memory(self) -> float | None:
        lines = dict(line.split(":", 1) for line in self._text("meminfo").splitlines() if ":" in line)
        try:
            total, available = (float(lines[key].split()[0]) for key in ("MemTotal", "MemAvailable"))
        except (KeyError, IndexError, ValueError):
            return None
        return 1 - available / total if total else None

    def _text(self, name: str) -> str:
        try:
            return (self._proc / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""


def _percent(name: str, text: str, share: float) -> Metric:
    return gauge(name, text, (), [((), 100.0 * min(1.0, max(0.0, share)))])


class MetricsOptions(Options):
    """Additional metrics on `/metrics`."""

    compat: Literal["none", "vllm-router"] = option(
        "none", "Also export the metric names of this router: `vllm-router` is production-stack's."
    )
    compat_window_s: float = option(
        60.0,
        "Time over which its rates and averages are computed, between two scrapes.",
        unit="s",
        gt=0,
        higher="smoother",
        lower="more current",
    )
