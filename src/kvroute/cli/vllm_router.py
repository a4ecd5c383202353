"""The flags of production-stack's router in `kvroute serve`: translated to options and reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import yaml

from kvroute.app.config import Config
from kvroute.app.config_loading import ENVIRONMENT_PREFIX, ConfigSetting
from kvroute.app.config_paths import shape_at, split, without_userinfo
from kvroute.errors import ConfigError
from kvroute.routing.registry import STRATEGIES, needs_of
from kvroute.routing.strategy import Needs

Given = Mapping[str, str]
"""Flag name without leading dashes, such as `k8s-port`, -> value; "true" for a switch."""

DEFAULTS: Final[dict[str, object]] = {"server.host": "0.0.0.0", "server.port": 8001}
"""The default address of that router."""

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
        parts = [f"{path}={_shown(value)}" for path, value in mapped.options.items()]
        if mapped.note:
            parts.append(mapped.note if parts or mapped.is_used else f"no effect: {mapped.note}")
        lines.append(f"--{name}: {'; '.join(parts)}")
    return Translation(tuple(settings), tuple(lines))


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
            flags.update(_static_models(value))
        elif name == "static-aliases" and isinstance(value, dict):
            flags[name] = ",".join(f"{alias}:{model}" for alias, model in value.items())
        elif name not in FLAGS:
            unknown.append(str(key))
        elif FLAGS[name].is_switch:
            if value:
                flags[name] = "true"
        elif value is not None:
            flags[name] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return flags, tuple(unknown)


def _static_models(models: Mapping[object, object]) -> dict[str, str]:
    backends: list[str] = []
    names: list[str] = []
    for name, details in models.items():
        urls = details.get("static_backends", []) if isinstance(details, dict) else None
        if not isinstance(urls, list):
            raise ConfigError(f"static_models.{name}", "must have a list static_backends")
        backends += map(str, urls)
        names += [str(name)] * len(urls)
    return {"static-backends": ",".join(backends), "static-models": ",".join(names)}


def _shown(value: object) -> str:
    if isinstance(value, str):
        return without_userinfo(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return without_userinfo(text.removesuffix("\n").removesuffix("\n..."))


# --- translation of each flag
# ------------------------------------------------------------------------------------


def _sets(path: str) -> Callable[[str, Given], MappedFlag]:
    return lambda value, _: MappedFlag({path: value})


def _noted(why: str) -> Callable[[str, Given], MappedFlag]:
    return lambda _value, _given: MappedFlag({}, why)


def _in_kubernetes(map_value: Callable[[str, Given], MappedFlag]) -> Callable[[str, Given], MappedFlag]:
    """The flag has an effect only with `--service-discovery k8s`."""
    no_effect = MappedFlag({}, "only with --service-discovery k8s")
    return lambda value, given: (
        map_value(value, given) if given.get("service-discovery") == "k8s" else no_effect
    )


def _one_of(flag: str, value: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"--{flag}", f"{value!r} is not one of {', '.join(known)}")


def _service_discovery(value: str, given: Given) -> MappedFlag:
    if value == "static":
        return MappedFlag({}, "the workers come from --static-backends and --worker", is_used=True)
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


def _backends(value: str, given: Given) -> MappedFlag:
    if given.get("service-discovery") == "k8s":
        return MappedFlag({}, "--service-discovery is k8s")
    urls, models = _list(value), _list(given.get("static-models", ""))
    if models and len(models) != len(urls):
        raise ConfigError("--static-models", f"has {len(models)} models for {len(urls)} backends")
    served: dict[str, list[str]] = {url: [] for url in urls}
    for url, model in zip(urls, models, strict=False):
        served[url].append(model)
    return MappedFlag({"fleet.workers": [{"url": url, "models": names} for url, names in served.items()]})


def _models(_: str, given: Given) -> MappedFlag:
    if "static-backends" not in given or given.get("service-discovery") == "k8s":
        return MappedFlag({}, "there are no --static-backends")
    why = "used only for workers whose /v1/models cannot be read"
    return MappedFlag({}, why, is_used=True)


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
        return MappedFlag({"routing.strategy": value, **controller})
    if value == "loadaware":
        return MappedFlag(
            {"routing.strategy": "prefixaware"}, "its cost counts load as well as cached prefixes"
        )
    if value.startswith("disaggregated_prefill"):
        raise ConfigError(
            "--routing-logic", f"{value!r} is not supported: kvroute does not separate prefill and decode"
        )
    raise _one_of("routing-logic", value, (*STRATEGIES, "loadaware"))


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
    return [part.strip() for part in text.split(",") if part.strip()]


_RETRY_BUDGET = "retries go to the next best worker, within retries.budget_percent and without a pause"
_NO_BATCH = "kvroute has no batch API; requests to /v1/files and /v1/batches are answered 404"
_NO_TRACES = "kvroute exports no traces; metrics and logs contain the decision of each request"
_NO_SENTRY = "kvroute does not report to Sentry; errors are in the log"
_NO_SEMANTIC = "kvroute has no semantic cache"
_NO_ROLES = "kvroute does not separate prefill and decode"

FLAGS: Final[dict[str, Flag]] = {
    # Workers
    "service-discovery": Flag(_service_discovery),
    "static-backends": Flag(_backends),
    "static-models": Flag(_models),
    "static-aliases": Flag(_aliases),
    "static-model-types": Flag(_noted("every endpoint is forwarded, and probes do not need a model type")),
    "static-model-labels": Flag(_noted(_NO_ROLES)),
    "static-backend-health-checks": Flag(_noted("every worker is always probed"), is_switch=True),
    "backend-health-check-timeout-seconds": Flag(_sets("fleet.health.timeout_s")),
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
    "prefill-model-labels": Flag(_noted(_NO_ROLES)),
    "decode-model-labels": Flag(_noted(_NO_ROLES)),
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
    # `router_settings` reads these files and adds their flags
    "dynamic-config-yaml": Flag(_noted("read once, at the start; to change workers later, use fleet.file")),
    "dynamic-config-json": Flag(_noted("read once, at the start; to change workers later, use fleet.file")),
}
"""Without `--host`, `--port`, `--log-level` and `--log-format`, which kvroute has itself."""


def known_values(flags: Mapping[str, Any]) -> dict[str, str]:
    """The values of the flags on the command line, by flag."""
    return {
        name: "true" if FLAGS[name].is_switch else str(flags[parameter(name)])
        for name in FLAGS
        if flags.get(parameter(name)) not in (None, False)
    }


def parameter(name: str) -> str:
    """The name of a flag's click parameter."""
    return "router_" + name.replace("-", "_")


_Command = TypeVar("_Command", bound=Callable[..., Any])
_DYNAMIC_CONFIG_FLAGS = ("dynamic-config-yaml", "dynamic-config-json")


def router_flags(command: _Command) -> _Command:
    """Add that router's flags to a click command; `--help` does not list them."""
    for name, flag in FLAGS.items():
        # Only with dashes: click treats `--k8s_port` as an unknown flag.
        command = click.option(f"--{name}", parameter(name), is_flag=flag.is_switch, hidden=True)(command)
    return command


def router_settings(flags: dict[str, Any]) -> list[ConfigSetting]:
    """The settings of that router's flags; prints one line per flag on stderr.

    Replaces values of kvroute's own flags that only that router knows. Raises ConfigError. Blocks: reads the
    dynamic configuration file.
    """
    given = known_values(flags)
    if not given:
        return []
    unknown: tuple[str, ...] = ()
    for name in _DYNAMIC_CONFIG_FLAGS:
        if name in given:
            found, more = _read(name, Path(given[name]))
            given, unknown = {**found, **given}, (*unknown, *more)  # the command line wins
    translation = translate(given)
    defaults = _defaults(flags)
    lines = [
        *translation.lines,
        *(f"{key}: no effect: kvroute has no such option" for key in unknown),
        *(f"{'.'.join(map(str, each.path))}={each.value}: {each.origin}" for each in defaults),
    ]
    level = LOG_LEVELS.get(flags["log_level"])
    if level is not None:
        lines.append(f"--log-level: logging.level={level}")
        flags["log_level"] = level
    for line in lines:
        click.echo(f"kvroute: {line}", err=True)
    return [*defaults, *translation.settings]


def _defaults(flags: dict[str, Any]) -> list[ConfigSetting]:
    """The default address of that router; empty if a file, flag or variable may set the address."""
    context = click.get_current_context()
    if context.params.get("file") is not None:
        return []
    return [
        ConfigSetting(split(path), value, "that router's default")
        for path, value in DEFAULTS.items()
        if flags[path.rpartition(".")[2]] is None
        and ENVIRONMENT_PREFIX + path.upper().replace(".", "__") not in os.environ
        and not any(text.startswith(f"{path}=") for text in context.params.get("assignments", ()))
    ]


def _read(name: str, file: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    try:
        return dynamic_flags(yaml.safe_load(file.read_text(encoding="utf-8")) or {})  # JSON is YAML
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--{name}", f"cannot read {file}: {reason}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"--{name}", f"{file} is not YAML or JSON") from exc
    except ConfigError as exc:
        raise ConfigError(f"--{name}", f"{file}: {exc}") from exc
