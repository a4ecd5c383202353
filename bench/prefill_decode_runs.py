"""One run of the prefill/decode benchmark in virtual time: a workload, roles, a rule and a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from xxhash import xxh3_64_intdigest

from kvroute.blocks.keys import BlockKey, PromptKeys
from kvroute.fleet.worker import FleetView, HealthState, Worker, WorkerFacts, WorkerId, WorkerRole, WorkerSpec
from kvroute.routing.cost import ranking_of
from kvroute.routing.cost_parameters import CostOptions
from kvroute.routing.prefill_decode import Choice, HandoverDispatch, PrefillDecodeOptions, choose
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.router import Dispatch, Router
from kvroute.routing.strategy import NoMap, RouteDecision, RouteQuery
from kvroute.sim.cache_tiers import Link
from kvroute.sim.fleet import FleetRequest, HandoverFleet, SimFleet, make_engines
from routing_runs import Figures, figures
from routing_workloads import BLOCK, Load, chat, conversation, tool

WORKERS = 8
CAPACITY_TOKENS = 1_200_000
TOKEN_BYTES = 327_680
"""Llama-3.1-70B in bf16."""
LINK_BYTES_S = 50e9
"""Into one worker: one of the eight 400 Gbit/s cards of a server with 3,200 Gbit/s (AWS p5.48xlarge)."""
LATENCY_S = 5e-3
EXACT_COSTS = CostOptions(token_us=40.0, context_token_ns=0.75, iteration_ms=5.0)
"""Those of `TimingModel`."""
_ALL = PrefillDecodeOptions(threshold_tokens=0)
"""Hands over each prompt that the decode worker does not hold whole."""


@dataclass(frozen=True, order=True)
class Cold:
    """Requests that share nothing. Their lengths in tokens vary by half."""

    prompt: int
    answer: int

    def load(self, rate: float) -> Load:
        """Random arrivals, `rate` per second, for half a minute: at least 300 and at most 1,000 requests."""

        def load(fleet: SimFleet, seed: int) -> None:
            random, at = Random(seed), 0.0
            for number in range(1, 1 + max(300, min(1000, round(30 * rate)))):
                at += random.expovariate(rate)
                prompt, answer = (
                    round(each * random.uniform(0.5, 1.5)) for each in (self.prompt, self.answer)
                )
                keys = [number << 32 | place for place in range((prompt + answer) // BLOCK)]
                fleet.submit(FleetRequest(keys, prompt, answer, conversation=number), at)

        return load


WORKLOADS: dict[str, Callable[[float], Load]] = {
    "conv": conversation,
    "chat8k": lambda clients: chat(8192, round(clients), each=6),
    "chat64k": lambda clients: chat(65_536, round(clients), answer=128, each=8),
    "agents": lambda rate: tool(rate, 2500),
}


@dataclass(frozen=True, order=True)
class Setting:
    """Roles and rule of a fleet. All workers are for both roles if `prefill` is 0. Otherwise the first ones
    are prefill workers, then come `both` ones for both roles, and the rest decodes."""

    rule: str
    prefill: int = 0
    both: int = 0
    threshold: int = 0
    """Tokens; read by the rules `length` and `uncached`."""

    def __str__(self) -> str:
        if not self.prefill:
            return "8 both"
        decode = WORKERS - self.prefill - self.both
        counts = ((self.prefill, "prefill"), (self.both, "both"), (decode, "decode"))
        text = " + ".join(f"{count} {role}" for count, role in counts if count)
        return f"{text}, above {self.threshold}" if self.rule in ("length", "uncached") else text

    def role(self, worker: int) -> WorkerRole:
        if not self.prefill:
            return WorkerRole.BOTH
        if worker < self.prefill:
            return WorkerRole.PREFILL
        return WorkerRole.BOTH if worker < self.prefill + self.both else WorkerRole.DECODE


@dataclass(frozen=True)
class Case:
    """`rate` is requests per second, or clients per worker."""

    workload: str | Cold
    rate: float
    setting: Setting
    seed: int = 0
    link_bytes_s: float = LINK_BYTES_S


def run(case: Case) -> Figures:
    """Run one case to its end. `Figures.itl90` is the p90 over requests of the time per output token."""
    engines = make_engines(WORKERS, capacity_tokens=CAPACITY_TOKENS, block_size=BLOCK)
    fleet = HandoverFleet(
        engines,
        Roles(case),
        links=[Link(case.link_bytes_s) for _ in engines],
        token_bytes=TOKEN_BYTES,
        latency_s=LATENCY_S,
    )
    work = case.workload
    load = work.load(case.rate) if isinstance(work, Cold) else WORKLOADS[work](case.rate)
    load(fleet, case.seed)
    fleet.run()
    return figures(fleet.done, fleet.computed_tokens())


class Roles:
    """kvroute's router in front of workers with roles, with the rule of the case.

    The workers of each side are ranked by kvroute's `prefixaware` for every rule, so the rules differ in what
    they hand over only.
    """

    def __init__(self, case: Case) -> None:
        self._setting = case.setting
        self._number = case.seed << 32
        # Equal prompts teach no costs, so these runs know them.
        costs = EXACT_COSTS if isinstance(case.workload, Cold) else CostOptions()
        self._router = Router(
            RoutingOptions(
                costs=costs,
                prefill_decode=PrefillDecodeOptions(
                    link_gb_s=case.link_bytes_s / 1e9, latency_ms=LATENCY_S * 1e3
                ),
            ),
            caches=NoMap(),
        )
        workers = [
            Worker(
                WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}", role=case.setting.role(number)),
                state=HealthState.HEALTHY,
                facts=WorkerFacts(capacity_tokens=CAPACITY_TOKENS, block_size=BLOCK),
                index=number,
            )
            for number in range(WORKERS)
        ]
        for worker in workers:
            self._router.worker_joined(worker)
        self._view = FleetView("model", tuple(workers), 1)
        self._open: dict[FleetRequest, Dispatch | HandoverDispatch] = {}

    def place(self, request: FleetRequest, now: float) -> int:
        self._number += 1
        keys = [BlockKey(key) for key in request.keys[: request.prompt_tokens // BLOCK]]
        query = RouteQuery(
            "model",
            now,
            (PromptKeys(keys, request.prompt_tokens, float(BLOCK)),),
            request.prompt_tokens,
            session_key=str(request.conversation),
            fingerprint=xxh3_64_intdigest(self._number.to_bytes(8, "little")),
            hands_over=True,
        )
        decision = self._decide(query)
        first = decision.ranking[0]
        if decision.handover is None:
            self._open[request] = self._router.dispatch(query, decision, first, now)
        else:
            request.prefill_worker = decision.handover.prefill.worker.index
            self._open[request] = self._router.dispatch_handover(query, decision, now)
        return first.worker.index

    def _decide(self, query: RouteQuery) -> RouteDecision:
        router, view, rule = self._router, self._view, self._setting.rule
        if rule == "cost" or view.sides is None:
            return router.decide(query, view)
        assert view.sides.prefill is not None
        assert view.sides.decode is not None
        strategy = router.strategy("model")
        decision = strategy.rank(query, view.sides.decode)
        best = decision.ranking[0]
        is_long = {
            "always": True,
            "length": query.tokens > self._setting.threshold,
            "uncached": query.tokens - best.matched_tokens > self._setting.threshold,
        }[rule]
        if not is_long:
            return decision
        choice: Choice = choose(
            query.tokens,
            ranking_of(strategy.rank(query, view.sides.prefill).ranking),
            ranking_of(decision.ranking),
            router.pairs.links,
            router.costs("model"),
            _ALL,
            query.now,
        )
        return RouteDecision(
            decision.strategy, choice.reason or decision.reason, choice.ranking, choice.handover
        )

    def prefilled(self, request: FleetRequest, now: float) -> None:
        dispatch = self._open[request]
        assert isinstance(dispatch, HandoverDispatch)
        dispatch.prefill_done(now)

    def moved(self, request: FleetRequest, tokens: int, seconds: float, now: float) -> None:
        self._router.pairs.links.learn(request.worker, tokens, seconds)

    def first_token(self, request: FleetRequest, now: float) -> None:
        self._open[request].first_token(now)

    def finished(self, request: FleetRequest, now: float) -> None:
        self._open.pop(request).finish(now)

    def events(self, worker: int, events: object, now: float) -> None:
        """The caches of these engines record no events."""
