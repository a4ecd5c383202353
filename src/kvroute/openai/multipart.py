"""The small text fields of a multipart form, for the audio endpoints."""

from __future__ import annotations

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvroute.errors import InvalidRequest

_MAX_FIELD_BYTES = 64 * 1024


def form_fields(body: bytes, content_type: str) -> dict[str, str]:
    """Name -> value of every part that is not a file and is below 64 KiB.

    Raises InvalidRequest when the body is not the multipart form its content type says.
    """
    kind, params = parse_options_header(content_type)
    boundary = params.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("This endpoint takes a multipart/form-data body.", param="content-type")
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except MultipartParseError:
        raise InvalidRequest("The request body is not a valid multipart form.") from None
    return parts.fields


class _Parts:
    """Collects text parts. Mutable: only the parser's callbacks change it."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self._header = bytearray()
        self._header_value = bytearray()
        self._name: str | None = None
        self._value = bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_data,
            "on_part_end": self._end,
        }

    def _begin(self) -> None:
        self._name = None
        self._value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            _, params = parse_options_header(bytes(self._header_value))
            if b"name" in params and b"filename" not in params:
                self._name = params[b"name"].decode("utf-8", "replace")
        self._header.clear()
        self._header_value.clear()

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is not None and len(self._value) + end - start <= _MAX_FIELD_BYTES:
            self._value += data[start:end]

    def _end(self) -> None:
        if self._name is not None:
            self.fields[self._name] = self._value.decode("utf-8", "replace")
