"""Checks requests under `/admin` and `/ui`: a Host and an Origin of this gateway, and the admin key.

The key stops strangers. Host and Origin stop web pages that use an operator's browser: by a DNS name that
they point to this address (DNS rebinding), or by cross-origin requests. Also the file of the generated admin
key.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from kvroute.access.keys import AdminKeys, bearer
from kvroute.admin.key_guesses import KeyGuesses
from kvroute.errors import (
    Forbidden,
    GatewayError,
    MisdirectedRequest,
    Unauthorized,
    UnsupportedMediaType,
)
from kvroute.http.asgi import Scope
from kvroute.http.authority import authority, host_name, is_loopback
from kvroute.metrics import Metrics
from kvroute.openai.headers import Headers, header

ADMIN: Final = "/admin"
PAGE: Final = "/ui"
"""A page that shows what `/admin` answers: public, for browsers only."""

KEY_FINGERPRINT: Final = "kvroute.admin_key"
"""Key in the scope of a request under `/admin`: the fingerprint of its admin key."""

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_OWN_SITE: Final = ("same-origin", "none")


class AdminGuard:
    """Checks requests before the application sees them.

    A Host is right if it is a loopback name, the address that the client has connected to, `listens_on`, or
    one of `allowed`. An Origin is right if it is the Host, with its port, or one of `allowed`.
    """

    def __init__(
        self,
        keys: AdminKeys,
        listens_on: str,
        allowed: Collection[str],
        metrics: Metrics,
        guesses: KeyGuesses,
    ) -> None:
        self._keys = keys
        self._guesses = guesses
        self._allowed = frozenset(filter(None, map(host_name, allowed)))
        # `0.0.0.0` and `::` are no addresses that a client connects to.
        self._listens_on = host_name(listens_on) if listens_on not in ("0.0.0.0", "::") else None
        self._metrics = metrics

    def check(self, scope: Scope) -> None:
        """Raises MisdirectedRequest (421), Forbidden (403), TooManyGuesses (429), Unauthorized (401) or
        UnsupportedMediaType (415), in this order; a refusal is counted. Paths outside of `/admin` and `/ui`
        pass."""
        path: str = scope["path"]
        if not (is_below(path, ADMIN) or is_below(path, PAGE)):
            return
        try:
            self._check(scope, path)
        except GatewayError as error:
            self._metrics.rejected.labels(error.error_code or error.type).inc()
            raise

    def _check(self, scope: Scope, path: str) -> None:
        headers: Headers = scope["headers"]
        host = self._own_host(headers, scope.get("server"))
        for value in _all(headers, b"origin"):
            if not self._is_own_origin(value, host):
                raise Forbidden(
                    "Requests from pages of other origins are refused (admin.allowed_hosts).",
                    code="wrong_origin",
                )
        site = header(headers, b"sec-fetch-site").decode("latin-1")
        if site and site not in _OWN_SITE and not _opens_page(scope, path):
            raise Forbidden("Requests from pages of other sites are refused.", code="wrong_origin")
        if is_below(path, ADMIN):
            scope[KEY_FINGERPRINT] = self._owner(headers, scope.get("client"))
            # A page of another origin cannot send this type without a CORS preflight.
            if _has_body(headers) and _media_type(headers) != "application/json":
                raise UnsupportedMediaType("The body must be JSON: Content-Type: application/json.")

    def _owner(self, headers: Headers, client: tuple[str, int] | None) -> str:
        """The fingerprint of the request's admin key."""
        given = bearer(headers)
        if not given:
            return self._keys.owner(headers)  # raises, and nothing was guessed
        address = "" if client is None else client[0]
        self._guesses.check(address, given)
        try:
            found = self._keys.owner(headers)
        except Unauthorized:
            self._guesses.wrong(address, given)
            raise
        self._guesses.right(address)
        return found

    def _own_host(self, headers: Headers, listening: tuple[str, int | None] | None) -> tuple[str, int | None]:
        """Name and port of the Host header."""
        values = _all(headers, b"host")
        found = authority(values[0]) if len(values) == 1 else None
        if found is None or not (
            is_loopback(found[0])
            or found[0] in self._allowed
            or found[0] == self._listens_on
            or (listening is not None and found[0] == host_name(listening[0]))
        ):
            raise MisdirectedRequest(
                "The admin API is not served under this Host; admin.allowed_hosts can name it."
            )
        return found

    def _is_own_origin(self, origin: str, host: tuple[str, int | None]) -> bool:
        scheme, separator, rest = origin.partition("://")
        default = _DEFAULT_PORTS.get(scheme)
        found = authority(rest)
        if not separator or default is None or found is None:  # among these: `null`
            return False
        name, port = found
        return name in self._allowed or (name, port or default) == (host[0], host[1] or default)


def is_below(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or lies below it."""
    return path == prefix or path.startswith(prefix + "/")


def _opens_page(scope: Scope, path: str) -> bool:
    """Whether a browser opens the page itself, which shows nothing without the key."""
    is_navigation = header(scope["headers"], b"sec-fetch-mode") == b"navigate"
    return is_below(path, PAGE) and is_navigation and scope["method"] == "GET"


def _all(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key == name]


def _has_body(headers: Headers) -> bool:
    length = header(headers, b"content-length").strip(b" 0")
    return bool(length or header(headers, b"transfer-encoding"))


def _media_type(headers: Headers) -> str:
    return header(headers, b"content-type").decode("latin-1").partition(";")[0].strip().lower()
