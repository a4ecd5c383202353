"""All workers in the order of their cost, as arithmetic that becomes candidates when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvroute.fleet.worker import Worker
from kvroute.routing.caches import Held
from kvroute.routing.decision import Candidate, Row


class Ranking(Sequence[Candidate]):
    """Candidates, best first; from the second on by cost.

    What is asked of every worker is done once a request, so it is done in as few objects as possible: a row
    of floats each. The first candidate by cost is made with it, and the others, with their order, when one of
    them is asked for: for a retry or for explain. A candidate is the same object each time.

    Made by `CostModel.rank`. Mutable: `put_first`, by the strategy that ranks.
    """

    __slots__ = (
        "_all",
        "_made_first",
        "_ranked",
        "first_place",
    )

    first_place: int
    """Where the first candidate's worker is among those that were ranked."""
    _ranked: tuple[Sequence[Worker], Sequence[Row], Sequence[int] | None, Sequence[Held] | None, int]
    """The workers; by worker the arithmetic, what it holds of the prompt, and where; the place of the one to
    go to by cost alone. None of them changes any more."""
    _made_first: Candidate | None
    _all: list[Candidate] | None

    def put_first(self, worker: Worker) -> None:
        """Put `worker` first, leaving the others in their order."""
        place = self._ranked[0].index(worker)
        if place != self.first_place:
            self.first_place = place
            self._made_first = None
        self._all = None

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | Sequence[Candidate]:
        if place == 0:
            first = self._made_first
            if first is None:
                first = self._made_first = self._candidate(self.first_place)
            return first
        return self._in_full()[place]

    def __len__(self) -> int:
        return len(self._ranked[1])

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._in_full())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ranking({self._in_full()!r})"

    def _in_full(self) -> list[Candidate]:
        if self._all is None:
            rows, cheapest = self._ranked[1], self._ranked[4]
            order = sorted(range(len(rows)), key=lambda place: rows[place][0])
            for leader in (cheapest, self.first_place):
                order.remove(leader)
                order.insert(0, leader)
            self._all = [self[0], *map(self._candidate, order[1:])]
        return self._all

    def _candidate(self, place: int) -> Candidate:
        workers, rows, matched, where, _ = self._ranked
        row = rows[place]
        return Candidate(
            workers[place],
            row[0],
            matched[place] if matched else 0,
            row[1],
            row,
            where[place] if where else None,
        )
