"""What a worker's own pages say: `/v1/models` and `/metrics`, read without regard to all the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
