"""The completion tokens of answers: what `usage` says, or an estimate for answers without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.openai.bounded import UNREADABLE
from kvroute.openai.endpoints import ENDPOINTS
from kvroute.request.downstream import Downstream, Forwarding, field_pairs
from kvroute.request.plan import RequestPlan

_BYTES_PER_TOKEN = 4
_EVENT = b"data: {"

_DEFAULT_TOKEN_S = 0.02
"""Time of a token while no answer of the model is known: 50 tokens a second."""
_MEMORY = 0.98
"""Each answer multiplies the weight of all earlier ones by this factor, so about 50 answers count."""
_MAX_MODELS = 4096
_MAX_READ_BYTES = 4 << 20
"""In larger bodies no limit of the answer's length is looked for: it takes about 1 ms for each MB."""


class Pace:
    """How fast answers have been generated, by model: from sending the request to the end of the answer.

    Mutable: `learn`, at the end of answers that are metered; at most 4096 models.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        """Decayed sums of seconds and of tokens."""

    def learn(self, model: str, seconds: float, tokens: int) -> None:
        """An answer of `tokens` tokens took `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        sums = self._sums
        if model not in sums and len(sums) >= _MAX_MODELS:
            sums.clear()
        all_seconds, all_tokens = sums.get(model, (0.0, 0.0))
        sums[model] = _MEMORY * all_seconds + seconds, _MEMORY * all_tokens + tokens

    def tokens_in(self, model: str, seconds: float) -> int:
        """The tokens that an answer probably has after `seconds`."""
        all_seconds, all_tokens = self._sums.get(model, (_DEFAULT_TOKEN_S, 1.0))
        return int(seconds * all_tokens / all_seconds)


class _Lengths(Struct, gc=False):
    """The members of a body that limit the length of its answers."""

    max_completion_tokens: Any = None
    max_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None


_decode_lengths = msgspec.json.Decoder(_Lengths).decode


def longest_answer(plan: RequestPlan) -> int | None:
    """The most tokens that the request lets the worker generate; None if it sets no limit."""
    if len(plan.body) > _MAX_READ_BYTES:
        return None
    try:
        lengths = _decode_lengths(plan.body)
    except UNREADABLE:
        return None
    given = (lengths.max_completion_tokens, lengths.max_tokens, lengths.max_output_tokens)
    most = next((each for each in given if isinstance(each, int) and each > 0), None)
    choices = lengths.n if isinstance(lengths.n, int) and lengths.n > 0 else 1
    return None if most is None else most * choices * max(1, len(plan.prompts))


class Meter(Forwarding):
    """Passes an answer on to a client and counts what its completion tokens are estimated from.

    It is used only where tokens are counted, so other requests do not pay for it. Mutable, by the exchange's
    calls.
    """

    _plan: RequestPlan
    _pace: Pace
    _sent: float
    """When the request was sent (`Clock.now`)."""
    _generates: bool
    """Whether the endpoint generates text."""
    _is_started: bool = False
    _fields: bytes = b""
    """The header lines of an answer that comes in parts and has a Content-Length."""
    _events: int = 0
    _bytes: int = 0
    _whole: bytes = b""
    """An answer that came at once; it is counted only if that is needed."""

    @classmethod
    def of(cls, client: Downstream, plan: RequestPlan, path: str, pace: Pace, sent: float) -> Meter:
        """The meter of a request to the endpoint `path`."""
        endpoint = ENDPOINTS.get(path)
        return cls(client, plan, pace, sent, endpoint is not None and bool(endpoint.limits))

    def start_relayed(self, status: int, fields: bytes, *, is_sized: bool) -> None:
        self._is_started = True
        if is_sized:
            self._fields = fields
        self._client.start_relayed(status, fields, is_sized=is_sized)

    def answer(self, status: int, fields: bytes, body: bytes, is_sized: bool) -> None:
        self._is_started = True
        self._whole = body
        self._client.answer(status, fields, body, is_sized)

    def write(self, chunk: bytes) -> None:
        self._count(chunk)
        self._client.write(chunk)

    def framed_writer(self) -> Callable[[bytes], None] | None:
        write = self._client.framed_writer()
        if write is None:
            return None

        def counted(framed: bytes) -> None:
            self._events += framed.count(_EVENT)
            write(framed)

        return counted

    def finish(self, chunk: bytes = b"") -> None:
        if chunk:
            self._count(chunk)
        self._client.finish(chunk)

    def reported(self, completion_tokens: int, now: float) -> None:
        """The answer has ended, and its `usage` says how many tokens it has."""
        self._pace.learn(self._plan.model, now - self._sent, completion_tokens)

    def estimate(self, now: float) -> int:
        """The completion tokens of an answer without `usage`.

        One for each event of a stream, or for every four bytes of another answer. If the client has left
        before an answer that is not streamed, the worker has generated without anything to be seen of it:
        then as many as the model's answers have after this time, and at most what the request permits.
        """
        if not self._is_started:
            if self._plan.query.streamed or not self._generates:
                return 0
            tokens, most = (
                self._pace.tokens_in(self._plan.model, now - self._sent),
                longest_answer(self._plan),
            )
            return tokens if most is None else min(tokens, most)
        self._count(self._whole)
        self._whole = b""
        return self._events or max(self._bytes, self._announced_bytes()) // _BYTES_PER_TOKEN

    def _announced_bytes(self) -> int:
        """The length of an answer that comes in parts: the worker has generated all of it."""
        length = dict(field_pairs(self._fields)).get(b"content-length", b"")
        return int(length) if length.isdigit() else 0

    def _count(self, chunk: bytes) -> None:
        self._events += chunk.count(_EVENT)
        self._bytes += len(chunk)
