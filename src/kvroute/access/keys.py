"""Who may enter: keys of clients and of the admin API, and the capacity."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from kvroute.access.client_keys import KeyRing, KnownClient
from kvroute.errors import Unauthorized
from kvroute.openai.headers import Headers, header


class KeyCheck:
    """Checks `Authorization: Bearer KEY` or `x-api-key: KEY` (Anthropic's clients). Without keys and
    without a `ring` of named keys all requests pass."""

    def __init__(self, keys: Iterable[str], ring: KeyRing | None = None) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self.ring = ring

    @property
    def is_open(self) -> bool:
        return not self._keys and self.ring is None

    def check(self, headers: Headers) -> None:
        """Raises Unauthorized, and for tokens Forbidden and SigningKeysUnknown.

        Every key without a name is compared in constant time.
        """
        if self.is_open or self.matches(headers):
            return
        refusal = None if self.ring is None else self.ring.refusal(_given(headers))
        if refusal is not None:
            raise refusal
        raise Unauthorized("A valid API key is needed: Authorization: Bearer KEY.", param="authorization")

    def client(self, headers: Headers) -> KnownClient | None:
        """The client of a named key; None for a key without a name. Raises Unauthorized."""
        ring, given = self.ring, _given(headers)
        found = None if ring is None else ring.find(given)
        if ring is None or found is None or ring.is_expired(found):
            self.check(headers)
            return None
        # Only this form, so that there is one value for each key: a client must not fill the memory.
        if header(headers, b"authorization") == b"Bearer " + given:
            ring.remember(b"Bearer " + given, found)
        return found

    def matches(self, headers: Headers) -> bool:
        """Whether the request carries a valid key."""
        given = _given(headers)
        ring = self.ring
        if ring is not None:
            client = ring.find(given)
            if client is not None and not ring.is_expired(client):
                return True
        found = False
        for key in self._keys:
            found |= hmac.compare_digest(key, given)
        return found


class AdminKeys:
    """Keys of the admin API. Without keys all access is refused. Mutable: `add`, before the gateway
    serves."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys: dict[str, bytes] = {}
        self.add(keys)

    def add(self, keys: Iterable[str]) -> None:
        """Accept these keys as well. Raises ValueError for an empty key: requests without a key would
        match."""
        for key in keys:
            if not key:
                raise ValueError("an admin key is empty")
            self._keys[fingerprint(key)] = key.encode()

    def owner(self, headers: Headers) -> str:
        """The fingerprint of the key in `Authorization: Bearer KEY`.

        Raises Unauthorized. Every key is compared in constant time.
        """
        given = bearer(headers) or b""
        found = ""
        for name, key in self._keys.items():
            if hmac.compare_digest(key, given):
                found = name
        if not found:
            raise Unauthorized(
                "The admin key is needed: Authorization: Bearer KEY. The gateway logs at its start where the "
                "key is.",
                code="invalid_admin_key",
            )
        return found


def fingerprint(key: str) -> str:
    """Eight hex digits that identify a key in logs."""
    return hashlib.sha256(b"kvroute admin key\0" + key.encode()).hexdigest()[:8]


def _given(headers: Headers) -> bytes:
    token = bearer(headers)
    return header(headers, b"x-api-key") if token is None else token


def bearer(headers: Headers) -> bytes | None:
    """The token of `Authorization: Bearer`; None if the header is absent or has another scheme."""
    scheme, _, token = header(headers, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
