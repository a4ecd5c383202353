from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request
from kvroute.tokens.chat import Chat, EngineFlags
from kvroute.tokens.encoders import SegmentCache
from kvroute.tokens.local import LocalTokenizer, ModelFiles, load_model
from kvroute.tokens.options import Inexact, TokensReason
from kvroute.tokens.reading import read

Write = Callable[..., Any]

words = st.sampled_from(
    ["<|end|>", "<|turn|>", "<|", " ", "  ", "\n", "a", "def f(x):", "é", "你好", "👍", "42", "'s", "|>"]
)
texts = st.lists(words, max_size=8).map("".join)
contents = texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
answers = st.builds(
    lambda content, arguments: {
        "role": "assistant",
        "content": content,
        **(
            {
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
                ]
            }
            if arguments
            else {}
        ),
    },
    contents,
    st.none() | texts.map(lambda text: json.dumps({"q": text})),
)
turns = st.tuples(contents.map(lambda content: {"role": "user", "content": content}), answers)
edits = st.lists(
    st.tuples(st.sampled_from(["turn", "replace", "drop"]), st.integers(0, 9), turns), min_size=1, max_size=8
)


@pytest.fixture(scope="session")
def model_files(write_model: Write) -> Callable[[str, str], tuple[ModelFiles, Tokenizer]]:
    """`(template, library)` -> a model's files, and its tokenizer to compare with."""

    @functools.cache
    def load(template: str, library: str) -> tuple[ModelFiles, Tokenizer]:
        folder = write_model(template)
        loaded = load_model(folder, allow_fastokens=library == "fastokens")
        return loaded, Tokenizer.from_file(str(folder / "tokenizer.json"))

    return load


@pytest.mark.parametrize("template", ["plain", "parts", "trim"])
@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(system=texts, steps=edits)
def test_earlier_prompts_never_change_the_ids(
    model_files: Callable[..., Any],
    make_request: Any,
    template: str,
    library: str,
    system: str,
    steps: list[Any],
) -> None:
    """Conversations that grow, are edited in the middle and cut short, through a cache that also forgets."""
    model, reference = model_files(template, library)
    cached, bare = LocalTokenizer(model, SegmentCache(2_000)), LocalTokenizer(model, SegmentCache(0))
    roomy = LocalTokenizer(model, SegmentCache(1_000_000))
    messages: list[Any] = [{"role": "system", "content": system}]
    for what, place, turn in steps:
        if what == "turn" or len(messages) == 1:
            messages += turn
        elif what == "replace":
            messages[1 + place % (len(messages) - 1)] = turn[place % 2]
        else:
            del messages[1 + place % (len(messages) - 1) :]
        request = make_request(messages=messages)
        chat = read(request, EngineFlags(), model.template)
        assert isinstance(chat, Chat)
        whole = array("I", reference.encode(bare.text_of(chat), add_special_tokens=False).ids)
        assert cached.prompts(request) == roomy.prompts(request) == bare.prompts(request) == (whole,)


@pytest.fixture
def plain(write_model: Write) -> LocalTokenizer:
    return LocalTokenizer(load_model(write_model()), SegmentCache(100_000))


@pytest.fixture
def with_bos(write_model: Write) -> LocalTokenizer:
    return LocalTokenizer(load_model(write_model(adds_bos=True)), SegmentCache(100_000))


def test_texts_of_a_completion_are_prompts_of_their_own(with_bos: LocalTokenizer, make_request: Any) -> None:
    several = with_bos.prompts(make_request("completions", prompt=["Hello", "", "Hello"]))
    bare = with_bos.prompts(make_request("completions", prompt="Hello", add_special_tokens=False))

    assert several == (array("I", [1]) + bare[0], array("I", [1]), array("I", [1]) + bare[0])
    assert several[0].typecode == "I"


def test_token_ids_are_taken_as_they_are(with_bos: LocalTokenizer, make_request: Any) -> None:
    assert with_bos.prompts(make_request("completions", prompt=[5, 6])) == (array("I", [5, 6]),)
    assert with_bos.prompts(make_request("completions", prompt=[[5], [6, 7]], truncate_prompt_tokens=1)) == (
        array("I", [5]),
        array("I", [7]),
    )


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, ["bos", 0, 1, 2, 3]),
        ({"truncate_prompt_tokens": 3}, ["bos", 2, 3]),
        ({"truncate_prompt_tokens": 9}, ["bos", 0, 1, 2, 3]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [1, 2, 3]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ["bos", 0, 1]),
        ({"truncate_prompt_tokens": 2, "add_special_tokens": False}, [2, 3]),
    ],
)
def test_truncation_keeps_the_same_tokens_as_the_engine(
    with_bos: LocalTokenizer, make_request: Any, fields: dict[str, Any], kept: list[Any]
) -> None:
    """As seen at a worker whose tokenizer adds a BOS."""
    text = "1<|end|>2<|end|>"
    (bare,) = with_bos.prompts(make_request("completions", prompt=text, add_special_tokens=False))
    assert len(bare) == 4

    (ids,) = with_bos.prompts(make_request("completions", prompt=text, **fields))

    assert list(ids) == [1 if place == "bos" else bare[place] for place in kept]


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        ("completions", {"prompt": "Hi", "suffix": "x"}, TokensReason.UNSUPPORTED),
        ("completions", {"prompt": "Hi", "prompt_embeds": "x"}, TokensReason.MEDIA),
        ("completions", {"prompt": []}, TokensReason.UNREADABLE),
        ("completions", {"prompt": [1, "x"]}, TokensReason.UNREADABLE),
        ("completions", {"prompt": [-1]}, TokensReason.UNREADABLE),
        ("completions", {"prompt": "Hi", "truncate_prompt_tokens": 1}, TokensReason.TRUNCATION),
        (
            "completions",
            {"prompt": "Hi", "truncate_prompt_tokens": 2, "truncation_side": "up"},
            TokensReason.UNREADABLE,
        ),
        ("rerank", {"query": "Hi", "documents": ["a"]}, TokensReason.UNSUPPORTED),
    ],
)
def test_a_prompt_without_exact_tokens_gives_a_reason(
    with_bos: LocalTokenizer, make_request: Any, path: str, fields: dict[str, Any], reason: TokensReason
) -> None:
    with pytest.raises(Inexact) as refused:
        with_bos.prompts(make_request(path, **fields))

    assert refused.value.reason is reason


@pytest.mark.parametrize("body", [b'{"prompt": "\\ud800"}', b'{"prompt": "x", "seed": 1e400}'])
def test_a_body_that_only_python_reads_is_not_tokenized(plain: LocalTokenizer, body: bytes) -> None:
    with pytest.raises(Inexact) as refused:
        plain.prompts(parse_request(ENDPOINTS["/v1/completions"], body))

    assert refused.value.reason is TokensReason.UNREADABLE


def test_a_lone_surrogate_in_arguments_is_unreadable(plain: LocalTokenizer, make_request: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"q": "\\ud800"}'}}

    with pytest.raises(Inexact) as refused:
        plain.prompts(make_request(messages=[{"role": "assistant", "tool_calls": [call]}]))

    assert refused.value.reason is TokensReason.UNREADABLE


def test_an_invocation_is_read_by_its_fields(plain: LocalTokenizer, make_request: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]

    def invoke(**body: Any) -> Any:
        return plain.prompts(parse_request(ENDPOINTS["/invocations"], json.dumps(body).encode()))

    assert invoke(messages=messages) == plain.prompts(make_request(messages=messages))
    assert invoke(prompt="Hi") == plain.prompts(make_request("completions", prompt="Hi"))
    assert invoke(input="Hi") == plain.prompts(make_request("embeddings", input="Hi"))
    with pytest.raises(Inexact):
        invoke(query="Hi", documents=["a"])


def test_a_model_without_a_template_has_no_chats(write_model: Write, make_request: Any) -> None:
    bare = LocalTokenizer(load_model(write_model(chat_template=None)), SegmentCache(0))

    with pytest.raises(Inexact) as refused:
        bare.prompts(make_request(messages=[{"role": "user", "content": "Hi"}]))

    assert refused.value.reason is TokensReason.NO_TEMPLATE
    assert bare.cache.bytes == 0
