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

# Written by the gateway itself. `expect` is answered by our own server: the body is already here.
_REQUEST_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


def request_headers(
    raw: Sequence[tuple[bytes, bytes]], *, host: bytes, request_id: bytes, content_length: int
) -> RawHeaders:
    """Headers for the worker: `host` first, then the client's own without hop-by-hop ones.

    `x-request-id` becomes `request_id`, in its place or at the end. `content-length` is that of the
    body that is sent; it is left out when there is no body and the client announced none.
    """
    dropped = _with_named_by_connection(_REQUEST_DROPPED, raw)
    out = [(b"host", host)]
    has_id = False
    announced = content_length > 0
    for header in raw:
        lower = header[0].lower()
        if lower == b"x-request-id":
            if not has_id:
                has_id = True
                out.append((header[0], request_id))
        elif lower not in dropped:
            out.append(header)
        elif lower == b"content-length" or lower == b"transfer-encoding":
            announced = True
    if not has_id:
        out.append((b"x-request-id", request_id))
    if announced:
        out.append((b"content-length", b"%d" % content_length))
    return out


def response_headers(
    raw: Sequence[tuple[bytes, bytes]], added: Sequence[tuple[bytes, bytes]] = ()
) -> RawHeaders:
    """Headers for the client: the worker's without hop-by-hop ones, then `added`.

    An added header replaces the worker's of the same name (any case).
    """
    dropped = _with_named_by_connection(HOP_BY_HOP.union([name.lower() for name, _ in added]), raw)
    out = [header for header in raw if header[0].lower() not in dropped]
    out += added
    return out


def _with_named_by_connection(
    dropped: frozenset[bytes], raw: Sequence[tuple[bytes, bytes]]
) -> frozenset[bytes]:
    """`dropped` and the lower-case names that `Connection` headers declare hop-by-hop."""
    for name, value in raw:
        if len(name) == 10 and name.lower() == b"connection":
            dropped = dropped.union([token.strip(b" \t").lower() for token in value.split(b",")])
    return dropped
