"""Where settings come from: a YAML file, the environment, `--set`, named flags.

Each source yields `ConfigSetting`s, one per leaf, in the order in which they win: the last one counts.
What is wrong with a source is collected as `ConfigError`s, so that one run reports all of it.
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


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One value at one path. `origin` is what a person would look for: `kvroute.yaml:12`, a variable's name.

    `inner` has the origins of what lies inside a list.
    """

    path: Path
    value: object
    origin: str
    inner: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a source said, and what was wrong with it."""

    settings: tuple[ConfigSetting, ...] = ()
    problems: tuple[ConfigError, ...] = ()


# --- the file ---------------------------------------------------------------------------------------------


def from_file(root: type[Options], file: pathlib.Path) -> Settings:
    """Read a YAML file (1.1: `on` and `off` are booleans).

    Duplicate keys are problems, an empty file is none. Relative paths in it start at its own folder.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        return Settings(problems=(ConfigError("", f"cannot read {file}: {reason}"),))
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        return Settings(problems=(ConfigError("", f"{file} is not YAML: {_one_line(exc)}"),))
    if node is None or data is None:
        return Settings()
    if not isinstance(node, yaml.MappingNode):
        return Settings(
            problems=(ConfigError("", f"{file}: expected sections such as `server:` at the top"),)
        )
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


def _survey(
    node: yaml.Node, path: Path, file: str, lines: dict[Path, int], problems: list[ConfigError]
) -> None:
    """Note the line of every key below `node`; report keys that come twice or are not text."""
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
    """The origin of `path` or of the nearest thing around it (a merged-in key has no line of its own)."""
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

    Names of options are upper case in a variable; keys of a mapping (model names) are taken as they
    are. Other names are none of ours: Kubernetes puts `KVROUTE_PORT` and its like into every pod
    beside a Service named kvroute.
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
    """Read `path=value` texts, as `--set` takes them."""
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
    """What to say about a path that no option has."""
    if not all(str(key) for key in path):
        return "there is an empty name in this path"
    meant = paths.suggestion(root, path)
    return f"unknown option; did you mean {dotted(meant)}?" if meant else "unknown option"


def parse(text: str, shape: Shape) -> object:
    """The value that `text` stands for where `shape` is allowed. Raises ValueError.

    A list is JSON or YAML (`[a, b]`), or its items with commas between them; a mapping is JSON or
    YAML; text is taken as it stands; numbers and booleans are YAML scalars. Nothing at all is an
    empty list, or "not set" where that is allowed.
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
    except yaml.YAMLError:
        value = None if kind is not object else text
    if not isinstance(value, kind):
        raise ValueError(f"expected {what}")
    return value


# --- leaves -----------------------------------------------------------------------------------------------


def _leaves(root: type[Options], path: Path, value: object) -> Iterable[tuple[Path, object]]:
    """Split a mapping into its leaves, so that sources merge key by key; lists are leaves, replaced whole."""
    if value is None and path and _is_section(paths.shape_at(root, path)):
        return  # `server:` with every key below it commented out
    if not isinstance(value, dict) or (not value and path):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(root, (*path, str(key)), inner)


def _is_section(shape: Shape) -> bool:
    return bool(paths.options_of(shape)) and type(None) not in shape
