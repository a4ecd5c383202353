"""Finds the endpoints of a worker's event streams: from the configuration, or from the worker itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from kvroute.events.options import KvEventsOptions
from kvroute.fleet.worker import WorkerSpec

_ANY_HOST = ("*", "0.0.0.0", "[::]", "::")


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """The endpoints of one stream: of one worker and data-parallel rank.

    `bind_index` is the index in `KvEventsOptions.bind` of the address that the worker connects to; None if
    the gateway connects to `endpoint`. Without a `replay_endpoint` lost messages cannot be replayed.
    """

    rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str
    bind_index: int | None = None


def configured_sources(options: KvEventsOptions, spec: WorkerSpec) -> list[KvEventSource]:
    """The sources that the options describe; empty if the options have no endpoint."""
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
    """Parse an answer of `/kv_event_sources` (vLLM 0.32): sources by rank, with `*` for the worker's own
    host.

    Raises ValueError if the answer has another form. Ranks without ZMQ events are left out.
    """
    try:
        page = json.loads(body)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(page, dict):
        raise ValueError("not a map of event sources")
    host = urlsplit(spec.url).hostname or ""
    ports = {_port(endpoint): index for index, endpoint in enumerate(options.bind)}
    sources = []
    for rank, described in page.items():
        if not isinstance(described, Mapping) or described.get("publisher", "zmq") != "zmq":
            continue
        if not described.get("enable_kv_cache_events", True):
            continue
        endpoint, replay = described.get("endpoint"), described.get("replay_endpoint")
        if not isinstance(endpoint, str) or not rank.isdigit():
            raise ValueError("an event source has a rank and an endpoint")
        has_replay = isinstance(replay, str) and replay and described.get("buffer_steps", 1)
        topic = described.get("topic")
        names = {"host": host, "id": spec.id, "rank": int(rank)}
        sources.append(
            KvEventSource(
                int(rank),
                _reachable(endpoint, host),
                _reachable(str(replay), host) if has_replay else None,
                options.topic.format(**names) or (topic if isinstance(topic, str) else ""),
                ports.get(_port(endpoint)),
            )
        )
    return sources


async def find_sources(
    client: httpx.AsyncClient, options: KvEventsOptions, spec: WorkerSpec
) -> list[KvEventSource] | None:
    """The configured sources, or else the ones that the worker names; None if the worker does not answer."""
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


def _reachable(endpoint: str, host: str) -> str:
    """Replace the wildcard host of a bound address by the worker's host."""
    scheme, separator, rest = endpoint.partition("://")
    name, colon, port = rest.rpartition(":")
    if scheme == "tcp" and name in _ANY_HOST:
        return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{colon}{port}"
    return endpoint


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _shifted(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: vLLM adds the rank to the port."""
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if rank and port.isdigit() else endpoint
