from __future__ import annotations

from pathlib import Path

import pytest

import gateway_routers
from gateway import wanted_routers
from gateway_goals import OURS, THEIRS
from gateway_routers import PEERS, ROUTERS, Launch, install_peers, nginx
from gateway_scenarios import SCENARIOS

WORKERS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def launch(folder: Path) -> Launch:
    return Launch(folder, folder / "peers", WORKERS, 3, 4, folder / "model")


def test_peers_that_are_not_there_are_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_routers, "nginx_binary", lambda: None)

    versions, missing = install_peers(tmp_path, allow_install=False)

    assert versions == {}
    assert missing.keys() == PEERS.keys() | {"nginx"}
    assert "apt install" in missing["nginx"]


def test_a_missing_peer_is_left_out_and_all_others_run() -> None:
    scenario = SCENARIOS["a"]

    names = {router.name for router in wanted_routers([scenario], {THEIRS: "not installed"})}

    assert names == set(scenario.routers) - {THEIRS}


def test_every_router_of_a_scenario_is_known() -> None:
    known = {router.name for router in ROUTERS}

    assert {name for scenario in SCENARIOS.values() for name in scenario.routers} == known


@pytest.mark.parametrize("router", [router for router in ROUTERS if router.command], ids=lambda one: one.name)
def test_a_command_names_its_port_and_its_workers(router: gateway_routers.Router, tmp_path: Path) -> None:
    assert router.command is not None

    command = router.command(launch(tmp_path))

    written = " ".join(command)
    if router.name == "nginx":
        written = (tmp_path / "nginx.conf").read_text()
    assert all(worker.removeprefix("http://") in written for worker in WORKERS)
    assert "3" in written.replace("127.0.0.1", "").replace(";", " ").split() or ":3;" in written


def test_the_kvroute_that_is_judged_runs_as_it_comes(tmp_path: Path) -> None:
    [router] = [router for router in ROUTERS if router.name == OURS]
    assert router.command is not None

    command = router.command(launch(tmp_path))

    assert "--set" not in command
    assert command[-2:] == ["--strategy", "prefixaware"]


def test_nginx_writes_nowhere_but_into_the_scratch_folder(tmp_path: Path) -> None:
    command = nginx(launch(tmp_path))

    assert command[1:3] == ["-e", f"{tmp_path}/nginx.log"]
    for line in (tmp_path / "nginx.conf").read_text().splitlines():
        if "_path" in line or "pid " in line:
            assert str(tmp_path) in line
