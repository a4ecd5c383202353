"""Answers as bytes."""

from __future__ import annotations

from http import HTTPStatus

from kvroute.tierd.pool import Lease
from kvroute.tierd.request import error_body
from kvroute.tierd.store import Refusal

_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_JSON = "application/json"

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def answer(
    status: int,
    content_type: str,
    body: bytes,
    *,
    extra: str = "",
    length: int | None = None,
    is_head: bool = False,
) -> bytes:
    """A whole answer, or only its head. `length` is the body's when that follows by itself; `extra` header
    lines end with CRLF."""
    size = len(body) if length is None else length
    head = f"content-type: {content_type}\r\ncontent-length: {size}\r\n{extra}\r\n".encode()
    return _LINES[status] + head + (b"" if is_head else body)


def error(status: int, param: str, message: str, *, extra: str = "", is_head: bool = False) -> bytes:
    """`param` names the part of the request that is wrong."""
    return answer(status, _JSON, error_body(param, message), extra=extra, is_head=is_head)


def leased(lease: Lease, start: int) -> bytes:
    """A lease and where its bytes are in the segment, in which the pool begins at `start`."""
    offsets = ",".join(
        f'{{"offset":{start + offset},"len":{length}}}' for offset, length in lease.entry.extents
    )
    return answer(200, _JSON, f'{{"id":"{lease.id}","offsets":[{offsets}]}}'.encode())


STORED = answer(200, _JSON, b"{}")
RELEASED = answer(200, _JSON, b'{"released":true}')
ENDED = answer(200, _JSON, b'{"released":false}')
MISSED = error(504, "key", "the object is not here and did not come in time")

REFUSALS = {
    Refusal.EXISTS: (409, "key", "there is an object of this name"),
    Refusal.TOO_LARGE: (413, "Content-Length", "the object is larger than the memory of this daemon"),
    Refusal.NO_ROOM: (507, "Content-Length", "no room: too much of the memory is leased"),
}
