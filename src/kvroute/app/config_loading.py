"""The sources of settings: a YAML file, the environment, and `--set`.

Each source yields one `ConfigSetting` per leaf; of several with the same path the last one counts. Problems
are collected as `ConfigError`s, so that one run reports every problem.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvroute.app import config_paths as paths
from kvroute.app.config_paths import Path, Shape, dotted
from kvroute.errors import ConfigError
from kvroute.options import Options

ENVIRONMENT_PREFIX = "KVROUTE__"

_RENAMED = {
    "kv_events.max_aside_blocks": "kv_events.max_orphan_blocks",
    "lmcache.l2.deadline_ms": "lmcache.l2.timeout_ms",
    "tokens.deadline_ms": "tokens.timeout_ms",
    "tokens.deadline_share": "tokens.timeout_share",
    "tokens.max_deadline_ms": "tokens.max_timeout_ms",
}


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One value at one path, with its origin, such as `kvroute.yaml:12` or the name of a variable.

    `inner` has the origins of the values inside a list.
    """

    path: Path
    value: object
    origin: str
    inner: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings and problems of one source."""

    settings: tuple[ConfigSetting, ...] = ()
    problems: tuple[ConfigError, ...] = ()


# --- the file ---------------------------------------------------------------------------------------------


def from_file(root: type[Options], file: pathlib.Path) -> Settings:
    """Read a YAML 1.1 file (`on` and `off` are booleans).

    Duplicate keys are problems; an empty file is not. Relative paths are relative to the file's folder.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        return Settings(problems=(ConfigError("", f"cannot read {file}: {reason}"),))
    try:
        return _from_yaml(root, text, file)
    except RecursionError:  # also an anchor that contains itself
        return Settings(problems=(ConfigError("", f"{file} is not YAML: it is nested too deeply"),))


def _from_yaml(root: type[Options], text: str, file: pathlib.Path) -> Settings:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        return Settings(problems=(ConfigError("", f"{file} is not YAML: {_one_line(exc)}"),))
    except ValueError as exc:  # a date or a number that Python does not have
        return Settings(problems=(ConfigError("", f"{file} is not YAML: {exc}"),))
    if node is None or data is None:
        return Settings()
    if not isinstance(node, yaml.MappingNode):
        return Settings(
            problems=(ConfigError("", f"{file}: expected sections such as `server:` at the top"),)
        )
    if problem := _other_kind(data, file):
        return Settings(problems=(ConfigError("", problem),))
    lines: dict[Path, int] = {}
    problems: list[ConfigError] = []
    _survey(node, (), file.name, lines, problems)
    origins = {path: f"{file.name}:{line}" for path, line in lines.items()}
    settings = []
    for path, value in _leaves(root, (), data):
        shape = paths.shape_at(root, path)
        if pathlib.Path in shape and isinstance(value, str) and value:
            value = str(file.parent / pathlib.Path(value).expanduser())
        inner = {
            place: origin
            for place, origin in origins.items()
            if len(place) > len(path) and place[: len(path)] == path
        }
        settings.append(ConfigSetting(path, value, _origin_of(path, origins, file.name), inner))
    return Settings(tuple(settings), tuple(problems))


def _other_kind(data: Mapping[str, object], file: pathlib.Path) -> str | None:
    """What the file is and which command reads it, if it is another of kvroute's files."""
    if "apiVersion" in data and "kind" in data:
        return (
            f"{file} is an endpoint spec (kind: {data['kind']}), not a configuration: use `kvroute check -f "
            f"{file}`, `kvroute up -f {file}` or `kvroute render -f {file} --to TARGET`"
        )
    if set(data) == {"workers"}:
        return (
            f"{file} is a file of workers, not a configuration: `kvroute serve --set fleet.file={file}` "
            f"reads it, and `kvroute check --set fleet.file={file}` checks it"
        )
    if set(data) == {"keys"}:
        return (
            f"{file} is a file of API keys, not a configuration: `kvroute keys check {file}` checks it, and "
            f"`kvroute serve --set server.client_keys.file={file}` reads it"
        )
    return None


def _survey(
    node: yaml.Node, path: Path, file: str, lines: dict[Path, int], problems: list[ConfigError]
) -> None:
    """Store the line of every key below `node` in `lines`; report duplicate keys and keys that are not
    text."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            lines[*path, number] = item.start_mark.line + 1
            _survey(item, (*path, number), file, lines, problems)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        line = key.start_mark.line + 1
        here = (*path, str(key.value))
        if key.tag == "tag:yaml.org,2002:bool":
            problems.append(
                ConfigError(
                    dotted(here), f"YAML reads this key as a boolean: put it in quotes ({file}:{line})"
                )
            )
        if key.value in first:
            problems.append(
                ConfigError(dotted(here), f"given twice, in lines {first[key.value]} and {line} of {file}")
            )
        first.setdefault(key.value, line)
        lines[here] = line
        _survey(value, here, file, lines, problems)


def _origin_of(path: Path, origins: Mapping[Path, str], default: str) -> str:
    """The origin of `path`, or of its nearest parent for a key from a YAML merge."""
    while path:
        if path in origins:
            return origins[path]
        path = path[:-1]
    return default


def _one_line(exc: yaml.YAMLError) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem and exc.problem_mark:
        return f"{exc.problem} (line {exc.problem_mark.line + 1}, column {exc.problem_mark.column + 1})"
    return " ".join(str(exc).split())


# --- text: environment and --set --------------------------------------------------------------------------


def from_environment(root: type[Options], environ: Mapping[str, str]) -> Settings:
    """Read `KVROUTE__SECTION__KEY` variables.

    Option names are in upper case; keys of a mapping (model names) keep their case. Variables with another
    prefix are ignored: Kubernetes sets `KVROUTE_PORT` and others in every pod if a Service is named kvroute.
    """
    settings: list[ConfigSetting] = []
    problems: list[ConfigError] = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        path = _environment_path(root, name.removeprefix(ENVIRONMENT_PREFIX).split("__"))
        _from_text(root, path, environ[name], name, settings, problems)
    return Settings(tuple(settings), tuple(problems))


def _environment_path(root: type[Options], segments: Sequence[str]) -> Path:
    path: Path = ()
    for segment in segments:
        shape = paths.shape_at(root, path)
        is_free = bool(shape) and not paths.options_of(shape)
        path = (*path, segment if is_free else segment.lower())
    return path


def from_assignments(root: type[Options], assignments: Iterable[str]) -> Settings:
    """Read the `path=value` texts of `--set`."""
    settings: list[ConfigSetting] = []
    problems: list[ConfigError] = []
    for text in assignments:
        name, equals, value = text.partition("=")
        try:
            path = paths.split(name.strip())
        except ValueError:
            equals = ""
        if not equals:
            problems.append(ConfigError("", "--set takes PATH=VALUE, such as --set server.port=8081"))
            continue
        _from_text(root, path, value, f"--set {dotted(path)}", settings, problems)
    return Settings(tuple(settings), tuple(problems))


def _from_text(
    root: type[Options],
    path: Path,
    text: str,
    origin: str,
    settings: list[ConfigSetting],
    problems: list[ConfigError],
) -> None:
    shape = paths.shape_at(root, path)
    if not shape:
        problems.append(ConfigError(dotted(path), f"{unknown(root, path)} ({origin})"))
        return
    try:
        value = parse(text, shape)
    except ValueError as exc:
        problems.append(ConfigError(dotted(path), f"{exc} ({origin})"))
        return
    settings.extend(ConfigSetting(leaf, item, origin) for leaf, item in _leaves(root, path, value))


def unknown(root: type[Options], path: Path) -> str:
    """The error message for a path that no option has."""
    if not all(str(key) for key in path):
        return "this path contains an empty name"
    if (now := _RENAMED.get(dotted(path))) is not None:
        return f"this option is now called {now}"
    meant = paths.suggestion(root, path)
    return f"unknown option; did you mean {dotted(meant)}?" if meant else "unknown option"


def parse(text: str, shape: Shape) -> object:
    """Parse `text` as a value of the types in `shape`. Raises ValueError.

    A list is JSON or YAML (`[a, b]`), or items separated by commas. A mapping is JSON or YAML. Text is used
    unchanged; numbers and booleans are YAML scalars. An empty text is an empty list, or None where None is
    allowed.
    """
    stripped = text.strip()
    if any(paths.is_list(plain) for plain in shape) and not stripped.startswith("{"):
        if stripped.startswith("["):
            return _yaml(stripped, list, "a list such as [a, b]")
        return [part.strip() for part in stripped.split(",") if part.strip()]
    if not stripped and type(None) in shape:
        return None
    if any(paths.is_mapping(plain) for plain in shape) and (stripped.startswith("{") or len(shape) == 1):
        return _yaml(stripped, dict, "a mapping such as {a: 1}")
    if all(paths.is_text(plain) for plain in shape):
        return text
    return _yaml(stripped, object, "a value")


def _yaml(text: str, kind: type, what: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None if kind is not object else text
    if not isinstance(value, kind):
        raise ValueError(f"expected {what}")
    return value


# --- leaves -----------------------------------------------------------------------------------------------


def _leaves(root: type[Options], path: Path, value: object) -> Iterable[tuple[Path, object]]:
    """Split a mapping into its leaves, so that sources are merged key by key. A list is one leaf."""
    if value is None and path and _is_section(paths.shape_at(root, path)):
        return  # for example `server:` with all its keys commented out
    if not isinstance(value, dict) or (not value and path):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(root, (*path, str(key)), inner)


def _is_section(shape: Shape) -> bool:
    return bool(paths.options_of(shape)) and type(None) not in shape
