"""Data-parallel ranks of workers, and what else their metrics say of their caches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.sleep import SleepFacts
from kvroute.fleet.worker import WorkerId, WorkerSpec, parse_metrics, rank_targets


def line(engine: int, caching: str = "True") -> str:
    labels = f'block_size="16",enable_prefix_caching="{caching}",engine="{engine}",num_gpu_blocks="100"'
    return f"vllm:cache_config_info{{{labels}}} 1.0\n"


def test_the_label_engine_gives_the_ranks_and_the_sizes_are_added():
    page = parse_metrics((line(1) + line(0)).encode())

    assert (page.ranks, page.capacity_tokens, page.caches_prefixes) == ((0, 1), 3200, True)


@pytest.mark.parametrize("page", ["", line(0), line(3), 'vllm:cache_config_info{block_size="16"} 1.0\n'])
def test_a_worker_with_one_engine_has_no_ranks(page):
    """Behind an external load balancer the only engine of a server may be rank 3."""
    assert parse_metrics(page.encode()).ranks == ()


@pytest.mark.parametrize(
    ("page", "caches"),
    [(line(0, "False"), False), (line(0) + line(1, "False"), False), (line(0, "None"), True), ("", True)],
)
def test_the_label_says_whether_prefixes_are_cached(page, caches):
    assert parse_metrics(page.encode()).caches_prefixes is caches


def test_absurd_numbers_of_engines_are_bounded():
    page = "".join(line(10**9 + number) for number in range(400)) + line(7)

    assert len(parse_metrics(page.encode()).ranks) <= 256


def state(name: str, value: float, engine: int = 0) -> str:
    return f'vllm:engine_sleep_state{{engine="{engine}",sleep_state="{name}"}} {value}\n'


AWAKE = state("awake", 1.0) + state("weights_offloaded", 0.0) + state("discard_all", 0.0)


@pytest.mark.parametrize(
    ("page", "facts"),
    [
        ("", SleepFacts()),
        (AWAKE, SleepFacts()),
        (state("awake", 0.0) + state("weights_offloaded", 1.0), SleepFacts(True, True)),
        (state("awake", 0.0) + state("discard_all", 1.0), SleepFacts(True, True)),
        (state("awake", 0.0) + state("discard_all", 0.0), SleepFacts(True, False)),
        (
            AWAKE
            + 'vllm:sleep_mode_operation_duration_seconds_count{operation="sleep"} 2.0\n'
            + 'vllm:sleep_mode_operation_duration_seconds_count{operation="wake"} 2.0\n'
            + 'vllm:rl_weight_update_operation_duration_seconds_count{operation="update"} 3.0\n'
            + 'vllm:rl_weight_update_operation_duration_seconds_count{operation="init"} 1.0\n',
            SleepFacts(operations=5),
        ),
    ],
)
def test_sleep_mode_and_new_weights_are_read_from_the_metrics(page, facts):
    assert parse_metrics(page.encode()).sleep == facts


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.apply("static", [WorkerSpec(WorkerId(name), f"http://{name}:8000", ("m",)) for name in "abc"])
    for worker in fleet.workers():
        fleet.mark_healthy(worker, 0.0)
    return fleet


def set_ranks(fleet: Fleet, name: str, *ranks: int) -> None:
    worker = fleet.get(name)
    fleet.update_facts(worker, replace(worker.facts, ranks=ranks))


def test_every_rank_has_a_unit_of_its_own_and_views_follow(fleet):
    before = fleet.view("m")
    changes: list[tuple[FleetChange, str]] = []
    fleet.subscribe(lambda change, worker: changes.append((change, worker.id)))

    set_ranks(fleet, "b", 0, 1)
    set_ranks(fleet, "c", 0, 1, 2)

    units = [unit for worker in fleet.workers() for unit in worker.units]
    assert len(units) == len(set(units)) == 8
    view = fleet.view("m")
    assert before.by_rank is None
    assert view.by_rank is not None
    targets = [
        (worker.id, rank) for worker, rank in zip(view.by_rank.workers, view.by_rank.ranks, strict=True)
    ]
    assert targets == [("a", None), ("b", 0), ("b", 1), ("c", 0), ("c", 1), ("c", 2)]
    assert view.by_rank.loads[1] is fleet.get("b").load_of(0)
    assert [worker.index for worker in view.workers] == [0, 1, 2]
    assert {
        view.workers[position].id for unit, position in view.positions.items() if unit in fleet.get("c").units
    } == {"c"}
    assert changes == [(FleetChange.CAPACITY, "b"), (FleetChange.CAPACITY, "c")]


def test_units_of_ranks_that_are_gone_are_used_again(fleet):
    set_ranks(fleet, "a", 0, 1, 2, 3)
    most = max(fleet.get("a").units)
    set_ranks(fleet, "a")

    set_ranks(fleet, "b", 0, 1)

    assert max(fleet.get("b").units) < most
    assert fleet.get("a").units == (0,)
    set_ranks(fleet, "b")
    assert fleet.view("m").by_rank is None


def test_a_chosen_rank_leaves_one_target_for_each_worker(fleet):
    set_ranks(fleet, "b", 0, 1)

    targets = rank_targets(fleet.workers(), 1)

    assert list(targets.ranks) == [None, 1, None]
    assert list(targets.units) == [0, fleet.get("b").unit_of(1), 2]
    assert list(rank_targets(fleet.workers(), 7).ranks) == [None, None, None]


def test_a_view_knows_whether_any_worker_caches_prefixes(fleet):
    for number, worker in enumerate(fleet.workers()):
        assert fleet.view("m").caches_prefixes, number
        fleet.update_facts(worker, replace(worker.facts, caches_prefixes=False))

    assert not fleet.view("m").caches_prefixes
