"""Options of the daemon."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, SecretStr, model_validator

from kvroute.options import Options, option
from kvroute.tierd.pool import PAGE_BYTES

GB = 1 << 30
MB = 1 << 20


def _origin(value: str) -> str:
    """`http://HOST:PORT`, without a trailing slash."""
    if not re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[^/:@\[\]\s]+)(:\d{1,5})?/?", value):
        raise ValueError(f"{value!r} is not the address of a daemon: use http://HOST:PORT")
    return value.rstrip("/")


def _host_and_port(value: str) -> str:
    if not re.fullmatch(r"[^/:@\[\]\s]+:\d{1,5}", value):
        raise ValueError(f"{value!r} is not NAME:PORT")
    return value


class PeerOptions(Options):
    """Addresses of the other nodes' daemons, and timeouts for their answers."""

    urls: tuple[Annotated[str, AfterValidator(_origin)], ...] = option(
        (), "Addresses of other daemons; this daemon's own address may be among them."
    )
    dns: Annotated[str, AfterValidator(_host_and_port)] | None = option(
        None, "NAME:PORT; a daemon is expected at each address to which the name resolves."
    )
    refresh_s: float = option(10.0, "Time between two resolutions of the name.", unit="s", gt=0)
    answer_timeout_s: float = option(
        0.25,
        "How long a peer may take to answer whether it has an object.",
        unit="s",
        higher="slow peers can answer; misses take longer while a peer hangs",
        lower="misses are answered sooner",
        gt=0,
    )
    fetch_timeout_s: float = option(5.0, "How long fetching one object may take.", unit="s", gt=0)
    questions: int = option(
        64,
        "Searches at the same time; further searches wait.",
        higher="more load on the peers when many objects are searched for at the same time",
        ge=1,
    )
    rest_s: float = option(5.0, "How long a peer is not queried after a failure.", unit="s", ge=0)
    key: SecretStr | None = option(
        None, "Key that peers must present to read objects, and that this daemon presents to peers."
    )


class TierdOptions(Options):
    """Options of the whole daemon."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(9200, "Port; 0 takes a free one.", ge=0, le=65535)
    shared_memory_name: str = option("kvroute_tierd", "Name of the POSIX shared memory segment.")
    shared_memory_mode: int = option(
        0o644, "Permissions of the segment: LMCache's server must be able to read it.", ge=0, le=0o777
    )
    size_gb: float = option(4.0, "Memory for entries, reserved at the start.", unit="GB", gt=0)
    disk_dir: Path | None = option(None, "Directory for entries that do not fit into memory.")
    disk_gb: float = option(0.0, "Largest total size of the files in that directory.", unit="GB", ge=0)
    spare_share: float = option(
        0.25,
        "Share of memory that is kept free, or whose entries are already on the disk.",
        higher="larger bursts of new entries lose nothing; more is written to the disk",
        lower="less is written to the disk",
        ge=0,
        le=1,
    )
    room_timeout_s: float = option(
        1.0,
        "How long a new entry waits for disk writes before an entry that is not on the disk is evicted.",
        unit="s",
        ge=0,
    )
    longest_lease_s: float = option(300.0, "Longest lifetime of a lease.", unit="s", gt=0)
    holds_misses: bool = option(
        False,
        "Let a lease of an unknown object wait, too, for as long as the client allows.",
        higher="a reader may come before the writer; each miss costs the client its whole timeout",
        lower="misses are answered immediately",
    )
    stall_timeout_s: float = option(
        10.0, "How long a client may pause in the middle of a request.", unit="s", gt=0
    )
    put_grace_s: float = option(
        5.0,
        "Time from the start of a new entry during which its average rate is not checked.",
        unit="s",
        ge=0,
    )
    put_least_rate: float = option(
        256 * 1024,
        "Least average rate of a new entry after that time; slower connections are closed.",
        unit="bytes/s",
        higher="a slow sender holds memory for a shorter time",
        lower="slower senders are served",
        ge=0,
    )
    put_step_mb: float = option(
        1.0,
        "Memory that a new entry reserves at first; each time this is full, the reservation doubles.",
        unit="MB",
        higher="entries have fewer pieces; senders that stop hold more memory",
        lower="senders that stop hold less memory",
        gt=0,
    )
    peers: PeerOptions = option(description="The other daemons.", default_factory=PeerOptions)

    @property
    def size_bytes(self) -> int:
        """The pool's size in bytes: whole pages."""
        return int(self.size_gb * GB) // PAGE_BYTES * PAGE_BYTES

    @property
    def put_step_bytes(self) -> int:
        """Bytes of one reservation step: whole pages, at least the 64 KB that can come with a request's
        head."""
        return max(int(self.put_step_mb * MB) // PAGE_BYTES * PAGE_BYTES, 64 << 10)

    @model_validator(mode="after")
    def _fits_together(self) -> TierdOptions:
        if self.size_bytes == 0:
            raise ValueError("size_gb: less than a page of memory")
        if (self.disk_dir is None) != (self.disk_gb == 0):
            raise ValueError("disk_dir and disk_gb must be set together")
        return self
