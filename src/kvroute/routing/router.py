"""What the gateway drives: decide, dispatch, first token, finish. Pure: no I/O, no clock, no event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvroute.blocks.keys import BlockKey, Tier
from kvroute.fleet.load import Reservation, ReservationListener
from kvroute.fleet.worker import ASSUMED_BLOCK_TOKENS, ASSUMED_CAPACITY_TOKENS, FleetView, Worker, WorkerId
from kvroute.index.history import HistorySize, PinnedBlocks, RouteHistory
from kvroute.index.in_flight import Flight, InFlight
from kvroute.index.registry import HISTORIES
from kvroute.routing.cost import CostModel
from kvroute.routing.cost_parameters import Costs, Learned
from kvroute.routing.registry import STRATEGIES, RoutingOptions
from kvroute.routing.strategies.kvaware import KvAwareOptions
from kvroute.routing.strategies.prefixaware import PrefixAwareOptions
from kvroute.routing.strategy import (
    CacheMap,
    Candidate,
    Needs,
    NoMap,
    RouteDecision,
    RouteQuery,
    RouteReason,
    Strategy,
    matched_tokens,
)
from kvroute.routing.transfers import CacheViews, Transfers

TOLERANCE = 0.02
_LEAST_WEIGHT = 0.1


class HistoryCapacity:
    """Capacities are tokens, parts are blocks of bytes, and how many tokens fill a block is an estimate
    that improves with each answer: this converts, and follows. Mutable: by its own methods."""

    def __init__(self, history: RouteHistory) -> None:
        self._history = history
        self.block_tokens: dict[int, float] = {}
        """By worker's index; what `sending` would change nothing about need not be told to it."""
        self._sized_by: dict[int, float] = {}
        """By worker's index: what its part has its capacity by, which follows `block_tokens` in steps."""

    def resize(self, worker: Worker) -> None:
        """The worker joined, or its capacity changed."""
        block_tokens = self.block_tokens.setdefault(worker.index, float(ASSUMED_BLOCK_TOKENS))
        self._sized_by[worker.index] = block_tokens
        self._history.set_capacity(worker.index, max(1, int(worker.capacity_tokens / block_tokens)))

    def sending(self, worker: Worker, query: RouteQuery) -> None:
        """A prompt is about to go to the worker: weigh its blocks' tokens by their number."""
        index = worker.index
        for prompt in query.prompts:
            block_tokens = prompt.block_tokens
            known = self.block_tokens.get(index)
            if known is None:
                self.block_tokens[index] = block_tokens
                self.resize(worker)
                continue
            change, bearable = block_tokens - known, TOLERANCE * known
            if change > bearable or -change > bearable:
                blocks = len(prompt.keys)
                weight = max(_LEAST_WEIGHT, blocks / (blocks + self._history.part(index).blocks + 1))
                estimate = self.block_tokens[index] = known + weight * change
                sized_by = self._sized_by[index]
                if abs(estimate - sized_by) > TOLERANCE * sized_by:
                    self.resize(worker)

    def forget(self, worker: Worker) -> None:
        """The worker left; its index may come to stand for another one."""
        self.block_tokens.pop(worker.index, None)
        self._sized_by.pop(worker.index, None)


class Followed(Protocol):
    """What an `Observer` hears of one attempt; each at most once."""

    def first_token(self) -> None: ...

    def finished(self) -> None: ...


class Observer(Protocol):
    """Hears of every attempt that this router accounts, and of sessions that it is told to forget."""

    def dispatched(self, query: RouteQuery, decision: RouteDecision, candidate: Candidate) -> Followed: ...

    def session_forgotten(self, session_key: str) -> None: ...


class Dispatch(Reservation, eq=False, kw_only=True):
    """One attempt of one request on one worker: its share of the worker's load, and what else is given back
    when it is over, however it ended. Whoever dispatched it finishes it, in a `finally`. Mutable: by the
    router and by itself."""

    worker: Worker
    _lesson: _PrefillSample | None = None

    def first_token(self, now: float) -> None:
        """The first token of a streamed answer came: the prefill is done. Later calls do nothing."""
        if self.listener is not None:
            self.listener.first_token(now, self.is_queued)
        Reservation.first_token(self, now)
        if self._lesson is not None:
            self._lesson.learn(now)
            self._lesson = None


class _SecondaryReservations(NamedTuple):
    """What some attempts have besides: their data-parallel rank, several prompts or exact ones."""

    of_rank: Reservation | None
    leases: Sequence[PinnedBlocks | Flight]

    def first_token(self, now: float, is_first: bool) -> None:
        if self.of_rank is not None:
            self.of_rank.first_token(now)

    def finish(self, now: float) -> None:
        if self.of_rank is not None:
            self.of_rank.finish(now)
        for lease in self.leases:
            lease.release()


class _Observed(NamedTuple):
    """What an attempt has besides, and who observes it."""

    more: ReservationListener | None
    followed: Followed

    def first_token(self, now: float, is_first: bool) -> None:
        if is_first:
            self.followed.first_token()
        if self.more is not None:
            self.more.first_token(now, is_first)

    def finish(self, now: float) -> None:
        self.followed.finished()
        if self.more is not None:
            self.more.finish(now)


class _PrefillSample(NamedTuple):
    """A prefill that had its worker to itself when it was sent: its time says what prefill costs."""

    learned: Learned
    query: RouteQuery
    worker: int
    held: int
    costs: Costs
    start: float

    def learn(self, now: float) -> None:
        query, costs, held = self.query, self.costs, self.held
        miss, prompts = query.tokens - held, len(query.prompts) or 1
        context, chunks = (held + miss / 2) / prompts, max(1, -(-miss // costs.max_batched_tokens))
        configured_s = costs.prefill_s(miss, held, prompts)
        self.learned.saw(query.model, self.worker, miss, context, chunks, now - self.start, configured_s)


class Router:
    """Strategies, costs, history and load behind one door.

    Mutable: `dispatch` and what follows it, and the calls about workers, change it; `decide`, `pinned`
    and `explain` change nothing. Touched from the event loop only. Deciding, dispatching and finishing a
    short prompt on two workers takes about 20 us together (bench/micro_route.py).
    """

    def __init__(
        self,
        options: RoutingOptions | None = None,
        history: RouteHistory | None = None,
        caches: CacheMap | None = None,
        observer: Observer | None = None,
    ) -> None:
        options = options or RoutingOptions()
        index = options.options_of(PrefixAwareOptions).index
        if history is None:
            history = HISTORIES[index](ASSUMED_CAPACITY_TOKENS // ASSUMED_BLOCK_TOKENS)
        self._options = options
        self._index = index
        self._observer = observer
        self._history = history
        self._sizes = HistoryCapacity(history)
        self._learned = Learned() if options.learning else None
        self._costs = CostModel(history, options.costs, options.costs_of_models(), self._learned)
        self._in_flight = InFlight()
        self._transfers = Transfers(options.options_of(KvAwareOptions).tiers)
        views = CacheViews(caches or NoMap(), self._in_flight, self._transfers)
        self._strategies: dict[str, Strategy] = {
            name: make(getattr(options, name), self._costs, history, views)
            for name, make in STRATEGIES.items()
        }
        self._on_dispatch = {
            name: each.on_dispatch for name, each in self._strategies.items() if each.observes_dispatch
        }

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of all strategies."""
        return tuple(self._strategies)

    def knows(self, name: str) -> bool:
        return name in self._strategies

    def may_need(self, needs: Needs) -> bool:
        """Whether a strategy that is configured, for all models or for one, wants this prepared."""
        return self._options.may_need(needs)

    def strategy(self, model: str, name: str | None = None) -> Strategy:
        """The strategy called `name`, else the model's; its `needs` says what a query should bring."""
        if name is None:
            override = self._options.models.get(model)
            name = (override and override.strategy) or self._options.strategy
        return self._strategies[name]

    def costs(self, model: str) -> Costs:
        """What the model's work costs now, learned figures included."""
        return self._costs.costs(model)

    def decide(self, query: RouteQuery, view: FleetView, strategy: Strategy | None = None) -> RouteDecision:
        """Rank the view's workers (one at least), by the model's strategy unless another is given."""
        decision = (strategy or self.strategy(query.model)).rank(query, view)
        if len(view.workers) == 1:
            return RouteDecision(decision.strategy, RouteReason.ONLY_WORKER, decision.ranking)
        return decision

    def pinned(self, query: RouteQuery, view: FleetView, owner: WorkerId) -> RouteDecision | None:
        """The decision for a request that only `owner` can answer; None when it is not in the view."""
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
    ) -> Dispatch:
        """Account an attempt on `candidate`, one of the decision's ranking: its prefill joins the worker's
        queue, its blocks count as held and stay pinned until `Dispatch.finish`. For what is not this
        process's own see `dispatched_elsewhere`."""
        worker, held, prompts, streamed = candidate.worker, candidate.held, query.prompts, query.streamed
        load = worker.load
        lesson = self._lesson(query, candidate, now) if streamed and is_own else None
        dispatch = Dispatch(
            load, now, candidate.prefill_s, query.tokens, streamed, worker=worker, _lesson=lesson
        )
        load.enter(dispatch, now)
        if prompts:
            index, first = worker.index, prompts[0]
            known = self._sizes.block_tokens.get(index)
            # What would change nothing, as of `sending`.
            if len(prompts) > 1 or known is None or not abs(first.block_tokens - known) <= TOLERANCE * known:
                self._sizes.sending(worker, query)
            dispatch.lease = self._history.acquire(index, first.keys)
        if held is not None or len(prompts) > 1:
            slot, exact = None if held is None else held.slot, query.exact
            if slot is not None and len(prompts) == len(exact) == 1 and candidate.rank is None:
                dispatch.listener = self._in_flight.acquire(slot, exact[0].keys)  # as `_more` would
            else:
                dispatch.listener = self._more(query, candidate, now)
        on_dispatch = self._on_dispatch.get(decision.strategy)
        if on_dispatch is not None:
            on_dispatch(query, decision, candidate)
        if self._observer is not None and is_own:
            followed = self._observer.dispatched(query, decision, candidate)
            dispatch.listener = _Observed(dispatch.listener, followed)
        return dispatch

    def dispatched_elsewhere(
        self, query: RouteQuery, decision: RouteDecision, candidate: Candidate, now: float
    ) -> Dispatch:
        """Account an attempt that another gateway process has made: as `dispatch`, but nothing is learnt
        from it and the observer does not hear of it."""
        return self.dispatch(query, decision, candidate, now, is_own=False)

    def _more(self, query: RouteQuery, candidate: Candidate, now: float) -> _SecondaryReservations:
        """What goes on in the rank and in the caches, and of the prompts behind the first one."""
        held, index, of_rank = candidate.held, candidate.worker.index, None
        leases: list[PinnedBlocks | Flight] = [
            self._history.acquire(index, prompt.keys) for prompt in query.prompts[1:]
        ]
        if held is not None:
            if held.rank is not None:
                of_rank = candidate.queue.reserve(now, candidate.prefill_s, query.tokens, query.streamed)
            if held.slot is not None:
                leases += [self._in_flight.acquire(held.slot, prompt.keys) for prompt in query.exact]
        return _SecondaryReservations(of_rank, leases)

    def sent_before(self, worker: Worker, keys: Sequence[BlockKey]) -> None:
        """The worker was sent this prompt some time ago, and more recently than what was told before."""
        self._history.acquire(worker.index, keys).release()

    def recent(self, worker: Worker, most_blocks: int) -> list[Sequence[BlockKey]]:
        """What `sent_before` would have to be told of the worker, `most_blocks` of it: the last ones."""
        return self._history.recent(worker.index, most_blocks)

    def _lesson(self, query: RouteQuery, candidate: Candidate, now: float) -> _PrefillSample | None:
        """What this attempt may teach, once its first token shows: nothing unless that is due to it alone."""
        worker = candidate.worker
        if self._learned is None or worker.load.queued or not query.prompts:
            return None
        if candidate.held is not None and candidate.terms.load:  # no other candidate has slower tiers
            return None
        costs = self._costs.configured(query.model)
        return _PrefillSample(self._learned, query, worker.index, candidate.matched_tokens, costs, now)

    def worker_joined(self, worker: Worker) -> None:
        """A worker is new; its index may have been another's before."""
        self._history.forget(worker.index)
        self._sizes.forget(worker)
        self._sizes.resize(worker)

    def worker_left(self, worker: Worker) -> None:
        """Drop what the worker was sent. Its unfinished dispatches still return their load to it."""
        self._history.forget(worker.index)
        self._sizes.forget(worker)
        if self._learned is not None:
            self._learned.forget(worker.index)

    def rate_measured(self, slot: int, tier: Tier, gb_s: float, loads: int) -> None:
        """So many loads from a slower tier to this place of the cache map had this mean, in GB/s."""
        self._transfers.learn(slot, tier, gb_s, loads)

    def rate(self, slot: int, tier: Tier) -> float:
        """The bandwidth in GB/s that is reckoned with, from a slower tier to this place."""
        return self._transfers.gb_s(slot, tier)

    def rate_known(self, slot: int, tier: Tier, gb_s: float) -> None:
        """Reckon with this bandwidth, as another gateway process does."""
        self._transfers.adopt(slot, tier, gb_s)

    def slot_left(self, slot: int) -> None:
        """A place of the cache map is no more; its number may come to stand for another one."""
        self._in_flight.forget(slot)
        self._transfers.forget(slot)

    def worker_restarted(self, worker: Worker) -> None:
        """The worker's cache is empty again."""
        self._history.forget(worker.index)

    def capacity_changed(self, worker: Worker) -> None:
        """The worker's `capacity_tokens` changed: resize its part, evicting what no longer fits."""
        self._sizes.resize(worker)

    def forget_session(self, session_key: str) -> bool:
        """Drop what strategies remember about a session; False when that was nothing.

        The session strategy forgets where load had moved it, so it returns to its home on the ring. KV
        blocks are the worker's own and age out there.
        """
        if self._observer is not None:
            self._observer.session_forgotten(session_key)
        return self.session_forgotten_elsewhere(session_key)

    def session_forgotten_elsewhere(self, session_key: str) -> bool:
        """`forget_session`, as another gateway process was told."""
        forgotten = [strategy.forget(session_key) for strategy in self._strategies.values()]
        return any(forgotten)

    def index_size(self) -> HistorySize:
        """The history's size, for gauges. Walks its runs: for scrapes, not for requests."""
        return self._history.size()

    def describe_worker(self, worker: Worker) -> dict[str, Any]:
        """What routing knows about a worker beside its facts."""
        part = self._history.part(worker.index)
        return {
            "tracked_blocks": part.blocks,
            "active_blocks": part.active_blocks,
            "capacity_blocks": part.capacity_blocks,
            "queued_requests": worker.load.queued,
            "mean_residence_s": worker.load.residence_s,
        }

    def describe_index(self, workers: Iterable[Worker]) -> dict[str, Any]:
        """The history's size and each worker's part."""
        size = self._history.size()
        return {
            "index": self._index,
            "blocks": size.blocks,
            "tracked_blocks": size.tracked,
            "bytes": size.bytes,
            "workers": {worker.id: self.describe_worker(worker) for worker in workers},
        }

    def explain(self, query: RouteQuery, decision: RouteDecision) -> dict[str, Any]:
        """A decision with its arithmetic and what went into it; values are seconds and tokens."""
        pressure = self._costs.pressure([candidate.queue for candidate in decision.ranking], query.now)
        described = decision.describe()
        for entry, candidate in zip(described["ranking"], decision.ranking, strict=True):
            worker = candidate.worker
            entry |= {
                "requests_in_flight": worker.load.in_flight,
                "active_tokens": worker.load.active_tokens,
                **self.describe_worker(worker),
            }
        return {
            **described,
            "prompt_tokens": query.tokens,
            "utilisation": pressure.utilisation,
            "mean_own_s": pressure.mean_own_s,
            "costs": self._costs.costs(query.model)._asdict(),
        }
