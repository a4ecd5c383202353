"""One worker a session: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016)."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from math import ceil
from typing import ClassVar, NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.fleet.worker import FleetView, WorkerId
from kvroute.index.history import RouteHistory
from kvroute.options import Options, option
from kvroute.routing.cost import CostModel
from kvroute.routing.strategy import Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews


class SessionOptions(Options):
    """A session stays on one worker by its key; no key means least load."""

    keys: tuple[str, ...] = option(
        (
            "header:x-session-id",
            "cookie:session_id",
            "body:prompt_cache_key",
            "body:previous_response_id",
            "body:user",
            "body:metadata.session_id",
        ),
        "Where to look for a session's key, in this order: `header:NAME`, `cookie:NAME` or `body:FIELD`.",
    )
    epsilon: float = option(
        0.25,
        "How far above the mean a worker's requests in flight may go before a session moves on.",
        higher="sessions stay, load is less even",
        lower="load is more even, sessions move",
        ge=0,
    )
    free_requests: int = option(
        4,
        "Requests in flight that a worker may always have, whatever the mean.",
        unit="requests",
        higher="sessions stay at low load",
        lower="spreads at low load; 1 leaves the bound alone",
        ge=1,
    )
    remembered: int = option(
        100_000,
        "Sessions whose worker is remembered, the most recently used ones; about 200 bytes each.",
        unit="sessions",
        higher="sessions moved by load stay where they moved to for longer",
        lower="less memory",
        ge=1,
    )
    points: int = option(
        100,
        "Points of each worker on the ring.",
        higher="sessions are spread more evenly",
        lower="the ring is rebuilt faster when workers come and go",
        ge=1,
    )


class Ring:
    """Workers on a circle of 64-bit hashes. Depends on their ids alone. Built in about 0.3 us a point."""

    __slots__ = ("_hashes", "_owners", "ids")

    def __init__(self, ids: tuple[WorkerId, ...], points: int) -> None:
        self.ids = ids
        circle = sorted(
            (xxh3_64_intdigest(worker.encode(), point), worker) for worker in ids for point in range(points)
        )
        self._hashes = [place for place, _ in circle]
        self._owners = [worker for _, worker in circle]

    def home(self, place: int) -> WorkerId:
        return self._owners[bisect_right(self._hashes, place) % len(self._owners)]

    def walk(self, place: int) -> Iterator[WorkerId]:
        """Each worker once, in the order of the ring from `place` on."""
        start, seen = bisect_right(self._hashes, place), set[WorkerId]()
        for step in range(len(self._owners)):
            worker = self._owners[(start + step) % len(self._owners)]
            if worker not in seen:
                seen.add(worker)
                yield worker


class _Seat(NamedTuple):
    home: WorkerId
    worker: WorkerId


class Session:
    """Mutable: rings, rebuilt when a model's workers change, and the table of seats, by `on_dispatch` and
    `forget` only; implements `Strategy`.

    A session belongs to its home, the first worker on the ring. A seat remembers where it really went
    when its home was over the bound, so that it stays there. A seat counts as long as its worker is there
    and nobody stands between the session and the home it had: a worker that leaves moves its own sessions
    only, and takes them back when it returns. Keys are kept as hashes.
    """

    name: ClassVar[str] = "session"
    needs: ClassVar[Needs] = Needs.SESSION_KEY
    options: ClassVar[type[Options]] = SessionOptions
    has_affinity: ClassVar[bool] = True
    observes_dispatch: ClassVar[bool] = True

    def __init__(
        self, options: SessionOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._options = options
        self._costs = costs
        self._rings: dict[str, tuple[int, Ring]] = {}
        self._seats: OrderedDict[tuple[str, int], _Seat] = OrderedDict()

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        ranking = self._costs.rank(query, view.workers, queues=view.loads)
        if query.session_key is None:
            return RouteDecision(self.name, RouteReason.NO_SESSION_KEY, ranking)
        place = _place(query.session_key)
        ring = self._ring(view)
        workers = {worker.id: worker for worker in view.workers}
        wanted = ring.home(place)
        seat = self._seats.get((view.model, place))
        if seat is not None and seat.worker in workers and (seat.home == wanted or seat.home not in workers):
            wanted = seat.worker
        chosen, reason = wanted, RouteReason.SESSION
        bound = self._bound(view)
        if workers[wanted].load.in_flight >= bound:
            reason = RouteReason.SESSION_SPILL
            chosen = next(id_ for id_ in ring.walk(place) if workers[id_].load.in_flight < bound)
        ranking.put_first(workers[chosen])
        return RouteDecision(self.name, reason, ranking)

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        if query.session_key is None or candidate is not decision.ranking[0]:
            return
        known = self._rings.get(query.model)
        if known is None:
            return
        ring, place = known[1], _place(query.session_key)
        key, home, worker = (query.model, place), ring.home(place), candidate.worker.id
        seat = self._seats.get(key)
        if seat is None or seat.worker != worker or not _holds(seat, home, ring.ids):
            self._seats[key] = _Seat(home, worker)
        self._seats.move_to_end(key)
        if len(self._seats) > self._options.remembered:
            self._seats.popitem(last=False)

    def forget(self, session_key: str) -> bool:
        """Free the session's seats: it goes home, wherever load has moved it. False if it had none."""
        place = _place(session_key)
        freed = [self._seats.pop((model, place), None) for model in self._rings]
        return any(freed)

    def _bound(self, view: FleetView) -> int:
        """Requests in flight at which a worker takes no more sessions."""
        total = sum(worker.load.in_flight for worker in view.workers) + 1
        return max(self._options.free_requests, ceil((1 + self._options.epsilon) * total / len(view.workers)))

    def _ring(self, view: FleetView) -> Ring:
        known = self._rings.get(view.model)
        if known is not None and known[0] == view.version:
            return known[1]
        ids = tuple(worker.id for worker in view.workers)
        ring = known[1] if known is not None and known[1].ids == ids else Ring(ids, self._options.points)
        self._rings[view.model] = (view.version, ring)
        return ring


def _holds(seat: _Seat, home: WorkerId, present: tuple[WorkerId, ...]) -> bool:
    """Whether the seat was given under this home, or one that has left since."""
    return seat.home == home or seat.home not in present


def _place(session_key: str) -> int:
    return xxh3_64_intdigest(session_key.encode("utf-8", "surrogatepass"))
