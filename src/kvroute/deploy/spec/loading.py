"""A spec's text as a document and a finding for each of its fields: applied, noted or wrong."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvroute.deploy.l2.address import masked
from kvroute.deploy.spec.aliases import unflattened
from kvroute.deploy.spec.endpoint import HYPERPOD_KIND, KINDS, Document, shape_of_kind
from kvroute.deploy.spec.fields import Kind, Path, Shape, Verdict, declared, dotted, shape_at
from kvroute.deploy.spec.indentation import Layout, lay_out, parent_of
from kvroute.deploy.spec.places import Places
from kvroute.deploy.spec.rules import judge
from kvroute.deploy.spec.source import VARIABLE, NotYaml, Source, read_source
from kvroute.errors import ConfigError, InvalidConfig


@dataclass(frozen=True, slots=True)
class Finding:
    """What becomes of one field. `line` counts from 1; None: the field is not written."""

    path: Path
    line: int | None
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


@dataclass(frozen=True, slots=True)
class Reading:
    """A spec as far as it could be read; `document` is None when something is wrong with it."""

    document: Document | None
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.WRONG)

    def require(self, name: str) -> Document:
        """The document. Raises InvalidConfig with all that is wrong; `name` is the file's."""
        if self.document is None:
            raise InvalidConfig([ConfigError(_place(name, finding), str(finding)) for finding in self.wrong])
        return self.document


def _place(name: str, finding: Finding) -> str:
    return f"{name}:{finding.line}" if finding.line is not None else name


def read_spec(text: str, *, strategies: Collection[str]) -> Reading:
    """Read one spec; `strategies` are those of this gateway. Pure; never raises for what is in `text`."""
    try:
        written = read_source(text)
    except NotYaml as exc:
        return Reading(None, tuple(_in_order(_lines_in_place(text, exc))))
    source, flat_names = unflattened(written)
    kind = source.data.get("kind")
    root, places = shape_of_kind(kind), Places(shape_of_kind(kind))
    findings = [
        Finding(problem.path, problem.line, Verdict.WRONG, problem.text) for problem in source.problems
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
    is_wrong = any(finding.verdict is Verdict.WRONG for finding in findings)
    return Reading(None if is_wrong else document, tuple(_in_order(findings)))


def fix_layout(text: str) -> Layout:
    """`text` indented as its fields demand; needs no valid YAML."""
    return lay_out(text, _root_of(text))


def _root_of(text: str) -> Shape:
    kinds = [
        line.split(":", 1)[1].strip().strip("\"'") for line in text.splitlines() if line.startswith("kind:")
    ]
    return shape_of_kind(kinds[0] if kinds else HYPERPOD_KIND)


def _lines_in_place(text: str, error: NotYaml) -> Iterator[Finding]:
    """Where each misplaced line of a text that is not YAML belongs."""
    layout = fix_layout(text)
    says = f"this is not YAML: {error}"
    if layout.is_lost and any(line.moved for line in layout.placed):
        says = (
            "the indentation is lost: every line below says where it belongs; --fix prints the spec with it"
        )
    yield Finding((), None if layout.is_lost else error.line, Verdict.WRONG, says)
    lines = text.splitlines()
    for line in layout.placed:
        if not line.known:
            yield Finding(line.path, line.number, Verdict.WRONG, "no field of the spec has this name")
        elif line.moved:
            place = f"belongs under {parent_of(line.path)}"
            if line.repeats is not None:
                place += f"; as written it is a duplicate of line {line.repeats}"
            yield Finding(line.path, line.number, Verdict.WRONG, place)
        elif line.repeats is not None:
            yield Finding(line.path, line.number, Verdict.WRONG, f"a duplicate of line {line.repeats}")
        content = lines[line.number - 1]
        for name in VARIABLE.findall(content if not content.lstrip().startswith("#") else ""):
            yield Finding(line.path, line.number, Verdict.WRONG, f"the variable {name} is not filled in")


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
            yield Finding(path, line, Verdict.NOTED, "has no effect here because nothing is given")
        elif found is not None:
            verdict, says = found
            if verdict is Verdict.NOTED:
                says = f"has no effect here because {says}"
            elif path in flat_names:
                says = f"{says} (read from {flat_names[path]})"
            yield Finding(path, line, verdict, says)
        elif value in ({}, []):
            yield Finding(path, line, Verdict.NOTED, "has no effect here because it is empty")


def _leaves(value: Any, shape: Shape | None, path: Path) -> Iterator[tuple[Path, Any]]:
    """What is written, as deep as single fields are declared."""
    if shape is not None and shape.model is not None and isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, shape_at(shape, (str(key),)), (*path, str(key)))
    elif (
        shape is not None
        and shape.kind is Kind.LIST
        and shape.item is not None
        and shape.item.model is not None
        and isinstance(value, list)
        and value
    ):
        for number, item in enumerate(value):
            yield from _leaves(item, shape.item, (*path, number))
    else:
        yield path, value


def _translated(errors: list[ErrorDetails], source: Source, root: Shape, places: Places) -> Iterator[Finding]:
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
            says = f"is required{_elsewhere(path, source.data)}"
        else:
            says = _said(error)
        yield Finding(path, source.line_of(path), Verdict.WRONG, says)


def _elsewhere(path: Path, data: Any, at: Path = ()) -> str:
    """Whether a required field stands somewhere else."""
    if isinstance(data, dict):
        for key, inner in data.items():
            here = (*at, str(key))
            if key == path[-1] and here != path and len(here) <= len(path) and len(str(key)) > 4:
                return f"; it stands at {dotted(here)}"
            found = _elsewhere(path, inner, here)
            if found:
                return found
    return ""


def _said(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = message[:1].lower() + message[1:]
    value = error["input"]
    if isinstance(value, (str, int, float, bool)) and len(str(value)) <= 60:
        return f"{message}, got {masked(repr(value))}"
    return message
