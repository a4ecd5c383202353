"""Analyses the syntax tree of a chat template: whether it can be rendered message by message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jinja2 import nodes

_MESSAGES: Final = "messages"
# Node types that a separable template may contain. Not included, among others: `break` (it ends the loop over
# messages), assignment to attributes (a namespace carries state from one message to the next), blocks, and
# includes of other templates.
_UNDERSTOOD: Final = frozenset(
    (
        *(
            nodes.Output,
            nodes.TemplateData,
            nodes.If,
            nodes.For,
            nodes.Assign,
            nodes.AssignBlock,
            nodes.Macro,
        ),
        *(nodes.Continue, nodes.Name, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
        *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword),
        *(nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Concat),
        *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
        *(nodes.Neg, nodes.Pos),
    )
)
# Names whose value changes between calls (time, chance) or that have state.
_NONDETERMINISTIC_NAMES: Final = frozenset(
    ("strftime_now", "cycler", "joiner", "namespace", "lipsum", "self", "caller", "varargs", "kwargs")
)
_NONDETERMINISTIC_FILTERS: Final = frozenset(("random",))


def head_of(template: nodes.Template) -> nodes.Template | None:
    """The part before the loop over `messages`, as a template; None unless it renders message by message.

    Does not change `template`.
    """
    body = list(template.body)
    loops = message_loops(template)
    if len(loops) != 1:
        return None
    (loop,) = loops
    if not all(_is_understood(node) for node in template.find_all(nodes.Node)):
        return None
    if sum(name.name == _MESSAGES for name in template.find_all(nodes.Name)) != 1:
        return None
    if any(_reads_message_loop(node) for node in body):
        return None
    head = nodes.Template(body[: body.index(loop)], lineno=1)
    if template.environment is not None:
        head.set_environment(template.environment)
    return head


def message_loops(template: nodes.Template) -> list[nodes.For]:
    """The loops over `messages` at the top level of the template. A separable template has exactly one."""
    return [node for node in template.body if isinstance(node, nodes.For) and _is_message_loop(node)]


def _is_message_loop(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.For)
        and isinstance(node.iter, nodes.Name)
        and node.iter.name == _MESSAGES
        and isinstance(node.target, nodes.Name)
        and not node.else_
        and node.test is None
        and not node.recursive
    )


def _is_understood(node: nodes.Node) -> bool:
    if type(node) not in _UNDERSTOOD:
        return False
    if isinstance(node, nodes.Name):
        return node.name not in _NONDETERMINISTIC_NAMES
    return not (isinstance(node, nodes.Filter) and node.name in _NONDETERMINISTIC_FILTERS)


def _reads_message_loop(node: nodes.Node) -> bool:
    """Whether `node` reads the variable `loop` of the loop over messages, such as `loop.index`."""
    # In the body of an inner loop, `loop` is the inner loop's variable; in its iterable it is the outer
    # one's.
    return any(name.name == "loop" for name in _outer_names(node))


def _outer_names(node: nodes.Node) -> Iterator[nodes.Name]:
    """The names in `node` and its children, without the bodies of inner loops."""
    if isinstance(node, nodes.Name):
        yield node
    if isinstance(node, nodes.For) and not _is_message_loop(node):
        for inner in (node.iter, node.test, *node.else_):
            if inner is not None:
                yield from _outer_names(inner)
        return
    for child in node.iter_child_nodes():
        yield from _outer_names(child)


_LEAST_WORD: Final = 3
"""Shorter texts, such as line breaks, are in almost every message."""


def words_of(template: nodes.Template) -> tuple[str, ...]:
    """Texts that the template may look for in contents: operands of `in`, arguments of calls."""
    words: dict[str, None] = {}
    for node in template.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        operands: list[nodes.Node] = []
        if isinstance(node, nodes.Compare):
            if any(operand.op in ("in", "notin") for operand in node.ops):
                operands = [node.expr]
        elif isinstance(node, nodes.Call):
            operands = list(node.args)
        else:
            operands = list(getattr(node, "args", None) or ())
        for operand in operands:
            value = _constant(operand)
            if isinstance(value, str) and len(value) >= _LEAST_WORD:
                words[value] = None
    return tuple(words)


def _constant(node: nodes.Node) -> object:
    return node.value if isinstance(node, nodes.Const) else None
