"""Which chat templates render a conversation message by message, so that a longer one only goes on.

Proved from the template's syntax tree, never guessed from what it renders: some text, one loop over
`messages` in which nothing is read but the message and what is the same for all of them, and some text
behind it. Then the text of a chat is `head + body(message) + ... + tail`, and a chat that begins with known
messages begins with their text. What is not understood is not separable, which costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from jinja2 import nodes

_MESSAGES: Final = "messages"
# All that may occur anywhere. Not here, among others: `break` (it ends the loop over messages), attributes
# that are assigned to (namespaces carry what one message left to the next), blocks and other templates.
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
# Not the same whenever they are asked (the time, chance), or with a memory of their own.
_UNSTEADY_NAMES: Final = frozenset(
    ("strftime_now", "cycler", "joiner", "namespace", "lipsum", "self", "caller", "varargs", "kwargs")
)
_UNSTEADY_FILTERS: Final = frozenset(("random",))


def head_of(template: nodes.Template) -> nodes.Template | None:
    """What the template does before its loop over `messages`, as a template of its own; None unless it
    renders message by message. `template` stays as it is."""
    body = list(template.body)
    loops = message_loops(template)
    if len(loops) != 1:
        return None
    (loop,) = loops
    if not all(_is_understood(node) for node in template.find_all(nodes.Node)):
        return None
    if sum(name.name == _MESSAGES for name in template.find_all(nodes.Name)) != 1:
        return None
    if any(_of_this_loop(node) for node in body):
        return None
    head = nodes.Template(body[: body.index(loop)], lineno=1)
    if template.environment is not None:
        head.set_environment(template.environment)
    return head


def message_loops(template: nodes.Template) -> list[nodes.For]:
    """The loops over `messages` that are in no other block; a template with a head has one."""
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
        return node.name not in _UNSTEADY_NAMES
    return not (isinstance(node, nodes.Filter) and node.name in _UNSTEADY_FILTERS)


def _of_this_loop(node: nodes.Node) -> bool:
    """Whether `loop` stands for the loop over messages in `node` or below: how many there are, which one it
    is. In a loop inside the body the name is that loop's, but not in what is looped over."""
    return any(name.name == "loop" for name in _outer_names(node))


def _outer_names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Names in `node` and below, but for those in the bodies of other loops than the one over messages."""
    if isinstance(node, nodes.Name):
        yield node
    if isinstance(node, nodes.For) and not _is_message_loop(node):
        for part in (node.iter, node.test, *node.else_):
            if part is not None:
                yield from _outer_names(part)
        return
    for child in node.iter_child_nodes():
        yield from _outer_names(child)
