"""Where a worker's event streams are: what it says itself, or what is configured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx
import msgspec

from kvroute.blocks.keys import KEY_TOKENS, BlockKey, Tier, adapter_space, mixed_seed, token_keys
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.worker import WorkerSpec
from kvroute.wire.vllm import BlockStored, Medium, medium_of

_ANY_HOST = ("*", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """One stream: of one worker and data-parallel rank.

    `comes_to` is the place in `KvEventsOptions.bind` that the worker connects to, None where we connect to
    `endpoint`. Without a `replay_endpoint` lost messages are lost.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str
    comes_to: int | None = None


def configured_sources(options: KvEventsOptions, spec: WorkerSpec) -> list[KvEventSource]:
    """The sources that the options describe; none if they have no endpoint."""
    if not options.endpoint and not (options.bind and options.topic):
        return []
    host = urlsplit(spec.url).hostname or ""
    sources = []
    for rank in range(max(options.ranks, len(options.bind))):
        names = {"host": f"[{host}]" if ":" in host else host, "id": spec.id, "rank": rank}
        replay = options.replay_endpoint.format(**names)
        sources.append(
            KvEventSource(
                rank,
                _shifted(options.endpoint.format(**names), rank),
                _shifted(replay, rank) if replay else None,
                options.topic.format(**names),
                rank if rank < len(options.bind) else None,
            )
        )
    return sources


def parse_sources(body: bytes, options: KvEventsOptions, spec: WorkerSpec) -> list[KvEventSource]:
    """Read an answer of `/kv_event_sources` (vLLM 0.32): sources by rank, `*` for the worker's own host.

    Raises ValueError for anything else. Ranks without ZMQ events are left out.
    """
    try:
        page = json.loads(body)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(page, dict):
        raise ValueError("not a map of event sources")
    host = urlsplit(spec.url).hostname or ""
    ports = {_port(endpoint): place for place, endpoint in enumerate(options.bind)}
    sources = []
    for rank, told in page.items():
        if not isinstance(told, Mapping) or told.get("publisher", "zmq") != "zmq":
            continue
        if not told.get("enable_kv_cache_events", True):
            continue
        endpoint, replay = told.get("endpoint"), told.get("replay_endpoint")
        if not isinstance(endpoint, str) or not rank.isdigit():
            raise ValueError("an event source has a rank and an endpoint")
        reaches = isinstance(replay, str) and replay and told.get("buffer_steps", 1)
        topic = told.get("topic")
        names = {"host": host, "id": spec.id, "rank": int(rank)}
        sources.append(
            KvEventSource(
                int(rank),
                _at(endpoint, host),
                _at(str(replay), host) if reaches else None,
                options.topic.format(**names) or (topic if isinstance(topic, str) else ""),
                ports.get(_port(endpoint)),
            )
        )
    return sources


async def find_sources(
    client: httpx.AsyncClient, options: KvEventsOptions, spec: WorkerSpec
) -> list[KvEventSource] | None:
    """The worker's sources; None if it does not answer now. Configuration goes first."""
    sources = configured_sources(options, spec)
    if sources:
        return sources
    try:
        async with asyncio.timeout(options.discovery_timeout_s):
            answer = await client.get(spec.url + "/kv_event_sources", timeout=options.discovery_timeout_s)
    except (TimeoutError, httpx.HTTPError, httpx.InvalidURL):
        return None
    if answer.status_code in (404, 405):
        return []
    if not answer.is_success:
        return None
    try:
        return parse_sources(answer.content, options, spec)
    except ValueError:
        return None


def _at(endpoint: str, host: str) -> str:
    """A bound address as others reach it."""
    scheme, separator, rest = endpoint.partition("://")
    name, colon, port = rest.rpartition(":")
    if scheme == "tcp" and name in _ANY_HOST:
        return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{colon}{port}"
    return endpoint


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _shifted(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: vLLM counts ports up from rank 0."""
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if rank and port.isdigit() else endpoint


_TIERS: Final = {
    Medium.GPU: Tier.GPU,
    Medium.CPU: Tier.L1,
    Medium.DISK: Tier.L2,
    Medium.REMOTE: Tier.L2,
}
_USUAL: Final = {None: Tier.GPU, "GPU": Tier.GPU, "CPU": Tier.L1}
"""What nearly all events say, found without taking the long way."""


def tier_of(medium: str | None) -> Tier | None:
    """Where the blocks of an event lie; None for a medium that is not known."""
    tier = _USUAL.get(medium)
    return _TIERS.get(medium_of(medium)) if tier is None else tier


def is_divisible(event: BlockStored) -> bool:
    """Do its token ids fit its hashes, or are there none? Else nothing can be made of any part of it."""
    return not event.token_ids or event.block_size * len(event.block_hashes) == len(event.token_ids)


def pieces_of(event: BlockStored, blocks: int) -> Iterator[BlockStored]:
    """A long announcement as several of at most `blocks` that say the same."""
    hashes, size = event.block_hashes, event.block_size
    for start in range(0, len(hashes), blocks):
        stop = start + blocks
        yield msgspec.structs.replace(
            event,
            block_hashes=hashes[start:stop],
            parent_block_hash=hashes[start - 1] if start else event.parent_block_hash,
            token_ids=event.token_ids[start * size : stop * size],
            extra_keys=event.extra_keys[start:stop] if event.extra_keys else None,
        )


def root_seed(event: BlockStored) -> int:
    """Where the chain of a prompt starts: its adapter and its cache salt."""
    adapter = event.lora_name
    if adapter is None and event.lora_id is not None:
        # Before 0.19 an adapter has a number only: blocks under a name that nobody asks for.
        adapter = f"\0{event.lora_id}"
    salt = ""
    if event.extra_keys and event.extra_keys[0]:
        _, salt = _without_salt(event.extra_keys[0], adapter, True)
    return adapter_space(adapter, salt).seed


def keys_of(event: BlockStored, seed: int) -> list[BlockKey]:
    """The key at the end of each of the event's blocks; `seed` is the parent's key, or `root_seed`."""
    stride = event.block_size // KEY_TOKENS
    extra = event.extra_keys
    if extra and any(extra):
        return _keys_with_extra(event, seed, extra)
    keys = token_keys(event.token_ids, seed)
    return keys if stride == 1 else keys[stride - 1 :: stride]


def _keys_with_extra(event: BlockStored, seed: int, extra: Sequence[list[object] | None]) -> list[BlockKey]:
    keys: list[BlockKey] = []
    size, key = event.block_size, seed
    for place in range(len(event.block_hashes)):
        entry = extra[place] if place < len(extra) else None
        if entry:
            first = place == 0 and event.parent_block_hash is None
            rest, _ = _without_salt(entry, event.lora_name, first)
            if rest:
                key = mixed_seed(key, msgspec.msgpack.encode(rest))
        key = token_keys(event.token_ids[place * size : (place + 1) * size], key)[-1]
        keys.append(BlockKey(key))
    return keys


def _without_salt(entry: list[object], adapter: str | None, first: bool) -> tuple[list[object], str]:
    """One block's extra keys without the adapter's name and the salt, and the salt: in vLLM (0.32,
    v1/core/kv_cache_utils.py) adapter, then multimodal identifiers, then in the first block the salt."""
    rest = list(entry)
    if adapter is not None and rest and rest[0] == adapter:
        del rest[0]
    if first:
        texts = [value for value in rest if isinstance(value, str)]
        if texts:
            rest.remove(texts[-1])
            return rest, texts[-1]
    return rest, ""
