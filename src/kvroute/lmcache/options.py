"""Options for LMCache: kvroute as its coordinator or controller, lookups in its L2, prefetches."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator, model_validator

from kvroute.options import Options, Switch, option
from kvroute.tls import ClientTlsOptions

MAX_HASH_SEED = 2**32 - 1
"""CPython takes no larger PYTHONHASHSEED."""


class ControllerOptions(Options):
    """kvroute as the controller to which workers with LMCache's in-process connector (`enable_controller`)
    report.

    Addresses are `host:port`, as in LMCache's own configuration. With port 0 the system chooses a free port.
    """

    enabled: Annotated[bool, Switch] = option(
        False, "Act as LMCache's controller for workers with LMCache's in-process connector."
    )
    pull: str = option("127.0.0.1:8300", "Address for `controller_pull_url` of the workers.")
    reply: str = option("127.0.0.1:8400", "Address for `controller_reply_url` of the workers.")
    heartbeat: str = option(
        "127.0.0.1:8500",
        "Address for heartbeats; the controller sends it to workers that register. Empty: no heartbeats.",
    )
    advertise: str = option(
        "",
        "Host to which workers send heartbeats. Empty: the host of `heartbeat`; if that is a wildcard "
        "address, the address of the interface towards the worker.",
    )
    hash_seed: str = option(
        "0",
        "PYTHONHASHSEED of the workers. Empty: the workers have none; works only with `sha256_cbor`.",
    )
    hash_algorithm: Literal["builtin", "builtin_none", "sha256_cbor"] = option(
        "builtin",
        "`pre_caching_hash_algorithm` of the workers. `builtin_none` is `builtin` of LMCache 0.3. It needs "
        "Python 3.12 or later: on earlier versions each process computes other hashes.",
    )
    chunk_tokens: int = option(256, "`chunk_size` of the workers.", unit="tokens", ge=1)
    mismatch_prompts: int = option(
        8,
        "Number of prompts after which an instance's hashes count as different, if none of the chunks that "
        "it reports has a hash that kvroute computes.",
        ge=1,
        higher="no false alarm when the instance does not store every prompt",
        lower="a wrong seed is detected sooner",
    )
    worker_timeout_s: float = option(
        60.0,
        "A worker is removed when its heartbeats have stopped for this long. A worker that never sent one "
        "stays.",
        unit="s",
        gt=0,
        higher="workers survive longer interruptions of the network",
        lower="a dead worker's chunks are removed sooner",
    )
    sync_timeout_s: float = option(
        30.0,
        "A full synchronisation without progress for this long fails.",
        unit="s",
        gt=0,
        higher="slow workers finish",
        lower="a failed synchronisation is requested again sooner",
    )
    slice_ms: float = option(
        1.0,
        "Longest time that the event loop handles messages before it runs other work.",
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
            raise ValueError("must be a number from 0 to 4294967295, the same as the workers' PYTHONHASHSEED")
        return value

    @model_validator(mode="after")
    def _seed_where_needed(self) -> ControllerOptions:
        if not self.hash_seed and self.hash_algorithm != "sha256_cbor":
            raise ValueError("hash_seed: `builtin` hashes are random in every process without PYTHONHASHSEED")
        return self


class CoordinatorOptions(Options):
    """kvroute as the coordinator to which LMCache's multiprocess servers (0.5) report.

    The servers need `--coordinator-url` and `--coordinator-event-reporting`.
    """

    enabled: Annotated[bool, Switch] = option(
        False, "Act as LMCache's coordinator for LMCache's multiprocess servers."
    )
    listen: str = option(
        "127.0.0.1:9300", "Address to listen on, `host:port`; with port 0 the system chooses a free port."
    )
    servers: list[str] = option(
        default_factory=list,
        description="Hosts and networks, such as `10.4.0.0/16`, that LMCache's servers may register. Others "
        "may register their own address or a worker's only. Prefetches, which send prompts as token ids, go "
        "to a server at its worker's address or at one of these.",
    )
    heartbeat_timeout_s: float = option(
        30.0,
        "A server is removed when its heartbeats have stopped for this long.",
        unit="s",
        gt=0,
        higher="servers survive longer interruptions of the network",
        lower="a dead server's chunks are removed sooner",
    )
    chunk_tokens: int = option(
        256, "`--chunk-size` of servers whose `/status` does not report it.", unit="tokens", ge=1
    )
    status_interval_s: float = option(
        5.0,
        "Time between polls of `/status` of a server whose chunk size is unknown or whose map is incomplete.",
        unit="s",
        gt=0,
        higher="fewer polls",
        lower="a map that is complete again is trusted sooner",
    )
    status_timeout_s: float = option(
        2.0, "Longest wait for a server's answer to a poll.", unit="s", gt=0, higher="busy servers can answer"
    )
    server_scheme: Literal["http", "https"] = option(
        "http",
        "Scheme of the servers' HTTP ports. LMCache (0.5.6) itself serves plain HTTP; `https` is for a proxy "
        "in front of each server.",
    )
    server_tls: ClientTlsOptions = option(default_factory=ClientTlsOptions)
    rates_interval_s: float = option(
        10.0,
        "Time between polls of each server's load rates (`/metrics`). The measured rates replace the "
        "bandwidths under `routing.kvaware.tiers`. 0: no polls.",
        unit="s",
        ge=0,
        higher="fewer polls",
        lower="changes of bandwidth are detected sooner",
    )
    max_chunks: int = option(
        2_000_000,
        "Different chunks in the map; about 115 bytes each.",
        ge=1,
        higher="suits larger fleets",
        lower="less memory",
    )
    max_body_bytes: int = option(
        64 * 1024 * 1024,
        "Largest report that is accepted.",
        unit="bytes",
        ge=65_536,
        higher="larger bursts of events are accepted",
    )
    slice_ms: float = option(
        1.0,
        "Longest time that the event loop applies events before it runs other work.",
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

    @field_validator("servers")
    @classmethod
    def _hosts_and_networks(cls, value: list[str]) -> list[str]:
        for entry in value:
            if not entry or set(entry) & set(" ,@?#"):
                raise ValueError(f"{entry!r} must be a host, an address or a network such as 10.4.0.0/16")
            if "/" in entry:
                ip_network(entry)  # its ValueError names the entry and what is wrong with it
        return value

    @model_validator(mode="after")
    def _files_are_used(self) -> CoordinatorOptions:
        if self.server_tls.is_set and self.server_scheme != "https":
            raise ValueError("server_tls: has no effect unless server_scheme is https")
        return self


class L2Options(Options):
    """Lookups in the Redis in which LMCache keeps chunks: Redis evicts and expires them without an event."""

    redis_url: SecretStr | None = option(
        None,
        "Redis behind LMCache's `resp` adapter, such as `redis://:password@host:6379/0`. Empty: no lookups.",
    )
    redis_url_file: Path | None = option(None, "File with the URL of the Redis.")
    redis_password: SecretStr | None = option(None, "Password of the Redis, if the URL has none.")
    redis_password_file: Path | None = option(None, "File with the password of the Redis.")
    tls: ClientTlsOptions = option(default_factory=ClientTlsOptions)
    redis_pool: str = option(
        "resp", "The pool that lies in this Redis: an adapter's type, or a name from `lmcache.pools`."
    )
    timeout_ms: float = option(
        5.0,
        "Longest time for a request's lookups in the Redis.",
        unit="ms",
        gt=0,
        higher="answers of a slow Redis are used",
        lower="requests wait less",
    )
    remember_s: float = option(
        1.0,
        "How long an answer of the Redis is reused.",
        unit="s",
        ge=0,
        higher="fewer lookups",
        lower="chunks that Redis evicted are predicted for less time",
    )
    remember_chunks: int = option(
        100_000, "Most answers that are cached; about 150 bytes each.", ge=1, higher="fewer lookups"
    )
    connections: int = option(
        8, "Most connections to the Redis.", ge=1, le=256, higher="more lookups at a time"
    )

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None or not value.get_secret_value():
            return None
        try:
            parts = urlsplit(value.get_secret_value())
            is_supported = (
                parts.scheme in ("redis", "rediss") and bool(parts.hostname) and (parts.port or 1) > 0
            )
        except ValueError:
            is_supported = False
        if not is_supported:
            raise ValueError("must be redis://[user:password@]host[:port][/number], or rediss://")
        return value

    @property
    def uses_tls(self) -> bool:
        """Whether the Redis is reached over TLS."""
        return self.redis_url is not None and urlsplit(self.redis_url.get_secret_value()).scheme == "rediss"

    @model_validator(mode="after")
    def _files_are_used(self) -> L2Options:
        if self.tls.is_set and self.redis_url is not None and not self.uses_tls:
            raise ValueError("tls: has no effect unless redis_url starts with rediss://")
        return self


class TierdSourceOptions(Options):
    """The `kvroute tierd` daemons that workers with LMCache's in-process connector use as their second tier.

    LMCache does not report to the controller what it stores there, so kvroute asks the daemons.
    """

    urls: list[str] = option(
        default_factory=list,
        description="Addresses such as `http://tierd:9200`. At each address of the host's name a daemon is "
        "expected. Empty: entries in daemons are not predicted.",
    )
    bucket: str = option("lmcache", "Bucket of the workers' entries (`sagemaker_hyperpod_bucket`).")
    refresh_s: float = option(
        5.0,
        "Time between two resolutions of the hosts' names.",
        unit="s",
        gt=0,
        higher="fewer DNS queries",
        lower="new daemons are found sooner",
    )
    key: SecretStr | None = option(None, "The daemons' key (`--peer-key-file`), if they have one.")
    key_file: Path | None = option(None, "File with that key.")

    @field_validator("urls")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for url in value:
            try:
                parts = urlsplit(url)
                unsupported = (
                    parts.path.strip("/"),
                    parts.query,
                    parts.fragment,
                    parts.username,
                    parts.password,
                )
                is_supported = (
                    parts.scheme == "http"
                    and bool(parts.hostname)
                    and bool(parts.port)
                    and not any(unsupported)
                )
            except ValueError:
                is_supported = False
            if not is_supported:
                raise ValueError("must be http://HOST:PORT")
        return value


class PrefetchOptions(Options):
    """Prefetches: a worker's LMCache server (0.5.6 or later) loads a queued request's chunks from L2 into L1.

    kvroute sends them (`POST /cache/prefetches`) with `kvaware`, for requests of one prompt, if the expected
    wait in the worker's queue is longer than the load plus `delay_s` before and after it.
    """

    enabled: Annotated[bool, Switch] = option(
        False, "Send prefetches; needs `lmcache.coordinator.enabled`, and a gateway of one process."
    )
    delay_s: float = option(
        0.2,
        "Time between a request and its prefetch. An engine with free capacity looks up the request in "
        "LMCache at once, and would find nothing while a prefetch is loading the chunks (LMCache 0.5.6).",
        unit="s",
        ge=0,
        higher="no prefetch collides with the lookup of an engine with free capacity, even a slow one",
        lower="shorter waits can be used for prefetches",
    )
    timeout_s: float = option(
        1.0,
        "Longest wait for a server's answer to a prefetch. No client's request waits for it.",
        unit="s",
        gt=0,
        higher="busy servers can answer",
    )
    connections: int = option(
        8,
        "Most prefetches in flight.",
        ge=1,
        le=256,
        higher="a slow server delays other servers' prefetches less",
    )
    max_waiting: int = option(
        64,
        "Most prefetches in the queue. When it is full, new ones are dropped and counted.",
        ge=1,
        higher="longer bursts without dropped prefetches",
        lower="less memory",
    )


class LMCacheOptions(Options):
    """LMCache and the workers: who reports to kvroute, and which server belongs to which worker."""

    coordinator: CoordinatorOptions = option(default_factory=CoordinatorOptions)
    controller: ControllerOptions = option(default_factory=ControllerOptions)
    l2: L2Options = option(default_factory=L2Options)
    tierd: TierdSourceOptions = option(default_factory=TierdSourceOptions)
    prefetch: PrefetchOptions = option(default_factory=PrefetchOptions)
    isolate_adapters: Annotated[bool, Switch] = option(
        True,
        "Give each LoRA adapter's requests their own key space in LMCache: a `cache_salt` and a tag in "
        "`kv_transfer_params`, computed from the client's own salt, the adapter's name and the path from "
        "which the worker loaded it. Requests for other models are not changed.",
        higher="on: LMCache (0.5.6) does not serve KV of another model to an adapter",
        lower="off: requests are forwarded unchanged; with LMCache and adapters answers become wrong",
    )
    instance: str = option(
        "",
        "Instance id of a worker's LMCache server, such as `node-{host}`. It may contain `{id}` (the "
        "worker's id), `{host}` (the host of its URL) and `{node}` (the node of its pod, found through "
        "Kubernetes). Empty: the server with the worker's id, else the only server at the worker's address.",
    )
    instances: dict[str, str] = option(
        default_factory=dict,
        description="Instance ids for single workers: worker id to instance id. Takes precedence over "
        "`instance`.",
    )
    pools: dict[str, str] = option(
        default_factory=dict,
        description="Names of L2 pools that several servers share: adapter type (`resp`) or "
        "`instance/type`, to the pool's name. Adapters with `shared: true` need no entry.",
    )

    @field_validator("instance")
    @classmethod
    def _known_fields(cls, value: str) -> str:
        try:
            value.format(id="i", host="h", node="n")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError("only {id}, {host} and {node} may stand in braces") from error
        return value

    @model_validator(mode="after")
    def _servers_to_ask(self) -> LMCacheOptions:
        if self.prefetch.enabled and not self.coordinator.enabled:
            raise ValueError(
                "prefetch.enabled: only the coordinator knows which server belongs to which worker: set "
                "coordinator.enabled too"
            )
        if self.tierd.urls and not self.controller.enabled:
            raise ValueError(
                "tierd.urls: kvroute knows by the controller which workers have LMCache inside and how they "
                "name chunks: set controller.enabled too"
            )
        return self

    @model_validator(mode="after")
    def _no_empty_names(self) -> LMCacheOptions:
        for field, mapping in (("instances", self.instances), ("pools", self.pools)):
            for key, name in mapping.items():
                if not key or not name:
                    raise ValueError(f"{field}: keys and names must not be empty")
        return self
