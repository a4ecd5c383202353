from pathlib import Path

import pytest
from tests.support.clocks import ManualClock

from kvroute.errors import GatewayOverloaded
from kvroute.http.descriptors import DescriptorLimit
from kvroute.http.overload import MemoryUse, MemoryWatch, memory_reader
from kvroute.metrics import Metrics

MIB = 1 << 20


def machine(folder: Path, total_mib: int = 1000, available_mib: int = 250) -> Path:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {total_mib * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available_mib * 1024} kB\n"
    )
    return proc


def test_the_cgroups_memory_counts_without_file_caches(tmp_path):
    proc, group = machine(tmp_path), tmp_path / "cgroup" / "pod" / "gateway"
    (proc / "self/cgroup").write_text("0::/pod/gateway\n")
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{100 * MIB}\n")
    (group / "memory.current").write_text(f"{90 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {30 * MIB}\nactive_file 5\n")

    assert memory_reader(0, proc, tmp_path / "cgroup")() == MemoryUse(60 * MIB, 100 * MIB)


def test_a_cgroup_of_version_1_is_read(tmp_path):
    proc, group = machine(tmp_path), tmp_path / "cgroup" / "memory" / "pod"
    (proc / "self/cgroup").write_text("5:cpu,memory:/pod\n")
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{50 * MIB}\n")
    (group / "memory.stat").write_text(f"total_inactive_file {10 * MIB}\n")

    assert memory_reader(0, proc, tmp_path / "cgroup")() == MemoryUse(40 * MIB, 100 * MIB)


@pytest.mark.parametrize("limit", ["max", str(1 << 62), None])
def test_without_a_limit_of_the_cgroup_the_machines_memory_counts(tmp_path, limit):
    proc, groups = machine(tmp_path), tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/\n")
    groups.mkdir()
    if limit is not None:
        (groups / "memory.max").write_text(limit + "\n")

    assert memory_reader(0, proc, groups)() == MemoryUse(750 * MIB, 1000 * MIB)


def test_with_an_own_limit_the_resident_memory_of_the_process_counts():
    use = memory_reader(1 << 40)()

    assert use.limit == 1 << 40
    assert 10 * MIB < use.used < 10_000 * MIB


def test_requests_are_shed_from_the_watermark_until_5_percent_below_it(caplog):
    shed: list[GatewayOverloaded | None] = []
    metrics = Metrics()
    watch = MemoryWatch(lambda: MemoryUse(0, 1), 0.8, shed.append, metrics, ManualClock())

    for used in (79, 80, 90, 77, 75, 79):
        watch.check(MemoryUse(used * MIB, 100 * MIB))

    assert [error and (error.status, error.error_code, error.retry_after_s) for error in shed] == [
        (503, "low_memory", 1),
        None,
    ]
    assert metrics.memory_share.labels().value == 0.79
    assert "80 of 100 MiB of memory are used (server.memory_watermark)" in caplog.text
    assert "new requests are served again: 75 MiB" in caplog.text


def test_descriptors_are_kept_for_workers_and_one_line_is_logged_in_10_seconds(caplog):
    clock, metrics = ManualClock(), Metrics()
    limit = DescriptorLimit(clock, metrics, 1000)

    assert (limit.refused_from, limit.closed_from) == (900, 950)
    for _ in range(3):
        limit.client_refused()
    limit.worker_unreachable("http://w: the gateway cannot open a connection (Too many open files)")

    assert metrics.out_of_descriptors.labels("client").value == 3
    assert metrics.out_of_descriptors.labels("worker").value == 1
    assert caplog.text.count("out of descriptors") == 1


def test_a_small_limit_keeps_at_least_16_descriptors(caplog):
    assert DescriptorLimit(ManualClock(), Metrics(), 64).refused_from == 48
