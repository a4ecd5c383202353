"""Templates are rendered as jinja's own sandbox renders them, and messages alike on both ways to them."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvroute.tokens.chat import Chat, render_chat
from kvroute.tokens.options import Inexact
from kvroute.tokens.template import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "hi", "items": ["own"], "0": "zero"},
    {"role": "assistant", "content": None, "function": {"name": "f", "arguments": {"q": 1}}},
]
EXPRESSIONS = (
    "m.role",
    "m['role']",
    "m['role' ~ '']",
    "m.nothing",
    "m['nothing']",
    "m.nothing is defined",
    "m['nothing'] is defined",
    "m.nothing.deeper",
    "m['nothing']['deeper']",
    "m.function.name",
    "m['function']['arguments']['q']",
    "m.content is none",
    "m['items']",
    "m.items",
    "m.items()",
    "m['keys']",
    "m.get('role')",
    "m.get('nothing', 'else')",
    "m.pop('role')",
    "m['pop']",
    "m.__class__",
    "m['__class__']",
    "m['__class__'] is defined",
    "m.__getitem__",
    "m[0]",
    "m['0']",
    "m[none]",
    "m[m]",
    "m.role.upper()",
    "m.role.nothing is defined",
    "m['role']['nothing'] is defined",
    "m['role'][0]",
    "m.role.__class__",
    "'{}'.format(m.role)",
    "messages[0].role",
    "messages.append(m)",
    "range(2) | list",
    "named",
    "nothing is defined",
    "namespace(a=1).a",
    "dict(a=1).a",
    "dict(a=1)['b'] is defined",
)


def outcome(expression: str, text: Any) -> tuple[str, Any]:
    try:
        return "text", text()
    except (TemplateError, Inexact, TypeError, LookupError):
        return "refused", expression


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_lookups_give_the_same_values_as_jinja(expression: str) -> None:
    source = "{% for m in messages %}[{{ " + expression + " }}]{% endfor %}"
    variables = {"named": "set in every rendering"}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    template = ChatTemplate(source, {"named": "set in every rendering"})

    ours = outcome(expression, lambda: template.render(MESSAGES))
    theirs = outcome(expression, lambda: plain.render(variables | {"messages": [*MESSAGES]}))

    # An undefined name says so by the type of what it came from: no address is in it.
    assert _without_addresses(ours) == _without_addresses(theirs)


def _without_addresses(found: tuple[str, Any]) -> Any:
    return found[0], found[1].partition(" at 0x")[0]


def test_variables_of_one_chat_do_not_exist_in_the_next() -> None:
    set_once = "{% if messages | length > 1 %}{% set name = 'two' %}{% endif %}"
    template = ChatTemplate(set_once + "{{ name }}|{{ dict is string }}|{{ other }}", {})

    first = template.render(MESSAGES, other="given", dict="mine")

    assert first == "two|True|given"
    assert template.render(MESSAGES[:1]) == "|False|"


@pytest.mark.parametrize("form", ["string", "openai"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer", "tool", "odd"])
@pytest.mark.parametrize("content", ["", "text", "x-anthropic-billing-header: 1\ntext"])
def test_an_unused_field_does_not_change_a_message_of_role_and_text(
    form: Any, role: str, content: str
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m | tojson }}{{ m['tools'] is defined }}{% endfor %}{# 'developer' #}",
        {},
        format_override=form,
    )
    plain = {"content": content, "role": role}

    assert render_chat(Chat([plain]), template) == render_chat(Chat([plain | {"else": 1}]), template)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            "{% macro m(a, b='d') %}({{ a }}{{ b }}{{ kwargs }}{{ varargs }}){% endmacro %}{{ m(1) }}",
            "(1d{}())",
        ),
        (
            "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}"
            "{% for x in [1] %}{{ m(x, 2, c=3) }}{% endfor %}",
            "1(2,){'c': 3}",
        ),
        ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{% endcall %}", "<in>"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content= Hi ;"),
        (
            "{{ messages[0].get('name', 'nobody') }}{{ messages[0].content.strip().split('i') }}",
            "nobody['H', '']",
        ),
        ("{{ '{0}{x}'.format(1, x=2) }}", "12"),
        ("{{ {'get': 1}.get('get') }}{{ {'get': 1}['get'] }}", "11"),
    ],
)
def test_calls_within_a_template_are_jinjas(source: str, shown: str) -> None:
    template = ChatTemplate(source, {})

    assert template.render([{"role": "user", "content": " Hi "}]) == shown


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.__class__.mro() }}",
        "{{ '{0.__class__.mro}'.format(1)() }}",
        "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}",
        "{{ messages[0].get(1, 2, 3) }}",
        "{{ missing() }}",
    ],
)
def test_what_the_sandbox_or_jinja_forbids_is_refused(source: str) -> None:
    with pytest.raises(Inexact, match="template_refused"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
