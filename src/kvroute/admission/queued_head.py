"""The head of an event stream whose request still waits in the queue (`streams.head_while_queued`).

Its client then has 200 and an event stream. What comes later must fit that: a worker's stream follows behind
a comment that names the worker, and everything else becomes one error event.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from kvroute.metrics import Metrics
from kvroute.openai.endpoints import ErrorShape
from kvroute.openai.headers import HeaderList
from kvroute.openai.request import InferenceRequest
from kvroute.request.downstream import Forwarding
from kvroute.request.failures import late_error_event
from kvroute.request.record import Record
from kvroute.request.streams import KEEP_ALIVE, StreamWaits, answers, is_readable

_CONTENT_TYPE = b"content-type: text/event-stream; charset=utf-8\r\n"
_is_event_stream = re.compile(rb"(?:^|\n)content-type:[ \t]*text/event-stream", re.IGNORECASE).search
_MAX_ERROR_BYTES = 65_536


def may_have_queued_head(request: InferenceRequest) -> bool:
    """Whether the answer to `request`, if it is no error, is an event stream."""
    # Bodies for /invocations may be those of endpoints that stream nothing.
    endpoint = request.endpoint
    return request.stream and bool(endpoint.limits) and not endpoint.is_sagemaker


class QueuedHead(Forwarding):
    """The client of a request that waits: sends the head when it is due, then comments until the answer.

    If the answer comes before the head is due, it is passed on unchanged. Mutable: by the exchange's calls,
    and its timer.
    """

    _shape: ErrorShape
    _record: Record
    _waits: StreamWaits
    _metrics: Metrics
    _timer: asyncio.TimerHandle | None = None
    _is_sent: bool = False
    """The client has got the head, and awaits the answer."""
    _error_status: int = 0
    """The status of the answer that becomes an error event; 0 for other answers."""
    _error_body: bytes = b""

    def wait(self, waited_s: float) -> None:
        """The request enters the queue, `waited_s` after it has arrived."""
        left_s = max(0.0, self._waits.head_wait_s - waited_s)
        self._timer = asyncio.get_running_loop().call_later(left_s, self._send_head)

    def left_queue(self) -> None:
        """The request is sent to a worker. A head that has not been sent is now that of the worker."""
        if not self._is_sent:
            self._stop()

    def start(self, status: int, headers: HeaderList) -> None:
        if self._takes_head(status, b""):
            self._client.start(status, headers)

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        if self._takes_head(status, fields):
            self._client.start_relayed(status, fields, is_sized=is_sized)

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        if self._takes_head(status, fields):
            self._client.answer(status, fields, body, is_sized)
        else:
            self.finish(body)

    def write(self, chunk: bytes) -> None:
        if not self._error_status:
            self._client.write(chunk)
        elif len(self._error_body) < _MAX_ERROR_BYTES:
            self._error_body += chunk

    def framed_writer(self) -> Callable[[bytes], None] | None:
        return None if self._error_status else self._client.framed_writer()

    def finish(self, chunk: bytes = b"") -> None:
        self._stop()
        status = self._error_status
        if status:
            chunk = late_error_event(status, self._error_body + chunk, self._shape)
        self._client.finish(chunk)

    def cut(self) -> None:
        if self._error_status and self._record.ended_by != "client":
            self.finish()  # the body of the error broke off
            return
        if self._is_sent:
            self._count("client")
        self._stop()
        self._client.cut()

    def _send_head(self) -> None:
        record = self._record
        self._is_sent = record.queued_head = record.streamed = True
        fields = b"%bx-request-id: %b\r\n" % (_CONTENT_TYPE, record.request_id)
        self._client.start_relayed(200, fields, is_sized=False)
        self._client.flush_head()
        self._await_answer()

    def _await_answer(self) -> None:
        keep_alive_s = self._waits.keep_alive_s
        self._timer = None
        if keep_alive_s:
            self._timer = asyncio.get_running_loop().call_later(keep_alive_s, self._keep_alive)

    def _keep_alive(self) -> None:
        if not self._client.is_paused:
            self._client.write(KEEP_ALIVE)
        self._await_answer()

    def _takes_head(self, status: int, fields: bytes) -> bool:
        """The head of the answer has come. Whether it goes to the client, which has none yet."""
        self._stop()
        if not self._is_sent:
            return True
        self._is_sent = False
        if status == 200 and _is_event_stream(fields) and is_readable(fields):
            self._count("answer")
            self._client.write(answers(self._record.worker))
        else:
            self._count("error")
            self._error_status = status
        return False

    def _count(self, end: str) -> None:
        self._metrics.queue_heads.labels(end).inc()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
