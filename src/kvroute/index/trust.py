"""How far the map of one stream can be believed, and why not further."""

from __future__ import annotations

from enum import StrEnum


class MapTrust(StrEnum):
    """How far the map of one stream can be believed."""

    WHOLE = "whole"
    """It is what the worker holds, as of its last message."""
    PARTIAL = "partial"
    """The worker holds what it says, and perhaps more: history is lost, or blocks could not be placed."""
    NONE = "none"
    """Not to be used: see the reason."""


class TrustReason(StrEnum):
    """Why a stream's map is not `MapTrust.WHOLE`; bounded, so a metric label."""

    NO_EVENTS = "no_events"
    """The worker publishes none, or none that we know of."""
    REPLAYING = "replaying"
    """Not connected, or a gap is not repaired yet."""
    AUDIT = "audit"
    """Predictions did not come true."""
    SILENT = "silent"
    """Requests were answered that must have stored blocks, and nothing was announced."""
    GAP = "gap"
    """Events are lost for good: what was stored by them is missing."""
    UNKNOWN_PARENT = "unknown_parent"
    """Blocks could not be placed."""
    FULL = "full"
    """The index had no room for what was announced."""


_NONE = (TrustReason.NO_EVENTS, TrustReason.REPLAYING, TrustReason.AUDIT, TrustReason.SILENT)


def trust_for(reason: TrustReason | None) -> MapTrust:
    """What a reason leaves of the trust; WHOLE without one."""
    if reason is None:
        return MapTrust.WHOLE
    return MapTrust.NONE if reason in _NONE else MapTrust.PARTIAL
