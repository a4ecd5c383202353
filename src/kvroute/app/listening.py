"""Accepts connections: of clients, with TLS if it is configured, and of Envoy at an endpoint picker."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import uvicorn

from kvroute.background_tasks import BackgroundTasks
from kvroute.clock import Clock
from kvroute.config.config import Config
from kvroute.errors import ConfigError
from kvroute.fleet.fleet import Fleet
from kvroute.http.asgi import Application
from kvroute.metrics import Metrics
from kvroute.relay.dataplane import DataPlane
from kvroute.tallies import Family, FastCounter
from kvroute.tls import ServerTlsOptions, expiry, server_context, signatures

if TYPE_CHECKING:
    from kvroute.epp.service import Listener

log = logging.getLogger(__name__)

TLS_SECTION = "server.tls"

_SERVERS_PER_SOCKET = 8
"""Additional servers per listening socket. A server that finds no connection to accept costs 3 us."""
_TLS_CLOSE_S = 30.0
"""Time for the end of the last answer and for the client's own end of the TLS connection."""
_CAUSES = {
    "UNSUPPORTED_PROTOCOL": "version",
    "VERSION_TOO_LOW": "version",
    "WRONG_VERSION_NUMBER": "version",
    "HTTP_REQUEST": "plain_http",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_client_certificate",
    "CERTIFICATE_VERIFY_FAILED": "client_certificate",
    "NO_SHARED_CIPHER": "cipher",
}
"""OpenSSL's reason for a failed handshake -> value of the metric's label `outcome`."""


class Backlog:
    """Additional servers of the event loop on the listening sockets, so that connections are accepted faster.

    Mutable: by `start`, `replace_tls` and `close`. Belongs to one event loop.
    """

    # libuv accepts one connection per server in each iteration of the loop. An iteration that relays some
    # hundred streams lasts milliseconds: of 640 clients that connected together, the last ones waited 2
    # seconds. (asyncio's own loop accepts all waiting connections in one iteration.)

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], length: int) -> None:
        """`length` is the backlog of the listening sockets: the connections that the kernel queues."""
        self._make_protocol = make_protocol
        self._length = length
        self._listening: list[socket.SocketType] = []
        self._servers: list[asyncio.Server] = []

    async def start(
        self,
        listening: Iterable[socket.SocketType],
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float | None = None,
    ) -> None:
        """Accept connections of these sockets, through duplicated descriptors; with `tls` only TLS."""
        self._listening = list(listening)
        self._servers += await self._open(tls, handshake_timeout_s)

    async def replace_tls(self, tls: ssl.SSLContext, handshake_timeout_s: float) -> None:
        """Accept further connections with `tls`; accepted ones keep their context. Raises OSError.

        After an error the old servers continue.
        """
        # New servers, not a changed context: a context cannot forget an authority, and its session tickets
        # would let a client resume without a new check of its certificate.
        before = self._servers
        self._servers = await self._open(tls, handshake_timeout_s)
        for server in before:
            server.close()

    def close(self) -> None:
        """Stop accepting; accepted connections stay open. Idempotent."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._listening.clear()

    async def _open(
        self, tls: ssl.SSLContext | None, handshake_timeout_s: float | None
    ) -> list[asyncio.Server]:
        loop = asyncio.get_running_loop()
        opened: list[asyncio.Server] = []
        try:
            for each in self._listening:
                for _ in range(_SERVERS_PER_SOCKET):
                    own = socket.socket(fileno=os.dup(each.fileno()))
                    own.setblocking(False)
                    server = await loop.create_server(
                        self._protocol,
                        sock=own,
                        backlog=self._length,
                        ssl=tls,
                        ssl_handshake_timeout=handshake_timeout_s,
                        ssl_shutdown_timeout=_TLS_CLOSE_S if tls is not None else None,
                        start_serving=False,  # so that it is in `opened` before the first suspension
                    )
                    opened.append(server)
                    await server.start_serving()
        except BaseException:  # also a cancellation, at the shutdown
            for server in opened:
                server.close()
            raise
        return opened

    def _protocol(self) -> asyncio.Protocol:
        try:
            return self._make_protocol()
        except Exception:  # an exception here would make uvloop close the server
            log.exception("a client's connection could not be set up")
            return _ClosingProtocol()


class _ClosingProtocol(asyncio.Protocol):
    """Closes the connection immediately."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _CountedHandshake(ssl.SSLObject):
    """The TLS state of one connection; counts the handshake's outcome."""

    counts: Family[FastCounter]
    _is_begun = False

    def do_handshake(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self.counts.labels("started").inc()
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            cause = _cause_of(error)
            self.counts.labels(cause).inc()
            log.debug("a TLS handshake failed: %s (%s)", cause, error.reason)
            raise
        self.counts.labels("finished").inc()


def _cause_of(error: ssl.SSLError) -> str:
    """The value of the label `outcome` for a failed handshake: one of a closed set."""
    reason = error.reason or ""
    if "ALERT" in reason:
        return "refused_by_client"  # such as: the client does not trust the gateway's certificate
    return _CAUSES.get(reason, "other")


class TlsListener:
    """Accepts TLS connections and loads certificates again when their files change.

    Mutable: `start` and `aclose`; a task of its own polls the files.
    """

    def __init__(self, backlog: Backlog, options: ServerTlsOptions, metrics: Metrics, clock: Clock) -> None:
        self._backlog = backlog
        self._options = options
        self._clock = clock
        self._reloads = metrics.tls_reloads
        self._expires = metrics.certificate_expiry
        self._object_class = type(
            "CountedHandshake", (_CountedHandshake,), {"counts": metrics.tls_handshakes}
        )
        self._seen = signatures(())
        self._background = BackgroundTasks(clock)

    async def start(self, listening: Sequence[socket.SocketType]) -> None:
        """Accept connections of these sockets. Raises TlsFileError if a file cannot be used."""
        options = self._options
        # The signatures are read first: a file that changes between the two steps is loaded again.
        self._seen = await asyncio.to_thread(signatures, options.files)
        for outcome in ("loaded", "refused"):
            self._reloads.labels(outcome)
        context = await self._load()
        await self._backlog.start(listening, context, options.handshake_timeout_s)
        if options.reload_interval_s:
            self._background.start("TLS files", self._poll)

    async def aclose(self) -> None:
        """Stop polling the files."""
        await self._background.aclose()

    async def _load(self) -> ssl.SSLContext:
        context = await asyncio.to_thread(server_context, self._options, TLS_SECTION)
        context.sslobject_class = self._object_class
        file = self._options.cert_file
        assert file is not None
        path = f"{TLS_SECTION}.cert_file"
        expires = await asyncio.to_thread(expiry, file, path)
        if expires <= self._clock.wall():
            log.warning("%s: a certificate in %s has expired; clients will refuse it", path, file)
        self._expires.labels(path).value = expires
        return context

    async def _poll(self) -> None:
        while True:
            await self._clock.sleep(self._options.reload_interval_s)
            found = await asyncio.to_thread(signatures, self._options.files)
            if found != self._seen:
                self._seen = found  # files that were refused are tried again only when they change again
                await self._reload()

    async def _reload(self) -> None:
        try:
            context = await self._load()
            await self._backlog.replace_tls(context, self._options.handshake_timeout_s)
        except ConfigError as error:
            self._reloads.labels("refused").inc()
            log.error("the changed TLS files are refused, the old ones stay in use: %s", error)
        except OSError as error:
            self._reloads.labels("refused").inc()
            log.error("the changed TLS files cannot be used, the old ones stay in use: %s", error.strerror)
        else:
            self._reloads.labels("loaded").inc()
            log.info("the changed TLS files are loaded; new connections use them")


def check_picker(config: Config) -> None:
    """Raise ConfigError if this configuration or installation cannot run an endpoint picker."""
    if config.server.processes > 1:
        raise ConfigError(
            "server.processes", "an endpoint picker is one process: run several pickers, and let Envoy choose"
        )
    try:
        picker_plane()
    except ImportError as error:
        raise ConfigError(
            "", f"kvroute epp needs more packages ({error.name}): pip install 'kvroute[epp]'"
        ) from error


def picker_plane() -> type[DataPlane]:
    """The data plane of an endpoint picker. Raises ImportError without the extra `epp`."""
    # Imported late: gRPC takes memory that a gateway does not need.
    from kvroute.epp.picker import PickerPlane

    return PickerPlane


def picker_listener(config: Config, fleet: Fleet, plane: DataPlane, http: uvicorn.Config) -> Listener:
    """The gRPC listener of a picker, whose plane is a `PickerPlane`. `http` is its HTTP listener."""
    from kvroute.epp.endpoints import Endpoints
    from kvroute.epp.picker import PickerPlane
    from kvroute.epp.service import ExternalProcessor, Health, Listener

    options = config.server
    assert isinstance(plane, PickerPlane)
    endpoints = Endpoints(fleet, plane.clock, config.epp.resolve_interval_s)
    front = cast(Application, http.app)
    processor = ExternalProcessor(plane, endpoints, config.epp, front, options.root_path)
    health = Health(plane, fleet.reasons_not_ready)
    return Listener(processor, health, endpoints, options.host, options.port, options.tls)
