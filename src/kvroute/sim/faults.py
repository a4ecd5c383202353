"""Faults that a test or an operator switches on: `POST /sim/faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from kvroute.options import Options

CONTROL = ("/sim/", "/metrics", "/health", "/ping", "/version", "/v1/models", "/kv_event_sources")
"""Paths that a fault without `path` leaves alone."""


class Fault(Options):
    """One fault. `kind` decides which other fields matter.

    `status` answers `status` (with `retry_after_s` as Retry-After); `slow` waits `delay_s` before the
    engine sees the request; `hang` and `reset` let `after_chunks` chunks of the answer pass, then nothing
    comes any more, or the connection is reset (None: before the answer's head); `drop_events` and
    `duplicate_events` hit batches of the event stream.
    """

    kind: Literal["status", "slow", "hang", "reset", "drop_events", "duplicate_events"]
    count: int | None = Field(default=1, ge=1)
    """How many requests or batches it hits; None: all, until cleared."""
    path: str | None = None
    """Only requests whose path starts with this; None: all but the control plane's."""
    status: int = Field(default=503, ge=400, le=599)
    retry_after_s: int | None = None
    delay_s: float = Field(default=1.0, ge=0)
    after_chunks: int | None = Field(default=None, ge=0)


class Faults:
    """Active faults, oldest first. Mutable: `add`, `clear`, and every use counts down."""

    def __init__(self) -> None:
        self._active: list[tuple[Fault, int | None]] = []

    def add(self, fault: Fault) -> None:
        self._active.append((fault, fault.count))

    def clear(self) -> None:
        self._active.clear()

    def listing(self) -> list[dict[str, object]]:
        """Active faults with what is left of their count."""
        return [{**fault.model_dump(), "count": left} for fault, left in self._active]

    def for_request(self, path: str) -> list[Fault]:
        """The faults that hit this request: one of each kind, counted."""
        if not self._active:
            return []
        exempt = path.startswith(CONTROL)
        return self._use(
            lambda fault: (
                not fault.kind.endswith("_events")
                and not path.startswith("/sim/")
                and (not exempt if fault.path is None else path.startswith(fault.path))
            )
        )

    def for_batch(self) -> list[Fault]:
        """The faults that hit this event batch, counted."""
        return self._use(lambda fault: fault.kind.endswith("_events")) if self._active else []

    def _use(self, applies: Callable[[Fault], bool]) -> list[Fault]:
        used: dict[str, Fault] = {}
        kept: list[tuple[Fault, int | None]] = []
        for fault, left in self._active:
            if fault.kind not in used and applies(fault):
                used[fault.kind] = fault
                left = None if left is None else left - 1
            if left != 0:
                kept.append((fault, left))
        self._active = kept
        return list(used.values())
