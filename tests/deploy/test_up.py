"""The orchestration with stand-in servers in the place of workers and gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvroute.cli.up import up
from kvroute.clock import SystemClock
from kvroute.deploy import up as up_module
from kvroute.deploy.engine_install import EngineVenv
from kvroute.deploy.keeper import Keeper, Phase
from kvroute.deploy.plan import Engine, Plan, PlannedProcess, UpSpec
from kvroute.deploy.processes import ChildSpec, ProcessFailed
from kvroute.deploy.up import free_ports, prepare, require_free_port, run_plan, run_up, welcome
from kvroute.errors import ConfigError

ServerArgv = Callable[..., tuple[str, ...]]
MakePlan = Callable[..., Plan]
FAILS = (1, (sys.executable, "-c", "raise SystemExit('out of memory')"))


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture
def make_plan(tmp_path: Path, server_argv: ServerArgv) -> MakePlan:
    """A plan of two stand-in workers and a gateway; a port and command given by name replaces one."""

    def make(**commands: tuple[int, tuple[str, ...]]) -> Plan:
        planned = []
        for name, free in zip(("worker-0", "worker-1", "gateway"), free_ports(3), strict=True):
            port, argv = commands.get(name.replace("-", "_"), (free, server_argv(free)))
            child = ChildSpec(
                name, argv, dict(os.environ), tmp_path / "logs" / f"{name}.log", stop_grace_s=60.0
            )
            url = f"http://127.0.0.1:{port}"
            planned.append(PlannedProcess(child, url, f"{url}/health", 30.0))
        return Plan((planned[0], planned[1]), planned[2], "m", True, None, tmp_path)

    return make


def said(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def until_said(console: Console, words: str, task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(30):
        while words not in said(console) and not task.done():
            await asyncio.sleep(0.01)


async def test_everything_comes_up_and_ctrl_c_ends_it(
    make_plan: MakePlan, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    monkeypatch.setattr(up_module, "prepare", lambda *_, **__: asyncio.sleep(0, plan))
    running = asyncio.create_task(run_up(UpSpec(), console=console, clock=clock))
    await until_said(console, "Ctrl-C ends everything", running)

    os.kill(os.getpid(), signal.SIGINT)
    await running

    text = said(console)
    assert "starting 2 simulated worker(s)" in text
    assert f"gateway is ready: {plan.gateway.url}" in text
    assert "stopping" in text
    for process in (*plan.workers, plan.gateway):
        require_free_port("127.0.0.1", int(process.url.rsplit(":", 1)[1]))


async def test_a_cancellation_that_is_no_signal_is_passed_on(
    make_plan: MakePlan, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    monkeypatch.setattr(up_module, "prepare", lambda *_, **__: asyncio.sleep(0, plan))
    running = asyncio.create_task(run_up(UpSpec(), console=console, clock=clock))
    await until_said(console, "worker-0 is ready", running)

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_second_signal_kills_what_does_not_end(
    make_plan: MakePlan,
    server_argv: ServerArgv,
    console: Console,
    clock: SystemClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (port,) = free_ports(1)
    plan = make_plan(worker_0=(port, server_argv(port, "stubborn")))
    monkeypatch.setattr(up_module, "prepare", lambda *_, **__: asyncio.sleep(0, plan))
    running = asyncio.create_task(run_up(UpSpec(), console=console, clock=clock))
    await until_said(console, "worker-1 is ready", running)

    os.kill(os.getpid(), signal.SIGTERM)
    await until_said(console, "stopping", running)
    os.kill(os.getpid(), signal.SIGTERM)

    await running


async def test_a_worker_that_does_not_come_up_ends_everything(
    make_plan: MakePlan, console: Console, clock: SystemClock
) -> None:
    keepers: list[Keeper] = []

    with pytest.raises(ProcessFailed, match="worker-1 ended with exit code 1 before it was ready"):
        await run_plan(make_plan(worker_1=FAILS), keepers, console=console, clock=clock)

    assert {keeper.status.phase for keeper in keepers} == {Phase.STOPPED}


async def test_a_gateway_that_does_not_come_up_ends_everything(
    make_plan: MakePlan, console: Console, clock: SystemClock
) -> None:
    keepers: list[Keeper] = []

    with pytest.raises(ProcessFailed, match="out of memory"):
        await run_plan(make_plan(gateway=FAILS), keepers, console=console, clock=clock)

    assert {keeper.status.phase for keeper in keepers} == {Phase.STOPPED}


async def test_a_worker_that_dies_is_reported_and_comes_back(
    make_plan: MakePlan, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.deploy.keeper.FIRST_BACKOFF_S", 0.0)
    keepers: list[Keeper] = []
    running = asyncio.create_task(run_plan(make_plan(), keepers, console=console, clock=clock))
    await until_said(console, "Ctrl-C ends everything", running)

    keepers[0].kill()
    await until_said(console, "worker-0 is ready again", running)
    running.cancel()
    await asyncio.wait({running})

    assert "worker-0 ended with SIGKILL" in said(console)


def test_the_welcome_says_what_to_try_and_what_is_real(make_plan: MakePlan) -> None:
    plan = make_plan()
    real = Plan(plan.workers, plan.gateway, "small", False, "small", plan.model_folder)
    served = Plan(plan.workers, plan.gateway, "org/model", False, None, plan.model_folder)

    assert "SIMULATED" in welcome(plan)
    assert "random weights" in welcome(real)
    assert "serve org/model" in welcome(served)
    for part in (f"curl {plan.gateway.url}/v1/chat/completions", "/docs", "/metrics"):
        assert part in welcome(plan)


def test_a_taken_port_is_told_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            require_free_port(*taken.getsockname())


def test_free_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


async def test_preparing_simulated_workers_needs_nothing(console: Console, clock: SystemClock) -> None:
    plan = await prepare(UpSpec(port=free_ports(1)[0]), console=console, clock=clock)

    assert plan.simulated
    assert said(console) == ""


async def test_preparing_cpu_engines_installs_them_and_writes_the_model(
    tmp_path: Path, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def installed(path: Path, **_: object) -> EngineVenv:
        return EngineVenv.at(path)

    monkeypatch.setattr(up_module, "install_engine", installed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    spec = UpSpec(
        Engine.VLLM, port=free_ports(1)[0], state_dir=tmp_path / "state", engine_venv=tmp_path / "venv"
    )

    plan = await prepare(spec, console=console, clock=clock)

    assert "No GPU is visible" in said(console)
    assert plan.workers[0].child.argv[0] == str(tmp_path / "venv/bin/vllm")
    assert "PYTHONPATH" not in plan.workers[0].child.env
    assert (plan.model_folder / "config.json").exists()


async def test_gpu_engines_need_vllm_in_this_environment(
    tmp_path: Path, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = UpSpec(Engine.VLLM, model="org/model", port=free_ports(1)[0])

    with pytest.raises(ConfigError, match=r"pip install 'kvroute\[engine\]'"):
        await prepare(spec, console=console, clock=clock)

    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    plan = await prepare(spec, console=console, clock=clock)

    assert plan.workers[1].child.argv[0] == str(tmp_path / "vllm")
    assert plan.workers[1].child.env["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_command_tells_errors_without_a_traceback() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(up, ["--port", str(taken.getsockname()[1])])

    assert result.exit_code == 1
    assert result.output.startswith("Error: port: cannot listen on")
