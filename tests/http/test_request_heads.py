import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple
from tests.support.memory import growth_bytes

from kvroute.http.request_heads import PlainRequest, PlainRequests
from kvroute.openai.endpoints import ENDPOINTS

REQUESTS = PlainRequests(
    ENDPOINTS.values(), hidden_fields=frozenset({b"authorization"}), added_fields=b"authorization: w\r\n"
)


def head(*lines: bytes, start: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    """With a Host line where `lines` have none."""
    host = () if any(line.lower().startswith(b"host:") for line in lines) else (b"host: g",)
    return b"\r\n".join([start, *host, *lines, b"", b""])


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


@pytest.mark.parametrize(
    "host", [b"", b"host:\r\n", b"host: a b\r\n", b"host: a/b\r\n", b"host: a\r\nHost: a\r\n"]
)
def test_without_one_valid_host_nothing_is_plain(host):
    whole = b"POST /v1/chat/completions HTTP/1.1\r\n%bcontent-length: 2\r\n\r\n{}"

    assert REQUESTS.read(whole % host) is None
    assert REQUESTS.read(whole % b"host: a:80\r\n") is not None


def test_a_host_that_varies_is_valid_in_every_head_of_its_shape():
    requests = fresh()
    for number in range(60):
        request = requests.read(head(b"host: g%d:80" % number, b"content-length: 2"))
    assert request is not None
    assert request.shape is not None

    assert requests.read(head(b"host: g 1", b"content-length: 2")) is None


def bounded(**bounds: int) -> PlainRequests:
    return PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"", **bounds)


def test_a_head_beyond_the_limits_is_not_plain():
    lines = [b"x-%d: 1" % number for number in range(8)]
    whole = head(*lines, b"content-length: 2")

    assert bounded(max_header_lines=10).read(whole) is not None
    assert bounded(max_header_lines=9).read(whole) is None
    assert bounded(max_head_bytes=len(whole)).read(whole) is not None
    assert bounded(max_head_bytes=len(whole) - 1).read(whole) is None


def test_a_head_of_a_known_shape_keeps_to_the_limits_too():
    requests = bounded(max_head_bytes=200)
    for number in range(60):
        request = requests.read(head(b"x-a: %d" % number, b"content-length: 2"))
    assert request is not None
    assert request.shape is not None

    assert requests.read(head(b"x-a: " + b"1" * 200, b"content-length: 2")) is None


def test_an_incomplete_head_is_not_plain():
    assert REQUESTS.read(head(b"content-length: 2")[:-1]) is None


def test_no_number_of_different_lines_fills_the_memory():
    requests = PlainRequests(ENDPOINTS.values(), hidden_fields=frozenset(), added_fields=b"")

    def read(number):
        assert requests.read(head(b"content-length: 2", b"x-%d: 1" % number))

    assert growth_bytes(read, 20_000) < 1_500_000


LINES = (b"host: g", b"x-request-id: %b", b"authorization: Bearer %b", b"Content-Length: %b", b"x-a: 100%%")


def fresh() -> PlainRequests:
    return PlainRequests(
        ENDPOINTS.values(), hidden_fields=frozenset({b"authorization"}), added_fields=b"authorization: 5%\r\n"
    )


def knowing() -> PlainRequests:
    """Heads of which the shape is known."""
    requests = fresh()
    for number in range(40):
        request = requests.read(head(*LINES) % (b"r%d" % number, b"k%d" % number, b"%d" % (number + 1)))
    assert request is not None
    assert request.shape is not None
    return requests


def fields_of(request: PlainRequest | None) -> tuple[object, ...] | None:
    return request and (*astuple(request)[:6], list(request.headers))


KNOWING = knowing()
ANY = st.one_of(
    st.sampled_from(
        [b"", b"1", b"12", b"01", b"a b", b" a", b"a ", b"a\r\nb: c", b"\n", b"\0", b"1" * 17, b"\xe9"]
    ),
    st.binary(max_size=4),
)


@given(ANY, ANY, st.one_of(ANY, st.integers(1, 10**15).map(lambda n: b"%d" % n)), st.integers(0, 12))
def test_a_head_of_a_known_shape_reads_as_any_other(
    one: bytes, other: bytes, length: bytes, cut: int
) -> None:
    whole = head(*LINES) % (one, other, length)
    data = whole[: len(whole) - cut] + (b"" if cut else b"{}")

    assert fields_of(KNOWING.read(data)) == fields_of(fresh().read(data))


def test_a_shape_in_which_only_the_length_varies() -> None:
    lines = (b"host: g", b"x-request-id: mine", b"Authorization: k", b"x-a: 1", b"content-length: %d")
    requests = fresh()
    for length in range(1, 60):
        data = head(*lines) % length
        request = requests.read(data)
        assert fields_of(request) == fields_of(fresh().read(data))

    assert request is not None
    assert request.shape is not None
    assert (request.request_id, request.body_bytes) == (b"mine", 59)


def test_varying_values_cost_no_memory() -> None:
    requests = knowing()

    def read(number):
        request = requests.read(head(*LINES) % (b"new%d" % number, b"key%d" % number, b"%d" % (number + 100)))
        assert request is not None
        assert request.shape is not None
        assert request.request_id == b"new%d" % number

    assert growth_bytes(read, 5_000) < 10_000


def test_a_line_that_starts_to_vary_joins_the_shape() -> None:
    requests = knowing()
    other = head(*LINES[:4], b"x-a: %d")
    for number in range(60):
        data = other % (b"r", b"k", b"2", number)
        request = requests.read(data)
        assert fields_of(request) == fields_of(fresh().read(data))

    assert request is not None
    assert request.shape is not None


def test_the_connection_header_never_counts_as_varying() -> None:
    requests = fresh()
    for number in range(60):
        value = b"Keep-Alive" if number % 2 else b"keep-alive"
        request = requests.read(head(b"connection: " + value, b"content-length: 2"))
        assert request is not None
        assert request.shape is None

    assert requests.read(head(b"connection: close", b"content-length: 2")) is None


def test_a_head_that_is_too_long_has_no_shape() -> None:
    whole = head(*LINES) % (b"r" * 20_000, b"k", b"2")

    assert KNOWING.read(whole) is None


def test_no_number_of_different_heads_fills_the_memory() -> None:
    requests = fresh()

    def read(number):
        requests.read(head(b"x-%d: 1" % number, b"content-length: 2"))

    assert growth_bytes(read, 5_000) < 1_500_000
