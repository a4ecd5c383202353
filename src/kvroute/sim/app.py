"""The simulated worker as an ASGI application: routes, faults, tokenization, audio, and the running
server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvroute.clock import Clock, SystemClock
from kvroute.sim import control
from kvroute.sim.completions import chat_completions, completions
from kvroute.sim.engine import SimEngine
from kvroute.sim.http import SSE, ApiError, Call, ExchangeEnded, Receive, Scope, Send
from kvroute.sim.metrics import metrics
from kvroute.sim.options import SimOptions
from kvroute.sim.other_apis import (
    cancel_response,
    count_tokens,
    create_message,
    create_response,
    retrieve_response,
)
from kvroute.sim.pooling import classify, embeddings, pooling, rerank, score
from kvroute.sim.prompts import VOCABULARY, chat_tokens, decode, encode, messages_of, token_bytes
from kvroute.sim.publisher import EventPublisher, Fault
from kvroute.sim.rendering import render_chat, render_message, render_response, render_texts
from kvroute.sim.sagemaker import answer_session, name_adapter
from kvroute.sim.worker import ReceivedRequest, SimWorker, read_blocks

_json = msgspec.json.Encoder().encode


async def tokenize(call: Call, worker: SimWorker) -> None:
    """POST /tokenize: the token ids that the engine computes for a text or a chat."""
    body = call.json()
    worker.model(body)
    if "messages" in body:
        open_end = bool(body.get("continue_final_message"))
        generate = body.get("add_generation_prompt", True) is not False
        ids = chat_tokens(messages_of(body), body.get("tools"), generate=generate, open_end=open_end)
    elif isinstance(body.get("prompt"), str):
        ids = encode(body["prompt"])
    else:
        kind = "string_type" if "prompt" in body else "missing"
        raise ApiError.validation(kind, "body.prompt", "Input should be a valid string")
    shift = worker.options.token_shift
    strings = None
    if body.get("return_token_strs"):
        strings = [token_bytes(token).decode("utf-8", "replace") for token in ids]
    await call.respond(
        {
            "count": len(ids),
            "max_model_len": worker.max_model_len,
            "tokens": [token + shift for token in ids] if shift else list(ids),
            "token_strs": strings,
        }
    )


async def detokenize(call: Call, worker: SimWorker) -> None:
    """POST /detokenize."""
    body = call.json()
    worker.model(body)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < VOCABULARY for token in tokens
    ):
        kind = "missing" if tokens is None else "int_type"
        raise ApiError.validation(kind, "body.tokens", "Input should be a valid integer")
    await call.respond({"prompt": decode(tokens)})


async def transcriptions(call: Call, worker: SimWorker) -> None:
    """POST /v1/audio/transcriptions."""
    await _audio(call, worker, "transcription")


async def translations(call: Call, worker: SimWorker) -> None:
    """POST /v1/audio/translations."""
    await _audio(call, worker, "translation")


async def _audio(call: Call, worker: SimWorker, kind: str) -> None:
    form = _form(call)
    model = worker.model({"model": form["model"].decode("utf-8", "replace")} if "model" in form else {})
    if "file" not in form:
        raise ApiError.validation("missing", "body.file", "Field required")
    text = f"Simulated {kind} of {len(form['file'])} bytes."
    response_format = form.get("response_format", b"json")
    if form.get("stream") in (b"true", b"True", b"1"):
        await _stream_text(call, worker, kind, model, text)
    elif response_format == b"text":
        await call.respond_raw(_json(text), 200, [(b"content-type", b"text/plain; charset=utf-8")])
    elif response_format == b"verbose_json":
        await call.respond({"duration": 1.0, "language": "en", "text": text, "segments": [], "words": None})
    elif kind == "translation":
        await call.respond({"text": text})
    else:
        await call.respond({"text": text, "usage": {"type": "duration", "seconds": 1}})


async def _stream_text(call: Call, worker: SimWorker, kind: str, model: str, text: str) -> None:
    prefix = {"transcription": "trsc-", "translation": "trsl-"}[kind]
    head = {"id": worker.new_id(prefix), "object": f"{kind}.chunk", "created": int(worker.clock.wall())}
    await call.start(200, [SSE])
    words = text.split(" ")
    for position, word in enumerate(words):
        last = position == len(words) - 1
        delta: dict[str, Any] = {"content": word if last else f"{word} "}
        choice = {"delta": delta, "finish_reason": "stop" if last else None}
        await call.chunk(b"data: " + _json({**head, "model": model, "choices": [choice]}) + b"\n\n")
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


def _form(call: Call) -> dict[str, bytes]:
    """The contents of a multipart body's parts, by name."""
    content_type = call.header(b"content-type") or ""
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise ApiError.validation("missing", "body.file", "Field required")
    boundary = ""
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name.lower() == "boundary":
            boundary = value.strip('"')
    if not boundary:
        raise ApiError(400, "Bad Request", "Missing boundary in multipart.")
    form: dict[str, bytes] = {}
    for section in (b"\r\n" + call.body).split(b"\r\n--" + boundary.encode("latin-1"))[1:]:
        head, separator, content = section.partition(b"\r\n\r\n")
        if not separator:
            continue
        for field in head.decode("utf-8", "replace").split(";"):
            key, _, value = field.strip().partition("=")
            if key.lower() == "name":
                form[value.split("\r\n")[0].strip('"')] = content
    return form


async def invocations(call: Call, worker: SimWorker) -> None:
    """POST /invocations: call the first endpoint that the body fits, in vLLM's order."""
    if await answer_session(call, worker.sessions):
        return
    body = name_adapter(call)
    for field, handler in (
        ("messages", chat_completions),
        ("prompt", completions),
        ("input", embeddings),
        ("query", rerank),
        ("text_1", score),
        ("queries", score),
        ("data_1", score),
    ):
        if field in body:
            await handler(call, worker)
            return
    raise ApiError.invalid("Cannot find suitable handler for request.")


Handler = Callable[[Call, SimWorker], Awaitable[None]]

ROUTES: Final[Mapping[tuple[str, str], Handler]] = {
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/responses"): create_response,
    ("POST", "/v1/messages"): create_message,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
    ("POST", "/v1/chat/completions/render"): render_chat,
    ("POST", "/v1/completions/render"): render_texts,
    ("POST", "/v1/messages/render"): render_message,
    ("POST", "/v1/responses/render"): render_response,
    ("POST", "/rerank"): rerank,
    ("POST", "/v1/rerank"): rerank,
    ("POST", "/v2/rerank"): rerank,
    ("POST", "/score"): score,
    ("POST", "/v1/score"): score,
    ("POST", "/classify"): classify,
    ("POST", "/pooling"): pooling,
    ("POST", "/v1/audio/transcriptions"): transcriptions,
    ("POST", "/v1/audio/translations"): translations,
    ("POST", "/invocations"): invocations,
    ("GET", "/v1/models"): control.models,
    ("GET", "/health"): control.health,
    ("GET", "/ping"): control.health,
    ("POST", "/ping"): control.health,
    ("GET", "/version"): control.version,
    ("GET", "/metrics"): metrics,
    ("GET", "/kv_event_sources"): control.kv_event_sources,
    ("POST", "/reset_prefix_cache"): control.reset_prefix_cache,
    ("POST", "/sleep"): control.sleep,
    ("POST", "/wake_up"): control.wake_up,
    ("GET", "/is_sleeping"): control.is_sleeping,
    ("POST", "/pause"): control.pause,
    ("POST", "/resume"): control.resume,
    ("GET", "/is_paused"): control.is_paused,
    ("GET", "/sim/faults"): control.faults,
    ("POST", "/sim/faults"): control.faults,
    ("DELETE", "/sim/faults"): control.faults,
    ("GET", "/sim/cache"): control.cache,
    ("GET", "/sim/requests"): control.requests,
    ("DELETE", "/sim/requests"): control.clear_requests,
    ("POST", "/sim/kv"): read_blocks,
}
_PATHS: Final = frozenset(path for _, path in ROUTES)


class SimApp:
    """The ASGI application. `reset` resets the connection of a scope, `kill` is `RunningSim.kill`."""

    def __init__(
        self,
        worker: SimWorker,
        reset: Callable[[Scope], None],
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self._kill = kill
        self.worker = worker
        self._reset = reset

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            return
        call = Call(scope, receive, send, body)
        call.on_reset = lambda: self._reset(scope)
        self._record(call)
        try:
            for fault in self.worker.faults.for_request(call.path, call.body):
                await self._apply(fault, call)
            await self._handle(call)
        except ApiError as error:
            if call.started:
                self._reset(scope)
            else:
                await call.respond_error(error)
        except ExchangeEnded:
            pass

    async def _handle(self, call: Call) -> None:
        key = self.worker.options.api_key
        if key and call.path.startswith("/v1") and call.header(b"authorization") != f"Bearer {key}":
            raise ApiError(401, "Unauthorized", "Unauthorized")
        path = "/sim/kv" if call.path.startswith("/sim/kv/") else call.path
        handler = ROUTES.get((call.method, path)) or _stored_response(call)
        if handler is None:
            is_known_path = call.path in _PATHS
            status, phrase = (405, "Method Not Allowed") if is_known_path else (404, "Not Found")
            raise ApiError(status, phrase, phrase)
        await handler(call, self.worker)

    def _record(self, call: Call) -> None:
        if call.path.startswith("/sim/"):
            return
        counters = self.worker.counters
        counters.requests += 1
        counters.by_path[call.path] += 1
        if self.worker.received.maxlen:
            query = call.scope["query_string"]
            target = call.scope["raw_path"].decode("latin-1") + (
                f"?{query.decode('latin-1')}" if query else ""
            )
            self.worker.received.append(ReceivedRequest(call.method, target, call.headers, call.body))

    async def _apply(self, fault: Fault, call: Call) -> None:
        match fault.kind:
            case "status":
                extra = []
                if fault.retry_after_s is not None:
                    extra.append((b"retry-after", str(fault.retry_after_s).encode()))
                await call.respond_error(
                    ApiError(fault.status, "InternalServerError", "Simulated fault."), extra
                )
                raise ExchangeEnded
            case "slow":
                await self.worker.clock.sleep(fault.delay_s)
            case "kill":
                self.worker.note_begun(call)
                await self.worker.clock.sleep(fault.delay_s)
                await self._kill()
                raise ExchangeEnded
            case "bomb":
                await call.respond_raw(_bomb(), 200, [_TEXT, (b"content-encoding", b"gzip")])
                raise ExchangeEnded
            case "endless":
                await _send_without_end(call)
                raise ExchangeEnded
            case "hang" if fault.after_chunks is None:
                await call.wait_for_disconnect()
                raise ExchangeEnded
            case "reset" if fault.after_chunks is None:
                self._reset(call.scope)
                raise ExchangeEnded
            case "hang":
                call.hang_after = fault.after_chunks
            case "reset":
                call.reset_after = fault.after_chunks


_TEXT: Final = (b"content-type", b"text/plain")
_LINES: Final = b"# nothing\n" * 6554
"""64 KiB of comments, which a page of metrics may have."""


def _bomb() -> bytes:
    # A gzip file may have several members, so one of 16 MiB is compressed and repeated.
    return gzip.compress(_LINES * 256) * 64


async def _send_without_end(call: Call) -> None:
    disconnect = asyncio.create_task(call.wait_for_disconnect())
    try:
        await call.start(200, [_TEXT])
        while not disconnect.done():
            await call.chunk(_LINES)
            await asyncio.sleep(0)  # `chunk` waits only while the client reads too little
    finally:
        disconnect.cancel()
        await asyncio.gather(disconnect, return_exceptions=True)


def _stored_response(call: Call) -> Handler | None:
    """The handler of a path with a response's id; None for other paths."""
    if not call.path.startswith("/v1/responses/"):
        return None
    if call.method == "POST" and call.path.endswith("/cancel"):
        return cancel_response
    return retrieve_response if call.method == "GET" else None


async def _read(receive: Receive) -> bytes | None:
    """The whole body; None if the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class RunningSim:
    """A running simulated worker with its listening socket and tasks; `run_sim` creates it. Mutable."""

    # Our own listener serves uvicorn's protocol class: `uvicorn.Server` would poll for its shutdown and
    # replace the process's signal handlers.

    def __init__(self, options: SimOptions, clock: Clock) -> None:
        ranks = range(options.data_parallel_size if options.kv_events else 0)
        self.worker = SimWorker(options, clock, [EventPublisher(options, clock, rank) for rank in ranks])
        self._options = options
        self._state = ServerState()
        self._config = uvicorn.Config(
            SimApp(self.worker, self._reset, self.kill),
            http=HttpToolsProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_keep_alive=600,
        )
        self._config.load()
        self._state.default_headers = self._config.encoded_headers
        self._listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://{self._options.host}:{self.port}"

    @property
    def engine(self) -> SimEngine:
        """The current engine; `restart` replaces it."""
        return self.worker.engine

    async def start(self) -> None:
        """Listen, after a first start on the same port again. Returns when connections are accepted."""
        if not self._tasks:
            self._tasks += [asyncio.create_task(driver.run()) for driver in self.worker.drivers]
            self._tasks += [asyncio.create_task(publisher.serve()) for publisher in self.worker.publishers]
        if self._listener is None:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: HttpToolsProtocol(self._config, self._state, {}),
                host=self._options.host,
                port=self.port or self._options.port,
                backlog=4096,
            )
            self.port = self._listener.sockets[0].getsockname()[1]
            self.worker.address = (self._options.host, self.port)

    async def refuse(self) -> None:
        """Refuse new connections; existing ones continue. `start` listens again."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()

    async def kill(self) -> None:
        """Reset all connections and stop listening, as after SIGKILL. `start` listens again."""
        await self.refuse()
        for protocol in list(self._state.connections):
            _abort(protocol.transport)
        self.worker.restart()

    async def restart(self) -> None:
        """Kill and start again on the same port: empty cache, event numbers from 0, a new start time."""
        await self.kill()
        await self.start()

    async def stop(self) -> None:
        """End the tasks and close the sockets that `start` created."""
        await self.kill()
        tasks = [*self._tasks, *self.worker.tasks]
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, *self._state.tasks, return_exceptions=True)
        self._tasks.clear()
        for publisher in self.worker.publishers:
            publisher.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end  # a defect of the simulator itself: its test must fail

    def _reset(self, scope: Scope) -> None:
        client = tuple(scope["client"]) if scope["client"] else None
        for protocol in list(self._state.connections):
            if isinstance(protocol, HttpToolsProtocol) and protocol.client == client:
                _abort(protocol.transport)


def _abort(transport: asyncio.Transport) -> None:
    """Close with a TCP reset."""
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


@asynccontextmanager
async def run_sim(
    options: SimOptions | None = None, *, clock: Clock | None = None
) -> AsyncIterator[RunningSim]:
    """Run a simulated worker in this event loop until the end of the context."""
    running = RunningSim(options or SimOptions(), clock or SystemClock())
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
