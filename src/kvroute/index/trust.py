"""How far the map of one stream can be believed, and why not further."""

from __future__ import annotations

import logging
from enum import StrEnum

log = logging.getLogger(__name__)


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


class SilenceDetector:
    """Whether a worker serves without announcing what it stores. Mutable: `served` and `heard`.

    It is silent after `requests` answers that must have stored a block and were all asked for after the
    last batch, once there has been none for `seconds`; until the next batch. Times are `Clock.now()`.
    """

    def __init__(self, requests: int, seconds: float, now: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self.may_be = False
        """False: it is not silent. For reading."""
        self.answers = 0
        """That must have stored a block, since the last batch."""
        self._heard = now
        self._quiet_s = 0.0

    def served(self, now: float, started: float | None = None) -> None:
        """Such an answer, asked for at `started`, has ended; without that, what counts is whether it ended
        `seconds` after the last batch."""
        if now - self._heard >= self._seconds if started is None else started > self._heard:
            self.answers += 1
            self.may_be = self.answers >= self._requests
            self._quiet_s = now - self._heard

    def heard(self, now: float) -> None:
        """A batch has come."""
        self._heard = now
        self.answers = 0
        self.may_be = False

    @property
    def is_silent(self) -> bool:
        return self.may_be and self._quiet_s >= self._seconds


class TrustState:
    """What speaks against one stream beside a gap that is being repaired. Mutable: `distrust` and `fresh`
    change the doubt, `report` remembers what was logged last."""

    def __init__(self, name: str, silence: SilenceDetector) -> None:
        self.silence = silence
        self.doubt: TrustReason | None = None
        self._name = name
        self.reported: TrustReason | None = TrustReason.REPLAYING
        """For reading: what was logged last."""

    def distrust(self, reason: TrustReason) -> None:
        """Do not believe the map until it is another one."""
        self.doubt = reason

    def fresh(self) -> None:
        """What was believed so far is gone: nothing speaks against what comes now."""
        self.doubt = None

    def reason(
        self, *, is_sure: bool, is_whole: bool, aside_blocks: int, is_full: bool = False
    ) -> TrustReason | None:
        """The first that applies; None if nothing does."""
        if not is_sure:
            return TrustReason.REPLAYING
        if self.doubt is not None:
            return self.doubt
        if self.silence.is_silent:
            return TrustReason.SILENT
        if not is_whole:
            return TrustReason.GAP
        if is_full:
            return TrustReason.FULL
        return TrustReason.UNKNOWN_PARENT if aside_blocks else None

    def report(self, reason: TrustReason | None) -> None:
        """Log a change."""
        if reason is self.reported:
            return
        before, self.reported = self.reported, reason
        if reason is None:
            log.info("KV events of %s: its map is whole again (was: %s)", self._name, before)
        elif trust_for(reason) is MapTrust.NONE:
            log.warning("KV events of %s: its map is not used: %s", self._name, reason)
        else:
            log.warning("KV events of %s: its map may lack blocks: %s", self._name, reason)
