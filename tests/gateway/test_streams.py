"""What may be added to an event stream, and where."""

import pytest

from kvroute.gateway.streams import ends_an_event, is_readable


@pytest.mark.parametrize(
    ("before_last", "last", "expected"),
    [
        (b"", b"", True),
        (b"", b"data: {}\n\n", True),
        (b"", b"data: {}\r\n\r\n", True),
        (b"", b"data: {}\r\r", True),
        (b"data: {}\n", b"\n", True),
        (b"data: {}\r\n\r", b"\n", True),
        (b"", b"data: {}\n", False),
        (b"", b"data: {}\r\n", False),
        (b"data: {}\n\n", b"data: {", False),
    ],
)
def test_a_comment_may_come_between_events_only(before_last: bytes, last: bytes, expected: bool) -> None:
    assert ends_an_event(before_last, last) is expected


def test_nothing_is_added_to_a_compressed_stream() -> None:
    assert is_readable(b"content-type: text/event-stream\r\n")
    assert not is_readable(b"content-encoding: gzip\r\ncontent-type: text/event-stream\r\n")
    assert not is_readable(b"content-type: text/event-stream\r\ncontent-encoding: br\r\n")
