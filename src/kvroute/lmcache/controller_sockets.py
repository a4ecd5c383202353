"""The sockets of LMCache's controller: workers push what they store, and ask at two others.

Messages are taken without waiting, as many as a slice of time allows; a future for each would cost more than
the message. All three sockets share one slice, so that together they never hold the loop for longer.
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

_IN_A_ROW = 16
"""Messages of one socket before the others get their turn."""
_TICK_S = 1.0
_EVERYWHERE = {"*", "0.0.0.0", "[::]", "::"}
_ANYONE = "192.0.2.1"
"""An address for documentation: it is routed as any other host is."""


class _ReplySocket:
    """One bound socket. Mutable: `waiting` is what is left of the last message."""

    def __init__(self, bound: zmq.Socket[bytes], handle: Callable[[Sequence[bytes]], Iterator[None]]) -> None:
        self.socket = bound
        self.endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self.descriptor = int(bound.getsockopt(zmq.FD))
        self._handle = handle
        self._waiting: Iterator[None] | None = None

    def serve(self, clock: Clock, until: float) -> bool:
        """Take in some messages; False when there are no more."""
        for _ in range(_IN_A_ROW):
            if self._waiting is None:
                try:
                    self._waiting = self._handle(self.socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    return False
            for _ in self._waiting:
                if clock.now() >= until:
                    return True
            self._waiting = None
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
        self._doors: list[_ReplySocket] = []
        self._ready = asyncio.Event()
        self._again = False
        self.pull = self.reply = self.heartbeat = ""
        """host:port, as bound; "" while not."""

    async def bound(self) -> None:
        """Returns when `run` serves."""
        await self._ready.wait()

    def bind(self) -> None:
        """Take the addresses. Raises `ConfigError` if one cannot be had."""
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
        """Undo `bind`; `run` does so at its end."""
        for door in self._doors:
            door.socket.close(linger=0)
        self._doors.clear()
        self.pull = self.reply = self.heartbeat = ""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def run(self) -> None:
        """Serve; ends only by cancellation, and can be run again. Raises `ConfigError` as `bind` does, which
        it calls if nobody did."""
        loop = asyncio.get_running_loop()
        if self._context is None:
            self.bind()
        try:
            for door in self._doors:
                loop.add_reader(door.descriptor, self._readable)
            self._ready.set()
            self._pump()
            while True:
                await self._clock.sleep(_TICK_S)
                self._controller.tick()
                more = True
                while more:
                    more = self._controller.sweep()
                    await asyncio.sleep(0)
        finally:
            self._ready.clear()
            for door in self._doors:
                loop.remove_reader(door.descriptor)
            self.close()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], name: str, kind: int) -> _ReplySocket:
        address = getattr(self._options, name)
        bound = context.socket(kind)
        bound.setsockopt(zmq.LINGER, 0)
        # With IPv6 on, an IPv4 address would be bound, and shown, as a mapped one.
        bound.setsockopt(zmq.IPV6, int(address.startswith(("*", "["))))
        bound.setsockopt(zmq.TCP_KEEPALIVE, 1)
        try:
            bound.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            bound.close(linger=0)
            why = "is taken" if error.errno == zmq.EADDRINUSE else f"cannot be bound: {error.strerror}"
            raise ConfigError(f"lmcache.controller.{name}", f"{address} {why}") from error

        def pushed(frames: Sequence[bytes]) -> Iterator[None]:
            return self._pushed(frames)

        def asked(frames: Sequence[bytes]) -> Iterator[None]:
            return self._asked(bound, frames)

        self._doors.append(_ReplySocket(bound, pushed if kind == zmq.PULL else asked))
        return self._doors[-1]

    # Taking messages

    def _readable(self) -> None:
        if not self._again:
            self._pump()

    def _pump(self) -> None:
        """Serve all sockets until they are empty, or the slice is over. A socket's file descriptor tells of
        new messages only once it has been emptied: what is left is taken up again without it."""
        self._again = False
        until = self._clock.now() + self._options.slice_ms / 1000
        busy = list(self._doors)
        while busy:
            for door in tuple(busy):
                if not door.serve(self._clock, until):
                    busy.remove(door)
            if busy and self._clock.now() >= until:
                self._again = True
                asyncio.get_running_loop().call_soon(self._pump)
                return

    def _pushed(self, frames: Sequence[bytes]) -> Iterator[None]:
        """Every frame is a message."""
        for payload in chain.from_iterable(map(split, frames)):
            self._take(payload)
            yield

    def _asked(self, asked_at: zmq.Socket[bytes], frames: Sequence[bytes]) -> Iterator[None]:
        """`[identity, "", message]`."""
        identity, *rest = frames
        reply = self._take(rest[-1] if rest else b"")
        if reply is None:
            reply = ErrorReply(error="this message is not a question")
        try:
            asked_at.send_multipart([identity, b"", encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._controller.counts.failed += 1
            log.warning("an answer to an LMCache worker could not be sent: %s", error)
        yield

    def _take(self, payload: bytes) -> Reply | None:
        controller, kind = self._controller, "message"
        try:
            try:
                message = decode(payload)
            except WireError as error:
                controller.unreadable(payload)
                return ErrorReply(error=str(error))
            kind = type(message).__name__
            url = self._heartbeat_url(message) if isinstance(message, Register) else ""
            return controller.handle(message, url)
        except Exception:
            # One worker's message must not end the service to all others.
            controller.counts.failed += 1
            log.exception("a %s of an LMCache worker failed", kind)
            return ErrorReply(error="internal error")

    def _heartbeat_url(self, message: Register) -> str:
        """Where the worker is to send its heartbeats; "" for nowhere."""
        if not self.heartbeat:
            return ""
        host, _, port = self.heartbeat.rpartition(":")
        if self._options.advertise:
            host = self._options.advertise
        elif host in _EVERYWHERE:
            host = _facing(message.ip)
        return f"{host}:{port}"


def _facing(address: str) -> str:
    """Our address towards another host, as the routing table has it; nothing is sent or looked up."""
    try:
        version = ip_address(address).version
    except ValueError:
        address, version = _ANYONE, 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect((address, 9))
            host: str = towards.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return f"[{host}]" if version == 6 else host
