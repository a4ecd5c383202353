from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.clocks import QuickClock
from tests.support.sockets import free_ports
from tests.support.waiting import until

from kvroute.clock import Clock, SystemClock
from kvroute.deploy import keeper as keeper_module
from kvroute.deploy.keeper import Keeper, ProcessPhase
from kvroute.deploy.plan import PlannedProcess
from kvroute.deploy.processes import ChildSpec, ProcessFailed

ServerArgv = Callable[..., tuple[str, ...]]


class Watcher:
    """Collects the phases and reports of a keeper; `until` waits for these phases."""

    def __init__(self) -> None:
        self.phases: list[ProcessPhase] = []
        self.reports: list[str] = []

    def changed(self, keeper: Keeper) -> None:
        self.phases.append(keeper.status.phase)

    async def until(self, *phases: ProcessPhase) -> None:
        await until(lambda: self.phases == list(phases), within_s=30)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def keeper(tmp_path: Path, clock: SystemClock, watcher: Watcher) -> Callable[..., Keeper]:
    def make(
        argv: tuple[str, ...], port: int, *, restart_delay_s: float = 0.0, clock: Clock = clock
    ) -> Keeper:
        child = ChildSpec("worker-0", argv, dict(os.environ), tmp_path / "log", stop_grace_s=5.0)
        url = f"http://127.0.0.1:{port}"
        planned = PlannedProcess(child, url, f"{url}/health", 30.0, restart_delay_s=restart_delay_s)
        return Keeper(planned, clock=clock, report=watcher.reports.append, changed=watcher.changed)

    return make


async def test_a_process_is_ready_when_it_answers(
    keeper: Callable[..., Keeper], server_argv: ServerArgv, watcher: Watcher
) -> None:
    (port,) = free_ports(1)
    kept = keeper(server_argv(port), port)

    await kept.start_and_wait()
    assert kept.last_line == "serving"
    await kept.stop()

    assert watcher.phases == [ProcessPhase.STARTING, ProcessPhase.READY, ProcessPhase.STOPPED]


async def test_a_process_that_cannot_start_is_stopped_and_reported(
    keeper: Callable[..., Keeper], watcher: Watcher
) -> None:
    (port,) = free_ports(1)
    kept = keeper((sys.executable, "-c", "raise SystemExit('no memory')"), port)

    with pytest.raises(ProcessFailed, match="no memory"):
        await kept.start_and_wait()

    assert watcher.phases == [ProcessPhase.STARTING, ProcessPhase.STOPPED]


async def test_a_dead_process_is_reported_and_started_again(
    keeper: Callable[..., Keeper],
    server_argv: ServerArgv,
    watcher: Watcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.0)
    (port,) = free_ports(1)
    kept = keeper(server_argv(port, "my last words"), port)
    await kept.start_and_wait()
    keeping = asyncio.create_task(kept.restart_on_exit())

    kept.kill()
    await watcher.until(
        ProcessPhase.STARTING,
        ProcessPhase.READY,
        ProcessPhase.DOWN,
        ProcessPhase.STARTING,
        ProcessPhase.READY,
    )

    assert kept.status.restarts == 1
    assert "worker-0 ended with SIGKILL\n  | serving my last words" in watcher.reports[0]
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    await kept.stop()


async def test_the_back_off_doubles_while_it_keeps_failing(
    keeper: Callable[..., Keeper], watcher: Watcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(keeper_module, "LAST_BACKOFF_S", 0.002)
    (port,) = free_ports(1)
    flag = tmp_path / "broken"
    # Serves once; from then on it ends at once.
    source = f"""
import http.server, pathlib, sys
flag = pathlib.Path({str(flag)!r})
if flag.exists():
    sys.exit("broken")
flag.touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
server.handle_request()
"""
    kept = keeper((sys.executable, "-c", source), port)
    await kept.start_and_wait()
    keeping = asyncio.create_task(kept.restart_on_exit())

    await until(lambda: len(watcher.reports) >= 3, within_s=30)
    keeping.cancel()
    await asyncio.wait({keeping})
    await kept.stop()

    assert kept.status.restarts >= 2
    assert "broken" in watcher.reports[-1]
    assert ProcessPhase.READY not in watcher.phases[2:]


async def test_a_renewed_process_restarts_immediately_and_counts_as_no_failure(
    keeper: Callable[..., Keeper],
    server_argv: ServerArgv,
    watcher: Watcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 3600.0)
    (port,) = free_ports(1)
    kept = keeper(server_argv(port), port)
    await kept.start_and_wait()
    keeping = asyncio.create_task(kept.restart_on_exit())

    kept.restart("redis")
    await watcher.until(
        ProcessPhase.STARTING,
        ProcessPhase.READY,
        ProcessPhase.DOWN,
        ProcessPhase.STARTING,
        ProcessPhase.READY,
    )

    assert watcher.reports == ["restarting worker-0, because redis was restarted"]
    assert kept.status.restarts == 1
    keeping.cancel()
    await asyncio.wait({keeping})
    await kept.stop()


@pytest.mark.parametrize("killed", [True, False])
async def test_a_process_that_must_be_missed_stays_away_for_its_rest(
    killed: bool, keeper: Callable[..., Keeper], server_argv: ServerArgv, watcher: Watcher
) -> None:
    clock = QuickClock(0.01)
    (port,) = free_ports(1)
    kept = keeper(server_argv(port), port, restart_delay_s=3600.0, clock=clock)
    await kept.start_and_wait()
    keeping = asyncio.create_task(kept.restart_on_exit())

    if killed:
        kept.kill()
    else:
        kept.restart("redis")
    await watcher.until(
        ProcessPhase.STARTING,
        ProcessPhase.READY,
        ProcessPhase.DOWN,
        ProcessPhase.STARTING,
        ProcessPhase.READY,
    )

    assert clock.slept.count(3600.0) == 1
    keeping.cancel()
    await asyncio.wait({keeping})
    await kept.stop()


async def test_stopping_a_stopped_process_is_harmless(keeper: Callable[..., Keeper]) -> None:
    kept = keeper((sys.executable, "-c", ""), 1)

    await kept.stop()
    kept.kill()

    assert kept.status.phase is ProcessPhase.STOPPED


async def test_a_process_that_cannot_be_created_is_an_ordinary_failure(
    keeper: Callable[..., Keeper], watcher: Watcher, tmp_path: Path
) -> None:
    """Such as a log that cannot be written: one process must not end all others for it."""
    kept = keeper((sys.executable, "-c", ""), 1)
    (tmp_path / "log").mkdir()

    with pytest.raises(ProcessFailed, match="worker-0 could not be started: Is a directory"):
        await kept.start_and_wait()

    assert watcher.phases == [ProcessPhase.STOPPED]
