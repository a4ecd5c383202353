"""Which session a request belongs to, from an ordered list of places to look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http.cookies import CookieError, SimpleCookie

from kvroute.errors import ConfigError
from kvroute.gateway.asgi import Headers, header
from kvroute.openai.request import InferenceRequest

SessionKeySource = Callable[[InferenceRequest, Headers], str | None]


def session_key_sources(declared: Sequence[str]) -> tuple[SessionKeySource, ...]:
    """Turn `header:NAME`, `cookie:NAME` and `body:dotted.path` into readers, in that order.

    Raises ConfigError for anything else.
    """
    return tuple(_source(text) for text in declared)


def session_fields(declared: Sequence[str]) -> tuple[str, ...]:
    """The top-level fields of bodies that `declared` sources look at."""
    places = [text.partition(":") for text in declared]
    return tuple(name.partition(".")[0] for kind, _, name in places if kind == "body")


def session_key(
    sources: Sequence[SessionKeySource], request: InferenceRequest, headers: Headers
) -> str | None:
    """The first key found; None when the request carries none. Costs a dict lookup per absent body field."""
    for source in sources:
        key = source(request, headers)
        if key:
            return key
    return None


def _source(text: str) -> SessionKeySource:
    kind, _, name = text.partition(":")
    if not name:
        kind = ""
    match kind:
        case "header":
            wanted = name.lower().encode()
            return lambda _request, headers: header(headers, wanted).decode("latin-1") or None
        case "cookie":
            return lambda _request, headers: _cookie(header(headers, b"cookie"), name)
        case "body":
            return lambda request, _headers: request.text(name)
        case _:
            raise ConfigError(
                "routing.session.keys", f"{text!r} is none of header:NAME, cookie:NAME, body:FIELD"
            )


def _cookie(raw: bytes, name: str) -> str | None:
    if not raw:
        return None
    try:
        morsel = SimpleCookie(raw.decode("latin-1")).get(name)
    except CookieError:
        return None
    return morsel.value if morsel else None
