"""Publishes this process's dispatches to the other processes, and applies theirs.

So the loads and prefix trees of all processes agree: each accounts for its own dispatches immediately and for
those of the others a few milliseconds later. When a link closes, the other process's unfinished requests are
released; when it opens, they are sent again.
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
    Dispatched,
    EncoderReset,
    ExactSent,
    Finished,
    FirstToken,
    KeyGroupDecoder,
    KeyGroupEncoder,
    Message,
    PromptSent,
    RecentPrompts,
    SessionForgotten,
    pack_keys,
    unpack_keys,
)
from kvroute.routing.router import AttemptObserver, Dispatch, Router
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
"""Bound of the blocks, of all workers together, that are sent to a process that joins: 32 MB."""
_RECENT_PROMPTS: Final = 256
"""Prompts in one message."""
_NO_CHUNKS: Final = PromptChunks(())


class OwnDecisions:
    """The router's `Observer` that publishes this process's dispatches.

    Mutable: keeps the unfinished requests, for processes that link later.
    """

    def __init__(self, publish: Callable[[Message], None]) -> None:
        self.publish = publish
        self._ids = count(1)
        self._key_encoder = KeyGroupEncoder()
        self._unfinished: dict[int, _OwnDispatch] = {}

    def dispatched(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> AttemptObserver:
        """Publish a dispatch. Costs about 5 us, and `KeyGroupEncoder.encode`."""
        number = next(self._ids)
        dispatch = self._unfinished[number] = _OwnDispatch(self, number, query, decision, candidate)
        self.publish(_dispatched_message(number, query, decision, candidate, self._key_encoder.encode))
        return dispatch

    def session_forgotten(self, session_key: str) -> None:
        self.publish(SessionForgotten(session_key))

    def reset_keys(self) -> None:
        """Start key compression again, because a process has linked that has received no keys."""
        self._key_encoder.reset()
        self.publish(EncoderReset())

    def unfinished(self) -> list[Message]:
        """The messages that bring a newly linked process up to date with the requests in flight."""
        return [message for dispatch in self._unfinished.values() for message in dispatch.catch_up_messages()]

    def forget(self, number: int) -> None:
        """Remove a request that has ended."""
        del self._unfinished[number]


class _OwnDispatch:
    """One unfinished request of this process. Mutable: whether its first token has arrived."""

    __slots__ = ("_candidate", "_decision", "_decisions", "_has_first_token", "_number", "_query")

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
        self._has_first_token = False

    def first_token(self) -> None:
        self._has_first_token = True
        self._decisions.publish(FirstToken(self._number))

    def finished(self) -> None:
        self._decisions.forget(self._number)
        self._decisions.publish(Finished(self._number))

    def catch_up_messages(self) -> list[Message]:
        """The messages that were published about the request until now."""
        number = self._number
        sent = _dispatched_message(number, self._query, self._decision, self._candidate, _uncompressed)
        return [sent, FirstToken(number)] if self._has_first_token else [sent]


class PeerDecisions:
    """Accounts for the other processes' dispatches in this process's router. Mutable: by its methods."""

    def __init__(self, router: Router, fleet: Fleet, clock: Clock) -> None:
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._dispatches: dict[int, dict[int, Dispatch]] = {}
        """Unfinished requests, by process and by that process's number for the request."""
        self._key_decoders: dict[int, KeyGroupDecoder] = {}
        self._ranked: dict[str, tuple[int, tuple[Candidate, ...]]] = {}
        """Candidates for each model, with the version of the fleet's view that they were made from."""

    @property
    def unfinished(self) -> int:
        """Requests that are in flight in the other processes."""
        return sum(map(len, self._dispatches.values()))

    def dispatched(self, process: int, sent: Dispatched) -> None:
        """Apply a dispatch of another process; a dispatch to an unknown worker is skipped.

        Costs `Router.dispatch` and `KeyGroupDecoder.decode`.
        """
        decode = self._key_decoders.setdefault(process, KeyGroupDecoder()).decode
        prompts = [cast("Sequence[BlockKey]", decode(prompt.ends, prompt.fresh)) for prompt in sent.prompts]
        exact = [cast("Sequence[BlockKey]", decode(prompt.ends, prompt.fresh)) for prompt in sent.exact]
        try:
            worker = self._fleet.get(sent.worker)
        except NotFound:
            return
        now = self._clock.now()
        query, decision, candidate = self._as_routed(sent, prompts, exact, worker, now)
        dispatch = self._router.dispatched_by_peer(query, decision, candidate, now)
        self._dispatches.setdefault(process, {})[sent.id] = dispatch

    def reset_keys(self, process: int) -> None:
        """The process has reset its key compression."""
        self._key_decoders.pop(process, None)

    def first_token(self, process: int, number: int) -> None:
        dispatch = self._dispatches.get(process, {}).get(number)
        if dispatch is not None:
            dispatch.first_token(self._clock.now())

    def finished(self, process: int, number: int) -> None:
        dispatch = self._dispatches.get(process, {}).pop(number, None)
        if dispatch is not None:
            dispatch.finish(self._clock.now())

    def lost(self, process: int) -> None:
        """The link to the process is closed: release its requests, because their ends would not be
        received."""
        now = self._clock.now()
        self._key_decoders.pop(process, None)
        for dispatch in self._dispatches.pop(process, {}).values():
            dispatch.finish(now)

    def _as_routed(
        self,
        sent: Dispatched,
        prompts: Sequence[Sequence[BlockKey]],
        exact: Sequence[Sequence[BlockKey]],
        worker: Worker,
        now: float,
    ) -> tuple[RouteQuery, RouteDecision, Candidate]:
        query = RouteQuery(
            model=sent.model,
            now=now,
            prompts=tuple(
                PromptKeys(keys, prompt.tokens, prompt.block_tokens)
                for keys, prompt in zip(prompts, sent.prompts, strict=True)
            ),
            tokens=sent.tokens,
            session_key=sent.session_key,
            streamed=sent.streamed,
            exact=tuple(
                ExactPrompt(0, keys, _NO_CHUNKS, key_tokens=prompt.key_tokens)
                for keys, prompt in zip(exact, sent.exact, strict=True)
            ),
        )
        held = None if sent.tiers is None else CandidateMatch(Tokens(*sent.tiers), sent.slot, sent.rank)
        candidate = Candidate(worker, 0.0, sent.matched_tokens, sent.prefill_s, CostTerms(), held)
        others = self._candidates(sent.model)
        ranking = (candidate, *others) if sent.first else (*others, candidate)
        return query, RouteDecision(sent.strategy, RouteReason(sent.reason), ranking), candidate

    def _candidates(self, model: str) -> tuple[Candidate, ...]:
        """The other workers of the ranking, without the figures that strategies do not use at a dispatch."""
        view = self._fleet.view(model)
        known = self._ranked.get(model)
        if known is None or known[0] != view.version:
            if known is None and not view.workers:
                return ()
            ranked = tuple(Candidate(worker, 0.0, 0, 0.0, CostTerms()) for worker in view.workers)
            known = self._ranked[model] = view.version, ranked
        return known[1]


def recent_prompts(router: Router, workers: Sequence[Worker]) -> Iterable[RecentPrompts]:
    """A snapshot of the route history, for a process that joins."""
    blocks_per_worker = _RECENT_BLOCKS // max(1, len(workers))
    for worker in workers:
        prompts = router.recent_prompts(worker, blocks_per_worker)
        for start in range(0, len(prompts), _RECENT_PROMPTS):
            yield RecentPrompts(
                worker.id, [pack_keys(keys) for keys in prompts[start : start + _RECENT_PROMPTS]]
            )


def apply_recent_prompts(router: Router, fleet: Fleet, recent: RecentPrompts) -> None:
    """Add another process's `recent_prompts` to this process's route history."""
    try:
        worker = fleet.get(recent.worker)
    except NotFound:
        return
    for keys in recent.prompts:
        router.replay_prompt(worker, _keys(keys))


_EncodeKeys: TypeAlias = Callable[[Sequence[int]], tuple[bytes, bytes]]


def _uncompressed(keys: Sequence[int]) -> tuple[bytes, bytes]:
    return b"", pack_keys(keys)


def _dispatched_message(
    number: int, query: RouteQuery, decision: RouteDecision, candidate: Candidate, encode: _EncodeKeys
) -> Dispatched:
    held = candidate.held
    return Dispatched(
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
        [PromptSent(*encode(prompt.keys), prompt.tokens, prompt.block_tokens) for prompt in query.prompts],
        [ExactSent(*encode(prompt.keys), prompt.key_tokens) for prompt in query.exact],
        query.session_key,
        None if held is None else held.rank,
        None if held is None else held.slot,
        None if held is None else held.tokens,
    )


def _keys(data: bytes) -> Sequence[BlockKey]:
    return cast("Sequence[BlockKey]", unpack_keys(data))
