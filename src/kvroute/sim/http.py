"""One HTTP exchange of the simulated worker, on plain ASGI so that thousands of streams are cheap."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode

JSON = (b"content-type", b"application/json")
SSE = (b"content-type", b"text/event-stream; charset=utf-8")


class ApiError(Exception):
    """An error answer of vLLM 0.32, with vLLM's error types and codes instead of OpenAI's."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    @classmethod
    def invalid(cls, message: str, param: str | None = None) -> ApiError:
        """A value that the engine refuses."""
        return cls(400, "BadRequestError", message, param)

    @classmethod
    def validation(cls, kind: str, loc: str, message: str) -> ApiError:
        """A body that does not have the endpoint's form."""
        detail = {"type": kind, "loc": loc, "msg": message}
        return cls(400, "Bad Request", f"1 validation error:\n  {detail}", loc)

    @classmethod
    def not_found(cls, message: str, param: str | None = None) -> ApiError:
        return cls(404, "NotFoundError", message, param)

    @classmethod
    def unavailable(cls, message: str) -> ApiError:
        """The engine refuses the request now; vLLM sends no Retry-After."""
        return cls(503, "Service Unavailable", message)

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        }


class ExchangeEnded(Exception):
    """The client left or a fault ended the exchange. There is nothing more to send."""


class Call:
    """A request with its whole body, and the answer. Mutable: the state of the answer.

    `reset_after` and `hang_after` are faults: the number of chunks after which the connection is reset, or
    after which the answer stops (None: never).
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        self.scope = scope
        self.body = body
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.started = False
        self.reset_after: int | None = None
        self.hang_after: int | None = None
        self.on_reset: Callable[[], None] = lambda: None
        self._receive = receive
        self._send = send
        self._chunks = 0

    def header(self, name: bytes) -> str | None:
        """First value of a header; `name` in lower case."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises `ApiError` with vLLM's message."""
        value = self.json_value()
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise ApiError.validation("model_attributes_type", "body", message)
        return value

    def json_value(self) -> Any:
        """The body as any JSON value. Raises `ApiError`."""
        kind = (self.header(b"content-type") or "").split(";")[0].strip().lower()
        if kind != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, "Bad Request", message)
        try:
            return _decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            # vLLM parses with Python's json, which also accepts NaN, UTF-16 and more.
            try:
                return json.loads(self.body)
            except (ValueError, RecursionError) as exc:
                raise ApiError.validation("json_invalid", "body", f"JSON decode error: {exc}") from exc

    async def respond(self, value: Any, status: int = 200) -> None:
        """Answer with a value as JSON; bytes are sent unchanged."""
        body = value if isinstance(value, bytes) else _encode(value)
        await self.respond_raw(body, status, [JSON])

    async def respond_error(self, error: ApiError, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Answer with vLLM's error object."""
        await self.respond_raw(_encode(error.body()), error.status, [JSON, *(headers or [])])

    async def respond_raw(self, body: bytes, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.start(status, headers)
        await self._apply_faults(len(body) and 1)
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head of a streamed answer."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes, count: int = 1) -> None:
        """Send the bytes of `count` events. Faults count events."""
        await self._apply_faults(count)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def wait_for_disconnect(self) -> None:
        """Return when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _apply_faults(self, count: int) -> None:
        if self.reset_after is not None and self._chunks >= self.reset_after:
            self.on_reset()
            raise ExchangeEnded
        if self.hang_after is not None and self._chunks >= self.hang_after:
            await self.wait_for_disconnect()
            raise ExchangeEnded
        self._chunks += count
