"""How far the map of one stream can be trusted, and the reason if it cannot be trusted fully."""

from __future__ import annotations

from enum import StrEnum


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


_NONE = (TrustReason.NO_EVENTS, TrustReason.REPLAYING, TrustReason.AUDIT, TrustReason.SILENT)


def trust_for(reason: TrustReason | None) -> MapTrust:
    """The trust that a reason leaves; WHOLE without a reason."""
    if reason is None:
        return MapTrust.WHOLE
    return MapTrust.NONE if reason in _NONE else MapTrust.PARTIAL
