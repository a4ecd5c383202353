"""The analysis separates templates that render message by message from all others."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.deploy.tiny_model import CHAT_TEMPLATE
from kvroute.tokens.template import ChatTemplate

LOOP = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        CHAT_TEMPLATE,
        LOOP,
        "{{ bos_token }}" + LOOP + "{% if add_generation_prompt %}<assistant>{% endif %}",
        "{% for message in messages %}{% set x = message.content | trim %}{{ x }}{% endfor %}",
        "{% for m in messages %}{% for c in m.calls %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}x{% endfor %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    ],
)
def test_separable(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    chat: list[Any] = [{"role": role, "content": f" {role} "} for role in ("system", "user", "tool", "user")]

    assert template.is_separable
    head, tail = template.around(add_generation_prompt=True)
    whole = template.render(chat)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    middles = [template.render([message])[len(head) :] for message in chat]
    assert whole == head + "".join(text[: len(text) - len(tail)] for text in middles) + tail


@pytest.mark.parametrize(
    "source",
    [
        "no loop at all",
        LOOP + LOOP,
        LOOP + "{{ messages | length }}",
        "{% if messages[0].role == 'system' %}x{% endif %}" + LOOP,
        "{% set all = messages %}{% for m in all %}x{% endfor %}",
        "{% if true %}" + LOOP + "{% endif %}",
        "{% for m in messages %}{{ loop.index0 }}{% endfor %}",
        "{% for m in messages %}{% if loop.last %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{% for c in loop %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.calls if loop.first %}x{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.calls %}x{% else %}{{ loop.index }}{% endfor %}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}x{% endfor %}",
        "{% for m in messages %}x{% else %}y{% endfor %}",
        "{% for m in messages recursive %}x{% endfor %}",
        "{% for role, content in messages %}x{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% break %}{% endfor %}",
        "{{ strftime_now('%Y') }}" + LOOP,
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
        "{% for m in messages %}{{ m.content | random }}{% endfor %}",
        "{% for m in messages %}{% generation %}x{% endgeneration %}{% endfor %}",
        "{% block b %}" + LOOP + "{% endblock %}",
        "{% for m in messages %}{% include 'x' %}{% endfor %}",
    ],
)
def test_not_separable(source: str) -> None:
    assert not ChatTemplate(source, {}).is_separable
