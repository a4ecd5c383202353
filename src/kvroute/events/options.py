"""Options for reading the workers' KV events, and the endpoints of the event streams.

An endpoint comes from the options or from the worker itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

import httpx
from pydantic import field_validator

from kvroute.answers import LIMIT
from kvroute.fleet.worker import MOST_RANKS, WorkerSpec
from kvroute.json_values import check_values
from kvroute.options import Options, Switch, option


class ProbeOptions(Options):
    """Probes: the gateway's own requests that make a worker announce its blocks again (vLLM 0.32 and later).

    The gateway sends them after events were lost, or while blocks have an unknown parent.
    """

    enabled: Annotated[bool, Switch] = option(True, "Send probes.")
    interval_s: float = option(
        5.0,
        "Least time between two probes to one worker.",
        unit="s",
        gt=0,
        higher="less work for the workers",
        lower="a map is whole again sooner",
    )
    max_in_flight: int = option(
        0,
        "Send a probe only while the worker has at most this many requests from the gateway.",
        ge=0,
        higher="a busy worker's map is repaired too",
        lower="no request waits for a probe",
    )
    max_prompt_tokens: int = option(
        32_768,
        "Longest prompt of a probe; of a longer prompt only the beginning is sent.",
        unit="tokens",
        ge=1,
        higher="long conversations are repaired completely",
        lower="less to compute when the worker has evicted the prompt",
    )
    memory_tokens: int = option(
        1_000_000,
        "Recent prompts that are kept per stream for probes, 4 bytes or more a token; 0: none.",
        unit="tokens",
        ge=0,
        higher="more can be repaired",
        lower="less memory",
    )
    timeout_s: float = option(30.0, "Longest wait for the answer to a probe.", unit="s", gt=0)


class SnapshotOptions(Options):
    """The map in a file, so that it survives a restart of the gateway.

    The part of a worker is used if the worker has not restarted and its replay reaches back to the snapshot.
    """

    path: str = option("", "File to write, and to read at the start; empty: none.")
    interval_s: float = option(
        300.0,
        "Time between two snapshots; one more is written at shutdown.",
        unit="s",
        gt=0,
        higher="less work",
        lower="after a crash the snapshot is less likely to be too old",
    )


class KvEventsOptions(Options):
    """Where the workers publish their KV events, and how the gateway follows them.

    Endpoint templates may use `{host}` (of the worker's URL), `{id}` (of the worker) and `{rank}`.
    """

    endpoint: str = option(
        "",
        "Where a worker publishes, such as `tcp://{host}:5557`; empty: read the worker's `/kv_event_sources` "
        "(vLLM 0.27 and later). The data-parallel rank is added to the port, as vLLM does.",
    )
    replay_endpoint: str = option(
        "", "The worker's replay socket, such as `tcp://{host}:5657`; empty with `endpoint` set: it has none."
    )
    topic: str = option(
        "",
        "Topic of a worker that connects to the gateway, such as `kv@{host}`; empty: the topic that its "
        "`/kv_event_sources` names.",
    )
    ranks: int = option(1, "Data-parallel ranks of a worker that does not report its own.", ge=1, le=64)
    bind: tuple[str, ...] = option(
        (),
        "Where the gateway listens for workers that connect to it (`tcp://*:5557`), one endpoint per "
        "data-parallel rank; the topic of a message says which worker sent it.",
    )
    idle_check_s: float = option(
        2.0,
        "After this time without a message, the gateway asks the worker for messages that it missed.",
        unit="s",
        gt=0,
        higher="fewer requests to idle workers",
        lower="the loss of a last message, or a restart of an idle worker, is noticed sooner",
    )
    replay_timeout_s: float = option(
        2.0,
        "Longest wait for the next message of a replay.",
        unit="s",
        gt=0,
        higher="a busy worker has time to answer",
        lower="a gap that cannot be repaired is noticed sooner",
    )
    replay_attempts: int = option(
        3,
        "Consecutive failed replays after which the worker's map is dropped.",
        ge=1,
        higher="bridges longer interruptions",
        lower="a wrong map is dropped sooner",
    )
    discovery_timeout_s: float = option(
        2.0, "Longest wait for `/kv_event_sources`.", unit="s", gt=0, higher="suits slow workers"
    )
    retry_s: float = option(
        1.0,
        "Pause before reading `/kv_event_sources` again, or reopening a socket.",
        unit="s",
        gt=0,
        higher="fewer attempts",
    )
    reread_s: float = option(
        60.0,
        "Least time between two replays from the start because of a distrusted map.",
        unit="s",
        gt=0,
        higher="less work where the cause is not in the map",
        lower="a wrong map is replaced sooner",
    )
    silent_requests: int = option(
        8,
        "A worker's map is not used after this many answers that must have stored blocks, to requests sent "
        "after the worker's last event; until its next event.",
        ge=1,
        higher="fewer false alarms",
        lower="noticed sooner",
    )
    silent_s: float = option(
        5.0,
        "In addition to `silent_requests`: the time without an event before the map is not used.",
        unit="s",
        gt=0,
        higher="fewer false alarms",
        lower="noticed sooner",
    )
    queue_messages: int = option(
        100_000,
        "Messages per stream that may wait to be applied; more are lost and replayed.",
        ge=1,
        higher="bridges longer bursts",
        lower="less memory",
    )
    slice_ms: float = option(
        0.5,
        "Longest time in each iteration of the event loop for the events of all workers together.",
        unit="ms",
        gt=0,
        higher="more events per second",
        lower="steadier latency of requests",
    )
    max_index_blocks: int = option(
        10_000_000,
        "Different blocks in the map; about 200 bytes each, plus 90 for each further worker with the block.",
        ge=1,
        higher="suits larger fleets",
        lower="less memory",
    )
    max_orphan_blocks: int = option(
        100_000,
        "Blocks per stream that are kept although their parent is unknown.",
        ge=0,
        higher="more blocks can find their place later",
        lower="less memory",
    )

    probe: ProbeOptions = option(default_factory=ProbeOptions)
    snapshot: SnapshotOptions = option(default_factory=SnapshotOptions)

    @field_validator("endpoint", "replay_endpoint", "topic")
    @classmethod
    def _known_fields(cls, value: str) -> str:
        try:
            value.format(host="h", id="i", rank=0)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError("only {host}, {id} and {rank} can be filled in") from error
        return value


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


_MAX_SOURCES_BYTES: Final = 1 << 20
_RANK: Final = re.compile(r"\d{1,4}", re.ASCII).fullmatch


def parse_sources(body: bytes, options: KvEventsOptions, spec: WorkerSpec) -> list[KvEventSource]:
    """Parse an answer of `/kv_event_sources` (vLLM 0.32): sources by rank, with `*` for the worker's own
    host.

    Raises ValueError if the answer has another form. Ranks without ZMQ events are left out.
    """
    check_values(body)
    try:
        page = json.loads(body)
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(page, dict):
        raise ValueError("not a map of event sources")
    if len(page) > MOST_RANKS:
        raise ValueError("too many ranks")
    host = urlsplit(spec.url).hostname or ""
    ports = {_port(endpoint): index for index, endpoint in enumerate(options.bind)}
    sources = []
    for rank, described in page.items():
        if not isinstance(described, Mapping) or described.get("publisher", "zmq") != "zmq":
            continue
        if not described.get("enable_kv_cache_events", True):
            continue
        endpoint, replay = described.get("endpoint"), described.get("replay_endpoint")
        if not isinstance(endpoint, str) or not _RANK(rank):
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
            answer = await client.get(
                spec.url + "/kv_event_sources",
                timeout=options.discovery_timeout_s,
                extensions={LIMIT: _MAX_SOURCES_BYTES},
            )
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
    scheme, separator, address = endpoint.partition("://")
    name, colon, port = address.rpartition(":")
    if scheme == "tcp" and name in _ANY_HOST:
        return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{colon}{port}"
    return endpoint


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]


def _shifted(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: vLLM adds the rank to the port."""
    head, colon, port = endpoint.rpartition(":")
    return f"{head}{colon}{int(port) + rank}" if rank and port.isdigit() else endpoint
