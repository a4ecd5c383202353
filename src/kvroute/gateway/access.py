"""Who may enter: keys of clients and of the admin API, and the capacity."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable

from kvroute.errors import GatewayOverloaded, ShuttingDown, TooManyRequests, Unauthorized
from kvroute.gateway.client_keys import KeyRing, KnownClient
from kvroute.gateway.downstream import InFlightRequest
from kvroute.gateway.headers import Headers, header
from kvroute.metrics import Metrics


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


class Admission:
    """Decides whether a request may enter, and holds the requests in flight.

    Mutable: `add` and `discard` as requests start and end; `announce_shutdown`, `close` and `cut` at
    shutdown.
    """

    def __init__(self, keys: KeyCheck, metrics: Metrics, *, max_in_flight: int) -> None:
        self.keys = keys
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._needs_key = not keys.is_open
        self._in_flight: set[InFlightRequest] = set()
        self.add = self._in_flight.add
        self.discard = self._in_flight.discard
        self._is_open = True
        self._shed: GatewayOverloaded | None = None
        self._accepts = True
        """`_is_open`, and nothing is shed."""
        self._is_shutting_down = False
        metrics.call_before_collect(self._set_gauge)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def requests(self) -> Collection[InFlightRequest]:
        """The requests in flight. Do not change it."""
        return self._in_flight

    @property
    def is_shutting_down(self) -> bool:
        """The gateway is no longer ready; it serves requests while `is_open`."""
        return self._is_shutting_down

    def set_max_in_flight(self, limit: int) -> None:
        """Change the limit of `check`; requests in flight stay."""
        self._max_in_flight = limit

    def announce_shutdown(self) -> None:
        """From now on `/ready` answers 503. Requests are still served."""
        self._is_shutting_down = True

    def close(self) -> None:
        """From now on new requests get 503."""
        self._is_shutting_down = True
        self._is_open = self._accepts = False

    def shed(self, error: GatewayOverloaded | None) -> None:
        """From now on answer new requests with `error`; None: serve them again."""
        self._shed = error
        self._accepts = self._is_open and error is None

    def cut(self) -> int:
        """End every request in flight with an error, and return their number."""
        in_flight = list(self._in_flight)
        for request in in_flight:
            request.end("shutdown")
        return len(in_flight)

    def check(self, headers: Headers) -> None:
        """Check whether the request may enter.

        Raises ShuttingDown, GatewayOverloaded, TooManyRequests, or what `KeyCheck.check` raises.
        """
        if not self._is_open:
            raise ShuttingDown("The gateway is shutting down.", retry_after_s=1)
        if self._shed is not None:
            raise self._shed
        if self._max_in_flight and len(self._in_flight) >= self._max_in_flight:
            raise TooManyRequests(
                f"The gateway is serving {self._max_in_flight} requests already (server.max_in_flight).",
                retry_after_s=1,
            )
        self.keys.check(headers)

    def admits(self, headers: Headers, client: KnownClient | None = None) -> bool:
        """Whether `check` would raise nothing. With a `client` of `KeyRing.seen` the headers are not
        needed."""
        limit = self._max_in_flight
        return (
            self._accepts
            and not (limit and len(self._in_flight) >= limit)
            and (not self._needs_key or client is not None or self.keys.matches(headers))
        )

    def _set_gauge(self) -> None:
        self._metrics.in_flight.value = float(len(self._in_flight))


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
