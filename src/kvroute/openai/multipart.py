"""The small text fields of a multipart form, for the audio endpoints.

Parts are found by their boundary and their heads are read; nothing else of a form is looked at, so that the
work grows with the parts, which are bounded, and not with the bytes of a file.
"""

from __future__ import annotations

from typing import Final

from python_multipart.multipart import parse_options_header

from kvroute.errors import InvalidRequest, OverLimit

MOST_FORM_PARTS: Final = 1_000
_MAX_FIELD_BYTES: Final = 64 * 1024
_MAX_HEAD_BYTES: Final = 16 * 1024
_MAX_BOUNDARY_BYTES: Final = 256
"""RFC 2046 allows 70."""


def form_places(body: bytes, content_type: str, most_parts: int = MOST_FORM_PARTS) -> dict[str, slice]:
    """Where in the body the value of every part is that is not a file and is below 64 KiB, by its name; the
    last of equal names wins.

    Raises InvalidRequest when the body is not the multipart form its content type says, and OverLimit for
    too many parts.
    """
    kind, params = parse_options_header(content_type)
    boundary = params.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > _MAX_BOUNDARY_BYTES:
        raise InvalidRequest("This endpoint takes a multipart/form-data body.", param="content-type")
    delimiter = b"\r\n--" + boundary
    found: dict[str, slice] = {}
    # As python-multipart, with which vLLM reads forms: nothing but line breaks stands before the first
    # boundary, and nothing between a boundary and its line's end.
    at = len(body[:_MAX_HEAD_BYTES]) - len(body[:_MAX_HEAD_BYTES].lstrip(b"\r\n"))
    if not body.startswith(delimiter[2:], at):
        raise _not_a_form()
    at += len(delimiter) - 2
    parts = 0
    while not body.startswith(b"--", at):
        if not body.startswith(b"\r\n", at):
            raise _not_a_form()
        parts += 1
        if parts > most_parts:
            raise OverLimit(
                "max_form_parts", f"The form has more than {most_parts} parts (server.max_form_parts)."
            )
        head = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if head < 0 and len(body) - at > _MAX_HEAD_BYTES:
            raise InvalidRequest(f"The head of a form's part is larger than {_MAX_HEAD_BYTES} bytes.")
        begin = head + 4
        end = body.find(delimiter, begin) if head >= 0 else -1
        if end < 0:
            break  # what is cut off is the worker's to report
        name = _name(body[at + 2 : head])
        if name is not None and end - begin <= _MAX_FIELD_BYTES:
            found[name] = slice(begin, end)
        at = end + len(delimiter)
    return found


def _name(head: bytes) -> str | None:
    """Of a part that is no file."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            _, params = parse_options_header(value.strip())
            if b"name" in params and b"filename" not in params:
                return params[b"name"].decode("utf-8", "replace")
    return None


def _not_a_form() -> InvalidRequest:
    return InvalidRequest("The request body is not a valid multipart form.")
