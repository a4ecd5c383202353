"""Requests of other processes, accounted here, and the dictionary compression of their block keys.

A group of keys that was sent before is sent as its last key only: the key of a block depends on all tokens
before it, so the last key of a group identifies the whole group.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Final, TypeAlias, cast

import msgspec

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import GROUP_BLOCKS, BlockKey, BlockKeys, PromptKeys
from kvroute.clock import Clock
from kvroute.errors import NotFound
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.worker import Worker
from kvroute.replicas.messages import (
    Dispatched,
    ExactSent,
    Finished,
    FirstToken,
    Groups,
    GroupsWanted,
    PeerId,
    PromptSent,
    RecentPrompts,
    SessionForgotten,
    SharedMessage,
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

MAX_GROUPS: Final = 32_768
"""Bound of the groups that one process remembers."""


class KeyGroups:
    """The groups that this process has sent or received. Mutable: `encode`, `decode` and `learn` add to it.

    The group that was used least recently is forgotten first. Processes that receive the same messages forget
    about the same groups.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[int, Sequence[int]] = OrderedDict()

    def encode(self, keys: Sequence[int]) -> tuple[bytes, bytes]:
        """`keys` as (last keys of all groups; the keys of new groups, and those after the last whole group).

        Only new groups are hashed. O(groups).
        """
        if len(keys) < GROUP_BLOCKS:
            return b"", pack_keys(keys)
        groups, fresh = self._groups, array("Q")
        ends: Sequence[int] = (
            keys.group_ends() if isinstance(keys, BlockKeys) else keys[GROUP_BLOCKS - 1 :: GROUP_BLOCKS]
        )
        start = 0
        for end in ends:
            if end in groups:
                groups.move_to_end(end)
            else:
                group = array("Q", keys[start : start + GROUP_BLOCKS])
                self._add(end, group)
                fresh.extend(group)
            start += GROUP_BLOCKS
        fresh.extend(keys[start:])
        return pack_keys(ends), fresh.tobytes()

    def decode(self, ends: bytes, fresh: bytes) -> array[int] | None:
        """The keys that another process encoded; None if a group is not known here (see `unknown`).

        O(groups).
        """
        if not ends:
            return unpack_keys(fresh)
        groups, new_keys, keys, start, is_whole = self._groups, unpack_keys(fresh), array("Q"), 0, True
        for end in unpack_keys(ends):
            group = groups.get(end)
            # A group that this process knows may still be new to the sender. Keys are hashes: a new group is
            # recognised by its last key.
            last = start + GROUP_BLOCKS - 1
            if last < len(new_keys) and new_keys[last] == end:
                if group is None:
                    group = new_keys[start : last + 1]
                    self._add(end, group)
                start = last + 1
            if group is None:
                is_whole = False
                continue
            groups.move_to_end(end)
            keys.extend(group)
        keys.extend(new_keys[start:])
        return keys if is_whole else None

    def unknown(self, ends: bytes) -> bytes:
        """Those of these groups that are not known here, by their packed last keys."""
        return pack_keys([end for end in unpack_keys(ends) if end not in self._groups])

    def packed(self, ends: bytes) -> bytes:
        """The keys of these groups, for a process that asks for them; groups that are not known are left
        out."""
        found = array("Q")
        for end in unpack_keys(ends):
            found.extend(self._groups.get(end, ()))
        return found.tobytes()

    def learn(self, keys: Sequence[int]) -> None:
        """Remember the whole groups of these keys, which start at the beginning of a group."""
        for start in range(0, len(keys) - GROUP_BLOCKS + 1, GROUP_BLOCKS):
            end = keys[start + GROUP_BLOCKS - 1]
            if end not in self._groups:
                self._add(end, array("Q", keys[start : start + GROUP_BLOCKS]))

    def _add(self, end: int, group: Sequence[int]) -> None:
        self._groups[end] = group
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)


_RECENT_BLOCKS: Final = 4_000_000
"""Bound of the blocks, of all workers together, that are sent to a process that joins: 32 MB."""
_RECENT_PROMPTS: Final = 256
"""Prompts in one message."""
_MAX_INCOMPLETE: Final = 256
"""Dispatches that wait for groups of keys."""
_NO_CHUNKS: Final = PromptChunks(())


class OwnDecisions:
    """The router's `Observer` that publishes this process's dispatches.

    Mutable: keeps the unfinished requests, for processes that link later.
    """

    def __init__(self, publish: Callable[[SharedMessage], None], groups: KeyGroups) -> None:
        self.publish = publish
        self._ids = count(1)
        self._groups = groups
        self._unfinished: dict[int, _OwnDispatch] = {}

    def dispatched(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> AttemptObserver:
        """Publish a dispatch. Costs about 5 us, and `KeyGroups.encode`."""
        number = next(self._ids)
        dispatch = self._unfinished[number] = _OwnDispatch(self, number, query, decision, candidate)
        self.publish(_dispatched_message(number, query, decision, candidate, self._groups.encode))
        return dispatch

    def session_forgotten(self, session_key: str) -> None:
        self.publish(SessionForgotten(session_key))

    def unfinished(self) -> list[SharedMessage]:
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

    def catch_up_messages(self) -> list[SharedMessage]:
        """The messages that were published about the request until now."""
        number = self._number
        sent = _dispatched_message(number, self._query, self._decision, self._candidate, _uncompressed)
        return [sent, FirstToken(number)] if self._has_first_token else [sent]


class PeerDecisions:
    """Accounts for the other processes' dispatches in this process's router. Mutable: by its methods."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        clock: Clock,
        groups: KeyGroups,
        send: Callable[[PeerId, SharedMessage], object],
    ) -> None:
        """`send` sends a message to one process."""
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._groups = groups
        self._send = send
        self._dispatches: dict[PeerId, dict[int, Dispatch]] = {}
        """Unfinished requests, by process and by that process's number for the request."""
        self._ids = count(1)
        self._incomplete: OrderedDict[int, tuple[str, list[PromptSent]]] = OrderedDict()
        """Worker and prompts of dispatches whose keys have groups that were asked for, by
        `GroupsWanted.id`."""
        self.incomplete = 0
        """Dispatches with groups that were not known here, since the start."""
        self._ranked: dict[str, tuple[int, tuple[Candidate, ...]]] = {}
        """Candidates for each model, with the version of the fleet's view that they were made from."""

    @property
    def unfinished(self) -> int:
        """Requests that are in flight in the other processes."""
        return sum(map(len, self._dispatches.values()))

    def dispatched(self, peer: PeerId, sent: Dispatched) -> None:
        """Apply a dispatch of another process; a dispatch to an unknown worker is skipped.

        If a group of its keys is not known here it counts as load alone, until the process has sent the
        group. Costs `Router.dispatch` and `KeyGroups.decode`.
        """
        dispatch = self._dispatch(peer, sent)
        if dispatch is not None:
            known = self._dispatches.setdefault(peer, {})
            before = known.pop(sent.id, None)
            if before is not None:  # sent again, and the message between was lost
                before.finish(self._clock.now())
            known[sent.id] = dispatch

    def missed(self, peer: PeerId, sent: Dispatched) -> None:
        """Apply a dispatch that arrives late: it has ended, or is sent again. It counts for the history
        alone."""
        # As a stream without a first token: its end says nothing about the worker's speed.
        dispatch = self._dispatch(peer, msgspec.structs.replace(sent, streamed=True))
        if dispatch is not None:
            dispatch.finish(self._clock.now())

    def first_token(self, peer: PeerId, number: int) -> None:
        dispatch = self._dispatches.get(peer, {}).get(number)
        if dispatch is not None:
            dispatch.first_token(self._clock.now())

    def finished(self, peer: PeerId, number: int) -> None:
        dispatch = self._dispatches.get(peer, {}).pop(number, None)
        if dispatch is not None:
            dispatch.finish(self._clock.now())

    def lost(self, peer: PeerId) -> None:
        """The link to the process is closed: release its requests, because their ends would not be
        received."""
        now = self._clock.now()
        for dispatch in self._dispatches.pop(peer, {}).values():
            dispatch.finish(now)

    def groups_wanted(self, peer: PeerId, wanted: GroupsWanted) -> None:
        """Another process does not know groups that this process has used."""
        self._send(peer, Groups(wanted.id, self._groups.packed(wanted.ends)))

    def groups(self, _: PeerId, answer: Groups) -> None:
        """Complete the history of a dispatch. Groups that the other process has forgotten stay unknown."""
        self._groups.learn(unpack_keys(answer.keys))
        worker_id, prompts = self._incomplete.pop(answer.id, ("", []))
        worker = self._worker(worker_id)
        for prompt in prompts if worker is not None else ():
            keys = self._groups.decode(prompt.ends, prompt.fresh)
            if keys is not None and worker is not None:
                self._router.replay_prompt(worker, cast("Sequence[BlockKey]", keys))

    def _dispatch(self, peer: PeerId, sent: Dispatched) -> Dispatch | None:
        decode = self._groups.decode
        prompts = [decode(prompt.ends, prompt.fresh) for prompt in sent.prompts]
        exact = [decode(prompt.ends, prompt.fresh) for prompt in sent.exact]
        known_prompts = [keys for keys in prompts if keys is not None]
        known_exact = [keys for keys in exact if keys is not None]
        if len(known_prompts) < len(prompts) or len(known_exact) < len(exact):
            self._ask(peer, sent)
            known_prompts, known_exact = [], []
        worker = self._worker(sent.worker)
        if worker is None:
            return None
        now = self._clock.now()
        query, decision, candidate = self._as_routed(
            sent,
            cast("list[Sequence[BlockKey]]", known_prompts),
            cast("list[Sequence[BlockKey]]", known_exact),
            worker,
            now,
        )
        return self._router.dispatched_by_peer(query, decision, candidate, now)

    def _ask(self, peer: PeerId, sent: Dispatched) -> None:
        """Ask for the groups of a dispatch that are not known here."""
        self.incomplete += 1
        all_ends = [*(prompt.ends for prompt in sent.prompts), *(prompt.ends for prompt in sent.exact)]
        ends = b"".join(map(self._groups.unknown, all_ends))
        number = next(self._ids)
        self._incomplete[number] = sent.worker, sent.prompts
        if len(self._incomplete) > _MAX_INCOMPLETE:
            self._incomplete.popitem(last=False)
        self._send(peer, GroupsWanted(number, ends))

    def _worker(self, worker_id: str) -> Worker | None:
        try:
            return self._fleet.get(worker_id)
        except NotFound:
            return None

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
                for keys, prompt in zip(prompts, sent.prompts, strict=False)  # none if groups are unknown
            ),
            tokens=sent.tokens,
            session_key=sent.session_key,
            streamed=sent.streamed,
            exact=tuple(
                ExactPrompt(0, keys, _NO_CHUNKS, key_tokens=prompt.key_tokens)
                for keys, prompt in zip(exact, sent.exact, strict=False)
            ),
        )
        held = None
        if sent.tiers is not None:
            slot = self._router.slot_of(worker, sent.rank)
            held = CandidateMatch(Tokens(*sent.tiers), slot, sent.rank)
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


def apply_recent_prompts(router: Router, fleet: Fleet, groups: KeyGroups, recent: RecentPrompts) -> None:
    """Add another process's `recent_prompts` to this process's route history."""
    try:
        worker = fleet.get(recent.worker)
    except NotFound:
        return
    for packed in recent.prompts:
        keys = unpack_keys(packed)
        groups.learn(keys)
        router.replay_prompt(worker, cast("Sequence[BlockKey]", keys))


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
        None if held is None else held.tokens,
    )
