"""A spec's text as a document and a finding for each of its fields: applied, noted or wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvroute.deploy.l2.backend import masked
from kvroute.deploy.spec.aliases import FieldPlaces, unflattened
from kvroute.deploy.spec.endpoint import HYPERPOD_KIND, KINDS, Document, shape_of_kind
from kvroute.deploy.spec.rules import judge
from kvroute.deploy.spec.source import (
    VARIABLE,
    FieldVerdict,
    NotYaml,
    Path,
    Shape,
    Source,
    ValueKind,
    declared,
    dotted,
    read_source,
    shape_at,
)
from kvroute.errors import ConfigError, InvalidConfig

_KEY = re.compile(
    r"""(?P<key>"[^"]*"|'[^']*'|[^\s#"'\[\]{},&*!|>%@`-][^\s#:]*|-[^\s#:]+)\s*:(?:\s+(?P<value>.*))?$"""
)
_COMMENTED_KEY = re.compile(r"^#\s*([\w.\-/]+):(?:\s|$)")
_ROOT_INDENT = -1


@dataclass(slots=True)
class _OpenNode:
    """A mapping, list or list item that lines may still be added to; `taken` and `items` grow."""

    path: Path
    shape: Shape
    line: int
    written: int
    """The indentation of the line that opened it."""
    column: int
    """Where its children stand when it is written properly."""
    taken: dict[str, int] = field(default_factory=dict)
    items: int = 0

    def accepts(self, key: str) -> bool:
        return key in self.shape.children() or self.shape.kind in (ValueKind.FREE, ValueKind.ANYTHING)


@dataclass(frozen=True, slots=True)
class PlacedLine:
    """One line: where it belongs and what was wrong with where it stood."""

    number: int
    path: Path
    text: str
    """The line as it should be."""
    moved: bool
    """Its parent by indentation is not its parent by name."""
    repeats: int | None
    """The line that has the same key on the same level as written."""
    known: bool


@dataclass(frozen=True, slots=True)
class SpecLayout:
    """A whole spec, line by line; comments and empty lines are in `text` only."""

    placed: tuple[PlacedLine, ...]
    text: str
    has_no_indentation: bool
    """No line is indented at all."""

    @property
    def is_complete(self) -> bool:
        """Every line has a place."""
        return all(line.known for line in self.placed)


def place_lines(text: str, root: Shape) -> SpecLayout:
    """Place every line of `text` in a document of shape `root`."""
    return _LinePlacer(root).run(text)


class _LinePlacer:
    """`stack` has what is open, outermost first; `written` the keys as the indentation has them."""

    def __init__(self, root: Shape) -> None:
        self.stack = [_OpenNode((), root, 0, _ROOT_INDENT, 0)]
        self.placed: list[PlacedLine] = []
        self.output: list[str] = []
        self.comments: list[tuple[str, int | None]] = []
        self.written: list[tuple[int, int]] = []
        self.levels: dict[tuple[int, str], int] = {}
        self.literal: tuple[int, int] | None = None
        """In a block of text or an open bracket: its key's indentation, and the shift to apply."""
        self.brackets = 0

    def run(self, text: str) -> SpecLayout:
        lines = text.expandtabs(2).splitlines()
        self.has_no_indentation = not any(line[:1] == " " for line in lines if line.strip())
        for number, line in enumerate(lines, start=1):
            self._line(number, line.rstrip())
        self._flush_comments(self.stack[-1].column)
        return SpecLayout(tuple(self.placed), "\n".join(self.output) + "\n", self.has_no_indentation)

    def _line(self, number: int, line: str) -> None:
        content = line.lstrip()
        indent = len(line) - len(content)
        if self.literal is not None and self._continues(content, indent, number):
            self.output.append((" " * max(0, indent + self.literal[1]) + content).rstrip())
            self.brackets += _bracket_balance(content) if self.brackets else 0
            return
        self.literal = None
        if not content or content.startswith("#"):
            self.comments.append((content, self._commented_column(content)))
        elif content in ("---", "..."):
            self._flush_comments(0)
            self.output.append(content)
        elif content == "-" or content.startswith("- "):
            self._item(number, indent, content[1:].lstrip())
        else:
            self._field(number, indent, content, dash="")

    def _continues(self, content: str, indent: int, number: int) -> bool:
        if self.literal is None:
            return False
        return self.brackets > 0 or not content or indent > self.literal[0]

    # --- list items ---

    def _item(self, number: int, indent: int, content: str) -> None:
        match = _KEY.match(content)
        key = _unquoted(match["key"]) if match else None
        lists = [
            (place, node)
            for place, node in reversed(list(enumerate(self.stack)))
            if node.shape.kind in (ValueKind.LIST, ValueKind.ANYTHING) and node.written <= indent
        ]
        fitting = [(place, node) for place, node in lists if _item_accepts(node.shape, key)]
        if not (fitting or lists):
            self._unknown(number, indent, f"- {content}".rstrip(), "-")
            return
        place, node = (fitting or lists)[0]
        del self.stack[place + 1 :]
        item = node.shape.item or Shape(ValueKind.ANYTHING)
        path = (*node.path, node.items)
        node.items += 1
        column = node.column
        if key is not None and item.kind is not ValueKind.SCALAR:
            self.stack.append(_OpenNode(path, item, number, indent, column + 2))
            self._field(number, indent, content, dash="- ")
            return
        moved = self._parent_as_written(number, indent, is_item=True) != node.line
        self._emit(number, column, f"- {content}".rstrip(), path, moved or self.has_no_indentation, None)
        self._begin_literal(content, indent, column)

    # --- keys ---

    def _field(self, number: int, indent: int, content: str, dash: str) -> None:
        match = _KEY.match(content)
        if match is None:
            self._unknown(number, indent, dash + content, content)
            return
        key, value = _unquoted(match["key"]), _without_comment(match["value"] or "")
        parent_as_written = self._parent_as_written(number, indent, is_item=bool(dash))
        level = (number if dash else parent_as_written, key)
        repeats = self.levels.get(level)
        self.levels.setdefault(level, number)
        if dash:
            # What follows in this item stands two columns right of the dash.
            self.written.append((indent + 1, number))
        place = len(self.stack) - 1 if dash else self._place_of(key, indent)
        if place is None:
            self._unknown(number, indent, dash + content, key)
            return
        del self.stack[place + 1 :]
        node = self.stack[-1]
        node.taken.setdefault(key, number)
        path = (*node.path, key)
        column = node.column - len(dash)
        known = node.accepts(key)
        moved = self.has_no_indentation if dash else parent_as_written != node.line
        self._emit(number, column, dash + content, path, moved, repeats, known=known)
        shape = node.shape.children().get(key) or Shape(
            ValueKind.ANYTHING if node.shape.kind is ValueKind.ANYTHING else ValueKind.SCALAR
        )
        if not value and shape.kind is not ValueKind.SCALAR:
            self.stack.append(_OpenNode(path, shape, number, indent + len(dash), node.column + 2))
        self._begin_literal(value, indent, column)

    def _place_of(self, key: str, indent: int) -> int | None:
        """The open node for `key`: one that the indentation agrees with, else the innermost that names it."""
        fitting = [
            (number, node)
            for number, node in reversed(list(enumerate(self.stack)))
            if node.accepts(key) and key not in node.taken
        ]
        agreeing = [(number, node) for number, node in fitting if node.written < indent or not node.path]
        by_name = [(number, node) for number, node in fitting if key in node.shape.children()]
        for candidates in (agreeing, by_name, fitting):
            if candidates:
                return candidates[0][0]
        # Nothing is free: it is given twice.
        again = [number for number, node in enumerate(self.stack) if key in node.taken]
        return again[-1] if again else None

    # --- what the indentation says ---

    def _parent_as_written(self, number: int, indent: int, *, is_item: bool) -> int:
        """The line of the parent by indentation, 0 at the root. A dash may stand below its key."""
        while self.written and not (
            self.written[-1][0] < indent or (is_item and self.written[-1][0] == indent)
        ):
            self.written.pop()
        parent = self.written[-1][1] if self.written else 0
        if not is_item:
            self.written.append((indent, number))
        return parent

    # --- output ---

    def _emit(
        self,
        number: int,
        column: int,
        content: str,
        path: Path,
        moved: bool,
        repeats: int | None,
        *,
        known: bool = True,
    ) -> None:
        self._flush_comments(column)
        self.output.append(" " * column + content)
        self.placed.append(PlacedLine(number, path, self.output[-1], moved, repeats, known))

    def _unknown(self, number: int, indent: int, content: str, key: str) -> None:
        self._emit(number, indent, content, (key,), False, None, known=False)

    def _commented_column(self, comment: str) -> int | None:
        """Where a commented-out field stands: with its siblings, which may still be open."""
        match = _COMMENTED_KEY.match(comment)
        open_here = [node for node in self.stack if match and match[1] in node.shape.children()]
        return open_here[-1].column if open_here else None

    def _flush_comments(self, column: int) -> None:
        """Comments stand with the line below them, be it a field or a commented-out one."""
        lines = []
        for comment, own in reversed(self.comments):
            column = own if own is not None else column
            lines.append((" " * column + comment).rstrip())
        self.output += reversed(lines)
        self.comments.clear()

    def _begin_literal(self, value: str, indent: int, column: int) -> None:
        self.brackets = max(0, _bracket_balance(value)) if value[:1] in "[{" else 0
        if value[:1] in ("|", ">") or self.brackets:
            self.literal = indent, column - indent


def _item_accepts(shape: Shape, key: str | None) -> bool:
    item = shape.item or Shape(ValueKind.ANYTHING)
    if key is None or item.kind is ValueKind.SCALAR:
        return (key is None) == (
            item.kind in (ValueKind.SCALAR, ValueKind.ANYTHING)
        ) or item.kind is ValueKind.ANYTHING
    return item.kind in (ValueKind.FREE, ValueKind.ANYTHING) or key in item.children()


def _unquoted(key: str) -> str:
    return key[1:-1] if key[:1] in "\"'" else key


def _without_comment(value: str) -> str:
    return "" if value.startswith("#") else value


def _bracket_balance(text: str) -> int:
    plain = re.sub(r"\"[^\"]*\"|'[^']*'", "", text)
    return sum(plain.count(mark) for mark in "[{") - sum(plain.count(mark) for mark in "]}")


def parent_of(path: Path) -> str:
    """Where a placed line stands, for people."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
        return dotted(path)
    return dotted(path[:-1])


@dataclass(frozen=True, slots=True)
class Finding:
    """What becomes of one field. `line` counts from 1; None: the field is not written."""

    path: Path
    line: int | None
    verdict: FieldVerdict
    text: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


@dataclass(frozen=True, slots=True)
class SpecReading:
    """A spec as far as it could be read; `document` is None when something is wrong with it."""

    document: Document | None
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is FieldVerdict.WRONG)

    def require(self, name: str) -> Document:
        """The document. Raises InvalidConfig with all that is wrong; `name` is the file's."""
        if self.document is None:
            raise InvalidConfig([ConfigError(_place(name, finding), str(finding)) for finding in self.wrong])
        return self.document


def _place(name: str, finding: Finding) -> str:
    return f"{name}:{finding.line}" if finding.line is not None else name


def read_spec(text: str, *, strategies: Collection[str]) -> SpecReading:
    """Read one spec; `strategies` are those of this gateway. Pure; never raises for what is in `text`."""
    try:
        written = read_source(text)
    except NotYaml as exc:
        return SpecReading(None, tuple(_in_order(_lines_in_place(text, exc))))
    source, flat_names = unflattened(written)
    kind = source.data.get("kind")
    root, places = shape_of_kind(kind), FieldPlaces(shape_of_kind(kind))
    findings = [
        Finding(problem.path, problem.line, FieldVerdict.WRONG, problem.text) for problem in source.problems
    ]
    document: Document | None = None
    try:
        document = KINDS.get(str(kind), KINDS[HYPERPOD_KIND]).model_validate(_without_empty(source.data))
    except ValidationError as exc:
        findings += _translated(exc.errors(include_url=False), source, root, places)
    if document is not None:
        findings += [
            Finding(path, source.line_of(path), verdict, says)
            for path, verdict, says in judge(document, strategies)
        ]
    findings += _declared(source, root, flat_names, taken={finding.path for finding in findings})
    is_wrong = any(finding.verdict is FieldVerdict.WRONG for finding in findings)
    return SpecReading(None if is_wrong else document, tuple(_in_order(findings)))


def fix_layout(text: str) -> SpecLayout:
    """`text` indented as its fields demand; needs no valid YAML."""
    return place_lines(text, _root_of(text))


def _root_of(text: str) -> Shape:
    kinds = [
        line.split(":", 1)[1].strip().strip("\"'") for line in text.splitlines() if line.startswith("kind:")
    ]
    return shape_of_kind(kinds[0] if kinds else HYPERPOD_KIND)


def _lines_in_place(text: str, error: NotYaml) -> Iterator[Finding]:
    """Where each misplaced line of a text that is not YAML belongs."""
    layout = fix_layout(text)
    says = f"this is not YAML: {error}"
    if layout.has_no_indentation and any(line.moved for line in layout.placed):
        says = (
            "the indentation is lost: every line below says where it belongs; --fix prints the spec with it"
        )
    yield Finding((), None if layout.has_no_indentation else error.line, FieldVerdict.WRONG, says)
    lines = text.splitlines()
    for line in layout.placed:
        if not line.known:
            yield Finding(line.path, line.number, FieldVerdict.WRONG, "no field of the spec has this name")
        elif line.moved:
            place = f"belongs under {parent_of(line.path)}"
            if line.repeats is not None:
                place += f"; as written it is a duplicate of line {line.repeats}"
            yield Finding(line.path, line.number, FieldVerdict.WRONG, place)
        elif line.repeats is not None:
            yield Finding(line.path, line.number, FieldVerdict.WRONG, f"a duplicate of line {line.repeats}")
        content = lines[line.number - 1]
        for name in VARIABLE.findall(content if not content.lstrip().startswith("#") else ""):
            yield Finding(line.path, line.number, FieldVerdict.WRONG, f"the variable {name} is not filled in")


def _in_order(findings: Iterator[Finding] | list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.line or 0)


def _without_empty(value: Any) -> Any:
    """`value` without keys that have nothing behind them: what is commented out is not given."""
    if isinstance(value, dict):
        return {key: _without_empty(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_empty(inner) for inner in value]
    return value


def _declared(
    source: Source, root: Shape, flat_names: dict[Path, str], *, taken: set[Path]
) -> Iterator[Finding]:
    """The verdict of each written field that has none yet, from its declaration."""
    for path, value in _leaves(source.data, root, ()):
        if any(path[: len(other)] == other or other[: len(path)] == path for other in taken if other):
            continue
        line = source.line_of(path)
        found = declared(root, path)
        if value is None:
            yield Finding(path, line, FieldVerdict.NOTED, "has no effect here because nothing is given")
        elif found is not None:
            verdict, says = found
            if verdict is FieldVerdict.NOTED:
                says = f"has no effect here because {says}"
            elif path in flat_names:
                says = f"{says} (read from {flat_names[path]})"
            yield Finding(path, line, verdict, says)
        elif value in ({}, []):
            yield Finding(path, line, FieldVerdict.NOTED, "has no effect here because it is empty")


def _leaves(value: Any, shape: Shape | None, path: Path) -> Iterator[tuple[Path, Any]]:
    """What is written, as deep as single fields are declared."""
    if shape is not None and shape.model is not None and isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, shape_at(shape, (str(key),)), (*path, str(key)))
    elif (
        shape is not None
        and shape.kind is ValueKind.LIST
        and shape.item is not None
        and shape.item.model is not None
        and isinstance(value, list)
        and value
    ):
        for number, item in enumerate(value):
            yield from _leaves(item, shape.item, (*path, number))
    else:
        yield path, value


def _translated(
    errors: list[ErrorDetails], source: Source, root: Shape, places: FieldPlaces
) -> Iterator[Finding]:
    """Pydantic's errors with lines, and with the right place of a field that is in a wrong one."""
    # What is not filled in breaks rules only because of that.
    seen: set[Path] = {problem.path for problem in source.problems}
    for error in errors:
        path: Path = tuple(error["loc"])
        # Beyond plain values, the location names members of unions.
        while path and shape_at(root, path[:-1]) is None:
            path = path[:-1]
        if path in seen:
            continue
        seen.add(path)
        if error["type"] == "extra_forbidden":
            says = places.advice(path)
        elif error["type"] == "missing":
            says = f"is required{_other_place(path, source.data)}"
        else:
            says = _error_text(error)
        yield Finding(path, source.line_of(path), FieldVerdict.WRONG, says)


def _other_place(path: Path, data: Any, at: Path = ()) -> str:
    """Whether a required field stands somewhere else."""
    if isinstance(data, dict):
        for key, inner in data.items():
            here = (*at, str(key))
            if key == path[-1] and here != path and len(here) <= len(path) and len(str(key)) > 4:
                return f"; it stands at {dotted(here)}"
            found = _other_place(path, inner, here)
            if found:
                return found
    return ""


def _error_text(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    value = error["input"]
    if isinstance(value, (str, int, float, bool)) and len(str(value)) <= 60:
        return f"{message}, got {masked(repr(value))}"
    return message
