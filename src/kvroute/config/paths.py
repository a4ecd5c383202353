"""Options by path: the notation and types of paths, and the sources of the values at them.

A path is a tuple of keys from the root, `("fleet", "workers", 0, "url")`, written
`fleet.workers.0.url`; a key with a dot in it is quoted: `routing.models."Qwen2.5".strategy`.

The sources of settings are a YAML file, the environment, and `--set`.
Each source yields one `ConfigSetting` per leaf; of several with the same path the last one counts. Problems
are collected as `ConfigError`s, so that one run reports every problem.
"""

from __future__ import annotations

import difflib
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kvroute import yaml_text
from kvroute.errors import ConfigError
from kvroute.options import Options

Path = tuple[str | int, ...]
Shape = tuple[object, ...]
"""The plain types that are allowed at a path: the members of a union, without `Annotated`."""

_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SEGMENT = re.compile(r'"([^"]*)"|([^."]+)')


def dotted(path: Iterable[str | int]) -> str:
    """`path` in dotted notation."""
    return ".".join(f'"{key}"' if not key or re.search(r'[."\s]', key) else key for key in map(str, path))


def split(text: str) -> Path:
    """Parse a dotted path. Raises ValueError."""
    keys: list[str] = []
    rest = text
    while True:
        match = _SEGMENT.match(rest)
        if match is None:
            raise ValueError(f"{text!r} is not a dotted path")
        keys.append(match[1] if match[1] is not None else match[2])
        rest = rest[match.end() :]
        if not rest:
            return tuple(keys)
        if rest[0] != ".":
            raise ValueError(f"{text!r} is not a dotted path")
        rest = rest[1:]


def shape_of(annotation: object) -> Shape:
    """The plain types that `annotation` allows."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return shape_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(plain for part in typing.get_args(annotation) for plain in shape_of(part))
    return (annotation,)


def shape_at(root: type[Options], path: Path) -> Shape:
    """The types that are allowed at `path`; empty if there is no such option."""
    shape: Shape = (root,)
    for key in path:
        shape = tuple(plain for parent in shape for plain in _child(parent, key))
    return shape


def _child(parent: object, key: str | int) -> Shape:
    if is_options(parent):
        found = parent.model_fields.get(str(key))
        return shape_of(found.annotation) if found is not None else ()
    origin, args = typing.get_origin(parent), typing.get_args(parent)
    if not isinstance(origin, type) or not args:
        return ()
    if issubclass(origin, Mapping):
        return shape_of(args[1])
    if issubclass(origin, (Sequence, Set)):
        return shape_of(args[0])
    return ()


def is_options(plain: object) -> typing.TypeGuard[type[Options]]:
    return isinstance(plain, type) and issubclass(plain, Options)


def is_list(plain: object) -> bool:
    kind = typing.get_origin(plain) or plain
    return isinstance(kind, type) and issubclass(kind, (Sequence, Set)) and not issubclass(kind, (str, bytes))


def is_mapping(plain: object) -> bool:
    kind = typing.get_origin(plain) or plain
    return isinstance(kind, type) and (issubclass(kind, Mapping) or is_options(kind))


def is_text(plain: object) -> bool:
    """Whether a text is used unchanged as a value of this type: text, secrets, paths, literals."""
    if typing.get_origin(plain) is typing.Literal:
        return all(isinstance(word, str) for word in typing.get_args(plain))
    return isinstance(plain, type) and not is_mapping(plain) and not issubclass(plain, (bool, int, float))


def is_secret(shape: Shape) -> bool:
    """Whether a value of this shape, or one of its items, is a credential."""
    return any(plain is SecretStr or is_secret(_items(plain)) for plain in shape)


def without_userinfo(text: str) -> str:
    """`text` with asterisks instead of user and password in its URLs."""
    return _USERINFO.sub("**********", text)


def _items(plain: object) -> Shape:
    return tuple(inner for argument in typing.get_args(plain) for inner in shape_of(argument))


def options_of(shape: Shape) -> tuple[type[Options], ...]:
    """The option classes in `shape`, without those of its items."""
    return tuple(plain for plain in shape if is_options(plain))


def item_options(shape: Shape) -> tuple[type[Options], ...]:
    """The option classes of the items of lists and mappings in `shape`."""
    return tuple(
        inner
        for plain in shape
        if not is_options(plain) and (is_list(plain) or is_mapping(plain))
        for inner in options_of(_items(plain))
    )


def walk(owner: type[Options], prefix: Path = ()) -> Iterator[tuple[Path, FieldInfo]]:
    """All fields of `owner` and its sections, depth first in the order of declaration; not those in lists."""
    for name, found in owner.model_fields.items():
        path = (*prefix, name)
        yield path, found
        for inner in options_of(shape_of(found.annotation)):
            yield from walk(inner, path)


def suggestion(root: type[Options], path: Path) -> Path | None:
    """The option that was probably meant by the unknown `path`, or None."""
    *parent, last = path
    wanted = str(last).lower().replace("-", "_")
    siblings = [name for owner in options_of(shape_at(root, tuple(parent))) for name in owner.model_fields]
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
    if close:
        return (*parent, close[0])
    return next((found for found, _ in walk(root) if found[-1] == wanted), None)


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
        node, data = yaml_text.compose(text)
    except yaml.YAMLError as exc:
        return Settings(problems=(ConfigError("", f"{file} is not YAML: {_one_line(exc)}"),))
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
        shape = shape_at(root, path)
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
        shape = shape_at(root, path)
        is_free = bool(shape) and not options_of(shape)
        path = (*path, segment if is_free else segment.lower())
    return path


def from_assignments(root: type[Options], assignments: Iterable[str]) -> Settings:
    """Read the `path=value` texts of `--set`."""
    settings: list[ConfigSetting] = []
    problems: list[ConfigError] = []
    for text in assignments:
        name, equals, value = text.partition("=")
        try:
            path = split(name.strip())
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
    shape = shape_at(root, path)
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
    if len(path) > 1 and path[0] == "parts" and not shape_at(root, path[:2]):
        return f"no installed distribution has a part {str(path[1])!r}"
    meant = suggestion(root, path)
    return f"unknown option; did you mean {dotted(meant)}?" if meant else "unknown option"


def parse(text: str, shape: Shape) -> object:
    """Parse `text` as a value of the types in `shape`. Raises ValueError.

    A list is JSON or YAML (`[a, b]`), or items separated by commas. A mapping is JSON or YAML. Text is used
    unchanged; numbers and booleans are YAML scalars. An empty text is an empty list, or None where None is
    allowed.
    """
    stripped = text.strip()
    if any(is_list(plain) for plain in shape) and not stripped.startswith("{"):
        if stripped.startswith("["):
            return _yaml(stripped, list, "a list such as [a, b]")
        return [part.strip() for part in stripped.split(",") if part.strip()]
    if not stripped and type(None) in shape:
        return None
    if any(is_mapping(plain) for plain in shape) and (stripped.startswith("{") or len(shape) == 1):
        return _yaml(stripped, dict, "a mapping such as {a: 1}")
    if all(is_text(plain) for plain in shape):
        return text
    return _yaml(stripped, object, "a value")


def _yaml(text: str, kind: type, what: str) -> Any:
    try:
        value = yaml_text.load(text)
    except (yaml.YAMLError, RecursionError):
        value = None if kind is not object else text
    if not isinstance(value, kind):
        raise ValueError(f"expected {what}")
    return value


# --- leaves -----------------------------------------------------------------------------------------------


def _leaves(root: type[Options], path: Path, value: object) -> Iterable[tuple[Path, object]]:
    """Split a mapping into its leaves, so that sources are merged key by key. A list is one leaf."""
    if value is None and path and _is_section(shape_at(root, path)):
        return  # for example `server:` with all its keys commented out
    if not isinstance(value, dict) or (not value and path):
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(root, (*path, str(key)), inner)


def _is_section(shape: Shape) -> bool:
    return bool(options_of(shape)) and type(None) not in shape
