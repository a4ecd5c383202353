"""Which chat templates put the text of a message as it is between texts that depend on its role alone.

Proved from the syntax tree of a template that renders message by message (`tokens.separable`), like that: its
loop reads nothing but the message, and `content` is only shown, or asked whether it is there. Then a message
of role and text is rendered once, with a text that is nobody's, to see what stands around it. What is not
understood is left to the template.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from jinja2 import nodes

from kvroute.tokens.reason import Inexact

ROLES: Final = ("user", "assistant", "tool")
_CONTENT: Final = "content"
OF_DICTS: Final = frozenset(dir(dict))
"""Through which more of a message can be had than one field of it."""
_OF_A_TYPE: Final = frozenset(
    ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number")
)
"""Tests that are the same for all texts."""
_PASSED_ON: Final = (nodes.And, nodes.Or)
_UNDERSTOOD: Final = (
    *(nodes.Const, nodes.TemplateData, nodes.Continue, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Compare, nodes.Operand),
)
_CORE: Final = "text\ue000of\ue001nobody"
_BLANK: Final = "\x1f"
_STAND_IN: Final = f"{_BLANK}{_CORE}{_BLANK}"
"""Begins and ends with what is trimmed."""


class Around(NamedTuple):
    """What stands before and behind a message's text, which loses the blanks around it if `is_trimmed`."""

    before: str
    behind: str
    is_trimmed: bool


class _Use(Enum):
    SHOWN = auto()
    ASKED = auto()
    """Whether there is any."""
    OTHER = auto()


def is_verbatim(loop: nodes.For) -> bool:
    """Whether the loop over messages shows their texts as they are; their roles decide all else of a message
    that has only these."""
    assert isinstance(loop.target, nodes.Name)
    return all(_is_plain(node, loop.target.name, frozenset(), _Use.OTHER) for node in loop.body)


def around_texts(body_of: Callable[[dict[str, Any]], str]) -> dict[str, Around]:
    """By role. `body_of` renders a message, without what is before all of them and behind."""
    found = {}
    for role in ROLES:
        try:
            body = body_of({"role": role, "content": _STAND_IN})
        except Inexact:
            continue
        is_trimmed = _STAND_IN not in body
        parts = body.split(_CORE if is_trimmed else _STAND_IN)
        rest = "".join(parts)
        if len(parts) == 2 and _CORE not in rest and _BLANK not in rest:  # else trimmed on one side
            found[role] = Around(parts[0], parts[1], is_trimmed)
    return found


def _is_plain(node: nodes.Node, message: str, bound: frozenset[str], use: _Use) -> bool:
    """Whether what `node` comes to depends on no more than the message's other fields, but that its text may
    be in it, if it is for this `use`. `bound` are names of loops inside."""
    if isinstance(node, (nodes.Getattr, nodes.Getitem)) and _is_name(node.node, message):
        field = node.attr if isinstance(node, nodes.Getattr) else _constant(node.arg)
        if not isinstance(field, str) or field in OF_DICTS:
            return False
        return field != _CONTENT or use is not _Use.OTHER
    if isinstance(node, nodes.Name):
        return node.name in bound
    if isinstance(node, nodes.For):
        return _is_plain_loop(node, message, bound)

    def each(below: list[Any], their: _Use) -> bool:
        return all(_is_plain(one, message, bound, their) for one in below if one is not None)

    if isinstance(node, nodes.Output):
        return each(node.nodes, _Use.SHOWN)
    if isinstance(node, nodes.If):
        return each([node.test], _Use.ASKED) and each([*node.body, *node.elif_, *node.else_], _Use.OTHER)
    if isinstance(node, nodes.CondExpr):
        return each([node.test], _Use.ASKED) and each([node.expr1, node.expr2], use)
    if isinstance(node, nodes.Not):
        return each([node.node], _Use.ASKED)
    if isinstance(node, _PASSED_ON):
        return each([node.left, node.right], use)
    if isinstance(node, (nodes.Add, nodes.Concat)):
        parts = [node.left, node.right] if isinstance(node, nodes.Add) else node.nodes
        return each(parts, _Use.SHOWN if use is _Use.SHOWN else _Use.OTHER)
    if isinstance(node, nodes.Filter) and use is _Use.SHOWN and node.name == "trim" and not node.args:
        return not node.kwargs and each([node.node], use)
    if isinstance(node, nodes.Test) and node.name in _OF_A_TYPE and not node.args:
        return each([node.node], _Use.ASKED)
    return isinstance(node, _UNDERSTOOD) and each(list(node.iter_child_nodes()), _Use.OTHER)


def _is_plain_loop(node: nodes.For, message: str, bound: frozenset[str]) -> bool:
    targets = [node.target, *node.target.find_all(nodes.Name)]
    names = {target.name for target in targets if isinstance(target, nodes.Name)}
    if message in names or node.recursive:
        return False
    inside = bound | names | {"loop"}
    return (
        _is_plain(node.iter, message, bound, _Use.OTHER)
        and (node.test is None or _is_plain(node.test, message, bound | names, _Use.OTHER))
        and all(_is_plain(one, message, inside, _Use.OTHER) for one in node.body)
        and all(_is_plain(one, message, bound, _Use.OTHER) for one in node.else_)
    )


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _constant(node: nodes.Node) -> Any:
    return node.value if isinstance(node, nodes.Const) else None
