"""The strategy `kvaware`: least cost in seconds, with the cache map as the source of matched tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

from kvroute.fleet.worker import FleetView, Worker
from kvroute.index.history import RouteHistory
from kvroute.index.map_trust import MapTrust
from kvroute.options import Options, option
from kvroute.routing.audit import AuditOptions
from kvroute.routing.cost import CostModel, TierLoad, discounted, matched_tokens
from kvroute.routing.ranks import best_ranks
from kvroute.routing.sessions import keep_session
from kvroute.routing.strategy import (
    CachePlace,
    Candidate,
    CandidateMatch,
    ExactPrompt,
    GroupTokens,
    Needs,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Tokens,
)
from kvroute.routing.transfers import CacheViews, TransferOptions


class KvAwareOptions(Options):
    """Routing on the workers' KV events.

    For a worker whose map is not trusted the route history counts, as in `prefixaware`, until the map is
    whole again.
    """

    tiers: TransferOptions = option(default_factory=TransferOptions)
    audit: AuditOptions = option(default_factory=AuditOptions)


PromptLookup: TypeAlias = tuple[ExactPrompt, Mapping[int, Tokens], Mapping[int, int]]
"""A prompt; slot -> its tokens in the cache map; slot -> its leading keys in unfinished requests."""


class KvAware:
    """Ranks workers by cost, with matched tokens from the cache map. Implements `Strategy`.

    Mutable: `on_dispatch` starts transfers. Other code changes the views.
    """

    name: ClassVar[str] = "kvaware"
    needs: ClassVar[Needs] = Needs.TOKENS
    options: ClassVar[type[Options]] = KvAwareOptions
    has_affinity: ClassVar[bool] = True
    observes_dispatch: ClassVar[bool] = True

    def __init__(
        self, options: KvAwareOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._costs = costs
        self._history = history
        self._cache_map, self._in_flight, self._transfers, reports = views
        self._map_discounts = {} if reports is None else reports.discounts.by_map
        self._history_discounts = {} if reports is None else reports.discounts.by_history
        self._answers = {} if reports is None else reports.answers.by_unit
        self._no_match: dict[int, CandidateMatch] = {}
        """Slot -> the match of a cache that holds nothing of a prompt."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        workers, now = view.workers, query.now
        if not query.prompts:
            ranking = self._costs.rank(query, workers, queues=view.loads)
            return RouteDecision(self.name, RouteReason.NO_PROMPT, ranking)
        if not query.reads_cache or not view.caches_prefixes:
            return self._by_load(query, view)
        exact, fast_path = query.exact, None
        if exact and self._cache_map.refresh(False):
            self._in_flight.compact(now)
        if len(exact) == 1:
            lookups = [self._lookup_prompt(exact[0], now)]
            fast_path = self._fast_path(lookups[0], workers)
        else:
            lookups = [self._lookup_prompt(prompt, now) for prompt in exact]
        if fast_path is not None:
            targets: Sequence[Worker] = workers
            matches, matched, needs_load = fast_path
        else:
            targets, matches = self._candidate_matches(query, workers, lookups)
            matched = [match.tokens.total for match in matches]
            needs_load = any(match.tokens.l1 or match.tokens.l2 for match in matches)
        loads = None
        if needs_load:
            loads = [
                self._tier_load(match, worker, now) for worker, match in zip(targets, matches, strict=True)
            ]
        predicted = None
        if self._map_discounts or self._history_discounts:
            predicted, matched = matched, self._discounted(matched, targets, matches)
        if view.by_rank is not None or len(targets) > len(workers):
            units = [worker.unit_of(match.rank) for worker, match in zip(targets, matches, strict=True)]
            ranks = self._costs.rank(query, targets, matched, loads, matches, None, units, predicted)
            reason = _reason(query, ranks[0], max(matched))
            return RouteDecision(self.name, reason, best_ranks(ranks))
        # One target per worker: there are no ranks to choose from.
        ranking = self._costs.rank(query, workers, matched, loads, matches, view.loads, None, predicted)
        if query.session_worker is not None and keep_session(ranking, query, self._costs):
            return RouteDecision(self.name, RouteReason.SESSION_KEPT, ranking)
        return RouteDecision(self.name, _reason(query, ranking[0], max(matched)), ranking)

    def _by_load(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        """The decision for a request that finds no cached block on any worker."""
        targets: list[Worker] = []
        matches: list[CandidateMatch] = []
        distrust_reason = NO_CACHE if query.reads_cache else CACHE_NOT_READ
        for worker in view.workers:
            for cache, rank in self._rank_caches(query, worker):
                slot = None if cache is None else cache.slot
                targets.append(worker)
                matches.append(CandidateMatch(_NO_TOKENS, slot, rank, distrust_reason=distrust_reason))
        units = [worker.unit_of(match.rank) for worker, match in zip(targets, matches, strict=True)]
        ranking = self._costs.rank(query, targets, None, None, matches, None, units)
        return RouteDecision(self.name, RouteReason.NOT_CACHED, best_ranks(ranking))

    def _rank_caches(
        self, query: RouteQuery, worker: Worker
    ) -> Sequence[tuple[CachePlace | None, int | None]]:
        """The ranks of a worker that the request can be sent to, each with its cache in the cache map.

        A rank is None for a worker with one rank, and if the engine chooses.
        """
        caches = self._cache_map.places(worker)
        if len(caches) < 2 and not worker.rank_units:
            return ((caches[0] if caches else None, None),)
        by_rank = {cache.rank: cache for cache in caches}
        ranks = sorted({*by_rank, *worker.rank_units})
        if not query.takes_rank:
            return ((None, None),)
        if query.rank is not None:
            rank = ranks[query.rank] if query.rank < len(ranks) else None
            return ((None if rank is None else by_rank.get(rank), rank),)
        return [(by_rank.get(rank), rank) for rank in ranks]

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Account the transfer of the request's blocks from slower tiers."""
        match = candidate.match
        if match is not None:
            slot = candidate.worker.index if match.slot is None else match.slot
            self._transfers.start(slot, match.tokens, query.now)

    def forget(self, session_key: str) -> bool:
        return False

    def _discounted(
        self, matched: Sequence[int], targets: Sequence[Worker], matches: Sequence[CandidateMatch]
    ) -> list[int]:
        by_map = discounted(matched, targets, self._map_discounts)
        by_history = discounted(matched, targets, self._history_discounts)
        return [
            map_tokens if match.mapped else history_tokens
            for map_tokens, history_tokens, match in zip(by_map, by_history, matches, strict=True)
        ]

    def _tier_load(self, match: CandidateMatch, worker: Worker, now: float) -> TierLoad:
        slot = worker.index if match.slot is None else match.slot
        return self._transfers.load(slot, match.tokens, now)

    def _lookup_prompt(self, prompt: ExactPrompt, now: float) -> PromptLookup:
        """What the cache map and the requests in flight have of a prompt."""
        in_flight, continues_finished = self._in_flight.match(prompt.keys)
        # The events of a finished request's answer may have arrived since the last refresh.
        if continues_finished and self._cache_map.refresh(True):
            self._in_flight.compact(now)
            in_flight, _ = self._in_flight.match(prompt.keys)
        return prompt, self._cache_map.match(prompt), in_flight

    def _fast_path(
        self, lookup: PromptLookup, workers: Sequence[Worker]
    ) -> tuple[list[CandidateMatch], list[int], bool] | None:
        """The usual case of `_candidate_matches`: one prompt, and workers of one rank with whole maps.

        Returns the matches, the matched tokens of each, and whether slower tiers hold matched tokens; None in
        any other case.
        """
        prompt, cached, in_flight = lookup
        caches_of = self._cache_map.places
        matches: list[CandidateMatch] = []
        matched: list[int] = []
        needs_load = False
        for worker in workers:
            caches = caches_of(worker)
            if len(caches) != 1 or worker.rank_units or not worker.facts.caches_prefixes:
                return None
            # By position: a named tuple's attribute costs more.
            cache = caches[0]
            slot = cache[0]
            if cache[2] is not _WHOLE:  # its trust
                return None
            tokens = cached.get(slot)
            if in_flight and slot in in_flight:
                tokens = self._with_in_flight(tokens, in_flight[slot], prompt, worker, cache)
            if tokens is None:
                matched.append(0)
                matches.append(self._no_match.get(slot) or self._add_no_match(slot))
                continue
            gpu, l1, l2 = tokens
            if l1 or l2:
                needs_load = True
            matched.append(gpu + l1 + l2)
            # As `CandidateMatch(...)`, without its constructor in Python.
            matches.append(_new(CandidateMatch, (tokens, slot, None, True, "")))
        return matches, matched, needs_load

    def _add_no_match(self, slot: int) -> CandidateMatch:
        match = self._no_match[slot] = CandidateMatch(_NO_TOKENS, slot, None, mapped=True)
        return match

    def _candidate_matches(
        self, query: RouteQuery, workers: Sequence[Worker], lookups: Sequence[PromptLookup]
    ) -> tuple[list[Worker], list[CandidateMatch]]:
        """Every rank that the request could be sent to, as its worker, with its match."""
        targets = [(worker, *target) for worker in workers for target in self._rank_caches(query, worker)]
        history_tokens: Sequence[int] = ()
        inexact = query.inexact or "no_events"
        matches: list[CandidateMatch] = []
        for position, (worker, cache, rank) in enumerate(targets):
            slot = None if cache is None else cache.slot
            if not worker.facts.caches_prefixes:
                matches.append(CandidateMatch(_NO_TOKENS, slot, rank, distrust_reason=NO_CACHE))
                continue
            is_open = rank is None and bool(worker.rank_units or len(self._cache_map.places(worker)) > 1)
            if not history_tokens and not (lookups and cache is not None and cache.trust is _WHOLE):
                history_tokens = self._history_tokens(query, targets)
            if is_open:
                matches.append(self._mean_match(worker, lookups, history_tokens[position]))
            elif cache is None or not lookups:
                tokens = Tokens(history_tokens[position])
                matches.append(CandidateMatch(tokens, slot, rank, distrust_reason=inexact))
            else:
                tokens = self._map_tokens(lookups, cache, worker)
                matches.append(
                    _trusted_match(cache, rank, tokens, history_tokens[position] if history_tokens else 0)
                )
        return [worker for worker, _, _ in targets], matches

    def _history_tokens(
        self, query: RouteQuery, targets: Sequence[tuple[Worker, CachePlace | None, int | None]]
    ) -> Sequence[int]:
        """The matched tokens of each target by the route history."""
        positions: dict[int, int] = {}
        for position, (worker, _, rank) in enumerate(targets):
            for unit in worker.units if rank is None else (worker.unit_of(rank),):
                positions.setdefault(unit, position)
        return matched_tokens(
            self._history, query, [worker for worker, _, _ in targets], positions, self._answers
        )

    def _mean_match(
        self, worker: Worker, lookups: Sequence[PromptLookup], history_tokens: int
    ) -> CandidateMatch:
        """The match of a worker whose engine chooses the rank: the mean over the ranks, which is not
        judged."""
        caches = self._cache_map.places(worker)
        if not lookups or not caches or not _are_whole(caches):
            return CandidateMatch(Tokens(history_tokens), distrust_reason=RANK_OPEN)
        tokens = sum(self._map_tokens(lookups, cache, worker).total for cache in caches) // len(caches)
        return CandidateMatch(Tokens(tokens - tokens % worker.block_size), distrust_reason=RANK_OPEN)

    def _map_tokens(self, lookups: Sequence[PromptLookup], cache: CachePlace, worker: Worker) -> Tokens:
        """The tokens of all prompts that the cache holds."""
        all_prompts, slot = _NO_TOKENS, cache.slot
        for prompt, cached, in_flight in lookups:
            tokens = cached.get(slot)
            if slot in in_flight:
                tokens = self._with_in_flight(tokens, in_flight[slot], prompt, worker, cache)
            if len(lookups) == 1:
                return tokens or _NO_TOKENS
            if tokens is not None:
                all_prompts = Tokens(
                    all_prompts.gpu + tokens.gpu, all_prompts.l1 + tokens.l1, all_prompts.l2 + tokens.l2
                )
        return all_prompts

    def _with_in_flight(
        self, cached: Tokens | None, keys: int, prompt: ExactPrompt, worker: Worker, cache: CachePlace
    ) -> Tokens | None:
        """As `_with_in_flight`; of a worker with several KV cache groups only whole prompts count."""
        if not cache.has_groups:
            return _with_in_flight(cached, keys, prompt, worker, cache)
        if self._in_flight.count_whole_prompts(cache.slot):
            return cached
        tokens = _with_in_flight(cached, keys, prompt, worker, cache)
        # A prediction from a prompt in flight teaches nothing about the engine's last unit.
        return tokens if tokens is cached else GroupTokens.of(*tokens, tokens.gpu)


NO_CACHE: Final = "no_prefix_caching"
"""Why a worker has no matched tokens: it does not cache prefixes (`WorkerFacts.caches_prefixes`)."""
CACHE_NOT_READ: Final = "cache_not_read"
"""The same, because the engine does not read its cache for this request."""
RANK_OPEN: Final = "rank_chosen_by_engine"
"""Why the map is not used for a worker with several ranks."""
_NO_TOKENS: Final = Tokens()
_WHOLE: Final = MapTrust.WHOLE
_new: Final = tuple.__new__


def _are_whole(caches: Sequence[CachePlace]) -> bool:
    for cache in caches:  # noqa: SIM110 - `all` would construct a generator for a few caches
        if cache.trust is not MapTrust.WHOLE:
            return False
    return True


def _with_in_flight(
    cached: Tokens | None, keys: int, prompt: ExactPrompt, worker: Worker, cache: CachePlace
) -> Tokens:
    """Count the tokens of the first `keys` keys as on the GPU: an unfinished request has their blocks.

    If hashes cover tokens after a block, the last block counts only if these tokens are among the keys too.
    """
    unit = cache.unit or worker.block_size
    in_flight = max(0, keys * prompt.key_tokens - cache.ahead)
    in_flight -= in_flight % unit
    if cache.drops:
        in_flight = max(0, in_flight - unit)
    if cached is None:
        return Tokens(in_flight)
    gpu, l1, l2 = cached
    if in_flight <= gpu:
        return cached
    moved = in_flight - gpu
    from_l1 = min(moved, l1)
    return Tokens(in_flight, l1 - from_l1, max(0, l2 - (moved - from_l1)))


def _trusted_match(
    cache: CachePlace, rank: int | None, map_tokens: Tokens, history_tokens: int
) -> CandidateMatch:
    """The match of a cache: by a whole map, the map; by a partial one, the larger of both; else the history.

    `map_tokens` is from the cache map, `history_tokens` from the route history.
    """
    if cache.trust is MapTrust.WHOLE:
        return CandidateMatch(map_tokens, cache.slot, rank, mapped=True)
    reason = cache.distrust_reason
    if cache.trust is MapTrust.PARTIAL and map_tokens.total >= history_tokens:
        return CandidateMatch(map_tokens, cache.slot, rank, mapped=True, distrust_reason=reason)
    return CandidateMatch(Tokens(history_tokens), cache.slot, rank, mapped=False, distrust_reason=reason)


def _reason(query: RouteQuery, leader: Candidate, most_matched: int) -> RouteReason:
    if not query.exact:
        return RouteReason.KV_APPROXIMATE
    if not most_matched:
        return RouteReason.KV_MISS
    return RouteReason.KV_HIT if leader.counted == most_matched else RouteReason.KV_SPILL
