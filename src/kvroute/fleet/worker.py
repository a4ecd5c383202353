"""One vLLM server as kvroute knows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

from kvroute.fleet.load import WorkerLoad

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker: configured, or `host:port` of its URL."""

ASSUMED_CAPACITY_TOKENS = 500_000
"""KV capacity of a worker that neither its metrics nor the configuration tells."""

ASSUMED_BLOCK_TOKENS = 16
"""vLLM's default block size on GPU; its CPU build uses 128 (vLLM 0.32)."""


class HealthState(Enum):
    """UNKNOWN until the first probe; only HEALTHY workers are routable."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


class Ejection(StrEnum):
    """Why a healthy worker was taken out of routing; bounded, so a metric label."""

    PROBES = "probes"
    """Its probes failed several times in a row."""
    REFUSED = "refused"
    """It refused a connection: nothing listens there now."""
    CONNECT_TIMEOUT = "connect_timeout"
    BURST = "burst"
    """A burst of 5xx answers or broken connections."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What discovery says about a worker. Two specs of one id that differ in `url` are two workers."""

    id: WorkerId
    url: str
    """Base URL, `http://host:port`, without a trailing slash."""
    models: tuple[str, ...] = ()
    """Served model names when they cannot be asked; empty: read `/v1/models`."""
    capacity_tokens: int | None = None
    """Configured KV capacity, used when the worker's metrics do not tell it."""
    role: str | None = None
    """What its label says it is for; None without such a label."""
    draining: bool = False
    """Leave it its running requests and give it no new ones."""
    node: str | None = None
    """The machine that it runs on, where discovery tells."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker said about itself, replaced as a whole; the last good answers outlive a failure.

    `capacity_tokens` and `block_size` come from `vllm:cache_config_info` (`kv_cache_size_tokens`
    where present, else num_gpu_blocks x block_size; summed over data-parallel ranks); `start_time`
    is `process_start_time_seconds`, a change of which means a restart with an empty cache;
    `adapters` maps a LoRA name to its parent, and its names are among `models` too; `model_cards` are the
    entries of `/v1/models`.
    """

    models: frozenset[str] = frozenset()
    adapters: tuple[tuple[str, str], ...] = ()
    model_cards: tuple[dict[str, object], ...] = ()
    capacity_tokens: int | None = None
    block_size: int | None = None
    start_time: float | None = None


@dataclass(slots=True, eq=False)
class Worker:
    """A worker in the fleet. Mutable: `load` changes through reservations, all else only through
    `Fleet` (the health monitor and the admin API call it). After it has left the fleet it stays
    DRAINING for whoever still holds it."""

    spec: WorkerSpec
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: HealthState = HealthState.UNKNOWN
    facts: WorkerFacts = field(default_factory=WorkerFacts)
    ramp: float = 1.0
    """Share of its normal traffic that a worker just back from ejection may take, (0, 1], as of
    `ramp_since`. Refreshed by every passed probe; `ramp_at` gives the exact value."""
    index: int = 0
    """Position in the worker bitmask; unique among live workers, reused after removal."""
    ramp_since: float = 0.0
    ramp_until: float | None = None
    """When the share reaches 1, in `Clock.now()` seconds; None while nothing ramps."""
    ejection: Ejection | None = None
    """Why it was last taken out of routing; None since it came back."""
    trouble: str = ""
    """What is wrong with it now, in words for an operator; empty while healthy."""
    rank_loads: dict[int, WorkerLoad] = field(default_factory=dict)
    """Load of its data-parallel ranks, where requests are sent to single ones; `load` has their sum."""

    @property
    def id(self) -> WorkerId:
        return self.spec.id

    @property
    def is_routable(self) -> bool:
        return self.state is HealthState.HEALTHY

    @property
    def models(self) -> frozenset[str]:
        """Names it answers to, adapters included: what it said itself, else what is configured."""
        return self.facts.models or frozenset(self.spec.models)

    @property
    def capacity_tokens(self) -> int:
        """KV capacity: measured, else configured, else `ASSUMED_CAPACITY_TOKENS`."""
        return self.facts.capacity_tokens or self.spec.capacity_tokens or ASSUMED_CAPACITY_TOKENS

    @property
    def block_size(self) -> int:
        """Tokens in one block of its cache: measured, else `ASSUMED_BLOCK_TOKENS`."""
        return self.facts.block_size or ASSUMED_BLOCK_TOKENS

    def load_of(self, rank: int | None) -> WorkerLoad:
        """The load of one data-parallel rank; of the whole worker for None."""
        if rank is None:
            return self.load
        known = self.rank_loads.get(rank)
        if known is None:
            known = self.rank_loads[rank] = WorkerLoad()
        return known

    def serves(self, model: str) -> bool:
        return model in self.models

    def adapter_revision(self, model: str) -> str | None:
        """Which LoRA adapter it serves as `model`: the path that it was loaded from ("" where that is not
        known), None where the model is no adapter. vLLM says nothing else that outlives a request: `created`
        and the permission's id are made up for each one (0.32)."""
        facts = self.facts
        if not any(name == model for name, _ in facts.adapters):
            return None
        roots = (card.get("root") for card in facts.model_cards if card["id"] == model)
        return next((root for root in roots if isinstance(root, str)), "")

    def ramp_at(self, now: float) -> float:
        """`ramp` at the time `now`: rises linearly from its value at `ramp_since` to 1 at `ramp_until`."""
        until = self.ramp_until
        if until is None:
            return self.ramp
        if now >= until:
            return 1.0
        since = self.ramp_since
        return self.ramp + (1.0 - self.ramp) * max(0.0, now - since) / (until - since)


@dataclass(frozen=True, slots=True)
class FleetView:
    """The routable workers of one model, in a stable order (by id), as of one moment.

    The tuple never changes; the `load` figures behind it are live and read synchronously, never
    across an await. `version` rises whenever membership or health changes, so that whatever is
    derived from the set (rings, orders) can be kept until then.
    """

    model: str
    workers: tuple[Worker, ...]
    version: int
    loads: tuple[WorkerLoad, ...] = field(init=False, repr=False, compare=False)
    """Each worker's `load`, in order."""
    places: Mapping[int, int] = field(init=False, repr=False, compare=False)
    """Where in `workers` the one of an index is."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "loads", tuple(worker.load for worker in self.workers))
        places = {worker.index: place for place, worker in enumerate(self.workers)}
        object.__setattr__(self, "places", places)


_CACHE_CONFIG = b"vllm:cache_config_info{"
_START_TIME = b"process_start_time_seconds "
_LABEL = re.compile(rb'(?:^|,)\s*(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ModelsPage:
    """`/v1/models`: every name, LoRA adapters as (name, parent), and the cards as they came."""

    models: frozenset[str]
    adapters: tuple[tuple[str, str], ...]
    cards: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """`/metrics`: None for what the page does not tell."""

    capacity_tokens: int | None = None
    block_size: int | None = None
    start_time: float | None = None


def parse_models(body: bytes) -> ModelsPage:
    """Read a model list in OpenAI's shape; an adapter is a card with a `parent` (vLLM 0.32).

    Raises ValueError for anything else. Cards without a name are skipped.
    """
    try:
        page = json.loads(body)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    listed = page.get("data") if isinstance(page, dict) else None
    if not isinstance(listed, list):
        raise ValueError("not a model list")
    cards = tuple(card for card in listed if isinstance(card, dict) and isinstance(card.get("id"), str))
    adapters = tuple((card["id"], card["parent"]) for card in cards if isinstance(card.get("parent"), str))
    return ModelsPage(frozenset(card["id"] for card in cards), adapters, cards)


def same_cards(some: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]]) -> bool:
    """Whether two readings describe the same models: vLLM makes `created` and `permission` up anew for
    each request (0.32)."""
    return len(some) == len(others) and all(
        {**one, "created": None, "permission": None} == {**other, "created": None, "permission": None}
        for one, other in zip(some, others, strict=True)
    )


def parse_metrics(page: bytes) -> MetricsPage:
    """Find the few figures that matter in a Prometheus text page.

    A substring search, not a parser: vLLM's page is hundreds of kilobytes and is read on the event
    loop every few seconds (0.4 ms a megabyte; prometheus_client takes 250 ms for it). Lines that make
    no sense count as absent. Several data-parallel ranks each have a pool of their own: `engine`
    tells their lines apart, and their sizes add up.
    """
    blocks: dict[bytes, int] = {}
    sizes: dict[bytes, int] = {}
    for line in _lines(page, _CACHE_CONFIG):
        labels = dict(_LABEL.findall(line))
        rank = labels.get(b"engine", b"")
        block = _number(labels.get(b"block_size"))
        count = _number(labels.get(b"num_gpu_blocks"))
        size = _number(labels.get(b"kv_cache_size_tokens")) or (block or 0) * (count or 0)
        if block:
            blocks[rank] = block
        if size:
            sizes[rank] = size
    start_time = None
    for line in _lines(page, _START_TIME):
        try:
            start_time = float(line.split()[0])
        except (ValueError, IndexError):
            continue
    return MetricsPage(sum(sizes.values()) or None, next(iter(blocks.values()), None), start_time)


def _lines(page: bytes, start: bytes) -> list[bytes]:
    """What follows `start` on each line that begins with it."""
    found: list[bytes] = []
    at = page.find(start)
    while at >= 0:
        end = page.find(b"\n", at)
        end = len(page) if end < 0 else end
        if at == 0 or page[at - 1] == 0x0A:
            found.append(page[at + len(start) : end])
        at = page.find(start, end)
    return found


def _number(value: bytes | None) -> int | None:
    """A positive integer label, or None: vLLM writes "None" for what is not set."""
    try:
        number = int(value or b"")
    except ValueError:
        return None
    return number if number > 0 else None
