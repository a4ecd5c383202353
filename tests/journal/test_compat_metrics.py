from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from tests.support.clocks import ManualClock
from tests.support.memory import growth_bytes

from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker, WorkerId, WorkerSpec
from kvroute.journal.compat_metrics import VllmRouterMetrics, _HostUse
from kvroute.metrics import Metrics
from kvroute.tallies import Gauges

DOCS = Path(__file__).parents[2] / "docs" / "migration" / "production-stack.md"


class Gateway:
    """Two workers, `a` and `b`, and what a scrape of `/metrics` would say about them."""

    def __init__(self) -> None:
        self.metrics, self.fleet, self.clock = Metrics(), Fleet(), ManualClock(1000.0)
        self.fleet.apply("static", [WorkerSpec(WorkerId(name), f"http://{name}:1") for name in "ab"])
        self.compat = VllmRouterMetrics(self.metrics, self.fleet, self.clock, window_s=60)
        self.metrics.registry.register(Gauges(self.compat))

    def worker(self, name: str) -> Worker:
        return self.fleet.get(name)

    def finished(
        self, worker: str = "a", *, seconds: float = 1.0, first: float | None = 0.5, **more: str
    ) -> None:
        labels = {"model": "m", "strategy": "session", "reason": "session", "status": "200", **more}
        status = int(labels.pop("status"))
        self.metrics.series(worker=worker, status=status, **labels).finished(seconds, first)

    def reported(self, model: str, worker: str, prompt_tokens: int, cached_tokens: int | None) -> None:
        self.metrics.series(model, worker, "session", "session", 200).reported(prompt_tokens, cached_tokens)

    def scrape(self) -> dict[str, float]:
        """Samples by name and labels, as in the text."""
        found = {}
        for family in text_string_to_metric_families(generate_latest(self.metrics.registry).decode()):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}"] = sample.value
        return found


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_load_is_as_the_fleet_has_it_now(gateway):
    a = gateway.worker("a").load
    first, *_ = [a.reserve(1000.0, prefill_s=1.0, tokens=10) for _ in range(3)]
    first.first_token(1000.5)
    gateway.fleet.mark_healthy(gateway.worker("a"), 0.0)

    found = gateway.scrape()

    assert found["vllm:num_requests_running{server=http://a:1}"] == 3
    assert found["vllm:num_prefill_requests{server=http://a:1}"] == 2
    assert found["vllm:num_decoding_requests{server=http://a:1}"] == 1
    assert found["vllm:num_requests_running{server=http://b:1}"] == 0
    assert found["vllm:healthy_pods_total{server=http://a:1}"] == 1
    assert found["vllm:healthy_pods_total{server=http://b:1}"] == 0


def test_rates_and_averages_are_those_of_the_window(gateway):
    gateway.finished(seconds=100.0)  # before anybody looked
    first = gateway.scrape()
    for _ in range(6):
        gateway.clock.time += 15
        gateway.finished(seconds=2.0, first=0.5)
        gateway.finished(seconds=4.0, first=0.5, model="n", strategy="roundrobin")
        found = gateway.scrape()

    assert first["vllm:avg_latency{server=http://a:1}"] == -1
    assert first["vllm:current_qps{server=http://a:1}"] == 0
    assert found["vllm:current_qps{server=http://a:1}"] == pytest.approx(2 / 15)
    assert found["vllm:avg_latency{server=http://a:1}"] == pytest.approx(3.0)
    assert found["vllm:avg_decoding_length{server=http://a:1}"] == pytest.approx(2.5)
    assert found["vllm:avg_latency{server=http://b:1}"] == -1
    gateway.clock.time += 61
    gateway.scrape()
    gateway.clock.time += 61
    assert gateway.scrape()["vllm:current_qps{server=http://a:1}"] == 0
    assert gateway.scrape()["vllm:avg_latency{server=http://a:1}"] == -1


def test_frequent_scrapes_are_not_all_remembered(gateway):

    def scrape(_: int) -> None:
        gateway.clock.time += 0.1
        list(gateway.compat())

    # Reading files of /proc sometimes leaves some thousand bytes in the allocator; a leak grows each time.
    assert any(growth_bytes(scrape, 1000) < 20_000 for _ in range(3))


def test_cache_and_token_figures_are_the_workers_own(gateway):
    gateway.reported("m", "a", 100, 80)
    gateway.reported("n", "a", 100, None)

    found = gateway.scrape()

    assert found["vllm:gpu_prefix_cache_queries_total{server=http://a:1}"] == 200
    assert found["vllm:gpu_prefix_cache_hits_total{server=http://a:1}"] == 80
    assert found["vllm:gpu_prefix_cache_hit_rate{server=http://a:1}"] == pytest.approx(0.4)
    assert found["vllm:gpu_prefix_cache_hit_rate{server=http://b:1}"] == 0
    assert found["vllm:input_tokens_total{model=m,server=http://a:1}"] == 100


def test_requests_errors_and_latencies_are_counted_by_server_and_model(gateway):
    gateway.finished(seconds=0.2)
    gateway.finished(seconds=70.0, reason="session_spill")
    gateway.finished(seconds=0.01, first=None, status="503")
    gateway.finished("-", seconds=0.01, first=None, status="429", model="-")

    found = gateway.scrape()

    assert found["vllm:num_incoming_requests_total{model=m}"] == 3
    assert found["vllm:request_errors_total{error_type=http_503,model=m,server=http://a:1}"] == 1
    assert found["vllm:request_errors_total{error_type=http_429,model=-,server=-}"] == 1
    series = "model=m,server=http://a:1,status=all"
    buckets = {
        re.search(r"le=([^,]+)", key)[1]: value
        for key, value in found.items()
        if key.startswith("vllm:request_latency_seconds_bucket")
    }
    assert (buckets["0.05"], buckets["0.25"], buckets["60.0"], buckets["120.0"], buckets["+Inf"]) == (
        1,
        2,
        2,
        3,
        3,
    )
    assert len(buckets) == 12
    assert found[f"vllm:request_latency_seconds_sum{{{series}}}"] == pytest.approx(70.21)


def test_a_worker_that_left_has_no_series(gateway):
    gateway.finished("a")
    gateway.finished("b", status="500")
    gateway.reported("m", "b", 1, 1)
    gateway.fleet.apply("static", [WorkerSpec(WorkerId("a"), "http://a:1")])

    found = gateway.scrape()

    assert any("server=http://a:1" in key for key in found)
    assert not [key for key in found if "http://b:1" in key or "server=b" in key]


def test_the_documentation_has_every_name_and_no_other(gateway):
    gateway.finished(status="500")
    gateway.reported("m", "a", 1, 1)
    gateway.scrape()  # CPU use needs two
    exported = {re.sub(r"_(bucket|sum|count)\{", "{", key).partition("{")[0] for key in gateway.scrape()}
    exported = {name for name in exported if not name.startswith(("kvroute_", "process_", "python_"))}
    table, _, missing = DOCS.read_text(encoding="utf-8").partition("## Metrics")[2].partition("Missing:")

    documented = set(re.findall(r"`((?:vllm:|router_)\w+)`", table))
    assert exported - documented == set()
    assert documented - exported <= {"router_cpu_usage_percent"}  # where no time has passed
    assert not exported & set(re.findall(r"`(vllm:\w+)`", missing))


def test_openmetrics_can_be_read_too(gateway):
    gateway.finished()
    registry = CollectorRegistry()
    registry.register(Gauges(gateway.compat))

    text = openmetrics.generate_latest(registry).decode()

    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert "vllm:input_tokens" in names
    list(openmetrics_parser.text_string_to_metric_families(text))


# The machine


def test_use_of_the_machine_is_read_from_proc(tmp_path):
    (tmp_path / "stat").write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1 1\n")
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n")
    use = _HostUse(tmp_path)
    (tmp_path / "stat").write_text("cpu  150 0 110 730 110 0 0 0 0 0\n")

    found = {metric.name: metric.samples[0].value for metric in use.gauges()}

    assert found["router_cpu_usage_percent"] == pytest.approx(60.0)
    assert found["router_memory_usage_percent"] == pytest.approx(75.0)
    assert 0 <= found["router_disk_usage_percent"] <= 100


@pytest.mark.parametrize("text", [None, "", "cpu\n", "MemTotal: x kB\nMemAvailable:\n"])
def test_a_machine_that_does_not_report_memory_has_no_gauge(text, tmp_path):
    if text is not None:
        (tmp_path / "stat").write_text(text if "Mem" not in text else "")
        (tmp_path / "meminfo").write_text(text)

    assert [metric.name for metric in _HostUse(tmp_path).gauges()] == ["router_disk_usage_percent"]
