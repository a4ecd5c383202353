"""One run of the routing benchmark in virtual time: a workload, a policy and a seed; and its figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvroute.routing.registry import RoutingOptions
from kvroute.sim.fleet import FleetRequest, imbalance
from kvroute.sim.tiers import GPU_ONLY, Filling, TieredFleet, TierOptions, make_tiered_engines
from kvroute.sim.timing import TimingModel
from routing_baselines import BASELINES, Policy
from routing_kvroute import Kvroute, KvrouteAware
from routing_workloads import Load, chat, conversation, l2post, tool

INFINITE = TierOptions(
    l1_tokens=0, l2_tokens=10**12, l2_worker_bytes_s=1e30, l2_bytes_s=1e30, l2_latency_s=0.0
)

TIERS: dict[str, TierOptions] = {
    "full": TierOptions(),
    "gpu": GPU_ONLY,
    "l2post": TierOptions(l1_tokens=61_000),
}

WORKLOADS: dict[str, Callable[[float], Load]] = {
    "conv": conversation,
    "tool": tool,
    "chat8k": lambda clients: chat(8192, int(clients)),
    "chat64k": lambda clients: chat(65_536, int(clients)),
    "chat64k_nosys": lambda clients: chat(65_536, int(clients), system=0),
    "l2post": l2post,
}

SUBJECTS: dict[str, type[Kvroute]] = {"prefixaware": Kvroute, "kvaware": KvrouteAware}

WARM_UP = 0.15
"""Share of the first arrivals that no figure counts."""


@dataclass(frozen=True)
class Case:
    """The input of a run. `rate` is requests per second, or clients per worker; `options` change options of
    kvroute."""

    workload: str
    rate: float
    policy: str
    seed: int = 0
    tiers: str = "full"
    workers: int = 7
    capacity_tokens: int = 1_200_000
    filling: Filling = Filling.COMPUTED
    """When slower tiers get blocks. The infinite cache always gets computed blocks."""
    event_delay_s: float = 0.005
    slow_worker: float = 1.0
    """Factor of all times on the first worker."""
    options: tuple[tuple[str, float | bool], ...] = ()
    """Paths below `routing`, such as ("costs.token_us", 80.0)."""
    replicas: int = 1
    """Number of gateways, and the delay of their messages to each other."""
    sync_s: float = 0.05
    prefetch: bool = False
    """The behaviour of `lmcache.prefetch.enabled`."""


@dataclass
class Figures:
    """Seconds; `throughput` is output tokens per second; `hit` is the share of prompt tokens not computed."""

    p50: float
    p90: float
    p99: float
    mean: float
    itl50: float
    itl90: float
    throughput: float
    imbalance: float
    hit: float


def run(case: Case) -> Figures:
    """Run one case to its end."""
    if case.policy == "shared":
        tiers = INFINITE
    else:
        tiers = replace(TIERS[case.tiers], filling=case.filling)
    timing = [TimingModel(scale=case.slow_worker if number == 0 else 1.0) for number in range(case.workers)]
    policy = make_policy(case)
    engines = make_tiered_engines(
        case.workers,
        capacity_tokens=case.capacity_tokens,
        timing=timing,
        tiers=tiers,
        record_events=policy.wants_events,
    )
    policy.attach(engines, tiers)
    fleet = TieredFleet(
        engines,
        policy,
        event_delay_s=case.event_delay_s,
        on_tiers=policy.tier_changed if policy.wants_tiers else None,
    )
    WORKLOADS[case.workload](case.rate)(fleet, case.seed)
    fleet.run()
    return figures(fleet.done, fleet.computed_tokens())


def make_policy(case: Case) -> Policy:
    subject = SUBJECTS.get(case.policy)
    if subject is None:
        return BASELINES[case.policy](case.seed)
    options = routing_options(case.options)
    return subject(case.seed, options, replicas=case.replicas, sync_s=case.sync_s, prefetch=case.prefetch)


def routing_options(paths: Sequence[tuple[str, float | bool]]) -> RoutingOptions:
    settings: dict[str, object] = {}
    for path, value in paths:
        *rooms, name = path.split(".")
        place = settings
        for room in rooms:
            place = place.setdefault(room, {})  # type: ignore[assignment]
        place[name] = value
    return RoutingOptions.model_validate(settings)


def figures(done: Sequence[FleetRequest], computed: list[int]) -> Figures:
    arrived = sorted(done, key=lambda request: request.arrival_s)
    counted = arrived[int(WARM_UP * len(arrived)) :]
    ttft = sorted(request.ttft_s for request in counted)
    itl = sorted(
        (request.finished_s - request.first_token_s) / (request.output_tokens - 1)
        for request in counted
        if request.output_tokens > 1
    )
    start, last = counted[0].arrival_s, counted[-1].arrival_s
    made = sum(request.output_tokens for request in done if start <= request.finished_s <= last)
    prompt = sum(request.prompt_tokens for request in counted)
    cached = sum(request.cached_tokens for request in counted)
    return Figures(
        quantile(ttft, 0.5),
        quantile(ttft, 0.9),
        quantile(ttft, 0.99),
        fmean(ttft),
        quantile(itl, 0.5),
        quantile(itl, 0.9),
        made / (last - start),
        imbalance(computed),
        cached / prompt,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
