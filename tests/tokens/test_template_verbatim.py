"""Messages that a template shows as they are, with texts around them that depend on the role alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.deploy.tiny_model import CHAT_TEMPLATE
from kvroute.tokens.template import ROLES, ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWN = (
    CHAT_TEMPLATE,
    CHATML,
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{{ m.role | upper ~ ': ' ~ m.content | trim }};{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}Q {{ m.content }}{% else %}A{{ m.content|trim }}"
    "{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content if m.content else 'none' }}{% endfor %}",
    "{% for m in messages %}{{ m.content or '' }}{% if not m.content %}-{% endif %}{% endfor %}",
    "{% for m in messages %}{% if m.content is string and m.name is not defined %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "{% for m in messages %}{{ (m.content or '') | trim }}"
    "{% for c in m.calls or [] %}{{ loop.index }}{{ c.f | tojson }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ ('  ' ~ m.content) | trim }}|{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}[{{ m.content }}]{% endfor %}",
)
NOT_SHOWN = (
    "{% for m in messages %}x{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{{ (m.content ~ 'x') | trim }}{% endfor %}",
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim('a') }}{% endfor %}",
    "{% for m in messages %}{{ m.content.strip() }}{% endfor %}",
    "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
    "{% for m in messages %}{{ m['con' ~ 'tent'] }}{% endfor %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.items }}{% endfor %}",
    "{% for m in messages %}{{ m.content[1:] }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if m.content == 'x' %}y{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if 'x' in m.content %}y{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if m.content | trim %}y{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if m.content is upper %}y{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in [m.content] %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set text = m.content %}{{ text }}{% endfor %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{% for m in messages %}{{ f(m.content) }}{% endfor %}",
    "{% for m in messages %}{{ name }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ tools | length }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% for m in m.calls %}{{ m.content }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% for c in m.calls %}x{% endfor %}{{ c }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ range(3) }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ 1 / 0 }}{% endfor %}",
)

texts = st.text(st.sampled_from(" \t\n\x1f\ue000abé<|{%}"), min_size=1, max_size=8)
plain = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(ROLES), texts)


@pytest.mark.parametrize("source", SHOWN)
@given(chat=st.lists(plain, min_size=1, max_size=4), turned=st.booleans())
def test_joined_segments_equal_the_rendered_template(
    source: str, chat: list[dict[str, Any]], turned: bool
) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    chat = [dict(reversed(message.items())) for message in chat] if turned else chat
    head, tail = template.around(add_generation_prompt=True)
    skipped = "continue" in source and "tool" in [message["role"] for message in chat]

    between = template.between(chat)

    assert (between is None) == skipped
    if between is not None:
        assert head + between + tail == template.render(chat)


@pytest.mark.parametrize("source", NOT_SHOWN)
def test_other_templates_are_left_to_themselves(source: str) -> None:
    template = ChatTemplate(source, {})

    for role in ROLES:
        assert template.between([{"role": role, "content": "text"}]) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": "text"},
        {"role": "developer", "content": "text"},
        {"role": "other", "content": "text"},
        {"role": ["user"], "content": "text"},
        {"role": "user", "content": ""},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "text"}]},
        {"role": "user", "content": "text", "name": "me"},
        {"role": "user"},
        {"role": "assistant", "tool_calls": []},
        {},
    ],
)
def test_other_messages_are_left_to_the_template(message: dict[str, Any]) -> None:
    template = ChatTemplate(CHATML, {})

    assert template.between([{"role": "user", "content": "text"}]) is not None
    assert template.between([{"role": "user", "content": "text"}, message]) is None
