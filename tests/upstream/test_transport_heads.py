from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import growth_bytes

from kvroute.upstream.transport import RelayedHeads, encode_head


def test_given_headers_go_out_as_they_are() -> None:
    headers = [(b"host", b"h"), (b"X-A", b"1"), (b"x-a", b"2"), (b"Content-Length", b"3"), (b"empty", b"")]

    assert encode_head(b"POST", b"/v1?x=%20", headers, host=b"w", body_bytes=3) == (
        b"POST /v1?x=%20 HTTP/1.1\r\nhost: h\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 3\r\nempty: \r\n\r\n"
    )


def test_host_and_length_are_added_when_absent() -> None:
    assert encode_head(b"POST", b"/", [(b"a", b"b")], host=b"w:1", body_bytes=2) == (
        b"POST / HTTP/1.1\r\nHost: w:1\r\na: b\r\nContent-Length: 2\r\n\r\n"
    )
    assert encode_head(b"POST", b"/", [], host=b"w", body_bytes=0).endswith(b"Content-Length: 0\r\n\r\n")


def test_a_get_without_body_has_no_length() -> None:
    assert encode_head(b"GET", b"/", [], host=b"w", body_bytes=0) == b"GET / HTTP/1.1\r\nHost: w\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        (b"", b"/", []),
        (b"GE T", b"/", []),
        (b"GET\r\n", b"/", []),
        (b"GET", b"", []),
        (b"GET", b"/a HTTP/1.1\r\nx: y", []),
        (b"GET", b"/a b", []),
        (b"GET", b"/\x00", []),
        (b"GET", b"/\x7f", []),
        (b"GET", b"/", [(b"a", b"b\r\nc: d")]),
        (b"GET", b"/", [(b"a", b"b\nc: d")]),
        (b"GET", b"/", [(b"a", b"b\rc: d")]),
        (b"GET", b"/", [(b"a\r\nb", b"c")]),
        (b"GET", b"/", [(b"a", b"\x00")]),
        (b"GET", b"/", [(b"content-length", b"1")]),
        (b"GET", b"/", [(b"content-length", b"+0")]),
        (b"GET", b"/", [(b"content-length", b"0"), (b"Content-Length", b"0")]),
        (b"GET", b"/", [(b"host", b"a"), (b"Host", b"a")]),
        (b"GET", b"/", [(b"Transfer-Encoding", b"chunked")]),
    ],
)
def test_values_that_could_form_two_requests_are_refused(
    method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(ValueError):
        encode_head(method, target, headers, host=b"w", body_bytes=0)


@given(
    st.lists(
        st.tuples(st.from_regex(rb"[a-z][a-z0-9-]{0,8}", fullmatch=True), st.binary(max_size=12)), max_size=6
    ),
    st.binary(max_size=20),
)
def test_the_sent_bytes_parse_as_exactly_one_request(headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    """Each value is either refused, or a server sees one request with this body."""
    try:
        head = encode_head(b"POST", b"/t", headers, host=b"w", body_bytes=len(body))
    except ValueError:
        return
    seen: list[object] = []

    class Server:
        def on_body(self, data: bytes) -> None:
            seen.append(data)

        def on_message_complete(self) -> None:
            seen.append(None)

    try:
        httptools.HttpRequestParser(Server()).feed_data(head + body)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        assert None not in seen
        return

    assert seen == ([body] if body else []) + [None]


def test_a_relayed_head_has_a_host_an_id_and_a_length() -> None:
    heads = RelayedHeads(b"w:1")

    for _ in range(2):  # the second one is from memory
        assert heads.encode(b"POST", b"/v1/x?y", b"a: */*\r\n", b"id", 7) == (
            b"POST /v1/x?y HTTP/1.1\r\nhost: w:1\r\na: */*\r\nx-request-id: id\r\ncontent-length: 7\r\n\r\n"
        )
    assert heads.encode(b"GET", b"/v1/x?y", b"", b"id", 0) == (
        b"GET /v1/x?y HTTP/1.1\r\nhost: w:1\r\nx-request-id: id\r\n\r\n"
    )
    assert heads.encode(b"POST", b"/x", b"", b"id", 0).endswith(b"content-length: 0\r\n\r\n")


@pytest.mark.parametrize(("method", "target"), [(b"PO ST", b"/x"), (b"POST", b"/x y"), (b"POST", b"/\r\n")])
def test_a_relayed_head_is_one_request_line(method: bytes, target: bytes) -> None:
    heads = RelayedHeads(b"w")

    for _ in range(2):
        with pytest.raises(ValueError, match="request line"):
            heads.encode(method, target, b"", b"id", 0)


def test_no_number_of_targets_fills_the_memory() -> None:
    heads = RelayedHeads(b"w")

    def encode(number: int) -> None:
        heads.encode(b"POST", b"/v1/responses/%d/cancel" % number, b"", b"id", 0)

    assert growth_bytes(encode, 1000) < 10_000
