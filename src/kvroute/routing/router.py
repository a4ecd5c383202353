"""The router: decide, dispatch, first token, finish. Pure: no I/O, no clock, no event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from msgspec import Struct
from msgspec.structs import replace

from kvroute.blocks.keys import BlockKey, PromptKeys, Tier
from kvroute.fleet.load import BothListeners, Reservation, ReservationListener, describe_foreign
from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, ASSUMED_CAPACITY_TOKENS, FleetView, Worker, WorkerId
from kvroute.index.history import HistorySize, PinnedBlocks, RouteHistory
from kvroute.index.in_flight import Flight, InFlight
from kvroute.index.registry import history_type
from kvroute.routing.cache_value import CacheValue
from kvroute.routing.cost import CostModel, matched_tokens
from kvroute.routing.cost_parameters import Costs
from kvroute.routing.learned_costs import Learned
from kvroute.routing.prefill_decode import HandoverDispatch, Pairs
from kvroute.routing.recording import DecisionRecorder, HotPrefix, Redecider
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.reports import Answers, Discounts, Reports
from kvroute.routing.sessions import SessionWorkers, hash_of_session
from kvroute.routing.strategies.kvaware import KvAwareOptions
from kvroute.routing.strategies.prefixaware import PrefixAwareOptions
from kvroute.routing.strategies.session import SessionOptions
from kvroute.routing.strategy import (
    CacheMap,
    Candidate,
    ExactPrompt,
    Needs,
    NoMap,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Strategy,
    Tokens,
)
from kvroute.routing.transfers import CacheViews, Transfers

TOLERANCE = 0.02
"""Relative change of a worker's tokens per block that `HistoryCapacity` ignores."""
_LEAST_WEIGHT = 0.1


class HistoryCapacity:
    """Sets the size of each worker's part of the route history from its KV capacity in tokens.

    The history counts blocks of prompt bytes. The number of tokens in a block is an estimate that improves
    with each answer. Mutable: its own methods change it.
    """

    def __init__(self, history: RouteHistory) -> None:
        self._history = history
        self.block_tokens: dict[int, float] = {}
        """Worker's index -> estimated tokens per block. A caller may skip `observe` within `TOLERANCE`."""
        self._sized_by: dict[int, float] = {}
        """Worker's index -> the estimate at the last `resize`; follows `block_tokens` in steps."""
        self._units: dict[int, tuple[int, ...]] = {}
        """Worker's index -> its units at the last `resize`."""

    def resize(self, worker: Worker) -> None:
        """Set the size of the worker's parts. Called when it joins and when its capacity or its ranks
        change."""
        block_tokens = self.block_tokens.setdefault(worker.index, float(ASSUMED_BLOCK_TOKENS))
        self._sized_by[worker.index] = block_tokens
        units, blocks = worker.units, worker.capacity_tokens / block_tokens
        for removed_unit in set(self._units.get(worker.index, ())) - set(units):
            self._history.forget(removed_unit)
        self._units[worker.index] = units
        self._history.set_capacity(units[0], max(1, int(blocks)))
        for unit in units[1:]:
            self._history.set_capacity(unit, max(1, int(blocks / (len(units) - 1))))

    def observe(self, worker: Worker, blocks: int, block_tokens: float) -> None:
        """Update the estimate: `blocks` with `block_tokens` tokens in each are sent to the worker."""
        index = worker.index
        estimate = self.block_tokens.get(index)
        if block_tokens <= 0:  # another gateway may send anything
            return
        if estimate is None:
            self.block_tokens[index] = block_tokens
            self.resize(worker)
            return
        change, tolerated = block_tokens - estimate, TOLERANCE * estimate
        if change > tolerated or -change > tolerated:
            tracked = sum(self._history.share(unit).blocks for unit in worker.units)
            weight = max(_LEAST_WEIGHT, blocks / (blocks + tracked + 1))
            new_estimate = self.block_tokens[index] = estimate + weight * change
            sized_by = self._sized_by[index]
            if abs(new_estimate - sized_by) > TOLERANCE * sized_by:
                self.resize(worker)

    def forget(self, worker: Worker) -> None:
        """Drop a worker that has left; another worker may get its units."""
        self._units.pop(worker.index, None)
        self.block_tokens.pop(worker.index, None)
        self._sized_by.pop(worker.index, None)


class Observer(Protocol):
    """Called for every attempt of this process, and for every session that this process forgets."""

    def dispatched(
        self, query: RouteQuery, decision: RouteDecision, candidate: Candidate, now: float
    ) -> ReservationListener:
        """An attempt has begun. Returns the listener of its first token and end."""
        ...

    def session_forgotten(self, session_key: str) -> None: ...


class Dispatch(Reservation, eq=False, kw_only=True):
    """One attempt of one request on one worker, with everything that is reserved for it.

    The caller of `Router.dispatch` must call `finish`, in a `finally`. Mutable: by the router and itself.
    """

    worker: Worker
    _sample: _PrefillSample | None = None

    def first_token(self, now: float) -> None:
        """Record the first token of a streamed answer: the prefill is done. Later calls do nothing."""
        if self.listener is not None:
            self.listener.first_token(now, self.is_queued)
        Reservation.first_token(self, now)
        if self._sample is not None:
            self._sample.record(now)
            self._sample = None


class _Reservations(NamedTuple):
    """Reservations that only some attempts have: a data-parallel rank, further prompts, exact prompts."""

    of_rank: Reservation | None
    leases: Sequence[PinnedBlocks]
    flights: Sequence[Flight]

    def first_token(self, now: float, is_first: bool) -> None:
        if self.of_rank is not None:
            self.of_rank.first_token(now)
        for flight in self.flights:
            flight.first_token(now, is_first)

    def finish(self, now: float) -> None:
        if self.of_rank is not None:
            self.of_rank.finish(now)
        for lease in self.leases:
            lease.release()
        for flight in self.flights:
            flight.finish(now)


class _PrefillSample(Struct, frozen=True, gc=False):
    """A prefill sent to an idle worker, so that its duration shows the cost of prefill."""

    learned: Learned
    query: RouteQuery
    worker: int
    matched: int
    costs: Costs
    start: float

    def record(self, now: float) -> None:
        query, costs, matched = self.query, self.costs, self.matched
        miss, prompts = query.tokens - matched, len(query.prompts) or 1
        context, chunks = (matched + miss / 2) / prompts, max(1, -(-miss // costs.max_batched_tokens))
        configured_s = costs.prefill_s(miss, matched, prompts)
        self.learned.record(query.model, self.worker, miss, context, chunks, now - self.start, configured_s)


class Router:
    """Ranks workers for requests and accounts every attempt in load, history and strategies.

    Mutable: `dispatch`, the methods of `Dispatch` and the calls about workers change it; `decide`, `pinned`
    and `explain` change nothing. Used from the event loop only. To decide, dispatch and finish a short prompt
    on two workers takes about 20 us (bench/micro_route.py).
    """

    def __init__(
        self,
        options: RoutingOptions | None = None,
        history: RouteHistory | None = None,
        caches: CacheMap | None = None,
        observer: Observer | None = None,
        cache_value: CacheValue | None = None,
    ) -> None:
        options = options or RoutingOptions()
        index = options.options_of(PrefixAwareOptions).index
        if history is None:
            make_history = history_type(index)
            assert make_history is not None, "the option names a history"
            history = make_history(ASSUMED_CAPACITY_TOKENS // ASSUMED_BLOCK_TOKENS)
        self._options = options
        self._index = index
        self._observer = observer
        self.cache_value = cache_value
        self._history = history
        self._sizes = HistoryCapacity(history)
        self.learned = Learned() if options.learning else None
        """What answers have taught about each model and worker; None without `routing.learning`."""
        self._costs = CostModel(history, options.costs, options.costs_of_models(), self.learned)
        self._caches = caches or NoMap()
        self._in_flight = InFlight(self._caches.has_end)
        self._transfers = Transfers(options.options_of(KvAwareOptions).tiers)
        self.reports = Reports(Discounts(), Answers())
        """What answers have taught about the predictions."""
        views = CacheViews(self._caches, self._in_flight, self._transfers, self.reports)
        self._strategies: dict[str, Strategy] = {
            name: make(getattr(options, name), self._costs, history, views)
            for name, make in options.types.items()
        }
        self._views, self.caches = views, views.caches
        """`caches`: the map of the workers' caches."""
        token_bytes = options.options_of(KvAwareOptions).tiers.token_bytes
        self.pairs = Pairs(options.prefill_decode, token_bytes, self._costs, history)
        """Decides for fleets in which workers have roles."""
        self.sessions = SessionWorkers(options.options_of(SessionOptions).remembered)
        """The worker of each session's last request, for strategies that rank by what workers hold."""
        self._keeps_sessions = frozenset(
            name
            for name, strategy in self._strategies.items()
            if strategy.needs in (Needs.PROMPT, Needs.TOKENS)
        )
        self.recorder: DecisionRecorder | None = None
        """Records the decisions while somebody looks; see `record`."""
        self._on_dispatch = {
            name: strategy.on_dispatch
            for name, strategy in self._strategies.items()
            if strategy.observes_dispatch
        }

    @property
    def predicting(self) -> frozenset[str]:
        """Names of the strategies that read prompts, and so predict how much of one is cached."""
        return self._keeps_sessions

    @property
    def observing(self) -> frozenset[str]:
        """Names of the strategies that must be told of every dispatch, those of other processes included."""
        return frozenset(self._on_dispatch)

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of all strategies."""
        return tuple(self._strategies)

    def configure(self, options: RoutingOptions) -> None:
        """Change the strategy, the costs and the options of models; the strategies keep their history.

        The sections of the strategies and `learning` do not change.
        """
        # Every strategy exists from the start, and all read one history and one cost model.
        self._options = options
        self._costs.configure(options.costs, options.costs_of_models())
        self.pairs.options = options.prefill_decode

    @property
    def default_strategy(self) -> str:
        """Name of the strategy of models without one of their own."""
        return self._options.strategy

    def knows(self, name: str) -> bool:
        return name in self._strategies

    def may_need(self, needs: Needs) -> bool:
        """Whether a configured strategy, for all models or for one, has these `needs`."""
        return self._options.may_need(needs)

    def has_options(self, model: str) -> bool:
        """Whether this name of a model has options of its own (`routing.models`)."""
        return model in self._options.models

    def strategy(self, model: str, name: str | None = None) -> Strategy:
        """The strategy called `name`, else the one configured for the model."""
        if name is None:
            override = self._options.models.get(model)
            name = (override and override.strategy) or self._options.strategy
        return self._strategies[name]

    def costs(self, model: str) -> Costs:
        """The model's current costs, learned figures included."""
        return self._costs.costs(model)

    def decide(self, query: RouteQuery, view: FleetView, strategy: Strategy | None = None) -> RouteDecision:
        """Rank the view's workers (at least one) by `strategy`, or by the model's strategy.

        Raises NoRoutableWorker if no worker may do the request (`routing.prefill_decode.strict`).
        """
        strategy = strategy or self.strategy(query.model)
        if view.sides is not None:
            return self.pairs.decide(query, view.sides, strategy, self.recorder)
        decision = strategy.rank(query, view)
        if len(view.workers) == 1:
            decision = RouteDecision(decision.strategy, RouteReason.ONLY_WORKER, decision.ranking)
        if self.recorder is not None:
            self.recorder.decided(query, view, strategy, decision)
        return decision

    def record(self) -> DecisionRecorder:
        """Start to record decisions, unless that is done already; returns the recorder.

        A decision then costs about 10 us more, and 1 us per worker. Set `recorder` to None to stop.
        """
        if self.recorder is None:
            self.recorder = DecisionRecorder(self._history, self._costs, self._views)
        return self.recorder

    def redecider(self, name: str) -> Redecider:
        """Makes recorded decisions again with the strategy called `name` and its configured options."""
        registered = self._options.types[name]
        return Redecider(name, registered.needs, partial(registered, getattr(self._options, name)))

    def holders(self, prefix: HotPrefix, workers: Sequence[Worker]) -> dict[WorkerId, Tokens]:
        """The tokens of a prefix that each worker holds now, without workers that hold none.

        By the cache map where the prefix has token ids, all ranks together; otherwise by the route history,
        as `Tokens.gpu`.
        """
        if prefix.prompt is not None:
            cached = self._views.caches.match(prefix.prompt)
            tokens_by_worker: dict[WorkerId, Tokens] = {}
            for worker in workers:
                rank_tokens = [
                    cached[cache.slot] for cache in self._views.caches.places(worker) if cache.slot in cached
                ]
                if rank_tokens:
                    tokens_by_worker[worker.id] = max(rank_tokens, key=lambda tokens: tokens.total)
            return tokens_by_worker
        keys = cast("list[BlockKey]", list(prefix.chain or ()))
        blocks = self._history.match(keys)
        tokens = prefix.tokens / max(1, prefix.blocks)
        most = {worker.id: max(blocks.get(unit, 0) for unit in worker.units) for worker in workers}
        return {
            worker: Tokens(int(rank_tokens * tokens)) for worker, rank_tokens in most.items() if rank_tokens
        }

    def pinned(self, query: RouteQuery, view: FleetView, owner: WorkerId) -> RouteDecision | None:
        """The decision for a request that only `owner` can answer; None if `owner` is not in the view."""
        workers = [worker for worker in view.workers if worker.id == owner]
        if not workers:
            return None
        ranking = self._costs.rank(query, workers, matched_tokens(self._history, query, workers))
        return RouteDecision(self.strategy(query.model).name, RouteReason.RESPONSE_OWNER, ranking)

    def dispatch(
        self,
        query: RouteQuery,
        decision: RouteDecision,
        candidate: Candidate,
        now: float,
        *,
        is_own: bool = True,
        learns: bool = True,
    ) -> Dispatch:
        """Account an attempt on `candidate`, a member of the decision's ranking.

        Its prefill joins the worker's queue; its blocks count as held and stay pinned until
        `Dispatch.finish`. `is_own` is False for an attempt of a peer: no learning, no observer. `learns` is
        False if the worker does not compute the prompt: a handover counts once, on the prefill worker.
        """
        worker, match, prompts, streamed = candidate.worker, candidate.match, query.prompts, query.streamed
        load = worker.load
        unit = worker.index if match is None or match.rank is None else worker.unit_of(match.rank)
        sample = self._prefill_sample(query, candidate, now) if streamed and is_own and learns else None
        dispatch = Dispatch(
            load, now, candidate.prefill_s, query.tokens, streamed, worker=worker, _sample=sample
        )
        load.enter(dispatch, now)
        if prompts:
            index, first_prompt = worker.index, prompts[0]
            block_tokens = self._sizes.block_tokens.get(index)
            # Skip `observe` where it would change nothing: it is a call per request.
            if (
                len(prompts) > 1
                or block_tokens is None
                or not abs(first_prompt.block_tokens - block_tokens) <= TOLERANCE * block_tokens
            ):
                for prompt in prompts:
                    self._sizes.observe(worker, len(prompt.keys), prompt.block_tokens)
            if self.cache_value is not None and learns:
                self.cache_value.dispatched(unit, prompts, self._history, now, self.costs(query.model))
            dispatch.lease = self._history.acquire(unit, first_prompt.keys)
        if match is not None or len(prompts) > 1:
            slot, exact = None if match is None else match.slot, query.exact
            if slot is not None and len(prompts) == len(exact) == 1 and candidate.rank is None:
                # The usual case of `_secondary_reservations`, without the tuple.
                dispatch.listener = self._fly(slot, exact[0], streamed)
            else:
                dispatch.listener = self._secondary_reservations(query, candidate, now)
        key = query.session_key
        if key is not None and decision.handover is None and decision.strategy in self._keeps_sessions:
            session = query.session_hash or hash_of_session(query.model, key)
            self.sessions.dispatched(query.model, session, worker.spec.id)
        on_dispatch = self._on_dispatch.get(decision.strategy)
        if on_dispatch is not None:
            on_dispatch(query, decision, candidate)
        if self._observer is not None and is_own:
            secondary = dispatch.listener
            observer = self._observer.dispatched(query, decision, candidate, now)
            dispatch.listener = observer if secondary is None else BothListeners(observer, secondary)
        return dispatch

    def dispatch_handover(self, query: RouteQuery, decision: RouteDecision, now: float) -> HandoverDispatch:
        """Account a request with `decision.handover` on both workers.

        The decode worker is charged now, so that requests in prefill do not all go to one decode worker.
        """
        handover = decision.handover
        assert handover is not None
        # The prefill worker's answer comes when the prompt is computed, so that time is its first token.
        leg = query if query.streamed else replace(query, streamed=True)
        return HandoverDispatch(
            self.dispatch(leg, decision, handover.prefill, now),
            self.dispatch(query, decision, handover.decode_of_pair, now, learns=False),
        )

    def reserve_at_peer(
        self,
        worker: Worker,
        model: str,
        prefill_s: float,
        tokens: int,
        streamed: bool,
        prompt: PromptKeys | None,
        now: float,
        learns: bool,
        session: tuple[str, str] | None = None,
    ) -> Dispatch:
        """As `dispatch` for a peer, if its candidate has no `match` and its strategy ignores dispatches.

        `session`: the session's key and the name of the strategy.
        """
        if session is not None:
            session_key, strategy = session
            if strategy in self._keeps_sessions:
                self.sessions.dispatched(model, hash_of_session(model, session_key), worker.spec.id)
        dispatch = Dispatch(worker.load, now, prefill_s, tokens, streamed, worker=worker)
        worker.load.enter(dispatch, now)
        if prompt is not None:
            self._sizes.observe(worker, len(prompt.keys), prompt.block_tokens)
            if self.cache_value is not None and learns:
                self.cache_value.dispatched(worker.index, (prompt,), self._history, now, self.costs(model))
            dispatch.lease = self._history.acquire(worker.index, prompt.keys)
        return dispatch

    def ended_at_peer(
        self,
        worker: Worker,
        model: str,
        keys: Sequence[BlockKey],
        block_tokens: float,
        now: float,
        rank: int | None = None,
    ) -> None:
        """Account a request of a peer that has ended already, by the keys of its prompt."""
        self._sizes.observe(worker, len(keys), block_tokens)
        if self.cache_value is not None:
            prompt = PromptKeys(keys, 0, block_tokens)
            unit, costs = worker.unit_of(rank), self.costs(model)
            self.cache_value.dispatched(unit, (prompt,), self._history, now, costs)
        self.replay_prompt(worker, keys, rank)

    def not_repeated(self, worker: Worker, lasts: Sequence[int], rank: int | None = None) -> Iterable[int]:
        """As `ended_at_peer`, for known prompts by their last keys. Returns the unknown ones' positions."""
        if self.cache_value is not None:
            return range(len(lasts))
        return self._history.touch(worker.unit_of(rank), cast("Sequence[BlockKey]", lasts))

    def slot_of(self, worker: Worker, rank: int | None) -> int | None:
        """The worker's slot in this process's cache map, if any. `rank`: None for a worker with one rank."""
        caches = self._views.caches.places(worker)
        if rank is None:
            return caches[0].slot if len(caches) == 1 else None
        return next((cache.slot for cache in caches if cache.rank == rank), None)

    def _secondary_reservations(self, query: RouteQuery, candidate: Candidate, now: float) -> _Reservations:
        """Reserve load of the rank, history blocks of further prompts, and cache blocks of exact prompts."""
        match, of_rank = candidate.match, None
        unit = candidate.worker.unit_of(candidate.rank)
        leases = [self._history.acquire(unit, prompt.keys) for prompt in query.prompts[1:]]
        flights: list[Flight] = []
        if match is not None:
            if match.rank is not None:
                of_rank = candidate.queue.reserve(now, candidate.prefill_s, query.tokens, query.streamed)
            if match.slot is not None:
                flights = [self._fly(match.slot, prompt, query.streamed) for prompt in query.exact]
        return _Reservations(of_rank, leases, flights)

    def _fly(self, slot: int, prompt: ExactPrompt, streamed: bool) -> Flight:
        announced = self._caches.keys_of(slot, prompt)
        return self._in_flight.acquire(slot, prompt.keys, announced, streamed=streamed)

    def replay_prompt(self, worker: Worker, keys: Sequence[BlockKey], rank: int | None = None) -> None:
        """Add a past prompt of the worker, or of one rank of it, to the history, as its most recent one.

        A peer that starts later gets its history this way.
        """
        self._history.acquire(worker.unit_of(rank), keys).release()

    def recent_prompts(
        self, worker: Worker, most_blocks: int, rank: int | None = None
    ) -> list[Sequence[BlockKey]]:
        """The most recent prompts of the worker, or of one rank, of together `most_blocks` blocks, oldest
        first."""
        return self._history.recent(worker.unit_of(rank), most_blocks)

    def _prefill_sample(self, query: RouteQuery, candidate: Candidate, now: float) -> _PrefillSample | None:
        """A sample for learning, if the time to the first token will depend on this prefill only."""
        worker = candidate.worker
        if self.learned is None or worker.load.queued or not query.prompts:
            return None
        if candidate.match is not None and candidate.terms.load:  # no other candidate has slower tiers
            return None
        costs = self._costs.configured(query.model)
        return _PrefillSample(self.learned, query, worker.index, candidate.counted, costs, now)

    def worker_joined(self, worker: Worker) -> None:
        """Initialise the state of a new worker; another worker may have had its index."""
        self.worker_restarted(worker)
        self._sizes.forget(worker)
        self._sizes.resize(worker)

    def worker_left(self, worker: Worker) -> None:
        """Drop the history of a worker that has left. Its unfinished dispatches still return their load."""
        self.worker_restarted(worker)
        self._sizes.forget(worker)
        self.pairs.links.forget(worker.index)
        if self.learned is not None:
            self.learned.forget(worker.index)

    def rate_measured(self, slot: int, tier: Tier, gb_s: float, loads: int) -> None:
        """Learn the mean bandwidth in GB/s of `loads` loads from a slower tier to a slot of the cache map."""
        self._transfers.learn(slot, tier, gb_s, loads)

    def rate(self, slot: int, tier: Tier) -> float:
        """The assumed bandwidth in GB/s from a slower tier to a slot."""
        return self._transfers.gb_s(slot, tier)

    def set_rate(self, slot: int, tier: Tier, gb_s: float) -> None:
        """Set the bandwidth in GB/s that a peer has learned."""
        self._transfers.set_rate(slot, tier, gb_s)

    def slot_left(self, slot: int) -> None:
        """Drop the state of a slot that was removed from the cache map; its number may be reused."""
        self._in_flight.forget(slot)
        self._transfers.forget(slot)

    def worker_restarted(self, worker: Worker) -> None:
        """Drop the history of a worker whose cache is empty after a restart or a reset."""
        for unit in worker.units:
            self._history.forget(unit)
            self.reports.forget(unit)
        for cache in self._caches.places(worker):
            self._in_flight.forget(cache.slot)  # prompts that have ended, and whose events are not applied

    def history_cleared(self, worker: Worker, rank: int) -> None:
        """Drop the history of one rank, or of a worker with one rank, whose cache is empty."""
        unit = worker.unit_of(rank)
        self._history.forget(unit)
        self.reports.answers.forget(unit)

    def capacity_changed(self, worker: Worker) -> None:
        """Resize the worker's part of the history after a change of `capacity_tokens`; evicts if smaller."""
        self._sizes.resize(worker)

    def forget_session(self, session_key: str) -> bool:
        """Drop the strategies' state of a session; False if there was none.

        The session strategy then sends the session to its home on the ring again. The worker's KV blocks
        stay until the worker evicts them.
        """
        if self._observer is not None:
            self._observer.session_forgotten(session_key)
        return self.session_forgotten_by_peer(session_key)

    def session_forgotten_by_peer(self, session_key: str) -> bool:
        """As `forget_session`, for a request that a peer has received: the observer is not called."""
        forgotten = [strategy.forget(session_key) for strategy in self._strategies.values()]
        return self.sessions.forget(session_key) or any(forgotten)

    def index_size(self) -> HistorySize:
        """The history's size, for gauges. O(runs): call it per scrape, not per request."""
        return self._history.size()

    def describe_worker(self, worker: Worker) -> dict[str, Any]:
        """The router's figures of a worker, as JSON values."""
        shares = [self._history.share(unit) for unit in worker.units]
        return {
            "tracked_blocks": sum(share.blocks for share in shares),
            "active_blocks": sum(share.active_blocks for share in shares),
            "capacity_blocks": shares[0].capacity_blocks,
            "queued_requests": worker.load.queued,
            "mean_residence_s": worker.load.residence_s,
        }

    def evicted_blocks(self, worker: Worker) -> int:
        """Blocks evicted from the worker's parts of the history since they were created."""
        return sum(self._history.share(unit).evicted_blocks for unit in worker.units)

    def has_learned(self, model: str) -> bool:
        """Whether the model's costs are learned from first tokens, and not the configured ones."""
        return self.learned is not None and self.learned.fit(model) is not None

    def slowness(self, model: str, worker: Worker) -> float:
        """Learned duration of a prefill on `worker` relative to the mean; 1 while it is unknown."""
        speeds = None if self.learned is None else self.learned.speeds(model)
        return 1.0 if speeds is None else speeds.of(worker.index)

    def describe_index(self, workers: Iterable[Worker]) -> dict[str, Any]:
        """The history's size and each worker's part, as JSON values."""
        size = self._history.size()
        return {
            "index": self._index,
            "blocks": size.blocks,
            "tracked_blocks": size.tracked,
            "bytes": size.bytes,
            "workers": {worker.id: self.describe_worker(worker) for worker in workers},
        }

    def explain(self, query: RouteQuery, decision: RouteDecision) -> dict[str, Any]:
        """A decision with its terms and their inputs, as JSON values in seconds and tokens."""
        pressure = self._costs.pressure([candidate.queue for candidate in decision.ranking], query.now)
        described = decision.describe()
        for entry, candidate in zip(described["ranking"], decision.ranking, strict=True):
            worker = candidate.worker
            entry |= {
                "requests_in_flight": worker.load.in_flight,
                "active_tokens": worker.load.active_tokens,
                "foreign": describe_foreign(candidate.queue, query.now),
                **self.describe_worker(worker),
            }
        return {
            **described,
            "prompt_tokens": query.tokens,
            "utilisation": pressure.utilisation,
            "mean_prefill_s": pressure.mean_prefill_s,
            "costs": self._costs.costs(query.model)._asdict(),
        }
