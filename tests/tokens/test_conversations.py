"""Chats that continue: cached conversations give the same token ids as a full tokenization."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvroute.tokens.conversations as conversations
import kvroute.tokens.local as local
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.prefix_cache import SeenBodies
from kvroute.openai.prompt import PromptPrefix
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.tokens.conversations import Conversations, continuation
from kvroute.tokens.encoders import Cutter, RawToken, SegmentCache
from kvroute.tokens.local import LocalTokenizer, ModelFiles, load_model
from kvroute.tokens.options import Inexact

CHAT = ENDPOINTS["/v1/chat/completions"]

# A variable that is set for some messages only, a macro, an inner loop that asks which turn it is, a tail.
ODD = """{%- macro shown(text) %}{{ text | trim }}{% endmacro -%}
{%- set name = 'tools' if tools else 'none' -%}
<|turn|>{{ name }}<|end|>
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set mark = '!' %}{% continue %}{% endif -%}
<|turn|>{{ message.role }}{{ mark }}{% for part in message.tool_calls or [] %}{{ loop.index }}{% endfor %}
{{ shown(message.content) }}<|end|>
{%- endfor -%}
<|end|>{{ name }}{% if add_generation_prompt %}<|turn|>{% endif %}"""
# A longer token may begin where a shorter one was seen at the end of what is known.
OPEN = "{% for message in messages %}<|turn|>{{ message.content }}{% endfor %}"

words = st.sampled_from(
    [
        "<|end|>",
        "<|turn|>",
        "<|",
        " ",
        "\n",
        "a",
        "def f(x):",
        "é",
        "你好",
        "👍",
        '"',
        "]",
        "}",
        "|>",
        "\\u0000",
    ]
)
texts = st.lists(words, max_size=8).map("".join)
contents = texts | st.none() | st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
calls = texts.map(
    lambda text: [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"q": text})}}
    ]
)
messages = st.builds(
    lambda role, content, calls: {
        "role": role,
        "content": content,
        **({"tool_calls": calls} if calls else {}),
    },
    st.sampled_from(["user", "user", "assistant", "assistant", "tool", "developer"]),
    contents,
    st.none() | calls,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([[], [{"type": "function", "function": {"name": "f"}}]]),
        "temperature": st.sampled_from([0, 0.5]),
        "add_generation_prompt": st.booleans(),
        "messages_": st.just([]),
        "add_special_tokens": st.just(True),
        "reasoning_effort": st.sampled_from(["low", "high"]),
    },
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["on", "on", "on", "cut", "change", "again"]),
        st.integers(0, 9),
        st.lists(messages, min_size=1, max_size=3),
        fields,
        fields,
        st.sampled_from([None, 1]),
    ),
    min_size=2,
    max_size=8,
)


@pytest.fixture(scope="session")
def files(write_model: Callable[..., Any]) -> Callable[[str], ModelFiles]:
    return functools.cache(lambda template: load_model(write_model(template)))


def request(body: str | bytes) -> InferenceRequest:
    return parse_request(CHAT, body if isinstance(body, bytes) else body.encode())


def written(messages: list[Any], before: Any = (), after: Any = (), indent: int | None = None) -> str:
    """A body with fields on both sides of its messages."""
    return json.dumps(
        {**dict(before), "messages": messages, **dict(after)}, indent=indent, ensure_ascii=False
    )


def seen_bodies() -> SeenBodies:
    return SeenBodies(seed=3, cut_bytes=256, min_bytes=64, block_bytes=32)


def outcome(tokenizer: LocalTokenizer, asked: InferenceRequest, *, synchronous: bool = False) -> Any:
    try:
        return (tokenizer.prompts_if_quick if synchronous else tokenizer.prompts)(asked)
    except Inexact as error:
        return error.reason


def test_a_token_across_the_cut_is_not_split(files: Any) -> None:
    """What is known ends with `nt`, a token; what follows makes it the end of a longer one that begins
    before it. Text before it was not settled."""
    cutter = Cutter([RawToken("nt", True), RawToken("int<|turn|>", True), RawToken("<|turn|>", True)])
    model = replace(files(OPEN), cutter=cutter)
    chat = [{"role": "user", "content": "def print"}]
    longer = [*chat, {"role": "user", "content": "x"}]
    remembering = LocalTokenizer(model, SegmentCache(0), None, Conversations(100_000, least_bytes=0))

    remembering.prompts(request(written(chat)))
    ids = remembering.prompts(request(written(longer)))

    assert ids == LocalTokenizer(model, SegmentCache(0)).prompts(request(written(longer)))
    encode = model.encoder.encode
    apart = encode("<|turn|>def pri") + encode("nt") + encode("<|turn|>x")
    assert apart != encode("<|turn|>def pr") + encode("int<|turn|>x")  # else it would not show


@pytest.mark.parametrize("template", ["plain", "parts", "trim", ODD, OPEN])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_ids_are_the_same_with_and_without_memory(files: Any, template: str, steps: list[Any]) -> None:
    """Chats that continue, are cut, changed and sent again with other fields; also with small caches."""
    model = files(template)
    bare = LocalTokenizer(model, SegmentCache(0))
    memories = [Conversations(size, least_bytes=0) for size in (1_500, 1_000_000)]
    memories.append(memories[1])  # of requests that are read by what was seen before, too
    remembering = [LocalTokenizer(model, SegmentCache(0), None, memory) for memory in memories]
    bodies = seen_bodies()
    chat: list[Any] = [{"role": "system", "content": "You are."}]
    for what, place, more, before, after, indent in steps:
        if what == "on":
            chat = chat + more
        elif what == "cut":
            chat = chat[: 1 + place]
        elif what == "change":
            chat = [*chat[: place % len(chat)], *more, *chat[place % len(chat) + 1 :]]
        asked = request(written(chat, before, after, indent))
        expected = outcome(bare, asked)
        for number, tokenizer in enumerate(remembering):
            asked = bodies.read(CHAT, asked.body) if number == 2 else asked
            assert outcome(tokenizer, asked, synchronous=number == 1) == expected
    assert memories[0].bytes <= 1_500


def turns(count: int, start: str = "a") -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{start} {number} " * 600} for number in range(count)]


@pytest.fixture
def memory() -> Conversations:
    return Conversations(1_000_000)


@pytest.fixture
def tokenizer(files: Any, memory: Conversations) -> LocalTokenizer:
    return LocalTokenizer(files("plain"), SegmentCache(0), None, memory)


def test_a_turn_continues_the_previous_one_and_replaces_it_in_the_cache(
    tokenizer: LocalTokenizer, memory: Conversations
) -> None:
    first, second = (request(written(turns(count), {"model": "m"})) for count in (3, 5))
    tokenizer.prompts(first)

    known = memory.find(second)

    assert known is not None
    found = continuation(second, known)
    assert found is not None
    assert len(found.fields["messages"]) == 2
    assert b"".join(known.body) == first.body[: -len("]}")]
    tokenizer.prompts(second)
    assert len(memory) == 1
    assert memory.find(first) is None


def test_only_new_text_is_tokenized(files: Any, memory: Conversations) -> None:
    seen: list[str] = []
    model: ModelFiles = files("plain")

    class Cache(SegmentCache):
        def encode_each(self, segments: Any, encode: Any) -> Any:
            seen.extend(segments)
            return super().encode_each(segments, encode)

    tokenizer = LocalTokenizer(model, Cache(0), None, memory)
    tokenizer.prompts(request(written(turns(8))))
    seen.clear()

    tokenizer.prompts(request(written(turns(9))))

    assert sum("user" in segment for segment in seen) == 1


def test_long_new_text_is_not_tokenized_synchronously(tokenizer: LocalTokenizer) -> None:
    quick = 8192
    short, long = request(written(turns(2))), request(written(turns(40)))
    assert len(short.body) < quick < len(long.body)
    more = request(written(turns(41)))
    much_more = request(written([*turns(41), {"role": "user", "content": "b " * quick}]))

    assert outcome(tokenizer, short, synchronous=True) is not None
    assert outcome(tokenizer, long, synchronous=True) is None
    tokenizer.prompts(long)
    assert outcome(tokenizer, more, synchronous=True) == tokenizer.prompts(more)
    assert outcome(tokenizer, much_more, synchronous=True) is None


def test_many_short_messages_are_not_rendered_synchronously(tokenizer: LocalTokenizer) -> None:
    many = request(written([{"role": "user", "content": "a"}] * 40))

    assert outcome(tokenizer, many, synchronous=True) is None


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": %s, "messages": %s}',
        '{"messages": [{"role": "user", "content": "other"}], "x": %s, "messages": %s}',
        '{"x": {"messages": %s}, "messages": %s}',
        '{"\\u0000": %s, "messages": %s}',
    ],
)
def test_bodies_with_ambiguous_message_positions_are_not_cached(
    tokenizer: LocalTokenizer, memory: Conversations, body: str
) -> None:
    chat = json.dumps(turns(3))

    tokenizer.prompts(request(body % (chat, chat)))

    assert len(memory) == 0


@pytest.mark.parametrize("rest", ['"messages": []', '"\\u0000": []', '"m\\u0065ssages": []'])
def test_a_continuation_with_messages_twice_is_read_in_full(
    files: Any, tokenizer: LocalTokenizer, rest: str
) -> None:
    tokenizer.prompts(request(written(turns(3))))
    asked = request(written(turns(4))[:-1] + f", {rest}}}")

    assert outcome(tokenizer, asked) == outcome(LocalTokenizer(files("plain"), SegmentCache(0)), asked)


def test_other_tools_or_settings_are_no_continuation(files: Any, tokenizer: LocalTokenizer) -> None:
    """They come behind the messages here: what stands before them is the same."""
    bare = LocalTokenizer(files("plain"), SegmentCache(0))
    tool = {"type": "function", "function": {"name": "f"}}
    for after in ({}, {"tools": [tool]}, {"tools": [tool, tool]}, {"add_generation_prompt": False}):
        for count in (3, 4):
            asked = request(written(turns(count), after=after))
            assert tokenizer.prompts(asked) == bare.prompts(asked)


def test_the_least_recently_continued_are_forgotten(files: Any) -> None:
    memory = Conversations(150_000)
    tokenizer = LocalTokenizer(files("plain"), SegmentCache(0), None, memory)
    chats = [request(written(turns(3, start))) for start in "abcdefgh"]
    for chat in chats:
        tokenizer.prompts(chat)
        tokenizer.prompts(chats[0])

    assert memory.bytes <= 150_000
    assert memory.find(chats[0]) is not None
    assert memory.find(chats[1]) is None
    assert memory.find(chats[-1]) is not None


def test_bodies_of_other_endpoints_are_not_taken_for_chats(
    tokenizer: LocalTokenizer, memory: Conversations
) -> None:
    tokenizer.prompts(request(written(turns(3))))
    body = written(turns(4)).encode()

    assert memory.find(request(body)) is not None
    assert memory.find(parse_request(ENDPOINTS["/v1/messages"], body)) is None


@pytest.mark.parametrize("filler", ["}]", "}, {", '"}, {"', "x"])
def test_a_chat_is_found_behind_text_that_looks_like_the_end_of_a_message(
    tokenizer: LocalTokenizer, memory: Conversations, filler: str
) -> None:
    tokenizer.prompts(request(written(turns(3))))
    asked = request(written([*turns(3), {"role": "user", "content": filler * 20_000}]))

    known = memory.find(asked)

    assert known is not None
    assert known.is_prefix_of(asked.body)


@pytest.fixture
def continued(tokenizer: LocalTokenizer) -> tuple[SeenBodies, InferenceRequest]:
    """A chat of some turns, tokenized, whose beginning was seen before; and its next turn."""
    bodies = seen_bodies()
    for count in range(3, 8):
        tokenizer.prompts(bodies.read(CHAT, written(turns(count)).encode()))
    return bodies, bodies.read(CHAT, written(turns(8)).encode())


def test_a_chat_whose_beginning_was_seen_is_found_without_a_search(
    continued: tuple[SeenBodies, InferenceRequest], memory: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, asked = continued
    monkeypatch.setattr(conversations, "_ends", lambda body: pytest.fail("searched"))

    known = memory.find(asked)

    assert known is not None
    assert known.is_prefix_of(asked.body)
    assert known.end == len(written(turns(7))) - len("]}")


def test_only_bytes_after_a_known_prefix_are_compared(
    continued: tuple[SeenBodies, InferenceRequest], memory: Conversations
) -> None:
    _, asked = continued
    known, seen = memory.find(asked), asked.seen
    assert known is not None
    assert seen is not None
    prefix = seen.prefix
    behind = asked.body[prefix.end :]
    other_before = b"x" * prefix.end + behind
    place = (known.end + prefix.end) // 2
    other_behind = asked.body[:place] + b"?" + asked.body[place + 1 :]
    other = PromptPrefix(prefix.opened, prefix.end, prefix.head, prefix.kept_tail)

    assert 0 < prefix.end < known.end
    assert known.is_prefix_of(other_before, prefix)
    assert not known.is_prefix_of(other_before, other)
    assert not known.is_prefix_of(other_before)
    assert not known.is_prefix_of(other_behind, prefix)
    assert not known.is_prefix_of(asked.body[: known.end - 1], prefix)


def test_chats_with_one_prefix_are_distinguished(
    files: Any, continued: tuple[SeenBodies, InferenceRequest], tokenizer: LocalTokenizer
) -> None:
    """Of several chats that continue one prefix, only the last one is linked to the prefix."""
    bodies, _ = continued
    bare = LocalTokenizer(files("plain"), SegmentCache(0))
    chats = [[*turns(7), {"role": "user", "content": f"{branch} goes on"}] for branch in "abc"]
    for _ in range(3):
        for chat in chats:
            asked = bodies.read(CHAT, written(chat).encode())
            assert asked.seen is not None
            assert tokenizer.prompts(asked) == bare.prompts(asked)
            chat.append({"role": "user", "content": "and on"})


def test_a_beginning_that_was_forgotten_is_kept_by_no_chat(
    tokenizer: LocalTokenizer, memory: Conversations
) -> None:
    bodies = seen_bodies()
    for count in range(3, 8):
        asked = bodies.read(CHAT, written(turns(count)).encode())
        tokenizer.prompts(asked)
    known = memory.find(asked)
    assert known is not None
    assert known.beginning is not None
    assert known.beginning() is not None

    del bodies, asked
    gc.collect()

    assert known.beginning() is None
    assert memory.find(request(written(turns(8)))) is known


def test_a_body_is_kept_in_few_parts_and_once(tokenizer: LocalTokenizer, memory: Conversations) -> None:
    for count in range(3, 60):
        asked = request(written(turns(count)))
        tokenizer.prompts(asked)
    known = memory.find(asked)

    assert known is not None
    assert b"".join(known.body) == asked.body[: -len("]}")]
    assert len(known.body) <= 8


def test_chats_with_equal_ends_are_distinguished(files: Any, memory: Conversations) -> None:
    """The same length, the same end: where one is looked for, the other is found, and not taken for it."""
    tokenizer, bare = (
        LocalTokenizer(files("plain"), SegmentCache(0), None, kept) for kept in (memory, Conversations(0))
    )
    chats = [[{"role": "system", "content": start * 100}, *turns(3)] for start in "ab"]
    for _ in range(2):
        for chat in chats:
            asked = request(written([*chat, {"role": "user", "content": "go on"}]))
            tokenizer.prompts(request(written(chat)))
            assert tokenizer.prompts(asked) == bare.prompts(asked)


@pytest.mark.parametrize(
    "rest",
    [
        ', {"role": "user", "content": "b"}], "x": [{"role": "user", "content": "c"}], "n": 1}',
        ', {"role": "user", "content": "b"}], "tools": [], "n": 1}',
        ', "b"], "n": 1}',
        ', {"role": "user", "content": "b"}  ], "n": 1}',
        ', {"role": "user", "content": "b"}], "n": 2}',
        '], "n": 1}',
    ],
)
def test_bytes_after_the_messages_may_differ_in_meaning(files: Any, memory: Conversations, rest: str) -> None:
    chat = turns(3)
    tokenizer, bare = (
        LocalTokenizer(files("plain"), SegmentCache(0), None, kept) for kept in (memory, Conversations(0))
    )
    tokenizer.prompts(request(written(chat, after={"n": 1})))
    asked = request(json.dumps({"messages": chat})[:-2] + rest)

    assert outcome(tokenizer, asked) == outcome(bare, asked)


def test_where_only_messages_are_new_nothing_else_is_read(
    files: Any, memory: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = LocalTokenizer(files("plain"), SegmentCache(0), None, memory)
    after = {"tools": [{"type": "function", "function": {"name": "f"}}], "temperature": 0}
    tokenizer.prompts(request(written(turns(3), {"model": "m"}, after)))
    asked = request(written(turns(5), {"model": "m"}, after))
    expected = LocalTokenizer(files("plain"), SegmentCache(0)).prompts(asked)
    monkeypatch.setattr(local, "continuation", None)

    assert tokenizer.prompts(asked) == expected
