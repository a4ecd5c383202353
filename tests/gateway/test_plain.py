import pytest

from kvroute.gateway.plain import PlainRequests
from kvroute.openai.endpoints import ENDPOINTS

REQUESTS = PlainRequests(
    ENDPOINTS.values(), hidden_fields=frozenset({b"authorization"}), added_fields=b"authorization: w\r\n"
)


def head(*lines: bytes, start: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([start, *lines, b"", b""])


def test_a_plain_request_is_read_with_what_workers_get():
    lines = (
        b"Host: g",
        b"X-A:  1",
        b"Authorization: Bearer k",
        b"Content-Length: 2",
        b"Connection: keep-alive",
    )

    request = REQUESTS.read(head(*lines) + b"{}")

    assert request is not None
    assert (request.endpoint.path, request.target) == ("/v1/chat/completions", b"/v1/chat/completions")
    assert dict(request.headers)[b"x-a"] == b"1"
    assert request.fields == b"x-a: 1\r\nauthorization: w\r\n"
    assert (head(*lines) + b"{}")[request.body_at :] == b"{}"
    assert request.body_bytes == 2


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (b"content-length: 0",),
        (b"content-length: 2", b"content-length: 2"),
        (b"content-length: +2",),
        (b"content-length: 12345678901234567",),
        (b"content-length: 2 ",),
        (b"content-length: 2", b"x : 1"),
        (b"content-length: 2", b" x: 1"),
        (b"content-length: 2", b"x: 1", b" folded"),
        (b"content-length: 2", b"x: 1\n"),
        (b"content-length: 2", b"x: 1\x00"),
        (b"content-length: 2", b"x:"),
        (b"content-length: 2", b"x"),
        (b"content-length: 2", b"expect: 100-continue"),
        (b"content-length: 2", b"transfer-encoding: chunked"),
        (b"content-length: 2", b"connection: close"),
        (b"content-length: 2", b"upgrade: h2c"),
        (b"content-length: 2", b"x: " + b"y" * 20_000),
    ],
)
def test_anything_unusual_is_not_plain(lines):
    assert REQUESTS.read(head(*lines) + b"{}") is None


@pytest.mark.parametrize(
    "start",
    [
        b"GET /v1/chat/completions HTTP/1.1",
        b"POST /v1/chat/completions?x HTTP/1.1",
        b"POST /v1/chat/completions HTTP/1.0",
        b"POST /v1/responses HTTP/1.1",
        b"POST /v1/audio/translations HTTP/1.1",
    ],
)
def test_only_posts_of_json_endpoints_are_plain(start):
    assert REQUESTS.read(head(b"content-length: 2", start=start) + b"{}") is None


def test_an_incomplete_head_is_not_plain():
    assert REQUESTS.read(head(b"content-length: 2")[:-1]) is None


def test_no_number_of_different_lines_fills_the_memory():
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    for number in range(10_000):
        assert requests.read(head(b"content-length: 2", b"x-trace: %d" % number))

    assert len(requests._known) <= 4096
