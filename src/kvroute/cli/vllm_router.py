"""The command lines of production-stack's router: its flags, translated to options and reported.

The flags are those of vllm-project/production-stack a6c01db (August 2026), and the newer `--loadaware-beta`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import yaml

from kvroute.config.config import Config
from kvroute.config.paths import ConfigSetting, shape_at, split, without_userinfo
from kvroute.errors import ConfigError
from kvroute.routing.registry import STRATEGIES, needs_of
from kvroute.routing.strategy import Needs

Given = Mapping[str, str]
"""Flag name without leading dashes, such as `k8s-port`, -> value; "true" for a switch."""

DEFAULTS: Final[dict[str, object]] = {
    "server.host": "0.0.0.0",
    "server.port": 8001,
    "logging.routing_lines": True,
    "metrics.compat": "vllm-router",
    "server.config_poll_s": 2.0,
}
"""Options that give kvroute that router's behaviour without flags. That router polls its file every 10 s."""

API_KEY: Final = "VLLM_API_KEY"
"""The variable with the key of the workers."""

MODEL_TYPES: Final = (
    "chat",
    "completion",
    "embeddings",
    "messages",
    "rerank",
    "score",
    "transcription",
    "vision",
)
"""The values of `--static-model-types`."""

CONTROLLER: Final = "lmcache.controller"
"""The options of the controller to which workers with LMCache's in-process connector report."""

LOG_LEVELS: Final = {"critical": "error", "trace": "debug"}
"""Log levels that kvroute does not have -> the nearest level."""


@dataclass(frozen=True, slots=True)
class MappedFlag:
    """The translation of a flag: option values by dotted path, and a note."""

    options: Mapping[str, object]
    note: str = ""
    is_used: bool = False
    """True where the flag has an effect although another flag sets the options."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `map_value` gets the flag's value and all flags; raises ConfigError."""

    map_value: Callable[[str, Given], MappedFlag]
    is_switch: bool = False


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings for the configuration, and one line of report for each flag."""

    settings: tuple[ConfigSetting, ...]
    lines: tuple[str, ...]


def translate(given: Given) -> Translation:
    """Translate the flags of the command line and of the dynamic configuration file into settings. Pure.

    Raises ConfigError with the flag as path.
    """
    settings: list[ConfigSetting] = []
    lines: list[str] = []
    for name in given:
        mapped = FLAGS[name].map_value(given[name], given)
        settings += [ConfigSetting(split(path), value, f"--{name}") for path, value in mapped.options.items()]
        parts = [f"{path}={shown(value)}" for path, value in mapped.options.items()]
        if mapped.note:
            parts.append(mapped.note if parts or mapped.is_used else f"no effect: {mapped.note}")
        lines.append(f"--{name}: {'; '.join(parts)}")
    return Translation(tuple(settings), tuple(lines))


def check_whole_line(given: Given) -> None:
    """Check what that router requires of its command line. Pure. Raises ConfigError with the flag as path."""
    for name in ("service-discovery", "routing-logic"):
        if not given.get(name):
            raise ConfigError(
                f"--{name}", "must be given, as in that router; `kvroute serve` needs no flag of that router"
            )
    if given["service-discovery"] == "static":
        for name in ("static-backends", "static-models"):
            if not given.get(name):
                raise ConfigError(f"--{name}", "must be given with --service-discovery static")
        if "static-backend-health-checks" in given:
            _check_model_types(given.get("static-model-types"))
    if given["routing-logic"] == "session" and not given.get("session-key"):
        raise ConfigError("--session-key", "must be given with --routing-logic session")
    intervals = ["engine-stats-interval", "request-stats-window"]
    if "log-stats" in given:
        intervals.append("log-stats-interval")
    for name in intervals:
        if name in given and _number(name, given[name]) <= 0:
            raise ConfigError(f"--{name}", "must be greater than 0")
    for name in ("sentry-traces-sample-rate", "sentry-profile-session-sample-rate"):
        if name in given and not 0 <= _number(name, given[name]) <= 1:
            raise ConfigError(f"--{name}", "must be between 0 and 1")


def _check_model_types(types: str | None) -> None:
    flag = "--static-model-types"
    if types is None:
        raise ConfigError(flag, "must be given with --static-backend-health-checks")
    for model_type in _list(types):
        if model_type not in MODEL_TYPES:
            raise _one_of(flag.removeprefix("--"), model_type, MODEL_TYPES)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name}", f"{text!r} is not a number") from None


def dynamic_flags(document: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """The flags in a dynamic configuration file, and its unknown keys. Pure.

    In this file `static_models` may be a mapping with the backends and the type of each model. Raises
    ConfigError.
    """
    if not isinstance(document, dict):
        raise ConfigError("", "must be a mapping, such as {service_discovery: static, ...}")
    flags: dict[str, str] = {}
    unknown: list[str] = []
    for key, value in document.items():
        name = str(key).replace("_", "-")
        if name == "static-models" and isinstance(value, dict):
            flags.update(_static_models(value, unknown))
        elif name == "static-aliases" and isinstance(value, dict):
            flags[name] = ",".join(f"{alias}:{model}" for alias, model in value.items())
        elif name not in FLAGS or name in DYNAMIC_FILES:
            unknown.append(str(key))
        elif FLAGS[name].is_switch:
            if value:
                flags[name] = "true"
        elif value is not None:
            flags[name] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return flags, tuple(unknown)


def _static_models(models: Mapping[object, object], unknown: list[str]) -> dict[str, str]:
    backends, names, types = list[str](), list[str](), list[str]()
    for name, details in models.items():
        urls = details.get("static_backends", []) if isinstance(details, dict) else None
        if not isinstance(urls, list) or not isinstance(details, dict):
            raise ConfigError(f"static_models.{name}", "must have a list static_backends")
        backends += map(str, urls)
        names += [str(name)] * len(urls)
        if "static_model_type" in details:
            types += [str(details["static_model_type"])] * len(urls)
        unknown += [f"static_models.{name}.{key}" for key in details if key not in _MODEL_KEYS]
    flags = {"static-backends": ",".join(backends), "static-models": ",".join(names)}
    return {**flags, "static-model-types": ",".join(types)} if types else flags


_MODEL_KEYS: Final = ("static_backends", "static_model_type")
DYNAMIC_FILES: Final = ("dynamic-config-yaml", "dynamic-config-json")
"""The flags that name a dynamic configuration file."""


def shown(value: object) -> str:
    """The value of an option for the report, without credentials in URLs."""
    if isinstance(value, str):
        return without_userinfo(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return without_userinfo(text.removesuffix("\n").removesuffix("\n..."))


# --- translation of each flag
# ------------------------------------------------------------------------------------


def _sets(path: str) -> Callable[[str, Given], MappedFlag]:
    return lambda value, _: MappedFlag({path: value})


def _noted(reason: str, *, is_used: bool = False) -> Callable[[str, Given], MappedFlag]:
    return lambda _value, _given: MappedFlag({}, reason, is_used)


def _in_kubernetes(map_value: Callable[[str, Given], MappedFlag]) -> Callable[[str, Given], MappedFlag]:
    """The flag has an effect only with `--service-discovery k8s`."""
    no_effect = MappedFlag({}, "only with --service-discovery k8s")
    return lambda value, given: (
        map_value(value, given) if given.get("service-discovery") == "k8s" else no_effect
    )


def _one_of(flag: str, value: str, choices: Sequence[str]) -> ConfigError:
    return ConfigError(f"--{flag}", f"{value!r} is not one of {', '.join(choices)}")


def _service_discovery(value: str, given: Given) -> MappedFlag:
    if value == "static":
        return MappedFlag({}, "the workers come from --static-backends and --worker", is_used=True)
    if value == "external-only":
        raise ConfigError(
            "--service-discovery", "external-only is not supported: kvroute routes only to vLLM workers"
        )
    if value != "k8s":
        raise _one_of("service-discovery", value, ("static", "k8s"))
    options: dict[str, object] = {"fleet.kubernetes.enabled": True}
    # The defaults of that router.
    if "k8s-namespace" not in given:
        options["fleet.kubernetes.namespace"] = "default"
    if "k8s-port" not in given:
        options["fleet.kubernetes.port"] = 8000
    return MappedFlag(options)


def _kubernetes_kind(value: str, _: Given) -> MappedFlag:
    if value == "pod-ip":
        return MappedFlag({"fleet.kubernetes.resource": "pods"})
    if value != "service-name":
        raise _one_of("k8s-service-discovery-type", value, ("pod-ip", "service-name"))
    return MappedFlag(
        {"fleet.kubernetes.resource": "endpointslices"},
        "requests go directly to the pods of the Services; --k8s-port is the port of the pods",
    )


def _watch_timeout(value: str, _: Given) -> MappedFlag:
    return (
        MappedFlag({}, "0 means no timeout in that router")
        if value == "0"
        else MappedFlag({"fleet.kubernetes.watch_s": value})
    )


def _health_timeout(value: str, given: Given) -> MappedFlag:
    """That router has one timeout for each kind of discovery."""
    if given.get("service-discovery") != "k8s" and "static-backend-health-check-timeout-seconds" in given:
        return MappedFlag({}, "--static-backend-health-check-timeout-seconds is given")
    return MappedFlag({"fleet.health.timeout_s": value})


def _static_health(path: str) -> Callable[[str, Given], MappedFlag]:
    def map_value(value: str, given: Given) -> MappedFlag:
        if given.get("service-discovery") == "k8s":
            return MappedFlag({}, "--service-discovery is k8s")
        return MappedFlag({path: value})

    return map_value


def _root_path(value: str, _: Given) -> MappedFlag:
    path = value.rstrip("/")
    return MappedFlag({"server.root_path": path}) if path else MappedFlag({}, "the path is empty")


def _backends(value: str, given: Given) -> MappedFlag:
    if given.get("service-discovery") == "k8s":
        return MappedFlag({}, "--service-discovery is k8s")
    urls, models = _list(value), _list(given.get("static-models", ""))
    if models and len(models) != len(urls):
        raise ConfigError("--static-models", f"has {len(models)} models for {len(urls)} backends")
    served: dict[str, list[str]] = {url: [] for url in urls}
    for url, model in zip(urls, models, strict=False):
        served[url].append(model)
    roles = _roles(given)
    labels = _list(given.get("static-model-labels", "")) if roles else []
    if labels and len(labels) != len(urls):
        raise ConfigError("--static-model-labels", f"has {len(labels)} labels for {len(urls)} backends")
    checks_health = "static-backend-health-checks" in given
    role_of = {url: roles.get(label) for url, label in zip(urls, labels, strict=False)}
    return MappedFlag(
        {
            "fleet.workers": [
                {"url": url, "models": names}
                | ({} if checks_health else {"needs_health": False})
                | ({"role": role_of[url]} if role_of.get(url) else {})
                for url, names in served.items()
            ]
        }
    )


def _health_checks(_: str, given: Given) -> MappedFlag:
    if "static-backends" not in given or given.get("service-discovery") == "k8s":
        return MappedFlag({}, "there are no --static-backends")
    reason = "a backend's /health must answer 200; without the flag any answer is enough"
    return MappedFlag({}, reason, is_used=True)


def _models(_: str, given: Given) -> MappedFlag:
    if "static-backends" not in given or given.get("service-discovery") == "k8s":
        return MappedFlag({}, "there are no --static-backends")
    reason = "used only for workers whose /v1/models cannot be read"
    return MappedFlag({}, reason, is_used=True)


def _aliases(value: str, _: Given) -> MappedFlag:
    aliases: dict[str, object] = {}
    for pair in _list(value):
        alias, colon, model = pair.partition(":")
        if not colon or not alias or not model:
            raise ConfigError("--static-aliases", f"{pair!r} is not alias:model")
        aliases[f'fleet.aliases."{alias}"'] = model
    return MappedFlag(aliases)


def _routing_logic(value: str, given: Given) -> MappedFlag:
    if value in STRATEGIES:
        controller: dict[str, object] = {}
        # The kvaware of that router asks the controller to which the workers report.
        if needs_of(value) is Needs.TOKENS and _has_controller():
            controller[f"{CONTROLLER}.enabled"] = True
            if "lmcache-controller-port" not in given:
                controller[f"{CONTROLLER}.pull"] = "0.0.0.0:9000"
        if value == "prefixaware":
            return MappedFlag(
                {"routing.strategy": value, **_LONGEST_MATCH},
                "a longer match wins while its worker is idle; loadaware also evens out recent work",
            )
        return MappedFlag({"routing.strategy": value, **controller})
    if value == "loadaware":
        return MappedFlag(
            {"routing.strategy": "prefixaware"}, "its cost counts load as well as cached prefixes"
        )
    if value in _SPLIT_LOGICS:
        roles = _roles(given)
        options: dict[str, object] = {
            "routing.strategy": "prefixaware",
            "routing.prefill_decode.threshold_tokens": 0,
        }
        if given.get("service-discovery") == "k8s":
            options["fleet.kubernetes.role_label"] = "model"
            for role in ("prefill", "decode"):
                labels = [label for label, its_role in roles.items() if its_role == role]
                options[f"fleet.kubernetes.{role}_labels"] = labels
        return MappedFlag(
            options, "prompts whose KV the decode worker holds stay there; without a threshold, cost decides"
        )
    raise _one_of("routing-logic", value, (*STRATEGIES, "loadaware", *_SPLIT_LOGICS))


_SPLIT_LOGICS = ("disaggregated_prefill", "disaggregated_prefill_orchestrated")


def _roles(given: Given) -> dict[str, str]:
    """The role of each model label, if that router would hand prompts over. Raises ConfigError."""
    if given.get("routing-logic") not in _SPLIT_LOGICS:
        return {}
    roles: dict[str, str] = {}
    for role in ("prefill", "decode"):
        labels = _list(given.get(f"{role}-model-labels", ""))
        if not labels:
            raise ConfigError(f"--{role}-model-labels", f"must be given with {given['routing-logic']}")
        roles |= dict.fromkeys(labels, role)
    return roles


def _labels(_: str, given: Given) -> MappedFlag:
    if not _roles(given):
        return MappedFlag({}, "used only with --routing-logic disaggregated_prefill")
    return MappedFlag({}, "gives workers their roles", is_used=True)


_LONGEST_MATCH: Final[dict[str, object]] = {
    f"routing.costs.{name}": 0 for name in ("balance_weight", "tie_share", "tie_ms")
}
"""Without these terms no match is too short for an idle worker: that router's end-to-end test wants requests
with 128 equal characters on one worker."""


def _has_controller() -> bool:
    return bool(shape_at(Config, split(CONTROLLER)))


def _controller(key: str, form: str = "{}") -> Callable[[str, Given], MappedFlag]:
    """An option of the LMCache controller; it has an effect only with `--routing-logic kvaware`."""

    def map_value(value: str, given: Given) -> MappedFlag:
        if needs_of(given.get("routing-logic")) is not Needs.TOKENS:
            return MappedFlag({}, "only with --routing-logic kvaware")
        if not _has_controller():
            return MappedFlag(
                {},
                "kvroute has no LMCache controller; it learns the workers' cache content from other sources",
            )
        return MappedFlag({f"{CONTROLLER}.{key}": form.format(value)})

    return map_value


def _session_key(value: str, _: Given) -> MappedFlag:
    return MappedFlag({"routing.session.keys": [f"header:{value}", f"body:{value}"]})


def _retries(_: str, __: Given) -> MappedFlag:
    statuses = [408, 429, 500, 502, 503, 504]
    return MappedFlag(
        {"retries.statuses": statuses}, "retried on another worker; a lost connection is always retried"
    )


def _rewriter(value: str, _: Given) -> MappedFlag:
    if value != "noop":
        raise ConfigError("--request-rewriter", "is not supported: requests are forwarded unchanged")
    return MappedFlag({}, "requests are forwarded unchanged")


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


_RETRY_BUDGET = "retries go to the next best worker, within retries.budget_percent and without a pause"
_NO_BATCH = "kvroute has no batch API; requests to /v1/files and /v1/batches are answered 404"
_NO_TRACES = "that router sends traces over gRPC, kvroute over HTTP: set tracing.endpoint (kvroute[otel])"
_NO_SENTRY = "kvroute does not report to Sentry; errors are in the log"
_NO_SEMANTIC = "kvroute has no semantic cache"
_DYNAMIC = "its flags follow; a changed file is loaded while kvroute runs"

FLAGS: Final[dict[str, Flag]] = {
    "root-path": Flag(_root_path),
    # Workers
    "service-discovery": Flag(_service_discovery),
    "static-backends": Flag(_backends),
    "static-models": Flag(_models),
    "static-aliases": Flag(_aliases),
    "static-model-types": Flag(_noted("every endpoint is forwarded, and probes do not need a model type")),
    "static-model-labels": Flag(_labels),
    "static-backend-health-checks": Flag(_health_checks, is_switch=True),
    "static-backend-health-check-interval": Flag(_static_health("fleet.health.interval_s")),
    "static-backend-health-check-timeout-seconds": Flag(_static_health("fleet.health.timeout_s")),
    "backend-health-check-timeout-seconds": Flag(_health_timeout),
    "k8s-service-discovery-type": Flag(_in_kubernetes(_kubernetes_kind)),
    "k8s-port": Flag(_in_kubernetes(_sets("fleet.kubernetes.port"))),
    "k8s-namespace": Flag(_in_kubernetes(_sets("fleet.kubernetes.namespace"))),
    "k8s-label-selector": Flag(_in_kubernetes(_sets("fleet.kubernetes.selector"))),
    "k8s-watcher-timeout-seconds": Flag(_in_kubernetes(_watch_timeout)),
    "external-providers-config": Flag(
        _noted("kvroute routes only to vLLM workers; models of external providers are not served")
    ),
    # Routing
    "routing-logic": Flag(_routing_logic),
    "session-key": Flag(_session_key),
    "kv-aware-threshold": Flag(_noted("cached tokens are part of the cost; there is no threshold")),
    "prefix-min-match-length": Flag(_noted("cached tokens are part of the cost, for a match of any length")),
    "loadaware-beta": Flag(_noted("load is part of the cost of prefixaware")),
    "prefill-model-labels": Flag(_labels),
    "decode-model-labels": Flag(_labels),
    "lmcache-controller-port": Flag(_controller("pull", "0.0.0.0:{}")),
    "lmcache-controller-reply-port": Flag(_controller("reply", "0.0.0.0:{}")),
    "lmcache-controller-heartbeat-port": Flag(_controller("heartbeat", "0.0.0.0:{}")),
    "lmcache-worker-timeout": Flag(_controller("worker_timeout_s")),
    "lmcache-health-check-interval": Flag(_noted("heartbeats are checked when they arrive")),
    # Failures
    "max-instance-failover-reroute-attempts": Flag(_noted(_RETRY_BUDGET)),
    "enable-retries": Flag(_retries, is_switch=True),
    "max-retries": Flag(_noted(_RETRY_BUDGET)),
    "initial-backoff-ms": Flag(_noted(_RETRY_BUDGET)),
    "max-backoff-ms": Flag(_noted(_RETRY_BUDGET)),
    "backoff-multiplier": Flag(_noted(_RETRY_BUDGET)),
    "jitter-factor": Flag(_noted(_RETRY_BUDGET)),
    # Figures, logs, traces
    "engine-stats-interval": Flag(_sets("fleet.health.metrics_interval_s")),
    "request-stats-window": Flag(_sets("metrics.compat_window_s")),
    "log-stats": Flag(_noted("the figures are on /metrics"), is_switch=True),
    "log-stats-interval": Flag(_noted("the figures are on /metrics")),
    "otel-endpoint": Flag(_noted(_NO_TRACES)),
    "otel-service-name": Flag(_noted(_NO_TRACES)),
    "otel-secure": Flag(_noted(_NO_TRACES), is_switch=True),
    "sentry-dsn": Flag(_noted(_NO_SENTRY)),
    "sentry-traces-sample-rate": Flag(_noted(_NO_SENTRY)),
    "sentry-profile-session-sample-rate": Flag(_noted(_NO_SENTRY)),
    # Extensions
    "enable-batch-api": Flag(_noted(_NO_BATCH), is_switch=True),
    "file-storage-class": Flag(_noted(_NO_BATCH)),
    "file-storage-path": Flag(_noted(_NO_BATCH)),
    "batch-processor": Flag(_noted(_NO_BATCH)),
    "callbacks": Flag(_noted("kvroute does not run external code")),
    "request-rewriter": Flag(_rewriter),
    "feature-gates": Flag(_noted("kvroute does not have these features")),
    "semantic-cache-model": Flag(_noted(_NO_SEMANTIC)),
    "semantic-cache-dir": Flag(_noted(_NO_SEMANTIC)),
    "semantic-cache-threshold": Flag(_noted(_NO_SEMANTIC)),
    # Read by the command
    "dynamic-config-yaml": Flag(_noted(_DYNAMIC, is_used=True)),
    "dynamic-config-json": Flag(_noted(_DYNAMIC, is_used=True)),
}
"""Without `--host`, `--port`, `--log-level`, `--log-format` and `--version`, which kvroute has itself."""
