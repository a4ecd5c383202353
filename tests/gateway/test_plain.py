import pytest
from msgspec.structs import astuple

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


def test_a_head_that_came_before_is_read_again_with_its_own_length():
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    lines = (b"host: g", b"x-request-id: mine", b"content-length: %d", b"x-a: 1")
    first, *others = (requests.read(head(*lines) % length) for length in (2, 3, 40, 500))

    assert first is not None
    assert requests._heads
    assert [other.body_bytes for other in others if other] == [3, 40, 500]
    for other, length in zip(others, (3, 40, 500), strict=True):
        assert other is not None
        assert astuple(other)[:5] == astuple(first)[:5]
        assert other.request_id == b"mine"
        assert other.body_at == len(head(*lines) % length)


def test_a_head_that_came_before_is_not_plain_with_an_odd_length():
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    for _ in range(3):
        assert requests.read(head(b"x-a: 1", b"content-length: 2"))
    assert requests._heads

    for odd in (b"0", b"02", b"+2", b"2 ", b"", b"1" * 17):
        assert requests.read(head(b"x-a: 1", b"content-length: " + odd)) is None
    assert requests.read(head(b"x-a: 1", b"content-length: 2", b"content-length: 2")) is None


def test_no_number_of_different_heads_fills_the_memory():
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    names = [b"x-%d: 1" % number for number in range(60)]
    for _ in range(2):
        for one in names:
            for other in names:
                requests.read(head(one, other, b"content-length: 2"))

    assert 0 < len(requests._heads) <= 1024


def known(*lines: bytes):
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")
    *_, request = (requests.read(head(*lines)) for _ in range(3))
    assert request is not None
    return request


@pytest.mark.parametrize("name", [b"content-length", b"Content-Length"])
def test_the_same_head_again_is_known_by_its_client(name):
    lines = (b"host: g", b"x-a: 1", name + b": %d", b"x-b: 2")
    request = known(*lines[:2], name + b": 2", b"x-b: 2")

    for length in (3, 40, 10**15):
        data = head(*lines) % length
        assert request.again(data + b"{}")
        assert (request.body_bytes, request.body_at) == (length, len(data))


@pytest.mark.parametrize(
    "other",
    [
        head(b"x-a: 1", b"content-length: 0"),
        head(b"x-a: 1", b"content-length: 02"),
        head(b"x-a: 1", b"content-length: +2"),
        head(b"x-a: 1", b"content-length: 2 "),
        head(b"x-a: 1", b"content-length: "),
        head(b"x-a: 1", b"content-length: " + b"1" * 17),
        head(b"x-a: 1", b"content-length: 2", b"content-length: 2"),
        head(b"x-a: 1", b"content-length: 2")[:-1],
        head(b"x-a: 1", b"content-length: 2")[:-4],
        head(b"x-a: 2", b"content-length: 2"),
        head(b"content-length: 2"),
        b"POST",
    ],
)
def test_another_head_is_read_anew(other):
    request = known(b"x-a: 1", b"content-length: 2")

    assert not request.again(other)
    assert request.body_bytes == 2


def test_a_head_whose_length_is_spelt_otherwise_is_read_anew():
    assert not known(b"CONTENT-LENGTH: 2").again(head(b"CONTENT-LENGTH: 2"))
