"""Metrics of the workers' event streams and of what they drew, read when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric

from kvroute.events.streams import StreamFigures
from kvroute.metrics import counter, gauge

_STREAM_COUNTS = {
    "messages": "Event batches read.",
    "duplicates": "Event batches that had come before.",
    "unreadable": "Messages that are no event batch.",
    "unknown_events": "Events of a type that is not known, skipped.",
    "undivided": "Large events unlike what vLLM writes, taken in as one: they may hold the loop.",
    "gaps": "Event batches that did not follow the one before.",
    "replays": "Replays asked for.",
    "replay_failures": "Replays that failed.",
    "restarts": "Streams that began anew: the engine restarted, or its buffer was overrun.",
    "losses": "Gaps that could not be filled.",
    "rereads": "Maps that were distrusted and read anew.",
    "failures": "Times that following failed on our side (the log has it) and the map was begun anew.",
}


def stream_metrics(streams: Sequence[StreamFigures]) -> Iterable[Metric]:
    """One series per worker and data-parallel rank."""
    labelled = [((stream.worker, str(stream.rank)), stream) for stream in streams]
    yield gauge(
        "kvroute_map_standing",
        "1 for how far each worker's map is believed, and why not further.",
        ("worker", "rank", "standing", "cause"),
        [
            ((*place, each.trust.value, each.reason.value if each.reason else ""), 1.0)
            for place, each in labelled
        ],
    )
    yield gauge(
        "kvroute_map_held_blocks",
        "Blocks that the map has of each worker.",
        ("worker", "rank", "tier"),
        [
            ((*place, tier.name.lower()), float(blocks))
            for place, each in labelled
            for tier, blocks in each.held_blocks.items()
        ],
    )
    yield gauge(
        "kvroute_map_aside_blocks",
        "Announced blocks that could not be placed, because what comes before them is not known.",
        ("worker", "rank"),
        [(place, float(each.aside_blocks)) for place, each in labelled],
    )
    for name, text in _STREAM_COUNTS.items():
        yield counter(
            f"kvroute_kv_events_{name}",
            text,
            ("worker", "rank"),
            [(place, float(getattr(each.counts, name))) for place, each in labelled],
        )
    for name, text in {"stored": "Blocks announced.", "removed": "Blocks withdrawn."}.items():
        yield counter(
            f"kvroute_map_{name}_blocks",
            text,
            ("worker", "rank"),
            [(place, float(getattr(each.blocks, name))) for place, each in labelled],
        )
