"""What a second cache tier is to LMCache and to a deployment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol
from urllib.parse import unquote, urlsplit

from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.source import Path


class Scope(Enum):
    """How many instances of a service there are."""

    ONCE = "once"
    PER_NODE = "per-node"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A container that a tier needs, as plain as compose and Kubernetes have in common."""

    name: str
    image: str
    command: tuple[str, ...]
    port: int
    probe: tuple[str, ...]
    """A command inside the container that fails while the service is not ready."""
    memory_gb: float
    scope: Scope = Scope.ONCE
    shares_memory: bool = False
    """Its POSIX shared memory must be visible to LMCache."""
    metrics_path: str | None = None
    peers_flag: str = ""
    """The option that takes NAME:PORT of all of its instances, where each is to ask the others."""
    reconnects: bool = True
    """Whether LMCache connects anew after it has been restarted."""
    local_arguments: tuple[str, ...] = ()
    """Its address and port as a process of this host, after `command`: of an option, the last counts."""
    ready_url: str = ""
    """What says there that it is ready (`deploy/processes.py`)."""


@dataclass(frozen=True, slots=True)
class L2Tier:
    """LMCache's settings for a tier and what must run for it."""

    adapter: Mapping[str, object]
    """`--l2-adapter` of LMCache's server (0.5.6)."""
    remote_url: str
    """LMCACHE_REMOTE_URL of the classic mode; empty when that has no such tier."""
    extra_config: Mapping[str, object] = field(default_factory=dict)
    """`extra_config` of the classic mode."""
    services: tuple[ServiceSpec, ...] = ()
    host_paths: tuple[str, ...] = ()
    """Paths of the node that LMCache must see."""
    claim: str | None = None
    """A ReadWriteMany claim for the first host path, in its place."""
    needs_node_ip: bool = False
    """The settings name `$(NODE_IP)`, which a container must have in its environment."""
    password_variable: str = ""
    """What LMCache's server reads the password from; empty: only from its adapter's settings."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More of LMCache's server's environment: credentials of an address that has them."""
    query_url: str = ""
    """`redis://` URL, without a password, where it can be asked what it holds; empty: it cannot."""
    password: str = field(default="", repr=False)
    """Of an address that has one."""


@dataclass(frozen=True, slots=True)
class L2Location:
    """Where a tier is looked for."""

    url: str | None
    extension: Extension
    host: str
    """The address of `service_name` as LMCache sees it: a service's name, or 127.0.0.1."""
    on_hyperpod: bool
    port: int | None = None
    """Where a service of its own listens; None: its usual port."""


class Backend(Protocol):
    """One kind of second tier. A new one is a module and a line in the registry."""

    name: str
    description: str
    accepts_url: bool
    accepts_password: bool
    has_classic: bool
    service_name: str
    """The service that comes up by itself; empty when there is none."""

    def url_problem(self, url: str) -> str:
        """Why this is not an address of the tier; empty when it is one."""
        ...

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        """Fields without which the tier cannot be used."""
        ...

    def describe(self, extension: Extension, url: str | None) -> str:
        """What the tier becomes, in a few words."""
        ...

    def tier(self, setting: L2Location) -> L2Tier:
        """The settings; pure."""
        ...


TLS_SCHEMES = ("rediss", "valkeys")
_LOGIN = re.compile(r"(?<=//)[^\s'\"]+@|(?<![\w/])[^\s/'\":]*:[^\s/'\"]+@")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is. `password` never goes into an error."""

    host: str
    port: int
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False


def parse_address(url: str, *, schemes: tuple[str, ...], default_port: int) -> Address:
    """Read `redis://[user:password@]host[:port][/database]`, `host[:port]` or `redis:host:port`.

    Raises ValueError with what is wrong; the text has no credentials.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        # HyperPod's announcement writes `redis:HOST:PORT`.
        scheme, _, rest = url.partition(":") if url.partition(":")[0] in schemes else (schemes[0], "", url)
    if scheme not in schemes:
        raise ValueError(f"expected {schemes[0]}://HOST:PORT, got the scheme {masked(scheme)!r}")
    parts = urlsplit(f"{scheme}://{rest}")
    try:
        port = parts.port or default_port
    except ValueError:
        raise ValueError("the port is not a number from 1 to 65535") from None
    database = parts.path.strip("/")
    if not parts.hostname:
        raise ValueError(f"expected {schemes[0]}://HOST:PORT, found no host")
    if database and not database.isdigit():
        raise ValueError("what follows the port is a database's number")
    return Address(
        host=parts.hostname,
        port=port,
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=int(database or 0),
        tls=scheme in TLS_SCHEMES,
    )


def masked(text: str) -> str:
    """`text` with stars for the user and password of any address in it."""
    return _LOGIN.sub("***@", text)


def has_password(url: str) -> bool:
    """Whether an address, right or wrong, has a password in it."""
    login, at, _ = url.rpartition("@")
    return bool(at) and bool(login.rpartition("//")[2].partition(":")[2])
