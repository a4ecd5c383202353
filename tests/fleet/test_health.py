from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.fleet.fleet import Fleet, FleetChange
from kvroute.fleet.health import HealthMonitor
from kvroute.fleet.options import HealthOptions
from kvroute.fleet.probe import Prober, probe_client
from kvroute.fleet.worker import Ejection, HealthState, Worker, WorkerId, WorkerSpec

HEALTHY, UNHEALTHY, UNKNOWN = HealthState.HEALTHY, HealthState.UNHEALTHY, HealthState.UNKNOWN


def spec(worker_id: str, **more: Any) -> WorkerSpec:
    return WorkerSpec(WorkerId(worker_id), f"http://{worker_id}", **more)


class Watched:
    """A fleet of fake workers under a monitor in virtual time."""

    def __init__(
        self, clock: Any, network: Any, client: httpx.AsyncClient, running: Callable[..., Any]
    ) -> None:
        self.clock = clock
        self.network = network
        self.client = client
        self.running = running
        self.fleet = Fleet()
        self.changes: list[tuple[FleetChange, str]] = []
        self.monitor: HealthMonitor

    async def start(self, *ids: str, isolates: bool = False, **options: Any) -> None:
        self.fleet.apply("static", [spec(worker_id) for worker_id in ids])
        options = {"jitter": 0.0, **options}
        health = HealthOptions(**options)
        prober = Prober(self.client, timeout_s=health.timeout_s, path=health.path)
        self.monitor = HealthMonitor(
            self.fleet, prober, self.clock, health, isolates=isolates, rng=random.Random(1)
        )
        self.fleet.subscribe(lambda change, worker: self.changes.append((change, worker.id)))
        self.task = self.running(self.monitor.run())
        await self.clock.settle()

    def __getitem__(self, worker_id: str) -> Worker:
        return self.fleet.get(worker_id)

    def asked(self, worker_id: str, path: str = "/health") -> int:
        return int(self.network[worker_id].asked.count(path))

    async def until(self, worker_id: str, state: HealthState, within_s: float) -> float:
        """Virtual seconds until the worker is in `state`."""
        start = self.clock.now()
        while self[worker_id].state is not state:
            assert self.clock.now() - start < within_s, self[worker_id].state
            await self.clock.advance(0.05)
        return float(self.clock.now() - start)


@pytest.fixture
def watched(clock: Any, network: Any, client: httpx.AsyncClient, running: Callable[..., Any]) -> Watched:
    return Watched(clock, network, client, running)


# Active probes


async def test_one_passed_probe_makes_an_unknown_worker_healthy_without_any_wait(watched: Watched) -> None:
    await watched.start("a", "b")

    assert [worker.state for worker in watched.fleet.workers()] == [HEALTHY, HEALTHY]
    assert watched["a"].share_at(watched.clock.now()) == 1.0


async def test_models_and_capacity_are_known_before_the_first_request(watched: Watched) -> None:
    seen: list[tuple[str, ...]] = []

    def listener(change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.STATE:
            seen.append((*sorted(worker.models), str(worker.capacity_tokens), str(worker.block_size)))

    watched.fleet.subscribe(listener)
    await watched.start("a")

    assert seen == [("m", "1600", "16")]


async def test_a_worker_that_joins_later_is_probed_immediately(watched: Watched) -> None:
    await watched.start("a")

    watched.fleet.add(spec("b"))
    await watched.clock.settle()

    assert watched["b"].state is HEALTHY


async def test_a_worker_that_left_is_probed_no_more(watched: Watched) -> None:
    await watched.start("a", "b")
    watched.fleet.remove("a")
    asked = watched.asked("a")

    await watched.clock.advance(5.0)

    assert watched.asked("a") == asked
    assert watched.asked("b") > asked


async def test_leaving_in_the_middle_of_a_probe_ends_it(watched: Watched) -> None:
    watched.network["a"].hangs = True
    await watched.start("a", "b")
    assert watched.asked("a") == 1

    watched.fleet.remove("a")
    await watched.clock.settle()

    assert not watched.task.done()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "probe a"] == []


async def test_a_healthy_worker_is_probed_once_per_interval(watched: Watched) -> None:
    await watched.start("a", interval_s=1.0)

    await watched.clock.advance(10.0)

    assert watched.asked("a") == 11


async def test_probes_of_several_workers_do_not_march_in_step(watched: Watched) -> None:
    await watched.start("a", "b", jitter=0.1)
    times: dict[str, list[float]] = {"a": [], "b": []}

    for _ in range(100):
        before = {worker_id: watched.asked(worker_id) for worker_id in times}
        await watched.clock.advance(0.05)
        for worker_id, count in before.items():
            if watched.asked(worker_id) > count:
                times[worker_id].append(watched.clock.now())

    assert times["a"] != times["b"]
    assert all(4 <= len(when) <= 6 for when in times.values())


async def test_three_failed_probes_in_a_row_eject(watched: Watched) -> None:
    await watched.start("a")
    watched.network["a"].health = 503

    await watched.clock.advance(2.0)
    assert watched["a"].state is HEALTHY
    await watched.clock.advance(1.0)

    assert watched["a"].state is UNHEALTHY
    assert (watched["a"].ejection, watched["a"].trouble) == (Ejection.PROBES, "/health answered 503")
    assert watched.monitor.counts.ejections == {("a", Ejection.PROBES): 1}
    assert watched.monitor.counts.probe_failures == {"a": 3}


async def test_single_failed_probes_do_no_harm(watched: Watched) -> None:
    await watched.start("a")

    for _ in range(4):
        watched.network["a"].health = 500
        await watched.clock.advance(2.0)
        watched.network["a"].health = 200
        await watched.clock.advance(1.0)

    assert watched["a"].state is HEALTHY
    assert watched.monitor.counts.probe_failures["a"] == 8


async def test_a_hanging_worker_is_ejected(watched: Watched) -> None:
    """The deadline of a probe is real time: it is a wait on the outside world."""
    watched.network["a"].hangs = True
    await watched.start("a", "b", timeout_s=0.01, failures_to_eject=1)

    await until(lambda: watched["a"].state is UNHEALTHY, within_s=5)

    assert watched["b"].state is HEALTHY
    assert "no answer within" in watched["a"].trouble


async def test_a_worker_that_refuses_a_probe_is_ejected_immediately_and_returns_within_two_seconds(
    watched: Watched,
) -> None:
    await watched.start("a", "b")
    watched.network["a"].refuses = True

    await watched.clock.advance(1.0)
    assert watched["a"].state is UNHEALTHY
    assert watched["a"].ejection is Ejection.REFUSED
    await watched.clock.advance(60.0)
    watched.network["a"].refuses = False

    assert await watched.until("a", HEALTHY, within_s=2.0) <= 1.0


async def test_a_starting_worker_is_probed_often_at_first_then_less(watched: Watched) -> None:
    watched.network["a"].refuses = True
    await watched.start("a", recheck_s=0.25, interval_s=1.0)

    await watched.clock.advance(1.0)
    early = watched.asked("a")
    await watched.clock.advance(60.0)

    assert early >= 4
    assert watched.asked("a") - early <= 62
    assert watched["a"].state is UNHEALTHY
    assert watched.monitor.counts.ejections == {}


async def test_a_worker_that_was_never_up_gets_its_full_share_when_it_comes(watched: Watched) -> None:
    watched.network["a"].refuses = True
    await watched.start("a")
    await watched.clock.advance(30.0)
    watched.network["a"].refuses = False

    await watched.until("a", HEALTHY, within_s=2.0)

    assert watched["a"].share_at(watched.clock.now()) == 1.0


async def test_a_worker_that_is_back_ramps_up(watched: Watched) -> None:
    await watched.start("a", ramp_start=0.1, ramp_s=10.0)
    watched.network["a"].refuses = True
    await watched.clock.advance(1.0)
    watched.network["a"].refuses = False
    await watched.until("a", HEALTHY, within_s=2.0)
    back = watched.clock.now()

    assert watched["a"].share_at(back) == pytest.approx(0.1, abs=0.01)
    await watched.clock.advance(5.0)
    assert watched["a"].share == pytest.approx(0.55, abs=0.1), "refreshed by probes"
    await watched.clock.advance(6.0)
    assert watched["a"].share == 1.0


async def test_a_draining_worker_is_probed_on(watched: Watched) -> None:
    await watched.start("a")
    watched.fleet.drain("a")
    watched.network["a"].health = 500

    await watched.clock.advance(5.0)

    assert watched["a"].state is HealthState.DRAINING
    watched.fleet.undrain("a")
    assert watched["a"].state is UNHEALTHY


async def test_an_error_of_our_own_counts_as_a_failed_probe_and_ends_nothing(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.start("a", "b")

    def broken(change: FleetChange, worker: Worker) -> None:
        if change is FleetChange.CAPACITY:
            raise RuntimeError("a bug")

    watched.fleet.subscribe(broken)
    watched.network["a"].blocks = 7
    await watched.clock.advance(6.0)

    assert watched.monitor.counts.probe_failures == {"a": 1}
    assert "probing worker a failed" in caplog.text
    assert watched["b"].state is HEALTHY
    assert not watched.task.done()


async def test_stopping_leaves_no_task_behind(watched: Watched) -> None:
    watched.network["b"].hangs = True
    await watched.start("a", "b", "c")
    await watched.clock.advance(0.5)

    watched.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watched.task

    assert asyncio.all_tasks() == {asyncio.current_task()}
    watched.fleet.add(spec("d"))
    assert asyncio.all_tasks() == {asyncio.current_task()}


# Facts


async def test_adapters_loaded_at_run_time_are_seen_within_the_models_interval(watched: Watched) -> None:
    await watched.start("a", models_interval_s=10.0)
    watched.network["a"].models.append({"id": "sql", "parent": "m"})

    await watched.clock.advance(9.0)
    assert not watched["a"].serves("sql")
    await watched.clock.advance(2.0)

    assert watched["a"].serves("sql")
    assert watched["a"].facts.adapters == (("sql", "m"),)
    assert watched.asked("a", "/v1/models") == 2


async def test_facts_outlive_a_page_that_fails(watched: Watched) -> None:
    await watched.start("a")
    watched.network["a"].models = None
    watched.network["a"].metrics_status = 500

    await watched.clock.advance(30.0)

    assert watched["a"].state is HEALTHY
    assert (watched["a"].models, watched["a"].capacity_tokens) == ({"m"}, 1600)


async def test_unreadable_models_are_requested_with_every_probe_and_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.network["a"].models = None
    await watched.start("a")
    await watched.clock.advance(3.0)

    assert watched["a"].state is HEALTHY
    assert watched.fleet.reasons_not_ready() != []
    assert caplog.text.count("does not report its models") == 1
    watched.network["a"].models = [{"id": "m"}]
    await watched.clock.advance(1.0)
    assert watched.fleet.reasons_not_ready() == []


async def test_configured_models_are_used_if_the_worker_lists_none(watched: Watched) -> None:
    watched.network["a"].models = None
    await watched.start()
    watched.fleet.apply("static", [spec("a", models=("configured",))])
    await watched.clock.settle()

    assert [worker.id for worker in watched.fleet.view("configured").workers] == ["a"]


async def test_the_engines_queue_has_the_time_when_it_was_asked_for(watched: Watched) -> None:
    await watched.start("a", metrics_interval_s=5.0)
    assert watched["a"].engine_queue is None
    watched.network["a"].waiting = 4
    start = watched.clock.now()

    await watched.clock.advance(6.0)

    queue = watched["a"].engine_queue
    assert queue is not None
    assert queue.waiting == 4
    assert start + 4 < queue.at < watched.clock.now()
    watched.network["a"].waiting = None
    await watched.clock.advance(6.0)
    assert watched["a"].engine_queue is None


async def test_a_worker_without_metrics_is_healthy_with_an_assumed_capacity(watched: Watched) -> None:
    watched.network["a"].metrics_status = 404
    await watched.start("a")

    assert watched["a"].state is HEALTHY
    assert watched["a"].capacity_tokens == 500_000
    assert watched["a"].block_size == 16


# Restarts


@pytest.mark.parametrize(
    ("version", "shown"),
    [("0.19.0", "vLLM 0.19.0"), ("0.8.5.post1", "vLLM 0.8.5"), ("dev", "a worker of an unknown release")],
)
async def test_with_isolation_a_worker_that_may_ignore_salts_gets_no_requests(
    watched: Watched, caplog: pytest.LogCaptureFixture, version: str, shown: str
) -> None:
    watched.network["old"].version = version
    await watched.start("new", "old", isolates=True)

    assert (watched["new"].state, watched["old"].state) == (HEALTHY, UNHEALTHY)
    assert watched["old"].ejection is Ejection.NOT_ISOLATED
    trouble = f"{shown} may ignore `cache_salt`: server.isolation needs vLLM 0.19.1 or newer"
    assert watched.fleet.problems() == [f"Worker old is unhealthy: {trouble}."]
    assert f"worker old is unhealthy: {trouble}" in caplog.messages

    watched.network["old"].version = "0.19.1"
    await watched.until("old", HEALTHY, within_s=30.0)
    assert watched["old"].ejection is None


async def test_an_older_release_at_the_same_address_is_ejected_with_the_next_probe_even_if_it_is_the_last(
    watched: Watched,
) -> None:
    await watched.start("a", isolates=True, interval_s=5.0)
    watched.network["a"].version = "0.11.0"

    await watched.clock.advance(5.0)

    assert watched["a"].state is UNHEALTHY
    assert watched.monitor.counts.ejections[WorkerId("a"), Ejection.NOT_ISOLATED] == 1


async def test_a_worker_that_returns_with_an_older_release_names_the_release_as_its_trouble(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    await watched.start("a", isolates=True)
    watched.network["a"].refuses = True
    watched.monitor.report_refused(watched["a"])
    assert watched["a"].trouble == "connection refused"
    watched.network["a"].refuses = False
    watched.network["a"].version = "0.11.0"

    await watched.clock.advance(10.0)

    assert watched["a"].trouble.startswith("vLLM 0.11.0 may ignore")
    assert sum("vLLM 0.11.0 may ignore" in message for message in caplog.messages) == 1


async def test_without_isolation_no_worker_is_asked_for_its_release(watched: Watched) -> None:
    watched.network["a"].version = "0.11.0"
    await watched.start("a")

    assert watched["a"].state is HEALTHY
    assert watched.asked("a", "/version") == 0


async def test_a_new_start_time_is_a_restart(watched: Watched) -> None:
    await watched.start("a", metrics_interval_s=5.0)
    watched.changes.clear()
    watched.network["a"].start_time = 6000.0
    watched.network["a"].models = [{"id": "n"}]

    await watched.clock.advance(6.0)

    assert watched.changes == [(FleetChange.RESTARTED, "a"), (FleetChange.MODELS, "a")]
    assert watched["a"].state is HEALTHY
    assert watched["a"].models == {"n"}, "read again because of the restart"


async def test_a_restart_after_a_refusal_is_reported_before_the_worker_is_routable(watched: Watched) -> None:
    await watched.start("a")
    watched.changes.clear()
    watched.monitor.report_refused(watched["a"])
    watched.network["a"].start_time = 6000.0

    await watched.until("a", HEALTHY, within_s=2.0)

    kinds = [change for change, _ in watched.changes]
    assert kinds == [FleetChange.STATE, FleetChange.EJECTED, FleetChange.RESTARTED, FleetChange.STATE]


async def test_the_same_start_time_after_a_refusal_is_no_restart(watched: Watched) -> None:
    await watched.start("a")
    watched.monitor.report_refused(watched["a"])
    await watched.until("a", HEALTHY, within_s=2.0)
    await watched.clock.advance(30.0)

    assert (FleetChange.RESTARTED, "a") not in watched.changes


@pytest.mark.parametrize("metrics", ["without start time", "unreadable"])
async def test_a_refusal_counts_as_a_restart_if_the_start_time_is_unknown(
    watched: Watched, metrics: str
) -> None:
    watched.network["a"].start_time = None
    if metrics == "unreadable":
        watched.network["a"].metrics_status = 500
    await watched.start("a")
    watched.monitor.report_refused(watched["a"])

    await watched.until("a", HEALTHY, within_s=2.0)
    await watched.clock.advance(30.0)

    assert watched.changes.count((FleetChange.RESTARTED, "a")) == 1


async def test_a_worker_seen_for_the_first_time_has_not_restarted(watched: Watched) -> None:
    watched.network["a"].refuses = True
    watched.network["b"].metrics_status = 500
    await watched.start("a", "b")
    await watched.clock.advance(3.0)
    watched.network["a"].refuses = False
    watched.network["b"].metrics_status = 200

    await watched.clock.advance(10.0)

    assert watched["a"].facts.start_time == watched["b"].facts.start_time == 5000.0
    assert FleetChange.RESTARTED not in [change for change, _ in watched.changes]


# Reports from requests of clients


async def test_a_refused_request_ejects_immediately_until_the_next_passed_probe(
    watched: Watched,
) -> None:
    await watched.start("a", "b")

    watched.monitor.report_failure(watched["a"], "refused")

    assert watched["a"].state is UNHEALTHY
    assert watched.fleet.view("m").workers == (watched["b"],)
    assert await watched.until("a", HEALTHY, within_s=1.0) <= 0.3
    assert watched.monitor.counts.ejections == {("a", Ejection.REFUSED): 1}


async def test_a_refusal_ejects_even_the_last_worker(watched: Watched) -> None:
    await watched.start("a")

    watched.monitor.report_refused(watched["a"])

    assert watched["a"].state is UNHEALTHY


async def test_a_probe_that_started_before_the_ejection_does_not_undo_it(watched: Watched) -> None:
    await watched.start("a", "b")
    gate = asyncio.Event()
    answer = watched.network["a"].answer

    async def slow(request: httpx.Request) -> httpx.Response:
        await gate.wait()
        return await answer(request)

    watched.network["a"].answer = slow
    await watched.clock.advance(1.0)  # a probe is in flight
    watched.monitor.report_refused(watched["a"])

    gate.set()
    await watched.clock.settle()

    assert watched["a"].state is UNHEALTHY
    await watched.clock.advance(0.3)
    assert watched["a"].state is HEALTHY


def fail(watched: Watched, worker_id: str, times: int, status: int = 500) -> None:
    for _ in range(times):
        watched.monitor.report_status(watched[worker_id], status)


async def test_a_burst_of_5xx_ejects_for_a_growing_time(watched: Watched) -> None:
    await watched.start("a", "b", burst_failures=5, backoff_s=1.0, backoff_max_s=60.0)
    stays = []

    for _ in range(4):
        fail(watched, "a", 4)
        assert watched["a"].state is HEALTHY
        fail(watched, "a", 1, 502)
        assert watched["a"].state is UNHEALTHY
        stays.append(await watched.until("a", HEALTHY, within_s=20.0))

    assert stays == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=0.06)
    assert watched.monitor.counts.ejections == {("a", Ejection.BURST): 4}


async def test_after_the_backoff_a_probe_must_pass(watched: Watched) -> None:
    await watched.start("a", "b", backoff_s=1.0)
    fail(watched, "a", 5)
    asked = watched.asked("a")
    await watched.clock.advance(0.9)
    assert watched.asked("a") == asked, "not bothered while it is out"

    watched.network["a"].health = 500
    await watched.clock.advance(10.0)

    assert watched["a"].state is UNHEALTHY
    watched.network["a"].health = 200
    assert await watched.until("a", HEALTHY, within_s=2.0) <= 1.0


@pytest.mark.parametrize("status", [200, 400, 404, 422, 429, 499, 501])
async def test_failures_that_are_not_the_workers_fault_never_eject(watched: Watched, status: int) -> None:
    await watched.start("a", "b")

    fail(watched, "a", 1000, status)

    assert watched["a"].state is HEALTHY


async def test_bursts_do_not_empty_the_fleet(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """A request that makes any worker fail, repeated, must not take the whole service down."""
    await watched.start("a", "b", "c", "d", max_ejected_share=0.5)

    for worker_id in "abcd":
        fail(watched, worker_id, 5)

    assert [worker.id for worker in watched.fleet.view("m").workers] == ["c", "d"]
    assert watched.monitor.counts.held_back == 2
    assert "too few other workers are routable" in caplog.text


async def test_workers_of_other_models_are_no_reserve(watched: Watched) -> None:
    for worker_id in "bcd":
        watched.network[worker_id].models = [{"id": "other"}]
    await watched.start("a", "b", "c", "d")

    fail(watched, "a", 5)

    assert watched["a"].state is HEALTHY


async def test_even_the_last_worker_goes_if_so_configured(watched: Watched) -> None:
    await watched.start("a", max_ejected_share=1.0)

    fail(watched, "a", 5)

    assert watched["a"].state is UNHEALTHY


async def test_a_connect_timeout_ejects_unless_too_few_would_be_left(watched: Watched) -> None:
    await watched.start("a", "b")

    watched.monitor.report_failure(watched["a"], "connect_timeout")
    watched.monitor.report_failure(watched["b"], "connect_timeout")

    assert watched["a"].ejection is Ejection.CONNECT_TIMEOUT
    assert watched["b"].state is HEALTHY


async def test_lost_connections_count_as_failures_and_have_the_worker_probed_now(watched: Watched) -> None:
    await watched.start("a", "b")
    await watched.clock.advance(0.1)
    asked = watched.asked("a")

    watched.monitor.report_failure(watched["a"], "connection_lost")
    await watched.clock.advance(0.3)
    assert watched.asked("a") == asked + 1
    assert watched.asked("a", "/metrics") == 2, "it may be a new process"

    for _ in range(4):
        watched.monitor.report_failure(watched["a"], "response_timeout")
    assert watched["a"].ejection is Ejection.BURST
    assert watched["a"].trouble.endswith("response timeout")


async def test_reports_about_a_worker_that_left_are_ignored(watched: Watched) -> None:
    await watched.start("a")
    old = watched["a"]
    watched.fleet.apply("static", [WorkerSpec(WorkerId("a"), "http://elsewhere")])
    await watched.clock.settle()

    for _ in range(10):
        watched.monitor.report_status(old, 500)
        watched.monitor.report_failure(old, "connection_lost")
    watched.monitor.report_refused(old)

    assert watched["a"].state is HEALTHY


async def test_figures_of_a_worker_that_left_are_dropped(watched: Watched) -> None:
    await watched.start("a")
    watched.monitor.report_refused(watched["a"])
    watched.network["a"].health = 500
    await watched.clock.advance(1.0)

    watched.fleet.remove("a")

    assert not watched.monitor.counts.ejections
    assert not watched.monitor.counts.probe_failures


async def test_reports_count_before_the_first_probe(clock: Any, client: httpx.AsyncClient) -> None:
    fleet = Fleet()
    fleet.apply("static", [spec("a")])
    monitor = HealthMonitor(fleet, Prober(client, timeout_s=1.0), clock, HealthOptions())
    fleet.mark_healthy(fleet.get("a"), 0.0)

    monitor.report_refused(fleet.get("a"))

    assert fleet.get("a").state is UNHEALTHY


# Over real sockets


async def test_a_real_server_going_and_coming_back_is_followed(
    serve: Any, running: Callable[..., Any]
) -> None:
    fleet = Fleet()
    reached = {state: asyncio.Event() for state in HealthState}
    fleet.subscribe(lambda change, worker: reached[worker.state].set())
    health = HealthOptions(interval_s=0.02, recheck_s=0.02, ramp_s=0.0)
    answers = {"/v1/models": b'{"data": [{"id": "m"}]}', "/metrics": b"process_start_time_seconds 1\n"}

    def handle(path: str, head: bytes) -> tuple[int, bytes]:
        return 200, answers.get(path, b"")

    async with probe_client() as client, asyncio.timeout(20):
        running(HealthMonitor(fleet, Prober(client, timeout_s=5.0), SystemClock(), health).run())
        async with serve(handle) as url:
            fleet.apply("static", [WorkerSpec(WorkerId("a"), url)])
            await reached[HEALTHY].wait()
            assert fleet.resolve(None) == "m"
            reached[HEALTHY].clear()
        await reached[UNHEALTHY].wait()
        async with serve(handle, port=int(url.rpartition(":")[2])):
            await reached[HEALTHY].wait()

    assert fleet.get("a").is_routable
