"""Decides whether the prompt of a request is computed on another worker than its answer, and on which. Pure.

`choose` is the whole decision. It needs no sockets and no gateway: a model of a fleet calls it, or
`Router.decide` with a view that has `FleetView.sides` and a query with `hands_over`, and reads
`RouteDecision.handover`. It then works like this (`gateway/handover.py` does the same over sockets):

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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple

from pydantic import field_validator

from kvroute.errors import NoRoutableWorker
from kvroute.fleet.load import Reservation
from kvroute.fleet.worker import FleetView, Sides
from kvroute.index.history import RouteHistory
from kvroute.openai.kv_transfer import CONNECTORS
from kvroute.options import Options, Switch, option
from kvroute.routing.cost import CostModel, Ranking, matched_tokens
from kvroute.routing.cost_parameters import Costs
from kvroute.routing.recording import DecisionRecorder
from kvroute.routing.strategy import (
    Candidate,
    CostTerms,
    Handover,
    Needs,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Strategy,
)
from kvroute.routing.transfers import Links

_GIGA = 1e9
_NOBODY: Sequence[Candidate] = ()
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
        + "; ".join(f"`{name}`: {each.description}" for name, each in CONNECTORS.items())
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


class Choice(NamedTuple):
    """The result of `choose`."""

    ranking: Sequence[Candidate]
    """Each worker once, best first. The first one answers; its terms are those of the pair, if any."""
    handover: Handover | None = None
    """How the first worker gets the prompt's KV; None if it computes the prompt itself."""
    reason: RouteReason | None = None
    """Why the roles matter for this request; None if the strategy's own reason holds."""


def choose(
    tokens: int,
    prefill_side: Sequence[Candidate],
    decode_side: Sequence[Candidate],
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
    `CostModel.rank` does; a worker for both roles is in both. Either may be empty, not both. `can_move` is
    False for a request whose KV cannot be moved. With `keeps_first` the first decode candidate answers, and
    only the place of the prefill is decided (a session, a turn of `roundrobin`). Equal costs are decided by
    the order of the rankings. The result has an empty ranking if `strict` leaves no worker.
    """
    threshold, strict = options.threshold_tokens, options.strict
    prefill_only = _without(prefill_side, decode_side)
    if not decode_side:
        return Choice(() if strict else prefill_side, None, RouteReason.NO_DECODE_WORKER)
    others = () if strict else prefill_only
    targets = decode_side[:1] if keeps_first else decode_side
    legs = _two_best_legs(prefill_side, tokens, costs, options) if can_move and tokens > 1 else ()
    single: Candidate | None = None
    pair: Candidate | None = None
    single_cost = pair_cost = 0.0
    leg_of_pair, is_forced = None, False
    step_s = costs.prefill_s(1, max(0, tokens - 1))
    has_pair = any(leg.candidate.worker is not each.worker for leg in legs for each in targets)
    for candidate in targets:
        miss = tokens - candidate.matched_tokens
        leg = next((leg for leg in legs if leg.candidate.worker is not candidate.worker), None)
        must_move = threshold is not None and miss > max(1, threshold) and can_move
        # `strict` does not keep a worker for both roles from computing the prompt.
        may_compute = not strict or any(each.worker is candidate.worker for each in prefill_side)
        if not must_move or (may_compute and not has_pair):
            cost = candidate.score + _stall_s(candidate, tokens, costs, options)
            if single is None or cost < single_cost - costs.tie_share * single_cost - costs.tie_s:
                single, single_cost = candidate, cost
        if leg is not None and miss > 1:
            other = _pair(candidate, leg, links.move_s(candidate.worker.index, miss), step_s, now)
            if pair is None or other.score < pair_cost - costs.tie_share * pair_cost - costs.tie_s:
                pair, pair_cost, leg_of_pair, is_forced = other, other.score, leg, must_move
    best, best_cost, leg_of_best = single, single_cost, None
    if pair is not None and leg_of_pair is not None:
        # The delay of later requests ranks the workers of one side only.
        if single is not None:
            single_cost -= single.terms.marginal / single.worker.ramp_at(now)
            pair_cost -= leg_of_pair.candidate.terms.marginal / pair.worker.ramp_at(now)
        # A pair needs a second request, so it must be better, and not only equal.
        if single is None or pair_cost < single_cost - costs.tie_share * single_cost - costs.tie_s:
            best, best_cost, leg_of_best = pair, pair.score, leg_of_pair
    if best is None:
        return Choice((), None, RouteReason.NO_PREFILL_WORKER)
    if others and best.terms.memory > 0.0 and not keeps_first:
        rescue = others[0]
        rescue_cost = rescue.score + _stall_s(rescue, tokens, costs, options)
        if rescue_cost < best_cost:
            return Choice([rescue, *decode_side, *others[1:]], None, RouteReason.DECODE_SIDE_FULL)
    rest = [each for each in decode_side if each.worker is not best.worker]
    ranking = [best, *rest, *others]
    if leg_of_best is None:
        is_alone = can_move and not legs and (threshold is None or tokens - best.matched_tokens > threshold)
        return Choice(ranking, None, RouteReason.NO_PREFILL_WORKER if is_alone else None)
    whole = next(each for each in decode_side if each.worker is best.worker)
    moved = tokens - whole.matched_tokens
    handover = Handover(
        leg_of_best.candidate, whole, moved, links.move_s(best.worker.index, moved), leg_of_best.cost
    )
    return Choice(ranking, handover, RouteReason.OVER_THRESHOLD if is_forced else RouteReason.HANDED_OVER)


class _Leg(NamedTuple):
    """The prompt on one prefill worker."""

    candidate: Candidate
    cost: float
    ready_s: float
    """Until the prompt is computed, without charges for others."""


def _two_best_legs(
    side: Sequence[Candidate], tokens: int, costs: Costs, options: PrefillDecodeOptions
) -> Sequence[_Leg]:
    """The two cheapest prefill workers: one of them may be the decode worker, which is no pair."""
    first = second = None
    for candidate in side:
        terms = candidate.terms
        cost = candidate.score - terms.decode + _stall_s(candidate, tokens, costs, options)
        leg = _Leg(candidate, cost, max(terms.wait, terms.load) + terms.prefill)
        if first is None or cost < first.cost:
            first, second = leg, first
        elif second is None or cost < second.cost:
            second = leg
    return [leg for leg in (first, second) if leg is not None]


def _stall_s(candidate: Candidate, tokens: int, costs: Costs, options: PrefillDecodeOptions) -> float:
    """The charge for the delay of the streams that run on the worker, by the prefill of the request."""
    load = candidate.queue
    streams = load.in_flight - load.queued
    if streams <= 0:
        return 0.0
    chunks = max(1, -(-(tokens - candidate.matched_tokens) // costs.max_batched_tokens))
    return options.stall_share * streams * max(0.0, candidate.prefill_s - costs.iteration_s * chunks)


def _pair(candidate: Candidate, leg: _Leg, move_s: float, step_s: float, now: float) -> Candidate:
    """`candidate` as the decode worker of a pair."""
    whole = candidate.terms
    terms = CostTerms(
        wait=whole.wait,
        load=leg.ready_s + move_s,
        prefill=step_s,
        memory=whole.memory,
        eviction=whole.eviction,
        marginal=leg.cost - leg.ready_s,
        decode=whole.decode,
    )
    if whole.ramp:
        score = terms.score
        terms = terms._replace(ramp=score / candidate.worker.ramp_at(now) - score)
    return Candidate(candidate.worker, terms.score, candidate.matched_tokens, step_s, terms, candidate.held)


def _without(some: Sequence[Candidate], others: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates of `some` whose workers are not in `others`, in their order."""
    known = {id(candidate.worker) for candidate in others}
    return [candidate for candidate in some if id(candidate.worker) not in known]


class HandoverDispatch(NamedTuple):
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
        knows_caches = strategy.needs in (Needs.PROMPT, Needs.TOKENS)
        answering = sides.decode or sides.prefill
        assert answering is not None  # each worker of a view is on a side
        decision = strategy.rank(query, answering)
        if recorder is not None:
            recorder.decided(query, answering, strategy, decision)
        if knows_caches:
            rank: Callable[[RouteQuery, FleetView], Sequence[Candidate]] = partial(_ranking_of, strategy)
            first_side: Sequence[Candidate] = decision.ranking
        else:
            # The strategy only names the worker that answers. The place of the prefill needs the costs.
            rank = self._ranking
            costed = self._ranking(query, answering)
            costed.put_first(decision.ranking[0].worker)
            first_side = costed
        if sides.decode is None:
            prefill_side, decode_side = first_side, _NOBODY
        else:
            prefill_side = _NOBODY if sides.prefill is None else rank(query, sides.prefill)
            decode_side = first_side
        choice = choose(
            query.tokens,
            prefill_side,
            decode_side,
            self.links,
            self._costs.costs(query.model),
            self.options,
            query.now,
            can_move=query.hands_over,
            keeps_first=not knows_caches and decision.reason is not RouteReason.NO_SESSION_KEY,
        )
        if not choice.ranking:
            gone = "decode" if choice.reason is RouteReason.NO_DECODE_WORKER else "prefill"
            raise NoRoutableWorker(
                f"No {gone} worker serves the model {query.model!r} at the moment, and other workers may not "
                "do its work (routing.prefill_decode.strict).",
                retry_after_s=1,
            )
        return RouteDecision(
            decision.strategy, choice.reason or decision.reason, choice.ranking, choice.handover
        )

    def _ranking(self, query: RouteQuery, view: FleetView) -> Ranking:
        """The view's workers by cost, with matched tokens from the route history."""
        matched = matched_tokens(self._history, query, view.workers, view.places)
        return self._costs.rank(query, view.workers, matched, queues=view.loads)


def _ranking_of(strategy: Strategy, query: RouteQuery, view: FleetView) -> Sequence[Candidate]:
    return strategy.rank(query, view).ranking
