"""Who may use what: API keys of the data plane, keys of the admin API."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from kvroute.errors import Unauthorized
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
        bearer = _bearer(headers)
        given = header(headers, b"x-api-key") if bearer is None else bearer
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, given)
        return found


class AdminKeys:
    """Keys of the admin API. Without any, nobody has access. Mutable: `add`, before the gateway serves."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys: dict[str, bytes] = {}
        self.add(keys)

    def add(self, keys: Iterable[str]) -> None:
        """Accept these keys too. Raises ValueError for an empty one, which every request would have."""
        for key in keys:
            if not key:
                raise ValueError("an admin key is empty")
            self._keys[fingerprint(key)] = key.encode()

    def owner(self, headers: Headers) -> str:
        """The fingerprint of the key in `Authorization: Bearer KEY`.

        Raises Unauthorized. Every key is compared in constant time.
        """
        given = _bearer(headers) or b""
        found = ""
        for name, key in self._keys.items():
            if hmac.compare_digest(key, given):
                found = name
        if not found:
            raise Unauthorized(
                "The admin key is needed: Authorization: Bearer KEY. The gateway's log says at its start "
                "where the key is.",
                code="invalid_admin_key",
            )
        return found


def fingerprint(key: str) -> str:
    """Eight hex digits by which people tell keys apart in logs."""
    return hashlib.sha256(b"kvroute admin key\0" + key.encode()).hexdigest()[:8]


def _bearer(headers: Headers) -> bytes | None:
    """The token of `Authorization: Bearer`; None where the header is absent or has another scheme."""
    scheme, _, token = header(headers, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
