"""Parses a spec's text into data with line numbers, and declares verdicts of fields.

Also finds duplicate keys and placeholders that are not filled in.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from kvroute import yaml_text

Path = tuple[str | int, ...]
"""Keys from the root of the document, `("spec", "worker", "args", 0)`."""


class Fields(BaseModel):
    """Base class of the spec's mappings: camelCase in YAML, unknown keys are errors, types are strict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class FieldVerdict(Enum):
    """What kvroute does with a field: apply it, ignore it with a note, or refuse it."""

    APPLIED = "applied"
    NOTED = "noted"
    WRONG = "wrong"


def applied(default: Any = None, *, becomes: str, put: str = "", **constraints: Any) -> Any:
    """Declare a field that has an effect. `becomes` is its text. With `...` as default the field is
    required.

    `put` says what belongs in the field, for values that are still placeholders; without it, `becomes` does.
    """
    return _declared_field(default, FieldVerdict.APPLIED, becomes, put or becomes, constraints)


def noted(default: Any = None, *, because: str, put: str = "", **constraints: Any) -> Any:
    """Declare a field that is accepted but has no effect. `because` is the reason."""
    return _declared_field(default, FieldVerdict.NOTED, because, put, constraints)


def _declared_field(
    default: Any, verdict: FieldVerdict, text: str, put: str, constraints: dict[str, Any]
) -> Any:
    return Field(
        default, json_schema_extra={"verdict": verdict.value, "text": text, "put": put}, **constraints
    )


def section(default: Any = None, **constraints: Any) -> Any:
    """Declare a field that only contains other fields."""
    return Field(default, **constraints)


class ValueKind(Enum):
    """The structure of a value."""

    SCALAR = "scalar"
    MODEL = "model"
    FREE = "free"
    """A mapping with arbitrary keys and plain values."""
    ANYTHING = "anything"
    """Any value of any depth, which is copied unchanged."""
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Shape:
    """The values that are allowed at one place of the document."""

    kind: ValueKind
    model: type[Fields] | None = None
    item: Shape | None = None

    def children(self) -> dict[str, Shape]:
        """The fields of a model by their YAML names; empty for all other kinds."""
        if self.model is None:
            return {}
        return {
            yaml_name(name, field.alias): shape_of(field.annotation)
            for name, field in self.model.model_fields.items()
        }

    def child(self, key: str) -> Shape | None:
        """The shape of the model's field with the YAML name `key`; None if there is none."""
        field_info = self.field(key)
        return shape_of(field_info.annotation) if field_info is not None else None

    def field(self, key: str) -> FieldInfo | None:
        """The declaration of the model's field with the YAML name `key`; None if there is none."""
        fields = self.model.model_fields if self.model is not None else {}
        return next(
            (field_info for name, field_info in fields.items() if yaml_name(name, field_info.alias) == key),
            None,
        )


def yaml_name(name: str, alias: str | None) -> str:
    return alias or name


def shape_of(annotation: object) -> Shape:
    """The shape of the values that a type annotation allows."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return shape_of(args[0])
    if origin in (typing.Union, types.UnionType):
        shapes = [shape_of(alternative) for alternative in args if alternative is not type(None)]
        return next((shape for shape in shapes if shape.kind is not ValueKind.SCALAR), shapes[0])
    if origin is list:
        return Shape(ValueKind.LIST, item=shape_of(args[0]))
    if origin is dict:
        return Shape(ValueKind.ANYTHING if args[1] is Any else ValueKind.FREE)
    if annotation is Any:
        return Shape(ValueKind.ANYTHING)
    if isinstance(annotation, type) and issubclass(annotation, Fields):
        return Shape(ValueKind.MODEL, model=annotation)
    return Shape(ValueKind.SCALAR)


def shape_at(root: Shape, path: Path) -> Shape | None:
    """The shape at `path`; None when there is no such field."""
    shape: Shape | None = root
    for key in path:
        if shape is None:
            return None
        if shape.kind is ValueKind.ANYTHING:
            return shape
        if shape.kind is ValueKind.LIST:
            shape = shape.item if isinstance(key, int) else None
        elif shape.kind is ValueKind.FREE:
            shape = Shape(ValueKind.SCALAR)
        else:
            shape = shape.child(str(key))
    return shape


def declared(root: Shape, path: Path) -> tuple[FieldVerdict, str] | None:
    """The verdict and text declared for `path` or for the nearest field above it; None if there are only
    sections."""
    extra = _nearest_declaration(root, path)
    return (FieldVerdict(extra["verdict"]), str(extra["text"])) if extra else None


def _nearest_declaration(root: Shape, path: Path) -> dict[str, Any]:
    """What `applied` or `noted` declared for `path`, or for the nearest field above it; else empty."""
    declaration: dict[str, Any] = {}
    shape: Shape | None = root
    for key in path:
        if shape is None:
            break
        field = shape.field(str(key))
        extra = field.json_schema_extra if field is not None else None
        if isinstance(extra, dict) and "verdict" in extra:
            declaration = dict(extra)
        shape = shape_at(shape, (key,))
    return declaration


def walk(shape: Shape, path: Path = ()) -> Iterator[tuple[Path, Shape]]:
    """Yield the path and shape of every field below `shape`. Fields of list items are at item 0."""
    for name, child in shape.children().items():
        yield (*path, name), child
        if child.kind is ValueKind.LIST and child.item is not None:
            yield from walk(child.item, (*path, name, 0))
        else:
            yield from walk(child, (*path, name))


def dotted(path: Path) -> str:
    """`path` as text: `spec.worker.args[0]`; a key that contains a dot is in quotes."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (f'"{key}"' if "." in key else key)
    return text


_FILLED_IN_LATER = (
    r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::?-[^}]*)?\}"
    r"|<[A-Z][A-Z0-9]*(?:[ _.-][A-Z0-9]+)*>|(?<!\$)\{[A-Z][A-Z0-9_]{2,}\}"
)
_ONLY_IN_NAMES = (
    r"(?<![\w$])\$[A-Z][A-Z0-9_]{2,}\b|<[a-z][a-z0-9]*(?:[ _-][a-z0-9]+)+>"
    r"|<(?:account|bucket|image|model|name|namespace|region)>"
)
_PLACEHOLDER = re.compile(f"{_FILLED_IN_LATER}|{_ONLY_IN_NAMES}")
_PLACEHOLDER_IN_TEXTS = re.compile(_FILLED_IN_LATER)
_TEXTS = frozenset({"args", "command", "environmentVariables", "kubernetes", "probes", "query"})
"""Fields in which `$NAME` can be a variable of a shell, and `<name_of>` a token of a model."""


def placeholders_text(value: str, path: Path) -> str:
    """The text that names the placeholders in `value`; empty without any.

    Placeholders are `${NAME}`, `$NAME`, `<NAME>` and `{NAME}`. `$(NAME)` is none: Kubernetes replaces it.
    """
    pattern = _PLACEHOLDER_IN_TEXTS if _TEXTS.intersection(map(str, path)) else _PLACEHOLDER
    names = list(dict.fromkeys(pattern.findall(value)))
    if not names:
        return ""
    kind = "variable" if all(name.startswith("${") for name in names) else "placeholder"
    if len(names) == 1:
        return f"the {kind} {names[0]} is not filled in"
    return f"the {kind}s {', '.join(names[:-1])} and {names[-1]} are not filled in"


def what_to_put(root: Shape, path: Path) -> str:
    """The text that says what belongs at `path` instead of a placeholder; empty for an unknown field."""
    extra = _nearest_declaration(root, path)
    if not extra:
        return ""
    put = f"put {extra['put'] or 'your value'} here"
    is_noted = extra["verdict"] == FieldVerdict.NOTED.value
    return f": {put}, or remove the field, which has no effect here" if is_noted else f": {put}"


class NotYaml(Exception):
    """The text is not exactly one YAML mapping. `line` counts from 1."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Problem:
    """An error at a place of the document."""

    path: Path
    line: int | None
    text: str
    is_placeholder: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A spec's data, the line of each key, and the problems found while parsing."""

    data: dict[str, Any]
    lines: dict[Path, int]
    problems: tuple[Problem, ...] = field(default=())

    def line_of(self, path: Path) -> int | None:
        """The line of `path`, or else of the nearest field above it."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def read_source(text: str) -> Source:
    """Parse `text`. Raises NotYaml when it is not YAML or not exactly one mapping."""
    nodes: list[yaml.Node] = []
    survey, data = _NodeWalker(), None
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # guaranteed by check_node
            nodes.append(node)
        if len(nodes) == 1:
            # Before construct_document, which changes nodes that have merge keys.
            yaml_text.check(nodes[0])
            survey.enter(nodes[0], ())
            data = yaml_text.construct(loader, nodes[0])
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        raise NotYaml(exc.problem or "not YAML", mark.line + 1 if mark else None) from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise NotYaml(" ".join(str(exc).split()), None) from exc
    if len(nodes) != 1:
        raise NotYaml(f"expected one document, found {len(nodes)}", None)
    if not isinstance(data, dict):
        raise NotYaml("expected a mapping with `apiVersion`, `kind`, `metadata` and `spec`", 1)
    return Source(data, survey.lines, tuple(survey.problems))


class _NodeWalker:
    """Walks over the YAML nodes and collects line numbers and problems. Mutable: both collections."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def enter(self, node: yaml.Node, path: Path) -> None:
        if isinstance(node, yaml.ScalarNode):
            text = placeholders_text(node.value, path)
            if text:
                self.problems.append(Problem(path, node.start_mark.line + 1, text, is_placeholder=True))
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.lines[*path, number] = item.start_mark.line + 1
                self.enter(item, (*path, number))
        elif isinstance(node, yaml.MappingNode):
            self._enter_mapping(node, path)

    def _enter_mapping(self, node: yaml.MappingNode, path: Path) -> None:
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, str(key.value)
            here = (*path, name)
            if name in first_lines:
                lines = f"{first_lines[name]} and {line}"
                text = f"is given twice under {dotted(path) or 'the root'}: in lines {lines}"
                self.problems.append(Problem(here, line, text))
            first_lines.setdefault(name, line)
            self.lines[here] = line
            self.enter(value, here)
