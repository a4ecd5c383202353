"""Requests of other processes, accounted here.

Keys that were sent before are sent as one key (`KeyGroups`). Of a request that ends before its dispatch is
published only the prompt and its share of the averages are sent.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from typing import Final, TypeAlias

import msgspec

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.key_groups import KeyGroups
from kvroute.blocks.keys import GROUP_BLOCKS, PromptKeys
from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.replicas.mesh import GATHER_S
from kvroute.replicas.messages import (
    Dispatched,
    EndedRequests,
    ExactSent,
    Finished,
    FirstToken,
    KeyGroupsAnswer,
    KeyGroupsRequest,
    PeerId,
    PromptSent,
    SessionForgotten,
    SharedMessage,
    pack_keys,
    unpack_keys,
)
from kvroute.routing.registry import STRATEGIES
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.sessions import hash_of_session
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

SHORT_S: Final = 3 * GATHER_S
"""A request that ends within this time is short."""
PAUSE_S: Final = 6 * GATHER_S
"""While most requests are short, `DispatchPublisher.take` is called at this interval, and a dispatch that is
younger waits for the next call."""
_ENDED_S: Final = 20 * GATHER_S
"""A request that a `take` found ended is sent with the next other messages, or by the first `take` after this
time."""
REPEAT_S: Final = 5.0
"""A prompt of an ended request is not sent again for the same worker within this time."""
_MAX_SENT: Final = 4096
"""Most entries of `DispatchPublisher._sent_prompts`; with more it is emptied."""
_MAX_INCOMPLETE: Final = 256
"""Questions for groups of keys, and prompts that wait for each of them."""
_MAX_WAITING: Final = 1024
"""Prompts that wait for all questions together: a long one has 4 KB of keys."""
_ASK_AGAIN_S: Final = 2.0
"""A question that was not answered for this long is repeated with the next prompt that needs it."""
_NO_KEYS: Final = array("Q")
_NO_CHUNKS: Final = PromptChunks(())
_NO_TERMS: Final = CostTerms()
_HANDOVERS: Final = frozenset({RouteReason.HANDED_OVER, RouteReason.OVER_THRESHOLD})
_REASONS: Final = {str(reason): reason for reason in RouteReason}
"""A later release may have more: strategies then take such a request as one that had no choice."""
_EncodeKeys: TypeAlias = Callable[[Sequence[int]], tuple[int | None, Sequence[int]]]


def _uncompressed(keys: Sequence[int]) -> tuple[int | None, Sequence[int]]:
    return None, keys


def _observed_strategies() -> frozenset[str]:
    """The strategies that every process must tell about every dispatch."""
    return frozenset(name for name, strategy in STRATEGIES.items() if strategy.observes_dispatch)


class DispatchPublisher:
    """The router's `Observer`: gathers what this process publishes. Mutable: until `take`.

    It also keeps the unfinished requests, for processes that link later.
    """

    def __init__(self, wake: Callable[[], object], groups: KeyGroups) -> None:
        """`wake` is called when there is something to `take` in `GATHER_S`; after that `due_at` says when."""
        self._wake = wake
        self._groups = groups
        self._gathered: list[SharedMessage | OwnDispatch] = []
        self._ended: list[OwnDispatch] = []
        self._ended_due = inf
        """When `_ended` is sent with nothing else to send."""
        self._are_short = False
        """Whether most of the requests that the last `take` found were short."""
        self.due_at: float | None = None
        """When the next `take` is due; None if the last one left nothing."""
        self.counts_repeats = False
        """Whether each use of a prompt counts somewhere (`scaling.deletion_cost`), and must be sent."""
        self._sent_prompts: set[tuple[str, int]] = set()
        """Worker and last key of each prompt of an ended request that was sent since this was emptied."""
        self._forget_at = 0.0
        """When `_sent_prompts` is emptied."""
        self._ids = count(1)
        self._unfinished: dict[int, OwnDispatch] = {}
        """By number. Only dispatches that were published."""
        self._observed = _observed_strategies()

    def publish(self, message: SharedMessage | OwnDispatch) -> None:
        """Add to what is sent next."""
        self._gathered.append(message)
        if len(self._gathered) == 1:
            self._wake()

    def dispatched(
        self, query: RouteQuery, decision: RouteDecision, candidate: Candidate, now: float
    ) -> OwnDispatch:
        dispatch = OwnDispatch(self, query, decision, candidate, now)
        self.publish(dispatch)
        return dispatch

    def session_forgotten(self, session_key: str) -> None:
        self.publish(SessionForgotten(session_key))

    def take(self, now: float, *, everything: bool = False) -> list[SharedMessage]:
        """The messages that are due at `now`. O(requests), and `KeyGroups.encode` of their keys.

        A dispatch is published within `GATHER_S` of its start; while most requests are short, within two
        `PAUSE_S`. Of one that has ended already only its share of the averages and its prompt are sent, with
        the next messages or after `_ENDED_S`.
        """
        messages, done, young = list[SharedMessage](), self._ended, list[OwnDispatch]()
        short = others = 0
        # A request that ends first costs each other process a tenth of one that it must account for.
        young_since = now - PAUSE_S if self._are_short and not everything else inf
        observed = self._observed
        for pending in self._gathered:
            if not isinstance(pending, OwnDispatch):
                messages.append(pending)
            elif self.counts_repeats and pending.decision.handover is not None:
                # The second leg does not use a cache, so the receiver must not count it as a use. It must
                # arrive after the first leg.
                messages += self._published(pending)
                others += 1
            elif pending.ended_at is not None and pending.decision.strategy not in observed:
                done.append(pending)
                if pending.ended_at - pending.started_at <= SHORT_S:
                    short += 1
                else:
                    others += 1
            elif pending.started_at > young_since and pending.decision.strategy not in observed:
                young.append(pending)
            else:
                messages += self._published(pending)
                others += 1
        self._gathered = [*young]
        if short or others:
            self._are_short = short >= others
        if done and (messages or everything or now >= self._ended_due):
            self._ended = []
            if now >= self._forget_at or len(self._sent_prompts) > _MAX_SENT:
                self._forget_at = now + REPEAT_S
                self._sent_prompts.clear()
            sent_prompts = None if self.counts_repeats else self._sent_prompts
            messages += _ended_messages(done, self._groups.encode, sent_prompts)
        if not self._ended:
            self._ended_due = inf
        elif self._ended_due == inf:
            self._ended_due = now + _ENDED_S
        self.due_at = None
        if young or self._ended:
            self.due_at = now + (PAUSE_S if self._are_short else GATHER_S)
        return messages

    def _published(self, dispatch: OwnDispatch) -> list[SharedMessage]:
        dispatch.number = number = next(self._ids)
        if dispatch.ended_at is None:
            self._unfinished[number] = dispatch
        return dispatch.messages(self._groups.encode)

    def cache_cleared(self, worker: str) -> None:
        """The worker's cache is empty: what it computed before is not sent as its prompts any more."""
        for pending in (*self._gathered, *self._ended):
            if isinstance(pending, OwnDispatch) and pending.candidate.worker.id == worker:
                pending.is_cleared = pending.ended_at is not None

    def unfinished(self) -> list[SharedMessage]:
        """The messages that bring a newly linked process up to date with the requests in flight.

        Those that were not taken yet are not among them.
        """
        dispatches = self._unfinished.values()
        return [message for dispatch in dispatches for message in dispatch.messages(_uncompressed)]

    def ended(self, number: int) -> None:
        """A published request has ended."""
        del self._unfinished[number]
        self.publish(Finished(number))


class OwnDispatch(msgspec.Struct, eq=False):
    """One attempt of this process, a `ReservationListener`. Mutable: what has happened to it."""

    _decisions: DispatchPublisher
    query: RouteQuery
    decision: RouteDecision
    candidate: Candidate
    started_at: float
    ended_at: float | None = None
    _has_first_token: bool = False
    number: int = 0
    """This process's number for a published request; 0: the others do not know it."""
    is_cleared: bool = False
    """Whether it ended before the worker's cache was emptied."""

    @property
    def is_answered(self) -> bool:
        """Whether it counts for the averages of its worker, as in `Reservation.finish`."""
        return self._has_first_token or not self.query.streamed

    def first_token(self, now: float, is_first: bool) -> None:
        if is_first:
            self._has_first_token = True
            if self.number:
                self._decisions.publish(FirstToken(self.number))

    def finish(self, now: float) -> None:
        self.ended_at = now
        if self.number:
            self._decisions.ended(self.number)

    def messages(self, encode: _EncodeKeys) -> list[SharedMessage]:
        """The messages about what has happened until now."""
        number, query, candidate = self.number, self.query, self.candidate
        match, prompts, exact = candidate.match, list[PromptSent](), list[ExactSent]()
        for prompt in query.prompts:
            base_key, fresh = encode(prompt.keys)
            prompts.append(PromptSent(base_key, pack_keys(fresh), prompt.tokens, prompt.block_tokens))
        for exact_prompt in query.exact:
            base_key, fresh = encode(exact_prompt.keys)
            exact.append(ExactSent(base_key, pack_keys(fresh), exact_prompt.key_tokens))
        messages: list[SharedMessage] = [
            Dispatched(
                number,
                query.model,
                candidate.worker.id,
                self.decision.strategy,
                self.decision.reason,
                candidate is self.decision.ranking[0],
                candidate.prefill_s,
                query.tokens,
                candidate.matched_tokens,
                query.streamed,
                prompts,
                exact,
                query.session_key,
                None if match is None else match.rank,
                None if match is None else match.tokens,
            )
        ]
        if self._has_first_token:
            messages.append(FirstToken(number))
        if self.ended_at is not None:
            messages.append(Finished(number))
        return messages


def _ended_messages(
    dispatches: Iterable[OwnDispatch], encode: _EncodeKeys, sent_prompts: set[tuple[str, int]] | None
) -> Iterable[EndedRequests]:
    """One message for each model, worker and rank, without the prompts in `sent_prompts`, to which the others
    are added.

    `sent_prompts` has workers, with their ranks, and last keys.
    """
    by_target: dict[tuple[str, str, int | None], list[OwnDispatch]] = {}
    for dispatch in dispatches:
        candidate = dispatch.candidate
        rank = None if candidate.match is None else candidate.match.rank
        by_target.setdefault((dispatch.query.model, candidate.worker.id, rank), []).append(dispatch)
    for (model, worker, rank), dispatches_there in by_target.items():
        target = worker if rank is None else f"{worker} {rank}"
        answered, prefill_s, stay_s, blocks, tokens = 0, 0.0, 0.0, 0, 0.0
        base_keys, sizes, all_fresh, repeated = list[int | None](), list[int](), array("Q"), array("Q")
        sessions = array("Q")
        for dispatch in dispatches_there:
            if (key := dispatch.query.session_key) is not None:
                sessions.append(dispatch.query.session_hash or hash_of_session(model, key))
            if dispatch.is_answered and dispatch.ended_at is not None:
                answered += 1
                prefill_s += dispatch.candidate.prefill_s
                stay_s += dispatch.ended_at - dispatch.started_at
            for prompt in () if dispatch.is_cleared else dispatch.query.prompts:
                keys = prompt.keys
                size = len(keys)
                if size and sent_prompts is not None:
                    # The others have it. In their LRU order its last use is `REPEAT_S` too old at most.
                    if (target, keys[-1]) in sent_prompts:
                        continue
                    sent_prompts.add((target, keys[-1]))
                base_key, fresh = encode(keys)
                if base_key is not None and not fresh:
                    repeated.append(base_key)
                else:
                    base_keys.append(base_key)
                    sizes.append(len(fresh))
                    all_fresh.extend(fresh)
                blocks += size
                tokens += prompt.block_tokens * size
        block_tokens = tokens / blocks if blocks else 0.0
        packed = all_fresh.tobytes()
        figures = answered, prefill_s, stay_s, block_tokens
        if answered or base_keys or repeated or sessions:
            repeated_keys, session_hashes = repeated.tobytes(), sessions.tobytes()
            prompt_keys = base_keys, sizes, packed
            yield EndedRequests(model, worker, *figures, *prompt_keys, repeated_keys, session_hashes, rank)


class _Question(msgspec.Struct, eq=False):
    """A question for the groups of keys up to one key. Mutable: `prompts`."""

    id: int
    asked_at: float
    prompts: list[tuple[str, int | None, PromptSent]]
    """Worker, rank and prompt that wait for the answer."""


class PeerDispatches:
    """Accounts for the other processes' dispatches in this process's router. Mutable: by its methods."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        clock: Clock,
        groups: KeyGroups,
        send: Callable[..., object],
    ) -> None:
        """`send(peer, *messages)` sends messages to one process together."""
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._groups = groups
        self._send = send
        self._dispatches: dict[PeerId, dict[int, Dispatch]] = {}
        """Unfinished requests, by process and by that process's number for the request."""
        self._ids = count(1)
        self._questions: OrderedDict[tuple[PeerId, int], _Question] = OrderedDict()
        """By the process that was asked, and the last key. Several prompts may begin with the same groups."""
        self._key_group_requests: list[KeyGroupsRequest] = []
        """Questions of the message that is being applied; they are sent together."""
        self.incomplete = 0
        """Prompts with keys that were not known here, since the start."""
        self._ranked: dict[str, tuple[int, tuple[Candidate, ...]]] = {}
        """Candidates for each model, with the version of the fleet's view that they were made from."""
        self._observed = _observed_strategies()

    @property
    def unfinished(self) -> int:
        """Requests that are in flight in the other processes."""
        return sum(map(len, self._dispatches.values()))

    def dispatched(self, peer: PeerId, message: Dispatched) -> None:
        """Apply a dispatch of another process; a dispatch to an unknown worker is skipped.

        If some of its keys are not known here it counts as load alone, until the process has sent them. Costs
        `Router.dispatch` and `KeyGroups.decode`.
        """
        dispatch = self._dispatch(peer, message)
        self._send_questions(peer)
        if dispatch is not None:
            running = self._dispatches.setdefault(peer, {})
            replaced = running.pop(message.id, None)
            if replaced is not None:  # sent again, and the message between was lost
                replaced.finish(self._clock.now())
            running[message.id] = dispatch

    def missed(self, peer: PeerId, message: Dispatched) -> None:
        """Apply a dispatch that arrives late: it has ended, or is sent again. It counts for the history
        alone."""
        # As a stream without a first token: its end says nothing about the worker's speed.
        dispatch = self._dispatch(peer, msgspec.structs.replace(message, streamed=True))
        self._send_questions(peer)
        if dispatch is not None:
            dispatch.finish(self._clock.now())

    def ended(self, peer: PeerId, message: EndedRequests) -> None:
        """Apply requests of another process that have ended already: one step for the load of all of them."""
        worker = self._worker(message.worker)
        if worker is None:
            return
        now, repeated = self._clock.now(), unpack_keys(message.repeated)
        if message.answered > 0:
            worker.load.ended_elsewhere(message.answered, message.prefill_s, message.stay_s, now)
            if message.rank in worker.rank_units:
                worker.load_of(message.rank).ended_elsewhere(
                    message.answered, message.prefill_s, message.stay_s, now
                )
        if message.sessions:
            self._router.sessions.learn(message.model, unpack_keys(message.sessions), worker.id)
        # Prompts that were sent before are most of a load test and of evaluations.
        self._groups.use_all(repeated)
        for index in self._router.not_repeated(worker, repeated, message.rank):
            self._replay(peer, message, worker, repeated[index], _NO_KEYS, now)
        all_fresh, end = unpack_keys(message.fresh), 0
        short: list[array[int]] = []
        for base_key, size in zip(message.base_keys, message.sizes, strict=True):
            start, end = end, end + size
            fresh = all_fresh[start:end]
            if base_key is None and 0 < size < GROUP_BLOCKS:
                short.append(fresh)
            else:
                self._replay(peer, message, worker, base_key, fresh, now)
        if short:
            for index in self._router.not_repeated(worker, [keys[-1] for keys in short], message.rank):
                self._replay(peer, message, worker, None, short[index], now)
        self._send_questions(peer)

    def _replay(
        self,
        peer: PeerId,
        message: EndedRequests,
        worker: Worker,
        base_key: int | None,
        fresh: array[int],
        at: float,
    ) -> None:
        keys = self._groups.decode(base_key, fresh)
        if keys is None:
            prompt = PromptSent(base_key, pack_keys(fresh), 0, message.block_tokens)
            self._ask(peer, message.worker, prompt, message.rank)
        elif message.block_tokens > 0:
            self._router.ended_at_peer(worker, message.model, keys, message.block_tokens, at, message.rank)

    def first_token(self, peer: PeerId, number: int) -> None:
        dispatch = self._dispatches.get(peer, {}).get(number)
        if dispatch is not None:
            dispatch.first_token(self._clock.now())

    def finished(self, peer: PeerId, number: int) -> None:
        dispatch = self._dispatches.get(peer, {}).pop(number, None)
        if dispatch is not None:
            dispatch.finish(self._clock.now())

    def peer_gone(self, peer: PeerId) -> None:
        """The process is gone: release its requests, because their ends would not be received."""
        now = self._clock.now()
        for dispatch in self._dispatches.pop(peer, {}).values():
            dispatch.finish(now)
        for question_key in [key for key in self._questions if key[0] == peer]:
            del self._questions[question_key]

    def send_key_groups(self, peer: PeerId, request: KeyGroupsRequest) -> None:
        """Another process does not know keys that this process has sent."""
        self._send(peer, KeyGroupsAnswer(request.id, pack_keys(self._groups.keys_to(request.last_key))))

    def learn_key_groups(self, _: PeerId, answer: KeyGroupsAnswer) -> None:
        """Complete the history. Keys that the other process has forgotten stay unknown."""
        self._groups.learn(unpack_keys(answer.keys))
        question_key = next(
            (key for key, pending in self._questions.items() if pending.id == answer.id), None
        )
        if question_key is None:
            return
        question = self._questions.pop(question_key)
        for worker_id, rank, prompt in question.prompts:
            worker = self._worker(worker_id)
            keys = self._groups.decode(prompt.base_key, unpack_keys(prompt.fresh))
            if keys is not None and worker is not None:
                self._router.replay_prompt(worker, keys, rank)

    def _dispatch(self, peer: PeerId, message: Dispatched) -> Dispatch | None:
        prompts, exact = self._prompts(peer, message), list[ExactPrompt]()
        for exact_prompt in message.exact:
            keys = self._groups.decode(exact_prompt.base_key, unpack_keys(exact_prompt.fresh))
            if keys is None:
                self._ask(peer, message.worker, exact_prompt)
            else:
                exact.append(ExactPrompt(0, keys, _NO_CHUNKS, key_tokens=exact_prompt.key_tokens))
        worker = self._worker(message.worker)
        if worker is None:
            return None
        now, prefill_s = self._clock.now(), max(0.0, message.prefill_s)
        learns = not (message.is_first and message.reason in _HANDOVERS)  # the second leg of a handover
        if (
            message.tiers is None
            and len(prompts) < 2
            and not exact
            and message.strategy not in self._observed
        ):
            # The usual case. The objects below would cost as much as the accounting.
            prompt = prompts[0] if prompts else None
            session = None if message.session_key is None else (message.session_key, message.strategy)
            return self._router.reserve_at_peer(
                worker,
                message.model,
                prefill_s,
                message.tokens,
                message.streamed,
                prompt,
                now,
                learns,
                session,
            )
        query = RouteQuery(
            model=message.model,
            now=now,
            prompts=tuple(prompts),
            tokens=message.tokens,
            session_key=message.session_key,
            streamed=message.streamed,
            exact=tuple(exact),
        )
        match = None
        if message.tiers is not None:
            match = CandidateMatch(
                Tokens(*message.tiers), self._router.slot_of(worker, message.rank), message.rank
            )
        candidate = Candidate(worker, 0.0, message.matched_tokens, prefill_s, _NO_TERMS, match)
        others = self._candidates(message.model) if message.strategy in self._observed else ()
        ranking = (candidate, *others) if message.is_first else (*others, candidate)
        decision = RouteDecision(
            message.strategy, _REASONS.get(message.reason, RouteReason.ONLY_WORKER), ranking
        )
        return self._router.dispatch(query, decision, candidate, now, is_own=False, learns=learns)

    def _prompts(self, peer: PeerId, message: Dispatched) -> list[PromptKeys]:
        """The prompts whose keys are known here; the keys of the others are asked for."""
        prompts = list[PromptKeys]()
        for prompt in message.prompts:
            keys = self._groups.decode(
                prompt.base_key, unpack_keys(prompt.fresh) if prompt.fresh else _NO_KEYS
            )
            if keys is None:
                self._ask(peer, message.worker, prompt, message.rank)
            else:
                prompts.append(PromptKeys(keys, prompt.tokens, prompt.block_tokens))
        return prompts

    def _ask(
        self, peer: PeerId, worker_id: str, prompt: PromptSent | ExactSent, rank: int | None = None
    ) -> None:
        """Ask for keys of a prompt that are not known here, unless that was done. See `_send_questions`."""
        if prompt.base_key is None:
            return
        self.incomplete += 1
        now, question_key = self._clock.now(), (peer, prompt.base_key)
        question = self._questions.get(question_key)
        if question is None or now - question.asked_at > _ASK_AGAIN_S:
            waiting = [] if question is None else question.prompts
            question = self._questions[question_key] = _Question(next(self._ids), now, waiting)
            self._key_group_requests.append(KeyGroupsRequest(question.id, prompt.base_key))
            if len(self._questions) > _MAX_INCOMPLETE:
                self._questions.popitem(last=False)
        prompts = sum(len(pending.prompts) for pending in self._questions.values())
        has_room = prompts < _MAX_WAITING and len(question.prompts) < _MAX_INCOMPLETE
        if has_room and isinstance(prompt, PromptSent):  # the history has no exact keys
            question.prompts.append((worker_id, rank, prompt))

    def _send_questions(self, peer: PeerId) -> None:
        """Send the questions of the message that was applied."""
        if self._key_group_requests:
            wanted, self._key_group_requests = self._key_group_requests, []
            self._send(peer, *wanted)

    def _worker(self, worker_id: str) -> Worker | None:
        try:
            return self._fleet.get(worker_id)
        except NotFound:
            return None

    def _candidates(self, model: str) -> tuple[Candidate, ...]:
        """The other workers of the ranking, without the figures that strategies do not use at a dispatch."""
        view = self._fleet.view(model)
        version, ranked = self._ranked.get(model, (None, ()))
        if version != view.version and (version is not None or view.workers):
            ranked = tuple(Candidate(worker, 0.0, 0, 0.0, _NO_TERMS) for worker in view.workers)
            self._ranked[model] = view.version, ranked
        return ranked
