"""Bounds of the answers that the gateway asks for itself: probes, lists, key documents, status pages.

An answer that is relayed to a client does not pass here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

import httpx

from kvroute.lru import Lru

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 16 << 20
"""Default limit of one answer: the token ids of two million tokens as JSON."""
LIMIT: Final = "max_answer_bytes"
"""Extension of a request (httpx `extensions`): a limit of its own, in bytes."""
_PLACES_KEPT: Final = 1024


class AnswerRefused(httpx.RemoteProtocolError):
    """An answer is too large or encoded. `reason` is `size` or `encoding`."""

    def __init__(self, reason: str, message: str, request: httpx.Request) -> None:
        super().__init__(message, request=request)
        self.reason = reason


class BoundedTransport(httpx.AsyncBaseTransport):
    """An httpx transport that asks for unencoded answers and refuses encoded and long ones.

    The bytes on the wire are therefore those that are held. A refused answer ends its connection, raises
    AnswerRefused where the answer is read, calls `on_refused` with the reason, and is logged once for each
    place until that place gives a usable answer. Owns `inner`.
    """

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        max_bytes: int = MAX_ANSWER_BYTES,
        on_refused: Callable[[str], None] | None = None,
    ) -> None:
        self._inner = inner
        self._max_bytes = max_bytes
        self._on_refused = on_refused
        self._logged = Lru[tuple[str, int | None, str], bool](_PLACES_KEPT)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx's exceptions, and AnswerRefused for a head that announces too much."""
        request.headers["accept-encoding"] = "identity"
        limit = int(request.extensions.get(LIMIT, self._max_bytes))
        response = await self._inner.handle_async_request(request)
        encoding = response.headers.get("content-encoding", "").strip().lower()
        length = response.headers.get("content-length", "")
        error = None
        if encoding not in ("", "identity"):
            error = self._refuse(request, "encoding", "the answer is compressed, which was not asked for")
        elif length.isdecimal() and (len(length) > 15 or int(length) > limit):
            error = self._refuse(request, "size", f"the answer is longer than {limit} bytes")
        if error is not None:
            await response.aclose()
            raise error
        assert isinstance(response.stream, httpx.AsyncByteStream)  # that of an asynchronous transport
        response.stream = _BoundedStream(response.stream, request, limit, self)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()

    def ended(self, request: httpx.Request) -> None:
        """A whole answer came: the next refusal from this place is logged again."""
        if len(self._logged):
            self._logged.pop(_target_of(request))

    def too_long(self, request: httpx.Request, limit: int) -> AnswerRefused:
        """The error for a body that has exceeded `limit` bytes."""
        return self._refuse(request, "size", f"the answer is longer than {limit} bytes")

    def _refuse(self, request: httpx.Request, reason: str, text: str) -> AnswerRefused:
        if self._on_refused is not None:
            self._on_refused(reason)
        target = _target_of(request)
        if target not in self._logged:
            self._logged.put(target, True)
            shown = request.url.copy_with(query=None, username=None, password=None)
            log.warning("an answer from %s is refused: %s", shown, text)
        return AnswerRefused(reason, text, request)


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(
        self, inner: httpx.AsyncByteStream, request: httpx.Request, limit: int, owner: BoundedTransport
    ) -> None:
        self._inner = inner
        self._request = request
        self._limit = limit
        self._owner = owner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._inner:
            read += len(chunk)
            if read > self._limit:
                raise self._owner.too_long(self._request, self._limit)
            yield chunk
        self._owner.ended(self._request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _target_of(request: httpx.Request) -> tuple[str, int | None, str]:
    return request.url.host, request.url.port, request.url.path
