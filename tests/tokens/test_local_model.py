from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute.tokens.local import load_model
from kvroute.tokens.options import Inexact, TokensReason, UnusableModel

Write = Callable[..., Path]


def test_fastokens_is_used_and_reported_if_it_agrees(write_model: Write) -> None:
    folder = write_model()

    assert load_model(folder).encoder.name == "fastokens"
    assert load_model(folder, allow_fastokens=False).encoder.name == "tokenizers"


@pytest.mark.parametrize(
    ("native", "why"),
    [
        (None, "not installed"),
        (SimpleNamespace(), "cannot read"),
        (
            SimpleNamespace(
                Tokenizer=SimpleNamespace(
                    from_json_str=lambda _: SimpleNamespace(
                        encode_batch_flat=lambda *_, **__: (b"\0" * 4, b"")
                    )
                )
            ),
            "other token ids",
        ),
    ],
)
def test_tokenizers_is_used_where_fastokens_does_not_agree(
    write_model: Write, monkeypatch: pytest.MonkeyPatch, native: Any, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", native)

    encoder = load_model(write_model()).encoder

    assert encoder.name == "tokenizers"
    assert why in encoder.explanation
    assert list(encoder.encode("Hi there")) == list(load_model(write_model()).encoder.encode("Hi there"))


def test_templates_in_files_win_and_tools_have_their_own(write_model: Write) -> None:
    folder = write_model("mine {{ messages[0].role }}")
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools")
    files = load_model(folder)
    plain, tools = files.template(has_tools=False), files.template(has_tools=True)

    assert plain is not None
    assert tools is not None
    assert plain.render([{"role": "user"}]) == "mine user"
    assert tools.render([{"role": "user"}]) == "tools"


@pytest.mark.parametrize(
    "templates",
    [
        {"default": "a", "tool_use": "b"},
        [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    ],
)
def test_templates_may_be_named_in_the_configuration(write_model: Write, templates: Any) -> None:
    files = load_model(write_model(chat_template=templates))

    assert [files.template(has_tools).render([{"role": "user"}]) for has_tools in (False, True)] == ["a", "b"]  # type: ignore[union-attr]


def shown_by(folder: Path) -> str:
    template = load_model(folder).template(has_tools=False)
    assert template is not None
    return template.render([{"role": "user"}])


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"bos_token": {"content": "<|turn|>"}}, "<|pad|><|end|>"),
        ({"bos_token": {"content": "<|turn|>"}, "added_tokens_decoder": {}}, "<|turn|>"),
    ],
)
def test_special_tokens_are_variables_however_they_are_written(
    write_model: Write, config: dict[str, Any], shown: str
) -> None:
    """Older models have a file that wins; where the configuration lists the added tokens, nobody reads it."""
    folder = write_model("{{ bos_token }}{{ unk_token }}{{ sep_token }}", **config)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"unk_token": {"content": "<|end|>"}, "bos_token": "<|pad|>"})
    )

    assert shown_by(folder) == shown


def test_special_tokens_that_a_model_names_itself_are_variables_and_tokens(write_model: Write) -> None:
    folder = write_model(
        "{{ image_token }}{{ boi_token }}{{ think_token }}{{ other_token }}",
        image_token="<|pad|>",
        other_token={"content": "no token"},
        think_token={"__type": "AddedToken", "content": "<|end|>"},
        extra_special_tokens={"boi_token": "<boi>"},
        additional_special_tokens=["<more>"],
    )
    encode = load_model(folder).encoder.encode

    assert shown_by(folder) == "<|pad|><boi><|end|>"
    assert [len(encode(text)) for text in ("<boi>", "<more>")] == [1, 1]
    assert list(encode("boi_token")) == list(load_model(write_model()).encoder.encode("boi_token"))


def test_added_tokens_of_older_models_have_a_file(write_model: Write) -> None:
    folder = write_model()
    (folder / "added_tokens.json").write_text(json.dumps({"<old>": 8000}))

    assert len(load_model(folder).encoder.encode("<old>")) == 1


def test_a_processors_template_renders_chats_without_tools(write_model: Write) -> None:
    folder = write_model("tokenizer's")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert shown_by(folder) == "tokenizer's"

    (folder / "preprocessor_config.json").write_text("{}")
    tools = load_model(folder).template(has_tools=True)

    assert shown_by(folder) == "processor's"
    assert tools is not None
    assert tools.render([{"role": "user"}]) == "tokenizer's"


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": json.dumps({"architectures": ["DeepseekV32ForCausalLM"]})},
        {"config.json": json.dumps({"architectures": ["InklingForConditionalGeneration"]})},
        {"consolidated.safetensors": "", "tekken.json": "{}"},
        {"consolidated-1.safetensors": "", "tokenizer.model.v3": ""},
    ],
)
def test_a_template_that_the_engine_passes_over_is_not_used(
    write_model: Write, files: dict[str, str]
) -> None:
    folder = write_model("not used")
    for name, text in files.items():
        (folder / name).write_text(text)

    assert load_model(folder).template(has_tools=False) is None


def test_tokens_that_only_the_configuration_names_are_added(write_model: Write) -> None:
    folder = write_model(
        added_tokens_decoder={"8000": {"content": "<new>", "special": True}},
        additional_special_tokens=["<extra>"],
        mask_token="<mask>",
        add_bos_token=True,
    )
    files = load_model(folder)

    assert [len(files.encoder.encode(text)) for text in ("<new>", "<extra>", "<mask>", "<other>")] == [
        1,
        1,
        1,
        3,
    ]
    assert list(files.cutter.segments("a<new>b")) == ["a", "<new>b"]
    assert sum(map(len, files.added_around or ())) == 0


def test_the_time_in_a_template_is_given(write_model: Write) -> None:
    folder = write_model("{{ strftime_now('%Y-%m-%d') }}")
    template = load_model(folder, now=lambda: datetime(2026, 1, 2)).template(has_tools=False)

    assert template is not None
    assert template.render([{"role": "user"}]) == "2026-01-02"


@pytest.mark.parametrize(
    "body", ["{{ 1 // 0 }}", "{{ messages[9].x.y }}", "{{ raise_exception('no') }}", "{{ 'a' + 1 }}"]
)
def test_a_template_that_fails_refuses(write_model: Write, body: str) -> None:
    template = load_model(write_model(body)).template(has_tools=False)

    assert template is not None
    with pytest.raises(Inexact) as refused:
        template.render([{"role": "user"}])
    assert refused.value.reason is TokensReason.TEMPLATE_REFUSED


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", '{"split_special_tokens": true}', "split_special_tokens"),
        ("chat_template.jinja", "{% for %}", "line 1"),
    ],
)
def test_unusable_files_give_a_reason(
    write_model: Write, file: str, content: str | None, message: str
) -> None:
    folder = write_model()
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)

    with pytest.raises(UnusableModel, match=message):
        load_model(folder)
