"""What is in flight: the capacity of the gateway, and the end of all exchanges."""

from __future__ import annotations

from collections.abc import Collection

from kvroute.access.client_keys import KnownClient
from kvroute.access.keys import KeyCheck
from kvroute.errors import GatewayOverloaded, ShuttingDown, TooManyRequests
from kvroute.metrics import Metrics
from kvroute.openai.headers import Headers
from kvroute.request.downstream import InFlightRequest


class EntryControl:
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
