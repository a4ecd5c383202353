"""Requests of death: bodies whose workers were lost while they computed them.

A worker that breaks off without an answer may have been killed by the request. Other workers would be lost
to it in turn, so a request is sent to a few only (`RetryOptions.lost_workers`), and a body that has lost
`LOSSES` workers, in one request or in several, is refused for `RetryOptions.refuse_s` before it is sent.
Workers that leave the fleet or drain do not count.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.errors import NotFound, RequestLostWorkers
from kvroute.fleet.worker import HealthState, Worker
from kvroute.lru import Lru
from kvroute.metrics import Metrics
from kvroute.upstream.options import RetryOptions

log = logging.getLogger(__name__)

LOSSES: Final = 2
"""A body that has lost this many workers is refused."""
_MOST_LOSSES: Final = 8
"""Of one body; further ones are not kept."""
_MAX_BODIES: Final = 1024
"""About 0.5 MB. A worker that is lost may take hundreds of requests with it, each of which has one loss."""
_DIGEST_BYTES: Final = 16


class Loss(Struct, frozen=True, array_like=True, gc=False):
    """A worker was lost while it had a request with this body."""

    digest: bytes
    """Of key, target and body: `digest_of`."""
    id: int
    """Random: a loss that is reported twice counts once."""
    key: str
    model: str
    body_bytes: int
    worker: str


def digest_of(key: str, target: bytes, body: bytes | memoryview) -> bytes:
    """16 bytes that stand for a body of a client's key at an endpoint. About 1 ms for each MB."""
    hashed = blake2b(b"%b\0%b\0" % (key.encode(), target), digest_size=_DIGEST_BYTES)
    hashed.update(body)
    return hashed.digest()


class _Body(Struct, eq=False):
    """A body with a loss. Mutable: `losses` and `last`."""

    losses: dict[int, Loss]
    last: float
    """Time of the last loss (`Clock.now`)."""


class LostRequests:
    """The bodies that have lost workers: at most 1024, the one that had its last loss first is dropped first.

    Mutable: `lost`, `merge` and `clear`, on the event loop. `share` gets own losses, for other processes.
    """

    def __init__(self, options: RetryOptions, clock: Clock, metrics: Metrics) -> None:
        self.refuse_s = options.refuse_s
        self._clock = clock
        self._metrics = metrics
        self._bodies: Lru[bytes, _Body] = Lru(_MAX_BODIES)
        self.sizes: set[int] = set()
        """Lengths of refused bodies, so that no other body is hashed. Usually empty."""
        self.share: Callable[[Loss], object] | None = None
        self.share_clear: Callable[[bytes], object] | None = None

    def check(self, key: str, target: bytes, body: bytes) -> None:
        """Raise RequestLostWorkers if this body is refused. Callers ask only if its length is in `sizes`."""
        digest = digest_of(key, target, body)
        found = self._bodies.peek(digest)
        if found is None or len(found.losses) < LOSSES:
            return
        left_s = found.last + self.refuse_s - self._clock.now()
        if left_s <= 0:
            self._drop(digest)
            return
        self._metrics.lost_requests_refused.inc()
        raise RequestLostWorkers(
            f"{len(found.losses)} workers were lost while they computed this request. It is refused for "
            f"{left_s:.0f} s more ({digest.hex()})."
        )

    def lost(self, worker: Worker, key: str, target: bytes, body: bytes, model: str) -> None:
        """`worker` broke off while it had this request. Nothing if it was to leave anyway."""
        if worker.state is HealthState.DRAINING or not self.refuse_s:
            return
        digest = digest_of(key, target, body)
        loss = Loss(digest, secrets.randbits(63), key, model, len(body), worker.id)
        self._metrics.requests_lost.labels(worker.id).inc()
        self.merge(loss)
        if self.share is not None:
            self.share(loss)

    def merge(self, loss: Loss, age_s: float = 0.0) -> None:
        """Add a loss, of this process or of another one, that was `age_s` ago."""
        now = self._clock.now()
        found, last = self._bodies.peek(loss.digest), now - age_s
        if found is None or found.last + self.refuse_s <= now:
            found = _Body({}, last)
        if loss.id in found.losses or len(found.losses) >= _MOST_LOSSES or age_s >= self.refuse_s:
            return
        found.losses[loss.id], found.last = loss, max(found.last, last)
        evicted = self._bodies.put(loss.digest, found)
        if evicted:
            self._count_sizes()
        if len(found.losses) >= LOSSES:
            self.sizes.add(loss.body_bytes)
        if len(found.losses) == LOSSES:
            log.warning(
                "a request of %d bytes has lost %d workers and is refused for %d s (hash %s, key %r, "
                "workers %s)",
                loss.body_bytes,
                LOSSES,
                self.refuse_s,
                loss.digest.hex(),
                loss.key,
                ", ".join(each.worker for each in found.losses.values()),
            )

    def losses(self) -> Sequence[tuple[Loss, float]]:
        """All losses that still count, with their bodies' age in seconds, for a process that joins."""
        now = self._clock.now()
        return [
            (loss, now - body.last)
            for _, body in self._bodies.items()
            if body.last + self.refuse_s > now
            for loss in body.losses.values()
        ]

    def describe(self) -> list[dict[str, Any]]:
        """The bodies that have lost workers, the last one first."""
        now, rows = self._clock.now(), list[dict[str, Any]]()
        for digest, body in self._bodies.items():
            if body.last + self.refuse_s <= now:
                continue
            first = next(iter(body.losses.values()))
            rows.append(
                {
                    "hash": digest.hex(),
                    "key": first.key or None,
                    "model": first.model,
                    "body_bytes": first.body_bytes,
                    "workers": [loss.worker for loss in body.losses.values()],
                    "refused": len(body.losses) >= LOSSES,
                    "seconds_left": round(body.last + self.refuse_s - now, 3),
                }
            )
        return rows[::-1]

    def clear(self, digest: bytes = b"", *, is_own: bool = True) -> int:
        """Forget one body, or all (b""); the number of forgotten ones. Raises NotFound for an unknown one."""
        if digest and digest not in self._bodies and is_own:
            raise NotFound("No body with this hash has lost a worker.", code="lost_request_not_found")
        digests = [digest] if digest else [known for known, _ in self._bodies.items()]
        for each in digests:
            self._bodies.pop(each)
        self._count_sizes()
        if is_own and self.share_clear is not None:
            self.share_clear(digest)
        return len(digests)

    def _drop(self, digest: bytes) -> None:
        self._bodies.pop(digest)
        self._count_sizes()

    def _count_sizes(self) -> None:
        self.sizes.clear()
        for _, body in self._bodies.items():
            if len(body.losses) >= LOSSES:
                self.sizes.add(next(iter(body.losses.values())).body_bytes)
