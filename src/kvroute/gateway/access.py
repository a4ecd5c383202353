"""Who may use what: API keys of the data plane, the admin key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from ipaddress import ip_address

from kvroute.errors import Forbidden, Unauthorized
from kvroute.gateway.asgi import Headers, header


class KeyCheck:
    """Accepts `Authorization: Bearer KEY` and `x-api-key: KEY` (Anthropic's clients). No keys: all may."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)

    @property
    def is_open(self) -> bool:
        return not self._keys

    def check(self, headers: Headers) -> None:
        """Raises Unauthorized. Every key is compared in constant time."""
        if self._keys and not self.matches(headers):
            raise Unauthorized("A valid API key is needed: Authorization: Bearer KEY.")

    def matches(self, headers: Headers) -> bool:
        """Whether the request carries one of the keys."""
        scheme, _, bearer = header(headers, b"authorization").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else header(headers, b"x-api-key")
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, given)
        return found


def check_admin(keys: KeyCheck, headers: Headers, client_host: str | None) -> None:
    """The admin API: its own key; without one configured, loopback clients only. A client whose address is
    not known, because it has gone already, is none.

    Raises Unauthorized or Forbidden.
    """
    if not keys.is_open:
        keys.check(headers)
    elif not _is_loopback(client_host):
        raise Forbidden("The admin API is for loopback clients only until admin.api_key is set.")


def _is_loopback(host: str | None) -> bool:
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:
        return False
