"""Remembers the worker of each session's last request, and keeps a session there if that costs little. Pure.

For the strategies that rank by cost. What a worker holds of a prompt decides there; the session only breaks
ties. It matters when the prompt itself says nothing: a session whose beginning its client has replaced by a
summary ("compacted") shares with its worker what it shares with all. Its older blocks are there, and the
client may return to them. No token is counted as held for a session's sake.

A new session that another one has begun, such as a sub-agent's, starts where that one is, if this costs
nothing: what the two prompts share is held there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64_intdigest

from kvroute.fleet.worker import WorkerId
from kvroute.lru import Lru
from kvroute.routing.cost import CostModel, Ranking
from kvroute.routing.strategy import MARGINAL, SCORE, RouteQuery

KEEP_SHARE: Final = 0.25
"""A session stays on its worker for at most this share of the prefill of its whole prompt. A worker that
holds more of the prompt than that, or has that much less to do, gets the request."""


class SessionWorkers:
    """Session -> the worker of its last request, for the most recently used `remembered` sessions (about 150
    bytes each).

    Mutable: `Router.dispatch` and the messages of peers add to it. Sessions are stored as hashes.
    """

    def __init__(self, remembered: int) -> None:
        self._workers = Lru[int, WorkerId](remembered)
        self._models = set[str]()

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, session: int) -> WorkerId | None:
        """The worker of the session's last request, by the session's hash; None if it is not known. It may
        have left."""
        return self._workers.peek(session)

    def dispatched(self, model: str, session: int, worker: WorkerId) -> None:
        """A request of the session, by its hash, was sent to the worker."""
        workers = self._workers
        if workers.peek(session) == worker:
            workers.mark_used(session)
            return
        self._models.add(model)
        workers.put(session, worker)

    def learn(self, model: str, sessions: Iterable[int], worker: WorkerId) -> None:
        """A peer has sent requests of these sessions, by their hashes, to the worker."""
        self._models.add(model)
        for session in sessions:
            self._workers.put(session, worker)

    def forget(self, session_key: str) -> bool:
        """Drop a session, whatever its model; False if it had no worker."""
        dropped = [self._workers.pop(hash_of_session(model, session_key)) for model in self._models]
        return any(worker is not None for worker in dropped)

    def latest(self, number: int) -> tuple[list[str], list[tuple[int, WorkerId]]]:
        """The models, and the most recent `number` sessions with their workers, the oldest first."""
        return sorted(self._models), list(self._workers.items())[-number:]

    def adopt(self, models: Iterable[str], sessions: Iterable[tuple[int, WorkerId]]) -> None:
        """Take over what another process has in `latest`, except sessions that this one has seen itself."""
        self._models.update(models)
        for session, worker in sessions:
            if session not in self._workers:
                self._workers.put(session, worker)


def hash_of_session(model: str, session_key: str) -> int:
    """The hash of a model's session: the same in every process."""
    return xxh3_64_intdigest(f"{model}\0{session_key}".encode("utf-8", "surrogatepass"))


def keep_session(ranking: Ranking, query: RouteQuery, model: CostModel) -> bool:
    """Put the session's worker first if it costs hardly more than the first one. Returns whether it did.

    A new session's first worker, that of its parent session, must be as cheap as the first one.

    Costs are compared without `marginal`, which spreads new conversations over the workers.
    `query.session_worker` must not be None. O(workers).
    """
    workers, rows, *_ = ranking.columns
    wanted, leader = query.session_worker, ranking.first_position
    position = next((position for position, worker in enumerate(workers) if worker.spec.id == wanted), leader)
    if position == leader:
        return False
    costs = model.costs(query.model)
    best = rows[leader][SCORE] - rows[leader][MARGINAL]
    wanted_cost = rows[position][SCORE] - rows[position][MARGINAL]
    tie_s = best * costs.tie_share + costs.tie_s
    keep_s = 0.0
    if not query.from_parent:
        keep_s = KEEP_SHARE * costs.prefill_s(query.tokens, 0, len(query.prompts) or 1)
    if wanted_cost - best > max(tie_s, keep_s):
        return False
    ranking.put_first(workers[position])
    return True
