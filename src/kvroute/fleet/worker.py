"""One vLLM server: its identity, state and load, and how its answers to probes are parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, NamedTuple, NewType

from kvroute.fleet.foreign import EngineFigures, ForeignLoad
from kvroute.fleet.load import WorkerLoad
from kvroute.fleet.sleep import SleepFacts
from kvroute.json_values import check_values

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker: configured, or `host:port` of its URL with its path, whose slashes are dots."""

ASSUMED_CAPACITY_TOKENS = 500_000
"""KV capacity of a worker for which neither its metrics nor the configuration gives one."""

ASSUMED_BLOCK_TOKENS = 16
"""vLLM's default block size on GPU; its CPU build uses 128 (vLLM 0.32)."""


class HealthState(Enum):
    """UNKNOWN until the first probe; only HEALTHY workers are routable."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    ASLEEP = "asleep"
    """Its probes pass, but its engine sleeps or is paused, so that requests would hang: `Worker.asleep`."""
    DRAINING = "draining"


class Ejection(StrEnum):
    """Why a healthy worker was taken out of routing. A metric label, so the set of values is fixed."""

    PROBES = "probes"
    """Several probes in a row failed."""
    REFUSED = "refused"
    """The worker refused a connection: nothing listens on its port now."""
    CONNECT_TIMEOUT = "connect_timeout"
    BURST = "burst"
    """A burst of 5xx answers or broken connections."""
    NOT_ISOLATED = "not_isolated"
    """The worker's vLLM may ignore `cache_salt`, which `server.isolation` needs."""


class WorkerRole(StrEnum):
    """What a worker is for. The engine enforces no role: vLLM 0.32 does all three with every `kv_role`."""

    PREFILL = "prefill"
    """Computes prompts whose answers another worker generates."""
    DECODE = "decode"
    """Generates answers; takes the KV of long prompts from another worker."""
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker as a discovery source describes it. Specs of one id and different `url` are two workers."""

    id: WorkerId
    url: str
    """Base URL, `http://host:port` or with a path, without a trailing slash."""
    models: tuple[str, ...] = ()
    """Configured model names, for a worker whose `/v1/models` cannot be read; empty: read `/v1/models`."""
    capacity_tokens: int | None = None
    """Configured KV capacity, used when the worker's metrics have none."""
    role: str | None = None
    """The configured role, or the value of the worker's role label; None without one. See `Worker.role`."""
    draining: bool = False
    """The worker finishes its running requests and gets no new ones."""
    node: str | None = None
    """The machine that the worker runs on; None if discovery does not know it."""
    needs_health: bool = True
    """False: any answer passes a probe, whatever its status, because the server has no `/health`."""


_AWAKE = SleepFacts()
_ROLES = {role.value: role for role in WorkerRole}
_PLATEAU_PAGES = 3
MOST_TOKENS = 10**12
"""Largest figure of a worker's metrics that is believed, a date included."""
MOST_RANKS = 256
"""Data-parallel ranks of one worker that are counted: each has a part of the route history."""
_RANK_DIGITS = 6


@dataclass(frozen=True, slots=True)
class LearnedConcurrency:
    """What a worker's metrics show of vLLM's `max_num_seqs`, which vLLM does not report (0.33).

    In an engine that is full the number of running requests stays equal while others wait. `limit` is that
    number once three successive pages have shown it; None before. One page is not enough: requests also wait
    while long prompts use up an iteration's tokens, and while KV memory is short.
    """

    limit: int | None = None
    running: int = 0
    pages: int = 0
    """Successive pages with waiting requests and the same number of running ones."""

    def after(self, running: int, waiting: int) -> LearnedConcurrency:
        """The new value after one more read of the worker's metrics."""
        if not waiting or not running:
            return LearnedConcurrency(self.limit)
        pages = self.pages + 1 if running == self.running else 1
        return LearnedConcurrency(running if pages >= _PLATEAU_PAGES else self.limit, running, pages)


@dataclass(frozen=True, slots=True)
class FetchedTokens:
    """Prompt tokens that a worker got from other engines, by its own count."""

    total: int = 0
    """Since the gateway first read the worker's metrics."""
    counter: int | None = None
    """The engine's counter at the last read; None before."""

    def after(self, counter: int) -> FetchedTokens:
        """The new value after one more read of the worker's metrics. A restart sets the counter to 0."""
        previous = counter if self.counter is None else self.counter if counter >= self.counter else 0
        return FetchedTokens(self.total + counter - previous, counter)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker reported in `/v1/models` and `/metrics`. A failed read keeps the last good values."""

    models: frozenset[str] = frozenset()
    """Model names, LoRA adapters included."""
    adapters: tuple[tuple[str, str], ...] = ()
    """LoRA adapters as (name, parent model)."""
    model_cards: tuple[dict[str, object], ...] = ()
    """The entries of `/v1/models`."""
    capacity_tokens: int | None = None
    """From `vllm:cache_config_info`: `kv_cache_size_tokens` if present, else num_gpu_blocks x block_size;
    summed over data-parallel ranks."""
    block_size: int | None = None
    """Tokens in one block, from `vllm:cache_config_info`."""
    ranks: tuple[int, ...] = ()
    """The data-parallel ranks, from the label `engine` of the same metric; empty for a worker with one
    rank."""
    caches_prefixes: bool = True
    """False if its label `enable_prefix_caching` says so: then no block is a hit for a later request."""
    start_time: float | None = None
    """`process_start_time_seconds`. If it changes, the worker has restarted and its cache is empty."""
    concurrency: LearnedConcurrency = LearnedConcurrency()
    fetched: FetchedTokens = FetchedTokens()
    sleep: SleepFacts = _AWAKE
    has_drafter: bool = False
    """Whether its engine decodes speculatively: then `/metrics` has `vllm:spec_decode_num_drafts_total`
    (vLLM 0.32). Drafters of the EAGLE family cost the last unit of each hit, others do not."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker in the fleet.

    Mutable: reservations change `load`; `Fleet` changes everything else (the health monitor and the admin
    API call `Fleet`). A worker that has left the fleet stays DRAINING for code that still refers to it.
    """

    spec: WorkerSpec
    load: WorkerLoad = field(default_factory=WorkerLoad)
    state: HealthState = HealthState.UNKNOWN
    facts: WorkerFacts = field(default_factory=WorkerFacts)
    share: float = 1.0
    """The traffic share, (0, 1]: the part of its normal traffic that the worker gets, less than 1 after an
    ejection and while scaling down would remove it. During a ramp it is the share as of `ramp_since`: every
    passed probe refreshes it, and `share_at` gives the exact value."""
    index: int = 0
    """Position in the worker bitmask; unique among live workers, reused after removal."""
    ramp_since: float = 0.0
    ramp_until: float | None = None
    """When the share reaches 1, in `Clock.now()` seconds; None if the worker is not ramping."""
    ejection: Ejection | None = None
    """Why the worker was last ejected, also NOT_ISOLATED for one that was never healthy; None once it is
    healthy again."""
    trouble: str = ""
    """The worker's current problem, in words for an operator; empty while healthy."""
    asleep: str = ""
    """Why its engine computes nothing now (`fleet.sleep.why_asleep`); empty while it is awake."""
    models_trouble: str = ""
    """Why `/v1/models` could not be read the last time; empty if it was read."""
    release: tuple[int, ...] | None = None
    """Of its vLLM, (major, minor, patch); None if it was not read: only `server.isolation` needs it."""
    engine_queue: EngineFigures | None = None
    """As the health monitor has last read it; None before, and if the worker does not report it."""
    rank_loads: dict[int, WorkerLoad] = field(default_factory=dict)
    """Load per data-parallel rank, if requests are sent to single ranks; `load` has the sum."""
    rank_units: Mapping[int, int] = field(default_factory=dict)
    """Data-parallel rank -> its unit, for a worker with several ranks. Replaced as a whole."""

    @property
    def id(self) -> WorkerId:
        return self.spec.id

    def learn_release(self, release: tuple[int, ...]) -> None:
        """Its `/version` has named this release."""
        self.release = release

    @property
    def is_routable(self) -> bool:
        return self.state is HealthState.HEALTHY

    @property
    def role(self) -> WorkerRole:
        """BOTH without a role, and for a label with another value."""
        return _ROLES.get(self.spec.role or "", WorkerRole.BOTH)

    @property
    def models(self) -> frozenset[str]:
        """Names of the models and adapters that the worker serves: reported, else configured."""
        return self.facts.models or frozenset(self.spec.models)

    @property
    def capacity_tokens(self) -> int:
        """KV capacity: measured, else configured, else `ASSUMED_CAPACITY_TOKENS`."""
        return self.facts.capacity_tokens or self.spec.capacity_tokens or ASSUMED_CAPACITY_TOKENS

    @property
    def block_size(self) -> int:
        """Tokens in one block of the worker's cache: measured, else `ASSUMED_BLOCK_TOKENS`."""
        return self.facts.block_size or ASSUMED_BLOCK_TOKENS

    @property
    def units(self) -> tuple[int, ...]:
        """The numbers under which the route history keeps what was sent to the worker.

        First `index`, for requests whose rank is not known; then those of its ranks. Like `index` they are
        unique among live workers and reused.
        """
        return (self.index, *self.rank_units.values()) if self.rank_units else (self.index,)

    def unit_of(self, rank: int | None) -> int:
        """The unit of one data-parallel rank; `index` if `rank` is None or unknown."""
        return self.index if rank is None else self.rank_units.get(rank, self.index)

    def sent_rank(self, rank: int) -> int:
        """The value of `X-data-parallel-rank` for a rank: its place among the worker's ranks.

        The server of one node of several (`--data-parallel-hybrid-lb`) may have the ranks 2 and 3; vLLM 0.32
        counts them from 0 there.
        """
        ranks = tuple(self.rank_units)
        return ranks.index(rank) if rank in ranks else rank

    def load_of(self, rank: int | None) -> WorkerLoad:
        """The load of one data-parallel rank, or of the whole worker if `rank` is None."""
        if rank is None:
            return self.load
        load = self.rank_loads.get(rank)
        if load is None:
            load = self.rank_loads[rank] = WorkerLoad()
        return load

    def set_foreign(self, foreign: ForeignLoad | None) -> None:
        """Set the load from elsewhere, of the worker and of each of its ranks."""
        self.load.set_foreign(foreign)
        count = max(1, len(self.rank_loads))
        for load in self.rank_loads.values():
            share = foreign and foreign._replace(
                tokens=foreign.tokens / count, lasting_tokens=foreign.lasting_tokens / count
            )
            load.set_foreign(share)

    def serves(self, model: str) -> bool:
        return model in self.models

    def adapter_revision(self, model: str) -> str | None:
        """The path that the LoRA adapter `model` was loaded from; "" if unknown, None if it is no adapter."""
        # The path is the only stable field: vLLM generates `created` and the permission's id for each
        # request (0.32).
        facts = self.facts
        if not any(name == model for name, _ in facts.adapters):
            return None
        roots = (card.get("root") for card in facts.model_cards if card["id"] == model)
        return next((root for root in roots if isinstance(root, str)), "")

    def share_at(self, now: float) -> float:
        """`share` at the time `now`: on a line from its value at `ramp_since` to 1 at `ramp_until`."""
        until = self.ramp_until
        if until is None:
            return self.share
        if now >= until:
            return 1.0
        since = self.ramp_since
        return self.share + (1.0 - self.share) * max(0.0, now - since) / (until - since)


@dataclass(frozen=True, slots=True)
class FleetView:
    """The routable workers of one model at one moment, ordered by id.

    The tuple never changes. The `load` figures of its workers are live: read them synchronously, never
    across an await. `version` rises whenever membership or health changes, so a caller can cache what it
    derives from the set (a ring, an order) per version.
    """

    model: str
    workers: tuple[Worker, ...]
    version: int
    loads: tuple[WorkerLoad, ...] = field(init=False, repr=False, compare=False)
    """Each worker's `load`, in the order of `workers`."""
    positions: Mapping[int, int] = field(init=False, repr=False, compare=False)
    """Each of a worker's `units` -> the worker's position in `workers`."""
    by_rank: RankTargets | None = field(init=False, repr=False, compare=False)
    """The same workers with their ranks; None if each has only one."""
    caches_prefixes: bool = field(init=False, repr=False, compare=False)
    """Whether any of the workers caches prefixes."""
    sides: Sides | None = field(init=False, repr=False, compare=False)
    """The prefill side and the decode side; None if each worker does both."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "loads", tuple(worker.load for worker in self.workers))
        positions = {unit: position for position, worker in enumerate(self.workers) for unit in worker.units}
        object.__setattr__(self, "positions", positions)
        by_rank = rank_targets(self.workers) if len(positions) > len(self.workers) else None
        object.__setattr__(self, "by_rank", by_rank)
        caches = any(worker.facts.caches_prefixes for worker in self.workers) or not self.workers
        object.__setattr__(self, "caches_prefixes", caches)
        has_roles = any(worker.role is not WorkerRole.BOTH for worker in self.workers)
        object.__setattr__(self, "sides", self._sides() if has_roles else None)

    def _sides(self) -> Sides:
        by_role = {
            role: tuple(worker for worker in self.workers if worker.role in (role, WorkerRole.BOTH))
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
        }
        # The views of the sides have `sides`, too; nobody reads them.
        return Sides(
            *(
                None
                if not workers
                else self
                if len(workers) == len(self.workers)
                else FleetView(self.model, workers, self.version)
                for workers in by_role.values()
            )
        )


class RankTargets(NamedTuple):
    """Where requests can be sent to: workers with one rank once, the others once per data-parallel rank.

    One column per figure.
    """

    workers: Sequence[Worker]
    ranks: Sequence[int | None]
    """None for a worker with one rank."""
    units: Sequence[int]
    """`Worker.unit_of` each rank."""
    loads: Sequence[WorkerLoad]
    positions: Mapping[int, int]
    """Unit -> position."""


def rank_targets(workers: Sequence[Worker], only: int | None = None) -> RankTargets:
    """The targets of `workers`, in their order.

    With `only` a worker with several ranks counts with the rank of that place alone (`Worker.sent_rank`); as
    a whole if it has no such rank.
    """
    pairs: list[tuple[Worker, int | None]] = []
    for worker in workers:
        ranks: Sequence[int | None] = tuple(worker.rank_units) or (None,)
        if only is not None:
            ranks = ranks[only : only + 1] if worker.rank_units and only < len(ranks) else (None,)
        pairs += [(worker, rank) for rank in ranks]
    units = [worker.unit_of(rank) for worker, rank in pairs]
    return RankTargets(
        tuple(worker for worker, _ in pairs),
        tuple(rank for _, rank in pairs),
        units,
        tuple(worker.load_of(rank) for worker, rank in pairs),
        {unit: position for position, unit in enumerate(units)},
    )


class Sides(NamedTuple):
    """The workers of a view by role; a worker for both is on both sides. A side without workers is None."""

    prefill: FleetView | None
    decode: FleetView | None


SALTED_SINCE = (0, 19, 1)
"""Releases of vLLM from this one on honour `cache_salt` in every body that `server.isolation`
changes. Chats have it since vllm-project/vllm #17045 (2025-04), `/v1/completions` and `/v1/responses` since
#20981 (2025-07). An older release ignores it."""
_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)


def release_of(text: str) -> tuple[int, ...] | None:
    """The first release number in `text`, as (major, minor, patch)."""
    match = _RELEASE.search(text)
    return None if match is None else tuple(int(number or 0) for number in match.groups())


def release_shown(release: tuple[int, ...]) -> str:
    """A release as vLLM writes it."""
    return ".".join(map(str, release))


_CACHE_CONFIG = b"vllm:cache_config_info{"
_START_TIME = b"process_start_time_seconds "
_RUNNING = b"vllm:num_requests_running{"
_ENDED = b"vllm:request_success_total{"
_KV_USAGE = b"vllm:kv_cache_usage_perc{"
_WAITING = b"vllm:num_requests_waiting{"
_BY_SOURCE = b"vllm:prompt_tokens_by_source_total{"
_FROM_ENGINES = b'source="external_kv_transfer"'
_SLEEP_STATE = b"vllm:engine_sleep_state{"
_SLEEPS = b"vllm:sleep_mode_operation_duration_seconds_count{"
_DRAFTS = b"vllm:spec_decode_num_drafts_total{"
_WEIGHT_UPDATES = b"vllm:rl_weight_update_operation_duration_seconds_count{"
_EMPTYING = (
    (_SLEEPS, b'operation="sleep"'),
    (_SLEEPS, b'operation="release_kv_cache_memory"'),
    (_WEIGHT_UPDATES, b'operation="update"'),
)
_LABEL = re.compile(rb'(?:^|,)\s*(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ModelsPage:
    """A parsed `/v1/models`: every name, LoRA adapters as (name, parent), and the unchanged cards.

    `left_out`: models of the list that do not count.
    """

    models: frozenset[str]
    adapters: tuple[tuple[str, str], ...]
    cards: tuple[dict[str, object], ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A parsed `/metrics`; a figure that the page does not have is None."""

    capacity_tokens: int | None = None
    block_size: int | None = None
    start_time: float | None = None
    ranks: tuple[int, ...] = ()
    """See `WorkerFacts.ranks`."""
    caches_prefixes: bool = True
    """See `WorkerFacts.caches_prefixes`."""
    running: int = 0
    """`vllm:num_requests_running`, summed over data-parallel ranks; `waiting` likewise."""
    waiting: int | None = None
    fetched_tokens: int = 0
    """`vllm:prompt_tokens_by_source_total` from other engines (`external_kv_transfer`), summed likewise."""
    sleep: SleepFacts = _AWAKE
    kv_usage: float = 0.0
    """`vllm:kv_cache_usage_perc`, the mean over data-parallel ranks."""
    ended: int | None = None
    """`vllm:request_success_total`, summed over ranks and reasons."""
    has_drafter: bool = False
    """See `WorkerFacts.has_drafter`."""


MOST_MODELS: Final = 1000
"""Models and adapters of one worker that count. Each has series of its own in /metrics."""
LONGEST_NAME: Final = 512


def parse_models(body: bytes) -> ModelsPage:
    """Parse a model list in OpenAI's shape; an adapter is a card with a `parent` (vLLM 0.32).

    Raises ValueError if the body is not a model list. Cards without a name, or with one of more than 512
    characters, are skipped, and all after the first thousand.
    """
    check_values(body)
    try:
        page = json.loads(body)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    listed = page.get("data") if isinstance(page, dict) else None
    if not isinstance(listed, list):
        raise ValueError("not a model list")
    cards = tuple(
        card
        for card in listed
        if isinstance(card, dict) and isinstance(name := card.get("id"), str) and len(name) <= LONGEST_NAME
    )[:MOST_MODELS]
    adapters = tuple((card["id"], card["parent"]) for card in cards if isinstance(card.get("parent"), str))
    return ModelsPage(frozenset(card["id"] for card in cards), adapters, cards, len(listed) - len(cards))


def same_cards(some: Sequence[Mapping[str, object]], others: Sequence[Mapping[str, object]]) -> bool:
    """Whether two model lists are equal except for `created` and `permission`."""
    # vLLM generates these two fields for each request (0.32).
    return len(some) == len(others) and all(
        {**one, "created": None, "permission": None} == {**other, "created": None, "permission": None}
        for one, other in zip(some, others, strict=True)
    )


def parse_metrics(page: bytes) -> MetricsPage:
    """Find capacity, block size, start time and counts of requests and tokens in a Prometheus text page.

    Takes 0.4 ms per megabyte. Malformed lines are ignored.
    """
    # A substring search, not a parser: vLLM's page has hundreds of kilobytes and is parsed on the event loop
    # every few seconds; prometheus_client takes 250 ms per megabyte. Each data-parallel rank has its own KV
    # pool and its own line, with the rank in the label `engine`; the sizes are added.
    blocks: dict[bytes, int] = {}
    sizes: dict[bytes, int] = {}
    engines: set[int] = set()
    caches_prefixes = True
    for line in _lines(page, _CACHE_CONFIG):
        labels = dict(_LABEL.findall(line))
        rank = labels.get(b"engine", b"")
        if rank.isdigit() and len(engines) < MOST_RANKS:
            engines.add(int(rank[:_RANK_DIGITS]))
        caches_prefixes = caches_prefixes and labels.get(b"enable_prefix_caching") != b"False"
        block = _number(labels.get(b"block_size"))
        count = _number(labels.get(b"num_gpu_blocks"))
        size = _number(labels.get(b"kv_cache_size_tokens")) or min((block or 0) * (count or 0), MOST_TOKENS)
        if block:
            blocks[rank] = block
        if size:
            sizes[rank] = size
    start_time = None
    for line in _lines(page, _START_TIME):
        # NaN would be another start at each page.
        start_time = _figure(line) or start_time
    return MetricsPage(
        min(sum(sizes.values()), MOST_TOKENS) or None,
        next(iter(blocks.values()), None),
        start_time,
        tuple(sorted(engines)) if len(engines) > 1 else (),
        caches_prefixes,
        _sum(page, _RUNNING),
        _sum(page, _WAITING) if _WAITING in page else None,
        _sum(page, _BY_SOURCE, _FROM_ENGINES),
        _sleep(page),
        _mean(page, _KV_USAGE),
        _sum(page, _ENDED) if _ENDED in page else None,
        _DRAFTS in page,
    )


def _sleep(page: bytes) -> SleepFacts:
    states: dict[bytes, bool] = {}
    for line in _lines(page, _SLEEP_STATE):
        labels, _, value = line.rpartition(b"}")
        state = dict(_LABEL.findall(labels)).get(b"sleep_state", b"")
        states[state] = states.get(state, False) or value.split()[:1] == [b"1.0"]
    is_asleep = not states.get(b"awake", True)
    return SleepFacts(
        is_asleep,
        is_asleep and (states.get(b"weights_offloaded", False) or states.get(b"discard_all", False)),
        sum(_sum(page, name, label) for name, label in _EMPTYING),
    )


def _sum(page: bytes, start: bytes, label: bytes = b"") -> int:
    """The sum of a figure's lines that have `label`, one for each data-parallel rank."""
    total = 0
    for line in _lines(page, start):
        if label not in line:
            continue
        total += int(_figure(line) or 0)
    return min(total, MOST_TOKENS)


def _mean(page: bytes, start: bytes) -> float:
    """The mean of a figure's lines; 0 without one. Lines without a figure within the bounds count as 0."""
    figures = [_figure(line) or 0.0 for line in _lines(page, start)]
    return sum(figures) / len(figures) if figures else 0.0


def _figure(line: bytes) -> float | None:
    """The figure at the end of a line of metrics, behind its labels; None unless it is from 0 to
    MOST_TOKENS."""
    try:
        figure = float(line.rpartition(b"}")[2].split()[0])
    except (ValueError, IndexError):
        return None
    return figure if 0.0 <= figure <= MOST_TOKENS else None


_MOST_LINES = 4096
_LONGEST_LINE = 16_384


def _lines(page: bytes, start: bytes) -> list[bytes]:
    """The rest of each line that begins with `start`: of at most 4,096 lines, up to 16 KiB each."""
    lines: list[bytes] = []
    at = page.find(start)
    while at >= 0 and len(lines) < _MOST_LINES:
        end = page.find(b"\n", at)
        end = len(page) if end < 0 else end
        if at == 0 or page[at - 1] == 0x0A:
            lines.append(page[at + len(start) : min(end, at + _LONGEST_LINE)])
        at = page.find(start, end)
    return lines


def _number(value: bytes | None) -> int | None:
    """The value of a label as a positive integer, else None. vLLM writes "None" for an unset value."""
    try:
        number = int(value or b"")
    except ValueError:
        return None
    return number if 0 < number <= MOST_TOKENS else None
