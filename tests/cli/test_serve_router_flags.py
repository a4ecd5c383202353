"""`kvroute serve` with the flags of production-stack's router."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import kvroute.app.server
from kvroute.cli import main
from kvroute.errors import ConfigError

WORKERS = ("--service-discovery", "static", "--static-backends", "http://a:1,http://b:1")


@pytest.fixture
def served(monkeypatch):
    """What `serve` would run; the server itself is replaced."""
    configs = []
    monkeypatch.setattr(
        kvroute.app.server, "run", lambda config, source, signature, **_: configs.append(config) or 0
    )
    return configs


@pytest.fixture
def sources(monkeypatch):
    """What `serve` would load again at a reload; the server itself is replaced."""
    found = []
    monkeypatch.setattr(
        kvroute.app.server, "run", lambda config, source, signature, **_: found.append(source) or 0
    )
    return found


def invoke(*arguments, **environ):
    return CliRunner().invoke(main, ["serve", *arguments], env=environ)


def test_a_command_line_of_that_router_runs_as_it_is(served):
    result = invoke(
        *("--host", "0.0.0.0", "--port", "8000", *WORKERS, "--static-models", "m,m"),
        *("--routing-logic", "session", "--session-key", "x-user-id", "--engine-stats-interval", "15"),
        *("--request-stats-window", "30", "--log-stats", "--log-stats-interval=10", "--enable-batch-api"),
    )

    assert result.exit_code == 0, result.output
    (config,) = served
    assert (config.server.host, config.server.port) == ("0.0.0.0", 8000)
    assert [worker.url for worker in config.fleet.workers] == ["http://a:1", "http://b:1"]
    assert (config.routing.strategy, config.routing.session.keys[0]) == ("session", "header:x-user-id")
    assert (config.fleet.health.metrics_interval_s, config.metrics.compat_window_s) == (15, 30)
    lines = result.output.splitlines()
    assert "kvroute: --routing-logic: routing.strategy=session" in lines
    assert any(line.startswith("kvroute: --enable-batch-api: no effect: ") for line in lines)
    assert sum(line.startswith("kvroute: --") for line in lines) == 10
    assert config.logging.routing_lines
    assert config.metrics.compat == "vllm-router"


def test_the_default_address_is_that_of_vllm_router(served, tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text("server: {port: 1}\n")

    for arguments, environ in (
        ((), {}),
        (("--port", "2"), {}),
        (("--set", "server.port=3"), {}),
        ((), {"KVROUTE__SERVER__PORT": "4"}),
        (("-c", str(file)), {}),
    ):
        assert invoke(*WORKERS, *arguments, **environ).exit_code == 0

    assert [(config.server.host, config.server.port) for config in served] == [
        ("0.0.0.0", 8001),
        ("0.0.0.0", 2),
        ("0.0.0.0", 3),
        ("0.0.0.0", 4),
        ("127.0.0.1", 1),
    ]


def test_without_those_flags_nothing_is_different(served):
    result = invoke("--worker", "http://a:1")

    assert result.output == ""
    assert (served[0].server.host, served[0].server.port) == ("127.0.0.1", 8080)


def test_kvroutes_own_flags_win(served):
    invoke(*WORKERS, "--routing-logic", "session", "--strategy", "roundrobin", "--worker", "http://c:1")

    assert served[0].routing.strategy == "roundrobin"
    assert [worker.url for worker in served[0].fleet.workers] == ["http://c:1"]


def test_log_levels_that_kvroute_does_not_have_are_the_nearest(served):
    result = invoke(*WORKERS, "--log-level", "trace")

    assert served[0].logging.level == "debug"
    assert "--log-level: logging.level=debug" in result.output
    assert (
        invoke("--worker", "http://a:1", "--log-level", "trace").exit_code == 2
    )  # not that router's command


def test_a_dynamic_file_has_flags_and_the_command_line_wins_at_the_start(served, tmp_path):
    file = tmp_path / "dynamic.json"
    document = {"service_discovery": "static", "static_backends": "http://a:1", "routing_logic": "session"}
    file.write_text(json.dumps({**document, "future_key": 1}))

    result = invoke("--dynamic-config-json", str(file), "--routing-logic", "roundrobin")

    assert result.exit_code == 0, result.output
    assert [worker.url for worker in served[0].fleet.workers] == ["http://a:1"]
    assert served[0].routing.strategy == "roundrobin"
    assert "future_key: no effect" in result.output
    assert served[0].server.config_poll_s == 2
    assert "a changed file is loaded while kvroute runs" in result.output


def test_a_changed_dynamic_file_wins_and_must_be_valid(sources, tmp_path, caplog):
    file = tmp_path / "dynamic.yaml"
    file.write_text("service_discovery: static\nstatic_backends: http://a:1\nstatic_models: m\n")
    result = run("--routing-logic", "roundrobin", "--port", "9", "--dynamic-config-yaml", str(file))
    assert result.exit_code == 0, result.output
    (source,) = sources

    file.write_text(
        "service_discovery: static\nrouting_logic: session\nsession_key: x-id\nfuture: 1\n"
        "static_models: {n: {static_backends: ['http://b:1', 'http://c:1']}}\n"
    )
    config = source.load().config

    assert config.routing.strategy == "session"
    assert config.routing.session.keys == ("header:x-id", "body:x-id")
    assert [worker.url for worker in config.fleet.workers] == ["http://b:1", "http://c:1"]
    assert (config.server.host, config.server.port) == ("0.0.0.0", 9)
    assert "future: no effect" in caplog.text

    for text in ("routing_logic: session\n", "routing_logic: testing\n", "{", "static_models: ''\n"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            source.load()


def test_only_one_dynamic_file_may_be_given(served, tmp_path):
    file = tmp_path / "dynamic.yaml"
    file.write_text("{}")
    result = run(*WHOLE, "--dynamic-config-yaml", str(file), "--dynamic-config-json", str(file))

    assert result.exit_code == 2
    assert "--dynamic-config-json: is not allowed with --dynamic-config-yaml" in result.output


@pytest.mark.parametrize("text", [None, "- a", "{"])
def test_a_dynamic_file_that_cannot_be_used_is_an_error_that_names_the_flag(text, served, tmp_path):
    file = tmp_path / "dynamic.yaml"
    if text is not None:
        file.write_text(text)

    result = invoke("--dynamic-config-yaml", str(file))

    assert result.exit_code == 2
    assert "--dynamic-config-yaml: " in result.output
    assert "Traceback" not in result.output
    assert not served


def test_an_unknown_flag_stays_an_error(served):
    result = invoke(*WORKERS, "--static-backend", "http://a:1")

    assert result.exit_code == 2
    assert "No such option" in result.output
    assert not served


def test_the_error_for_a_wrong_value_names_its_flag(served):
    result = invoke(*WORKERS, "--engine-stats-interval", "often")

    assert result.exit_code == 2
    assert "fleet.health.metrics_interval_s" in result.output
    assert "(--engine-stats-interval)" in result.output


def test_finding_workers_in_kubernetes_is_enough(served):
    flags = ("--service-discovery", "k8s", "--k8s-label-selector", "app=vllm")

    assert invoke(*flags, KUBERNETES_SERVICE_HOST="10.0.0.1").exit_code == 0
    assert served[0].fleet.kubernetes.enabled


# The image's command: `kvroute FLAGS`, and `vllm-router FLAGS`

WHOLE = (*WORKERS, "--static-models", "m,m", "--routing-logic", "roundrobin")


def run(*arguments, **environ):
    return CliRunner().invoke(main, [*arguments], env=environ)


def test_flags_without_a_command_are_that_routers_command_line(served):
    bare, named = run("--host", "127.0.0.1", *WHOLE), run("vllm-router", "--host", "127.0.0.1", *WHOLE)

    assert (bare.exit_code, bare.output) == (named.exit_code, named.output)
    assert bare.exit_code == 0, bare.output
    assert served[0] == served[1]
    assert (served[0].server.host, served[0].server.port) == ("127.0.0.1", 8001)
    assert served[0].logging.format == "text"


def test_the_log_may_be_json(served):
    assert run(*WHOLE, "--log-format", "json").exit_code == 0
    assert served[0].logging.format == "json"


def test_a_command_line_that_the_router_refuses_is_refused(served):
    result = run(*WORKERS, "--static-models", "m,m")

    assert result.exit_code == 2
    assert "--routing-logic: must be given" in result.output
    assert "kvroute serve" in result.output
    assert not served


def test_versions_and_help_stay_kvroutes_own(served):
    assert run("--version").output.startswith("kvroute ")
    assert run("vllm-router", "--version").output.startswith("vllm-router (kvroute ")
    assert "Usage: " in run("-h").output
    assert "docs/migration/production-stack.md" in "".join(run("vllm-router", "--help").output.split())


def test_the_workers_key_is_read_from_vllm_api_key_and_not_printed(served, tmp_path):
    keys = {"VLLM_API_KEY": "a-key", "XDG_STATE_HOME": str(tmp_path)}
    result = run(*WHOLE, **keys)
    own = run(*WHOLE, **keys, KVROUTE__FLEET__WORKER_API_KEY="another")

    assert served[0].fleet.worker_api_key.get_secret_value() == "a-key"
    assert served[1].fleet.worker_api_key.get_secret_value() == "another"
    assert "fleet.worker_api_key: VLLM_API_KEY" in result.output
    assert "a-key" not in result.output
    assert "VLLM_API_KEY" not in own.output


def test_without_that_routers_flags_vllm_api_key_is_not_read(served):
    CliRunner().invoke(main, ["serve", "--worker", "http://a:1"], env={"VLLM_API_KEY": "a-key"})

    assert served[0].fleet.worker_api_key is None


def test_without_a_writable_folder_the_admin_api_is_closed_and_a_line_says_so(served, tmp_path):
    open_ = run(*WHOLE, XDG_STATE_HOME=str(tmp_path))
    closed = run(*WHOLE, XDG_STATE_HOME="/proc/none")
    configured = run(*WHOLE, XDG_STATE_HOME="/proc/none", KVROUTE__ADMIN__API_KEY="my-own-admin-key-0")

    assert [result.exit_code for result in (open_, closed, configured)] == [0, 0, 0]
    assert served[0].admin.api_key is None
    assert "the admin API is closed: /proc/none/kvroute cannot be created" in closed.output
    assert len(served[1].admin.api_key.get_secret_value()) > 30
    assert served[1].admin.api_key.get_secret_value() not in closed.output
    assert served[2].admin.api_key.get_secret_value() == "my-own-admin-key-0"
    assert "closed" not in open_.output + configured.output
