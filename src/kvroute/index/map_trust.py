"""Whether a worker's part of the map may be used; if not, why, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class MapTrust(StrEnum):
    """How far the map of one stream can be trusted."""

    WHOLE = "whole"
    """The map has all blocks that the worker held at its last message, and no others."""
    PARTIAL = "partial"
    """The worker holds every block of the map and perhaps more: events were lost, or blocks are orphans."""
    NONE = "none"
    """The map must not be used: see the reason."""


class TrustReason(StrEnum):
    """Why a stream's map is not `MapTrust.WHOLE`. The set is bounded, so it serves as a metric label."""

    NO_EVENTS = "no_events"
    """The worker publishes no events, or its streams were not found."""
    REPLAYING = "replaying"
    """Not connected, or a gap is not repaired yet."""
    AUDIT = "audit"
    """Predictions from the map were wrong."""
    SILENT = "silent"
    """The worker answered requests that must have stored blocks, and published no event."""
    GAP = "gap"
    """Lost events cannot be replayed: the map lacks the blocks that they stored."""
    UNKNOWN_PARENT = "unknown_parent"
    """Some blocks are orphans."""
    FULL = "full"
    """The index had no room for some blocks."""
    KINDS = "kinds"
    """No hit can be computed from the kinds of KV cache that the worker's events name."""


_NONE = (
    TrustReason.NO_EVENTS,
    TrustReason.REPLAYING,
    TrustReason.AUDIT,
    TrustReason.SILENT,
    TrustReason.KINDS,
)
_SET_REPLAY: Final = (
    "set replay_endpoint in its --kv-events-config, and open that port. It ends when the cache is recycled"
)
_CAUSES_AND_FIXES: Final[Mapping[TrustReason, str]] = {
    TrustReason.AUDIT: "the engine finds other tokens than its events and the prompts show: a proxy, several "
    "engines behind one URL, or files of another model for exact tokens. Compare GET /admin/audit, "
    "tokens.models and the workers' URLs",
    TrustReason.SILENT: "its publisher has stopped, or its events do not get here: check the endpoint and "
    "enable_kv_cache_events of its --kv-events-config, and the network",
    TrustReason.GAP: f"events were lost, and its replay socket could not give them again: {_SET_REPLAY}",
    TrustReason.UNKNOWN_PARENT: f"events from before the gateway's first one are missing: {_SET_REPLAY}",
    TrustReason.FULL: "the map has no room: raise kv_events.max_index_blocks",
    TrustReason.KINDS: "what was sent to the worker decides instead; a newer vLLM or kvroute may know more",
}


def cause_and_fix(reason: TrustReason | str | None, note: str = "") -> str:
    """The likely cause of a limited trust and the fix, in brackets; empty if the reason says it all.

    `note` says more about this worker.
    """
    explanation = _CAUSES_AND_FIXES.get(TrustReason(reason), "") if reason in _REASONS else ""
    explanation = ": ".join(text for text in (note, explanation) if text)
    return f" ({explanation})" if explanation else ""


_REASONS: Final = frozenset(TrustReason)


def trust_for(reason: TrustReason | None) -> MapTrust:
    """The trust that a reason leaves; WHOLE without a reason."""
    if reason is None:
        return MapTrust.WHOLE
    return MapTrust.NONE if reason in _NONE else MapTrust.PARTIAL
