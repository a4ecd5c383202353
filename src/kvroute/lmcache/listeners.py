"""What LMCache connects to: the HTTP listener of its coordinator, and the sockets of its controller."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Generator, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from itertools import chain
from typing import Any, Final, Protocol, TypeVar

import msgspec
import uvicorn
import zmq

from kvroute.clock import Clock
from kvroute.errors import ConfigError, WireError
from kvroute.index.chunk_index import ChunkIndex
from kvroute.lmcache.controller import Controller
from kvroute.lmcache.coordinator import BatchOutcome, Coordinator
from kvroute.lmcache.options import ControllerOptions, CoordinatorOptions
from kvroute.lmcache.registration import (
    MAX_SERVERS_PER_SENDER,
    RegistrationRefused,
    ServerAddresses,
    is_local_address,
)
from kvroute.wire.lmcache_controller import ErrorReply, Message, Register, Reply, decode, encode, split
from kvroute.wire.lmcache_server import CacheEvents, decode_events, decode_registration

log = logging.getLogger(__name__)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_T = TypeVar("_T")

_TICK_S: Final = 1.0
_CHUNKS_PER_SWEEP: Final = 4000
_CLOSE_S: Final = 1
_MAX_NAMED: Final = 256
_KEEP_ALIVE_S: Final = 75
"""Long, so that the client closes idle connections. A server sends heartbeats every 5 s, and its client
closes a connection that is idle for 5 s (LMCache 0.5.6, httpx). If we closed it at that moment, a batch of
events could be lost, and the protocol has no replay."""


class ReportObserver(Protocol):
    """Learns what LMCache has reported here, after it was applied."""

    def alive(self, server: str) -> None:
        """The server has registered, or sent a heartbeat."""
        ...

    def server_left(self, server: str) -> None:
        """A server has said goodbye."""
        ...

    def applied(self, batch: CacheEvents, *, is_last: bool) -> None:
        """A piece of a batch of a server; `is_last`: of its last piece."""
        ...

    def handled(self, message: Message, payload: bytes) -> None:
        """A message of an in-process LMCache."""
        ...


class CoordinatorApp:
    """An ASGI application with the routes that LMCache 0.5.6's servers call (v1/mp_coordinator/http_apis).

    Reports are applied one after another in order of arrival, in steps of about `slice_ms` of event-loop
    time. Mutable: `malformed` counts messages that cannot be decoded, `refused` those that are not believed.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        options: CoordinatorOptions,
        observer: ReportObserver | None = None,
    ) -> None:
        self.malformed = 0
        self.refused = 0
        self.addresses = ServerAddresses(options.servers, is_local_address)
        self._named: set[str] = set()
        """Senders whose refusals the log has."""
        self._observer = observer
        self._coordinator = coordinator
        self._clock = clock
        self._options = options
        self._events_lock = asyncio.Lock()
        self.registered = asyncio.Event()
        """Set when a server registers, so that `StatusPoller` asks the server at once."""

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        client = scope.get("client")
        sender = client[0] if client else ""
        try:
            status, body = await self._answer(scope["method"], scope["path"].rstrip("/"), sender, receive)
        except RegistrationRefused as refused:
            self.refused += 1
            if sender not in self._named and len(self._named) < _MAX_NAMED:
                self._named.add(sender)
                log.warning("LMCache's coordinator refused a message of %s: %s", sender, refused)
            status, body = refused.status, {"error": str(refused)}
        payload = b"" if body is None else msgspec.json.encode(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
        if status == 204:
            headers = []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    async def _answer(self, method: str, path: str, sender: str, receive: _Receive) -> tuple[int, object]:
        instance_id = path.removeprefix("/instances/")
        match method, path:
            case "POST", "/events":
                return await self._events(sender, receive)
            case "POST", "/instances":
                return await self._register(sender, receive)
            case "GET", "/instances":
                return 200, {"instances": self._instance_list()}
            case "PUT", _ if path.startswith("/instances/") and path.endswith("/heartbeat"):
                instance_id = instance_id.removesuffix("/heartbeat")
                self._check_sender(instance_id, sender)
                if self._coordinator.heartbeat(instance_id):
                    if self._observer is not None:
                        self._observer.alive(instance_id)
                    return 200, {"instance_id": instance_id}
                return 404, {"error": f"unknown instance {instance_id}; re-register"}
            case "DELETE", _ if path.startswith("/instances/"):
                self._check_sender(instance_id, sender)
                self._coordinator.deregister(instance_id)
                if self._observer is not None:
                    self._observer.server_left(instance_id)
                return 204, None
            case "GET", "/healthz" | "/healthcheck" | "/health":
                return 200, {"status": "healthy"}
            case "POST", "/directory/blend-lookup":
                return 200, {"matches": []}
        return 404, {"error": f"{method} {path} is not served here"}

    async def _register(self, sender: str, receive: _Receive) -> tuple[int, object]:
        body = await self._read(receive)
        if body is None:
            return self._too_large()
        try:
            message = decode_registration(bytes(body))
        except WireError as error:
            return self._unreadable(error)
        self.addresses.check(message.ip.strip(), sender, self._coordinator.worker_hosts())
        self._check_sender(message.instance_id.strip(), sender)
        instance_id, again = self._coordinator.register(message, sender)
        self.registered.set()
        if self._observer is not None:
            self._observer.alive(instance_id)
        return 200, {"instance_id": instance_id, "re_registered": again}

    def _check_sender(self, instance_id: str, sender: str) -> None:
        """Raise RegistrationRefused if a message in the name of this server does not come from it.

        A server that lives can be replaced from its own machine only; after `heartbeat_timeout_s` without a
        heartbeat its id is free again.
        """
        instance = self._coordinator.instance(instance_id) if instance_id else None
        if instance is None:
            heard = sum(instance.sender == sender for instance in self._coordinator.instances())
            if heard >= MAX_SERVERS_PER_SENDER:
                text = f"{sender} has registered {heard} servers already"
                raise RegistrationRefused(text, status=429)
            return
        if not instance.registered or sender == instance.sender:
            return
        if not self.addresses.belongs(instance.address, sender) and not self.addresses.is_listed(sender):
            raise RegistrationRefused(
                f"server {instance_id[:100]!r} is registered from {instance.address} and lives", status=409
            )

    async def _events(self, sender: str, receive: _Receive) -> tuple[int, object]:
        body = await self._read(receive)
        if body is None:
            return self._too_large()
        outcomes = dict.fromkeys(BatchOutcome, 0)
        async with self._events_lock:
            try:
                batches = await self._run_in_slices(decode_events(body))
            except WireError as error:
                return self._unreadable(error)
            for instance_id in {batch.instance_id for batch in batches}:
                self._check_sender(instance_id, sender)
            await self._run_in_slices(self._apply(batches, outcomes, sender))
        return 200, {
            "applied": outcomes[BatchOutcome.APPLIED],
            "duplicates": outcomes[BatchOutcome.DUPLICATE],
            "stale": outcomes[BatchOutcome.STALE],
        }

    def _apply(
        self, batches: list[CacheEvents], outcomes: dict[BatchOutcome, int], sender: str
    ) -> Generator[None, None, None]:
        last: tuple[str, int, int] | None = None
        outcome = BatchOutcome.STALE
        numbers = [(batch.instance_id, batch.incarnation, batch.seq) for batch in batches]
        # Not strict: a report without batches has no number, but the list of the following ones has None.
        for batch, number, following in zip(batches, numbers, [*numbers[1:], None], strict=False):
            if number != last:
                last, outcome = number, self._coordinator.admit(batch, sender=sender)
                outcomes[outcome] += 1
            if outcome is BatchOutcome.APPLIED:
                self._coordinator.apply(batch)
                if self._observer is not None:
                    self._observer.applied(batch, is_last=following != number)
            yield

    async def _run_in_slices(self, steps: Generator[None, None, _T]) -> _T:
        """Run all steps; yield to the event loop every `slice_ms`. Returns the generator's result."""
        now, slice_s = self._clock.now, self._options.slice_ms / 1000
        until = now() + slice_s
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: _T = end.value
                return result
            if now() >= until:
                await asyncio.sleep(0)
                until = now() + slice_s

    async def _read(self, receive: _Receive) -> bytearray | None:
        """The whole body; None if it is larger than `max_body_bytes`."""
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._options.max_body_bytes:
                return None
            if not message.get("more_body"):
                return body

    def _instance_list(self) -> list[dict[str, object]]:
        return [
            {
                "instance_id": instance.id,
                "ip": instance.address,
                "http_port": instance.http_port,
                "registration_time": 0.0,
                "metadata": {},
                "p2p_advertised_url": "",
                "mq_port": 0,
            }
            for instance in self._coordinator.instances()
            if instance.registered
        ]

    def _unreadable(self, error: WireError) -> tuple[int, object]:
        self.malformed += 1
        log.warning("the gateway refused a message to LMCache's coordinator: %s", error)
        return 422, {"error": str(error)}

    def _too_large(self) -> tuple[int, object]:
        self.malformed += 1
        log.warning(
            "LMCache's coordinator refused a report: it is larger than lmcache.coordinator.max_body_bytes"
        )
        return 413, {"error": "the body is too large"}


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without signal handlers: the gateway's own server handles the process's signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class CoordinatorServer:
    """The listening socket, its uvicorn server, and the coordinator's periodic work.

    Call `bind`, then own the task that runs `run`. Mutable: `address` (`host:port`) is set by `bind`.
    """

    def __init__(
        self, app: CoordinatorApp, coordinator: Coordinator, index: ChunkIndex, options: CoordinatorOptions
    ) -> None:
        self.address = ""
        self._app = app
        self._coordinator = coordinator
        self._index = index
        self._options = options
        self._socket: socket.socket | None = None

    def bind(self) -> str:
        """Listen on `lmcache.coordinator.listen`. Returns the bound address, `host:port`.

        Raises ConfigError if the address cannot be bound.
        """
        host, _, port = self._options.listen.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, int(port)))
            listening.listen(128)
        except OSError as error:
            listening.close()
            raise ConfigError(
                "lmcache.coordinator.listen", f"cannot listen on {self._options.listen}: {error.strerror}"
            ) from error
        self._socket = listening
        host, port, *_ = listening.getsockname()
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self.address

    def close(self) -> None:
        """Close the listening socket. `run` does so at its end."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def run(self) -> None:
        """Serve until cancelled; can be run again. Calls `bind` first if needed and raises the same
        errors."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        config = uvicorn.Config(
            self._app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_S,
        )
        server = _EmbeddedServer(config)
        serving = asyncio.create_task(server.serve(sockets=[self._socket]), name="LMCache coordinator")
        log.info("LMCache servers may report to http://%s", self.address)
        try:
            while not serving.done():
                self._coordinator.expire()
                more = self._index.sweep(_CHUNKS_PER_SWEEP)
                await asyncio.wait((serving,), timeout=0 if more else _TICK_S)
            await serving
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            self.close()


_MESSAGES_PER_ROUND = 16
"""Messages that are received from one socket before the next socket is served."""
_MAX_FRAME_BYTES: Final = 8 * 1024 * 1024
"""ZMQ closes the connection of a larger frame. LMCache 0.5.6 sends 50 operations or 2,000 keys in one."""
_CONTROLLER_TICK_S = 1.0
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

    def __init__(
        self,
        controller: Controller,
        clock: Clock,
        options: ControllerOptions,
        observer: ReportObserver | None = None,
    ) -> None:
        self._observer = observer
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
                await self._clock.sleep(_CONTROLLER_TICK_S)
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
        bound.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        try:
            bound.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            bound.close(linger=0)
            problem = (
                "is already in use" if error.errno == zmq.EADDRINUSE else f"cannot be bound: {error.strerror}"
            )
            raise ConfigError(f"lmcache.controller.{name}", f"{address} {problem}") from error

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
        identity, *payloads = frames
        reply = self._handle_message(payloads[-1] if payloads else b"")
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
            reply = controller.handle(message, url)
            if self._observer is not None:
                self._observer.handled(message, payload)
            return reply
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
