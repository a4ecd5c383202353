import json
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw
from tests.support.memory import peak_bytes

from kvroute.errors import InvalidRequest, OverLimit
from kvroute.openai import bounded as module
from kvroute.openai.bounded import STEPWISE_BYTES, BodyLimits, Bounded
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.prefix_cache import SeenBodies, large_request
from kvroute.openai.request import parse_request, prompts_of

CHAT, COMPLETIONS = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]
EMBEDDINGS, RESPONSES = ENDPOINTS["/v1/embeddings"], ENDPOINTS["/v1/responses"]
FEW = BodyLimits(10, 10, 10, 1000, 100_000, 10)


def exhausted(steps):
    """The result of some steps, and how many turns others had."""
    turns = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, turns
        turns += 1


def large(body, endpoint=COMPLETIONS, limits=None, bodies=None):
    return exhausted(large_request(endpoint, body, "application/json", Bounded(limits), bodies))[0]


def over(read):
    with pytest.raises(OverLimit) as raised:
        read()
    assert raised.value.status == 413
    return raised.value.limit


def members_of(value):
    if isinstance(value, list):
        return sum(map(members_of, value))
    if isinstance(value, dict):
        return sum(1 + members_of(each) for each in value.values())
    return 0


def values_of(value):
    """Values beside the outermost one, with the names of objects, which are strings too."""
    if isinstance(value, list):
        return sum(1 + values_of(each) for each in value)
    if isinstance(value, dict):
        return sum(2 + values_of(each) for each in value.values())
    return 0


leaves = st.none() | st.integers() | st.text(alphabet='a",[{\\]}é\n') | st.floats(allow_nan=False)
trees = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\'), inner))


def left_of(body, limits, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCANNED_BYTES", window)
        # Private: the public count first rules out small bodies, which are those that hypothesis makes.
        left, _ = exhausted(Bounded(limits)._left_outside_strings(body, may_have_members=True))
    return left


def is_over(body, most, window):
    return left_of(body, BodyLimits(max_json_values=most), window)[0] < 0


@given(trees, st.booleans(), st.integers(3, 40))
@example(["\\" * 9 + '"' * 3, '"'], True, 5)
@settings(max_examples=100, deadline=None)
def test_values_are_counted_outside_of_strings_as_json_loads_would(tree, ascii_only, window):
    """A value has between one and three of what is counted: strings, commas and brackets."""
    body, true = json.dumps(tree, ensure_ascii=ascii_only).encode(), values_of(tree)

    assert not is_over(body, 3 * true + 3, window)
    assert true < 9 or is_over(body, true // 3 - 3, window)


@given(trees, st.booleans(), st.integers(3, 40))
@settings(max_examples=100, deadline=None)
def test_members_are_counted_as_json_loads_would(tree, ascii_only, window):
    body, true = json.dumps(tree, ensure_ascii=ascii_only, indent=1).encode(), members_of(tree)

    assert left_of(body, BodyLimits(max_json_members=true + 7), window)[1] == 7


MANY = BodyLimits()._replace(max_json_members=1000)
PAD = b'"pad":"%b"' % (b"x" * 2_200_000)


@pytest.mark.parametrize(
    ("endpoint", "around", "member"),
    [
        (COMPLETIONS, (b"", b""), b'"prompt":"a"'),
        (COMPLETIONS, (b"", b""), b'"echo" :1'),
        (COMPLETIONS, (b"", b""), b'"model":"m"'),
        (COMPLETIONS, (b"", b""), b'"\\u0070rompt":"a"'),
        (COMPLETIONS, (b"", b""), b'"unknown":1'),
        (CHAT, (b'"messages":[{', b"}]"), b'"role":"user"'),
        (CHAT, (b'"messages":[{"content":[{', b"}]}]"), b'"text":""'),
        (CHAT, (b'"messages":[],"metadata":{', b"}"), b'"session_id":1'),
        (CHAT, (b'"messages":[],"tools":[{"a":{', b"}}]"), b'"b":"c"'),
        (RESPONSES, (b'"input":[{', b"}]"), b'"type":1'),
        (RESPONSES, (b'"input":"hi","metadata":[', b"]"), b'{"a":1}'),
    ],
)
def test_a_body_of_too_many_members_is_never_decoded(monkeypatch, endpoint, around, member):
    bounded = Bounded(MANY)
    start, end = around

    def body(count):
        return b"{%b,%b%b%b}" % (PAD, start, b",".join([member] * count), end)

    assert exhausted(large_request(endpoint, body(900), "", bounded))[0].is_read
    for name in ("fields", "messages", "parts", "prompts"):
        monkeypatch.setattr(bounded, name, None)
    assert over(lambda: exhausted(large_request(endpoint, body(1001), "", bounded))) == "max_json_members"


def test_colons_within_a_text_are_no_members():
    text = b'"%b"' % (b'{\\"a\\":1},' * 200_000)

    assert len(prompts_of(large(b'{"prompt":%b}' % text, limits=MANY))) == 1


def test_with_too_many_values_and_members_the_members_are_named():
    """Such a body must not be read for its model either."""
    limits = MANY._replace(max_json_values=2000)
    body = b'{%b,"a":[%b],%b}' % (PAD, b",".join([b"1"] * 5000), b",".join([b'"model":"m"'] * 1001))

    assert over(lambda: large(body, limits=limits)) == "max_json_members"
    assert over(lambda: large(body, limits=limits._replace(max_json_members=2000))) == "max_json_values"


def test_commas_within_a_text_are_no_values():
    text = b'"' + b'a,[{\\",' * 20_000 + b'"'
    body = b'{"prompt":' + text + b"}"

    assert not is_over(body, 10, 100)
    assert len(prompts_of(large(body, limits=FEW))) == 1


def test_a_body_of_too_many_values_is_not_decoded(monkeypatch):
    counting = Bounded(FEW)
    monkeypatch.setattr(counting, "fields", None)  # the body is not decoded
    body = b'{"prompt":[' + b"[1]," * 2_000_000 + b"[1]]}"

    assert over(lambda: exhausted(large_request(COMPLETIONS, body, "", counting))) == "max_json_values"


@pytest.mark.parametrize("item", [b"[1]", b'"a"', b"{}", b'[1],"a"'])
def test_no_more_prompts_are_made_than_the_limit(item):
    body = b'{"prompt":[' + b",".join([item] * 300_000) + b"]}"

    assert over(lambda: large(body, limits=FEW._replace(max_json_values=10**7))) == "max_prompts"
    assert over(lambda: prompts_of(parsed(body, COMPLETIONS))) == "max_prompts"


def parsed(body, endpoint):
    bounded = Bounded(FEW)
    request = parse_request(endpoint, body, bounded=bounded)
    request.bounded = bounded
    return request


def test_decoding_ends_at_the_first_message_too_many():
    bounded, many = Bounded(FEW), b"[" + b"{}," * 100_000 + b"{}]"

    assert peak_bytes(lambda: over(lambda: bounded.messages(many))) < 100_000
    assert over(lambda: bounded.messages(many)) == "max_messages"
    assert len(bounded.messages(b"[" + b"{}," * 9 + b"{}]")) == 10


def test_a_decoding_that_failed_does_not_count_for_the_next():
    bounded = Bounded(FEW)
    for _ in range(5):
        assert len(bounded.messages(b"[" + b"{}," * 8 + b"{}]")) == 9


@pytest.mark.parametrize(
    ("fields", "endpoint", "limit"),
    [
        (b'"messages":[%b]' % b",".join([b"{}"] * 30_000), CHAT, "max_messages"),
        (b'"input":[%b]' % b",".join([b"{}"] * 30_000), RESPONSES, "max_messages"),
        (b'"input":[%b]' % b",".join([b'"a"'] * 30_000), EMBEDDINGS, "max_prompts"),
        (b'"messages":[{"content":[%b]}]' % b",".join([b"{}"] * 30_000), CHAT, "max_content_parts"),
        (b'"messages":[{"content":[%b]}]' % b",".join([b"1"] * 60_000), CHAT, "max_content_parts"),
        (b'"messages":[%b]' % b",".join([b'{"content":[{},{},{}]}'] * 9), CHAT, "max_content_parts"),
        (b'"prompt":[%b]' % b",".join([b"7"] * 60_000), COMPLETIONS, "max_token_ids"),
        (b'"prompt":[[%b]]' % b",".join([b"7"] * 60_000), COMPLETIONS, "max_token_ids"),
    ],
)
@pytest.mark.parametrize("size", [0, STEPWISE_BYTES])
def test_each_limit_counts_at_any_size(fields, endpoint, limit, size):
    body = b'{"padding":"%b",%b}' % (b"a" * size, fields)
    assert over(lambda: large(body, endpoint, FEW)) == limit
    if not size:
        assert over(lambda: prompts_of(parsed(body, endpoint))) == limit


def test_chats_that_come_again_stay_below_the_limit():
    bounded = Bounded(FEW)
    bodies = SeenBodies(seed=1, cut_bytes=64, bounded=bounded, min_bytes=64, block_bytes=64)

    def chat(count):
        return json.dumps(
            {"messages": [{"role": "user", "content": f"{n} " * 30} for n in range(count)]}
        ).encode()

    for count in (6, 7, 8, 9, 10):
        bodies.read(CHAT, chat(count))
    assert bodies.read(CHAT, chat(10)).seen is not None
    assert over(lambda: bodies.read(CHAT, chat(11))) == "max_messages"


tokens = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(
    st.one_of(tokens, st.lists(tokens, max_size=9), st.lists(st.text(), max_size=9), st.text()), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_large_prompts_are_read_as_small_ones(prompt, ascii_only):
    body = json.dumps({"model": "m", "prompt": prompt}, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_BYTES", 8)
        patch.setattr("kvroute.openai.prompt.SMALL_BYTES", 0)
        request = large(body, limits=FEW)

    assert request.prompts == prompts_of(parse_request(COMPLETIONS, body))
    assert request.model == "m"


def test_a_large_chat_is_read_as_a_small_one():
    messages = [
        {"role": "user", "content": "a, b" * 100_000},
        {"role": "user", "content": [{"type": "text", "text": "é,[{" * 100_000}, {"image": "x" * 400_000}]},
    ]
    body = json.dumps({"model": "m", "stream": True, "tools": [{}], "messages": messages, "cache_salt": "s"})
    request, plain = large(body.encode(), CHAT), parse_request(CHAT, body.encode())

    assert (request.model, request.stream) == ("m", True)
    assert prompts_of(request) == prompts_of(plain)
    assert bytes(request.cache_salt) == b'"s"'
    assert len(body) > STEPWISE_BYTES


@pytest.mark.parametrize(
    ("start", "limit"),
    [(b'{"a":NaN,', "plain_json"), (b'{"a":[-Infinity],', "plain_json"), (b'{"a":' + b"[" * 5000, "nesting")],
)
def test_a_field_that_is_not_read_at_this_size_is_named(start, limit):
    body = start + b'"b":"' + b"a" * STEPWISE_BYTES + b'"}'

    assert over(lambda: large(body)) == limit


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_other_encodings_are_not_read_at_this_size(encoding):
    body = json.dumps({"model": "m", "prompt": "a" * STEPWISE_BYTES}).encode(encoding)

    assert over(lambda: large(body)) == "plain_json"


@pytest.mark.parametrize("body", [b"x", b"{", b'{"a":1]', b"[1]", b'"a"', b'{"model":3}'])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(InvalidRequest):
        large(body + b" " * STEPWISE_BYTES)


@pytest.mark.parametrize("size", [10, 200_000, 2_000_000])
@pytest.mark.parametrize("name", ["model", "stream", "messages", "cache_salt", "prompt", "user"])
def test_of_equal_fields_the_last_wins(size, name):
    """As in Python's json, with which vLLM reads bodies."""
    pairs = {
        "model": ("a", "b"),
        "stream": (True, False),
        "messages": ([{"role": "user", "content": "a" * size}], [{"role": "user", "content": "b" * size}]),
        "cache_salt": ("a", "b"),
        "prompt": ("a" * size, "b" * size),
        "user": ("a", "b"),
    }
    first, last = pairs[name]
    padding = json.dumps("x" * size)
    body = f'{{"pad":{padding},"{name}":{json.dumps(first)},"{name}":{json.dumps(last)}}}'.encode()
    assert json.loads(body)[name] == last
    endpoint = CHAT if name == "messages" else COMPLETIONS
    expected = parse_request(endpoint, json.dumps({"pad": "x" * size, name: last}).encode())
    bounded = Bounded(also=["user"])
    if len(body) > STEPWISE_BYTES:
        request, _ = exhausted(large_request(endpoint, body, "", bounded))
    else:
        request = parse_request(endpoint, body, bounded=bounded)

    assert (request.model, request.stream) == (expected.model, expected.stream)
    assert (request.cache_salt and bytes(request.cache_salt)) == (
        expected.cache_salt and bytes(expected.cache_salt)
    )
    assert prompts_of(request) == prompts_of(expected)
    if name in ("user", "model"):
        assert request.text(name) == last


def test_a_session_key_is_found_among_millions_of_fields_without_decoding_them():
    metadata = b'{"session_id":"s",%b}' % b",".join([b'"k%d":{}' % n for n in range(30_000)])
    body = b'{"metadata":%b,"user":"%b"}' % (metadata, b"u" * 5000)
    request = parse_request(CHAT, body)

    assert request.text("metadata.session_id") == "s"
    assert request.text("metadata.session_id.x") is None
    with pytest.raises(InvalidRequest, match="user"):
        request.text("user")


def test_token_ids_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(module, "_PIECE_BYTES", 100)
    ids = array("I")
    data = json.dumps(list(range(1000))).encode()

    _, turns = exhausted(Bounded(BodyLimits(max_token_ids=1000)).token_ids(data, ids, "prompt"))

    assert ids.tolist() == list(range(1000))
    assert turns > 30


def test_the_parts_of_one_message_are_counted_without_their_texts():
    bounded = Bounded(FEW)
    bounded.parts(Raw(b'[{"type":"text","text":"' + b"a,b," * 1000 + b'"}]'), 1)

    assert over(lambda: bounded.parts(Raw(b"[{},{}]"), 1)) == "max_content_parts"
