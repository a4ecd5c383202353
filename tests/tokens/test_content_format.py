from __future__ import annotations

import pytest
from jinja2 import Environment

from kvroute.tokens.content_format import content_format

PARTS = {
    "a loop over a message's content": "{% for m in messages %}{% for p in m['content'] %}"
    "{% endfor %}{% endfor %}",
    "by attribute": "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "a slice, filtered": "{% for m in messages[1:] %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
    "an assigned list": "{% set l = messages %}{% set k = l[1:] %}{% for m in k %}{% for p in m.content %}"
    "{% endfor %}{% endfor %}",
    "a variable named content": "{% for m in messages %}{% set content = m.content %}{% for p in content %}"
    "{% endfor %}{% endfor %}",
    "a macro's parameter": "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "a macro's parameter by name": "{% macro show(x, c) %}{% for p in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(1, c=m['content']) }}{% endfor %}",
}
STRING = {
    "no loop": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "another key": "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    "another list": "{% for m in documents %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "a macro given something else": "{% macro show(content) %}{% for p in content %}{% endfor %}"
    "{% endmacro %}{% for m in messages %}{{ show(m.tools) }}{% endfor %}",
    "targets that cannot be followed": "{% for i, m in messages %}{% for p in m.content %}"
    "{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", PARTS.values(), ids=PARTS)
def test_a_template_that_loops_over_content_is_given_parts(source: str) -> None:
    assert content_format(Environment().parse(source)) == "openai"


@pytest.mark.parametrize("source", STRING.values(), ids=STRING)
def test_any_other_template_is_given_a_string(source: str) -> None:
    assert content_format(Environment().parse(source)) == "string"
