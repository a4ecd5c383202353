"""The seam of a routing strategy."""

from __future__ import annotations

from typing import ClassVar, Protocol

from kvroute.fleet.worker import FleetView
from kvroute.routing.decision import Candidate, Needs, RouteDecision, RouteQuery


class Strategy(Protocol):
    """A way to order the routable workers for one request.

    `rank` is pure towards the outside: no I/O, no clock (the query brings `now`), and calling it any
    number of times changes no later answer, so that explain can call it freely. What a dispatch
    changes, it changes in `routed`.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs]
    is_told: ClassVar[bool]
    """Whether `routed` changes anything; else it is not called."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        """Order `view.workers` (never empty), best first; from the second on by cost."""
        ...

    def routed(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """The request is on its way to `candidate`: advance counters such as round robin's. Costs O(1).

        Called once per attempt, so after a failed one again with the next candidate.
        """
        ...

    def forget(self, session_key: str) -> bool:
        """Drop what is remembered about one session; False when nothing was."""
        ...
