"""Which headers the gateway passes on to workers and to clients.

Hop-by-hop headers (RFC 9110 section 7.6.1) are dropped; all others keep their order, case and duplicates.
Header lists are those of ASGI: `[(name, value), ...]` in bytes.
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
"""Request headers that the gateway writes itself."""

NOT_RELAYED = HOP_BY_HOP | REWRITTEN | {b"expect"}
"""Request headers that workers do not get. The gateway's own server has answered `expect`."""

ANSWERED_HERE = frozenset(
    {
        b"x-request-id",
        b"x-kvroute-worker",
        b"x-kvroute-strategy",
        b"x-kvroute-reason",
        b"x-kvroute-hit-tokens",
        b"x-kvroute-hit-tiers",
        b"location",
        b"content-location",
    }
)
"""Answer headers that the gateway writes itself, and those that name addresses behind it, which it drops."""


def relayed_fields(
    raw: Sequence[tuple[bytes, bytes]], *, without: frozenset[bytes] = frozenset(), added: bytes = b""
) -> bytes:
    """The client's headers as header lines for a worker, each with CR LF, and then `added`.

    Hop-by-hop headers, those that every attempt writes itself (`REWRITTEN`) and those in `without`
    (lower-case) are dropped. Raises ValueError for a line break or NUL in a header.
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
    """The worker's headers for the client: names in lower case, without those in `dropped`.

    `dropped` must contain the hop-by-hop headers and those that the gateway sets itself.
    """
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
    """`dropped` plus the lower-case names that the `Connection` headers list."""
    for name, value in raw:
        if len(name) == 10 and name.lower() == b"connection":
            dropped = dropped.union([token.strip(b" \t").lower() for token in value.split(b",")])
    return dropped
