"""Finds whether a chat template wants contents as text or as a list of parts.

vLLM 0.32 (renderers/hf.py) passes contents as lists of parts ("openai") to a template that loops over the
content of a message, and as strings to all others. Another decision would change the token ids, so the same
loops count here, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jinja2 import nodes

from kvroute.tokens.options import ContentFormat


class _UnknownShape(Exception):
    """A loop or an assignment with several targets. The engine's analysis gives no result for it."""


def content_format(template: nodes.Template) -> ContentFormat:
    try:
        return "openai" if any(True for _ in _content_loops(template)) else "string"
    except _UnknownShape:
        return "string"


def _reads(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _reads_key(node: nodes.Node, name: str, key: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return _reads(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads(node.node, name) and node.attr == key


def _stems_from(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is `name` (or its `key`), possibly with filters, tests and slices."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        elif node is None:
            return False
        else:
            return _reads_key(node, name, key) if key else _reads(node, name)


def _target(node: nodes.Node) -> str:
    if not isinstance(node, nodes.Name):
        raise _UnknownShape
    return node.name


def _names_of(template: nodes.Template, variable: str) -> Iterator[str]:
    """`variable`, and every name to which the template assigns it or a slice of this value."""
    yield variable
    waiting = [variable]
    while waiting:
        name = waiting.pop(0)
        for assignment in template.find_all(nodes.Assign):
            if _stems_from(assignment.node, name):
                alias = _target(assignment.target)
                yield alias
                if alias != name:
                    waiting.append(alias)


def _message_names(template: nodes.Template) -> Iterator[str]:
    lists = list(_names_of(template, "messages"))
    for loop in template.find_all(nodes.For):
        if any(_stems_from(loop.iter, name) for name in lists):
            yield _target(loop.target)


def _content_loops(template: nodes.Template) -> Iterator[nodes.For]:
    messages = list(_message_names(template))

    def is_content(node: nodes.Node) -> bool:
        return any(_stems_from(node, name, "content") for name in messages)

    inside_macros: set[int] = set()
    given_content: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        parameters = _content_parameters(template, macro, is_content)
        for loop in macro.find_all(nodes.For):
            inside_macros.add(id(loop))
            if parameters:
                given_content[id(loop)] = parameters

    for loop in template.find_all(nodes.For):
        by_name = isinstance(loop.iter, nodes.Name) and (
            loop.iter.name in given_content.get(id(loop), ())
            or (id(loop) not in inside_macros and loop.iter.name == "content")
        )
        if by_name or is_content(loop.iter):
            _target(loop.target)
            yield loop


def _content_parameters(
    template: nodes.Template, macro: nodes.Macro, is_content: Callable[[nodes.Node], bool]
) -> set[str]:
    """The parameters of `macro` that get a message's content in any call in the template."""
    names = [argument.name for argument in macro.args]
    content_parameters: set[str] = set()
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            content_parameters.update(
                name for name, value in zip(names, call.args, strict=False) if is_content(value)
            )
            content_parameters.update(
                keyword.key
                for keyword in call.kwargs
                if isinstance(keyword, nodes.Keyword) and keyword.key in names and is_content(keyword.value)
            )
    return content_parameters
