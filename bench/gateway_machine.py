"""Read CPU time and memory of process trees, the load of other processes and the machine from Linux."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Stat:
    """From `/proc/PID/stat`: the parent, and CPU time in whole ticks of all threads, including ended ones."""

    parent: int
    cpu_ns: int


def parse_stat(text: str) -> Stat:
    """Parse one line; the command in parentheses may contain blanks and parentheses."""
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(int(fields[1]), (int(fields[11]) + int(fields[12])) * 1_000_000_000 // TICKS_PER_S)


def parse_schedstat(text: str) -> int:
    """Nanoseconds that a thread ran, from `/proc/PID/task/TID/schedstat`."""
    return int(text.split()[0])


def parse_kib(text: str, field: str) -> int:
    """A field of `/proc/PID/status` or `smaps_rollup`, in KiB; 0 if the file does not have the field."""
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def parse_busy_s(text: str) -> float:
    """CPU seconds that the whole machine was not idle, from `/proc/stat`."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.splitlines()[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """`root` and all its descendants; `parents` has the parent of each process."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return None


def process_tree(root: int) -> list[int]:
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit() and (text := _read(folder / "stat")):
            parents[int(folder.name)] = parse_stat(text).parent
    return descendants(root, parents)


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU time of a process tree at one moment: nanoseconds by thread, and whole ticks by process."""

    threads: Mapping[tuple[int, int], int]
    processes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CpuSpent:
    """CPU nanoseconds between two samples; `main_ns` is that of each process's first thread."""

    all_ns: int
    main_ns: int


def cpu_sample(pids: Iterable[int]) -> CpuSample:
    threads, processes = {}, {}
    for pid in pids:
        if text := _read(PROC / str(pid) / "stat"):
            processes[pid] = parse_stat(text).cpu_ns
        try:
            tasks = [int(name) for name in os.listdir(PROC / str(pid) / "task")]
        except OSError:
            continue
        for task in tasks:
            if text := _read(PROC / str(pid) / "task" / str(task) / "schedstat"):
                threads[pid, task] = parse_schedstat(text)
    return CpuSample(threads, processes)


def spent(before: CpuSample, after: CpuSample) -> CpuSpent:
    """Difference of two samples, from the threads, in nanoseconds. The time of threads that ended in between
    is only in the ticks, so with such threads the larger of both values is used."""
    by_thread = {key: ns - before.threads.get(key, 0) for key, ns in after.threads.items()}
    total = sum(by_thread.values())
    if before.threads.keys() - after.threads.keys():
        by_process = (ns - before.processes.get(pid, 0) for pid, ns in after.processes.items())
        total = max(total, sum(by_process))
    return CpuSpent(total, sum(ns for (pid, task), ns in by_thread.items() if pid == task))


def memory_mib(pids: Iterable[int]) -> dict[str, float]:
    """Resident memory, its peak and its proportional share, summed over the processes."""
    now = peak = shared = 0
    for pid in pids:
        status = _read(PROC / str(pid) / "status") or ""
        now += parse_kib(status, "VmRSS")
        peak += parse_kib(status, "VmHWM")
        shared += parse_kib(_read(PROC / str(pid) / "smaps_rollup") or "", "Pss")
    return {"rss_mib": now / 1024, "peak_rss_mib": peak / 1024, "pss_mib": shared / 1024}


def busy_s() -> float:
    return parse_busy_s((PROC / "stat").read_text())


def describe() -> dict[str, object]:
    """The machine, for the results file."""
    info = (PROC / "cpuinfo").read_text()
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(parse_kib((PROC / "meminfo").read_text(), "MemTotal") / 1024 / 1024, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_is_shared_library": bool(sysconfig.get_config_var("Py_ENABLE_SHARED")),
    }
