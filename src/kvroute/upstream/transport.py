"""One worker behind httpx's transport contract, with a shorter way in for the data plane."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import httpx

from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    PoolExhausted,
    ProtocolViolation,
    ResponseTimeout,
    UpstreamError,
)
from kvroute.upstream.head import RelayedHeads, encode_head
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.outbox import Outbox
from kvroute.upstream.pool import ConnectionPool, Origin
from kvroute.upstream.response import AnswerListener, UpstreamResponse

log = logging.getLogger(__name__)

_HTTPX_ERRORS: dict[type[UpstreamError], type[httpx.TransportError]] = {
    ConnectRefused: httpx.ConnectError,
    ConnectTimeout: httpx.ConnectTimeout,
    PoolExhausted: httpx.PoolTimeout,
    ConnectionLost: httpx.ReadError,
    ResponseTimeout: httpx.ReadTimeout,
    ProtocolViolation: httpx.RemoteProtocolError,
}


class WorkerTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 to one worker over pooled connections.

    `send` is for requests that are relayed: raw headers in, raw headers and chunks out. The same pool
    serves an `httpx.AsyncClient(transport=...)`. Belongs to one event loop; `aclose` it there.
    `tls` replaces the context that an https `url` otherwise gets from `options.verify_tls`; with an `outbox`
    requests go out at the end of the loop's round.
    Raises ValueError for a URL that is not http(s)://host[:port].
    """

    def __init__(
        self,
        url: str,
        options: UpstreamOptions,
        *,
        tls: ssl.SSLContext | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.origin = _origin(url)
        self.host = self.origin.host_header
        """Value of the Host header."""
        self.heads = RelayedHeads(self.host)
        """For `submit`."""
        self._options = options
        self._idle_timeout_s = options.idle_timeout_s
        self._first_byte_timeout_s = options.first_byte_timeout_s
        if self.origin.scheme == "http":
            tls = None
        elif tls is None:
            tls = httpx.create_ssl_context(verify=options.verify_tls)
            tls.set_alpn_protocols(["http/1.1"])
        self._pool = ConnectionPool(self.origin, options, tls, outbox)
        self._openings: set[asyncio.Task[None]] = set()

    @property
    def open_connections(self) -> int:
        """Sockets not yet closed, idle ones included."""
        return self._pool.open_connections

    @property
    def idle_connections(self) -> int:
        return self._pool.idle_connections

    async def send(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes = b"",
        *,
        connect_timeout_s: float | None = None,
        first_byte_timeout_s: float | None = None,
        idle_timeout_s: float | None = None,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Send one request and return its answer once the final head is here (1xx are swallowed).

        `headers` go out as given and in order, without hop-by-hop ones (see `headers.request_headers`);
        Host and Content-Length are added when absent. Deadlines: None takes the option, 0 waits for ever.
        The head's deadline runs from when the request is written. `fresh` opens a new connection even if
        one is idle: for a request whose first try met a connection that was just being closed.

        Raises an UpstreamError: its `sent` says whether the worker can have seen the request, `reused`
        whether a kept-alive connection broke before any byte of the answer. Nothing is retried here.
        ValueError for headers that would break the framing. Whoever gets the response reads it to its
        end or calls `abort()`; cancelling `send` closes the connection.
        """
        options = self._options
        head = encode_head(method, target, headers, host=self.host, body_bytes=len(body))
        connection = await self._pool.acquire(
            connect_timeout_s=options.connect_timeout_s if connect_timeout_s is None else connect_timeout_s,
            fresh=fresh,
        )
        response = UpstreamResponse(options.idle_timeout_s if idle_timeout_s is None else idle_timeout_s)
        connection.start(head, body, response, 0.0, method == b"HEAD")
        try:
            await response.head(
                options.first_byte_timeout_s if first_byte_timeout_s is None else first_byte_timeout_s
            )
        except BaseException:
            response.abort()
            raise
        return response

    def submit(
        self,
        head: bytes,
        body: bytes,
        listener: AnswerListener,
        fresh: bool = False,
        is_streamed: bool = False,
    ) -> UpstreamResponse:
        """Send one request without waiting for anything: `listener` hears of its answer or its failure.

        For the data plane. `head` is complete (see `heads`), the request is no HEAD, and `is_streamed` says
        that it asks for a stream. The option's deadlines apply; errors, `fresh` and who ends the response
        are as in `send`. The listener is not called before this returns.
        """
        response = UpstreamResponse(self._idle_timeout_s, listener)
        connection = None if fresh else self._pool.take_idle()
        if connection is not None:
            connection.start(head, body, response, self._first_byte_timeout_s, False, is_streamed)
            return response
        opening = asyncio.create_task(self._open(head, body, response, fresh, is_streamed))
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        response.opens(opening)
        return response

    async def _open(
        self, head: bytes, body: bytes, response: UpstreamResponse, fresh: bool, is_streamed: bool
    ) -> None:
        try:
            connection = await self._pool.acquire(
                connect_timeout_s=self._options.connect_timeout_s, fresh=fresh
            )
        except UpstreamError as error:
            response.end(error)
        except Exception as error:
            log.exception("opening a connection to %s failed", self.origin)
            response.end(ConnectRefused(f"{self.origin}: {type(error).__name__}"))
        else:
            response.opens(None)
            connection.start(head, body, response, self._first_byte_timeout_s, False, is_streamed)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """httpx's contract. A streamed request body is read whole first. Raises httpx's exceptions.

        Of httpx's timeouts `connect` bounds opening or waiting for a connection and `read` both the wait
        for the head and each silence after it; `pool` and `write` have no wait of their own.
        """
        url = request.url
        if (url.scheme, url.host, _port(url.scheme, url.port)) != (
            self.origin.scheme,
            self.origin.host,
            self.origin.port,
        ):
            raise httpx.UnsupportedProtocol(f"this transport speaks to {self.origin} only", request=request)
        body = await request.aread()
        timeouts = request.extensions.get("timeout", {})
        read_s = timeouts.get("read") or 0.0
        try:
            upstream = await self.send(
                request.method.encode("ascii"),
                url.raw_path,
                [header for header in request.headers.raw if header[0].lower() != b"transfer-encoding"],
                body,
                connect_timeout_s=timeouts.get("connect") or 0.0,
                first_byte_timeout_s=read_s,
                idle_timeout_s=read_s,
            )
        except UpstreamError as exc:
            raise _HTTPX_ERRORS[type(exc)](str(exc), request=request) from exc
        except ValueError as exc:
            raise httpx.LocalProtocolError(str(exc), request=request) from exc
        return httpx.Response(
            upstream.status,
            headers=upstream.headers,
            stream=_ResponseStream(upstream, request),
            extensions={"http_version": upstream.http_version, "reason_phrase": upstream.reason},
            request=request,
        )

    def retire(self) -> None:
        """Open and keep no more connections; exchanges under way finish. New requests get ConnectRefused."""
        self._pool.retire()

    async def aclose(self) -> None:
        """Break off what is under way with ConnectionLost; return once all sockets are closed."""
        await self._pool.aclose()
        await asyncio.gather(*self._openings, return_exceptions=True)


class _ResponseStream(httpx.AsyncByteStream):
    """An answer's body as httpx reads it."""

    def __init__(self, upstream: UpstreamResponse, request: httpx.Request) -> None:
        self._upstream = upstream
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while chunk := await self._upstream.next_chunk():
                yield chunk
        except UpstreamError as exc:
            raise _HTTPX_ERRORS[type(exc)](str(exc), request=self._request) from exc

    async def aclose(self) -> None:
        self._upstream.abort()


def _origin(url: str) -> Origin:
    parts = urlsplit(url)
    is_plain = not (parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ValueError("a worker's URL is http(s)://host[:port], without path or credentials")
    return Origin(parts.scheme, parts.hostname, _port(parts.scheme, parts.port))


def _port(scheme: str, port: int | None) -> int:
    if port is not None:
        return port
    return 443 if scheme == "https" else 80
