"""The table itself. `test_serve_router_flags.py` has the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvroute.cli.serve import vllm_router
from kvroute.cli.vllm_router import (
    CONTROLLER,
    DYNAMIC_FILES,
    FLAGS,
    LOG_LEVELS,
    MODEL_TYPES,
    Given,
    check_whole_line,
    dynamic_flags,
    translate,
)
from kvroute.config.config import Config
from kvroute.config.loading import load
from kvroute.config.paths import shape_at, split
from kvroute.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "migration" / "production-stack.md"

THEIRS = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "production_stack" / "flags.yaml").read_text(encoding="utf-8")
)
"""The flags of that router's own parser, with a value each; None for a switch."""

SAMPLES = {
    "root-path": "/vllm",
    "service-discovery": "k8s",
    "k8s-service-discovery-type": "service-name",
    "static-aliases": "gpt4:llama",
    "routing-logic": "kvaware",
    "request-rewriter": "noop",
    "static-backends": "http://a:1",
    "session-key": "x-user-id",
    "k8s-namespace": "llm",
    "k8s-label-selector": "app=vllm",
}


def config_of(given: Given) -> Config:
    return load(flags=translate(given).settings).config


def sample(name: str) -> str:
    return SAMPLES.get(name, "true" if FLAGS[name].is_switch else "7")


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_sets_existing_options_or_has_a_reason_for_no_effect(name):
    context = {"service-discovery": "k8s", "routing-logic": "kvaware"}
    if name.startswith("static-"):
        context = {"service-discovery": "static", "static-backends": "http://a:1"}
    given = {**context, name: sample(name)}
    became = FLAGS[name].map_value(given[name], given)

    assert became.options or len(became.note) > 10
    for path in became.options:
        assert shape_at(Config, split(path)), path
    (line,) = [line for line in translate(given).lines if line.startswith(f"--{name}:")]
    assert ("no effect" in line) == (not became.options and not became.is_used)
    load(flags=translate(given).settings)  # the values are valid


@pytest.mark.parametrize("name", {f"--{name}": None for name in FLAGS} | THEIRS)
def test_the_documentation_has_every_flag(name):
    assert f"`{name}`" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", THEIRS)
def test_the_command_has_every_flag_of_that_router_and_the_same_switches(name):
    (parameter,) = [each for each in vllm_router.params if name in each.opts]

    assert parameter.is_flag == (THEIRS[name] is None)


def test_static_workers_with_models_and_aliases():
    config = config_of(
        {
            "service-discovery": "static",
            "static-backends": "http://a:1,http://b:1, http://a:1",
            "static-models": "llama,qwen,lora",
            "static-aliases": "gpt4:llama,gpt.5:org/qwen:q4",
        }
    )

    assert [(worker.url, worker.models) for worker in config.fleet.workers] == [
        ("http://a:1", ("llama", "lora")),
        ("http://b:1", ("qwen",)),
    ]
    assert config.fleet.aliases == {"gpt4": "llama", "gpt.5": "org/qwen:q4"}
    assert not config.fleet.kubernetes.enabled


def test_kubernetes_with_that_routers_defaults_and_with_flags():
    bare = config_of({"service-discovery": "k8s"}).fleet.kubernetes
    full = config_of(
        {
            "service-discovery": "k8s",
            "k8s-namespace": "llm",
            "k8s-port": "8100",
            "k8s-label-selector": "environment=test",
            "k8s-watcher-timeout-seconds": "30",
            "k8s-service-discovery-type": "pod-ip",
        }
    ).fleet.kubernetes

    assert (bare.enabled, bare.namespace, bare.port, bare.selector) == (True, "default", 8000, "")
    assert (full.namespace, full.port, full.selector, full.watch_s) == ("llm", 8100, "environment=test", 30)


def test_flags_of_the_other_kind_of_discovery_have_no_effect():
    static = {"static-backends": "http://a:1", "k8s-port": "8100", "k8s-label-selector": "a=b"}
    kubernetes = {"service-discovery": "k8s", "static-backends": "http://a:1", "static-models": "m"}

    assert config_of(static).fleet.kubernetes == Config().fleet.kubernetes
    assert config_of(kubernetes).fleet.workers == ()
    assert sum("no effect" in line for line in translate(static).lines) == 2
    assert sum("no effect" in line for line in translate(kubernetes).lines) == 2


@pytest.mark.parametrize(
    ("logic", "strategy"),
    [
        ("roundrobin", "roundrobin"),
        ("session", "session"),
        ("prefixaware", "prefixaware"),
        ("kvaware", "kvaware"),
        ("loadaware", "prefixaware"),
    ],
)
def test_routing_logic_is_a_strategy(logic, strategy):
    assert config_of({"routing-logic": logic}).routing.strategy == strategy


def test_prefixaware_follows_the_longest_match_and_loadaware_counts_load():
    theirs = config_of({"routing-logic": "prefixaware"}).routing.costs
    full = config_of({"routing-logic": "loadaware"}).routing.costs

    assert (theirs.balance_weight, theirs.tie_share, theirs.tie_ms) == (0, 0, 0)
    assert full == Config().routing.costs


def test_a_root_path_may_end_with_a_slash_or_be_empty():
    assert config_of({"root-path": "/vllm/"}).server.root_path == "/vllm"
    assert config_of({"root-path": ""}).server.root_path == ""
    assert "no effect" in translate({"root-path": "/"}).lines[0]


def test_the_timeout_of_static_health_checks_counts_for_static_workers_only():
    given = {
        "backend-health-check-timeout-seconds": "7",
        "static-backend-health-check-timeout-seconds": "3",
        "static-backend-health-check-interval": "30",
    }
    static = config_of({"service-discovery": "static", **given}).fleet.health
    kubernetes = config_of({"service-discovery": "k8s", **given}).fleet.health

    assert (static.timeout_s, static.interval_s) == (3, 30)
    assert (kubernetes.timeout_s, kubernetes.interval_s) == (7, Config().fleet.health.interval_s)


STATIC = {
    "service-discovery": "static",
    "static-backends": "http://a:1",
    "static-models": "m",
    "routing-logic": "roundrobin",
}


def without(name: str) -> Given:
    return {key: value for key, value in STATIC.items() if key != name}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "--service-discovery"),
        (without("routing-logic"), "--routing-logic"),
        (without("service-discovery"), "--service-discovery"),
        (without("static-backends"), "--static-backends"),
        (without("static-models"), "--static-models"),
        ({**STATIC, "routing-logic": "session"}, "--session-key"),
        ({**STATIC, "static-backend-health-checks": "true"}, "--static-model-types"),
        (
            {**STATIC, "static-backend-health-checks": "true", "static-model-types": "chat,unsupported"},
            "--static-model-types",
        ),
        ({**STATIC, "engine-stats-interval": "0"}, "--engine-stats-interval"),
        ({**STATIC, "request-stats-window": "-1"}, "--request-stats-window"),
        ({**STATIC, "log-stats": "true", "log-stats-interval": "0"}, "--log-stats-interval"),
        ({**STATIC, "engine-stats-interval": "often"}, "--engine-stats-interval"),
        ({**STATIC, "sentry-traces-sample-rate": "1.1"}, "--sentry-traces-sample-rate"),
        (
            {**STATIC, "sentry-profile-session-sample-rate": "-0.1"},
            "--sentry-profile-session-sample-rate",
        ),
    ],
)
def test_what_that_router_refuses_is_refused_with_the_flags_name(given, path):
    with pytest.raises(ConfigError) as caught:
        check_whole_line(given)

    assert caught.value.path == path


@pytest.mark.parametrize(
    "given",
    [
        STATIC,
        {**STATIC, "routing-logic": "session", "session-key": "x-user-id"},
        {**STATIC, "static-backend-health-checks": "true", "static-model-types": ",".join(MODEL_TYPES)},
        {**STATIC, "log-stats-interval": "0", "sentry-traces-sample-rate": "1.0"},
        {"service-discovery": "k8s", "routing-logic": "kvaware"},
    ],
)
def test_what_that_router_accepts_is_accepted(given):
    check_whole_line(given)


def test_a_session_key_is_read_from_headers_and_body():
    assert config_of({"session-key": "x-user-id"}).routing.session.keys == (
        "header:x-user-id",
        "body:x-user-id",
    )


def test_controller_flags_only_count_with_kvaware():
    given = {"lmcache-controller-port": "9001", "lmcache-worker-timeout": "9"}

    assert not translate({"routing-logic": "session", **given}).settings[1:]
    paths = [
        ".".join(map(str, each.path)) for each in translate({"routing-logic": "kvaware", **given}).settings
    ]
    if shape_at(Config, split(CONTROLLER)):
        assert [path for path in paths if path.startswith(CONTROLLER)] == [
            f"{CONTROLLER}.{key}" for key in ("enabled", "pull", "worker_timeout_s")
        ]


_SPLIT = {
    "routing-logic": "disaggregated_prefill",
    "prefill-model-labels": "p",
    "decode-model-labels": "d,e",
}


def test_labels_give_static_backends_their_roles():
    backends = {"static-backends": "http://a,http://b,http://c,http://d", "static-model-labels": "p,d,e,x"}
    given = {"service-discovery": "static", **backends, **_SPLIT}

    settings = {".".join(map(str, each.path)): each.value for each in translate(given).settings}

    assert [worker.get("role") for worker in settings["fleet.workers"]] == [
        "prefill",
        "decode",
        "decode",
        None,
    ]
    assert settings["routing.prefill_decode.threshold_tokens"] == 0
    del given["routing-logic"]
    without = {".".join(map(str, each.path)): each.value for each in translate(given).settings}
    assert all("role" not in worker for worker in without["fleet.workers"])


def test_in_kubernetes_the_label_model_gives_the_roles():
    settings = {
        ".".join(map(str, each.path)): each.value
        for each in translate({"service-discovery": "k8s", **_SPLIT}).settings
    }

    assert settings["fleet.kubernetes.role_label"] == "model"
    assert settings["fleet.kubernetes.prefill_labels"] == ["p"]
    assert settings["fleet.kubernetes.decode_labels"] == ["d", "e"]


@pytest.mark.parametrize(
    ("given", "path", "complaint"),
    [
        ({"routing-logic": "disaggregated_prefill"}, "--prefill-model-labels", "must be given"),
        (
            {
                "routing-logic": "disaggregated_prefill",
                "prefill-model-labels": "p",
                "decode-model-labels": "d",
                "static-backends": "http://a,http://b",
                "static-model-labels": "p",
            },
            "--static-model-labels",
            "1 labels for 2",
        ),
        ({"routing-logic": "magic"}, "--routing-logic", "not one of roundrobin"),
        ({"service-discovery": "external-only"}, "--service-discovery", "only to vLLM workers"),
        ({"service-discovery": "consul"}, "--service-discovery", "not one of static, k8s"),
        ({"static-aliases": "gpt4"}, "--static-aliases", "not alias:model"),
        ({"static-backends": "http://a,http://b", "static-models": "m"}, "--static-models", "1 models for 2"),
        ({"request-rewriter": "mine"}, "--request-rewriter", "forwarded unchanged"),
    ],
)
def test_the_error_for_a_senseless_value_names_the_flag(given, path, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        translate(given)

    assert caught.value.path == path


def test_credentials_are_not_repeated():
    lines = translate(
        {"sentry-dsn": "https://secret@sentry.io/1", "static-backends": "http://me:pw@a:1"}
    ).lines

    assert "secret" not in "".join(lines)
    assert "pw" not in "".join(lines)


def test_every_log_level_of_vllm_router_has_an_equivalent():
    for level in ("critical", "error", "warning", "info", "debug", "trace"):
        load(assignments=[f"logging.level={LOG_LEVELS.get(level, level)}"])


# Dynamic configuration files


def test_a_dynamic_file_has_flags_with_underscores():
    flags, unknown = dynamic_flags(
        {
            "service_discovery": "static",
            "static_backends": ["http://a:1", "http://b:1"],
            "static_models": "m,m",
            "k8s_port": 8000,
            "log_stats": False,
            "enable_batch_api": True,
            "session_key": None,
            "future": 1,
        }
    )

    assert flags == {
        "service-discovery": "static",
        "static-backends": "http://a:1,http://b:1",
        "static-models": "m,m",
        "k8s-port": "8000",
        "enable-batch-api": "true",
    }
    assert unknown == ("future",)


def test_a_dynamic_file_takes_every_flag():
    own = ("--host", "--port", "--log-level", "--log-format", "--version", *map("--{}".format, DYNAMIC_FILES))
    document = {
        name.removeprefix("--").replace("-", "_"): value or True
        for name, value in THEIRS.items()
        if name not in own
    }

    flags, unknown = dynamic_flags(document)

    assert [f"--{name}" for name in flags] == [name for name in THEIRS if name not in own]
    assert unknown == ()


def test_a_dynamic_file_may_have_its_models_as_a_mapping():
    flags, unknown = dynamic_flags(
        {
            "static_models": {
                "llama": {"static_backends": ["http://a:1", "http://c:1"], "static_model_type": "chat"},
                "qwen": {
                    "static_backends": ["http://b:1"],
                    "static_model_type": "rerank",
                    "fallback_model": "llama",
                },
            },
            "static_aliases": {"gpt4": "llama"},
        }
    )

    assert flags == {
        "static-backends": "http://a:1,http://c:1,http://b:1",
        "static-models": "llama,llama,qwen",
        "static-model-types": "chat,chat,rerank",
        "static-aliases": "gpt4:llama",
    }
    assert unknown == ("static_models.qwen.fallback_model",)


@pytest.mark.parametrize("document", [[], "text", {"static_models": {"m": ["http://a:1"]}}])
def test_a_dynamic_file_of_another_shape_is_an_error(document):
    with pytest.raises(ConfigError):
        dynamic_flags(document)
