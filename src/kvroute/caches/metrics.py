"""Metrics of the cache map, of event streams, LMCache and tokenizing, read at a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from kvroute.blocks.keys import Tier
from kvroute.fleet.fleet import Fleet
from kvroute.routing.router import Router
from kvroute.routing.strategy import CacheMap
from kvroute.tallies import counter, gauge

if TYPE_CHECKING:  # imported by a gateway with a map only: they load ZMQ and more
    from kvroute.events.ingest import StreamFigures
    from kvroute.index.chunk_index import ChunkIndexSize
    from kvroute.index.prefix_index import IndexSize
    from kvroute.lmcache.coordinator import CoordinatorCounts
    from kvroute.lmcache.l2_redis import L2Counts
    from kvroute.lmcache.membership import LMCacheServer
    from kvroute.lmcache.server_requests import PrefetchOutcome
    from kvroute.lmcache.tierd import FollowedDaemon


def tier_gauges(fleet: Fleet, router: Router, caches: CacheMap) -> Iterable[Metric]:
    """Metrics of the bandwidth between cache tiers."""
    yield _tier_bandwidth(
        [
            ((worker.id, str(place.rank), tier.name.lower()), 1e9 * router.rate(place.slot, tier))
            for worker in fleet.workers()
            for place in caches.places(worker)
            for tier in (Tier.L1, Tier.L2)
        ]
    )


def _tier_bandwidth(rows: Sequence[tuple[tuple[str, ...], float]]) -> Metric:
    return gauge(
        "kvroute_tier_bandwidth_bytes_per_second",
        "Bandwidth assumed from slower tiers to each worker: as measured by its LMCache server, otherwise as "
        "configured.",
        ("worker", "rank", "tier"),
        rows,
    )


def map_metrics(
    size: IndexSize | None, failures: Mapping[str, int], *, dropped_blocks: int | None = None
) -> Iterable[Metric]:
    """Metrics of the cache map. Only the process that fills it has `dropped_blocks`."""
    yield gauge(
        "kvroute_map_blocks",
        "Different blocks in the map.",
        (),
        [] if size is None else [((), float(size.blocks))],
    )
    yield gauge(
        "kvroute_map_bytes",
        "Estimated memory of the map.",
        (),
        [] if size is None else [((), float(size.bytes))],
    )
    yield counter(
        "kvroute_map_dropped_blocks",
        "Blocks not stored in the map because it is full (kv_events.max_index_blocks).",
        (),
        [] if dropped_blocks is None else [((), float(dropped_blocks))],
    )
    yield counter(
        "kvroute_following_failures",
        "Background tasks of the cache tracker that failed and were restarted (see the log), by task.",
        ("work",),
        [((name,), float(times)) for name, times in failures.items()],
    )


_STREAM_COUNTS = {
    "messages": "Event batches read.",
    "duplicates": "Event batches that were received before.",
    "unreadable": "Messages that are not a valid event batch.",
    "unknown_events": "Events of an unknown type, which were skipped.",
    "undivided": "Large events in an unusual encoding, applied in one step, which may block the event loop.",
    "gaps": "Event batches whose sequence number did not follow the previous one.",
    "replays": "Replays requested.",
    "replay_failures": "Replays that failed.",
    "restarts": "Streams that started again: the engine restarted, or its buffer was overrun.",
    "losses": "Gaps that could not be closed by a replay.",
    "rereads": "Maps that were distrusted and read again.",
    "failures": "Failures in the gateway itself (see the log), after which the map was read again.",
}


def stream_metrics(streams: Sequence[StreamFigures]) -> Iterable[Metric]:
    """One series per worker and data-parallel rank."""
    labelled = [((stream.worker, str(stream.rank)), stream) for stream in streams]
    yield gauge(
        "kvroute_map_trust",
        "1 for the trust in each worker's map, with the reason where it is limited.",
        ("worker", "rank", "trust", "cause"),
        [
            ((*labels, each.trust.value, each.reason.value if each.reason else ""), 1.0)
            for labels, each in labelled
        ],
    )
    yield gauge(
        "kvroute_map_held_blocks",
        "Blocks that each worker holds according to the map.",
        ("worker", "rank", "tier"),
        [
            ((*labels, tier.name.lower()), float(blocks))
            for labels, each in labelled
            for tier, blocks in each.held_blocks.items()
        ],
    )
    yield gauge(
        "kvroute_map_orphan_blocks",
        "Orphan blocks: announced by the worker, but with an unknown parent.",
        ("worker", "rank"),
        [(labels, float(each.orphan_blocks)) for labels, each in labelled],
    )
    for name, text in _STREAM_COUNTS.items():
        yield counter(
            f"kvroute_kv_events_{name}",
            text,
            ("worker", "rank"),
            [(labels, float(getattr(each.counts, name))) for labels, each in labelled],
        )
    for name, text in {
        "stored": "Blocks that workers announced as stored.",
        "removed": "Blocks that workers announced as removed.",
        "passed_over": "Announced blocks that do not count: of KV cache groups of an unknown kind, or not in "
        "GPU memory.",
    }.items():
        yield counter(
            f"kvroute_map_{name}_blocks",
            text,
            ("worker", "rank"),
            [(labels, float(getattr(each.blocks, name))) for labels, each in labelled],
        )


def tokenizing_metric(cpu_s: Mapping[str, float]) -> Metric:
    """CPU seconds of exact prompts, by thread."""
    return counter(
        "kvroute_tokenizing_cpu_seconds",
        "CPU time of exact prompts (parsing, rendering, tokenizing, hashing the ids), by thread: the event "
        "loop's or the tokenizer threads'.",
        ("thread",),
        [((thread,), seconds) for thread, seconds in cpu_s.items()],
    )


def next_turns_metric(turns: Mapping[str, Mapping[str, int]]) -> Metric:
    """Next turns of chats that were found in the tokenizer's memory, by model and outcome."""
    return counter(
        "kvroute_next_turns",
        "Next turns of known chats that were tokenized here, by outcome: continued (only what is new was "
        "tokenized), compared (also tokenized as a whole, as a proof), differed (the ids were not those of "
        "the whole chat; the model's long chats are tokenized as a whole from then on).",
        ("model", "outcome"),
        [
            ((model, outcome), float(count))
            for model, outcomes in turns.items()
            for outcome, count in outcomes.items()
        ],
    )


def lmcache_metrics(size: ChunkIndexSize | None, held: Mapping[Tier, int]) -> Iterable[Metric]:
    """Metrics of the map of LMCache's chunks; `held` is their number by tier."""
    yield gauge(
        "kvroute_lmcache_held_chunks",
        "Chunks by tier, summed over the places that hold them.",
        ("tier",),
        [((tier.name.lower(),), float(chunks)) for tier, chunks in held.items()],
    )
    yield gauge(
        "kvroute_lmcache_chunks",
        "Different chunks in the map.",
        (),
        [] if size is None else [((), float(size.chunks))],
    )
    yield lmcache_map_bytes(size)
    yield counter(
        "kvroute_lmcache_dropped_chunks",
        "Chunks not stored in the map because it is full (lmcache.coordinator.max_chunks).",
        (),
        [] if size is None else [((), float(size.dropped))],
    )


def lmcache_map_bytes(size: ChunkIndexSize | None) -> Metric:
    """The memory of the map of chunks, which every process has."""
    return gauge(
        "kvroute_lmcache_map_bytes",
        "Estimated memory of LMCache's map.",
        (),
        [] if size is None else [((), float(size.bytes))],
    )


def coordinator_metrics(
    servers: Iterable[LMCacheServer],
    counts: CoordinatorCounts | None,
    *,
    rate_failures: int = 0,
    malformed: int = 0,
    refused: int = 0,
) -> Iterable[Metric]:
    """Metrics of the coordinator that LMCache's servers report to."""
    yield gauge(
        "kvroute_lmcache_servers",
        "LMCache servers that report here, with the reason why their data is doubted.",
        ("server", "doubt"),
        [((each.id, each.trouble), 1.0) for each in servers],
    )
    yield counter(
        "kvroute_lmcache_batches",
        "Batches of cache events, by outcome.",
        ("outcome",),
        [] if counts is None else [((each.value,), float(number)) for each, number in counts.batches.items()],
    )
    for name, text, number in (
        ("gaps", "Batches whose sequence number did not follow the previous one.", counts and counts.gaps),
        (
            "rate_failures",
            "Requests for the load bandwidth of LMCache servers that got no answer.",
            rate_failures,
        ),
        ("malformed", "Messages to the coordinator that could not be decoded.", malformed),
        ("refused", "Messages to the coordinator from an address that may not send them.", refused),
        (
            "servers_expired",
            "LMCache servers that were removed because their heartbeats ended.",
            counts and counts.expired,
        ),
    ):
        rows = [] if counts is None else [((), float(number or 0))]
        yield counter(f"kvroute_lmcache_{name}", text, (), rows)


def shared_reports_metric(counts: Mapping[str, int]) -> Metric:
    """LMCache's reports to and from other gateways."""
    return counter(
        "kvroute_lmcache_shared_reports",
        "LMCache's reports that were forwarded to other gateways, and that were followed from them; times "
        "that forwarded batches were missed; states of servers that were copied from another gateway, or "
        "refused.",
        ("outcome",),
        [((outcome,), float(number)) for outcome, number in counts.items()],
    )


def prefetch_metric(counts: Mapping[PrefetchOutcome, int]) -> Metric:
    """Prefetches from L2, by outcome."""
    return counter(
        "kvroute_lmcache_prefetches",
        "Loads from L2 requested from LMCache servers while a request waits, by outcome.",
        ("outcome",),
        [((outcome.value,), float(times)) for outcome, times in counts.items()],
    )


def l2_metrics(counts: L2Counts | None) -> Iterable[Metric]:
    """Metrics of the lookups in the shared store."""
    yield counter(
        "kvroute_l2_lookups",
        "Prompts looked up in L2's Redis.",
        (),
        [] if counts is None else [((), float(counts.lookups))],
    )
    yield counter(
        "kvroute_l2_failures",
        "Lookups in L2's Redis that got no answer, by cause.",
        ("cause",),
        [] if counts is None else [((why.value,), float(number)) for why, number in counts.failures.items()],
    )


def tierd_metrics(daemons: Iterable[FollowedDaemon]) -> Iterable[Metric]:
    """Metrics of the followed `kvroute tierd` daemons."""
    daemons = list(daemons)
    yield gauge(
        "kvroute_lmcache_tierd_parts",
        "Parts of chunks that each followed tierd holds, as far as the gateway knows.",
        ("daemon",),
        [((each.url,), float(len(each.parts))) for each in daemons],
    )
    yield counter(
        "kvroute_lmcache_tierd_failures",
        "Calls to a followed tierd without a usable answer.",
        ("daemon",),
        [((each.url,), float(each.failures)) for each in daemons],
    )
