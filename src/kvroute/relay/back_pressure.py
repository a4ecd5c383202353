"""Back-pressure of workers: answers that say that the worker is full now, which is no failure of it.

A request that gets such an answer was not computed, so another worker can have it. It spends no retry
budget: a refusal costs the worker less than a millisecond. `RetryOptions.busy_workers` bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from kvroute.fleet.load import WorkerLoad
from kvroute.upstream.headers import RawHeaders

STATUSES: Final = (429, 503)
"""Statuses of answers that may be back-pressure."""

_TEXTS: Final = (
    b"The engine is currently busy and cannot accept new requests.",
    b"The engine has reached its prefill token backlog limit.",
)
"""The messages of vLLM's `QueueOverflowError` (--max-num-queued-reqs) and `MaxQueuedTokensError`
(--max-num-queued-tokens): status 503 without Retry-After (vLLM 0.32, exceptions.py)."""
_MAX_BODY_BYTES: Final = 4096
"""vLLM's answers have 200. Of a longer one no more is read."""
_MAX_RETRY_AFTER_S: Final = 3600

PENDING: Final = -1
"""`retry_after_of` needs more of the answer's body."""


def retry_after_of(status: int, headers: RawHeaders, body: bytes, *, is_over: bool) -> int | None:
    """What an answer with one of `STATUSES` says about the time until the worker has room, in seconds.

    0: the worker is full and names no time. None: the answer is no back-pressure, so a 503 is a failure.
    `PENDING`: the rest of the body decides. `body` is what has arrived; `is_over`: that is all.
    """
    for name, value in headers:
        if len(name) == 11 and name.lower() == b"retry-after":
            # A date (RFC 9110 10.2.3) names a time of the worker's clock, which may differ from this one.
            seconds = value.strip()
            return min(int(seconds), _MAX_RETRY_AFTER_S) if seconds.isdigit() and len(seconds) < 10 else 0
    if status == 429:
        return 0
    if any(text in body for text in _TEXTS):
        return 0
    return None if is_over or len(body) > _MAX_BODY_BYTES else PENDING


def estimated_retry_after_s(loads: Iterable[WorkerLoad]) -> int:
    """Seconds until the first of these full workers has probably finished one of its requests: 1 to 60."""
    waits = [load.residence_s / max(1, load.in_flight) for load in loads if load.residence_s]
    return min(60, max(1, math.ceil(min(waits, default=1.0))))
