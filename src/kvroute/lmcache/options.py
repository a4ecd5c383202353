"""What can be set about LMCache: being the coordinator or controller it reports to, and asking its L2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator, model_validator

from kvroute.options import Options, Switch, option

MAX_HASH_SEED = 2**32 - 1
"""CPython takes no larger PYTHONHASHSEED."""


class ControllerOptions(Options):
    """Where workers with LMCache's in-process connector (`enable_controller`) report what they hold.

    Addresses are `host:port`, as in LMCache's own configuration; port 0 lets the system choose.
    """

    enabled: Annotated[bool, Switch] = option(False, "Be the controller that such workers report to.")
    pull: str = option("127.0.0.1:8300", "Address for `controller_pull_url` of the workers.")
    reply: str = option("127.0.0.1:8400", "Address for `controller_reply_url` of the workers.")
    heartbeat: str = option(
        "127.0.0.1:8500", "Address for heartbeats; workers learn it when they register. Empty: none."
    )
    advertise: str = option(
        "",
        "Host that workers are told to send heartbeats to; empty: the one that is bound, and where that is "
        "all of them, the one that faces the worker.",
    )
    hash_seed: str = option(
        "0",
        "PYTHONHASHSEED of the workers. Empty: they have none, which only `sha256_cbor` can do without.",
    )
    hash_algorithm: Literal["builtin", "builtin_none", "sha256_cbor"] = option(
        "builtin",
        "`pre_caching_hash_algorithm` of the workers. `builtin_none` is `builtin` of LMCache 0.3 (on Python "
        "3.12 or later: before, no two of its processes agree).",
    )
    chunk_tokens: int = option(256, "`chunk_size` of the workers.", unit="tokens", ge=1)
    mismatch_prompts: int = option(
        8,
        "Prompts sent to an instance that reports chunks, none of them ours, before its hashes are said not "
        "to agree.",
        ge=1,
        higher="no false alarm when prompts are not stored",
        lower="a wrong seed is noticed sooner",
    )
    worker_timeout_s: float = option(
        60.0,
        "A worker whose heartbeats end is forgotten after this time. One that never sent any is kept.",
        unit="s",
        gt=0,
        higher="bridges longer interruptions",
        lower="a dead worker's chunks are forgotten sooner",
    )
    sync_timeout_s: float = option(
        30.0,
        "A full synchronisation that makes no progress for this long is given up.",
        unit="s",
        gt=0,
        higher="suits slow workers",
        lower="is asked for again sooner",
    )
    slice_ms: float = option(
        1.0,
        "Longest time spent on messages in one go before other work gets its turn.",
        unit="ms",
        gt=0,
        le=2,
        higher="more messages per second",
        lower="steadier latency of requests",
    )

    @field_validator("pull", "reply", "heartbeat")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        plain = (host.startswith("[") and host.endswith("]")) or not set(host) & set(":/")
        if value and not (colon and host and plain and port.isdecimal() and int(port) <= 65535):
            raise ValueError("must be host:port, without a scheme")
        return value

    @field_validator("hash_seed")
    @classmethod
    def _seed(cls, value: str) -> str:
        if value and not (value.isascii() and value.isdecimal() and int(value) <= MAX_HASH_SEED):
            raise ValueError(
                "must be a number from 0 to 4294967295, written as the workers' PYTHONHASHSEED is"
            )
        return value

    @model_validator(mode="after")
    def _seed_where_needed(self) -> ControllerOptions:
        if not self.hash_seed and self.hash_algorithm != "sha256_cbor":
            raise ValueError("hash_seed: `builtin` hashes are random in every process without PYTHONHASHSEED")
        return self


class CoordinatorOptions(Options):
    """Where LMCache's multiprocess servers (0.5) report what they hold (`--coordinator-url` of the servers,
    with `--coordinator-event-reporting`)."""

    enabled: Annotated[bool, Switch] = option(False, "Be the coordinator that such servers report to.")
    listen: str = option(
        "127.0.0.1:9300", "Address to listen on, `host:port`; port 0 lets the system choose."
    )
    heartbeat_timeout_s: float = option(
        30.0,
        "A server whose heartbeats end is forgotten after this time.",
        unit="s",
        gt=0,
        higher="bridges longer interruptions",
        lower="a dead server's chunks are forgotten sooner",
    )
    chunk_tokens: int = option(
        256, "`--chunk-size` of servers that do not tell it when asked (`/status`).", unit="tokens", ge=1
    )
    status_interval_s: float = option(
        5.0,
        "Pause between questions to a server (`/status`) whose chunk size is not known or whose events were "
        "lost.",
        unit="s",
        gt=0,
        higher="fewer questions",
        lower="a map that is whole again is believed sooner",
    )
    status_timeout_s: float = option(
        2.0, "Longest wait for such an answer.", unit="s", gt=0, higher="suits busy servers"
    )
    rates_interval_s: float = option(
        10.0,
        "Pause between questions to each server how fast it loads (`/metrics`): that takes the place of the "
        "bandwidths under `routing.kvaware.tiers`. 0: never.",
        unit="s",
        ge=0,
        higher="fewer questions",
        lower="changes of bandwidth are noticed sooner",
    )
    max_chunks: int = option(
        2_000_000,
        "Different chunks in the map; about 115 bytes each.",
        ge=1,
        higher="suits larger fleets",
        lower="less memory",
    )
    max_body_bytes: int = option(
        64 * 1024 * 1024, "Largest report taken.", unit="bytes", ge=65_536, higher="takes in larger bursts"
    )
    slice_ms: float = option(
        1.0,
        "Longest time spent on events in one go before other work gets its turn.",
        unit="ms",
        gt=0,
        le=2,
        higher="more events per second",
        lower="steadier latency of requests",
    )

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) <= 65535):
            raise ValueError("must be host:port")
        return value


class L2Options(Options):
    """Asking a Redis that LMCache keeps chunks in what it has: it evicts and expires them without a word."""

    redis_url: SecretStr | None = option(
        None,
        "Redis behind LMCache's `resp` adapter, such as `redis://:password@host:6379/0`; empty: not asked.",
    )
    redis_url_file: Path | None = option(None, "File that holds that URL.")
    redis_password: SecretStr | None = option(None, "Its password, where the URL has none.")
    redis_password_file: Path | None = option(None, "File that holds that password.")
    redis_pool: str = option(
        "resp", "Which pool lies in that Redis: the adapter's type, or a name from `lmcache.pools`."
    )
    deadline_ms: float = option(
        5.0,
        "Longest wait for its answers, per request.",
        unit="ms",
        gt=0,
        higher="a slow Redis still counts",
        lower="requests are not held up",
    )
    remember_s: float = option(
        1.0,
        "How long an answer is believed without asking again.",
        unit="s",
        ge=0,
        higher="fewer questions",
        lower="what Redis evicted is forgotten sooner",
    )
    remember_chunks: int = option(
        100_000, "Answers that are kept; about 150 bytes each.", ge=1, higher="fewer questions"
    )
    connections: int = option(8, "Connections to it at most.", ge=1, le=256, higher="more requests at a time")

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        try:
            parts = urlsplit(value.get_secret_value())
            known = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            known = False
        if not known:
            raise ValueError("must be redis://[user:password@]host[:port][/number], or rediss://")
        return value


class PrefetchOptions(Options):
    """Having a worker's LMCache server (0.5.6 or later) load a request's chunks from L2 into L1 while the
    request waits in the worker's queue (`POST /cache/prefetches`): with `kvaware`, for requests of one
    prompt, where the expected wait is longer than the load and `delay_s` before and after it."""

    enabled: Annotated[bool, Switch] = option(
        False, "Do so; needs `lmcache.coordinator.enabled`, and a gateway of one process."
    )
    delay_s: float = option(
        0.2,
        "Time from sending a request to asking for its chunks. An engine that has room looks into LMCache at "
        "once, and would find nothing if the chunks came at that moment (LMCache 0.5.6).",
        unit="s",
        ge=0,
        higher="an engine that looks at once is left alone, also where it is slow to look",
        lower="shorter waits are used too",
    )
    timeout_s: float = option(
        1.0,
        "Longest wait for a server's answer; no request waits for it.",
        unit="s",
        gt=0,
        higher="suits busy servers",
    )
    connections: int = option(
        8, "Questions under way at a time.", ge=1, le=256, higher="a slow server delays the others' less"
    )
    max_waiting: int = option(
        64,
        "Questions that wait for their turn; further ones are dropped and counted.",
        ge=1,
        higher="bridges longer bursts",
        lower="less memory",
    )


class LMCacheOptions(Options):
    """LMCache beside the workers: who reports what, and which server belongs to which worker."""

    coordinator: CoordinatorOptions = option(default_factory=CoordinatorOptions)
    controller: ControllerOptions = option(default_factory=ControllerOptions)
    l2: L2Options = option(default_factory=L2Options)
    prefetch: PrefetchOptions = option(default_factory=PrefetchOptions)
    isolate_adapters: Annotated[bool, Switch] = option(
        True,
        "Give each LoRA adapter's requests a key space of its own in LMCache: a `cache_salt` and a tag in "
        "`kv_transfer_params`, made of the client's own salt, the adapter's name and the path it was loaded "
        "from. Requests for other models are not changed.",
        higher="on: LMCache (0.5.6) does not serve an adapter what another model computed",
        lower="off: requests stay as they came; with LMCache and adapters answers become wrong",
    )
    instance: str = option(
        "",
        "Instance id of a worker's LMCache server, such as `node-{host}`; may use `{id}` (of the worker), "
        "`{host}` (of its URL) and `{node}` (that its pod runs on, found through Kubernetes). Empty: the "
        "server whose id is the worker's, else the only one at its address.",
    )
    instances: dict[str, str] = option(
        default_factory=dict, description="The same for single workers: worker id to instance id."
    )
    pools: dict[str, str] = option(
        default_factory=dict,
        description="L2 adapters that several servers use together: adapter type (`resp`), or "
        "`instance/type`, to a name of the pool. Adapters with `shared: true` need no entry.",
    )

    @field_validator("instance")
    @classmethod
    def _known_fields(cls, value: str) -> str:
        try:
            value.format(id="i", host="h", node="n")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError("only {id}, {host} and {node} can be filled in") from error
        return value

    @model_validator(mode="after")
    def _servers_to_ask(self) -> LMCacheOptions:
        if self.prefetch.enabled and not self.coordinator.enabled:
            raise ValueError(
                "prefetch.enabled: which server is whose is known to the coordinator only: set "
                "coordinator.enabled too"
            )
        return self

    @model_validator(mode="after")
    def _no_empty_names(self) -> LMCacheOptions:
        for field, mapping in (("instances", self.instances), ("pools", self.pools)):
            for key, name in mapping.items():
                if not key or not name:
                    raise ValueError(f"{field}: neither a key nor a name may be empty")
        return self
