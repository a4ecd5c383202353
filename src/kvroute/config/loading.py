"""Loads the configuration from file, environment and flags, with the origin of each value."""

from __future__ import annotations

import pathlib
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as attribute
from functools import partial
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvroute.access.admin_key import check_keys
from kvroute.access.jwt import check_default_key, check_key_file
from kvroute.access.key_file import read_key_file
from kvroute.config import paths as config_loading
from kvroute.config.composition import composed, named_plugins
from kvroute.config.config import Config
from kvroute.config.paths import (
    ConfigSetting,
    Path,
    Settings,
    dotted,
    from_assignments,
    from_environment,
    from_file,
    unknown,
)
from kvroute.errors import ConfigError, InvalidConfig
from kvroute.options import Options
from kvroute.secret_files import writers_problem
from kvroute.tls import Signature, client_context, server_context, signatures

_MAX_SECRET_BYTES = 1024 * 1024


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
    root, problems = Config, list[ConfigError]()
    sources = _read(root, given)
    names = named_plugins(sources, given.environ, given.assignments)
    if any(names):
        root, refused = composed(names)
        problems += refused
        sources = _read(root, given)
    problems += [problem for source in sources for problem in source.problems]
    data: dict[str, Any] = {}
    origins: dict[Path, str] = {}
    for source in sources:
        for setting in source.settings:
            _put(data, origins, setting)
    problems += _read_secrets(root, data, origins)
    try:
        config = root.model_validate(data)
    except ValidationError as exc:
        problems += _translate(root, exc.errors(include_url=False), data, origins)
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


def _read(root: type[Config], given: ConfigSource) -> list[Settings]:
    """The settings of all sources, the weakest first."""
    return [
        from_file(root, given.file) if given.file is not None else Settings(),
        from_environment(root, given.environ),
        from_assignments(root, given.assignments),
        Settings(given.flags),
    ]


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


def _read_secrets(root: type[Config], data: dict[str, Any], origins: dict[Path, str]) -> list[ConfigError]:
    """Read each secret `NAME` from the file in `NAME_file`; for a list, one item per line."""
    problems = []
    for path, _ in config_loading.walk(root):
        name = str(path[-1])
        target = (*path[:-1], name.removesuffix("_file"))
        shape = config_loading.shape_at(root, target)
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
    root: type[Config], errors: Sequence[ErrorDetails], data: Mapping[str, Any], origins: Mapping[Path, str]
) -> list[ConfigError]:
    """Pydantic's errors as `ConfigError`s: with dotted path and origin, never with the value of a secret."""
    found: dict[Path, str] = {}
    for error in errors:
        path = _path_in(data, error["loc"], missing=error["type"] == "missing")
        found.setdefault(path, _message(root, error, path))
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


def _message(root: type[Config], error: ErrorDetails, path: Path) -> str:
    if error["type"] == "extra_forbidden":
        return unknown(root, path)
    if error["type"] == "missing":
        return "is required"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    value = error["input"]
    is_plain = isinstance(value, (str, int, float, bool)) and len(str(value)) <= 60
    if (
        error["type"] == "value_error"
        or not is_plain
        or config_loading.is_secret(config_loading.shape_at(root, path))
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
