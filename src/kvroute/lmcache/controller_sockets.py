"""The three ZMQ sockets of LMCache's controller: one for pushed operations, two for requests and heartbeats.

Messages are received without waiting, for one time slice per iteration of the event loop. All sockets share
the slice, so that together they do not block the loop for longer. A future per message would cost more than
the message.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from itertools import chain

import zmq

from kvroute.clock import Clock
from kvroute.errors import ConfigError, WireError
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.options import ControllerOptions
from kvroute.wire.lmcache_controller import ErrorReply, Register, Reply, decode, encode, split

log = logging.getLogger(__name__)

_MESSAGES_PER_ROUND = 16
"""Messages that are received from one socket before the next socket is served."""
_TICK_S = 1.0
_WILDCARD_HOSTS = {"*", "0.0.0.0", "[::]", "::"}
_UNKNOWN_HOST = "192.0.2.1"
"""An address reserved for documentation (RFC 5737): the system routes it like that of any remote host."""


class _BoundSocket:
    """One bound socket. Mutable: `_unfinished` is the rest of the message that the last slice has started."""

    def __init__(self, bound: zmq.Socket[bytes], handle: Callable[[Sequence[bytes]], Iterator[None]]) -> None:
        self.socket = bound
        self.endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self.descriptor = int(bound.getsockopt(zmq.FD))
        self._handle = handle
        self._unfinished: Iterator[None] | None = None

    def serve(self, clock: Clock, until: float) -> bool:
        """Handle messages until the time `until`; False when the socket is empty."""
        for _ in range(_MESSAGES_PER_ROUND):
            if self._unfinished is None:
                try:
                    self._unfinished = self._handle(self.socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    return False
            for _ in self._unfinished:
                if clock.now() >= until:
                    return True
            self._unfinished = None
            if clock.now() >= until:
                return True
        return True


class ControllerSockets:
    """Serves `controller` at the addresses in `options`. Mutable: `run` owns the sockets."""

    def __init__(self, controller: Controller, clock: Clock, options: ControllerOptions) -> None:
        self._controller = controller
        self._clock = clock
        self._options = options
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[_BoundSocket] = []
        self._ready = asyncio.Event()
        self._is_scheduled = False
        self.pull = self.reply = self.heartbeat = ""
        """The bound addresses, `host:port`; "" while not bound."""

    async def wait_until_serving(self) -> None:
        """Return once `run` serves."""
        await self._ready.wait()

    def bind(self) -> None:
        """Bind all addresses. Raises `ConfigError` if one cannot be bound."""
        context = self._context = zmq.Context()
        try:
            if self._options.heartbeat:
                self.heartbeat = self._open(context, "heartbeat", zmq.ROUTER).endpoint
            self.reply = self._open(context, "reply", zmq.ROUTER).endpoint
            self.pull = self._open(context, "pull", zmq.PULL).endpoint
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close all sockets. `run` does so at its end."""
        for bound in self._sockets:
            bound.socket.close(linger=0)
        self._sockets.clear()
        self.pull = self.reply = self.heartbeat = ""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def run(self) -> None:
        """Serve until cancelled; can be run again. Calls `bind` if needed, and raises its errors."""
        loop = asyncio.get_running_loop()
        if self._context is None:
            self.bind()
        try:
            for bound in self._sockets:
                loop.add_reader(bound.descriptor, self._readable)
            self._ready.set()
            self._serve_slice()
            while True:
                await self._clock.sleep(_TICK_S)
                self._controller.tick()
                more = True
                while more:
                    more = self._controller.sweep()
                    await asyncio.sleep(0)
        finally:
            self._ready.clear()
            for bound in self._sockets:
                loop.remove_reader(bound.descriptor)
            self.close()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], name: str, kind: int) -> _BoundSocket:
        address = getattr(self._options, name)
        bound = context.socket(kind)
        bound.setsockopt(zmq.LINGER, 0)
        # With IPV6 set, an IPv4 address would be bound and reported as an IPv4-mapped IPv6 address.
        bound.setsockopt(zmq.IPV6, int(address.startswith(("*", "["))))
        bound.setsockopt(zmq.TCP_KEEPALIVE, 1)
        try:
            bound.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            bound.close(linger=0)
            why = (
                "is already in use" if error.errno == zmq.EADDRINUSE else f"cannot be bound: {error.strerror}"
            )
            raise ConfigError(f"lmcache.controller.{name}", f"{address} {why}") from error

        def on_push(frames: Sequence[bytes]) -> Iterator[None]:
            return self._handle_push(frames)

        def on_request(frames: Sequence[bytes]) -> Iterator[None]:
            return self._handle_request(bound, frames)

        self._sockets.append(_BoundSocket(bound, on_push if kind == zmq.PULL else on_request))
        return self._sockets[-1]

    # Messages

    def _readable(self) -> None:
        if not self._is_scheduled:
            self._serve_slice()

    def _serve_slice(self) -> None:
        """Serve all sockets until they are empty or the time slice ends. The next iteration serves the rest.

        ZMQ signals new messages on a socket's file descriptor only after the socket was emptied. So the rest
        gets no signal, and `_serve_slice` schedules itself.
        """
        self._is_scheduled = False
        until = self._clock.now() + self._options.slice_ms / 1000
        busy = list(self._sockets)
        while busy:
            for bound in tuple(busy):
                if not bound.serve(self._clock, until):
                    busy.remove(bound)
            if busy and self._clock.now() >= until:
                self._is_scheduled = True
                asyncio.get_running_loop().call_soon(self._serve_slice)
                return

    def _handle_push(self, frames: Sequence[bytes]) -> Iterator[None]:
        """Handle a push: each frame is one message. A large message is handled in pieces."""
        for payload in chain.from_iterable(map(split, frames)):
            self._handle_message(payload)
            yield

    def _handle_request(self, reply_to: zmq.Socket[bytes], frames: Sequence[bytes]) -> Iterator[None]:
        """Handle a request `[identity, "", message]`, and send the reply."""
        identity, *rest = frames
        reply = self._handle_message(rest[-1] if rest else b"")
        if reply is None:
            reply = ErrorReply(error="this message is not a request")
        try:
            reply_to.send_multipart([identity, b"", encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._controller.counts.failed += 1
            log.warning("a reply to an LMCache worker could not be sent: %s", error)
        yield

    def _handle_message(self, payload: bytes) -> Reply | None:
        controller, kind = self._controller, "message"
        try:
            try:
                message = decode(payload)
            except WireError as error:
                controller.on_unreadable(payload)
                return ErrorReply(error=str(error))
            kind = type(message).__name__
            url = self._heartbeat_url(message) if isinstance(message, Register) else ""
            return controller.handle(message, url)
        except Exception:
            # One worker's message must not stop the service for the others.
            controller.counts.failed += 1
            log.exception("handling a %s of an LMCache worker failed", kind)
            return ErrorReply(error="internal error")

    def _heartbeat_url(self, message: Register) -> str:
        """The address for the worker's heartbeats, `host:port`; "" if the controller takes none."""
        if not self.heartbeat:
            return ""
        host, _, port = self.heartbeat.rpartition(":")
        if self._options.advertise:
            host = self._options.advertise
        elif host in _WILDCARD_HOSTS:
            host = _local_host_towards(message.ip)
        return f"{host}:{port}"


def _local_host_towards(address: str) -> str:
    """Our host's address on the route to `address`, by the system's routing table. Sends no packet."""
    try:
        version = ip_address(address).version
    except ValueError:
        address, version = _UNKNOWN_HOST, 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            host: str = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return f"[{host}]" if version == 6 else host
