"""The tiny model's files, with templates and tokenizers of other shapes, and requests to tokenize."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, load_model

TEMPLATES = {
    # Parts, a BOS of its own, tools with indentation, whole calls shown.
    "parts": """{{- bos_token }}
{%- if tools %}{{ '<|turn|>system\\n' + tools | tojson(indent=2) + '<|end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|turn|>' + message['role'] + '\\n' }}
    {%- for part in message['content'] %}
        {%- if part['type'] == 'text' %}{{ part['text'] }}{% endif %}
    {%- endfor %}
    {%- if message.reasoning_content %}{{ '[' + message.reasoning_content + ']' }}{% endif %}
    {%- for call in message.tool_calls or [] %}{{- '<call>' + call | tojson + '</call>' }}{%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if enable_thinking is defined %}{{ '[' ~ enable_thinking ~ ' ' ~ reasoning_effort ~ ']' }}{% endif %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}
""",
    # Strings that are trimmed, a system prompt that must come first, loop controls, a generation block.
    "trim": """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set rest = messages[1:] %}{% else %}{% set system = 'default' %}{% set rest = messages %}{% endif -%}
<|turn|>system
{{ system }}{% for tool in tools or [] %}

{{ tool.function | tojson }}{% endfor %}<|end|>
{% for m in rest %}{% if m.role == 'system' %}{{ raise_exception('System must be first') }}{% endif %}
<|turn|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}

{{ m.content | trim if m.content else '' }}
{%- for c in m.tool_calls or [] %}

{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}{% if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- generation %}<|end|>{% endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}<|turn|>assistant

{% endif %}""",
}

BOS_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|turn|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|turn|>": {"id": "<|turn|>", "ids": [1], "tokens": ["<|turn|>"]}},
}

WriteModel = Callable[..., Path]
MakeRequest = Callable[..., InferenceRequest]


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> WriteModel:
    """`(template, adds_bos=..., **tokenizer_config)` -> a folder; "plain" is its own template."""

    def write(template: str = "plain", *, adds_bos: bool = False, **config: Any) -> Path:
        folder = write_tiny_model("tiny", tmp_path_factory.mktemp("model"))
        if template != "plain":
            (folder / "chat_template.jinja").write_text(TEMPLATES.get(template, template))
        if adds_bos:
            settings = json.loads((folder / "tokenizer.json").read_text())
            settings["post_processor"] = BOS_PROCESSOR
            (folder / "tokenizer.json").write_text(json.dumps(settings))
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return write


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    """`(path, **body)` -> a request; the path is short for /v1/chat/completions and its like."""

    def make(path: str = "chat/completions", **body: Any) -> InferenceRequest:
        return parse_request(ENDPOINTS[f"/v1/{path}"], json.dumps({"model": "tiny", **body}).encode())

    return make


@pytest.fixture(scope="session")
def rendered(write_model: WriteModel, make_request: MakeRequest) -> Callable[..., str]:
    """`(template, path, **body)` -> the text that the model sees, by way of its token ids."""
    decoder = Tokenizer.from_file(str(write_model() / "tokenizer.json"))
    known: dict[str, LocalTokenizer] = {}

    def render(template: str, path: str = "chat/completions", **body: Any) -> str:
        if template not in known:
            known[template] = LocalTokenizer(load_model(write_model(template)), SegmentCache(100_000))
        (ids,) = known[template].prompts(make_request(path, **body))
        return str(decoder.decode(list(ids), skip_special_tokens=False))

    return render
