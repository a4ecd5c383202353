from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import kvroute.app.server
from kvroute.cli import main


@pytest.fixture
def served(monkeypatch):
    """What `serve` would run; the server itself is replaced."""
    configs = []

    def run(config, source, signature, *, is_picker):
        configs.append(config)
        return 3

    monkeypatch.setattr(kvroute.app.server, "run", run)
    return configs


def invoke(*arguments, **environ):
    return CliRunner().invoke(main, ["serve", *arguments], env=environ)


def test_flags_become_the_configuration_and_the_servers_exit_code_is_ours(served, tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text("server: {host: file, backlog: 7}\nfleet: {workers: ['http://old:1']}\n")

    result = invoke(
        *("-c", str(file), "--worker", "http://a:1", "--worker", "b=http://b:1", "--strategy", "session"),
        *("--host", "::1", "--port", "9", "--log-level", "debug", "--log-format", "json"),
        *("--set", "fleet.health.interval_s=5", "--set", "server.port=8"),
        KVROUTE__RETRIES__BUDGET_PERCENT="50",
    )

    assert result.exit_code == 3, result.output
    (config,) = served
    assert [(worker.id, worker.url) for worker in config.fleet.workers] == [
        (None, "http://a:1"),
        ("b", "http://b:1"),
    ]
    assert (config.server.host, config.server.port, config.server.backlog) == ("::1", 9, 7)
    assert (config.logging.level, config.logging.format) == ("debug", "json")
    assert config.routing.strategy == "session"
    assert config.fleet.health.interval_s == 5
    assert config.retries.budget_percent == 50


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:8000", (None, "http://localhost:8000")),
        ("10.0.0.1:8000", (None, "http://10.0.0.1:8000")),
        ("[::1]:8000", (None, "http://[::1]:8000")),
        ("gpu-1=localhost:8000", ("gpu-1", "http://localhost:8000")),
        ("gpu-1=https://a:1", ("gpu-1", "https://a:1")),
    ],
)
def test_a_worker_without_a_scheme_speaks_http(served, text, expected):
    result = invoke("--worker", text)

    assert result.exit_code == 3, result.output
    assert [(worker.id, worker.url) for worker in served[0].fleet.workers] == [expected]


def test_flags_give_workers_their_roles(served):
    result = invoke("--prefill", "a:1", "--worker", "b:1", "--decode", "d=http://c:1", "--decode", "d:1")

    assert result.exit_code == 3, result.output
    assert [(worker.id, worker.url, worker.role) for worker in served[0].fleet.workers] == [
        (None, "http://b:1", None),
        (None, "http://a:1", "prefill"),
        ("d", "http://c:1", "decode"),
        (None, "http://d:1", "decode"),
    ]


def test_an_unknown_role_is_an_error_with_its_path(served):
    result = invoke("--set", 'fleet.workers=[{"url": "http://a:1", "role": "engine"}]')

    assert result.exit_code == 2
    assert "fleet.workers.0.role" in result.output


def test_an_equals_sign_inside_a_url_is_part_of_it(served):
    result = invoke("--worker", "http://a:1/x=y")

    assert result.exit_code == 2
    assert "plain path" in result.output  # so it was not taken for `ID=URL`


def test_without_any_worker_the_error_names_the_ways_to_give_one(served):
    result = invoke()

    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    for way in ("--worker", "fleet.workers", "fleet.file", "kvroute up"):
        assert way in result.output
    assert not served


def test_a_fleet_file_without_workers_is_enough_to_start(served, tmp_path):
    (tmp_path / "workers.yaml").write_text("workers: []\n")

    assert invoke("--set", f"fleet.file={tmp_path / 'workers.yaml'}").exit_code == 3


def test_a_wrong_configuration_is_one_line_a_problem_without_traceback(served):
    result = invoke("--worker", "ftp://a", "--port", "http", "--set", "nope=1")

    lines = result.output.splitlines()
    assert result.exit_code == 2
    assert len(lines) == 3
    assert all(line.startswith("kvroute: ") for line in lines)
    assert any(line.startswith("kvroute: server.port: ") and line.endswith("(--port)") for line in lines)
    assert any(line.startswith("kvroute: fleet.workers.0") and line.endswith("(--worker)") for line in lines)
    assert not served


def test_a_real_gateway_listens_and_ends_with_0_on_sigterm():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvroute", "serve", "--worker", "http://127.0.0.1:9", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("KVROUTE__")},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("it ended without listening")
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 0, rest
    assert "Traceback" not in rest
