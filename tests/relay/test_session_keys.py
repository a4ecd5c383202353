import json

import pytest

from kvroute.errors import ConfigError
from kvroute.openai.bounded import BodyLimits, Bounded
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.prefix_cache import large_request
from kvroute.openai.request import InferenceRequest, parse_request
from kvroute.relay.session_keys import SessionId, SessionKeys
from kvroute.routing.strategies.session import SessionOptions

SOURCES = SessionKeys(
    ["header:X-Session-ID", "cookie:sid", "body:prompt_cache_key", "body:user", "body:metadata.session_id"]
)
DEFAULT = SessionKeys(SessionOptions().keys)
UUID = "5f0c66a2-8b1d-4a51-9d9e-6a64ad3f5d10"


def key(body: bytes = b"{}", headers=(), sources=SOURCES, path="/v1/chat/completions"):
    found = sources.read(parse_request(ENDPOINTS[path], body), list(headers))
    return None if found is None else found.key


def default(headers=(), path="/v1/chat/completions", **body):
    return key(json.dumps(body).encode(), headers, DEFAULT, path)


def test_the_first_place_that_has_a_key_wins():
    body = b'{"user": "u", "prompt_cache_key": "p"}'

    assert key(body, [(b"cookie", b"a=1; sid=c"), (b"x-session-id", b"h")]) == "h"
    assert key(body, [(b"cookie", b"a=1; sid=c")]) == "c"
    assert key(body) == "p"
    assert key(b'{"user": "u"}') == "u"
    assert key(b'{"metadata": {"session_id": "m"}}') == "m"


@pytest.mark.parametrize("body", [b"{}", b'{"user": 3}', b'{"user": ""}', b'{"metadata": "x"}'])
def test_a_request_without_a_usable_key_has_none(body):
    assert key(body, [(b"cookie", b"other=1"), (b"x-session-id", b"")]) is None


def test_a_broken_cookie_is_no_key():
    assert key(headers=[(b"cookie", b"\xff=;=;sid")]) is None


@pytest.mark.parametrize("declared", ["x-session-id", "header:", "query:x", "", "embedded:"])
def test_an_unknown_place_is_a_configuration_error(declared):
    with pytest.raises(ConfigError, match=r"routing\.session\.keys"):
        SessionKeys([declared])


@pytest.mark.parametrize(
    "name",
    [
        *(b"x-claude-code-session-id", b"session-id", b"session_id", b"x-session-affinity"),
        *(b"x-opencode-session", b"x-dynamo-session-id", b"x-smg-routing-key", b"x-session-token"),
        b"x-session-id",
    ],
)
def test_by_default_each_clients_own_header_names_the_session(name):
    assert default([(b"accept", b"*/*"), (name, b"s1"), (b"user-agent", b"x")], user="u") == "s1"


def test_of_several_headers_the_first_declared_one_names_the_session_in_any_order():
    headers = [
        (b"x-session-token", b"token"),
        (b"x-claude-code-session-id", b"claude"),
        (b"session-id", b"id"),
    ]

    assert default(headers) == default(headers[::-1]) == "claude"
    assert default([(b"x-claude-code-session-id", b""), *headers[:1]]) == "token"


@pytest.mark.parametrize(
    ("user_id", "found"),
    [
        (json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID}), UUID),
        (f"user_{'ab' * 32}_account__session_{UUID}", UUID),
        (f"user_{'ab' * 32}_account_{UUID}_session_{UUID[::-1]}", UUID[::-1]),
        ("some-person", None),
        ('{"device_id": "d"}', None),
        ('{"session_id": 3}', None),
        ("{broken", None),
        ("user_a_account__session_", None),
        ("", None),
    ],
)
def test_the_session_within_claude_codes_user_id_is_the_key_and_a_person_is_none(user_id, found):
    assert default(path="/v1/messages", metadata={"user_id": user_id}) == found


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_is_a_session_by_its_id(conversation):
    body = {"conversation": conversation, "previous_response_id": "resp_1", "user": "person"}

    assert default(path="/v1/responses", **body) == "conv_1"


def test_what_names_a_session_comes_before_the_response_before_and_before_the_person():
    body = {"user": "person", "previous_response_id": "resp_1", "prompt_cache_key": "p"}

    assert default(path="/v1/responses", **body) == "p"
    assert default(path="/v1/responses", user="person", previous_response_id="resp_1") == "resp_1"
    assert default(path="/v1/responses", user="person") == "person"


@pytest.mark.parametrize(
    "body",
    [
        {"conversation": {"id": 3}, "metadata": [], "user": None},
        {"conversation": {"no": "id"}, "metadata": {"user_id": {"session_id": "x"}}},
        {"prompt_cache_key": "k" * 5_000, "user": "u" * 5_000},
    ],
)
def test_an_id_that_cannot_be_read_is_absent(body):
    assert default([(b"x-session-id", b"h" * 5_000)], **body) is None


def test_a_body_that_was_not_read_has_the_session_of_its_headers_or_none():
    unread = InferenceRequest(ENDPOINTS["/v1/chat/completions"], b"{}", None, over="max_messages")

    assert DEFAULT.read(unread, []) is None
    assert DEFAULT.read(unread, [(b"session-id", b"s")]) == SessionId("s")


def test_a_large_body_has_the_same_session():
    body = {"messages": [{"role": "user", "content": "x" * 2_000_000}], "metadata": {"user_id": "_session_s"}}
    steps = large_request(
        ENDPOINTS["/v1/messages"],
        json.dumps(body).encode(),
        "",
        Bounded(BodyLimits(), also=DEFAULT.fields),
    )
    while True:
        try:
            next(steps)
        except StopIteration as end:
            request = end.value
            break

    assert DEFAULT.read(request, []) == SessionId("s")


def test_the_session_that_began_this_one_is_kept_with_it():
    parent = (b"x-dynamo-parent-session-id", b"main")
    request = parse_request(ENDPOINTS["/v1/chat/completions"], b"{}")

    assert DEFAULT.read(request, [(b"x-dynamo-session-id", b"sub"), parent]) == SessionId("sub", "main")
    assert DEFAULT.read(request, [parent]) is None


def test_declared_sources_replace_the_defaults():
    own = SessionKeys(["header:X-Chat", "body:thread.id", "embedded:who"])

    assert own.fields == ("thread", "who")
    assert key(b'{"thread": {"id": "t"}, "user": "u"}', [(b"x-session-id", b"h")], own) == "t"
    assert key(b'{"who": "a_session_b", "user": "u"}', [(b"x-session-id", b"h")], own) == "b"
    assert key(b'{"user": "u"}', [(b"x-session-id", b"h")], own) is None
