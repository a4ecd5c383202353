"""configs/systemd/kvroute.service: systemd accepts it, and its commands start, reload and stop a gateway."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvroute.http.options import ServerOptions

UNIT = Path(__file__).parents[2] / "configs" / "systemd" / "kvroute.service"


def settings() -> dict[str, str]:
    """Key -> value; no key but Environment occurs twice."""
    lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def test_systemd_finds_no_fault(tmp_path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        if os.environ.get("CI"):
            pytest.fail("systemd-analyze is missing (.ci/run installs it)")
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvroute/bin/kvroute", "/bin/true"))

    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    wrong = tmp_path / "wrong.service"
    wrong.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHoem=yes"))
    noticed = subprocess.run(
        [analyze, "verify", wrong], capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "ProtectHoem" in noticed.stderr


def test_it_waits_long_enough_for_running_requests() -> None:
    assert int(settings()["TimeoutStopSec"]) >= ServerOptions().longest_shutdown_s + 10


async def test_its_commands_start_reload_and_stop_a_gateway(tmp_path) -> None:
    config = tmp_path / "kvroute.yaml"
    config.write_text("fleet: {workers: [http://127.0.0.1:9]}\nserver: {port: 0}\n")
    program, *arguments = shlex.split(settings()["ExecStart"])
    places = {"/etc/kvroute": str(tmp_path), "/var/lib/kvroute": str(tmp_path / "state")}
    for place, here in places.items():
        arguments = [argument.replace(place, here) for argument in arguments]
    assert program == "/opt/kvroute/bin/kvroute"
    assert settings()["StateDirectory"] == "kvroute"
    assert settings()["ExecReload"] == "/bin/kill -HUP $MAINPID"

    gateway = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvroute", *arguments, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert gateway.stderr is not None
        async with asyncio.timeout(60):
            await _until_logged(gateway.stderr, f"the admin key is in {tmp_path}/state/")
            await _until_logged(gateway.stderr, "listens on")
            config.write_text(config.read_text() + "logging: {requests: false}\n")
            gateway.send_signal(signal.SIGHUP)
            await _until_logged(gateway.stderr, "configuration")
            gateway.terminate()
            await gateway.communicate()
    finally:
        if gateway.returncode is None:
            gateway.kill()
            await gateway.wait()
    assert gateway.returncode == 0


async def _until_logged(log: asyncio.StreamReader, text: str) -> None:
    async for line in log:
        if re.search(text, line.decode()):
            return
    pytest.fail(f"the log has no line with {text!r}")
