"""What the doctor reads from a deployment, and the shape of what it finds.

Observations are values without judgement; the functions beside them parse answers. A finding has its reason
and its fix, and the exit code follows from the findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvroute.events.options import KvEventsOptions
from kvroute.fleet.worker import ModelsPage, WorkerSpec, release_of
from kvroute.lmcache.options import LMCacheOptions


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is examined, and which of its features are in use. Contains secrets: never print it."""

    workers: tuple[WorkerSpec, ...]
    strategies: frozenset[str]
    reads_caches: bool
    """Whether a strategy in force reads the workers' cache events."""
    uses_caches: bool
    """Whether a strategy in force prefers workers that hold a prompt."""
    kv_events: KvEventsOptions
    lmcache: LMCacheOptions
    worker_key: str | None = None
    gateway_url: str | None = None
    client_key: str | None = None
    admin_key: str | None = None
    open_files: int = 0
    """Descriptors that the gateway may need: `server.max_in_flight` and the connections to workers."""
    unknown_workers: str = ""
    """Why the set of workers may be incomplete; "" if it is complete."""
    isolates_tenants: bool = False
    """`server.isolation` is `per-key`: workers must honour `cache_salt`."""
    ignored: tuple[tuple[WorkerSpec, WorkerSpec], ...] = ()
    """Listed workers that the gateway ignores, each with the one before it that has the same id."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer, or why there was none (`status` 0)."""

    status: int
    body: bytes = b""
    trouble: str = ""
    clock_skew_s: float | None = None
    """The server's `Date` minus this machine's time; None without the header. One second of resolution."""

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def problem(self) -> str:
        """What is wrong, in words; "" for a 2xx answer."""
        return "" if self.is_ok else self.trouble or f"answered {self.status}"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The labels of `vllm:cache_config_info`, of the first rank; a field is None without its label."""

    block_size: int | None = None
    prefix_caching: bool | None = None
    hash_algorithm: str | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """One event stream of a worker, as the doctor found it."""

    rank: int
    endpoint: str
    replay_endpoint: str | None
    connects_to_gateway: bool
    """The worker connects to an address of the gateway, so the doctor cannot listen itself."""
    trouble: str = ""
    """Why its endpoint accepts no connection; "" if it does."""
    messages: int | None = None
    """Batches that arrived during the probes; None if the doctor did not listen or sent no probe."""
    replay_trouble: str | None = None
    """Why the replay endpoint did not answer; "" if it did, None if it was not asked."""


@dataclass(frozen=True, slots=True)
class ProbePair:
    """The same prompt sent twice."""

    trouble: str = ""
    """Why the pair gives no result; "" if it gives one."""
    prompt_tokens: int = 0
    reported: int | None = None
    """Cached tokens in the second answer's usage; None if the engine does not report them."""
    counted: int | None = None
    """Tokens by which the engine's counters of cache hits rose; None if its metrics have none."""
    predicted: int | None = None
    """Tokens that the gateway expected to be cached for the second request; None if it was not asked."""

    @property
    def cached(self) -> int | None:
        """Cached tokens by the engine's own count."""
        return self.counted if self.reported is None else self.reported


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """What one worker showed."""

    spec: WorkerSpec
    health: Reply
    version: Reply = Reply(0)
    models_reply: Reply = Reply(0)
    models: ModelsPage | None = None
    metrics_reply: Reply = Reply(0)
    cache: CacheConfig = CacheConfig()
    start_time: float | None = None
    sources_reply: Reply | None = None
    """The answer of `/kv_event_sources`; None if the configuration has the addresses."""
    publishes: bool = False
    """Whether the answer names a stream, or the configuration does."""
    streams: tuple[Stream, ...] = ()
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Token ids of the sample texts by `/tokenize`; empty if the worker tokenized none."""
    has_lmcache_inside: bool = False
    """Whether its metrics have LMCache's: only the connector within the engine (LMCacheConnectorV1) adds
    them."""
    hybrid_model: str = ""
    """How the doctor knows that the model is hybrid; "" if it is not, or if that is unknown."""
    tokenizer_trouble: str | None = None
    """How the gateway's own tokenizer differs from this worker's; "" if it does not, None if there is
    none."""
    pair: ProbePair | None = None
    """None if no probes were sent."""

    @property
    def name(self) -> str:
        return f"worker {self.spec.id} ({self.spec.url})"

    @property
    def answers(self) -> bool:
        return self.health.is_ok

    @property
    def base_models(self) -> tuple[str, ...]:
        """The models without adapters, in the worker's order."""
        if self.models is None:
            return self.spec.models
        adapters = {name for name, _ in self.models.adapters}
        return tuple(str(card["id"]) for card in self.models.cards if card["id"] not in adapters)

    @property
    def release(self) -> tuple[int, ...] | None:
        """vLLM's release as numbers; None if unknown."""
        return release_of(self.version.body.decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class CacheServerSeen:
    """An LMCache server that reports to the gateway; `status` is None if it did not answer."""

    id: str
    url: str
    workers: tuple[str, ...]
    doubt: str
    trouble: str = ""
    status: Mapping[str, Any] | None = None
    healthy: bool | None = None
    """What `/healthcheck` said; None if it did not answer."""

    @property
    def name(self) -> str:
        return f"LMCache server {self.id} ({self.url})"

    @property
    def chunk_tokens(self) -> int | None:
        size = self.status.get("chunk_size") if self.status else None
        return size if isinstance(size, int) and size > 0 else None


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    """What the gateway showed. `admin` is False without a usable admin key."""

    url: str
    ready: Reply
    version: str = ""
    models: Reply = Reply(0)
    admin: bool = False
    notes: tuple[str, ...] = ()
    trust_notes: Mapping[str, str] = field(default_factory=dict)
    """Why the map of a worker is not used, by worker id."""
    lmcache_known: bool = False
    """Whether the gateway reports its view of LMCache."""
    problems: tuple[str, ...] = ()
    """What LMCache's controller found wrong, one sentence each."""
    instances: tuple[str, ...] = ()
    """LMCache instances that reported to the controller."""
    uncompared: tuple[str, ...] = ()
    """Those whose chunk hashes the controller has not compared with its own so far."""
    servers: tuple[CacheServerSeen, ...] = ()
    max_fds: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    """Raw answers for the support archive, by file name."""

    @property
    def name(self) -> str:
        return f"gateway ({self.url})"


@dataclass(frozen=True, slots=True)
class RedisSeen:
    """The Redis of L2. `where` has no password."""

    where: str
    trouble: str = ""
    used_bytes: int = 0
    max_bytes: int = 0
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Observations:
    """Everything that the doctor saw. `gateway` and `redis` are None if there is none to read."""

    workers: tuple[WorkerSeen, ...]
    gateway: GatewaySeen | None = None
    redis: RedisSeen | None = None


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COUNTERS = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")


def cache_config(page: str) -> CacheConfig:
    """The engine's cache settings from its Prometheus page (vLLM 0.32; older pages lack some labels)."""
    for line in page.splitlines():
        if line.startswith("vllm:cache_config_info{"):
            labels = dict(_LABEL.findall(line))
            size = labels.get("block_size", "")
            caching = labels.get("enable_prefix_caching")
            return CacheConfig(
                int(size) if size.isdecimal() else None,
                None if caching is None else caching == "True",
                labels.get("prefix_caching_hash_algo"),
            )
    return CacheConfig()


def counted_hits(page: str) -> int | None:
    """Tokens that the engine found in its own cache and in a connector's; None without such counters."""
    hits = None
    for line in page.splitlines():
        if line.startswith(_COUNTERS):
            hits = (hits or 0) + int(float(line.rsplit(None, 1)[-1]))
    return hits


def metric(page: str, name: str) -> float | None:
    """The first sample of a metric without labels; None if the page does not have it."""
    for line in page.splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(None, 1)[-1])
    return None


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. `code` is stable and names the entry in docs/troubleshooting.md."""

    code: str
    severity: Severity
    subject: str
    """The part concerned, with id and URL."""
    what: str
    why: str = ""
    fix: str = ""


Findings = Iterator[Finding]


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if there is an error, else 0: warnings do not count."""
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def error(code: str, subject: str, what: str, why: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, subject, what, why, fix)


def warning(code: str, subject: str, what: str, why: str, fix: str) -> Finding:
    return Finding(code, Severity.WARNING, subject, what, why, fix)


def unchecked(code: str, subject: str, what: str) -> Finding:
    return Finding(code, Severity.NOT_CHECKED, subject, what)


def running(seen: Observations) -> list[WorkerSeen]:
    return [worker for worker in seen.workers if worker.answers]
