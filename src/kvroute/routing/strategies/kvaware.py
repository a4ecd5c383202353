"""Routing on what the workers' caches hold, tier by tier, by their own account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

from kvroute.fleet.worker import FleetView, Worker
from kvroute.index.history import RouteHistory
from kvroute.options import Options, option
from kvroute.routing.audit import AuditOptions
from kvroute.routing.caches import CacheMap, CachePlace, Held, Standing, Tokens
from kvroute.routing.cost import CostModel, TierLoad
from kvroute.routing.decision import Candidate, Needs, Reason, RouteDecision, RouteQuery
from kvroute.routing.matching import matched_tokens
from kvroute.routing.transfers import TransferOptions, Transfers


class KvAwareOptions(Options):
    """Routing on the workers' own cache events. A worker whose map cannot be trusted is judged by what it
    was sent, as `prefixaware` does, until the map is whole again."""

    tiers: TransferOptions = option(default_factory=TransferOptions)
    audit: AuditOptions = option(default_factory=AuditOptions)


class CacheViews(NamedTuple):
    """What `KvAware` reads beside costs and history. `in_flight` has the exact prompts of unfinished
    requests by slot: blocks that are held, or will be before the next request runs, whether or not the
    worker has announced them yet."""

    caches: CacheMap
    in_flight: RouteHistory
    transfers: Transfers


class KvAware:
    """Stateless but for the views, which others change, and the transfers that `routed` starts;
    implements `Strategy`."""

    name: ClassVar[str] = "kvaware"
    needs: ClassVar[Needs] = Needs.TOKENS
    is_told: ClassVar[bool] = True

    def __init__(
        self, options: KvAwareOptions, costs: CostModel, history: RouteHistory, views: CacheViews
    ) -> None:
        self._costs = costs
        self._history = history
        self._views = views

    def rank(self, query: RouteQuery, view: FleetView) -> RouteDecision:
        workers, now = view.workers, query.now
        if not query.prompts:
            ranking = self._costs.rank(query, workers, queues=view.loads)
            return RouteDecision(self.name, Reason.NO_PROMPT, ranking)
        targets, held = self._held(query, workers)
        totals: list[int] = []
        is_far = False
        for each in held:
            gpu, l1, l2 = each.tokens
            totals.append(gpu + l1 + l2)
            is_far = is_far or l1 + l2 > 0
        loads = None
        if is_far:
            loads = [self._load(each, worker, now) for worker, each in zip(targets, held, strict=True)]
        if len(targets) > len(workers):
            ranks = self._costs.rank(query, targets, totals, loads, held)
            return RouteDecision(self.name, _reason(query, ranks[0], max(totals)), _best_ranks(ranks))
        # Each worker once: there are no ranks to choose from.
        ranking = self._costs.rank(query, workers, totals, loads, held, view.loads)
        return RouteDecision(self.name, _reason(query, ranking[0], max(totals)), ranking)

    def routed(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> None:
        """Its blocks are on their way from slower tiers."""
        held = candidate.held
        if held is not None:
            slot = candidate.worker.index if held.slot is None else held.slot
            self._views.transfers.start(slot, held.tokens, query.now)

    def forget(self, session_key: str) -> bool:
        return False

    def _load(self, held: Held, worker: Worker, now: float) -> TierLoad:
        slot = worker.index if held.slot is None else held.slot
        return self._views.transfers.load(slot, held.tokens, now)

    def _held(self, query: RouteQuery, workers: Sequence[Worker]) -> tuple[list[Worker], list[Held]]:
        """Every place that the request could go to, and what is there."""
        views = self._views
        found = [
            _Found(views.caches.match(prompt), views.in_flight.match(prompt.keys), prompt.key_tokens)
            for prompt in query.exact
        ]
        sent: Sequence[int] = ()
        targets: list[Worker] = []
        held: list[Held] = []
        for number, worker in enumerate(workers):
            places = views.caches.places(worker)
            if not sent and not (found and places and _are_whole(places)):
                sent = matched_tokens(self._history, query, workers)
            if not places:
                targets.append(worker)
                held.append(Held(Tokens(sent[number]), why=query.inexact or "no_events"))
                continue
            for place in places:
                rank = place.rank if len(places) > 1 else None
                targets.append(worker)
                if not found:  # any rank may have it: the one with least to do
                    held.append(
                        Held(Tokens(sent[number]), place.slot, rank, why=query.inexact or "no_events")
                    )
                    continue
                tokens = _total(found, place.slot, worker.block_size)
                held.append(_believed(place, rank, tokens, sent[number] if sent else 0))
        return targets, held


_NONE: Final = Tokens()


def _are_whole(places: Sequence[CachePlace]) -> bool:
    for place in places:  # noqa: SIM110 - `all` would make a generator for the one or few that there are
        if place.standing is not Standing.WHOLE:
            return False
    return True


class _Found(NamedTuple):
    """Of one prompt, by slot: tokens in caches, keys that unfinished requests pin."""

    caches: Mapping[int, Tokens]
    in_flight: Mapping[int, int]
    key_tokens: int


def _total(found: Sequence[_Found], slot: int, block_tokens: int) -> Tokens:
    """What `slot` has of all prompts, with what unfinished requests bring."""
    if len(found) == 1:
        caches, in_flight, key_tokens = found[0]
        tokens, flying = caches.get(slot), in_flight.get(slot)
        if flying:
            flying *= key_tokens
            tokens = _with_flying(tokens, flying - flying % block_tokens)
        return _NONE if tokens is None else tokens
    totals = _NONE
    for caches, in_flight, key_tokens in found:
        tokens = caches.get(slot)
        flying = in_flight.get(slot)
        if flying:
            flying *= key_tokens
            tokens = _with_flying(tokens, flying - flying % block_tokens)
        if tokens is not None:
            totals = Tokens(totals.gpu + tokens.gpu, totals.l1 + tokens.l1, totals.l2 + tokens.l2)
    return totals


def _with_flying(found: Tokens | None, flying: int) -> Tokens:
    """Blocks that an unfinished request pins are on the GPU, or will be: they take the place of those in
    slower tiers."""
    if found is None:
        return Tokens(flying)
    gpu, l1, l2 = found
    if flying <= gpu:
        return found
    over = flying - gpu
    from_l1 = min(over, l1)
    return Tokens(flying, l1 - from_l1, max(0, l2 - (over - from_l1)))


def _believed(place: CachePlace, rank: int | None, mapped: Tokens, sent: int) -> Held:
    """The map's word where it is whole; where it may lack something, whichever is more; else what was
    sent there."""
    if place.standing is Standing.WHOLE:
        return Held(mapped, place.slot, rank, mapped=True)
    if place.standing is Standing.PARTIAL and mapped.total >= sent:
        return Held(mapped, place.slot, rank, mapped=True, why=place.why)
    return Held(Tokens(sent), place.slot, rank, mapped=False, why=place.why)


def _best_ranks(ranking: Sequence[Candidate]) -> Sequence[Candidate]:
    """Each worker once, with its best rank: a second attempt goes to another worker."""
    seen: set[int] = set()
    best = []
    for candidate in ranking:
        if id(candidate.worker) not in seen:
            seen.add(id(candidate.worker))
            best.append(candidate)
    return best


def _reason(query: RouteQuery, first: Candidate, most: int) -> Reason:
    if not query.exact:
        return Reason.KV_APPROXIMATE
    if not most:
        return Reason.KV_MISS
    return Reason.KV_HIT if first.matched_tokens == most else Reason.KV_SPILL
