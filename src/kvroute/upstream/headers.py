"""Which headers cross the gateway, both ways.

Hop-by-hop headers (RFC 9110 section 7.6.1) end here; everything else keeps its place, case and
duplicates. Header lists are ASGI's: `[(name, value), ...]` in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

RawHeaders = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

REWRITTEN = frozenset({b"host", b"content-length", b"x-request-id"})
"""Headers of a request that the gateway writes itself."""

NOT_RELAYED = HOP_BY_HOP | REWRITTEN | {b"expect"}
"""`expect` is answered by our own server: the body is already here."""

ANSWERED_HERE = frozenset(
    {
        b"x-request-id",
        b"x-kvroute-worker",
        b"x-kvroute-strategy",
        b"x-kvroute-reason",
        b"x-kvroute-hit-tokens",
        b"x-kvroute-hit-tiers",
    }
)
"""Headers of an answer that the gateway writes itself."""


def relayed_fields(
    raw: Sequence[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset(), added: bytes = b""
) -> bytes:
    """The client's headers as they go to a worker, each line with its end, then `added`.

    Left out are hop-by-hop ones, those that every attempt writes anew (`REWRITTEN`) and those in
    `without` (lower-case). Raises ValueError for a line break or NUL in a header.
    """
    dropped = _with_named_by_connection(NOT_RELAYED | without if without else NOT_RELAYED, raw)
    lines = [b"%b: %b\r\n" % header for header in raw if header[0].lower() not in dropped]
    fields = b"".join(lines)
    breaks = len(lines)
    if fields.count(b"\n") != breaks or fields.count(b"\r") != breaks or b"\0" in fields:
        raise ValueError("a header holds a line break or NUL")
    return fields + added


def response_headers(
    raw: Sequence[tuple[bytes, bytes]], dropped: frozenset[bytes] = HOP_BY_HOP
) -> RawHeaders:
    """Headers for the client: the worker's, names in lower case, without those in `dropped`, which has
    the hop-by-hop ones and what the gateway sets itself."""
    dropped = _with_named_by_connection(dropped, raw)
    out = []
    for name, value in raw:
        lower = name.lower()
        if lower not in dropped:
            out.append((lower, value))
    return out


def _with_named_by_connection(
    dropped: frozenset[bytes], raw: Sequence[tuple[bytes, bytes]]
) -> frozenset[bytes]:
    """`dropped` and the lower-case names that `Connection` headers declare hop-by-hop."""
    for name, value in raw:
        if len(name) == 10 and name.lower() == b"connection":
            dropped = dropped.union([token.strip(b" \t").lower() for token in value.split(b",")])
    return dropped
