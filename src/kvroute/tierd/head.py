"""The head of a request: what of it matters here, or why it cannot be followed."""

from __future__ import annotations

from typing import NamedTuple

import httptools

from kvroute.tierd.request import BadRequest

END_OF_HEAD = b"\r\n\r\n"


class Head(NamedTuple):
    """A request without its body."""

    method: bytes
    target: bytes
    length: int | None
    """Of the body; None when the head does not say it."""
    expects: bool
    """The client waits for `100 Continue` before it sends the body."""
    authorization: bytes
    is_last: bool
    """The connection ends with the answer."""


class _Fields:
    """What httptools calls. Mutable: fills while a head is parsed."""

    def __init__(self) -> None:
        self.target = b""
        self.length: int | None = None
        self.is_chunked = False
        self.expects = False
        self.authorization = b""

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self.length = int(value)
        elif name == b"transfer-encoding":
            self.is_chunked = True
        elif name == b"expect":
            self.expects = value.lower() == b"100-continue"
        elif name == b"authorization":
            self.authorization = value


def parse_head(data: bytes) -> Head:
    """Parse what ends with an empty line. Raises BadRequest when the end of the request is not known then."""
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        raise BadRequest(400, "Upgrade", "there is no other protocol here") from None
    except httptools.HttpParserError as exc:
        raise BadRequest(400, "head", f"this is not an HTTP request: {type(exc).__name__}") from None
    method = parser.get_method()
    if fields.is_chunked:
        raise BadRequest(411, "Content-Length", "a body needs a Content-Length")
    if method == b"PUT" and fields.length is None:
        raise BadRequest(411, "Content-Length", "an object needs a Content-Length")
    return Head(
        method,
        fields.target,
        fields.length,
        fields.expects,
        fields.authorization,
        not parser.should_keep_alive(),
    )
