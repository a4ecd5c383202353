"""`kvroute up` as a user meets it: the printed command works, Ctrl-C ends everything."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.sockets import free_ports

from kvroute.deploy.prepare import require_free_port


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """The process, what it printed until it was ready, and the gateway's port."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvroute", "up", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed = ""
            for line in process.stdout:
                printed += line
                if "Ctrl-C ends everything" in line:
                    break
            yield process, printed, port
        finally:
            process.kill()


def test_the_printed_curl_is_answered_and_ctrl_c_ends_everything(
    running: tuple[subprocess.Popen[str], str, int], tmp_path: Path
) -> None:
    process, printed, port = running
    curl = shlex.split(next(line for line in printed.splitlines() if line.strip().startswith("curl")))
    pages = [
        line.split()[-1] for line in printed.splitlines() if line.strip().endswith(("/docs", "/metrics"))
    ]

    _, _, url, _, header, _, body = curl
    name, _, value = header.partition(": ")
    with httpx.Client(trust_env=False, timeout=30) as http:
        answer = http.post(url, headers={name: value}, content=body)
        (admin_key,) = [line.split()[-1] for line in printed.splitlines() if line.startswith("  admin key")]
        authorization = {"authorization": f"Bearer {Path(admin_key).read_text().strip()}"}
        admin = http.get(url.replace("/v1/chat/completions", "/admin/workers"), headers=authorization)
        found = [http.get(page).status_code for page in pages]
    [explain] = [line for line in printed.splitlines() if "explain --url" in line]
    command = shlex.split(explain.partition("?")[2].replace("X-REQUEST-ID", answer.headers["x-request-id"]))
    command[:1] = [sys.executable, "-m", "kvroute"]
    explained = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["model"] == json.loads(body)["model"]
    assert answer.headers["x-kvroute-worker"] in {"worker-0", "worker-1"}
    assert "SIMULATED" in printed
    assert found == [200, 200]
    assert admin.status_code == 200
    assert f"went to {answer.headers['x-kvroute-worker']} by prefixaware" in explained.stdout, (
        explained.stderr
    )
    assert Path(admin_key).parent == Path(os.environ["XDG_STATE_HOME"]) / "kvroute"

    os.kill(process.pid, signal.SIGINT)

    assert process.wait(60) == 0
    require_free_port("127.0.0.1", port)
    assert sorted(log.name for log in (tmp_path / ".kvroute/logs").iterdir()) == [
        "gateway.log",
        "worker-0.log",
        "worker-1.log",
    ]


def test_with_tls_the_printed_curl_is_answered_over_https(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "kvroute", "up", "--port", str(port), "--workers", "1", "--tls"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if "Ctrl-C ends everything" in line:
                break
        curl = shlex.split(next(line for line in printed.splitlines() if line.strip().startswith("curl")))
        answer = subprocess.run(
            [*curl, "-sS", "--noproxy", "*"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 0

    assert answer.returncode == 0, answer.stderr
    head, _, content = answer.stdout.partition("\n\n")
    assert "x-kvroute-worker: worker-0" in head
    assert json.loads(content)["choices"][0]["message"]["content"]
    assert curl[2] == "--cacert"
    assert "explain" not in printed
    assert (tmp_path / ".kvroute/tls/gateway.key").stat().st_mode & 0o777 == 0o600
