"""A spec's text as data, with the line of every key. Duplicates and unfilled variables are found here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from kvroute.deploy.spec.fields import Path, dotted

VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::?-[^}]*)?\}")
"""A shell variable that nobody has filled in; `$(NAME)`, which Kubernetes expands, is another thing."""


class NotYaml(Exception):
    """The text is not one YAML document; `line` counts from 1."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong at a place of the document."""

    path: Path
    line: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """The data and where each key stands."""

    data: dict[str, Any]
    lines: dict[Path, int]
    problems: tuple[Problem, ...] = field(default=())

    def line_of(self, path: Path) -> int | None:
        """The line of `path`, or of the nearest thing around it."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return None


def read_source(text: str) -> Source:
    """Parse `text`. Raises NotYaml when it is not YAML, or not one mapping."""
    nodes: list[yaml.Node] = []
    survey, data = _Survey(), None
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # check_node has just said that there is one
            nodes.append(node)
        if len(nodes) == 1:
            # Before the data is made, which rewrites what is merged.
            survey.enter(nodes[0], ())
            data = loader.construct_document(nodes[0])
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


class _Survey:
    """Collects lines and problems while it walks down the nodes."""

    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []

    def enter(self, node: yaml.Node, path: Path) -> None:
        if isinstance(node, yaml.ScalarNode):
            for name in VARIABLE.findall(node.value):
                line = node.start_mark.line + 1
                self.problems.append(Problem(path, line, f"the variable {name} is not filled in"))
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                self.lines[*path, number] = item.start_mark.line + 1
                self.enter(item, (*path, number))
        elif isinstance(node, yaml.MappingNode):
            self._enter_mapping(node, path)

    def _enter_mapping(self, node: yaml.MappingNode, path: Path) -> None:
        first: dict[str, int] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            line, name = key.start_mark.line + 1, str(key.value)
            here = (*path, name)
            if name in first:
                text = (
                    f"given twice under {dotted(path) or 'the document'}: in lines {first[name]} and {line}"
                )
                self.problems.append(Problem(here, line, text))
            first.setdefault(name, line)
            self.lines[here] = line
            self.enter(value, here)
