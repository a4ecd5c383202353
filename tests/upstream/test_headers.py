from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.upstream.headers import HOP_BY_HOP, request_headers, response_headers

_names = st.one_of(
    st.sampled_from(sorted(HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"accept"})),
    st.text("abcxyz-", min_size=1, max_size=6).map(str.encode),
)


@st.composite
def _header(draw: st.DrawFn) -> tuple[bytes, bytes]:
    name = draw(_names)
    name = draw(st.sampled_from([name, name.upper(), name.title()]))
    if name.lower() == b"connection":
        listed = draw(st.lists(_names, max_size=3))
        return name, draw(st.sampled_from([b",", b" , ", b",\t"])).join(listed)
    return name, draw(st.binary(max_size=4))


def _named(raw: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {
        token.strip().lower()
        for name, value in raw
        if name.lower() == b"connection"
        for token in value.split(b",")
    }


@given(st.lists(_header(), max_size=12), st.integers(0, 100))
def test_a_request_keeps_order_case_and_duplicates_of_all_that_is_end_to_end(
    raw: list[tuple[bytes, bytes]], length: int
) -> None:
    own = {b"host", b"content-length", b"expect", b"x-request-id"}
    kept = [h for h in raw if h[0].lower() not in HOP_BY_HOP | own | _named(raw)]

    out = request_headers(raw, host=b"w:1", request_id=b"id", content_length=length)

    assert [h for h in out if h[0].lower() not in own] == kept
    assert out[0] == (b"host", b"w:1")
    assert [value for name, value in out if name.lower() == b"host"] == [b"w:1"]
    assert [value for name, value in out if name.lower() == b"x-request-id"] == [b"id"]
    lengths = [value for name, value in out if name.lower() == b"content-length"]
    assert lengths == [b"%d" % length] or (length == 0 and lengths == [])


@given(st.lists(_header(), max_size=12), st.lists(_header(), max_size=3))
def test_a_response_keeps_all_that_is_end_to_end_then_what_is_added(
    raw: list[tuple[bytes, bytes]], added: list[tuple[bytes, bytes]]
) -> None:
    dropped = HOP_BY_HOP | _named(raw) | {name.lower() for name, _ in added}

    out = response_headers(raw, added)

    assert out == [h for h in raw if h[0].lower() not in dropped] + added


def test_what_connection_names_is_not_forwarded() -> None:
    raw = [
        (b"Connection", b"keep-alive, X-Once"),
        (b"x-once", b"1"),
        (b"CONNECTION", b"x-twice"),
        (b"x-twice", b"2"),
    ]

    assert request_headers(raw, host=b"w", request_id=b"i", content_length=0) == [
        (b"host", b"w"),
        (b"x-request-id", b"i"),
    ]
    assert response_headers(raw) == []


def test_the_request_id_takes_the_place_of_the_clients() -> None:
    raw = [(b"X-Request-ID", b"a"), (b"accept", b"*/*"), (b"x-request-id", b"b")]

    out = request_headers(raw, host=b"w", request_id=b"kept", content_length=0)

    assert out == [(b"host", b"w"), (b"X-Request-ID", b"kept"), (b"accept", b"*/*")]


def test_accept_encoding_is_forwarded_as_sent_and_never_added() -> None:
    with_it = request_headers([(b"accept-encoding", b"br;q=0")], host=b"w", request_id=b"i", content_length=0)
    without = request_headers([(b"accept", b"*/*")], host=b"w", request_id=b"i", content_length=0)

    assert (b"accept-encoding", b"br;q=0") in with_it
    assert b"accept-encoding" not in dict(without)


def test_the_length_is_that_of_the_body_sent() -> None:
    announced = [(b"content-length", b"99")]
    chunked = [(b"transfer-encoding", b"chunked")]

    def length(raw: list[tuple[bytes, bytes]], body_bytes: int) -> bytes | None:
        out = request_headers(raw, host=b"w", request_id=b"i", content_length=body_bytes)
        assert b"transfer-encoding" not in dict(out)
        return dict(out).get(b"content-length")

    assert length(announced, 7) == b"7"
    assert length(chunked, 7) == b"7"
    assert length(chunked, 0) == b"0"
    assert length([], 7) == b"7"
    assert length([], 0) is None


def test_an_added_header_replaces_the_workers() -> None:
    raw = [
        (b"X-Request-Id", b"worker"),
        (b"server", b"uvicorn"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]

    assert response_headers(raw, [(b"x-request-id", b"gateway")]) == [
        (b"server", b"uvicorn"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
        (b"x-request-id", b"gateway"),
    ]
