"""Renders chat templates with the same result as transformers 5 and vLLM 0.32.

A template is code from the model's files, so it runs in jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from enum import Enum, auto
from types import BuiltinMethodType
from typing import Any, Final, NamedTuple

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from kvroute.tokens.content_format import content_format
from kvroute.tokens.options import ContentFormat, Inexact, TokensReason
from kvroute.tokens.template_analysis import head_of, message_loops, words_of

ROLES: Final = ("user", "assistant", "tool")
_CONTENT: Final = "content"
OF_DICTS: Final = frozenset(dir(dict))
"""Names of dict methods. They give access to more of a message than one field."""
_READ_DICTS: Final = frozenset(("get", "items", "keys", "values"))
_READ_TEXTS: Final = frozenset(
    ("endswith", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip", "title", "upper")
)
"""Methods that the sandbox allows, and that it does not wrap."""
_TYPE_TESTS: Final = frozenset(
    ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number")
)
"""Jinja tests with the same result for every text."""
_RETURNS_OPERAND: Final = (nodes.And, nodes.Or)
_UNDERSTOOD: Final = (
    *(nodes.Const, nodes.TemplateData, nodes.Continue, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Compare, nodes.Operand),
)
_CORE: Final = "text\ue000of\ue001nobody"
_BLANK: Final = "\x1f"
_SAMPLE_TEXT: Final = f"{_BLANK}{_CORE}{_BLANK}"
"""A text that no template contains, with characters at both ends that `trim` removes."""


class Around(NamedTuple):
    """The text that a template puts before and after a message's text.

    `is_trimmed`: the template removes blanks at both ends of the message's text.
    """

    prefix: str
    suffix: str
    is_trimmed: bool


class _Use(Enum):
    """How a template expression uses a message's text."""

    PRINTED = auto()
    TESTED = auto()
    """Whether the text is empty."""
    OTHER = auto()


def is_verbatim(loop: nodes.For) -> bool:
    """Whether the loop over messages prints their texts unchanged, and all other output depends on the role.

    This is for messages with a role and a text only.
    """
    assert isinstance(loop.target, nodes.Name)
    return all(_is_verbatim(node, loop.target.name, frozenset(), _Use.OTHER) for node in loop.body)


def around_texts(body_of: Callable[[dict[str, Any]], str]) -> dict[str, Around]:
    """Role -> text around a message. `body_of` renders one message, without the chat's head and tail."""
    around = {}
    for role in ROLES:
        try:
            body = body_of({"role": role, "content": _SAMPLE_TEXT})
        except Inexact:
            continue
        is_trimmed = _SAMPLE_TEXT not in body
        parts = body.split(_CORE if is_trimmed else _SAMPLE_TEXT)
        wrapping = "".join(parts)
        if (
            len(parts) == 2 and _CORE not in wrapping and _BLANK not in wrapping
        ):  # otherwise trimmed on one side only
            around[role] = Around(parts[0], parts[1], is_trimmed)
    return around


def _is_verbatim(node: nodes.Node, message: str, bound: frozenset[str], use: _Use) -> bool:
    """Whether the result of `node` depends on the message's text only as `use` allows.

    PRINTED: the result may contain the unchanged text; TESTED: it may depend on whether the text is empty;
    OTHER: it must not depend on the text. In any case it may depend on the message's other fields only.
    `bound` are the names of inner loops.
    """
    if isinstance(node, (nodes.Getattr, nodes.Getitem)) and _is_name(node.node, message):
        field = node.attr if isinstance(node, nodes.Getattr) else _constant(node.arg)
        if not isinstance(field, str) or field in OF_DICTS:
            return False
        return field != _CONTENT or use is not _Use.OTHER
    if isinstance(node, nodes.Name):
        return node.name in bound
    if isinstance(node, nodes.For):
        return _is_verbatim_loop(node, message, bound)

    def all_verbatim(children: list[Any], their: _Use) -> bool:
        return all(_is_verbatim(child, message, bound, their) for child in children if child is not None)

    if isinstance(node, nodes.Output):
        return all_verbatim(node.nodes, _Use.PRINTED)
    if isinstance(node, nodes.If):
        return all_verbatim([node.test], _Use.TESTED) and all_verbatim(
            [*node.body, *node.elif_, *node.else_], _Use.OTHER
        )
    if isinstance(node, nodes.CondExpr):
        return all_verbatim([node.test], _Use.TESTED) and all_verbatim([node.expr1, node.expr2], use)
    if isinstance(node, nodes.Not):
        return all_verbatim([node.node], _Use.TESTED)
    if isinstance(node, _RETURNS_OPERAND):
        return all_verbatim([node.left, node.right], use)
    if isinstance(node, (nodes.Add, nodes.Concat)):
        parts = [node.left, node.right] if isinstance(node, nodes.Add) else node.nodes
        return all_verbatim(parts, _Use.PRINTED if use is _Use.PRINTED else _Use.OTHER)
    if isinstance(node, nodes.Filter) and use is _Use.PRINTED and node.name == "trim" and not node.args:
        return not node.kwargs and all_verbatim([node.node], use)
    if isinstance(node, nodes.Test) and node.name in _TYPE_TESTS and not node.args:
        return all_verbatim([node.node], _Use.TESTED)
    return isinstance(node, _UNDERSTOOD) and all_verbatim(list(node.iter_child_nodes()), _Use.OTHER)


def _is_verbatim_loop(node: nodes.For, message: str, bound: frozenset[str]) -> bool:
    targets = [node.target, *node.target.find_all(nodes.Name)]
    names = {target.name for target in targets if isinstance(target, nodes.Name)}
    if message in names or node.recursive:
        return False
    inside = bound | names | {"loop"}
    return (
        _is_verbatim(node.iter, message, bound, _Use.OTHER)
        and (node.test is None or _is_verbatim(node.test, message, bound | names, _Use.OTHER))
        and all(_is_verbatim(child, message, inside, _Use.OTHER) for child in node.body)
        and all(_is_verbatim(child, message, bound, _Use.OTHER) for child in node.else_)
    )


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _constant(node: nodes.Node) -> Any:
    return node.value if isinstance(node, nodes.Const) else None


Message = dict[str, Any]

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Jinja's own errors, and those of template code that indexes, adds and calls values from clients.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """One compiled chat template. Immutable; may render in any thread.

    `variables` are set in every rendering (the special tokens); `now` is the clock of a template's
    `strftime_now`. The constructor raises `jinja2.TemplateSyntaxError` for an invalid template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        format_override: ContentFormat | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._source = source
        self._variables = {**environment.globals, **variables}
        self._template = _from_string(environment, source)
        tree = environment.parse(source)
        head = head_of(tree)
        self._head = None if head is None else _from_string(environment, head)
        self._around: dict[str, Around] = {}
        if head is not None and is_verbatim(*message_loops(tree)):
            self._around = around_texts(self._body_of)
        self.content_format: ContentFormat = format_override or content_format(environment.parse(source))
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.wants_system_first = not self._takes_later_system()
        self.shows_dates = "strftime_now" in source
        self.words = words_of(tree)
        """Texts that the template compares with other texts."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str:
        """The rendered text of a chat. Raises Inexact for a chat that transformers refuses."""
        chat = list(messages)
        if not chat or (continue_final_message and add_generation_prompt):
            raise Inexact(TokensReason.TEMPLATE_REFUSED)
        continued = ""
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            chat, continued = self._marked(chat, field)
        text = self._rendered(self._template, kwargs, chat, tools, documents, add_generation_prompt)
        return _cut_at_tag(text, continued) if continue_final_message else text

    @property
    def is_separable(self) -> bool:
        """Whether the template renders message by message.

        The text of every chat is then a head, one part per message, and a tail. Head and tail do not depend
        on the messages; a part depends on its message only.
        """
        return self._head is not None

    def around(
        self,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> tuple[str, str]:
        """Head and tail of chats with these arguments. Requires `is_separable`. Raises Inexact."""
        assert self._head is not None
        head, whole = (
            self._rendered(template, kwargs, [], tools, documents, add_generation_prompt)
            for template in (self._head, self._template)
        )
        return head, whole[len(head) :]

    def between(self, messages: Sequence[Message]) -> str | None:
        """The rendered text of these messages without head and tail. Requires `is_separable`.

        None unless every message has a role and a text only, and the template prints such texts unchanged.
        """
        parts: list[str] = []
        for message in messages:
            role, text = message.get("role"), message.get("content")
            around = self._around.get(role) if isinstance(role, str) and len(message) == 2 else None
            if around is None or not text or not isinstance(text, str):
                return None
            parts += (around.prefix, text.strip() if around.is_trimmed else text, around.suffix)
        return "".join(parts)

    def _body_of(self, message: Message) -> str:
        head, tail = self.around(add_generation_prompt=False)
        text = self.render([message], add_generation_prompt=False)
        return text[len(head) : len(text) - len(tail)]

    def _rendered(
        self,
        template: Template,
        kwargs: Mapping[str, Any],
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        documents: Sequence[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        variables = {
            **self._variables,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # As `template.render`, without its copy of the variables and its rewriting of tracebacks.
            context = template.new_context(variables, shared=True)
            return "".join(template.root_render_func(context))
        except (*_RENDER_ERRORS, RecursionError):
            raise Inexact(TokensReason.TEMPLATE_REFUSED) from None

    def _marked(self, chat: list[Message], field: str) -> tuple[list[Message], str]:
        """The chat with a tag after its last text, and that text."""
        final = deepcopy(chat[-1])
        content = final.get(field)
        if content is None or field not in self._source:
            raise Inexact(TokensReason.TEMPLATE_REFUSED)
        if isinstance(content, str):
            final[field] = content + _TAG
            return [*chat[:-1], final], content
        for content_part in reversed(content):
            if "text" in content_part:
                text: str = content_part["text"]
                content_part["text"] = text + _TAG
                return [*chat[:-1], final], text
        raise Inexact(TokensReason.TEMPLATE_REFUSED)

    def _takes_later_system(self) -> bool:
        """vLLM's probe for /v1/messages. If it fails, vLLM moves later system messages to the front."""
        chat = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
        try:
            # As vLLM's probe, without this environment's functions: a template that calls one fails, too.
            plain = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
            )
            plain.from_string(self._source).render(messages=chat, add_generation_prompt=False)
        except TemplateError:
            return False
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError):
            return True
        return True


def _cut_at_tag(text: str, continued: str) -> str:
    """The text before the tag, by transformers' rule for templates that trim the message's end."""
    tag = _TAG.strip()
    if continued.strip() not in text or tag not in text:
        raise Inexact(TokensReason.TEMPLATE_REFUSED)
    at = text.rindex(tag)
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a faster lookup of fields in messages and their parts, and faster calls."""

    # Jinja's lookup raises and catches two exceptions for each missing field, and most templates read fields
    # that messages do not have. The results are the same.

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument not in OF_DICTS:
            value = obj.get(argument, missing)
            return self.undefined(obj=obj, name=argument) if value is missing else value
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict:
            if attribute not in OF_DICTS:
                value = obj.get(attribute, missing)
                return self.undefined(obj=obj, name=attribute) if value is missing else value
            if attribute in _READ_DICTS:
                return getattr(obj, attribute)
        elif type(obj) is str and attribute in _READ_TEXTS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    # Templates in the manner of Kimi K2 call macros and `get` for each message; jinja's way to such a call
    # takes longer than the call. The sandbox lets all of them pass: what it forbids of dicts and texts has no
    # value in `getattr`.

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is Macro:
            args = (__context.eval_ctx, *args)
        elif type(__obj) is not BuiltinMethodType:
            return super().call(__context, __obj, *args, **kwargs)
        kwargs.pop("_block_vars", None)
        kwargs.pop("_loop_vars", None)
        try:
            return __obj(*args, **kwargs)
        except StopIteration:
            return __self.undefined("a callable has raised StopIteration")


def _from_string(environment: ImmutableSandboxedEnvironment, source: str | nodes.Template) -> Template:
    """A template with all global names in one dict."""
    # Jinja's own chain of dicts is searched in Python code for each rendering.
    template = environment.from_string(source)
    template.globals = dict(template.globals)
    return template


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's contract)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
