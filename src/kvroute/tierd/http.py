"""Parses requests to the daemon and builds its answers, without I/O."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

import httptools

from kvroute.tierd.pool import EntryLease, ObjectName
from kvroute.tierd.store import LONGEST_WAIT_S, Position, Refusal

MAX_NAME_BYTES = 4096
DEFAULT_TTL_S = 30.0


class BadRequest(Exception):
    """A request that is answered with the error `status`; `param` names its wrong part."""

    def __init__(self, status: int, param: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Put(NamedTuple):
    """Store an object. The request's body has its bytes."""

    name: ObjectName


class Get(NamedTuple):
    """Send an object's bytes to a peer."""

    name: ObjectName


class GetChanges(NamedTuple):
    """Send the names that came or went in a bucket after a position. Wait up to `wait_s` for the first."""

    bucket: bytes
    after: Position
    wait_s: float


class Acquire(NamedTuple):
    """Lease an object for `ttl_s` seconds. Wait up to `wait_s` seconds until the object is there."""

    name: ObjectName
    ttl_s: float
    wait_s: float


class Release(NamedTuple):
    """End a lease."""

    lease_id: str


class StatusPage(NamedTuple):
    """Send the page `health` or `metrics`."""

    name: str


Call = Put | Get | GetChanges | Acquire | Release | StatusPage


def parse_call(method: bytes, target: bytes, longest_lease_s: float) -> Call:
    """Parse a request's method and target. Raises BadRequest. Takes microseconds: every request calls it."""
    path, _, query = target.partition(b"?")
    parts = path.split(b"/")
    match parts:
        case [b"", b"v1", b"kv", bucket, key]:
            name = _object_name(bucket, key)
            if method == b"PUT":
                return Put(name)
            _require(method, b"GET", b"HEAD", b"PUT")
            return Get(name)
        case [b"", b"v1", b"kv", bucket, key, b"leases"]:
            _require(method, b"POST")
            name = _object_name(bucket, key)
            values = _query(query)
            ttl_s = _number(values, "ttl_s", DEFAULT_TTL_S)
            if not 0 < ttl_s <= longest_lease_s:
                text = f"ttl_s must be above 0 and at most {longest_lease_s:g} seconds"
                raise BadRequest(400, "ttl_s", text)
            wait_ms = _number(values, "timeout_ms", 0.0)
            if wait_ms < 0:
                raise BadRequest(400, "timeout_ms", "timeout_ms must not be negative")
            return Acquire(name, ttl_s, min(wait_ms / 1000, longest_lease_s))
        case [b"", b"v1", b"leases", lease_id, b"release"]:
            _require(method, b"POST")
            return Release(_lease_id(lease_id))
        case [b"", b"v1", b"kv", _, _, b"leases", lease_id]:
            # LMCache 0.3.9, which HyperPod's images with vLLM 0.11.1 have, ends leases with this call.
            _require(method, b"DELETE")
            return Release(_lease_id(lease_id))
        case [b"", b"v1", b"changes", bucket]:
            _require(method, b"GET")
            values = _query(query)
            number = _number(values, "after", 0.0)
            wait_ms = _number(values, "timeout_ms", 0.0)
            for param, value in (("after", number), ("timeout_ms", wait_ms)):
                if value < 0:
                    raise BadRequest(400, param, f"{param} must not be negative")
            after = Position(values.get("incarnation", ""), int(number))
            return GetChanges(_name(bucket, "bucket"), after, min(wait_ms / 1000, LONGEST_WAIT_S))
        case [b"", (b"health" | b"metrics") as page]:
            _require(method, b"GET", b"HEAD")
            return StatusPage(page.decode())
    shown = path[:200].decode("ascii", "replace")
    raise BadRequest(404, "path", f"unknown path {shown}")


def error_body(param: str, message: str) -> bytes:
    """The body of an error: `{"error": {"message", "param"}}`."""
    return json.dumps({"error": {"message": message, "param": param}}).encode()


def _require(method: bytes, *allowed: bytes) -> None:
    if method not in allowed:
        names = ", ".join(allowed_method.decode() for allowed_method in allowed)
        raise BadRequest(405, "method", f"this path allows {names}")


def _object_name(bucket: bytes, key: bytes) -> ObjectName:
    return ObjectName(_name(bucket, "bucket"), _name(key, "key"))


def _name(quoted: bytes, what: str) -> bytes:
    name = unquote_to_bytes(quoted) if b"%" in quoted else quoted
    if not name:
        raise BadRequest(400, what, f"the {what} is empty")
    if len(name) > MAX_NAME_BYTES or b"\0" in name:
        raise BadRequest(400, what, f"the {what} must have at most {MAX_NAME_BYTES} bytes, none of them zero")
    return name


def _query(query: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=16))
    except ValueError:
        raise BadRequest(400, "query", "the query cannot be read") from None


def _number(values: dict[str, str], name: str, default: float) -> float:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadRequest(400, name, f"{name} must be a number, not {text[:40]!r}")
    return number


def _lease_id(quoted: bytes) -> str:
    incarnation, _, number = quoted.partition(b"-")
    if not (incarnation.isalnum() and number.isdigit() and len(quoted) <= 64):
        raise BadRequest(404, "id", "this is not the id of a lease")
    return quoted.decode("ascii")


END_OF_HEAD = b"\r\n\r\n"


class Head(NamedTuple):
    """A request's parsed head."""

    method: bytes
    target: bytes
    length: int | None
    """The body's length in bytes; None without a Content-Length."""
    expects_continue: bool
    """The client waits for `100 Continue` before it sends the body."""
    authorization: bytes
    closes_connection: bool
    """The connection closes after the answer."""


class _Fields:
    """The callbacks of httptools. Mutable: they collect the fields of one head."""

    def __init__(self) -> None:
        self.target = b""
        self.length: int | None = None
        self.is_chunked = False
        self.expects_continue = False
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
            self.expects_continue = value.lower() == b"100-continue"
        elif name == b"authorization":
            self.authorization = value


def parse_head(data: bytes) -> Head:
    """Parse a head, empty line included. Raises BadRequest when the end of the request cannot be known."""
    fields = _Fields()
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        raise BadRequest(400, "Upgrade", "the daemon supports no other protocol") from None
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
        fields.expects_continue,
        fields.authorization,
        not parser.should_keep_alive(),
    )


_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_JSON = "application/json"

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def response(
    status: int,
    content_type: str,
    body: bytes,
    *,
    extra: str = "",
    length: int | None = None,
    is_head: bool = False,
) -> bytes:
    """Build an answer, or only its head with `is_head`. `length` is given when the body is sent separately.
    Header lines in `extra` end with CRLF."""
    size = len(body) if length is None else length
    head = f"content-type: {content_type}\r\ncontent-length: {size}\r\n{extra}\r\n".encode()
    return _STATUS_LINES[status] + head + (b"" if is_head else body)


def error(status: int, param: str, message: str, *, extra: str = "", is_head: bool = False) -> bytes:
    """Build an error answer. `param` names the wrong part of the request."""
    return response(status, _JSON, error_body(param, message), extra=extra, is_head=is_head)


def lease_answer(lease: EntryLease, start: int) -> bytes:
    """Build the answer to a lease: its id, and the offsets of its bytes. The pool starts at `start`."""
    offsets = ",".join(
        f'{{"offset":{start + offset},"len":{length}}}' for offset, length in lease.entry.extents
    )
    return response(200, _JSON, f'{{"id":"{lease.id}","offsets":[{offsets}]}}'.encode())


STORED = response(200, _JSON, b"{}")
RELEASED = response(200, _JSON, b'{"released":true}')
ENDED = response(200, _JSON, b'{"released":false}')
MISSED = error(504, "key", "the object was not found in time")

REFUSALS = {
    Refusal.EXISTS: (409, "key", "an object of this name exists"),
    Refusal.TOO_LARGE: (413, "Content-Length", "the object is larger than the memory of this daemon"),
    Refusal.NO_ROOM: (507, "Content-Length", "not enough memory: too much of it is leased"),
}
