"""The strategy `kvaware`: least cost in seconds, with the cache map as the source of matched tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

from kvroute.fleet.worker import FleetView, Worker
from kvroute.index.history import RouteHistory
from kvroute.index.prefix_index import MapTrust
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


_Found: TypeAlias = tuple[ExactPrompt, Mapping[int, Tokens], Mapping[int, int]]
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
        self._caches, self._in_flight, self._transfers, reports = views
        self._shares_mapped = {} if reports is None else reports.discounts.mapped
        self._shares_sent = {} if reports is None else reports.discounts.sent
        self._answers = {} if reports is None else reports.answers.by_unit
        self._no_match: dict[int, CandidateMatch] = {}
        """Slot -> the match of a place that holds nothing of a prompt."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        workers, now = view.workers, query.now
        if not query.prompts:
            ranking = self._costs.rank(query, workers, queues=view.loads)
            return RouteDecision(self.name, RouteReason.NO_PROMPT, ranking)
        if not query.reads_cache or not view.caches_prefixes:
            return self._by_load(query, view)
        exact, simple = query.exact, None
        if exact and self._caches.refresh(False):
            self._in_flight.compact(now)
        if len(exact) == 1:
            found = [self._find(exact[0], now)]
            simple = self._mapped(found[0], workers)
        else:
            found = [self._find(prompt, now) for prompt in exact]
        if simple is not None:
            targets: Sequence[Worker] = workers
            held, totals, needs_load = simple
        else:
            targets, held = self._held(query, workers, found)
            totals = [each.tokens.total for each in held]
            needs_load = any(each.tokens.l1 or each.tokens.l2 for each in held)
        loads = None
        if needs_load:
            loads = [self._load(each, worker, now) for worker, each in zip(targets, held, strict=True)]
        predicted = None
        if self._shares_mapped or self._shares_sent:
            predicted, totals = totals, self._discounted(totals, targets, held)
        if view.by_rank is not None or len(targets) > len(workers):
            units = [worker.unit_of(each.rank) for worker, each in zip(targets, held, strict=True)]
            ranks = self._costs.rank(query, targets, totals, loads, held, None, units, predicted)
            return RouteDecision(self.name, _reason(query, ranks[0], max(totals)), best_ranks(ranks))
        # One target per worker: there are no ranks to choose from.
        ranking = self._costs.rank(query, workers, totals, loads, held, view.loads, None, predicted)
        if query.session_worker is not None and keep_session(ranking, query, self._costs):
            return RouteDecision(self.name, RouteReason.SESSION_KEPT, ranking)
        return RouteDecision(self.name, _reason(query, ranking[0], max(totals)), ranking)

    def _by_load(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        """The decision for a request that finds no cached block on any worker."""
        targets: list[Worker] = []
        held: list[CandidateMatch] = []
        why = NO_CACHE if query.reads_cache else CACHE_NOT_READ
        for worker in view.workers:
            for place, rank in self._ranks(query, worker):
                targets.append(worker)
                held.append(CandidateMatch(_NONE, None if place is None else place.slot, rank, why=why))
        units = [worker.unit_of(each.rank) for worker, each in zip(targets, held, strict=True)]
        ranking = self._costs.rank(query, targets, None, None, held, None, units)
        return RouteDecision(self.name, RouteReason.NOT_CACHED, best_ranks(ranking))

    def _ranks(self, query: RouteQuery, worker: Worker) -> Sequence[tuple[CachePlace | None, int | None]]:
        """The ranks of a worker that the request can be sent to, each with its place in the cache map.

        A rank is None for a worker with one rank, and if the engine chooses.
        """
        places = self._caches.places(worker)
        if len(places) < 2 and not worker.rank_units:
            return ((places[0] if places else None, None),)
        by_rank = {place.rank: place for place in places}
        ranks = sorted({*by_rank, *worker.rank_units})
        if not query.takes_rank:
            return ((None, None),)
        if query.rank is not None:
            rank = ranks[query.rank] if query.rank < len(ranks) else None
            return ((None if rank is None else by_rank.get(rank), rank),)
        return [(by_rank.get(rank), rank) for rank in ranks]

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Account the transfer of the request's blocks from slower tiers."""
        held = candidate.held
        if held is not None:
            slot = candidate.worker.index if held.slot is None else held.slot
            self._transfers.start(slot, held.tokens, query.now)

    def forget(self, session_key: str) -> bool:
        return False

    def _discounted(
        self, totals: Sequence[int], targets: Sequence[Worker], held: Sequence[CandidateMatch]
    ) -> list[int]:
        mapped = discounted(totals, targets, self._shares_mapped)
        sent = discounted(totals, targets, self._shares_sent)
        return [
            by_map if match.mapped else by_history
            for by_map, by_history, match in zip(mapped, sent, held, strict=True)
        ]

    def _load(self, held: CandidateMatch, worker: Worker, now: float) -> TierLoad:
        slot = worker.index if held.slot is None else held.slot
        return self._transfers.load(slot, held.tokens, now)

    def _find(self, prompt: ExactPrompt, now: float) -> _Found:
        in_flight, continues_finished = self._in_flight.match(prompt.keys)
        # The events of a finished request's answer may have arrived since the last refresh.
        if continues_finished and self._caches.refresh(True):
            self._in_flight.compact(now)
            in_flight, _ = self._in_flight.match(prompt.keys)
        return prompt, self._caches.match(prompt), in_flight

    def _mapped(
        self, found: _Found, workers: Sequence[Worker]
    ) -> tuple[list[CandidateMatch], list[int], bool] | None:
        """The usual case of `_held`: one prompt, and workers of one rank with whole maps; otherwise None.

        Returns the matches, the matched tokens of each, and whether slower tiers hold matched tokens.
        """
        prompt, cached, in_flight = found
        places_of = self._caches.places
        held: list[CandidateMatch] = []
        totals: list[int] = []
        needs_load = False
        for worker in workers:
            places = places_of(worker)
            if len(places) != 1 or worker.rank_units or not worker.facts.caches_prefixes:
                return None
            place = places[0]
            slot = place[0]
            if place[2] is not _WHOLE:
                return None
            tokens = cached.get(slot)
            if in_flight and slot in in_flight:
                tokens = self._with_in_flight(tokens, in_flight[slot], prompt, worker, place)
            if tokens is None:
                totals.append(0)
                held.append(self._no_match.get(slot) or self._add_no_match(slot))
                continue
            gpu, l1, l2 = tokens
            if l1 or l2:
                needs_load = True
            totals.append(gpu + l1 + l2)
            # As `CandidateMatch(...)`, without its constructor in Python.
            held.append(_new(CandidateMatch, (tokens, slot, None, True, "")))
        return held, totals, needs_load

    def _add_no_match(self, slot: int) -> CandidateMatch:
        held = self._no_match[slot] = CandidateMatch(_NONE, slot, None, mapped=True)
        return held

    def _held(
        self, query: RouteQuery, workers: Sequence[Worker], found: Sequence[_Found]
    ) -> tuple[list[Worker], list[CandidateMatch]]:
        """Every place that the request could be sent to, as its worker, with its match."""
        targets = [(worker, *target) for worker in workers for target in self._ranks(query, worker)]
        sent: Sequence[int] = ()
        held: list[CandidateMatch] = []
        for number, (worker, place, rank) in enumerate(targets):
            if not worker.facts.caches_prefixes:
                slot = None if place is None else place.slot
                held.append(CandidateMatch(_NONE, slot, rank, why=NO_CACHE))
                continue
            is_open = rank is None and bool(worker.rank_units or len(self._caches.places(worker)) > 1)
            if not sent and not (found and place is not None and place.trust is _WHOLE):
                sent = self._sent(query, targets)
            if is_open:
                held.append(self._mean(worker, found, sent[number]))
            elif place is None:
                held.append(
                    CandidateMatch(Tokens(sent[number]), None, rank, why=query.inexact or "no_events")
                )
            elif not found:
                why = query.inexact or "no_events"
                held.append(CandidateMatch(Tokens(sent[number]), place.slot, rank, why=why))
            else:
                tokens = self._total(found, place, worker)
                held.append(_match_of(place, rank, tokens, sent[number] if sent else 0))
        return [worker for worker, _, _ in targets], held

    def _sent(
        self, query: RouteQuery, targets: Sequence[tuple[Worker, CachePlace | None, int | None]]
    ) -> Sequence[int]:
        """The matched tokens of each target by the route history."""
        places: dict[int, int] = {}
        for place, (worker, _, rank) in enumerate(targets):
            for unit in worker.units if rank is None else (worker.unit_of(rank),):
                places.setdefault(unit, place)
        return matched_tokens(
            self._history, query, [worker for worker, _, _ in targets], places, self._answers
        )

    def _mean(self, worker: Worker, found: Sequence[_Found], sent: int) -> CandidateMatch:
        """The match of a worker whose engine chooses the rank: the mean over the ranks, which is not
        judged."""
        places = self._caches.places(worker)
        if not found or not places or not _are_whole(places):
            return CandidateMatch(Tokens(sent), why=RANK_OPEN)
        tokens = sum(self._total(found, place, worker).total for place in places) // len(places)
        return CandidateMatch(Tokens(tokens - tokens % worker.block_size), why=RANK_OPEN)

    def _total(self, found: Sequence[_Found], place: CachePlace, worker: Worker) -> Tokens:
        """The tokens of all prompts that the place holds."""
        totals, slot = _NONE, place.slot
        for prompt, cached, in_flight in found:
            tokens = cached.get(slot)
            if slot in in_flight:
                tokens = self._with_in_flight(tokens, in_flight[slot], prompt, worker, place)
            if len(found) == 1:
                return tokens or _NONE
            if tokens is not None:
                totals = Tokens(totals.gpu + tokens.gpu, totals.l1 + tokens.l1, totals.l2 + tokens.l2)
        return totals

    def _with_in_flight(
        self, found: Tokens | None, keys: int, prompt: ExactPrompt, worker: Worker, place: CachePlace
    ) -> Tokens | None:
        """As `_with_in_flight`; of a worker with several KV cache groups only whole prompts count."""
        if not place.has_groups:
            return _with_in_flight(found, keys, prompt, worker, place)
        if self._in_flight.count_whole_prompts(place.slot):
            return found
        tokens = _with_in_flight(found, keys, prompt, worker, place)
        # A prediction from a prompt in flight teaches nothing about the engine's last unit.
        return tokens if tokens is found else GroupTokens.of(*tokens, tokens.gpu)


NO_CACHE: Final = "no_prefix_caching"
"""Why a worker has no matched tokens: it does not cache prefixes (`WorkerFacts.caches_prefixes`)."""
CACHE_NOT_READ: Final = "cache_not_read"
"""The same, because the engine does not read its cache for this request."""
RANK_OPEN: Final = "rank_chosen_by_engine"
"""Why the map is not used for a worker with several ranks."""
_NONE: Final = Tokens()
_WHOLE: Final = MapTrust.WHOLE
_new: Final = tuple.__new__


def _are_whole(places: Sequence[CachePlace]) -> bool:
    for place in places:  # noqa: SIM110 - `all` would construct a generator for a few places
        if place.trust is not MapTrust.WHOLE:
            return False
    return True


def _with_in_flight(
    found: Tokens | None, keys: int, prompt: ExactPrompt, worker: Worker, place: CachePlace
) -> Tokens:
    """Count the tokens of the first `keys` keys as on the GPU: an unfinished request has their blocks.

    If hashes cover tokens after a block, the last block counts only if these tokens are among the keys too.
    """
    unit = place.unit or worker.block_size
    in_flight = max(0, keys * prompt.key_tokens - place.ahead)
    in_flight -= in_flight % unit
    if place.drops:
        in_flight = max(0, in_flight - unit)
    if found is None:
        return Tokens(in_flight)
    gpu, l1, l2 = found
    if in_flight <= gpu:
        return found
    over = in_flight - gpu
    from_l1 = min(over, l1)
    return Tokens(in_flight, l1 - from_l1, max(0, l2 - (over - from_l1)))


def _match_of(place: CachePlace, rank: int | None, mapped: Tokens, sent: int) -> CandidateMatch:
    """The match of a place: by a whole map, the map; by a partial one, the larger of both; else the history.

    `mapped` is from the cache map, `sent` from the route history.
    """
    if place.trust is MapTrust.WHOLE:
        return CandidateMatch(mapped, place.slot, rank, mapped=True)
    if place.trust is MapTrust.PARTIAL and mapped.total >= sent:
        return CandidateMatch(mapped, place.slot, rank, mapped=True, why=place.why)
    return CandidateMatch(Tokens(sent), place.slot, rank, mapped=False, why=place.why)


def _reason(query: RouteQuery, first: Candidate, most: int) -> RouteReason:
    if not query.exact:
        return RouteReason.KV_APPROXIMATE
    if not most:
        return RouteReason.KV_MISS
    return RouteReason.KV_HIT if first.counted == most else RouteReason.KV_SPILL
