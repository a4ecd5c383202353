from __future__ import annotations

import os
import threading

import pytest

from gateway_machine import (
    TICKS_PER_S,
    CpuSample,
    cpu_sample,
    descendants,
    memory_mib,
    parse_busy_s,
    parse_kib,
    parse_schedstat,
    parse_stat,
    process_tree,
    spent,
)

STAT = (
    "4242 (a (b) c) S 17 4242 4242 0 -1 4194560 2047 0 0 0 {user} {system} 99 99 20 0 3 0 1234 56 78 "
    "18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 0"
)


def test_a_command_with_blanks_and_parentheses_does_not_shift_the_fields() -> None:
    """Of a process's CPU time, that of children that it has waited for (99 here) is not part."""
    found = parse_stat(STAT.format(user=TICKS_PER_S, system=2 * TICKS_PER_S))

    assert (found.parent, found.cpu_ns) == (17, 3_000_000_000)


def test_schedstat_begins_with_the_time_on_a_core() -> None:
    assert parse_schedstat("123456789 42 7\n") == 123456789


def test_memory_fields_are_found_by_their_whole_name() -> None:
    text = "VmRSSx:\t 1 kB\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"

    assert (parse_kib(text, "VmRSS"), parse_kib(text, "VmHWM"), parse_kib(text, "Pss")) == (1024, 2048, 0)


def test_busy_time_is_all_but_idle_and_waiting_for_disks() -> None:
    line = "cpu " + " ".join(str(TICKS_PER_S * part) for part in (1, 2, 3, 1000, 1000, 4, 5, 6, 0, 0))

    assert parse_busy_s(line + "\ncpu0 ...") == 21


def test_a_tree_is_a_process_and_all_below_it() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 20: 1, 21: 20}

    assert sorted(descendants(10, parents)) == [10, 11, 12]
    assert descendants(21, parents) == [21]


def test_threads_that_began_count_from_nothing() -> None:
    before = CpuSample({(5, 5): 100}, {5: 0})
    after = CpuSample({(5, 5): 150, (5, 6): 30}, {5: 0})

    assert (spent(before, after).all_ns, spent(before, after).main_ns) == (80, 50)


def test_cpu_time_of_an_ended_thread_is_taken_from_its_process() -> None:
    before = CpuSample({(5, 5): 100, (5, 6): 10}, {5: 1000})
    after = CpuSample({(5, 5): 150}, {5: 5000})

    assert (spent(before, after).all_ns, spent(before, after).main_ns) == (4000, 50)


def test_this_process_can_be_read() -> None:
    pids = process_tree(os.getpid())
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    before = cpu_sample(pids)
    sum(range(200_000))
    thread.start()
    after = cpu_sample(pids)
    done.set()
    thread.join()

    assert os.getpid() in pids
    assert spent(before, after).main_ns > 0
    assert len(after.threads) > len(before.threads)
    memory = memory_mib([os.getpid()])
    assert memory["peak_rss_mib"] >= memory["rss_mib"] == pytest.approx(memory["pss_mib"], rel=0.9) != 0
