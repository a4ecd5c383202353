import inspect
import json
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple

from kvroute.blocks.keys import BLOCK_BYTES, CacheSpace
from kvroute.errors import InvalidRequest
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.prefix_cache import SeenBodies
from kvroute.openai.prompt import Prompt, SeenPrompt, rendered_head
from kvroute.openai.request import parse_request, prompts_of
from kvroute.tokens.estimate import TokenEstimator

CHAT = ENDPOINTS["/v1/chat/completions"]
SPACE = CacheSpace("m")


def bodies(**changed):
    return SeenBodies(**{"seed": 3, "cut_bytes": 2048, "min_bytes": 512, "block_bytes": 128} | changed)


def chat_of(count, begin=0):
    roles = "user", "assistant"
    return [
        {"role": roles[n % 2], "content": f"{n} " + "".join(random.Random(n).choices('abc \n"é', k=700))}
        for n in range(begin, begin + count)
    ]


def dumped(messages, *, compact=False, first=None, **last):
    separators = (",", ":") if compact else None
    return json.dumps((first or {}) | {"messages": messages} | last, separators=separators).encode()


def read_by(read, body, places=()):
    """All that routing takes from a body, which must not depend on what came before; and whether it did."""
    try:
        request = read(CHAT, body)
    except InvalidRequest as refused:
        return str(refused), False
    made, was_seen = [], False
    for prompt in prompts_of(request):
        was_seen |= isinstance(prompt, SeenPrompt)
        estimated = TokenEstimator().prompt_keys(prompt, SPACE)
        keys, count = estimated.keys, len(estimated.keys)
        single = [keys[place % count] for place in places if count]
        parts = [list(keys[place % count : place % count + 40]) for place in places if count]
        after = prompt.after(count * BLOCK_BYTES)
        made.append((prompt.size, after, single, parts, list(keys), estimated.tokens, prompt.data))
    salt, messages = request.cache_salt, request.messages
    return (
        made,
        request.model,
        request.stream,
        request.is_read,
        None if salt is None else bytes(salt),
        [bytes(raw) for raw in rendered_head(request.head)],
        messages and [astuple(message) for message in messages],
        request.text("user"),
    ), was_seen


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    ("first", "last"),
    [
        ({"model": "m"}, {"max_tokens": 3}),
        ({}, {"model": "m", "stream": True, "cache_salt": "s"}),
        ({"tools": [{"type": "function"}], "model": "m"}, {"user": "u"}),
        ({}, {"tools": [{"type": "function"}], "model": "m"}),
        ({"metadata": {"a": "b"}, "stream": False}, {}),
    ],
)
def test_cached_turns_of_a_chat_are_read_like_new_ones(compact, first, last):
    seen, were_seen = bodies(), []
    for turn in range(2, 20):
        body = dumped(chat_of(turn), compact=compact, first=first, **last)
        read, was_seen = read_by(seen.read, body, [0, 5, -1])
        were_seen.append(was_seen)

        assert read == read_by(parse_request, body, [0, 5, -1])[0]
    assert all(were_seen[4:])


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_turns_of_an_agent_whose_billing_header_and_marks_change_are_read_like_new_ones(path, compact):
    endpoint, seen, were_seen, before = ENDPOINTS[path], bodies(), [], b""
    mark = {"cache_control": {"type": "ephemeral"}}
    for turn in range(2, 20):
        billing = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cch={turn:05x};"
        system = [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent.", **mark}]
        results = [
            {"type": "tool_result", "tool_use_id": f"t{n}", "content": each["content"]}
            for n, each in enumerate(chat_of(turn))
        ]
        results[-1] |= mark
        messages = [
            {"role": ("user", "assistant")[n % 2], "content": [each]} for n, each in enumerate(results)
        ]
        body = dumped(messages, compact=compact, first={"model": "m"}, system=system, tools=[{"name": "f"}])
        if path != "/v1/messages":
            body = dumped([{"role": "system", "content": system}, *messages], compact=compact)

        (prompt,) = prompts_of(seen.read(endpoint, body))
        (whole,) = prompts_of(parse_request(endpoint, body))

        were_seen.append(isinstance(prompt, SeenPrompt))
        assert prompt.data == whole.data
        assert prompt.after(2048 * (prompt.size // 2048)) == whole.data[2048 * (prompt.size // 2048) :]
        assert whole.data.startswith(before)
        before = whole.data
    assert all(were_seen[4:]) is (path == "/v1/messages")


def test_one_beginning_is_rendered_by_the_rules_of_each_endpoint():
    seen = bodies()
    messages = [{"role": "system", "content": "x-anthropic-billing-header: 1;\nBe kind."}, *chat_of(8)]
    for turn in range(4, 9):
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = dumped(messages[:turn])

            (prompt,) = prompts_of(seen.read(ENDPOINTS[path], body))

            assert prompt.data == prompts_of(parse_request(ENDPOINTS[path], body))[0].data
            assert (b"Be kind." in prompt.data) is (path == "/v1/chat/completions")


CONTENTS = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        [
            'x"},{"role":"user"',
            '], "messages": [{"role": "user", "content": "y"},',
            "\\",
            "\ud800",
            [{"type": "text", "text": 'see {"role": 1}'}, {"role": "user", "x": [{"role": 2}]}],
            [{"type": "image_url", "image_url": {"url": "data:" + "A" * 1500}}],
            None,
            {"role": "user"},
        ]
    ),
)
MESSAGES = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]), "content": CONTENTS},
        optional={
            "name": st.text(max_size=5),
            "tool_calls": st.just([{"id": 1}]),
            "x": st.just([{"role": "user", "content": "inner"}, {"role": 3}]),
        },
    ),
    st.fixed_dictionaries({"content": CONTENTS, "role": st.just("user")}),
    st.sampled_from([{}, None, 3, "role", [], {"messages": [{"role": "user"}]}]),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["m", "n", None, 3]),
        "stream": st.booleans(),
        "tools": st.sampled_from([[], [{"type": "function", "role": "x"}]]),
        "cache_salt": st.sampled_from(["s", "t", None]),
        "user": st.just("u"),
        "metadata": st.just({"messages": [{"role": "user"}, {"role": "user"}]}),
        "other": st.just([{"role": "user", "content": "z" * 300}, {"role": "user", "content": "z" * 300}]),
    },
)
NAMES = ["messages", "\\u006dessages", "model", "tools", "x"]
SIGNS = [b",", b"]", b"}", b'"', b"\\", b" ", b"\n"]
EDITS = st.one_of(
    st.tuples(st.just("add"), MESSAGES),
    st.tuples(st.just("cut"), st.integers(0, 30_000)),
    st.tuples(st.just("put"), st.integers(0, 30_000), st.binary(min_size=1, max_size=3)),
    st.tuples(
        st.just("put"),
        st.integers(0, 30_000),
        st.sampled_from(
            [b",", b"]", b"}", b'"', b"\\", b" ", b"\n", b"\xff", b'},{"role":', b'"messages":', b'],"x":['],
        ),
    ),
    st.tuples(
        st.just("behind"), st.sampled_from(["messages", "\\u006dessages", "model", "tools", "x"]), MESSAGES
    ),
    st.tuples(st.just("last"), FIELDS),
)


def edited(chat, first, last, edits, *, compact):
    """Bodies of which most begin like the one before."""
    chat, last = list(chat), dict(last)
    for kind, *with_what in [("as", 0), *edits]:
        if kind == "add":
            chat.append(with_what[0])
        elif kind == "last":
            last = dict(with_what[0])
        body = dumped(chat, compact=compact, first=first, **{k: v for k, v in last.items() if k not in first})
        if kind == "cut":
            body = body[: with_what[0] % len(body)]
        elif kind == "put":
            at = with_what[0] % len(body)
            body = body[:at] + with_what[1] + body[at:]
        elif kind == "behind":
            name, message = with_what
            body = body[:-1] + b',"%b":[%b]}' % (name.encode(), json.dumps(message).encode())
        yield body


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 12),
    st.lists(MESSAGES, max_size=3),
    FIELDS,
    FIELDS,
    st.lists(EDITS, max_size=8),
    st.lists(st.integers(0, 2000), max_size=6),
    st.booleans(),
)
def test_earlier_bodies_do_not_change_the_result(count, odd, first, last, edits, places, compact):
    seen = bodies(cut_bytes=2048)
    for body in edited([*chat_of(count), *odd, *chat_of(3, 50)], first, last, edits, compact=compact):
        expected, _ = read_by(parse_request, body, places)
        for _ in range(3):
            assert read_by(seen.read, body, places)[0] == expected


def test_an_array_behind_the_messages_is_not_taken_for_them():
    other = [{"role": "user", "content": "z" * 400}] * 9
    seen = bodies()
    for turn in range(3, 9):
        body = dumped(chat_of(1), other=other[:turn], model="m")
        for _ in range(3):
            assert read_by(seen.read, body) == (read_by(parse_request, body)[0], False)


def test_messages_that_come_again_are_those_that_count():
    seen = bodies()
    whole = dumped(chat_of(9))
    again = whole[:-1] + b', "\\u006dessages": [{"role": "user", "content": "other"}]}'
    for _ in range(3):
        read_by(seen.read, whole)

    assert read_by(seen.read, whole)[1]
    assert read_by(seen.read, again) == (read_by(parse_request, again)[0], False)


def test_of_one_beginning_with_other_tools_nothing_is_taken():
    seen = bodies()
    for tools in ([], [{"type": "function"}]) * 3:
        body = dumped(chat_of(9), tools=tools)

        assert read_by(seen.read, body)[0] == read_by(parse_request, body)[0]


def test_a_chat_whose_tools_change_is_read_from_its_start():
    seen, were_seen = bodies(), []
    for turn in range(3, 20):
        body = dumped(chat_of(turn), tools=[{"type": "function", "n": turn // 8}])
        read, was_seen = read_by(seen.read, body)
        were_seen.append(was_seen)

        assert read == read_by(parse_request, body)[0]
    assert were_seen[3]
    assert were_seen[-1]


def test_chats_that_part_have_keys_of_their_own():
    seen, estimator, rng = bodies(), TokenEstimator(), random.Random(5)

    def keys(read, messages, places):
        (prompt,) = prompts_of(read(CHAT, dumped(messages)))
        made = estimator.prompt_keys(prompt, SPACE).keys
        return [made[place] for place in places]

    for count in (24, 24, 24, 30, 30, 30, 40, 40, 40, 40):
        for begin in (100, 200, 300):
            chat = [*chat_of(20), *chat_of(count - 20, begin)]
            places = rng.sample(range(0, 510, 6), 30)

            assert keys(seen.read, chat, places) == keys(parse_request, chat, places)


def test_keys_of_models_and_salts_stay_apart():
    seen, estimator = bodies(), TokenEstimator()
    body = dumped(chat_of(9))
    for space in [CacheSpace("m"), CacheSpace("n"), CacheSpace("m", "s")] * 3:
        (prompt,) = prompts_of(seen.read(CHAT, body))

        keys = estimator.prompt_keys(prompt, space).keys
        assert keys == estimator.prompt_keys(Prompt(prompt.data), space).keys


def test_the_cache_is_bounded():
    seen = bodies(max_bytes=30_000, max_blocks=300)
    for number in range(30):
        for turn in range(7, 11):
            seen.read(CHAT, dumped([{"role": "system", "content": str(number)}, *chat_of(turn)]))

            assert seen.kept_bytes <= 30_000
            assert len(seen) <= 300
    assert seen.kept_bytes > 10_000


def test_a_prefix_is_continued_although_its_own_prefix_was_evicted():
    seen, were_seen = bodies(max_blocks=20), []
    for turn in range(3, 25):
        body = dumped(chat_of(turn))
        read, was_seen = read_by(seen.read, body)
        were_seen.append(was_seen)

        assert read == read_by(parse_request, body)[0]
    assert any(were_seen)


def test_a_body_that_is_nested_as_deeply_as_can_be_fails_nowhere():
    seen, turns = bodies(), [chat_of(7), chat_of(8), chat_of(9)]
    for number, messages in enumerate(turns):
        nested = b', "content": ' + b"[" * 600 + b"]" * 600 if number == 2 else b""
        body = dumped(messages)[:-3] + nested + b"}]}"
        for _ in range(2):
            request = seen.read(CHAT, body)
    (prompt,) = prompts_of(request)

    def within(frames, work):
        return within(frames - 1, work) if frames else work()

    free = sys.getrecursionlimit() - len(inspect.stack()) - 300
    assert isinstance(prompt, SeenPrompt)
    assert within(free, lambda: prompt.data)
    within(free, lambda: request.messages)


def test_of_a_small_body_or_one_that_fills_no_cache_nothing_is_remembered():
    seen = bodies(min_bytes=100_000)
    body = dumped(chat_of(9))
    seen.read(CHAT, body)
    bodies_of_counts = bodies()
    bodies_of_counts.read(ENDPOINTS["/tokenize"], body)

    assert len(seen) == len(bodies_of_counts) == 0
