"""What can be set about reading the workers' KV events."""

from __future__ import annotations

from typing import Annotated

from pydantic import field_validator

from kvroute.options import Options, Switch, option


class ProbeOptions(Options):
    """Requests of our own that make a worker announce again what it holds (vLLM 0.32 and later), after
    events were lost or where blocks could not be placed."""

    enabled: Annotated[bool, Switch] = option(True, "Send them.")
    interval_s: float = option(
        5.0,
        "Least time between two of them to one worker.",
        unit="s",
        gt=0,
        higher="less work for the workers",
        lower="a map is whole again sooner",
    )
    max_in_flight: int = option(
        0,
        "Only while the worker has at most this many requests of ours.",
        ge=0,
        higher="a busy worker's map is repaired too",
        lower="no request waits for a probe",
    )
    max_prompt_tokens: int = option(
        32_768,
        "Longest prompt of one; of longer ones the beginning is asked for.",
        unit="tokens",
        ge=1,
        higher="long conversations are repaired whole",
        lower="less to compute where the worker holds nothing of it any more",
    )
    memory_tokens: int = option(
        1_000_000,
        "Recent prompts kept per stream to ask with, 4 bytes or more a token; 0: none.",
        unit="tokens",
        ge=0,
        higher="more can be repaired",
        lower="less memory",
    )
    timeout_s: float = option(30.0, "Longest wait for the answer to one.", unit="s", gt=0)


class SnapshotOptions(Options):
    """The map as a file, so that a restart of the gateway need not learn it anew. Used for workers of the
    same incarnation whose replay reaches back to where it ended."""

    path: str = option("", "File to write and to begin with; empty: none.")
    interval_s: float = option(
        300.0,
        "Time between two writings; one more at shutdown.",
        unit="s",
        gt=0,
        higher="less work",
        lower="after a crash the file is less likely to be too old",
    )


class KvEventsOptions(Options):
    """Where the workers publish their KV events, and how they are followed.

    Endpoint templates may use `{host}` (of the worker's URL), `{id}` (of the worker) and `{rank}`.
    """

    endpoint: str = option(
        "",
        "Where a worker publishes, such as `tcp://{host}:5557`; empty: ask its `/kv_event_sources` (vLLM "
        "0.27 and later). The data-parallel rank is added to the port, as vLLM does.",
    )
    replay_endpoint: str = option(
        "", "Its replay socket, such as `tcp://{host}:5657`; empty with `endpoint` set: it has none."
    )
    topic: str = option(
        "",
        "Topic that a worker publishes under where workers connect to us, such as `kv@{host}`; empty: the "
        "one that it names itself.",
    )
    ranks: int = option(1, "Data-parallel ranks of a worker that does not tell.", ge=1, le=64)
    bind: tuple[str, ...] = option(
        (),
        "Where we listen for workers that connect to us (`tcp://*:5557`), one endpoint per data-parallel "
        "rank; workers are then told apart by topic.",
    )
    idle_check_s: float = option(
        2.0,
        "A stream that is quiet for this long is asked whether something was missed.",
        unit="s",
        gt=0,
        higher="fewer questions to idle workers",
        lower="the loss of a last message, or a restart of an idle worker, is noticed sooner",
    )
    replay_timeout_s: float = option(
        2.0,
        "Longest wait for the next message of a replay.",
        unit="s",
        gt=0,
        higher="a busy worker is not given up",
        lower="a gap that cannot be filled is noticed sooner",
    )
    replay_attempts: int = option(
        3,
        "Replays that may fail before the worker's map is dropped and begun anew.",
        ge=1,
        higher="bridges longer interruptions",
        lower="false beliefs end sooner",
    )
    discovery_timeout_s: float = option(
        2.0, "Longest wait for `/kv_event_sources`.", unit="s", gt=0, higher="suits slow workers"
    )
    retry_s: float = option(
        1.0, "Pause before asking again, or reopening a socket.", unit="s", gt=0, higher="fewer attempts"
    )
    reread_s: float = option(
        60.0,
        "Least time between two readings of a map that was distrusted.",
        unit="s",
        gt=0,
        higher="less work where the cause is not in the map",
        lower="a wrong map is replaced sooner",
    )
    silent_requests: int = option(
        8,
        "A worker's map is not used after this many answers that must have stored blocks and were asked for "
        "after its last event; until its next one.",
        ge=1,
        higher="fewer false alarms",
        lower="noticed sooner",
    )
    silent_s: float = option(
        5.0,
        "And only once there has been no event for this long.",
        unit="s",
        gt=0,
        higher="fewer false alarms",
        lower="noticed sooner",
    )
    queue_messages: int = option(
        100_000,
        "Messages that may wait to be read, per stream; further ones are lost and replayed.",
        ge=1,
        higher="bridges longer bursts",
        lower="less memory",
    )
    slice_ms: float = option(
        0.5,
        "Longest time spent on the events of all workers in one go before other work gets its turn.",
        unit="ms",
        gt=0,
        higher="more events per second",
        lower="steadier latency of requests",
    )
    max_index_blocks: int = option(
        10_000_000,
        "Different blocks in the map; about 200 bytes each, plus 90 for each further worker that holds it.",
        ge=1,
        higher="suits larger fleets",
        lower="less memory",
    )
    max_aside_blocks: int = option(
        100_000,
        "Blocks per stream kept although their parent is unknown.",
        ge=0,
        higher="more can be placed later",
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
