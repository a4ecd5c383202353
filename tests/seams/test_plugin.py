"""examples/plugin, installed beside kvroute into an environment of its own, serves through real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from tests.seams.package import ROOT, Package

LONG = "What is a prefix cache? " * 40
ADMIN = {"authorization": "Bearer admin-key-of-the-tests"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the plugin, and everything that this one has."""
    folder = tmp_path_factory.mktemp("plugin") / "env"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(own, "tested.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", str(ROOT / "examples/plugin")], check=True, timeout=300
    )
    return python


@pytest.fixture
async def package(environment: Path) -> AsyncIterator[Package]:
    async with AsyncExitStack() as stack:
        yield Package(ROOT / "src", stack, str(environment))


async def both_workers(package: Package) -> tuple[str, ...]:
    events = ("--event-endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0")
    return ("--worker", await package.sim(*events), "--worker", await package.sim("--no-events"))


async def test_part_and_strategy_serve_and_reload(package: Package, tmp_path: Path) -> None:
    config = tmp_path / "kvroute.yaml"
    settings = {
        "routing": {"strategy": "longest_match", "longest_match": {"least_tokens": 32}},
        "parts": {"client_streams": {"most": 8}},
    }
    config.write_text(json.dumps(settings))
    gateway = await package.serve("-c", str(config), *await both_workers(package))

    answer = await gateway.until_held(LONG)
    assert answer.headers["x-kvroute-strategy"] == "longest_match"
    assert int(answer.headers["x-kvroute-hit-tokens"]) >= 32

    assert (await gateway.client.get("/admin/client-streams")).status_code == 401
    running = await gateway.client.get("/admin/client-streams", headers=ADMIN)
    assert running.json() == {}
    shown = (await gateway.client.get("/admin/config", headers=ADMIN)).json()
    assert shown["parts"]["client_streams"]["most"] == 8
    assert shown["parts_from"] == {"client_streams": "kvroute-example 1.0.0"}
    assert "kvroute_example_finished_requests" in (await gateway.client.get("/metrics")).text

    # The limit falls to 1 while the gateway runs: of two requests of one program at once, one is refused.
    settings["parts"]["client_streams"]["most"] = 1
    config.write_text(json.dumps(settings))
    package.processes[-1].send_signal(signal.SIGHUP)
    async with asyncio.timeout(30):
        while (await _in_force(gateway.client))["parts"]["client_streams"]["most"] != 1:
            await asyncio.sleep(0.02)
    body = {"model": "sim-model", "prompt": LONG, "max_tokens": 4, "stream": True}
    statuses = set()
    async with asyncio.timeout(30):
        while statuses != {200, 429}:
            answers = await asyncio.gather(
                *(gateway.client.post("/v1/completions", json=body) for _ in range(4))
            )
            statuses |= {each.status_code for each in answers}
    assert (await gateway.client.get("/admin/client-streams", headers=ADMIN)).json() == {}


async def _in_force(client: httpx.AsyncClient) -> dict:
    return (await client.get("/admin/config", headers=ADMIN)).json()


async def test_variables_flags_and_check_know_the_parts_options(environment: Path, tmp_path: Path) -> None:
    def check(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(environment), "-m", "kvroute", "check", "--worker", "http://127.0.0.1:9", *flags],
            capture_output=True, text=True, timeout=60, cwd=tmp_path, env=variables,
        )  # fmt: skip

    good = check("--set", "routing.strategy=longest_match", KVROUTE__PARTS__CLIENT_STREAMS__MOST="3")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "most: 3" in good.stdout
    assert "# parts.client_streams comes from kvroute-example 1.0.0." in good.stdout
    assert "# routing.longest_match comes from kvroute-example 1.0.0." in good.stdout
    wrong = check("--set", "parts.client_streams.most=-1")
    assert wrong.returncode != 0
    assert "parts.client_streams.most: should be greater than or equal to 0" in wrong.stdout + wrong.stderr
    unknown = check("--set", "parts.client_streams.mots=1")
    assert "did you mean parts.client_streams.most?" in unknown.stdout + unknown.stderr


@pytest.mark.parametrize("setting", ["parts.nothing.here=1", "routing.strategy=nothing"])
def test_what_is_not_installed_is_an_error_that_says_so(setting: str, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "kvroute", "check", "--worker", "http://127.0.0.1:9", "--set", setting],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert found.returncode != 0
    assert "installed distribution" in found.stdout + found.stderr


def test_the_plugins_own_tests_pass(environment: Path) -> None:
    tests = ROOT / "examples/plugin/tests"
    run = [str(environment), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, cwd=tests)
    assert done.returncode == 0, done.stdout + done.stderr
