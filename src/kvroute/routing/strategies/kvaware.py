"""Routing on what the workers' caches hold, tier by tier, by their own account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, TypeAlias

from kvroute.fleet.worker import FleetView, Worker
from kvroute.index.history import RouteHistory
from kvroute.options import Options, option
from kvroute.routing.audit import AuditOptions
from kvroute.routing.cost import CostModel, TierLoad
from kvroute.routing.strategy import (
    CachePlace,
    Candidate,
    CandidateMatch,
    ExactPrompt,
    Needs,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Standing,
    Tokens,
    matched_tokens,
)
from kvroute.routing.transfers import CacheViews, TransferOptions


class KvAwareOptions(Options):
    """Routing on the workers' own cache events. A worker whose map cannot be trusted is judged by what it
    was sent, as `prefixaware` does, until the map is whole again."""

    tiers: TransferOptions = option(default_factory=TransferOptions)
    audit: AuditOptions = option(default_factory=AuditOptions)


_Found: TypeAlias = tuple[ExactPrompt, Mapping[int, Tokens], Mapping[int, int]]
"""A prompt, and by slot: its tokens in caches, its leading keys that unfinished requests have too."""


class KvAware:
    """Stateless but for the views, which others change, and the transfers that `on_dispatch` starts;
    implements `Strategy`."""

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
        self._caches, self._in_flight, self._transfers = views
        self._nothing: dict[int, CandidateMatch] = {}
        """By slot: what is said of a place that holds nothing of a prompt."""

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        workers, now = view.workers, query.now
        if not query.prompts:
            ranking = self._costs.rank(query, workers, queues=view.loads)
            return RouteDecision(self.name, RouteReason.NO_PROMPT, ranking)
        exact, simple = query.exact, None
        if exact and self._caches.refresh(False):
            self._in_flight.settle()
        if len(exact) == 1:
            found = [self._find(exact[0])]
            simple = self._mapped(found[0], workers)
        else:
            found = [self._find(prompt) for prompt in exact]
        if simple is not None:
            targets: Sequence[Worker] = workers
            held, totals, is_far = simple
        else:
            targets, held = self._held(query, workers, found)
            totals = [each.tokens.total for each in held]
            is_far = any(each.tokens.l1 or each.tokens.l2 for each in held)
        loads = None
        if is_far:
            loads = [self._load(each, worker, now) for worker, each in zip(targets, held, strict=True)]
        if len(targets) > len(workers):
            ranks = self._costs.rank(query, targets, totals, loads, held)
            return RouteDecision(self.name, _reason(query, ranks[0], max(totals)), _best_ranks(ranks))
        # Each worker once: there are no ranks to choose from.
        ranking = self._costs.rank(query, workers, totals, loads, held, view.loads)
        return RouteDecision(self.name, _reason(query, ranking[0], max(totals)), ranking)

    def on_dispatch(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Its blocks are on their way from slower tiers."""
        held = candidate.held
        if held is not None:
            slot = candidate.worker.index if held.slot is None else held.slot
            self._transfers.start(slot, held.tokens, query.now)

    def forget(self, session_key: str) -> bool:
        return False

    def _load(self, held: CandidateMatch, worker: Worker, now: float) -> TierLoad:
        slot = worker.index if held.slot is None else held.slot
        return self._transfers.load(slot, held.tokens, now)

    def _find(self, prompt: ExactPrompt) -> _Found:
        in_flight, goes_on = self._in_flight.match(prompt.keys)
        if goes_on and self._caches.refresh(True):  # its last answer's blocks may have come since
            self._in_flight.settle()
            in_flight, _ = self._in_flight.match(prompt.keys)
        return prompt, self._caches.match(prompt), in_flight

    def _mapped(
        self, found: _Found, workers: Sequence[Worker]
    ) -> tuple[list[CandidateMatch], list[int], bool] | None:
        """What `_held` gives, with the tokens of each and whether any lie in slower tiers, for what nearly
        all requests meet: one prompt, and workers of one rank each whose maps are whole. Else None."""
        prompt, cached, in_flight = found
        places_of = self._caches.places
        held: list[CandidateMatch] = []
        totals: list[int] = []
        is_far = False
        for worker in workers:
            places = places_of(worker)
            if len(places) != 1:
                return None
            slot, _, standing, _ = places[0]
            if standing is not _WHOLE:
                return None
            tokens = cached.get(slot)
            if in_flight and slot in in_flight:
                tokens = _with_flying(tokens, in_flight[slot], prompt, worker)
            if tokens is None:
                totals.append(0)
                held.append(self._nothing.get(slot) or self._nothing_at(slot))
                continue
            gpu, l1, l2 = tokens
            if l1 or l2:
                is_far = True
            totals.append(gpu + l1 + l2)
            # As `CandidateMatch(...)`, without its Python-level constructor.
            held.append(_new(CandidateMatch, (tokens, slot, None, True, "")))
        return held, totals, is_far

    def _nothing_at(self, slot: int) -> CandidateMatch:
        held = self._nothing[slot] = CandidateMatch(_NONE, slot, None, mapped=True)
        return held

    def _held(
        self, query: RouteQuery, workers: Sequence[Worker], found: Sequence[_Found]
    ) -> tuple[list[Worker], list[CandidateMatch]]:
        """Every place that the request could go to, and what is there."""
        sent: Sequence[int] = ()
        targets: list[Worker] = []
        held: list[CandidateMatch] = []
        for number, worker in enumerate(workers):
            places = self._caches.places(worker)
            if not sent and not (found and places and _are_whole(places)):
                sent = matched_tokens(self._history, query, workers)
            if not places:
                targets.append(worker)
                held.append(CandidateMatch(Tokens(sent[number]), why=query.inexact or "no_events"))
                continue
            for place in places:
                rank = place.rank if len(places) > 1 else None
                targets.append(worker)
                if not found:  # any rank may have it: the one with least to do
                    held.append(
                        CandidateMatch(
                            Tokens(sent[number]), place.slot, rank, why=query.inexact or "no_events"
                        )
                    )
                    continue
                tokens = _total(found, place.slot, worker)
                held.append(_believed(place, rank, tokens, sent[number] if sent else 0))
        return targets, held


_NONE: Final = Tokens()
_WHOLE: Final = Standing.WHOLE
_new: Final = tuple.__new__


def _are_whole(places: Sequence[CachePlace]) -> bool:
    for place in places:  # noqa: SIM110 - `all` would make a generator for the one or few that there are
        if place.standing is not Standing.WHOLE:
            return False
    return True


def _total(found: Sequence[_Found], slot: int, worker: Worker) -> Tokens:
    """What `slot` has of all prompts together."""
    totals = _NONE
    for prompt, cached, in_flight in found:
        tokens = cached.get(slot)
        if slot in in_flight:
            tokens = _with_flying(tokens, in_flight[slot], prompt, worker)
        if tokens is not None:
            totals = Tokens(totals.gpu + tokens.gpu, totals.l1 + tokens.l1, totals.l2 + tokens.l2)
    return totals


def _with_flying(found: Tokens | None, keys: int, prompt: ExactPrompt, worker: Worker) -> Tokens:
    """Blocks of an unfinished request, which has so many of the prompt's keys, are on the GPU, or will be:
    they take the place of those in slower tiers."""
    flying = keys * prompt.key_tokens
    flying -= flying % worker.block_size
    if found is None:
        return Tokens(flying)
    gpu, l1, l2 = found
    if flying <= gpu:
        return found
    over = flying - gpu
    from_l1 = min(over, l1)
    return Tokens(flying, l1 - from_l1, max(0, l2 - (over - from_l1)))


def _believed(place: CachePlace, rank: int | None, mapped: Tokens, sent: int) -> CandidateMatch:
    """The map's word where it is whole; where it may lack something, whichever is more; else what was
    sent there."""
    if place.standing is Standing.WHOLE:
        return CandidateMatch(mapped, place.slot, rank, mapped=True)
    if place.standing is Standing.PARTIAL and mapped.total >= sent:
        return CandidateMatch(mapped, place.slot, rank, mapped=True, why=place.why)
    return CandidateMatch(Tokens(sent), place.slot, rank, mapped=False, why=place.why)


def _best_ranks(ranking: Sequence[Candidate]) -> Sequence[Candidate]:
    """Each worker once, with its best rank: a second attempt goes to another worker."""
    seen: set[int] = set()
    best = []
    for candidate in ranking:
        if id(candidate.worker) not in seen:
            seen.add(id(candidate.worker))
            best.append(candidate)
    return best


def _reason(query: RouteQuery, first: Candidate, most: int) -> RouteReason:
    if not query.exact:
        return RouteReason.KV_APPROXIMATE
    if not most:
        return RouteReason.KV_MISS
    return RouteReason.KV_HIT if first.matched_tokens == most else RouteReason.KV_SPILL
