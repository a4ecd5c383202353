"""The configuration: all option classes together, loaded from file, environment and flags."""

from __future__ import annotations

import pathlib
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from functools import partial
from typing import Any

import yaml
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvroute.app import config_loading
from kvroute.app.config_loading import (
    ConfigSetting,
    Path,
    Settings,
    dotted,
    from_assignments,
    from_environment,
    from_file,
    unknown,
)
from kvroute.app.metrics_compat import MetricsOptions
from kvroute.epp.endpoints import EppOptions
from kvroute.errors import ConfigError, InvalidConfig
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.options import FleetOptions
from kvroute.gateway.admin_guard import check_keys
from kvroute.gateway.jwt import check_default_key, check_key_file
from kvroute.gateway.key_file import read_key_file
from kvroute.gateway.options import AdminOptions, ServerOptions
from kvroute.gateway.streams import StreamOptions
from kvroute.gateway.tracing import TracingOptions
from kvroute.gateway.waiting import AdmissionOptions
from kvroute.lmcache.options import LMCacheOptions
from kvroute.logs import LoggingOptions
from kvroute.options import Options, option
from kvroute.replicas.options import SharingOptions
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.scaling import ScalingOptions
from kvroute.routing.strategy import Needs
from kvroute.secret_files import writers_problem
from kvroute.tls import Signature, client_context, server_context, signatures
from kvroute.tokens.options import TokensOptions
from kvroute.upstream.options import RetryOptions, UpstreamOptions

_MAX_SECRET_BYTES = 1024 * 1024


class Config(Options):
    """All options of `kvroute serve`, one section per room."""

    server: ServerOptions = option(default_factory=ServerOptions)
    admin: AdminOptions = option(default_factory=AdminOptions)
    fleet: FleetOptions = option(default_factory=FleetOptions)
    routing: RoutingOptions = option(default_factory=RoutingOptions)
    tokens: TokensOptions = option(default_factory=TokensOptions)
    kv_events: KvEventsOptions = option(default_factory=KvEventsOptions)
    lmcache: LMCacheOptions = option(default_factory=LMCacheOptions)
    admission: AdmissionOptions = option(default_factory=AdmissionOptions)
    scaling: ScalingOptions = option(default_factory=ScalingOptions)
    epp: EppOptions = option(default_factory=EppOptions)
    upstream: UpstreamOptions = option(default_factory=UpstreamOptions)
    streams: StreamOptions = option(default_factory=StreamOptions)
    retries: RetryOptions = option(default_factory=RetryOptions)
    logging: LoggingOptions = option(default_factory=LoggingOptions)
    metrics: MetricsOptions = option(default_factory=MetricsOptions)
    tracing: TracingOptions = option(default_factory=TracingOptions)
    sharing: SharingOptions = option(default_factory=SharingOptions)

    @property
    def configured_names(self) -> frozenset[str]:
        """Names of models with options of their own."""
        return frozenset(self.routing.models) | frozenset(self.tokens.models)

    @model_validator(mode="after")
    def _refuse_client_keys_as_admin_keys(self) -> Config:
        if {key.get_secret_value() for key in self.server.api_keys} & set(self.admin.keys):
            raise ValueError("admin.api_key: is also one of server.api_keys, so every client would have it")
        return self

    @model_validator(mode="after")
    def _refuse_tokens_without_names(self) -> Config:
        if self.server.jwt.is_on and self.server.client_keys.file is None:
            raise ValueError(
                "server.jwt: set server.client_keys.file, which has what the client of a token may do"
            )
        return self

    @model_validator(mode="after")
    def _refuse_isolation_without_names(self) -> Config:
        if self.server.isolation == "per-key" and self.server.client_keys.file is None:
            raise ValueError("server.isolation: per-key needs named keys: set server.client_keys.file")
        return self

    @model_validator(mode="after")
    def _refuse_prefetch_with_processes(self) -> Config:
        if self.lmcache.prefetch.enabled and self.server.processes > 1:
            raise ValueError(
                "lmcache.prefetch.enabled: set server.processes to 1, because only one of several processes "
                "is connected to LMCache's servers"
            )
        return self

    @model_validator(mode="after")
    def _refuse_deletion_costs_without_pods_or_prompts(self) -> Config:
        if not self.scaling.deletion_cost.enabled:
            return self
        path = "scaling.deletion_cost.enabled"
        if not self.fleet.kubernetes.enabled:
            raise ValueError(f"{path}: needs fleet.kubernetes.enabled, because a worker must be a pod")
        if not (self.routing.may_need(Needs.PROMPT) or self.routing.may_need(Needs.TOKENS)):
            raise ValueError(
                f"{path}: needs routing.strategy prefixaware or kvaware; {self.routing.strategy} reads no "
                "prompts, so the caches' values are unknown"
            )
        return self


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration, with the origin of each value that is not a default."""

    config: Config
    origins: Mapping[Path, str]
    source: ConfigSource
    signature: Signature | None
    """Of the file, before it was read."""


@dataclass(frozen=True, slots=True)
class FlagFile:
    """A file whose content is translated into flags, and which may change while the gateway runs."""

    path: pathlib.Path
    read: Callable[[], Sequence[ConfigSetting]]
    """The settings of the file and of the other flags. Raises ConfigError. Blocks."""
    then: tuple[ConfigSetting, ...] = ()
    """Settings that win over those of `read`."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where a configuration comes from; `load` reads the files again, the other sources are as they were.

    The settings of a `flag_file` replace `flags` when it is read again.
    """

    file: pathlib.Path | None = None
    environ: Mapping[str, str] = attribute(default_factory=dict, repr=False)
    assignments: tuple[str, ...] = attribute(default=(), repr=False)
    flags: tuple[ConfigSetting, ...] = attribute(default=(), repr=False)
    flag_file: FlagFile | None = attribute(default=None, repr=False)

    @property
    def watched(self) -> pathlib.Path | None:
        """The file whose changes are noticed; the other one is read again, too."""
        return self.file if self.flag_file is None else self.flag_file.path

    def load(self) -> Loaded:
        """Like the function `load`."""
        flags = self.flags
        if self.flag_file is not None:
            flags = (*self.flag_file.read(), *self.flag_file.then)
        return load(file=self.file, environ=self.environ, assignments=self.assignments, flags=flags)

    def signature(self) -> Signature | None:
        """Of the watched file; None without one, or if it cannot be found. Blocks."""
        return None if self.watched is None else signatures((self.watched,))[0]

    def __str__(self) -> str:
        return "environment and flags" if self.watched is None else str(self.watched.absolute())


def load(
    *,
    file: pathlib.Path | None = None,
    environ: Mapping[str, str] | None = None,
    assignments: Iterable[str] = (),
    flags: Sequence[ConfigSetting] = (),
    flag_file: FlagFile | None = None,
) -> Loaded:
    """Load the configuration from file, environment, `--set` and flags; the last source wins.

    Mappings are merged key by key, lists are replaced. A `flag_file` is read by `Loaded.source` only; the
    caller has its present settings in `flags`. Raises InvalidConfig with all problems together. Blocks: reads
    the file and the files that contain secrets.
    """
    given = ConfigSource(file, dict(environ or {}), tuple(assignments), tuple(flags), flag_file)
    # Before the file: a change in between is loaded again. A flag file is always loaded once more.
    signature = given.signature() if flag_file is None else None
    sources = [
        from_file(Config, file) if file is not None else Settings(),
        from_environment(Config, given.environ),
        from_assignments(Config, given.assignments),
        Settings(given.flags),
    ]
    problems = [problem for source in sources for problem in source.problems]
    data: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for source in sources:
        for setting in source.settings:
            _put(data, origins, setting)
    problems += _read_secrets(data, origins)
    try:
        config = Config.model_validate(data)
    except ValidationError as exc:
        problems += _translate(exc.errors(include_url=False), data, origins)
    else:
        try:
            # Not in the options themselves: a configuration that is shown has asterisks instead of the key.
            check_keys(config.admin.keys)
        except ValueError as exc:
            path = ("admin", "api_key")
            problems.append(ConfigError(dotted(path), f"{exc}{origin_note(path, origins)}"))
    if problems:
        raise InvalidConfig(problems)
    return Loaded(config, origins, given, signature)


def check_files(config: Config) -> None:
    """Read every certificate file and file of keys once. Raises InvalidConfig with all problems.

    `load` does not do this: a configuration may be checked on another machine than the gateway's.
    """
    problems: list[ConfigError] = []

    def check(make: Callable[[], object]) -> None:
        try:
            make()
        except ConfigError as error:
            problems.append(error)

    if config.server.tls.is_on:
        check(lambda: server_context(config.server.tls, "server.tls"))
    for section, options in (
        ("server.jwt.tls", config.server.jwt.tls),
        ("upstream.tls", config.upstream.tls),
        ("lmcache.l2.tls", config.lmcache.l2.tls),
        ("sharing.tls", config.sharing.tls),
        ("lmcache.coordinator.server_tls", config.lmcache.coordinator.server_tls),
    ):
        if options.is_set:
            check(partial(client_context, options, section, ssl.create_default_context))
    check(lambda: check_key_file(config.server.jwt))
    keys_file = config.server.client_keys.file
    if keys_file is not None:
        check(lambda: check_default_key(config.server.jwt, [key.name for key in read_key_file(keys_file)]))
    if problems:
        raise InvalidConfig(problems)


def masked(config: Options) -> dict[str, Any]:
    """`config` as JSON data, with asterisks instead of secrets and of user names in URLs."""
    dumped: dict[str, Any] = _mask(config.model_dump(mode="json"))
    return dumped


def _mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mask(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mask(inner) for inner in value]
    return config_loading.without_userinfo(value) if isinstance(value, str) else value


def _put(data: dict[str, Any], origins: dict[Path, str], setting: ConfigSetting) -> None:
    """Set one value, instead of the values and origins of earlier sources at, above and below its path."""
    *above, last = setting.path
    for depth in range(1, len(setting.path)):
        origins.pop(setting.path[:depth], None)
    for stale in [path for path in origins if path[: len(setting.path)] == setting.path]:
        del origins[stale]
    node = data
    for key in above:
        inner = node.get(str(key))
        if not isinstance(inner, dict):
            inner = node[str(key)] = {}
        node = inner
    node[str(last)] = setting.value
    origins[setting.path] = setting.origin
    origins.update(setting.inner)


def _read_secrets(data: dict[str, Any], origins: dict[Path, str]) -> list[ConfigError]:
    """Read each secret `NAME` from the file in `NAME_file`; for a list, one item per line."""
    problems = []
    for path, _ in config_loading.walk(Config):
        name = str(path[-1])
        target = (*path[:-1], name.removesuffix("_file"))
        shape = config_loading.shape_at(Config, target)
        file = _get(data, path)
        if (
            not name.endswith("_file")
            or not config_loading.is_secret(shape)
            or not isinstance(file, str)
            or not file
        ):
            continue
        if _get(data, target):
            problems.append(ConfigError(dotted(path), f"set either this or {dotted(target)}, not both"))
            continue
        try:
            text = _read_secret(pathlib.Path(file))
        except ConfigError as exc:
            problems.append(ConfigError(dotted(path), f"{exc} ({origins[path]})"))
            continue
        secret: object = text
        if any(config_loading.is_list(plain) for plain in shape):
            lines = [line.strip() for line in text.splitlines()]
            secret = [line for line in lines if line and not line.startswith("#")]
            if not secret:
                problems.append(ConfigError(dotted(path), f"{file} holds no key ({origins[path]})"))
                continue
        _put(data, origins, ConfigSetting(target, secret, file))
    return problems


def _read_secret(file: pathlib.Path) -> str:
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_MAX_SECRET_BYTES).strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise ConfigError("", f"cannot read {file}: {reason}") from None
    if not text:
        raise ConfigError("", f"{file} is empty")
    if problem := writers_problem(file):
        raise ConfigError("", problem)
    return text


def _get(data: Mapping[str, Any], path: Path) -> object:
    node: object = data
    for key in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(str(key))
    return node


def _translate(
    errors: Sequence[ErrorDetails], data: Mapping[str, Any], origins: Mapping[Path, str]
) -> list[ConfigError]:
    """Pydantic's errors as `ConfigError`s: with dotted path and origin, never with the value of a secret."""
    found: dict[Path, str] = {}
    for error in errors:
        path = _path_in(data, error["loc"], missing=error["type"] == "missing")
        found.setdefault(path, _message(error, path))
    innermost = [
        path
        for path in found
        if not any(len(other) > len(path) and other[: len(path)] == path for other in found)
    ]
    return [ConfigError(dotted(path), found[path] + origin_note(path, origins)) for path in innermost]


def _path_in(data: object, loc: Sequence[str | int], *, missing: bool) -> Path:
    """The part of pydantic's location that exists in the data; the other parts name members of unions."""
    path: list[str | int] = []
    node = data
    for number, key in enumerate(loc):
        if (isinstance(node, Mapping) and key in node) or (
            isinstance(node, (list, tuple)) and isinstance(key, int) and key < len(node)
        ):
            node = node[key]  # type: ignore[index]
        elif not (missing and number == len(loc) - 1):
            continue
        path.append(key)
    return tuple(path)


def _message(error: ErrorDetails, path: Path) -> str:
    if error["type"] == "extra_forbidden":
        return unknown(Config, path)
    if error["type"] == "missing":
        return "is required"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    value = error["input"]
    is_plain = isinstance(value, (str, int, float, bool)) and len(str(value)) <= 60
    if (
        error["type"] == "value_error"
        or not is_plain
        or config_loading.is_secret(config_loading.shape_at(Config, path))
    ):
        return message
    return f"{message}, got {config_loading.without_userinfo(repr(value))}"


def origin_note(path: Path, origins: Mapping[Path, str]) -> str:
    """` (FILE:LINE)` or another origin of the option at `path`; empty for a default."""
    while path:
        if path in origins:
            return f" ({origins[path]})"
        path = path[:-1]
    return ""


Note = Callable[[Path, FieldInfo, bool], Sequence[str]]
"""Returns the comment lines above an option; the flag is True for a section."""

INDENT = "  "
LINE_CHARS = 110
"""Maximum length of a line that has a list or mapping."""


def resolved_yaml(loaded: Loaded) -> str:
    """The effective configuration as YAML; a comment names the origin of each value that is not a default."""
    lines = ["# Resolved configuration. Secrets are masked; a comment names the origin of a value."]
    lines += yaml_lines(
        type(loaded.config),
        masked(loaded.config),
        trailing=lambda path: ", ".join(
            dict.fromkeys(origin for node, origin in loaded.origins.items() if node[: len(path)] == path)
        ),
    )
    return "\n".join(lines) + "\n"


def yaml_lines(
    owner: type[Options],
    values: Mapping[str, Any],
    *,
    above: Note = lambda path, field, is_section: (),
    trailing: Callable[[Path], str] = lambda path: "",
    prefix: Path = (),
) -> Iterator[str]:
    """`values`, the JSON dump of `owner`, as YAML lines with comments, in the order of declaration."""
    indent = INDENT * len(prefix)
    for name, field in owner.model_fields.items():
        path = (*prefix, name)
        section = section_of(field, values[name])
        if not prefix:
            yield ""
        yield from (f"{indent}# {line}".rstrip() for line in above(path, field, section is not None))
        if section is not None:
            yield f"{indent}{name}:"
            yield from yaml_lines(section, values[name], above=above, trailing=trailing, prefix=path)
            continue
        first, *rest = _entry(name, values[name], LINE_CHARS - len(indent))
        comment = trailing(path)
        yield indent + first + (f"  # {comment}" if comment else "")
        yield from (indent + line for line in rest)


def section_of(field: FieldInfo, value: object) -> type[Options] | None:
    """The option class whose fields `value` has; None if the value is not a section."""
    if not isinstance(value, Mapping):
        return None
    classes = config_loading.options_of(config_loading.shape_of(field.annotation))
    return next((cls for cls in classes if value and value.keys() == cls.model_fields.keys()), None)


def _entry(name: str, value: object, width: int) -> list[str]:
    """`name: value`: lists and mappings of plain values on one line if they fit, all others as a block."""
    is_deep = isinstance(value, (list, dict)) and any(
        isinstance(inner, (list, dict)) for inner in (value.values() if isinstance(value, dict) else value)
    )
    line = f"{name}: {flow(value)}"
    if is_deep or (len(line) > width and isinstance(value, (list, dict))):
        block = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=10**6)
        return block.rstrip("\n").split("\n")
    return [line]


def flow(value: object) -> str:
    """`value` on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
