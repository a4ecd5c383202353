from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.upstream.headers import HOP_BY_HOP, relayed_fields, response_headers

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
    return name, draw(st.binary(max_size=4).filter(lambda value: not set(value) & set(b"\r\n\0")))


def _named(raw: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {
        token.strip().lower()
        for name, value in raw
        if name.lower() == b"connection"
        for token in value.split(b",")
    }


@given(st.lists(_header(), max_size=12))
def test_a_request_keeps_order_case_and_duplicates_of_all_that_is_end_to_end(
    raw: list[tuple[bytes, bytes]],
) -> None:
    rewritten = {b"host", b"content-length", b"expect", b"x-request-id"}
    kept = [h for h in raw if h[0].lower() not in HOP_BY_HOP | rewritten | _named(raw)]

    fields = relayed_fields(raw, added=b"x-added: 1\r\n")

    assert fields == b"".join(b"%b: %b\r\n" % header for header in kept) + b"x-added: 1\r\n"


@given(st.lists(_header(), max_size=12), st.sets(_names, max_size=3))
def test_a_response_keeps_all_that_is_end_to_end_in_lower_case(
    raw: list[tuple[bytes, bytes]], replaced: set[bytes]
) -> None:
    dropped = HOP_BY_HOP | replaced

    out = response_headers(raw, dropped)

    assert out == [(h[0].lower(), h[1]) for h in raw if h[0].lower() not in dropped | _named(raw)]


def test_headers_that_connection_names_are_not_forwarded() -> None:
    raw = [
        (b"Connection", b"keep-alive, X-Once"),
        (b"x-once", b"1"),
        (b"CONNECTION", b"x-twice"),
        (b"x-twice", b"2"),
    ]

    assert relayed_fields(raw) == b""
    assert response_headers(raw) == []


def test_hidden_headers_are_not_forwarded() -> None:
    raw = [(b"Authorization", b"Bearer key"), (b"accept", b"*/*")]

    assert relayed_fields(raw, without=frozenset({b"authorization"})) == b"accept: */*\r\n"


def test_accept_encoding_is_forwarded_as_sent_and_never_added() -> None:
    assert relayed_fields([(b"accept-encoding", b"br;q=0")]) == b"accept-encoding: br;q=0\r\n"
    assert b"accept-encoding" not in relayed_fields([(b"accept", b"*/*")])


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nb", b"a\rb", b"a\0b"])
def test_a_header_that_would_be_two_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="line break or NUL"):
        relayed_fields([(b"x-a", value)])
