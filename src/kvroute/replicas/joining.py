"""How a new member of the fleet gets the state of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any, Final

from kvroute.clock import Clock
from kvroute.replicas.messages import (
    PeerId,
    SnapshotRequest,
)

_ANSWER_S: Final = 5.0


class Joining:
    """Decides which processes this process asks for the state that it lacks. Mutable: the replica calls it.

    Only some of the others have LMCache's earlier reports (`reporting`), so another one may send these.
    """

    def __init__(
        self,
        ask: Callable[[PeerId, SnapshotRequest], object],
        reporting: Callable[[], Collection[PeerId]],
        *,
        is_needed: bool,
    ) -> None:
        self.is_synced = not is_needed
        """Whether others may ask this process for its state."""
        self.has_joined = asyncio.Event()
        """Set when no answer is expected any more."""
        self.source: PeerId | None = None
        """The process that was asked last for the state. It sends the reports, too, if it has them."""
        self.needs_state = is_needed
        self.needs_reports = False
        self._ask = ask
        self._reporting = reporting
        self._reports_source: PeerId | None = None
        self._synced: dict[PeerId, None] = {}
        """Linked processes that can be asked; the one that did not answer is the last."""
        self._heard: set[PeerId | None] = set()
        """Processes that have answered lately, or were asked lately."""
        self._has_asked = False

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is expected."""
        asked_state = self.needs_state and self.source is not None
        return asked_state or (self.needs_reports and self._reports_source is not None)

    def linked(self, peer: PeerId) -> None:
        """A process that has a state is linked. Call it also while this process serves: it may have reached
        no other one at its start."""
        self._synced[peer] = None
        self._ask_for_the_rest()

    def gone(self, peer: PeerId) -> None:
        """A process is gone: what it was asked for is asked of another one."""
        self._synced.pop(peer, None)
        if peer == self.source and self.needs_state:
            self.source = None
        if peer == self._reports_source and self.needs_reports:
            self._reports_source = None
        self._ask_for_the_rest()
        if not self.is_waiting:
            self.has_joined.set()

    def received(self, peer: PeerId, *, only_reports: bool) -> None:
        """The answer of a process is complete."""
        self.needs_state = self.needs_state and (only_reports or peer != self.source)
        self.needs_reports = self.needs_reports and peer != self._reports_source
        if not self.needs_state and not (self.needs_reports and self._reports_source is not None):
            self.is_synced = True
            self.has_joined.set()

    def needs_nothing(self) -> None:
        """All others are linked. If none of them had a state, this process does not ask for one later: it
        would count again what was shared with it."""
        if not self._has_asked:
            self.needs_state = self.needs_reports = False

    def noted(self, handler: Callable[[PeerId, Any], object]) -> Callable[[PeerId, Any], object]:
        """`handler`, which also notes that the sender answers. For parts of the state."""

        def handle(peer: PeerId, message: Any) -> None:
            self._heard.add(peer)
            handler(peer, message)

        return handle

    async def ask_until_it_has_the_state(self, clock: Clock) -> None:
        """Ask another process when the one that was asked sends nothing for `_ANSWER_S`: the question or the
        end of the answer was lost with a connection to Redis."""
        while self.needs_state or self.needs_reports:
            await clock.sleep(_ANSWER_S)
            heard, self._heard = self._heard, set()
            silent = {self.source, self._reports_source} & self._synced.keys() - heard
            self._synced = dict.fromkeys(sorted(self._synced, key=silent.__contains__))
            if self.source in silent and self.needs_state:
                self.source = None
            if self._reports_source in silent and self.needs_reports:
                self._reports_source = None
            self._ask_for_the_rest()

    def _ask_for_the_rest(self) -> None:
        reporting = self._reporting() if self.needs_reports else ()
        for peer in list(self._synced):
            needs_reports = self.needs_reports and self._reports_source is None and peer in reporting
            needs_state = self.needs_state and self.source is None
            if needs_reports:
                self._reports_source = peer
            if needs_state:
                self.source = peer
            if needs_state or needs_reports:
                self._heard.add(peer)
                self._has_asked = True
                self.has_joined.clear()
                self._ask(peer, SnapshotRequest(only_reports=not needs_state))
