"""Records routing decisions with their inputs, and makes them again with any strategy.

The router records only while somebody looks (`Router.record`). Pure: no I/O and no clock.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, cast, overload

from msgspec import Struct

from kvroute.blocks.chunks import PromptChunks
from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.load import LoadStates, copy_loads
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerSpec
from kvroute.index.history import HistoryShare, RouteHistory
from kvroute.index.in_flight import InFlight
from kvroute.routing.cost import CostModel
from kvroute.routing.cost_parameters import Costs
from kvroute.routing.reports import Answers, Discounts, Reports
from kvroute.routing.strategy import (
    CachePlace,
    ExactPrompt,
    Needs,
    RouteDecision,
    RouteQuery,
    RouteReason,
    StatefulStrategy,
    Strategy,
    Tokens,
)
from kvroute.routing.transfers import CacheViews, Transfers

MOST_DECISIONS: Final = 1000
"""Recorded decisions that are kept. One on 64 workers takes about 25 KB."""
MOST_WORKERS_PER_SECOND: Final = 8000
"""Workers whose figures are copied in a second, about 1 us each: 125 decisions on 64 workers."""


class RecordedKeys(Sequence[BlockKey]):
    """What the indexes had for a prompt, in place of its block keys."""

    __slots__ = ("blocks_by_unit", "cached", "in_flight", "length")

    def __init__(
        self,
        length: int,
        blocks_by_unit: Mapping[int, int],
        cached: Mapping[int, Tokens] | None = None,
        in_flight: Mapping[int, int] | None = None,
    ) -> None:
        """`blocks_by_unit` is from the route history; `cached` and `in_flight` by slot of the cache map."""
        self.length = length
        self.blocks_by_unit = blocks_by_unit
        self.cached = cached or {}
        self.in_flight = in_flight or {}

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, position: int) -> BlockKey: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[BlockKey]: ...
    def __getitem__(self, position: int | slice) -> BlockKey | Sequence[BlockKey]:
        """A key's position stands for the key itself, as in `RecordedReports.answers`."""
        if isinstance(position, slice):
            raise TypeError("keys are not recorded")
        return BlockKey(position)


class RecordedReports(NamedTuple):
    """What a decision read of `reports.Reports`."""

    by_map: Mapping[int, float]
    by_history: Mapping[int, float]
    answers: Mapping[int, Mapping[BlockKey, int]]
    """Worker's index -> position of a prompt's last key -> tokens of that prompt and its answer."""


class RecordedWorkers(NamedTuple):
    """The workers of a view as a decision saw them, one column per figure, in the order of the view."""

    specs: Sequence[WorkerSpec]
    facts: Sequence[WorkerFacts]
    numbers: Sequence[int]
    """`Worker.index`."""
    rank_units: Sequence[Mapping[int, int]]
    """`Worker.rank_units`."""
    shares: Sequence[tuple[float, float, float | None]]
    loads: LoadStates
    rank_loads: Mapping[int, tuple[Sequence[int], LoadStates]]
    """Position -> data-parallel ranks and their loads, for workers with several ranks."""
    history_shares: Sequence[tuple[int, int, int]]
    """Of the route history, for each of `units`: blocks, active blocks, capacity in blocks."""
    places: Sequence[Sequence[CachePlace]]
    """Empty without a cache map."""

    @property
    def units(self) -> Sequence[int]:
        """`Worker.units` of all workers."""
        return [
            unit
            for number, ranks in zip(self.numbers, self.rank_units, strict=True)
            for unit in (number, *ranks.values())
        ]


class RecordedDecision(Struct, frozen=True):
    """A decision with all that its strategy read, except the strategy's options."""

    decision: RouteDecision
    needs: Needs
    """What the gateway had prepared: other strategies may need more."""
    query: RouteQuery
    """With `RecordedKeys` in place of block keys, and without token ids."""
    version: int
    workers: RecordedWorkers
    costs: Costs
    speeds: Mapping[int, float]
    transfers: Transfers
    state: Any
    """The strategy's state (`StatefulStrategy`); None if it has none."""
    reports: RecordedReports

    def view(self) -> FleetView:
        """The workers with copies of their loads."""
        seen = self.workers
        workers = [
            Worker(spec, load, HealthState.HEALTHY, facts, share, number, since, until)
            for spec, facts, number, (share, since, until), load in zip(
                seen.specs, seen.facts, seen.numbers, seen.shares, seen.loads.restored(), strict=True
            )
        ]
        for worker, units in zip(workers, seen.rank_units, strict=True):
            worker.rank_units = units
        for position, (ranks, loads) in seen.rank_loads.items():
            workers[position].rank_loads = dict(zip(ranks, loads.restored(), strict=True))
        return FleetView(self.query.model, tuple(workers), self.version)


class DecisionRecorder:
    """Keeps the last decisions with copies of their inputs. Mutable: `decided` adds to it.

    Decisions beyond `MOST_WORKERS_PER_SECOND` are counted in `skipped`.
    """

    def __init__(self, history: RouteHistory, costs: CostModel, views: CacheViews) -> None:
        self._history = history
        self._costs = costs
        self._views = views
        self._ring: deque[RecordedDecision] = deque(maxlen=MOST_DECISIONS)
        self._no_transfers = Transfers()
        self._second = float("-inf")
        self._in_second = 0
        self._latest: RecordedWorkers | None = None
        self.skipped = 0
        self.prefixes = HotPrefixes()

    def __len__(self) -> int:
        return len(self._ring)

    def decided(
        self, query: RouteQuery, view: FleetView, strategy: Strategy, decision: RouteDecision
    ) -> None:
        """Record `decision`, before it is dispatched: nothing that `strategy` read has changed yet."""
        if query.now - self._second >= 1.0:
            self._second, self._in_second = query.now, 0
        if self._in_second >= MOST_WORKERS_PER_SECOND:
            self.skipped += 1
            return
        self._in_second += len(view.workers)
        self.prefixes.add(query)
        recorded, slots = self._query(query)
        stateful = _stateful(strategy)
        self._ring.append(
            RecordedDecision(
                decision,
                strategy.needs,
                recorded,
                view.version,
                self._workers(view, strategy.needs is Needs.TOKENS),
                self._costs.costs(query.model),
                dict(self._costs.speeds(query.model)),
                self._views.transfers.excerpt(slots) if slots else self._no_transfers,
                None if stateful is None else stateful.state_for(query, view),
                self._reports(query, recorded),
            )
        )

    def decisions(self) -> list[RouteDecision]:
        """The recorded decisions, oldest first."""
        return [recorded.decision for recorded in self._ring]

    def find(self, decisions: Collection[RouteDecision]) -> list[RecordedDecision | None]:
        """The records of `decisions`, in their order; None where a decision was not recorded."""
        recorded_by_decision = {id(recorded.decision): recorded for recorded in self._ring}
        return [recorded_by_decision.get(id(decision)) for decision in decisions]

    def _query(self, query: RouteQuery) -> tuple[RouteQuery, set[int]]:
        """The query with `RecordedKeys`, and the slots that load from slower tiers."""
        slots: set[int] = set()
        exact = []
        for prompt in query.exact:
            cached = self._views.caches.match(prompt)
            in_flight, _ = self._views.in_flight.match(prompt.keys)
            slots |= {slot for slot, tokens in cached.items() if tokens.l1 or tokens.l2}
            keys = RecordedKeys(len(prompt.keys), {}, cached, in_flight)
            exact.append(
                ExactPrompt(
                    prompt.tokens,
                    keys,
                    PromptChunks(()),
                    prompt.salt,
                    prompt.adapter,
                    None,
                    prompt.key_tokens,
                )
            )
        prompts = tuple(
            PromptKeys(
                RecordedKeys(len(prompt.keys), self._history.match(prompt.keys)),
                prompt.tokens,
                prompt.block_tokens,
            )
            for prompt in query.prompts
        )
        return (
            RouteQuery(
                query.model,
                query.now,
                prompts,
                query.tokens,
                query.session_key,
                query.streamed,
                query.fingerprint,
                tuple(exact),
                query.inexact,
                session_worker=query.session_worker,
                parent_session=query.parent_session,
                reads_cache=query.reads_cache,
                takes_rank=query.takes_rank,
                rank=query.rank,
                from_parent=query.from_parent,
            ),
            slots,
        )

    def _reports(self, query: RouteQuery, recorded: RouteQuery) -> RecordedReports:
        reports = self._views.reports
        if reports is None:
            return _NO_REPORTS
        answers: dict[int, dict[BlockKey, int]] = {}
        if len(query.prompts) == 1:
            keys, blocks_by_unit = (
                query.prompts[0].keys,
                cast("RecordedKeys", recorded.prompts[0].keys).blocks_by_unit,
            )
            for unit, blocks in blocks_by_unit.items():
                ends = reports.answers.by_unit.get(unit)
                tokens = ends.get(keys[blocks - 1]) if ends and blocks < len(keys) else None
                if tokens is not None:
                    answers[unit] = {BlockKey(blocks - 1): tokens}
        discounts = reports.discounts
        return RecordedReports(dict(discounts.by_map), dict(discounts.by_history), answers)

    def _workers(self, view: FleetView, needs_map: bool) -> RecordedWorkers:
        workers, history_shares = view.workers, self._history.shares
        specs: Sequence[WorkerSpec] = [worker.spec for worker in workers]
        facts: Sequence[WorkerFacts] = [worker.facts for worker in workers]
        numbers: Sequence[int] = [worker.index for worker in workers]
        rank_units: Sequence[Mapping[int, int]] = [worker.rank_units for worker in workers]
        shares: Sequence[tuple[float, float, float | None]] = list(map(_traffic_share, workers))
        previous = self._latest
        if previous is not None and previous[:5] == (specs, facts, numbers, rank_units, shares):
            specs, facts, numbers, rank_units, shares = previous[:5]  # shared, to save memory
        unit_shares = [
            history_shares.get(unit) or self._history.share(unit)
            for worker in workers
            for unit in worker.units
        ]
        self._latest = latest = RecordedWorkers(
            specs,
            facts,
            numbers,
            rank_units,
            shares,
            copy_loads(view.loads),
            {
                position: (list(worker.rank_loads), copy_loads(list(worker.rank_loads.values())))
                for position, worker in enumerate(workers)
                if worker.rank_loads
            },
            list(map(_share_figures, unit_shares)),
            list(map(self._views.caches.places, workers)) if needs_map else (),
        )
        return latest


_NO_REPORTS: Final = RecordedReports({}, {}, {})
_traffic_share = attrgetter("share", "ramp_since", "ramp_until")
_share_figures = attrgetter("blocks", "active_blocks", "capacity_blocks")


def _stateful(strategy: Strategy) -> StatefulStrategy | None:
    # `isinstance` with a protocol would cost 20 us.
    return cast("StatefulStrategy", strategy) if hasattr(strategy, "state_for") else None


class MakeStrategy(Protocol):
    """Makes a strategy with its options, for these collaborators."""

    def __call__(self, costs: CostModel, history: RouteHistory, views: CacheViews) -> Strategy: ...


class Redecider:
    """Makes recorded decisions again, with one strategy. Mutable: a stateful strategy keeps its state.

    Of a decision that the same strategy made, the strategy's state is restored. Otherwise the state follows
    from the decisions that were made again before, as if this strategy had routed them.
    """

    def __init__(self, name: str, needs: Needs, make: MakeStrategy) -> None:
        self.name = name
        self._needs = needs
        self._inputs = _Inputs()
        self._reports = Reports(Discounts(), Answers())
        views = CacheViews(
            self._inputs,
            cast("InFlight", _RecordedFlights()),
            cast("Transfers", self._inputs),
            self._reports,
        )
        history = cast("RouteHistory", self._inputs)
        self._strategy = make(cast("CostModel", self._inputs), history, views)

    def why_not(self, recorded: RecordedDecision) -> str:
        """Why this strategy cannot make the decision: a sentence; "" if it can."""
        strategy_used = recorded.decision.strategy
        if self._needs is Needs.NOTHING or self._needs is recorded.needs:
            return ""
        if self._needs is Needs.PROMPT and recorded.needs is Needs.TOKENS:
            return ""
        if self._needs is Needs.SESSION_KEY and recorded.needs is not Needs.NOTHING:
            return ""
        missing = {
            Needs.PROMPT: "reads no prompts",
            Needs.TOKENS: "reads no token ids and no cache map",
            Needs.SESSION_KEY: "reads no session keys",
        }[self._needs]
        return f"{self.name} needs what the gateway did not read: {strategy_used} {missing}."

    def redecide(self, recorded: RecordedDecision) -> RouteDecision:
        """The decision of this strategy on the recorded inputs. About 0.2 ms with 64 workers."""
        strategy, query, view = self._strategy, recorded.query, recorded.view()
        self._inputs.use(recorded)
        discounts, answers = self._reports
        for shown, seen in (
            (discounts.by_map, recorded.reports.by_map),
            (discounts.by_history, recorded.reports.by_history),
        ):
            shown.clear()
            shown.update(seen)
        answers.by_unit.clear()
        answers.by_unit.update({index: dict(ends) for index, ends in recorded.reports.answers.items()})
        is_own = recorded.decision.strategy == self.name
        stateful = _stateful(strategy)
        if is_own and stateful is not None:
            stateful.restore(query, view, recorded.state)
        decision = strategy.rank(query, view)
        if len(view.workers) == 1:
            decision = RouteDecision(decision.strategy, RouteReason.ONLY_WORKER, decision.ranking)
        if not is_own and stateful is not None:
            strategy.on_dispatch(query, decision, decision.ranking[0])
        return decision


class _Inputs:
    """A recorded decision's inputs as the `CostModel`, `RouteHistory`, `CacheMap` and `Transfers` of a
    strategy. Mutable: `use`."""

    shares: Mapping[int, HistoryShare]

    def use(self, recorded: RecordedDecision) -> None:
        seen = recorded.workers
        self.shares = history_shares = {}
        for unit, (blocks, active_blocks, capacity_blocks) in zip(
            seen.units, seen.history_shares, strict=True
        ):
            history_share = history_shares[unit] = HistoryShare(unit, capacity_blocks)
            history_share.blocks, history_share.active_blocks = blocks, active_blocks
        self._places = dict(zip(seen.numbers, seen.places, strict=False))
        model = recorded.query.model
        costs = CostModel.fixed(cast("RouteHistory", self), model, recorded.costs, recorded.speeds)
        self.rank, self.costs, self.pressure = costs.rank, costs.costs, costs.pressure
        self.load = recorded.transfers.load

    def start(self, slot: int, tokens: Tokens, now: float) -> None:
        """No transfer is started."""

    def share(self, worker: int) -> HistoryShare:
        return self.shares[worker]

    def refresh(self, force: bool) -> bool:
        return False

    def places(self, worker: Worker) -> Sequence[CachePlace]:
        return self._places[worker.index]

    def match(self, prompt: Any) -> Any:
        """Of an exact prompt, the tokens by slot; of keys, the blocks by worker."""
        if isinstance(prompt, ExactPrompt):
            return cast("RecordedKeys", prompt.keys).cached
        return prompt.blocks_by_unit

    def holds(self, slot: int, keys: Sequence[BlockKey], tokens: int) -> bool:
        """False: no decision asks for a single slot."""
        return False

    def has_end(self, slot: int, keys: Sequence[BlockKey]) -> bool:
        """False: nothing is in flight."""
        return False

    def keys_of(self, slot: int, prompt: ExactPrompt) -> Sequence[BlockKey]:
        return prompt.keys


class _RecordedFlights:
    """`InFlight.match` for recorded prompts."""

    def match(self, keys: RecordedKeys) -> tuple[Mapping[int, int], bool]:
        return keys.in_flight, False

    def count_whole_prompts(self, slot: int) -> bool:
        return False  # the recorded matches are limited already

    def compact(self, now: float) -> None:
        """Nothing is in flight."""


class HotPrefix(Struct):
    """A prefix that several requests shared. Mutable: `HotPrefixes` counts."""

    model: str
    blocks: int
    tokens: int
    """Tokens of the prefix, estimated unless the keys are exact."""
    parent: BlockKey | None
    """The key of the prefix half as long."""
    requests: int = 0
    chain: Sequence[int] | None = None
    """The keys of all blocks, once there was time to compute them."""
    prompt: ExactPrompt | None = None
    """The prefix token by token, if token ids were read."""


_DEPTHS: Final = tuple(1 << power for power in range(11))
_MOST_PREFIXES: Final = 4096
_CHAIN_INTERVAL_S: Final = 0.1
_CHAIN_BURST: Final = 32
"""Chains that are hashed in a row after a pause: a prefix of two requests has no later chance."""


class HotPrefixes:
    """Counts requests by prefix, at lengths of 1, 2, 4 to 1,024 blocks. Mutable: `add`.

    Keeps 4,096 prefixes: when there are more, the less used half is dropped. Holds hashes, and token ids
    where the gateway reads them, no text.
    """

    def __init__(self) -> None:
        self._prefixes: dict[BlockKey, HotPrefix] = {}
        self._chain_due = float("-inf")

    def add(self, query: RouteQuery) -> None:
        """Count the prefixes of a request's first prompt. A few us; hashes at most ten chains a second."""
        exact = query.exact[0] if query.exact else None
        if exact is None and not query.prompts:
            return
        if exact is not None:
            keys, block_tokens = exact.keys, float(exact.key_tokens)
        else:
            keys, block_tokens = query.prompts[0].keys, query.prompts[0].block_tokens
        prefixes, length, parent = self._prefixes, len(keys), None
        due: list[HotPrefix] = []
        for depth in _DEPTHS:
            if depth > length:
                break
            key = keys[depth - 1]
            prefix = prefixes.get(key)
            if prefix is None:
                prefix = prefixes[key] = HotPrefix(query.model, depth, int(depth * block_tokens), parent)
            prefix.requests += 1
            parent = key
            if prefix.requests > 1 and prefix.chain is None:
                due.append(prefix)
        if due and query.now >= self._chain_due:
            earliest = query.now - _CHAIN_BURST * _CHAIN_INTERVAL_S
            self._chain_due = max(self._chain_due, earliest) + _CHAIN_INTERVAL_S
            chain = array("Q", keys[: due[-1].blocks])
            for prefix in due:
                prefix.chain = chain[: prefix.blocks]
                if exact is not None:
                    prefix.prompt = _beginning(exact, prefix.blocks, prefix.chain)
        if len(prefixes) > _MOST_PREFIXES:
            used = sorted(prefixes.items(), key=lambda pair: pair[1].requests, reverse=True)
            self._prefixes = dict(used[: _MOST_PREFIXES // 2])

    def hottest(self, limit: int) -> list[tuple[BlockKey, HotPrefix]]:
        """Prefixes of at least two requests, most used first; each at the longest length that as many
        share."""
        extended = {
            (prefix.parent, prefix.requests)
            for prefix in self._prefixes.values()
            if prefix.parent is not None
        }
        hottest = [
            (key, prefix)
            for key, prefix in self._prefixes.items()
            if prefix.requests > 1 and prefix.chain is not None and (key, prefix.requests) not in extended
        ]
        hottest.sort(key=lambda pair: (pair[1].requests, pair[1].blocks), reverse=True)
        return hottest[:limit]


def _beginning(prompt: ExactPrompt, blocks: int, chain: Sequence[int]) -> ExactPrompt:
    tokens = blocks * prompt.key_tokens
    keys = cast("list[BlockKey]", list(chain))
    chunks = PromptChunks(prompt.chunks.token_ids[:tokens])
    return ExactPrompt(tokens, keys, chunks, prompt.salt, prompt.adapter, None, prompt.key_tokens)
