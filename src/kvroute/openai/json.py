"""What our JSON parser refuses, and the JSON bodies of the gateway's own endpoints."""

from __future__ import annotations

import msgspec

from kvroute.errors import InvalidRequest

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises: not JSON, not UTF-8 (which it checks only in what it decodes), too deep."""

_decode = msgspec.json.Decoder(dict[str, object]).decode


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object. Raises InvalidRequest for anything else."""
    try:
        return _decode(body)
    except UNREADABLE as error:
        raise InvalidRequest(f"The request body must be a JSON object: {error}") from None
