"""The connections to one worker as an httpx transport, with a shorter way in for the data plane."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from kvroute.errors import (
    ConnectionLost,
    ConnectRefused,
    ConnectTimeout,
    NoResources,
    PoolExhausted,
    ProtocolViolation,
    RedirectedByWorker,
    ResponseTimeout,
    UpstreamError,
)
from kvroute.fleet.worker import Worker
from kvroute.tls import client_context
from kvroute.upstream.options import UpstreamOptions
from kvroute.upstream.pool import ConnectionPool, Origin
from kvroute.upstream.response import AnswerListener, UpstreamResponse
from kvroute.upstream.writes import Outbox

log = logging.getLogger(__name__)

TLS_SECTION = "upstream.tls"

_HTTPX_ERRORS: dict[type[UpstreamError], type[httpx.TransportError]] = {
    ConnectRefused: httpx.ConnectError,
    NoResources: httpx.ConnectError,
    ConnectTimeout: httpx.ConnectTimeout,
    PoolExhausted: httpx.PoolTimeout,
    ConnectionLost: httpx.ReadError,
    ResponseTimeout: httpx.ReadTimeout,
    ProtocolViolation: httpx.RemoteProtocolError,
    RedirectedByWorker: httpx.RemoteProtocolError,
}


_METHODS_WITH_BODY = frozenset({b"POST", b"PUT", b"PATCH"})
_COMMON_METHODS = frozenset({b"GET", b"POST", b"DELETE"})
_MAX_CACHED_STARTS = 256
_MAX_CACHED_START_BYTES = 1024
_not_a_target = re.compile(rb"[^\x21-\xff]|\x7f").search
_not_a_method = re.compile(rb"[^A-Za-z!#$%&'*+.^_`|~0-9-]").search


def encode_head(
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    *,
    host: bytes,
    body_bytes: int,
) -> bytes:
    """The head of a request: request line and `headers`; Host and Content-Length are added if absent.

    Raises ValueError for everything that could make one request look like two: a line break or NUL anywhere,
    white space in method or target, a Content-Length that is not `body_bytes`, any Transfer-Encoding. Header
    names must be tokens, as a server's parser returns them. About 2 us for ten headers.
    """
    if not method or _not_a_method(method) or not target or _not_a_target(target):
        raise ValueError("method or target is not valid in an HTTP/1.1 request line")
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    hosts = lengths = 0
    for name, value in headers:
        size = len(name)
        if size == 4:
            hosts += name.lower() == b"host"
        elif size == 14 and name.lower() == b"content-length":
            lengths += 1
            if value != b"%d" % body_bytes:
                raise ValueError("content-length is not the length of the body")
        elif size == 17 and name.lower() == b"transfer-encoding":
            raise ValueError("a request body is sent with content-length, never transfer-encoding")
        lines.append(b"%b: %b" % (name, value))
    if hosts > 1 or lengths > 1:
        raise ValueError("host or content-length is given twice")
    if not hosts:
        lines.insert(1, b"Host: %b" % host)
    if not lengths and (body_bytes or method in _METHODS_WITH_BODY):
        lines.append(b"Content-Length: %d" % body_bytes)
    line_breaks = len(lines) + 1
    lines.append(b"\r\n")
    head = b"\r\n".join(lines)
    if head.count(b"\n") != line_breaks or head.count(b"\r") != line_breaks or b"\0" in head:
        raise ValueError("a header holds a line break or NUL")
    return head


class RelayedHeads:
    """Encodes the heads of requests that are relayed to the worker `host`, below the path `root`.

    Mutable: caches the first two lines of POSTs by their target, at most 256 of at most 1 KB each.
    """

    def __init__(self, host: bytes, root: bytes = b"") -> None:
        self._host = host
        self._root = root
        self._posts: dict[bytes, bytes] = {}

    def encode(
        self, method: bytes, target: bytes, fields: bytes, request_id: bytes, body_bytes: int
    ) -> bytes:
        """The head with `fields` (from `headers.relayed_fields`); about 0.3 us.

        Raises ValueError for a method or target that is not valid in a request line.
        """
        start = self._posts.get(target) if method == b"POST" else None
        if start is None:
            start = self._start(method, target)
        if body_bytes or method in _METHODS_WITH_BODY:
            return b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
                start,
                fields,
                request_id,
                body_bytes,
            )
        return b"%b%bx-request-id: %b\r\n\r\n" % (start, fields, request_id)

    def _start(self, method: bytes, target: bytes) -> bytes:
        if _not_a_target(target) or (method not in _COMMON_METHODS and _not_a_method(method)):
            raise ValueError("method or target is not valid in an HTTP/1.1 request line")
        start = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n" % (method, self._root, target, self._host)
        if method == b"POST" and len(start) <= _MAX_CACHED_START_BYTES:
            if len(self._posts) >= _MAX_CACHED_STARTS:
                self._posts.clear()
            self._posts[target] = start
        return start


def worker_tls(options: UpstreamOptions) -> ssl.SSLContext:
    """The context of connections to https workers. Raises TlsFileError. Blocks: it reads files."""
    context = client_context(
        options.tls, TLS_SECTION, lambda: httpx.create_ssl_context(verify=options.verify_tls)
    )
    context.set_alpn_protocols(["http/1.1"])
    return context


class WorkerTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 to one worker over pooled connections, for relayed requests and for httpx clients.

    `tls` replaces the context that an https `url` otherwise gets from `worker_tls`. `outbox` coalesces the
    writes of requests. Belongs to one event loop; call `aclose` there. Raises ValueError for a URL that is
    not http(s)://host[:port][/path].
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
        self.heads = RelayedHeads(self.host, urlsplit(url).path.rstrip("/").encode("ascii"))
        """For `submit`; they add the path of the URL, which the targets of `send` include."""
        self._options = options
        self._idle_timeout_s = options.idle_timeout_s
        self._first_byte_timeout_s = options.first_byte_timeout_s
        if self.origin.scheme == "http":
            tls = None
        elif tls is None:
            tls = worker_tls(options)
        self._pool = ConnectionPool(self.origin, options, tls, outbox)
        self._openings: set[asyncio.Task[None]] = set()

    @property
    def open_connections(self) -> int:
        """Number of open sockets, including idle ones."""
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
        """Send one request; return its answer when the final head has arrived (1xx answers are dropped).

        `headers` are sent in their order; Host and Content-Length are added if absent. They must not contain
        hop-by-hop headers. Timeouts: None takes the option's value, 0 sets no limit. The timeout of the head
        starts when the request is written. `fresh` opens a new connection even if one is idle: for a retry
        after the worker closed an idle connection. The caller reads the response to its end or calls
        `abort()`; a cancelled `send` closes the connection. Nothing is retried.

        Raises an UpstreamError: its `sent` says whether the worker may have seen the request, `reused`
        whether a kept connection broke before the first byte of the answer. Raises ValueError for headers
        that would break the framing.
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
        body: bytes | memoryview,
        listener: AnswerListener,
        fresh: bool = False,
        is_streamed: bool = False,
        tail: bytes = b"",
        limit_s: float = 0.0,
    ) -> UpstreamResponse:
        """Send one request without waiting; `listener` gets its answer or its failure.

        For the data plane. The body is `body`, then `tail`. `head` is complete (see `heads`), the method is
        not HEAD, and `is_streamed` says whether the request asks for a stream. The timeouts are those of the
        options; if `limit_s` is not 0, the answer must start within it, too. Errors, `fresh` and the end of
        the response are as for `send`. The listener is not called before this returns.
        """
        response = UpstreamResponse(self._idle_timeout_s, listener)
        timeout_s = self._first_byte_timeout_s
        if limit_s and not 0.0 < timeout_s < limit_s:
            timeout_s = limit_s
        connection = None if fresh else self._pool.take_idle()
        if connection is not None:
            connection.start(head, body, response, timeout_s, False, is_streamed, tail)
            return response
        opening = asyncio.create_task(self._open(head, body, response, fresh, is_streamed, tail, timeout_s))
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        response.opening = opening
        return response

    async def _open(
        self,
        head: bytes,
        body: bytes | memoryview,
        response: UpstreamResponse,
        fresh: bool,
        is_streamed: bool,
        tail: bytes,
        timeout_s: float,
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
            response.opening = None
            connection.start(head, body, response, timeout_s, False, is_streamed, tail)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request of httpx, after reading its whole body. Raises httpx's exceptions.

        httpx's timeout `connect` limits opening a connection and waiting for one; `read` limits the wait for
        the head and each silence after it. `pool` and `write` are not used.
        """
        url = request.url
        if (url.scheme, url.host, _port(url.scheme, url.port)) != (
            self.origin.scheme,
            self.origin.host,
            self.origin.port,
        ):
            raise httpx.UnsupportedProtocol(f"this transport connects to {self.origin} only", request=request)
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

    def replace(self) -> None:
        """Keep no more connections; requests that were submitted finish."""
        self._pool.replace()

    @property
    def is_unused(self) -> bool:
        """Whether no connection is open or being opened."""
        return not self._openings and not self.open_connections

    def retire(self) -> None:
        """Open and keep no more connections; running exchanges finish. New requests get ConnectRefused."""
        self._pool.retire()

    async def aclose(self) -> None:
        """End running exchanges with ConnectionLost and wait until all sockets are closed."""
        await self._pool.aclose()
        await asyncio.gather(*self._openings, return_exceptions=True)


class _ResponseStream(httpx.AsyncByteStream):
    """The body of an answer as an httpx stream."""

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
    is_plain = not (parts.query or parts.fragment or "@" in parts.netloc or _not_a_target(url.encode()))
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
        raise ValueError("a worker's URL is http(s)://host[:port][/path], without credentials")
    return Origin(parts.scheme, parts.hostname, _port(parts.scheme, parts.port))


def _port(scheme: str, port: int | None) -> int:
    if port is not None:
        return port
    return 443 if scheme == "https" else 80


@dataclass(slots=True)
class _OriginTransport:
    """The transport of one origin. Mutable: `in_flight` counts requests without a head yet."""

    transport: WorkerTransport
    in_flight: int = 0


class AnyWorkerTransport(httpx.AsyncBaseTransport):
    """An httpx transport with one `WorkerTransport` for each origin, created on first use.

    For the `httpx.AsyncClient` that sends probes to the workers: it costs a third of the default transport. A
    worker that does not answer does not delay requests to others. Mutable: an origin without connections is
    dropped when another one is added. Belongs to one event loop; call `aclose` there.
    """

    def __init__(self, options: UpstreamOptions) -> None:
        """Only `verify_tls` and `tls` of the options are used: the others apply to answers for clients.

        Raises TlsFileError for a file that cannot be used.
        """
        # Probes are sent one at a time and need no spare connections.
        self._options = UpstreamOptions(verify_tls=options.verify_tls, tls=options.tls, spare_connections=0)
        self._tls = worker_tls(options) if options.tls.is_set else None
        self._transports: dict[tuple[str, str, int | None], _OriginTransport] = {}

    @property
    def origins(self) -> int:
        """Number of origins."""
        return len(self._transports)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Like `WorkerTransport.handle_async_request`. Raises httpx's exceptions."""
        url = request.url
        target = self._transports.get((url.scheme, url.host, url.port)) or self._add(request)
        target.in_flight += 1
        try:
            return await target.transport.handle_async_request(request)
        finally:
            target.in_flight -= 1

    def _add(self, request: httpx.Request) -> _OriginTransport:
        url = request.url
        host = f"[{url.host}]" if ":" in url.host else url.host
        port = "" if url.port is None else f":{url.port}"
        try:
            added = _OriginTransport(
                WorkerTransport(f"{url.scheme}://{host}{port}", self._options, tls=self._tls)
            )
        except ValueError as error:
            raise httpx.UnsupportedProtocol(str(error), request=request) from error
        self._transports = {
            origin: target
            for origin, target in self._transports.items()
            if target.in_flight or target.transport.open_connections
        }
        self._transports[url.scheme, url.host, url.port] = added
        return added

    async def aclose(self) -> None:
        """Close every connection; running requests fail."""
        await asyncio.gather(*(target.transport.aclose() for target in self._transports.values()))
        self._transports.clear()


class Transports:
    """The transport of each worker, created on first use.

    Mutable: `of` adds a worker, `forget` removes one; on the event loop only.
    """

    def __init__(self, options: UpstreamOptions, outbox: Outbox) -> None:
        """Raises TlsFileError for a file that cannot be used."""
        self._options = options
        # Files are read once, at the start, so that a worker that joins later cannot fail because of one.
        self._tls = worker_tls(options) if options.tls.is_set else None
        self._outbox = outbox
        self._transports: dict[Worker, WorkerTransport] = {}
        self._retired: list[WorkerTransport] = []

    def of(self, worker: Worker) -> WorkerTransport:
        """The transport of `worker`, by one dict lookup.

        Workers hash by identity, so a worker with an old ID and a new URL gets a new transport.
        """
        transport = self._transports.get(worker)
        if transport is None:
            transport = WorkerTransport(worker.spec.url, self._options, tls=self._tls, outbox=self._outbox)
            self._transports[worker] = transport
        return transport

    def configure(self, options: UpstreamOptions) -> None:
        """Use the options for further requests, on new connections; running exchanges keep theirs.

        The files of `tls` are not read again.
        """
        self._options = options
        for transport in self._transports.values():
            transport.replace()
        self._retired = [t for t in (*self._retired, *self._transports.values()) if not t.is_unused]
        self._transports.clear()

    def forget(self, worker: Worker) -> None:
        """Remove a worker that left. Its idle connections close; running exchanges finish."""
        transport = self._transports.pop(worker, None)
        if transport is not None:
            transport.retire()
            self._retired = [t for t in (*self._retired, transport) if not t.is_unused]

    async def aclose(self) -> None:
        """Close every connection; running exchanges fail."""
        every = [*self._transports.values(), *self._retired]
        await asyncio.gather(*(transport.aclose() for transport in every))
        self._transports.clear()
        self._retired.clear()
