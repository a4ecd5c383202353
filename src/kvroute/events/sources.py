"""Where a worker's event streams are: what it says itself, or what is configured."""

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
