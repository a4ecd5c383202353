"""The simulated worker as an ASGI application: reads a request, applies faults, finds its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from kvroute.sim import control
from kvroute.sim.chat import chat_completions
from kvroute.sim.completions import completions
from kvroute.sim.faults import Fault
from kvroute.sim.http import ApiError, Call, Gone, Receive, Scope, Send
from kvroute.sim.messages import count_tokens, create_message
from kvroute.sim.pooling import classify, embeddings, pooling, rerank, score
from kvroute.sim.responses import cancel_response, create_response, retrieve_response
from kvroute.sim.text import detokenize, invocations, tokenize, transcriptions, translations
from kvroute.sim.worker import ReceivedRequest, Worker

Handler = Callable[[Call, Worker], Awaitable[None]]

ROUTES: Final[Mapping[tuple[str, str], Handler]] = {
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/responses"): create_response,
    ("POST", "/v1/messages"): create_message,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/tokenize"): tokenize,
    ("POST", "/detokenize"): detokenize,
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
    ("GET", "/metrics"): control.metrics,
    ("GET", "/kv_event_sources"): control.kv_event_sources,
    ("POST", "/reset_prefix_cache"): control.reset_prefix_cache,
    ("GET", "/sim/faults"): control.faults,
    ("POST", "/sim/faults"): control.faults,
    ("DELETE", "/sim/faults"): control.faults,
    ("GET", "/sim/requests"): control.requests,
    ("DELETE", "/sim/requests"): control.forget_requests,
}
_PATHS: Final = frozenset(path for _, path in ROUTES)


class SimApp:
    """ASGI callable for HTTP. `reset` breaks the connection that a scope came in on."""

    def __init__(self, worker: Worker, reset: Callable[[Scope], None]) -> None:
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
            for fault in self.worker.faults.for_request(call.path):
                await self._apply(fault, call)
            await self._handle(call)
        except ApiError as error:
            if call.started:
                self._reset(scope)
            else:
                await call.respond_error(error)
        except Gone:
            pass

    async def _handle(self, call: Call) -> None:
        handler = ROUTES.get((call.method, call.path)) or _stored_response(call)
        if handler is None:
            known = call.path in _PATHS
            status, phrase = (405, "Method Not Allowed") if known else (404, "Not Found")
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
                raise Gone
            case "slow":
                await self.worker.clock.sleep(fault.delay_s)
            case "hang" if fault.after_chunks is None:
                await call.gone()
                raise Gone
            case "reset" if fault.after_chunks is None:
                self._reset(call.scope)
                raise Gone
            case "hang":
                call.hang_after = fault.after_chunks
            case "reset":
                call.reset_after = fault.after_chunks


def _stored_response(call: Call) -> Handler | None:
    """The handlers whose path carries a response's id."""
    if not call.path.startswith("/v1/responses/"):
        return None
    if call.method == "POST" and call.path.endswith("/cancel"):
        return cancel_response
    return retrieve_response if call.method == "GET" else None


async def _read(receive: Receive) -> bytes | None:
    """The whole body, None when the client left while sending it."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
