"""The metrics of production-stack's router under their own names, for dashboards that ask for them.

Names, types and labels as in `vllm_router/services/metrics_service/__init__.py` and
`vllm_router/routers/metrics_router.py` of vllm-project/production-stack (read in November 2026). All figures
are those that kvroute counts anyway, read at scrape time. docs/migration.md says what each name stands for
here, and which ones are missing.
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
from kvroute.metrics import Metrics, counter, gauge
from kvroute.options import Options, option

_BUCKETS: Final = ("0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "60.0", "120.0", "+Inf")
"""That router's; all of them are bounds of ours as well."""
_NOBODY: Final = "-"
"""The worker of requests that reached none."""
_NONE_YET: Final = -1.0
"""An average of nothing, as that router writes it."""
_LEAST_SPACING: Final = 1 / 60
"""Share of the window between two remembered scrapes."""


class _Totals(NamedTuple):
    """Of one worker, over all models, since the start."""

    requests: float = 0.0
    duration_s: float = 0.0
    answers: float = 0.0
    first_byte_s: float = 0.0

    def plus(self, other: _Totals) -> _Totals:
        return _Totals(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: _Totals) -> _Totals:
        return _Totals(*(a - b for a, b in zip(self, other, strict=True)))


class _Histogram(NamedTuple):
    """One series: counts up to each bound, and the sum."""

    buckets: dict[str, float]
    sum: list[float]


@dataclass(slots=True)
class _Scrape:
    """What kvroute has counted, by worker id."""

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
    """A source for `Gauges`. Mutable: remembers the scrapes of one window.

    A scrape costs as much as kvroute's own collection does once more. Only workers of the fleet have
    series, so that their number is bounded.
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
        """The same of other figures under kvroute's names: of all processes, where there are several. Asked
        for one kind only, always."""
        servers: dict[str, str] = {worker.id: worker.spec.url for worker in self._fleet.workers()}
        seen = _read(metrics.collect())
        yield from self._loads()
        yield from self._averages(servers, seen)
        yield from _caches(servers, seen)
        yield from _models(servers, seen)
        yield from self._host.gauges()

    def _loads(self) -> Iterator[Metric]:
        workers = self._fleet.workers()
        rows = [((w.spec.url,), w.load.in_flight, min(w.load.queued, w.load.in_flight)) for w in workers]
        label = ("server",)
        yield gauge(
            "vllm:num_requests_running", "Requests sent and unfinished.", label, [(s, n) for s, n, _ in rows]
        )
        yield gauge(
            "vllm:num_prefill_requests",
            "Of those, without a first token.",
            label,
            [(s, q) for s, _, q in rows],
        )
        yield gauge(
            "vllm:num_decoding_requests", "Of those, with one.", label, [(s, n - q) for s, n, q in rows]
        )
        yield gauge("vllm:num_requests_swapped", "vLLM V1 swaps none.", label, [(s, 0.0) for s, _, _ in rows])
        yield gauge(
            "vllm:healthy_pods_total",
            "1 for workers that get requests.",
            label,
            [((w.spec.url,), float(w.is_routable)) for w in workers],
        )

    def _averages(self, servers: Mapping[str, str], seen: _Scrape) -> Iterator[Metric]:
        now = self._clock.now()
        since, before = self._remember(now, seen.totals)
        recent = {
            server: seen.totals[worker].minus(before.get(worker, _Totals()))
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
            "Seconds to the last byte; -1: none finished.",
            label,
            [((s,), _ratio(each.duration_s, each.requests)) for s, each in recent.items()],
        )
        yield gauge(
            "vllm:avg_decoding_length",
            "Seconds from the first byte to the last; -1: none finished.",
            label,
            [((s,), _ratio(each.duration_s - each.first_byte_s, each.answers)) for s, each in recent.items()],
        )

    def _remember(self, now: float, totals: Mapping[str, _Totals]) -> tuple[float, Mapping[str, _Totals]]:
        """The oldest scrape of the window, or the last one before it; this one at the first time."""
        scrapes = self._scrapes
        if not scrapes or now - scrapes[-1][0] >= self._window_s * _LEAST_SPACING:
            scrapes.append((now, dict(totals)))
        while len(scrapes) > 1 and scrapes[1][0] <= now - self._window_s:
            scrapes.popleft()
        return scrapes[0]


def _read(families: Iterable[Metric]) -> _Scrape:
    seen = _Scrape()
    for family in families:
        for sample in family.samples:
            labels, value = sample.labels, sample.value
            worker, model = labels.get("worker", ""), labels.get("model", "")
            match sample.name:
                case "kvroute_requests_total":
                    seen.requests[worker, model, labels["status"]] += value
                case "kvroute_reported_prompt_tokens_total":
                    seen.prompt_tokens[worker, model] += value
                case "kvroute_reported_cached_tokens_total":
                    seen.cached_tokens[worker] += value
                case "kvroute_request_duration_seconds_bucket":
                    seen.durations[worker, model].buckets[labels["le"]] += value
                case "kvroute_request_duration_seconds_sum":
                    seen.durations[worker, model].sum[0] += value
                    seen.totals[worker] = seen.totals[worker].plus(_Totals(duration_s=value))
                case "kvroute_request_duration_seconds_count":
                    seen.totals[worker] = seen.totals[worker].plus(_Totals(requests=value))
                case "kvroute_time_to_first_byte_seconds_sum":
                    seen.totals[worker] = seen.totals[worker].plus(_Totals(first_byte_s=value))
                case "kvroute_time_to_first_byte_seconds_count":
                    seen.totals[worker] = seen.totals[worker].plus(_Totals(answers=value))
                case _:
                    pass
    return seen


def _caches(servers: Mapping[str, str], seen: _Scrape) -> Iterator[Metric]:
    queries: dict[str, float] = defaultdict(float)
    for (worker, _), tokens in seen.prompt_tokens.items():
        queries[worker] += tokens
    label = ("server",)
    yield gauge(
        "vllm:gpu_prefix_cache_queries_total",
        "Prompt tokens, as the workers' `usage` has them.",
        label,
        [((s,), queries[w]) for w, s in servers.items()],
    )
    yield gauge(
        "vllm:gpu_prefix_cache_hits_total",
        "Of those, cached.",
        label,
        [((s,), seen.cached_tokens[w]) for w, s in servers.items()],
    )
    yield gauge(
        "vllm:gpu_prefix_cache_hit_rate",
        "Share of those.",
        label,
        [((s,), seen.cached_tokens[w] / queries[w] if queries[w] else 0.0) for w, s in servers.items()],
    )


def _models(servers: Mapping[str, str], seen: _Scrape) -> Iterator[Metric]:
    places = {**servers, _NOBODY: _NOBODY}
    incoming: dict[str, float] = defaultdict(float)
    errors: dict[tuple[str, str, str], float] = defaultdict(float)
    for (worker, model, status), number in seen.requests.items():
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
        "Prompt tokens, as the workers' `usage` has them.",
        ("server", "model"),
        [((servers[w], model), n) for (w, model), n in seen.prompt_tokens.items() if w in servers],
    )
    yield counter(
        "vllm:request_errors",
        "Requests answered 4xx or 5xx.",
        ("server", "model", "error_type"),
        errors.items(),
    )
    latency = HistogramMetricFamily(
        "vllm:request_latency_seconds",
        "From the complete request to the last byte of its answer.",
        labels=("server", "model", "status"),
    )
    for (worker, model), histogram in seen.durations.items():
        if worker in servers:
            buckets = [(bound, histogram.buckets[bound]) for bound in _BUCKETS]
            latency.add_metric((servers[worker], model, "all"), buckets, histogram.sum[0])
    yield latency


def _ratio(amount: float, number: float) -> float:
    return amount / number if number else _NONE_YET


class _HostUse:
    """Of the machine that the gateway runs on; what Linux does not tell is left out. Mutable: CPU use is
    taken from one scrape to the next."""

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
        """Idle and all time so far, from the first line of `stat`: user nice system idle iowait ..."""
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
    """What `/metrics` says beside kvroute's own figures."""

    compat: Literal["none", "vllm-router"] = option(
        "none", "Also export the metric names of this router: `vllm-router` is production-stack's."
    )
    compat_window_s: float = option(
        60.0,
        "What its rates and averages are taken over, from one scrape to another.",
        unit="s",
        gt=0,
        higher="smoother",
        lower="more current",
    )
