"""What can be set about being the controller of LMCache's in-process connector."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import field_validator, model_validator

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
