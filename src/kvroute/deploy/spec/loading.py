"""Reads a spec's text into a document, with a finding for each field: applied, noted or wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvroute.deploy.l2.backend import masked
from kvroute.deploy.spec.aliases import FieldPaths, unflattened
from kvroute.deploy.spec.endpoint import (
    HYPERPOD_KIND,
    JUMPSTART_KIND,
    KINDS,
    OLD_JUMPSTART_KIND,
    Document,
    shape_of_kind,
)
from kvroute.deploy.spec.rules import early_findings, rule_findings
from kvroute.deploy.spec.source import (
    FieldVerdict,
    NotYaml,
    Path,
    Problem,
    Shape,
    Source,
    ValueKind,
    declared,
    dotted,
    placeholders_text,
    read_source,
    shape_at,
    what_to_put,
)
from kvroute.errors import ConfigError, InvalidConfig

_KEY = re.compile(
    r"""(?P<key>"[^"]*"|'[^']*'|[^\s#"'\[\]{},&*!|>%@`-][^\s#:]*|-[^\s#:]+)\s*:(?:\s+(?P<value>.*))?$"""
)
_COMMENTED_KEY = re.compile(r"^#\s*([\w.\-/]+):(?:\s|$)")
_ROOT_INDENT = -1


@dataclass(slots=True)
class _OpenNode:
    """A mapping, list or list item to which later lines may belong. Mutable: `used_keys` and `items` grow."""

    path: Path
    shape: Shape
    line: int
    indent: int
    """The indentation of the line that opened the node."""
    column: int
    """The correct indentation of the node's children."""
    used_keys: dict[str, int] = field(default_factory=dict)
    items: int = 0

    def accepts(self, key: str) -> bool:
        return key in self.shape.children() or self.shape.kind in (ValueKind.FREE, ValueKind.ANYTHING)


@dataclass(frozen=True, slots=True)
class PlacedLine:
    """One line of a spec: its place in the document, and what was wrong with its indentation."""

    number: int
    path: Path
    text: str
    """The line with correct indentation."""
    is_misplaced: bool
    """Whether its parent by indentation differs from its parent by name."""
    duplicate_of: int | None
    """The number of an earlier line that has the same key under the same parent, by the indentation."""
    is_known: bool


@dataclass(frozen=True, slots=True)
class SpecLayout:
    """A spec with corrected indentation. Comments and empty lines are only in `text`."""

    placed: tuple[PlacedLine, ...]
    text: str
    has_no_indentation: bool
    """Whether no line of the original text is indented."""

    @property
    def is_complete(self) -> bool:
        """Whether every line has a known place."""
        return all(line.is_known for line in self.placed)


def place_lines(text: str, root: Shape) -> SpecLayout:
    """Find the place of every line of `text` in a document of shape `root`."""
    return _LinePlacer(root).run(text)


class _LinePlacer:
    """Places the lines of one text. Mutable: the open nodes, the open indentations and the output so far.

    `stack` has the open nodes by field names, outermost first. `open_indents` has (indentation, line number)
    of the open keys by indentation.
    """

    def __init__(self, root: Shape) -> None:
        self.stack = [_OpenNode((), root, 0, _ROOT_INDENT, 0)]
        self.placed: list[PlacedLine] = []
        self.output: list[str] = []
        self.comments: list[tuple[str, int | None]] = []
        self.open_indents: list[tuple[int, int]] = []
        self.levels: dict[tuple[int, str], int] = {}
        self.block: tuple[int, int] | None = None
        """Inside a block of text or open brackets: the indentation of its key, and the columns to shift
        by."""
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
        if self.block is not None and self._continues(content, indent, number):
            self.output.append((" " * max(0, indent + self.block[1]) + content).rstrip())
            self.brackets += _bracket_balance(content) if self.brackets else 0
            return
        self.block = None
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
        if self.block is None:
            return False
        return self.brackets > 0 or not content or indent > self.block[0]

    # --- list items ---

    def _item(self, number: int, indent: int, content: str) -> None:
        match = _KEY.match(content)
        key = _unquoted(match["key"]) if match else None
        lists = [
            (index, node)
            for index, node in reversed(list(enumerate(self.stack)))
            if node.shape.kind in (ValueKind.LIST, ValueKind.ANYTHING) and node.indent <= indent
        ]
        fitting = [(index, node) for index, node in lists if _item_accepts(node.shape, key)]
        if not (fitting or lists):
            self._unknown(number, indent, f"- {content}".rstrip(), "-")
            return
        index, node = (fitting or lists)[0]
        del self.stack[index + 1 :]
        item = node.shape.item or Shape(ValueKind.ANYTHING)
        path = (*node.path, node.items)
        node.items += 1
        column = node.column
        if key is not None and item.kind is not ValueKind.SCALAR:
            self.stack.append(_OpenNode(path, item, number, indent, column + 2))
            self._field(number, indent, content, dash="- ")
            return
        is_misplaced = self._parent_as_written(number, indent, is_item=True) != node.line
        self._emit(
            number, column, f"- {content}".rstrip(), path, is_misplaced or self.has_no_indentation, None
        )
        self._begin_block(content, indent, column)

    # --- keys ---

    def _field(self, number: int, indent: int, content: str, dash: str) -> None:
        match = _KEY.match(content)
        if match is None:
            self._unknown(number, indent, dash + content, content)
            return
        key, value = _unquoted(match["key"]), _without_comment(match["value"] or "")
        parent_as_written = self._parent_as_written(number, indent, is_item=bool(dash))
        level = (number if dash else parent_as_written, key)
        duplicate_of = self.levels.get(level)
        self.levels.setdefault(level, number)
        if dash:
            # The other keys of this item are two columns to the right of the dash.
            self.open_indents.append((indent + 1, number))
        index = len(self.stack) - 1 if dash else self._index_of(key, indent)
        if index is None:
            self._unknown(number, indent, dash + content, key)
            return
        del self.stack[index + 1 :]
        node = self.stack[-1]
        node.used_keys.setdefault(key, number)
        path = (*node.path, key)
        column = node.column - len(dash)
        is_known = node.accepts(key)
        is_misplaced = self.has_no_indentation if dash else parent_as_written != node.line
        self._emit(number, column, dash + content, path, is_misplaced, duplicate_of, is_known=is_known)
        shape = node.shape.children().get(key) or Shape(
            ValueKind.ANYTHING if node.shape.kind is ValueKind.ANYTHING else ValueKind.SCALAR
        )
        if not value and shape.kind is not ValueKind.SCALAR:
            self.stack.append(_OpenNode(path, shape, number, indent + len(dash), node.column + 2))
        self._begin_block(value, indent, column)

    def _index_of(self, key: str, indent: int) -> int | None:
        """The index in `stack` of the node to which `key` belongs; None if no open node accepts it.

        A node that fits the indentation is preferred, then the innermost node that has a field `key`.
        """
        fitting = [
            (number, node)
            for number, node in reversed(list(enumerate(self.stack)))
            if node.accepts(key) and key not in node.used_keys
        ]
        agreeing = [(number, node) for number, node in fitting if node.indent < indent or not node.path]
        by_name = [(number, node) for number, node in fitting if key in node.shape.children()]
        for candidates in (agreeing, by_name, fitting):
            if candidates:
                return candidates[0][0]
        # Every node that accepts the key has it already: a duplicate.
        duplicates = [number for number, node in enumerate(self.stack) if key in node.used_keys]
        return duplicates[-1] if duplicates else None

    # --- indentation ---

    def _parent_as_written(self, number: int, indent: int, *, is_item: bool) -> int:
        """The line number of the parent by indentation; 0 at the root. A dash may have its key's
        indentation."""
        while self.open_indents and not (
            self.open_indents[-1][0] < indent or (is_item and self.open_indents[-1][0] == indent)
        ):
            self.open_indents.pop()
        parent = self.open_indents[-1][1] if self.open_indents else 0
        if not is_item:
            self.open_indents.append((indent, number))
        return parent

    # --- output ---

    def _emit(
        self,
        number: int,
        column: int,
        content: str,
        path: Path,
        is_misplaced: bool,
        duplicate_of: int | None,
        *,
        is_known: bool = True,
    ) -> None:
        self._flush_comments(column)
        self.output.append(" " * column + content)
        self.placed.append(PlacedLine(number, path, self.output[-1], is_misplaced, duplicate_of, is_known))

    def _unknown(self, number: int, indent: int, content: str, key: str) -> None:
        self._emit(number, indent, content, (key,), False, None, is_known=False)

    def _commented_column(self, comment: str) -> int | None:
        """The column of a commented-out field: that of its siblings, if their parent is still open."""
        match = _COMMENTED_KEY.match(comment)
        open_here = [node for node in self.stack if match and match[1] in node.shape.children()]
        return open_here[-1].column if open_here else None

    def _flush_comments(self, column: int) -> None:
        """Write the collected comments with the indentation of the line below them."""
        lines = []
        for comment, own_column in reversed(self.comments):
            column = own_column if own_column is not None else column
            lines.append((" " * column + comment).rstrip())
        self.output += reversed(lines)
        self.comments.clear()

    def _begin_block(self, value: str, indent: int, column: int) -> None:
        self.brackets = max(0, _bracket_balance(value)) if value[:1] in "[{" else 0
        if value[:1] in ("|", ">") or self.brackets:
            self.block = indent, column - indent


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
    """The path of a line's parent, as text."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
        return dotted(path)
    return dotted(path[:-1])


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict for one field. `line` counts from 1; None when the field is not in the text."""

    path: Path
    line: int | None
    verdict: FieldVerdict
    text: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


@dataclass(frozen=True, slots=True)
class SpecReading:
    """The result of reading a spec. `document` is None when a field is wrong."""

    document: Document | None
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is FieldVerdict.WRONG)

    def require(self, name: str) -> Document:
        """The document. Raises InvalidConfig with all wrong fields. `name` is the file's name in the
        error."""
        if self.document is None:
            raise InvalidConfig(
                [ConfigError(_location(name, finding), str(finding)) for finding in self.wrong]
            )
        return self.document


def _location(name: str, finding: Finding) -> str:
    return f"{name}:{finding.line}" if finding.line is not None else name


def read_spec(
    text: str, *, strategies: Collection[str], versions: Mapping[str, str] | None = None
) -> SpecReading:
    """Read one spec. `strategies` are the strategies of this gateway. Pure; `text` never makes it raise.

    `versions` override the fields of the spec's `x-kvroute.versions`.
    """
    try:
        raw_source = read_source(text)
    except NotYaml as exc:
        return SpecReading(None, tuple(_in_order(_lines_in_place(text, exc))))
    source, flat_names = unflattened(raw_source)
    if versions:
        extension = source.data.get("x-kvroute") or {}
        stated = (extension.get("versions") or {}) if isinstance(extension, dict) else None
        if isinstance(stated, dict):  # otherwise the value is wrong, and reported below
            source.data["x-kvroute"] = {**extension, "versions": {**stated, **versions}}
    kind = source.data.get("kind", HYPERPOD_KIND)
    root, field_paths = shape_of_kind(kind), FieldPaths(shape_of_kind(kind))
    findings = [
        Finding(problem.path, problem.line, FieldVerdict.WRONG, problem.text + _what_to_put(problem, root))
        for problem in source.problems
    ]
    if str(kind) not in KINDS:
        # Which fields a document of another kind may have is not known.
        return SpecReading(None, tuple(_in_order([*findings, _unknown_kind(source)])))
    document: Document | None = None
    try:
        document = KINDS[str(kind)].model_validate(_without_empty(source.data))
    except ValidationError as exc:
        findings += _translated(exc.errors(include_url=False), source, root, field_paths)
    ruled = early_findings(source.data) if document is None else rule_findings(document, strategies)
    findings += [Finding(path, source.line_of(path), verdict, message) for path, verdict, message in ruled]
    findings += _declared(source, root, flat_names, judged={finding.path for finding in findings})
    is_wrong = any(finding.verdict is FieldVerdict.WRONG for finding in findings)
    return SpecReading(None if is_wrong else document, tuple(_in_order(findings)))


def _what_to_put(problem: Problem, root: Shape) -> str:
    return what_to_put(root, problem.path) if problem.is_placeholder else ""


def _unknown_kind(source: Source) -> Finding:
    """The finding for a document of a kind that kvroute does not read."""
    kind = source.data["kind"]
    text = f"is none of {', '.join(KINDS)}, got {kind!r}"
    if kind == OLD_JUMPSTART_KIND:
        text = f"{kind} is the old name: write {JUMPSTART_KIND}"
    return Finding(("kind",), source.line_of(("kind",)), FieldVerdict.WRONG, text)


def fix_layout(text: str) -> SpecLayout:
    """Correct the indentation of `text` by the names of its fields. `text` need not be valid YAML."""
    return place_lines(text, _root_of(text))


def _root_of(text: str) -> Shape:
    kinds = [
        line.split(":", 1)[1].strip().strip("\"'") for line in text.splitlines() if line.startswith("kind:")
    ]
    return shape_of_kind(kinds[0] if kinds else HYPERPOD_KIND)


def _lines_in_place(text: str, error: NotYaml) -> Iterator[Finding]:
    """Yield findings for a text that is not YAML: the error, and the right place of each misplaced line."""
    layout = fix_layout(text)
    message = f"this is not YAML: {error}"
    if layout.has_no_indentation and any(line.is_misplaced for line in layout.placed):
        message = (
            "the text has no indentation: each finding below names a line's place; "
            "--fix prints the spec with correct indentation"
        )
    yield Finding((), None if layout.has_no_indentation else error.line, FieldVerdict.WRONG, message)
    lines = text.splitlines()
    for line in layout.placed:
        if not line.is_known:
            yield Finding(line.path, line.number, FieldVerdict.WRONG, "no field of the spec has this name")
        elif line.is_misplaced:
            problem = f"belongs under {parent_of(line.path)}"
            if line.duplicate_of is not None:
                problem += f"; as written it is a duplicate of line {line.duplicate_of}"
            yield Finding(line.path, line.number, FieldVerdict.WRONG, problem)
        elif line.duplicate_of is not None:
            yield Finding(
                line.path, line.number, FieldVerdict.WRONG, f"a duplicate of line {line.duplicate_of}"
            )
        content = lines[line.number - 1]
        placeholders = placeholders_text(content, line.path) if not content.lstrip().startswith("#") else ""
        if placeholders:
            advice = what_to_put(_root_of(text), line.path)
            yield Finding(line.path, line.number, FieldVerdict.WRONG, placeholders + advice)


def _in_order(findings: Iterator[Finding] | list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.line or 0)


def _without_empty(value: Any) -> Any:
    """`value` without keys whose value is empty, because the value may be commented out."""
    if isinstance(value, dict):
        return {key: _without_empty(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_empty(inner) for inner in value]
    return value


def _declared(
    source: Source, root: Shape, flat_names: dict[Path, str], *, judged: set[Path]
) -> Iterator[Finding]:
    """Yield the declared verdict of each field in the text for which there is no finding yet."""
    for path, value in _leaves(source.data, root, ()):
        if any(path[: len(other)] == other or other[: len(path)] == path for other in judged if other):
            continue
        line = source.line_of(path)
        declaration = declared(root, path)
        if value is None:
            yield Finding(path, line, FieldVerdict.NOTED, "has no effect here because it has no value")
        elif declaration is not None:
            verdict, text = declaration
            if verdict is FieldVerdict.NOTED:
                text = f"has no effect here because {text}"
            elif path in flat_names:
                text = f"{text} (read from {flat_names[path]})"
            yield Finding(path, line, verdict, text)
        elif value in ({}, []):
            yield Finding(path, line, FieldVerdict.NOTED, "has no effect here because it is empty")


def _leaves(value: Any, shape: Shape | None, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each field in the text, down to the fields with a declared verdict."""
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
    errors: list[ErrorDetails], source: Source, root: Shape, field_paths: FieldPaths
) -> Iterator[Finding]:
    """Yield findings for pydantic's errors, with the line, and the right place of a misplaced field."""
    # A placeholder breaks a field's rule only because it is not filled in.
    reported: set[Path] = {problem.path for problem in source.problems}
    for error in errors:
        path: Path = tuple(error["loc"])
        # Below a plain value, the location contains names of union members.
        while path and shape_at(root, path[:-1]) is None:
            path = path[:-1]
        if path in reported:
            continue
        reported.add(path)
        if error["type"] == "extra_forbidden":
            text = field_paths.advice(path)
        elif error["type"] == "missing":
            text = f"is required{_other_place(path, source.data)}"
        else:
            text = _error_text(error)
        yield Finding(path, source.line_of(path), FieldVerdict.WRONG, text)


def _other_place(path: Path, data: Any, at: Path = ()) -> str:
    """A text with another place that has a field of that name; empty if there is none."""
    if isinstance(data, dict):
        for key, inner in data.items():
            here = (*at, str(key))
            if key == path[-1] and here != path and len(here) <= len(path) and len(str(key)) > 4:
                return f"; it is at {dotted(here)}"
            elsewhere = _other_place(path, inner, here)
            if elsewhere:
                return elsewhere
    return ""


def _error_text(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    value = error["input"]
    if isinstance(value, (str, int, float, bool)) and len(str(value)) <= 60:
        return f"{message}, got {masked(repr(value))}"
    return message
