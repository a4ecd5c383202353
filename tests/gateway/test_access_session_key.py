import pytest

from kvroute.errors import ConfigError
from kvroute.gateway.access import session_key, session_key_sources
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.openai.request import parse_request

SOURCES = session_key_sources(
    ["header:X-Session-ID", "cookie:sid", "body:prompt_cache_key", "body:user", "body:metadata.session_id"]
)


def key(body: bytes = b"{}", headers=()):
    return session_key(SOURCES, parse_request(ENDPOINTS["/v1/chat/completions"], body), list(headers))


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


@pytest.mark.parametrize("declared", ["x-session-id", "header:", "query:x", ""])
def test_an_unknown_place_is_a_configuration_error(declared):
    with pytest.raises(ConfigError, match=r"routing\.session\.keys"):
        session_key_sources([declared])
