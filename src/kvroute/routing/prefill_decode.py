"""Decides whether the prompt of a request is computed on another worker than its answer, and on which. Pure.

`choose` is the whole decision. It needs no sockets and no gateway: a model of a fleet calls it, or
`Router.decide` with a view that has `FleetView.sides` and a query with `hands_over`, and reads
`RouteDecision.handover`. It then works like this (`relay/handover.py` does the same over sockets):

1. `Router.decide(query, view)` returns a decision whose first candidate answers. `decision.handover` is None
   if that worker computes the prompt, too.
2. Otherwise `Router.dispatch_handover(query, decision, now)` accounts both workers and returns a
   `HandoverDispatch`. The prefill worker (`handover.prefill.worker`) computes the prompt;
   `prefill_done(now)` is called when it has. The decode worker (`ranking[0].worker`) then fetches
   `handover.moved_tokens` tokens and answers; `first_token(now)` is called for its first token, `finish(now)`
   at the end.
3. `Router.pairs.links.learn` gets the time of each transfer.

The candidates are single workers and pairs. All costs are seconds:

    single   score of the worker, as in docs/routing.md, + stall
    pair     max(score of the prefill leg + transfer, wait of the decode worker) + one iteration there
             + memory, eviction, delay by active tokens and ramp of the decode worker
    leg      score of the prefill worker without its delay by active tokens, + stall
    transfer latency + (tokens that the decode worker lacks) x seconds per token of its link
    stall    stall_share x streams on the worker x (prefill of the prompt there - its iterations)

A running stream waits for each prefill on its worker, but gets a token in each of its iterations (chunked
prefill shares them). So a prefill delays every stream there by its length without the fixed time of its
iterations.

The best single worker and the best pair are compared without `marginal`, the delay of later requests, which
ranks the workers of one side. It grows with the square of a prompt's length: with it the busy prefill side
got the short prompts, and the decode side computed the long ones. Later requests need no such charge, because
they go to the side where they wait less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Annotated, overload

from msgspec import Struct
from pydantic import field_validator

from kvroute.errors import NoRoutableWorker
from kvroute.fleet.load import Reservation, WorkerLoad
from kvroute.fleet.worker import FleetView, Sides, Worker
from kvroute.index.history import RouteHistory
from kvroute.openai.kv_transfer import CONNECTORS
from kvroute.options import Options, Switch, option
from kvroute.routing.cost import CostModel, Ranking, matched_tokens, ranking_of
from kvroute.routing.cost_parameters import Costs
from kvroute.routing.ranks import best_ranks, rank_by_rank, targets_of
from kvroute.routing.recording import DecisionRecorder
from kvroute.routing.strategy import (
    DECODE,
    LOAD,
    MARGINAL,
    MEMORY,
    PREFILL,
    SCORE,
    SHORT_ROW,
    WAIT,
    Candidate,
    Handover,
    Needs,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Row,
    Strategy,
)
from kvroute.routing.transfers import Links

_GIGA = 1e9
# To look up an enum member in its class costs 80 ns each time.
_PROMPT, _TOKENS = Needs.PROMPT, Needs.TOKENS
_HANDED_OVER, _OVER_THRESHOLD = RouteReason.HANDED_OVER, RouteReason.OVER_THRESHOLD
_LEAST_LEARNED_TOKENS = 256
"""In smaller transfers the latency hides the rate."""


class PrefillDecodeOptions(Options):
    """Prefill and decode on different workers; without an effect unless workers have roles."""

    threshold_tokens: int | None = option(
        None,
        "A prompt with more tokens than this that the decode worker does not hold is always computed on a "
        "prefill worker, if one serves (HyperPod's `routingThreshold`); shorter ones by cost. Unset: all by "
        "cost.",
        unit="tokens",
        higher="decode workers compute longer prompts themselves",
        lower="more prompts are handed over",
        ge=0,
    )
    connector: str = option(
        "nixl",
        "How KV gets to the decode worker: "
        + "; ".join(f"`{name}`: {connector.description}" for name, connector in CONNECTORS.items())
        + ".",
    )
    strict: Annotated[bool, Switch] = option(
        False,
        "Workers never do the other role's work: no whole requests on prefill workers, and on decode workers "
        "no prompts above `threshold_tokens`. Requests that no worker may serve get 503.",
    )
    link_gb_s: float = option(
        10.0,
        "Rate from a prefill worker to a decode worker, until transfers were measured. "
        "`routing.kvaware.tiers.token_bytes` has the size of a token.",
        unit="GB/s",
        higher="more prompts are handed over",
        lower="fewer prompts are handed over",
        gt=0,
    )
    latency_ms: float = option(
        5.0,
        "Time of a transfer in addition to that rate: the second request, and the start of the transfer.",
        unit="ms",
        higher="fewer short prompts are handed over",
        lower="more short prompts are handed over",
        ge=0,
    )
    stall_share: float = option(
        0.15,
        "Charge for each second by which a prefill delays a stream that runs on the same worker.",
        higher="running streams are delayed less; more prompts are handed over",
        lower="0: only the time to the first token counts",
        ge=0,
    )
    prefill_timeout_s: float = option(
        120.0,
        "Longest time for the prefill worker's part; after it the decode worker computes the prompt. 0 sets "
        "no limit.",
        unit="s",
        higher="long queues at prefill workers do no harm",
        lower="a hung prefill worker is noticed sooner",
        ge=0,
    )
    decode_timeout_s: float = option(
        60.0,
        "Longest time from the second request to the first byte of a streamed answer; after it the request "
        "is sent once more, without a transfer. 0 sets no limit.",
        unit="s",
        higher="slow transfers are awaited",
        lower="a hung transfer is noticed sooner",
        ge=0,
    )

    @field_validator("connector")
    @classmethod
    def _known_connector(cls, value: str) -> str:
        if value not in CONNECTORS:
            raise ValueError(f"{value!r} is none of {', '.join(CONNECTORS)}")
        return value


class HandoverLinks:
    """The time to move tokens to each decode worker. Mutable: `learn` and `forget` change it."""

    def __init__(self, options: PrefillDecodeOptions, token_bytes: int) -> None:
        """`token_bytes`: KV of one token."""
        self.latency_s = options.latency_ms * 1e-3
        self._token_bytes = token_bytes
        self._links = Links(token_bytes / (options.link_gb_s * _GIGA))

    def move_s(self, worker: int, tokens: int) -> float:
        """Seconds to move `tokens` tokens to the worker with this index; 0 for no tokens."""
        return self.latency_s + tokens * self._links.token_s(worker) if tokens > 0 else 0.0

    def learn(self, worker: int, tokens: int, seconds: float) -> None:
        """Learn from one transfer to the worker that took `seconds`, its latency included.

        The configured rate has the weight of 8 transfers; about the last 64 count. Short ones are ignored.
        """
        if tokens >= _LEAST_LEARNED_TOKENS:
            self._links.learn(worker, max(1e-9, seconds - self.latency_s) / tokens, 1)

    def gb_s(self, worker: int) -> float:
        """The assumed rate to the worker in GB/s."""
        return self._token_bytes / (self._links.token_s(worker) * _GIGA)

    def forget(self, worker: int) -> None:
        self._links.forget(worker)


class Choice(Struct, frozen=True, gc=False):
    """The result of `choose`."""

    ranking: Sequence[Candidate]
    """Each worker once, best first. The first one answers; its terms are those of the pair, if any."""
    handover: Handover | None = None
    """How the first worker gets the prompt's KV; None if it computes the prompt itself."""
    reason: RouteReason | None = None
    """Why the roles matter for this request; None if the strategy's own reason holds."""


def choose(
    tokens: int,
    prefill_side: Ranking | None,
    decode_side: Ranking | None,
    links: HandoverLinks,
    costs: Costs,
    options: PrefillDecodeOptions,
    now: float,
    *,
    can_move: bool = True,
    keeps_first: bool = False,
) -> Choice:
    """Decide where a prompt of `tokens` tokens is computed and where it is answered. O(workers).

    `prefill_side` and `decode_side` rank the workers of each side for the whole request, best first, as
    `CostModel.rank` does; a worker for both roles is in both. One of them may be None. `can_move` is False
    for a request whose KV cannot be moved. With `keeps_first` the first decode candidate answers, and only
    the prefill worker is decided (a session, a turn of `roundrobin`). Equal costs are decided by the
    order of the rankings. The result has an empty ranking if `strict` leaves no worker.
    """
    # As in `CostModel.rank`: floats for all workers, further objects for those that do the request.
    threshold, strict = options.threshold_tokens, options.strict
    most_computed = inf if threshold is None or not can_move else threshold or 1
    if decode_side is None:
        return Choice((() if strict else prefill_side) or (), None, RouteReason.NO_DECODE_WORKER)
    workers, rows, matched, queues, _, _ = decode_side.columns
    positions = (decode_side.first_position,) if keeps_first else decode_side.positions()
    legs: Sequence[_PrefillLeg] = ()
    best_leg = second_leg = None
    if can_move and tokens > 1 and prefill_side is not None:
        legs = _two_best_legs(prefill_side, tokens, costs, options)
        best_leg, second_leg = legs[0], legs[-1]
    tie_share, tie_s = costs.tie_share, costs.tie_s
    # `Costs.prefill_s` of the last token.
    step_s = costs.token_s + costs.context_token_s * (tokens - 0.5) + costs.iteration_s
    single = pair = -1
    single_cost = pair_cost = move_of_pair_s = 0.0
    leg_of_pair, is_forced = None, False
    for position in positions:
        worker, row = workers[position], rows[position]
        if len(row) == SHORT_ROW:
            score, prefill_s, wait_s, _, decode_s = row
            memory_s = eviction_s = ramp_s = 0.0
        else:
            score, prefill_s, wait_s, _, decode_s, _, memory_s, eviction_s, ramp_s = row
        miss = tokens - matched[position] if matched else tokens
        leg = best_leg
        if leg is not None and leg.worker is worker:
            leg = second_leg
            if leg is not None and leg.worker is worker:  # the only leg, or another rank of the worker
                leg = None
        must_move = miss > most_computed
        if not must_move or (
            leg is None and _may_compute(position, positions, workers, legs, prefill_side, strict=strict)
        ):
            cost, load = score, queues[position]
            if load.in_flight > load.queued:
                cost += _stall_s(load, prefill_s, miss, costs, options)
            if single < 0 or cost < single_cost - tie_share * single_cost - tie_s:
                single, single_cost = position, cost
        if leg is not None and miss > 1:
            move_s = links.move_s(worker.index, miss)
            ready_s = leg.ready_s + move_s
            cost = (wait_s if wait_s > ready_s else ready_s) + step_s + leg.others_s + decode_s
            cost += memory_s + eviction_s
            if ramp_s:
                cost /= worker.share_at(now)
            if pair < 0 or cost < pair_cost - tie_share * pair_cost - tie_s:
                pair, pair_cost, leg_of_pair, is_forced = position, cost, leg, must_move
                move_of_pair_s = move_s
    best, best_cost, leg_of_best = single, single_cost, None
    if leg_of_pair is not None:
        # The delay of later requests ranks the workers of one side only.
        if leg_of_pair.marginal_s and single >= 0:
            pair_cost -= leg_of_pair.marginal_s / workers[pair].share_at(now)
        if single >= 0 and rows[single][MARGINAL]:
            single_cost -= rows[single][MARGINAL] / workers[single].share_at(now)
        # A pair needs a second request, so it must be better, and not only equal.
        if single < 0 or pair_cost < single_cost - tie_share * single_cost - tie_s:
            best, best_cost, leg_of_best = pair, pair_cost, leg_of_pair
    if best < 0:
        return Choice((), None, RouteReason.NO_PREFILL_WORKER)
    row = rows[best]
    fallback_side = None if strict else prefill_side
    lacks_memory = len(row) != SHORT_ROW and row[MEMORY] > 0.0
    if fallback_side is not None and lacks_memory and not keeps_first:
        rescue = next(iter(_without(fallback_side, decode_side)), None)
        if rescue is not None:
            rescue_cost, load = rescue.score, rescue.queue
            if load.in_flight > load.queued:
                miss = tokens - rescue.matched_tokens
                rescue_cost += _stall_s(load, rescue.prefill_s, miss, costs, options)
            if rescue_cost < best_cost:
                ranking = _LazyRanking(rescue, decode_side, fallback_side)
                return Choice(ranking, None, RouteReason.DECODE_SIDE_FULL)
    decode_only = decode_side.candidate(best)
    moved_tokens = tokens - decode_only.matched_tokens
    if leg_of_best is None:
        is_alone = can_move and not legs and (threshold is None or moved_tokens > threshold)
        return Choice(
            _LazyRanking(decode_only, decode_side, fallback_side),
            None,
            RouteReason.NO_PREFILL_WORKER if is_alone else None,
        )
    assert prefill_side is not None
    leg, prefill_of_pair = leg_of_best, prefill_side.candidate(leg_of_best.position)
    decode_of_pair = _decode_of_pair(decode_only, row, leg, move_of_pair_s, step_s, now)
    return Choice(
        _LazyRanking(decode_of_pair, decode_side, fallback_side),
        Handover(
            prefill_of_pair,
            decode_of_pair,
            decode_only,
            moved_tokens,
            move_of_pair_s,
            leg.ready_s + leg.others_s,
        ),
        _OVER_THRESHOLD if is_forced else _HANDED_OVER,
    )


class _LazyRanking(Sequence[Candidate]):
    """The ranking of a `Choice`: the chosen candidate, the others of the decode side, and prefill workers.

    Constructs all but the chosen one at the first access: usually nobody reads them.
    """

    __slots__ = ("_all", "_chosen", "_decode_side", "_fallback_side")

    def __init__(self, chosen: Candidate, decode_side: Ranking, fallback_side: Ranking | None) -> None:
        self._chosen = chosen
        self._decode_side = decode_side
        self._fallback_side = fallback_side
        self._all: list[Candidate] | None = None

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._chosen if index == 0 else self._in_full()[index]

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._in_full())

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._in_full())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _in_full(self) -> list[Candidate]:
        if self._all is None:
            fallback: Sequence[Candidate] = ()
            if self._fallback_side is not None:
                fallback = _without(self._fallback_side, self._decode_side)
            worker = self._chosen.worker
            others = (
                candidate for candidate in (*self._decode_side, *fallback) if candidate.worker is not worker
            )
            self._all = [self._chosen, *others]
        return self._all


class _PrefillLeg(Struct, frozen=True, gc=False):
    """The prompt on one prefill worker."""

    worker: Worker
    position: int
    """The worker's position in the columns of its side."""
    marginal_s: float
    """The delay of later requests."""
    ready_s: float
    """Until the prompt is computed, without charges for others."""
    others_s: float
    """The charges for others, without the delay by active tokens."""


def _two_best_legs(
    side: Ranking, tokens: int, costs: Costs, options: PrefillDecodeOptions
) -> Sequence[_PrefillLeg]:
    """The two cheapest prefill workers: one of them may be the decode worker, which is no pair."""
    workers, rows, matched, queues, _, _ = side.columns
    best = second = -1
    best_cost = second_cost = 0.0
    for position in side.positions():
        row, load = rows[position], queues[position]
        cost = row[SCORE] - row[DECODE]
        if load.in_flight > load.queued:
            miss = tokens - matched[position] if matched else tokens
            cost += _stall_s(load, row[PREFILL], miss, costs, options)
        if best < 0 or cost < best_cost:
            best, second, best_cost, second_cost = position, best, cost, best_cost
        elif second < 0 or cost < second_cost:
            second, second_cost = position, cost
    best_leg = _prefill_leg(best, best_cost, workers, rows)
    return (best_leg,) if second < 0 else (best_leg, _prefill_leg(second, second_cost, workers, rows))


def _prefill_leg(position: int, cost: float, workers: Sequence[Worker], rows: Sequence[Row]) -> _PrefillLeg:
    row = rows[position]
    wait_s, load_s = row[WAIT], row[LOAD] if len(row) != SHORT_ROW else 0.0
    ready_s = (wait_s if wait_s > load_s else load_s) + row[PREFILL]
    return _PrefillLeg(workers[position], position, row[MARGINAL], ready_s, cost - ready_s)


def _stall_s(
    load: WorkerLoad, prefill_s: float, miss: int, costs: Costs, options: PrefillDecodeOptions
) -> float:
    """The charge for the delay of the streams that run on the worker, by the prefill of `miss` tokens."""
    streams = load.in_flight - load.queued
    chunks = max(1, -(-miss // costs.max_batched_tokens))
    return options.stall_share * streams * max(0.0, prefill_s - costs.iteration_s * chunks)


def _may_compute(
    position: int,
    positions: Sequence[int],
    workers: Sequence[Worker],
    legs: Sequence[_PrefillLeg],
    prefill_side: Ranking | None,
    *,
    strict: bool,
) -> bool:
    """Whether the worker may compute a prompt that must be moved: only if there is no pair of workers.

    `strict` does not keep a worker for both roles from it.
    """
    if any(leg.worker is not workers[other] for leg in legs for other in positions):
        return False
    return not strict or (prefill_side is not None and workers[position] in prefill_side.workers)


def _decode_of_pair(
    decode_only: Candidate, row: Row, leg: _PrefillLeg, move_s: float, step_s: float, now: float
) -> Candidate:
    """The worker of `decode_only`, which has the terms in `row`, as the decode worker of a pair."""
    memory_s = eviction_s = ramp_s = 0.0
    if len(row) == SHORT_ROW:
        _, _, wait_s, _, decode_s = row
    else:
        _, _, wait_s, _, decode_s, _, memory_s, eviction_s, ramp_s = row
    load_s = leg.ready_s + move_s
    # In the order of `CostTerms.score`.
    score = (wait_s if wait_s > load_s else load_s) + (
        step_s + memory_s + eviction_s + leg.others_s + decode_s
    )
    worker = decode_only.worker
    if ramp_s:
        ramp_s = score / worker.share_at(now) - score
        score += ramp_s
    terms = score, step_s, wait_s, leg.others_s, decode_s, load_s, memory_s, eviction_s, ramp_s
    return Candidate(worker, score, decode_only.matched_tokens, step_s, terms, decode_only.match)


def _without(candidates: Sequence[Candidate], others: Ranking) -> Sequence[Candidate]:
    """The candidates whose workers are not in `others`, in their order."""
    excluded = set(map(id, others.workers))
    return [candidate for candidate in candidates if id(candidate.worker) not in excluded]


class HandoverDispatch(Struct, frozen=True, gc=False):
    """The accounts of a request whose prompt another worker computes. The caller must call `finish`."""

    prefill: Reservation
    decode: Reservation
    """Reserved from the start: until the first token it counts as queued on the decode worker."""

    def prefill_done(self, now: float) -> None:
        """The prefill worker has answered. Later calls do nothing."""
        self.prefill.first_token(now)
        self.prefill.finish(now)

    def first_token(self, now: float) -> None:
        """The first token of the answer has arrived."""
        self.decode.first_token(now)

    def finish(self, now: float) -> None:
        """Return everything that is reserved. Later calls do nothing."""
        self.prefill.finish(now)
        self.decode.finish(now)


class Pairs:
    """Decides for a fleet whose workers have roles. Mutable: `links` learns, `options` may be replaced."""

    def __init__(
        self, options: PrefillDecodeOptions, token_bytes: int, costs: CostModel, history: RouteHistory
    ) -> None:
        self.options = options
        self.links = HandoverLinks(options, token_bytes)
        self._costs = costs
        self._history = history

    def decide(
        self, query: RouteQuery, sides: Sides, strategy: Strategy, recorder: DecisionRecorder | None = None
    ) -> RouteDecision:
        """The decision of `Router.decide` for a view with `sides`. Raises NoRoutableWorker.

        Ranks each side by itself, so that the pressure of one side is not mixed with that of the other.
        """
        needs = strategy.needs
        knows_caches = needs is _PROMPT or needs is _TOKENS
        prefill, decode = sides.prefill, sides.decode
        answering_side, other_side = (prefill, None) if decode is None else (decode, prefill)
        assert answering_side is not None  # each worker of a view is on a side
        decision = strategy.rank(query, answering_side)
        if recorder is not None:
            recorder.decided(query, answering_side, strategy, decision)
        if knows_caches:
            answering = ranking_of(decision.ranking)
            other = None if other_side is None else ranking_of(strategy.rank(query, other_side).ranking)
        else:
            # The strategy only names the worker that answers. Where the prompt is computed needs the costs.
            answering = self._ranking(query, answering_side, decision.ranking[0])
            other = None if other_side is None else self._ranking(query, other_side)
        choice = choose(
            query.tokens,
            answering if decode is None else other,
            None if decode is None else answering,
            self.links,
            self._costs.costs(query.model),
            self.options,
            query.now,
            can_move=query.hands_over,
            keeps_first=not knows_caches and decision.reason is not RouteReason.NO_SESSION_KEY,
        )
        if not choice.ranking:
            absent_role = "decode" if choice.reason is RouteReason.NO_DECODE_WORKER else "prefill"
            raise NoRoutableWorker(
                f"No {absent_role} worker serves the model {query.model!r} at the moment, and other workers "
                "may not do its work (routing.prefill_decode.strict).",
                retry_after_s=1,
            )
        return RouteDecision(
            decision.strategy, choice.reason or decision.reason, choice.ranking, choice.handover
        )

    def _ranking(self, query: RouteQuery, view: FleetView, leader: Candidate | None = None) -> Ranking:
        """The view's workers by cost, with matched tokens from the route history. `leader` comes first."""
        targets = targets_of(query, view)
        if targets is not None:
            matched = matched_tokens(self._history, query, targets.workers, targets.positions)
            ranking = rank_by_rank(self._costs, query, targets, matched)
        else:
            matched = matched_tokens(self._history, query, view.workers, view.positions)
            ranking = self._costs.rank(query, view.workers, matched, queues=view.loads)
        if leader is not None:
            ranking.put_first(leader.worker, leader.rank)
        return ranking if targets is None else ranking_of(best_ranks(ranking))
