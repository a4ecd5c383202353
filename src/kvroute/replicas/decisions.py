"""Routing decisions, told to other processes and taken in from them, so that loads and prefix trees agree.

Every process accounts every process's requests: what it dispatches itself at once, what others dispatch a few
milliseconds later. Who unlinks takes its unfinished requests with it; who links brings them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final, TypeAlias, cast

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.replicas.messages import (
    ExactSent,
    Finished,
    FirstToken,
    KeyGroupDecoder,
    KeyGroupEncoder,
    Message,
    PromptSent,
    Recent,
    Sent,
    SessionForgotten,
    SnapshotFollows,
    packed,
    unpacked,
)
from kvroute.routing.router import Dispatch, Followed, Router
from kvroute.routing.strategy import (
    Candidate,
    CandidateMatch,
    CostTerms,
    ExactPrompt,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Tokens,
)

_RECENT_BLOCKS: Final = 4_000_000
"""Of all workers together, that a process which joins is told: 32 MB."""
_RECENT_PROMPTS: Final = 256
"""In one message."""
_NO_CHUNKS: Final = PromptChunks(())


class OwnDecisions:
    """An `Observer` of this process's router. Mutable: remembers what is unfinished, for who links later."""

    def __init__(self, publish: Callable[[Message], None]) -> None:
        self.publish = publish
        self._ids = count(1)
        self._teller = KeyGroupEncoder()
        self._unfinished: dict[int, _OwnDispatch] = {}

    def dispatched(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> Followed:
        """About 5 us, and what `KeyGroupEncoder.tell` takes."""
        number = next(self._ids)
        dispatch = self._unfinished[number] = _OwnDispatch(self, number, query, decision, candidate)
        self.publish(_sent(number, query, decision, candidate, self._teller.tell))
        return dispatch

    def session_forgotten(self, session_key: str) -> None:
        self.publish(SessionForgotten(session_key))

    def begin_anew(self) -> None:
        """Somebody begins to listen who has read no keys: nobody is taken to know any."""
        self._teller.begin_anew()
        self.publish(SnapshotFollows())

    def unfinished(self) -> list[Message]:
        """What a process that knows nothing of it must hear."""
        return [message for dispatch in self._unfinished.values() for message in dispatch.so_far()]

    def forget(self, number: int) -> None:
        """The request has ended."""
        del self._unfinished[number]


class _OwnDispatch:
    """One unfinished request. Mutable: whether its first token has come."""

    __slots__ = ("_candidate", "_decision", "_decisions", "_has_begun", "_number", "_query")

    def __init__(
        self,
        decisions: OwnDecisions,
        number: int,
        query: RouteQuery,
        decision: RouteDecision,
        candidate: Candidate,
    ) -> None:
        self._decisions = decisions
        self._number = number
        self._query = query
        self._decision = decision
        self._candidate = candidate
        self._has_begun = False

    def first_token(self) -> None:
        self._has_begun = True
        self._decisions.publish(FirstToken(self._number))

    def finished(self) -> None:
        self._decisions.forget(self._number)
        self._decisions.publish(Finished(self._number))

    def so_far(self) -> list[Message]:
        """All that was said of it."""
        number = self._number
        sent = _sent(number, self._query, self._decision, self._candidate, _in_full)
        return [sent, FirstToken(number)] if self._has_begun else [sent]


class OthersDecisions:
    """What other processes have dispatched, accounted in `router`. Mutable: by its methods."""

    def __init__(self, router: Router, fleet: Fleet, clock: Clock) -> None:
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._dispatches: dict[int, dict[int, Dispatch]] = {}
        """By process and its number for it."""
        self._readers: dict[int, KeyGroupDecoder] = {}
        self._others: dict[str, tuple[int, tuple[Candidate, ...]]] = {}

    @property
    def unfinished(self) -> int:
        """Requests that other processes have in flight."""
        return sum(map(len, self._dispatches.values()))

    def sent(self, process: int, sent: Sent) -> None:
        """Apply a dispatch of another process; unknown workers are skipped.

        Costs `Router.dispatch` and `KeyGroupDecoder.read`.
        """
        read = self._readers.setdefault(process, KeyGroupDecoder()).read
        prompts = [cast("Sequence[BlockKey]", read(prompt.ends, prompt.fresh)) for prompt in sent.prompts]
        exact = [cast("Sequence[BlockKey]", read(prompt.ends, prompt.fresh)) for prompt in sent.exact]
        try:
            worker = self._fleet.get(sent.worker)
        except NotFound:
            return
        now = self._clock.now()
        query, decision, candidate = self._as_routed(sent, prompts, exact, worker, now)
        dispatch = self._router.dispatched_elsewhere(query, decision, candidate, now)
        self._dispatches.setdefault(process, {})[sent.id] = dispatch

    def begin_anew(self, process: int) -> None:
        """The process takes no keys for known here."""
        self._readers.pop(process, None)

    def first_token(self, process: int, number: int) -> None:
        dispatch = self._dispatches.get(process, {}).get(number)
        if dispatch is not None:
            dispatch.first_token(self._clock.now())

    def finished(self, process: int, number: int) -> None:
        dispatch = self._dispatches.get(process, {}).pop(number, None)
        if dispatch is not None:
            dispatch.finish(self._clock.now())

    def lost(self, process: int) -> None:
        """The process is gone, or cannot be heard: none of its requests is known to run."""
        now = self._clock.now()
        self._readers.pop(process, None)
        for dispatch in self._dispatches.pop(process, {}).values():
            dispatch.finish(now)

    def _as_routed(
        self,
        sent: Sent,
        prompts: Sequence[Sequence[BlockKey]],
        exact: Sequence[Sequence[BlockKey]],
        worker: Worker,
        now: float,
    ) -> tuple[RouteQuery, RouteDecision, Candidate]:
        query = RouteQuery(
            model=sent.model,
            now=now,
            prompts=tuple(
                PromptKeys(keys, told.tokens, told.block_tokens)
                for keys, told in zip(prompts, sent.prompts, strict=True)
            ),
            tokens=sent.tokens,
            session_key=sent.session_key,
            streamed=sent.streamed,
            exact=tuple(
                ExactPrompt(0, keys, _NO_CHUNKS, key_tokens=told.key_tokens)
                for keys, told in zip(exact, sent.exact, strict=True)
            ),
        )
        held = None if sent.tiers is None else CandidateMatch(Tokens(*sent.tiers), sent.slot, sent.rank)
        candidate = Candidate(worker, 0.0, sent.matched_tokens, sent.prefill_s, CostTerms(), held)
        others = self._candidates(sent.model)
        ranking = (candidate, *others) if sent.first else (*others, candidate)
        return query, RouteDecision(sent.strategy, RouteReason(sent.reason), ranking), candidate

    def _candidates(self, model: str) -> tuple[Candidate, ...]:
        """The workers that were ranked, as far as strategies look at them again."""
        view = self._fleet.view(model)
        known = self._others.get(model)
        if known is None or known[0] != view.version:
            if known is None and not view.workers:
                return ()
            ranked = tuple(Candidate(worker, 0.0, 0, 0.0, CostTerms()) for worker in view.workers)
            known = self._others[model] = view.version, ranked
        return known[1]


def recent_prompts(router: Router, workers: Sequence[Worker]) -> Iterable[Recent]:
    """What a process that comes late should know of the time before."""
    each = _RECENT_BLOCKS // max(1, len(workers))
    for worker in workers:
        prompts = router.recent(worker, each)
        for start in range(0, len(prompts), _RECENT_PROMPTS):
            yield Recent(worker.id, [packed(keys) for keys in prompts[start : start + _RECENT_PROMPTS]])


def take_recent(router: Router, fleet: Fleet, told: Recent) -> None:
    """Take in what `recent_prompts` gave elsewhere."""
    try:
        worker = fleet.get(told.worker)
    except NotFound:
        return
    for keys in told.prompts:
        router.sent_before(worker, _keys(keys))


_Tell: TypeAlias = Callable[[Sequence[int]], tuple[bytes, bytes]]


def _in_full(keys: Sequence[int]) -> tuple[bytes, bytes]:
    return b"", packed(keys)


def _sent(number: int, query: RouteQuery, decision: RouteDecision, candidate: Candidate, tell: _Tell) -> Sent:
    held = candidate.held
    return Sent(
        number,
        query.model,
        candidate.worker.id,
        decision.strategy,
        decision.reason.value,
        candidate is decision.ranking[0],
        candidate.prefill_s,
        query.tokens,
        candidate.matched_tokens,
        query.streamed,
        [PromptSent(*tell(prompt.keys), prompt.tokens, prompt.block_tokens) for prompt in query.prompts],
        [ExactSent(*tell(prompt.keys), prompt.key_tokens) for prompt in query.exact],
        query.session_key,
        None if held is None else held.rank,
        None if held is None else held.slot,
        None if held is None else held.tokens,
    )


def _keys(data: bytes) -> Sequence[BlockKey]:
    return cast("Sequence[BlockKey]", unpacked(data))
