"""One HTTP exchange at the simulated worker, on bare ASGI: thousands of streams have to be cheap."""

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
    """What vLLM 0.32 answers when it refuses: its type words and codes, not OpenAI's."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    @classmethod
    def invalid(cls, message: str, param: str | None = None) -> ApiError:
        """The engine's own refusal of a value."""
        return cls(400, "BadRequestError", message, param)

    @classmethod
    def validation(cls, kind: str, loc: str, message: str) -> ApiError:
        """A body that is not of the endpoint's form."""
        detail = {"type": kind, "loc": loc, "msg": message}
        return cls(400, "Bad Request", f"1 validation error:\n  {detail}", loc)

    @classmethod
    def not_found(cls, message: str, param: str | None = None) -> ApiError:
        return cls(404, "NotFoundError", message, param)

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        }


class Gone(Exception):
    """The client left, or a fault ends the exchange here; nobody is told."""


class Call:
    """A request whose body was read, and the answer to it. Mutable: what was sent so far.

    `reset_after` and `hang_after` are faults: how many chunks may go out before the connection breaks or
    nothing comes any more (None: never).
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
        """First value of a header, given in lower case."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def json(self) -> dict[str, Any]:
        """The body as an object. Raises `ApiError` in vLLM's words."""
        value = self.json_value()
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise ApiError.validation("model_attributes_type", "body", message)
        return value

    def json_value(self) -> Any:
        """The body as whatever JSON it is. Raises `ApiError`."""
        kind = (self.header(b"content-type") or "").split(";")[0].strip().lower()
        if kind != "application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, "Bad Request", message)
        try:
            return _decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            # The engine parses with Python's json, which takes NaN, UTF-16 and more.
            try:
                return json.loads(self.body)
            except (ValueError, RecursionError) as exc:
                raise ApiError.validation("json_invalid", "body", f"JSON decode error: {exc}") from exc

    async def respond(self, value: Any, status: int = 200) -> None:
        """Answer with JSON, or with bytes as they are."""
        body = value if isinstance(value, bytes) else _encode(value)
        await self.respond_raw(body, status, [JSON])

    async def respond_error(self, error: ApiError, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Answer in vLLM's error shape."""
        await self.respond_raw(_encode(error.body()), error.status, [JSON, *(headers or [])])

    async def respond_raw(self, body: bytes, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self.start(status, headers)
        await self._pass(len(body) and 1)
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head; for streams."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes, count: int = 1) -> None:
        """Send `count` events' bytes; the faults count events."""
        await self._pass(count)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def gone(self) -> None:
        """Returns when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _pass(self, count: int) -> None:
        if self.reset_after is not None and self._chunks >= self.reset_after:
            self.on_reset()
            raise Gone
        if self.hang_after is not None and self._chunks >= self.hang_after:
            await self.gone()
            raise Gone
        self._chunks += count
