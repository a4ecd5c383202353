"""The start, supervision and end of all processes, with fake servers as workers and gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.sockets import free_ports
from tests.support.waiting import until

from kvroute.clock import SystemClock
from kvroute.deploy.keeper import Keeper, ProcessPhase
from kvroute.deploy.plan import PlannedProcess, ProcessPlan
from kvroute.deploy.prepare import require_free_port
from kvroute.deploy.processes import ChildSpec, ProcessFailed
from kvroute.deploy.up import ready_text, run_plan, run_up
from kvroute.deploy.up_state import StateFolder

ServerArgv = Callable[..., tuple[str, ...]]
MakePlan = Callable[..., ProcessPlan]
FAILS = (1, (sys.executable, "-c", "raise SystemExit('out of memory')"))


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    folder.path.mkdir()
    return folder


@pytest.fixture
def make_plan(tmp_path: Path, server_argv: ServerArgv) -> MakePlan:
    """A plan of a cache, two stand-in workers and a gateway; a port and command given by name replaces
    one."""

    def make(**commands: tuple[int, tuple[str, ...]]) -> ProcessPlan:
        planned = []
        names = ("cache", "worker-0", "worker-1", "gateway")
        for name, free in zip(names, free_ports(len(names)), strict=True):
            port, argv = commands.get(name.replace("-", "_"), (free, server_argv(free)))
            child = ChildSpec(
                name, argv, dict(os.environ), tmp_path / "logs" / f"{name}.log", stop_grace_s=60.0
            )
            url = f"http://127.0.0.1:{port}"
            planned.append(PlannedProcess(child, url, f"{url}/health", 30.0))
        cache, *workers, gateway = planned
        return ProcessPlan(
            tuple(workers), gateway, "m", True, None, tmp_path, caches=((cache,),), name="demo"
        )

    return make


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def until_printed(console: Console, words: str, task: asyncio.Task[None]) -> None:
    await until(lambda: words in printed(console) or task.done(), within_s=30)


async def test_everything_comes_up_and_ctrl_c_ends_it(
    make_plan: MakePlan, console: Console, clock: SystemClock, state: StateFolder
) -> None:
    plan = make_plan()
    running = asyncio.create_task(run_up(lambda: asyncio.sleep(0, plan), state, console=console, clock=clock))
    await until_printed(console, "Ctrl-C ends everything", running)

    os.kill(os.getpid(), signal.SIGINT)
    await running

    text = printed(console)
    assert "starting 2 simulated worker(s)" in text
    assert f"gateway is ready: {plan.gateway.url}" in text
    assert "stopping" in text
    for process in (process for stage in plan.stages for process in stage):
        require_free_port("127.0.0.1", int(process.url.rsplit(":", 1)[1]))


async def test_a_cancellation_that_is_no_signal_is_passed_on(
    make_plan: MakePlan, console: Console, clock: SystemClock, state: StateFolder
) -> None:
    plan = make_plan()
    running = asyncio.create_task(run_up(lambda: asyncio.sleep(0, plan), state, console=console, clock=clock))
    await until_printed(console, "worker-0 is ready", running)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_second_signal_kills_processes_that_do_not_end(
    make_plan: MakePlan,
    server_argv: ServerArgv,
    console: Console,
    clock: SystemClock,
    state: StateFolder,
) -> None:
    (port,) = free_ports(1)
    plan = make_plan(worker_0=(port, server_argv(port, "stubborn")))
    running = asyncio.create_task(run_up(lambda: asyncio.sleep(0, plan), state, console=console, clock=clock))
    await until_printed(console, "worker-1 is ready", running)

    os.kill(os.getpid(), signal.SIGTERM)
    await until_printed(console, "stopping", running)
    os.kill(os.getpid(), signal.SIGTERM)

    await running


async def test_a_worker_that_does_not_come_up_ends_everything(
    make_plan: MakePlan, console: Console, clock: SystemClock, state: StateFolder
) -> None:
    keepers: list[Keeper] = []

    with pytest.raises(ProcessFailed, match="worker-1 ended with exit code 1 before it was ready"):
        await run_plan(make_plan(worker_1=FAILS), keepers, state, console=console, clock=clock)

    assert {keeper.status.phase for keeper in keepers} == {ProcessPhase.STOPPED}


async def test_a_gateway_that_does_not_come_up_ends_everything(
    make_plan: MakePlan, console: Console, clock: SystemClock, state: StateFolder
) -> None:
    keepers: list[Keeper] = []

    with pytest.raises(ProcessFailed, match="out of memory"):
        await run_plan(make_plan(gateway=FAILS), keepers, state, console=console, clock=clock)

    assert {keeper.status.phase for keeper in keepers} == {ProcessPhase.STOPPED}


async def test_a_worker_that_dies_is_reported_and_comes_back(
    make_plan: MakePlan,
    console: Console,
    clock: SystemClock,
    state: StateFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.deploy.keeper.FIRST_BACKOFF_S", 0.0)
    keepers: list[Keeper] = []
    running = asyncio.create_task(run_plan(make_plan(), keepers, state, console=console, clock=clock))
    await until_printed(console, "Ctrl-C ends everything", running)

    next(keeper for keeper in keepers if keeper.name == "worker-0").kill()
    await until_printed(console, "worker-0 is ready again", running)
    running.cancel()
    await asyncio.wait({running})

    assert "worker-0 ended with SIGKILL" in printed(console)


async def test_processes_that_depend_on_a_restarted_one_are_restarted(
    make_plan: MakePlan,
    console: Console,
    clock: SystemClock,
    state: StateFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.deploy.keeper.FIRST_BACKOFF_S", 0.0)
    plan = make_plan()
    first, second = plan.workers
    plan = replace(plan, workers=(replace(first, restart_with=("cache",)), second))
    keepers: list[Keeper] = []
    running = asyncio.create_task(run_plan(plan, keepers, state, console=console, clock=clock))
    await until_printed(console, "Ctrl-C ends everything", running)

    keepers[0].kill()
    await until_printed(console, "worker-0 is ready again", running)
    running.cancel()
    await asyncio.wait({running})

    assert "restarting worker-0, because cache was restarted" in printed(console)
    assert [keeper.status.restarts for keeper in keepers] == [1, 1, 0, 0]


def test_the_welcome_shows_a_first_request_and_whether_engines_are_simulated(make_plan: MakePlan) -> None:
    plan = make_plan()
    real = ProcessPlan(plan.workers, plan.gateway, "small", False, "small", plan.model_folder)
    served = ProcessPlan(plan.workers, plan.gateway, "org/model", False, None, plan.model_folder)

    assert "SIMULATED" in ready_text(plan)
    assert "random weights" in ready_text(real)
    assert "serve org/model" in ready_text(served)
    for part in (f"curl -i {plan.gateway.url}/v1/chat/completions", "/docs", "/metrics"):
        assert part in ready_text(plan)


def test_the_welcome_has_the_pages_address_with_the_key_only_if_it_is_given(
    make_plan: MakePlan,
) -> None:
    plan = make_plan()

    assert f"{plan.gateway.url}/ui#key=ADMIN-KEY" in ready_text(plan)
    assert f"{plan.gateway.url}/ui#key=secret" in ready_text(plan, "secret")
