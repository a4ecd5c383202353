"""Options for reading the workers' KV events."""

from __future__ import annotations

from typing import Annotated

from pydantic import field_validator

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
