"""The strategy `session`: one worker per session key.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2016).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator
from itertools import chain
from math import ceil, inf
from typing import ClassVar, NamedTuple

from xxhash import xxh3_64_intdigest

from kvroute.fleet.worker import FleetView, RankTargets, Worker, WorkerId
from kvroute.index.history import RouteHistory
from kvroute.lru import Lru
from kvroute.options import Options, option
from kvroute.routing.cost import CostModel, Ranking
from kvroute.routing.ranks import best_ranks, rank_by_rank, ranks_of, targets_of
from kvroute.routing.sessions import KEEP_SHARE
from kvroute.routing.strategy import MARGINAL, SCORE, Candidate, Needs, RouteDecision, RouteQuery, RouteReason
from kvroute.routing.transfers import CacheViews

_KNOWN_SLACK = 3
"""To move a session costs its whole cache, and the mean of few requests in flight changes much. So for a
session that a worker has already, `free_requests` beyond the first count this number of times."""
_NO_VERSION = -1
"""Version of a ring that was not made from a view of the fleet: `rank` compares the workers."""


class SessionOptions(Options):
    """A session stays on one worker, by its key. A request without a key goes to the worker of least cost."""

    keys: tuple[str, ...] = option(
        (
            "header:x-session-id",
            "header:x-claude-code-session-id",
            "header:session-id",
            "header:session_id",
            "header:x-session-affinity",
            "header:x-opencode-session",
            "header:x-dynamo-session-id",
            "header:x-smg-routing-key",
            "header:x-session-token",
            "cookie:session_id",
            "body:prompt_cache_key",
            "body:conversation",
            "body:conversation.id",
            "body:metadata.session_id",
            "embedded:metadata.user_id",
            "body:previous_response_id",
            "body:user",
        ),
        "Sources of the session key, in this order: `header:NAME`, `cookie:NAME`, `body:FIELD`, or "
        "`embedded:FIELD`: the session id within a text of the body, which is JSON with `session_id` or ends "
        "with `_session_ID` (Claude Code's `metadata.user_id`). Every strategy but `roundrobin` reads them.",
        reload=True,
    )
    epsilon: float = option(
        0.25,
        "A worker takes no more sessions at 1 + `epsilon` times the mean of the requests in flight.",
        higher="sessions stay, load is less even",
        lower="load is more even, sessions move",
        ge=0,
    )
    free_requests: int = option(
        4,
        "Requests in flight that a worker may always have, independent of the mean. It keeps the sessions "
        "that it has already up to three times as many, less three.",
        unit="requests",
        higher="sessions stay at low load",
        lower="sessions spread at low load; 1: only `epsilon` counts",
        ge=1,
    )
    remembered: int = option(
        100_000,
        "Number of sessions whose worker is stored, the most recently used ones; about 200 bytes each.",
        unit="sessions",
        higher="sessions that load has moved stay on their new worker for longer",
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
    """A hash ring of worker ids with 64-bit hashes. Built in about 0.3 us per point."""

    __slots__ = ("_hashes", "_owners", "ids", "members")

    def __init__(self, ids: tuple[WorkerId, ...], points: int) -> None:
        self.ids = ids
        self.members = frozenset(ids)
        circle = sorted(
            (xxh3_64_intdigest(worker.encode(), point), worker) for worker in ids for point in range(points)
        )
        self._hashes = [ring_point for ring_point, _ in circle]
        self._owners = [worker for _, worker in circle]

    def home(self, ring_point: int) -> WorkerId:
        """The worker at a point of the ring, or the next one after it."""
        return self._owners[bisect_right(self._hashes, ring_point) % len(self._owners)]

    def walk(self, ring_point: int) -> Iterator[WorkerId]:
        """Each worker once, in the order of the ring, starting at `ring_point`."""
        start, seen = bisect_right(self._hashes, ring_point), set[WorkerId]()
        for step in range(len(self._owners)):
            worker = self._owners[(start + step) % len(self._owners)]
            if worker not in seen:
                seen.add(worker)
                yield worker


class _Placement(NamedTuple):
    """The worker of a session, and the session's home at the time of that choice."""

    home: WorkerId
    worker: WorkerId
    rank: int | None = None
    """The data-parallel rank, if it is not the one of the session's hash."""


class Session:
    """Ranks the session's worker first: its home on the ring, or its stored placement. Implements `Strategy`.

    Mutable: `rank` rebuilds a model's ring when its workers change. `on_dispatch` rebuilds it when a peer
    sends a request to a worker that is not on it. `on_dispatch`, `adopt`, `restore` and `forget` change the
    placements; `rank` does not.
    """

    # A placement keeps a session on the worker that it was moved to when its home was over the bound. It is
    # valid while its worker is routable, and its home is still the session's home or has left. So a worker
    # that leaves moves only its own sessions, and gets them again when it returns. Session keys are stored as
    # hashes.

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
        self._placements = Lru[tuple[str, int], _Placement](options.remembered)
        self._placed = set[str]()
        """Models of placements of other processes (`adopt`), which may have no ring here."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        targets = None if view.by_rank is None else targets_of(query, view)
        if targets is None:
            ranking = self._costs.rank(query, view.workers, queues=view.loads)
        else:
            ranking = rank_by_rank(self._costs, query, targets)
        if query.session_key is None:
            ranking_of_targets = ranking if targets is None else best_ranks(ranking)
            return RouteDecision(self.name, RouteReason.NO_SESSION_KEY, ranking_of_targets)
        ring_point = _ring_point(query.session_key)
        ring = self._ring(view)
        workers = {worker.id: worker for worker in view.workers}
        preferred = ring.home(ring_point)
        stored = self._placements.peek((view.model, ring_point))
        if stored is None and query.parent_session is not None:
            preferred = self._worker_of_parent(query.parent_session, view.model, ring, workers)
        bound = own_bound = self._bound(view)
        if stored is not None and stored.worker in workers and _is_valid(stored, preferred, workers):
            preferred = stored.worker
            own_bound = max(bound, _KNOWN_SLACK * (self._options.free_requests - 1))
        chosen, reason = preferred, RouteReason.SESSION
        if workers[preferred].load.in_flight >= own_bound:
            reason = RouteReason.SESSION_SPILL
            chosen = next(id_ for id_ in ring.walk(ring_point) if workers[id_].load.in_flight < bound)
        elif stored is None:
            chosen = self._first_worker(query, ranking, chain((preferred,), ring.walk(ring_point)), bound)
            if chosen != preferred:
                reason = RouteReason.SESSION_SPILL
        if targets is None:
            ranking.put_first(workers[chosen])
            return RouteDecision(self.name, reason, ranking)
        preferred_rank = stored.rank if stored is not None and stored.worker == chosen else None
        ranking.put_first(workers[chosen], self._rank(workers[chosen], targets, ring_point, preferred_rank))
        return RouteDecision(self.name, reason, best_ranks(ranking))

    def _worker_of_parent(
        self, parent: str, model: str, ring: Ring, workers: Container[WorkerId]
    ) -> WorkerId:
        """Where the session is that began this one: what the two prompts share is held there."""
        ring_point = _ring_point(parent)
        home, stored = ring.home(ring_point), self._placements.peek((model, ring_point))
        if stored is not None and stored.worker in workers and _is_valid(stored, home, workers):
            return stored.worker
        return home

    def _first_worker(
        self, query: RouteQuery, ranking: Ranking, walk: Iterator[WorkerId], bound: int
    ) -> WorkerId:
        """The worker for the first request of a session: the first one of `walk` that costs hardly more than
        the cheapest one."""
        # No worker has the session yet, so its home is not worth a long wait. That it is elsewhere costs
        # its prefill again only where the placement is not known: in gateways that are not connected, and
        # after a restart. With homes alone, sessions of one long request each took up to 1.5 times as long
        # as with round robin (bench/hot_prompt.py).
        costs = self._costs.costs(query.model)
        workers, rows, *_ = ranking.columns
        scores: dict[WorkerId, float] = {}
        for worker, row in zip(workers, rows, strict=True):
            if worker.load.in_flight < bound:
                # `marginal` spreads new conversations, and this one continues that of its parent session.
                score = row[SCORE] if query.parent_session is None else row[SCORE] - row[MARGINAL]
                lowest = scores.get(worker.spec.id)
                scores[worker.spec.id] = score if lowest is None or score < lowest else lowest
        best = min(scores.values())
        keep_s = KEEP_SHARE * costs.prefill_s(query.tokens, 0, len(query.prompts) or 1)
        limit = best + max(best * costs.tie_share + costs.tie_s, keep_s)
        return next(id_ for id_ in walk if scores.get(id_, inf) <= limit)

    def _rank(
        self, worker: Worker, targets: RankTargets, ring_point: int, preferred: int | None
    ) -> int | None:
        """The session's rank on `worker`: `preferred`, else by the session's hash; the next one at its bound.

        None for a worker with one rank.
        """
        ranks = ranks_of(worker, targets)
        total = sum(in_flight for _, in_flight in ranks) + 1
        bound = max(self._options.free_requests, ceil((1 + self._options.epsilon) * total / len(ranks)))
        start = next(
            (position for position, (rank, _) in enumerate(ranks) if rank == preferred),
            ring_point % len(ranks),
        )
        order = [*ranks[start:], *ranks[:start]]
        return next((rank for rank, in_flight in order if in_flight < bound), order[0][0])

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        if query.session_key is None or candidate is not decision.ranking[0]:
            return
        model, ring_point, worker = query.model, _ring_point(query.session_key), candidate.worker.id
        key, versioned_ring, rank = (model, ring_point), self._rings.get(model), candidate.rank
        if rank is not None:
            ranks = list(candidate.worker.rank_units)
            if rank in ranks and ranks[ring_point % len(ranks)] == rank:
                rank = None
        if versioned_ring is not None:
            stored, ring = self._placements.peek(key), versioned_ring[1]
            if (
                stored is not None
                and stored.worker == worker
                and stored.rank == rank
                and _is_valid(stored, ring.home(ring_point), ring.members)
            ):
                self._placements.get(key)  # marks it as used
                return
        if versioned_ring is None or worker not in versioned_ring[1].members:
            self._follow_peer(model, decision)
            versioned_ring = self._rings.get(model)
        if versioned_ring is not None:
            self._placements.put(key, _Placement(versioned_ring[1].home(ring_point), worker, rank))

    def state_for(self, query: RouteQuery, view: FleetView) -> tuple[_Placement | None, ...]:
        """The placements of the session and of its parent session. See `StatefulStrategy`."""
        return tuple(self._placements.peek((view.model, ring_point)) for ring_point in _ring_points(query))

    def restore(self, query: RouteQuery, view: FleetView, state: tuple[_Placement | None, ...]) -> None:
        """See `StatefulStrategy`."""
        for ring_point, placement in zip(_ring_points(query), state, strict=True):
            if placement is None:
                self._placements.pop((view.model, ring_point))
            else:
                self._placements.put((view.model, ring_point), placement)

    def placements(self) -> list[tuple[str, int, WorkerId, WorkerId, int | None]]:
        """Model, hash of the session key, home, worker and rank of each placement, the least recently used
        first.

        Sessions at their home, on the rank of their hash, are left out.
        """
        return [
            (model, ring_point, home, worker, rank)
            for (model, ring_point), (home, worker, rank) in self._placements.items()
            if home != worker or rank is not None
        ]

    def adopt(
        self, model: str, ring_point: int, home: WorkerId, worker: WorkerId, rank: int | None = None
    ) -> None:
        """Take over another process's placement, unless this one has placed the session itself."""
        self._placed.add(model)
        if (model, ring_point) not in self._placements:
            self._placements.put((model, ring_point), _Placement(home, worker, rank))

    def forget(self, session_key: str) -> bool:
        """Drop the session's placements, so that it goes to its home again. False if it had none."""
        ring_point = _ring_point(session_key)
        dropped = [self._placements.pop((model, ring_point)) for model in {*self._rings, *self._placed}]
        return any(dropped)

    def _bound(self, view: FleetView) -> int:
        """Number of requests in flight at which a worker takes no more sessions."""
        total = sum(worker.load.in_flight for worker in view.workers) + 1
        return max(self._options.free_requests, ceil((1 + self._options.epsilon) * total / len(view.workers)))

    def _ring(self, view: FleetView) -> Ring:
        versioned = self._rings.get(view.model)
        return (
            versioned[1] if versioned is not None and versioned[0] == view.version else self._renew_ring(view)
        )

    def _renew_ring(self, view: FleetView) -> Ring:
        versioned, ids = self._rings.get(view.model), tuple(worker.id for worker in view.workers)
        ring = (
            versioned[1]
            if versioned is not None and versioned[1].ids == ids
            else Ring(ids, self._options.points)
        )
        self._rings[view.model] = (view.version, ring)
        return ring

    def _follow_peer(self, model: str, decision: RouteDecision) -> None:
        """Renew the model's ring, if this is the decision of a peer and its first worker is routable here."""
        # A standby ranks no requests, but takes over the sessions of the process that fails.
        leader, *view = [candidate.worker for candidate in decision.ranking]
        if leader in view:  # only a peer's ranking has the first worker twice: after it comes the whole view
            whole = FleetView(model, tuple(view), _NO_VERSION)
            sides = whole.sides
            self._renew_ring(whole if sides is None else sides.decode or sides.prefill or whole)


def _is_valid(stored: _Placement, home: WorkerId, present: Container[WorkerId]) -> bool:
    """Whether the placement was chosen for this home, or for a home that has left since."""
    return stored.home == home or stored.home not in present


def _ring_points(query: RouteQuery) -> list[int]:
    """The points on the ring of the session and of its parent session, as far as the request has them."""
    if query.session_key is None:
        return []
    keys = (query.session_key, query.parent_session)
    return [_ring_point(session_key) for session_key in keys if session_key is not None]


def _ring_point(session_key: str) -> int:
    return xxh3_64_intdigest(session_key.encode("utf-8", "surrogatepass"))
