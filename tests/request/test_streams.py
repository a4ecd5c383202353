from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.request.streams import MAX_HELD_BYTES, WholeEvents, is_readable


@pytest.mark.parametrize(
    ("chunks", "written"),
    [
        ([b"data: 1\n\n"], [b"data: 1\n\n"]),
        ([b"data: 1\r\n\r\n"], [b"data: 1\r\n\r\n"]),
        ([b"data: 1\r\r"], [b"data: 1\r\r"]),
        ([b"data: 1\n\ndata", b": 2\n", b"\n"], [b"data: 1\n\n", b"", b"data: 2\n\n"]),
        ([b"data: 1\r\n\r", b"\ndata: 2"], [b"", b"data: 1\r\n\r\n"]),
        ([b": comment\n\n", b"data"], [b": comment\n\n", b""]),
    ],
)
def test_a_client_gets_whole_events(chunks, written):
    events = WholeEvents()

    assert [events.take(chunk) for chunk in chunks] == written
    assert events.held == b"".join(chunks).removeprefix(b"".join(written))
    assert not events.is_inside


def test_an_event_that_is_too_large_is_passed_on_in_parts():
    events, large = WholeEvents(), b"data: " + b"x" * MAX_HELD_BYTES

    assert events.take(large) == large
    assert events.is_inside
    assert events.take(b"more") == b"more"
    assert events.take(b"\n\ndata: 2") == b"\n\n"
    assert (events.held, events.is_inside) == (b"data: 2", False)


@given(st.lists(st.lists(st.sampled_from([b"data: 1", b"\n", b"\r\n", b"\n\n"]), max_size=4).map(b"".join)))
def test_nothing_is_lost_or_changed(chunks):
    events = WholeEvents()

    assert b"".join(map(events.take, chunks)) + events.held == b"".join(chunks)


def test_nothing_is_added_to_a_compressed_stream() -> None:
    assert is_readable(b"content-type: text/event-stream\r\n")
    assert not is_readable(b"content-encoding: gzip\r\ncontent-type: text/event-stream\r\n")
    assert not is_readable(b"content-type: text/event-stream\r\ncontent-encoding: br\r\n")
