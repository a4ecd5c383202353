"""The picker's gRPC service: Envoy's `ext_proc` streams, and health.

The protocol is the endpoint picker protocol 1.0 of the Gateway API Inference Extension over Envoy's
`envoy.service.ext_proc.v3.ExternalProcessor` (Envoy 1.40). One stream belongs to one HTTP request. With one
filter the stream shows the whole request. With two the first one's stream ends when the request was sent
(`pick`), and the second one's shows the answer's head and end (`watch`): an answer survives its picker.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2

from kvroute.epp.endpoints import Endpoints, EppOptions
from kvroute.epp.messages import (
    Head,
    picked,
    read_answer,
    read_head,
    read_subset,
    refused,
    request_head,
    request_pieces,
    response_head,
    response_pieces,
    response_trailers,
)
from kvroute.epp.picker import OwnAnswer, Pick, PickAnswer, PickedRequest, PickerPlane
from kvroute.errors import BodyTooLarge, ConfigError, GatewayError, InvalidRequest, NotFound
from kvroute.http.asgi import Application, Message
from kvroute.http.authority import may_mislead
from kvroute.openai.endpoints import ENDPOINTS, ErrorShape
from kvroute.openai.headers import HeaderList, header
from kvroute.request.downstream import InFlightRequest
from kvroute.request.record import Record
from kvroute.secret_files import writers_problem
from kvroute.tls import ServerTlsOptions, Signature, signatures

log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
FILTER_KEY = "x-kvroute-part"
"""gRPC metadata that an Envoy with two filters sends: `pick` or `watch`. Without it the stream is whole."""
PICK_ID = "x-kvroute-pick"
"""Request header that connects the streams of the two filters."""

_CONTROL = ("/v1/models", "/health", "/ping")
_STOP_GRACE_S = 0.5

_Write = Callable[[Any], Any]


class ExternalProcessor:
    """Answers Envoy's streams. Mutable: the requests whose end another stream will show, and the open
    streams."""

    def __init__(
        self,
        plane: PickerPlane,
        endpoints: Endpoints,
        options: EppOptions,
        front: Application,
        root_path: str = "",
    ) -> None:
        """`front` answers the requests for models and health, like the HTTP port."""
        self.root_path = root_path.encode()
        plane.planner.hands_over = False  # Envoy sends a request to one worker
        plane.follow_prefills(options.first_token_interval_s)
        self.plane = plane
        self.options = options
        self._endpoints = endpoints
        self._front = front
        self._picks: dict[bytes, PickedRequest] = {}
        self._whole: set[asyncio.Task[Any]] = set()
        """Streams whose end would end their answer."""
        self._watching: set[asyncio.Task[Any]] = set()
        self._is_empty = asyncio.Event()
        self._warned: set[str] = set()

    async def process(self, requests: Any, context: Any) -> None:
        """Handle one stream."""
        filter_name = next(
            (value for key, value in context.invocation_metadata() or () if key == FILTER_KEY), "whole"
        )
        tasks = self._watching if filter_name == "watch" else self._whole
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        end = "broken"
        try:
            if filter_name == "watch":
                end = await self._watch(context)
            else:
                end = await RequestStream(self, context, is_watched=filter_name == "pick").run()
        finally:
            tasks.discard(task)
            if not self._whole:
                self._is_empty.set()
            self.plane.metrics.epp_streams.labels(
                filter_name if filter_name in ("pick", "watch") else "whole", end
            ).inc()

    async def drained(self, within_s: float) -> None:
        """Wait until no stream is open whose end would end its answer, at most `within_s`; end the others."""
        for task in list(self._watching):
            task.cancel()
        self._is_empty.clear()
        if self._whole:
            try:
                async with asyncio.timeout(within_s):
                    await self._is_empty.wait()
            except TimeoutError:
                pass

    def answer(self, subset: frozenset[str] | None) -> PickAnswer:
        return PickAnswer(self._endpoints, subset, self.options.fallbacks)

    def expect(self, request: PickedRequest) -> bytes:
        """Remember a request for the stream of the second filter; returns its id."""
        pick_id = secrets.token_hex(12).encode()
        self._picks[pick_id] = request
        return pick_id

    def on_sent(self, pick_id: bytes) -> None:
        """The request was sent; the stream that shows its end has come or comes soon."""
        if pick_id in self._picks:
            asyncio.get_running_loop().call_later(self.options.attach_timeout_s, self._give_up, pick_id)

    def _give_up(self, pick_id: bytes) -> None:
        request = self._picks.pop(pick_id, None)
        if request is not None:
            self.plane.metrics.epp_streams.labels("watch", "missing").inc()
            if self.is_first("missing"):
                log.warning("no stream of Envoy's second filter came for a picked request")
            request.finished()

    def is_first(self, defect: str) -> bool:
        """Whether this defect of Envoy's configuration is seen for the first time: it is logged once."""
        is_first = defect not in self._warned
        self._warned.add(defect)
        return is_first

    async def _watch(self, context: Any) -> str:
        """The stream of the second filter."""
        request: PickedRequest | None = None
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                match message.WhichOneof("request"):
                    case "request_headers":
                        head = read_head(message.request_headers)
                        request = self._picks.pop(header(head.headers, PICK_ID.encode()), None)
                        await context.write(request_head())
                    case "response_headers":
                        added = [] if request is None else request.answered(read_answer(message))
                        await context.write(response_head(added))
                    case "response_trailers":
                        await context.write(response_trailers())
        finally:
            if request is not None:
                request.finished()
        # A stream without a known request: the picker answered it itself, or another picker picked it.
        return "unknown" if request is None else "ended"

    async def control(self, method: bytes, path: bytes, query: bytes, headers: HeaderList) -> OwnAnswer:
        """The gateway's own answer to a request for models or health."""
        messages: list[Message] = []
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method.decode("latin-1"),
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            messages.append(message)

        await self._front(scope, receive, send)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return OwnAnswer(messages[0]["status"], list(messages[0]["headers"]), body)


class RequestStream:
    """One stream that shows a request, and with one filter its answer too. Mutable: `run`."""

    def __init__(self, processor: ExternalProcessor, context: Any, *, is_watched: bool) -> None:
        self._processor = processor
        self._plane = processor.plane
        self._read = context.read
        self._write: _Write = context.write
        self._is_watched = is_watched
        self._has_body = False
        """Whether messages with a body or trailers follow the head: only then Envoy accepts some back."""

    async def run(self) -> str:
        """Handle the stream to its end. Returns how it ended, for the metric."""
        message = await self._read()
        if message is grpc.aio.EOF:
            return "empty"
        if message.WhichOneof("request") != "request_headers":
            return "unknown"
        head = read_head(message.request_headers)
        record = self._plane.new_record(header(head.headers, b"x-request-id"), "-")
        is_whole = message.request_headers.end_of_stream
        mode = message.protocol_config.request_body_mode
        if (
            message.HasField("protocol_config")
            and mode != ProcessingMode.FULL_DUPLEX_STREAMED
            and not is_whole
        ):
            if self._processor.is_first("mode"):
                log.warning("Envoy's filter has another request_body_mode than FULL_DUPLEX_STREAMED")
            error = InvalidRequest("Envoy's filter must have `request_body_mode: FULL_DUPLEX_STREAMED`.")
            return await self._refuse(record, error, ErrorShape.OPENAI)
        subset = read_subset(message)
        body, has_trailers = b"", False
        try:
            if not is_whole:
                self._has_body = True
                body, has_trailers = await self._body(head.headers)
        except GatewayError as error:
            return await self._refuse(record, error, ErrorShape.OPENAI)
        except EOFError:
            self._plane.client_left(record)
            return "left"
        return await self._answer(head, body, has_trailers, subset, record)

    async def _body(self, headers: HeaderList) -> tuple[bytes, bool]:
        """The whole body, and whether trailers followed it. Raises BodyTooLarge, and EOFError if the client
        leaves."""
        limit, parts, size = self._plane.max_body_bytes, list[bytes](), 0
        declared = header(headers, b"content-length")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(limit)
        while (message := await self._read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("request")
            if kind == "request_trailers":
                return b"".join(parts), True
            if kind == "request_body":
                piece = message.request_body.body
                parts.append(piece)
                size += len(piece)
                if size > limit:
                    raise BodyTooLarge(limit)
                if message.request_body.end_of_stream:
                    return b"".join(parts), False
        raise EOFError

    async def _answer(
        self, head: Head, body: bytes, has_trailers: bool, subset: frozenset[str] | None, record: Record
    ) -> str:
        plane, processor = self._plane, self._processor
        record.started = plane.clock.now()
        client = processor.answer(subset)
        # The stream ends when the client leaves. Until the answer is known, something must wait for that.
        deciding = asyncio.ensure_future(self._decide(head, body, record, client))
        reading = asyncio.ensure_future(self._read())
        is_taken = False
        try:
            await asyncio.wait({deciding, reading}, return_when=asyncio.FIRST_COMPLETED)
            if deciding.done():
                await asyncio.wait({client.outcome, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not client.outcome.done():
                return "left"
            outcome = client.outcome.result()
            if outcome is None:
                return "cut"
            if isinstance(outcome, OwnAnswer):
                await self._write(refused(*outcome))
                return "refused"
            is_taken = True
            return await self._picked(outcome, client, has_trailers, reading)
        finally:
            # Also when gRPC cancels this task, because Envoy has reset the stream.
            for task in (deciding, reading):
                task.cancel()
            request, _ = await asyncio.gather(deciding, reading, return_exceptions=True)
            outcome = client.outcome.result() if client.outcome.done() else None
            if isinstance(outcome, Pick) and not is_taken:  # decided in the moment in which the client left
                outcome.request.finished()
            elif not client.outcome.done():
                if request is None or isinstance(request, BaseException):
                    plane.client_left(record)
                else:
                    request.end("client")

    async def _decide(
        self, head: Head, body: bytes, record: Record, client: PickAnswer
    ) -> InFlightRequest | None:
        """Plan the request; `client` gets the outcome, at once or later. Returns the request in flight."""
        plane = self._plane
        method, target = head.pseudo.get(":method", b""), head.pseudo.get(":path", b"")
        path, separator, query = target.partition(b"?")
        shape, headers = ErrorShape.OPENAI, head.headers
        try:
            path = self._processor_path(path)
            record.path = name = path.decode("latin-1")
            endpoint = ENDPOINTS.get(name) if method == b"POST" else None
            if endpoint is not None:
                shape = endpoint.errors
                return await plane.pick(endpoint, body, path + separator + query, headers, record, client)
            if name.startswith("/v1/responses/") and (response_id := _stored_id(method, name)):
                shape, record.path = ErrorShape.RESPONSES, "/v1/responses/{id}"
                return await plane.pick_stored(response_id, method, body, target, headers, record, client)
            record.path = "-"  # the client's own text would be a new value each time
            if method in (b"GET", b"HEAD") and (name in _CONTROL or name.startswith("/v1/models/")):
                own_answer = await self._processor.control(method, path, query, headers)
                client.start(own_answer.status, own_answer.headers)
                client.finish(own_answer.body)
                return None
            raise NotFound(f"There is no {method.decode('latin-1')} {name} here.")
        except GatewayError as error:
            plane.continue_trace(record, b"traceparent: %b\r\n" % header(headers, b"traceparent"))
            plane.refuse(record, error, client, shape)
        except Exception:  # noqa: BLE001 - `report_defect` logs it; other requests are not affected
            plane.report_defect(record, client, shape)
        return None

    def _processor_path(self, path: bytes) -> bytes:
        root = self._processor.root_path
        if root and path.startswith(root + b"/"):
            path = path[len(root) :]
        if may_mislead(path):
            raise InvalidRequest(
                "A path must not have `.` or `..` as a segment, nor an encoded slash or NUL."
            )
        return path

    async def _picked(self, pick: Pick, client: PickAnswer, has_trailers: bool, reading: Any) -> str:
        """Send the pick, and with one filter follow the request to its end."""
        plane, request, processor = self._plane, pick.request, self._processor
        removed = [name.decode("latin-1") for name in plane.hidden_fields]
        added: HeaderList = []
        pick_id = b""
        if self._is_watched:
            pick_id = processor.expect(request)
            added.append((PICK_ID.encode(), pick_id))
        client.on_cut = lambda: reading.cancel()  # the read of that moment
        try:
            await self._write(picked(pick.destination, [*pick.headers, *added], removed, request.described()))
            if self._has_body:
                for piece in request_pieces(pick.body, has_trailers=has_trailers):
                    await self._write(piece)
            while (message := await reading) is not grpc.aio.EOF:
                reading = asyncio.ensure_future(self._read())
                for reply in self._follow(request, message):
                    await self._write(reply)
            return "ended" if request.has_answer or self._is_watched else "left"
        finally:
            reading.cancel()
            if self._is_watched:
                processor.on_sent(pick_id)
            else:
                request.finished()

    def _follow(self, request: PickedRequest, message: Any) -> Iterable[Any]:
        """The messages that answer a message about the worker's answer."""
        match message.WhichOneof("request"):
            case "response_headers":
                return (response_head(request.answered(read_answer(message))),)
            case "response_body":
                self._plane.metrics.epp_response_bodies.labels().inc()
                return response_pieces(message)
            case "response_trailers":
                return (response_trailers(),)
            case _:
                return ()

    async def _refuse(self, record: Record, error: GatewayError, shape: ErrorShape) -> str:
        client = self._processor.answer(None)
        self._plane.refuse(record, error, client, shape)
        outcome = client.outcome.result()
        assert isinstance(outcome, OwnAnswer)
        await self._write(refused(*outcome))
        return "refused"


def _stored_id(method: bytes, path: str) -> str:
    """The id in the path of a request for a stored response; "" for another request."""
    name, _, action = path.removeprefix("/v1/responses/").partition("/")
    if (method in (b"GET", b"DELETE") and not action) or (method == b"POST" and action == "cancel"):
        return name
    return ""


class Health:
    """The health of the picker's gRPC services, for Envoy and for Kubernetes' probes."""

    def __init__(self, plane: PickerPlane, reasons_not_ready: Callable[[], Sequence[str]]) -> None:
        self._admission = plane.entry_control
        self._reasons = reasons_not_ready

    async def check(self, request: Any, context: Any) -> Any:
        """`liveness` is always serving; `readiness` is `/ready`. The service itself, and "", serve until the
        shutdown begins: without a worker clients get the picker's own 503."""
        is_serving = True
        match request.service:
            case "liveness":
                pass
            case "readiness":
                is_serving = not self._admission.is_shutting_down and not self._reasons()
            case "" | "envoy.service.ext_proc.v3.ExternalProcessor":
                is_serving = not self._admission.is_shutting_down
            case _:
                await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if is_serving else status.NOT_SERVING)


class Listener:
    """The gRPC server of a picker. Mutable: `start` and `close`, once each."""

    def __init__(
        self,
        processor: ExternalProcessor,
        health: Health,
        endpoints: Endpoints,
        host: str,
        port: int,
        tls: ServerTlsOptions,
    ) -> None:
        self.port = port
        self._processor = processor
        self._health = health
        self._endpoints = endpoints
        self._host = host
        self._tls = tls
        self._server: Any = None
        self._resolving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound or a certificate cannot be used."""
        largest = self._processor.plane.max_body_bytes + 1024 * 1024
        self._server = server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", min(largest, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                # Envoy may ping more often than gRPC permits by default.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE,
                    {
                        "Process": grpc.stream_stream_rpc_method_handler(
                            self._processor.process,
                            pb.ProcessingRequest.FromString,
                            pb.ProcessingResponse.SerializeToString,
                        )
                    },
                ),
                grpc.method_handlers_generic_handler(
                    "grpc.health.v1.Health",
                    {
                        "Check": grpc.unary_unary_rpc_method_handler(
                            self._health.check,
                            health_pb2.HealthCheckRequest.FromString,
                            health_pb2.HealthCheckResponse.SerializeToString,
                        )
                    },
                ),
            )
        )
        host = f"[{self._host}]" if ":" in self._host else self._host
        address = f"{host}:{self.port}"
        try:
            if self._tls.is_on:
                self.port = server.add_secure_port(address, await asyncio.to_thread(credentials, self._tls))
            else:
                self.port = server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(
                "server.port", f"cannot listen on {address} (change it with --port, server.host with --host)"
            ) from None
        self._resolving = asyncio.create_task(self._endpoints.run(), name="addresses of workers")
        await server.start()
        log.info("the endpoint picker listens on %s:%d (gRPC%s)", host, self.port, ", TLS" * self._tls.is_on)

    async def close(self, within_s: float, interrupt: asyncio.Event) -> None:
        """Accept no more streams, wait for those whose end would end an answer, and stop.

        When `interrupt` is set, it is cleared, and the open requests are cut.
        """
        stopping = asyncio.create_task(self._server.stop(within_s + _STOP_GRACE_S))
        draining = asyncio.create_task(self._processor.drained(within_s))
        interrupted = asyncio.create_task(interrupt.wait())
        try:
            await asyncio.wait({draining, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                interrupt.clear()
                self._processor.plane.entry_control.cut()
            await draining
            await self._server.stop(_STOP_GRACE_S)
        finally:
            tasks = [stopping, draining, interrupted, *filter(None, [self._resolving])]
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def credentials(tls: ServerTlsOptions) -> Any:
    """The certificate of `server.tls` for gRPC; changed files are used for new connections. Blocks.

    Raises ConfigError if a file cannot be read.
    """
    seen = signatures(tls.files)
    needs_client = tls.client_ca_file is not None

    def configuration() -> Any:
        assert tls.key_file is not None
        assert tls.cert_file is not None
        for file in tls.files:
            if problem := writers_problem(file):
                raise ConfigError("server.tls", problem)
        authorities = tls.client_ca_file.read_bytes() if needs_client and tls.client_ca_file else None
        pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)

    def changed() -> Any:
        """Called by gRPC for each new connection, in a thread of its own; None keeps the certificate."""
        nonlocal seen
        now: tuple[Signature | None, ...] = signatures(tls.files)
        if now == seen:
            return None
        seen = now
        try:
            return configuration()
        except (OSError, ConfigError) as error:
            log.error("the changed TLS files cannot be used, the old ones stay in use: %s", error)
            return None

    try:
        return grpc.dynamic_ssl_server_credentials(configuration(), changed, needs_client)
    except OSError as error:
        raise ConfigError("server.tls", f"cannot read {error.filename}: {error.strerror}") from error
