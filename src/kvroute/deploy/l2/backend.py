"""The interface of a second cache tier: LMCache's settings for it, and the services that it needs."""

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
    """Whether a service has one instance, or one on each node."""

    ONCE = "once"
    PER_NODE = "per-node"


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A container that a tier needs. Has only settings that both compose and Kubernetes support."""

    name: str
    image: str
    command: tuple[str, ...]
    port: int
    probe: tuple[str, ...]
    """A command, run inside the container, that fails while the service is not ready."""
    memory_gb: float
    scope: Scope = Scope.ONCE
    shares_memory: bool = False
    """LMCache must see the service's POSIX shared memory."""
    metrics_path: str | None = None
    peers_flag: str = ""
    """The option for NAME:PORT of all instances, if each instance queries the others; else empty."""
    lists_changes: bool = False
    """Whether the gateway can follow which entries each instance holds (`kvroute tierd`)."""
    reconnects: bool = True
    """Whether LMCache connects again after a restart of the service."""
    local_arguments: tuple[str, ...] = ()
    """Address and port for a process of this host. Appended to `command`: of equal options, the last
    counts."""
    ready_url: str = ""
    """The URL that shows that the local process is ready (`deploy/processes.py`, `is_ready`)."""


@dataclass(frozen=True, slots=True)
class L2Tier:
    """LMCache's settings for a tier, and the services that must run for it."""

    adapter: Mapping[str, object]
    """`--l2-adapter` of LMCache's server (0.5.6)."""
    remote_url: str
    """LMCACHE_REMOTE_URL of the classic mode; empty when the classic mode does not support the tier."""
    extra_config: Mapping[str, object] = field(default_factory=dict)
    """`extra_config` of the classic mode."""
    services: tuple[ServiceSpec, ...] = ()
    host_paths: tuple[str, ...] = ()
    """Paths of the node that LMCache must see."""
    claim: str | None = None
    """A ReadWriteMany claim that replaces the first host path."""
    needs_node_ip: bool = False
    """Whether the settings contain `$(NODE_IP)`, which must then be a variable of the container."""
    password_variable: str = ""
    """The variable from which LMCache's server reads the password; empty: it reads the adapter's settings."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional variables of LMCache's server: the credentials in the address, if it has any."""
    query_url: str = ""
    """`redis://` URL without a password where the gateway can query the store's keys; empty: it cannot."""
    password: str = field(default="", repr=False)
    """The password in the address, if it has one."""


@dataclass(frozen=True, slots=True)
class L2Location:
    """Where LMCache finds a tier."""

    url: str | None
    extension: Extension
    host: str
    """The address of the service `service_name` for LMCache: the service's name, or 127.0.0.1."""
    on_hyperpod: bool
    port: int | None = None
    """The port of a service that the deployment starts; None: its default port."""


class Backend(Protocol):
    """One kind of second tier. A new kind is a module and a line in the registry."""

    name: str
    description: str
    adapter_type: str
    """The `type` of LMCache's adapter. Not every release of LMCache's server has it."""
    accepts_url: bool
    accepts_password: bool
    has_classic: bool
    service_name: str
    """The service that the deployment starts for this tier; empty when it starts none."""

    def url_problem(self, url: str) -> str:
        """Why `url` cannot be an address of the tier; empty when it can."""
        ...

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        """The fields that are missing or wrong for this tier, each with a text."""
        ...

    def describe(self, extension: Extension, url: str | None) -> str:
        """What runs for the tier, in a few words."""
        ...

    def tier(self, location: L2Location) -> L2Tier:
        """LMCache's settings and the services at this location. Pure."""
        ...


TLS_SCHEMES = ("rediss", "valkeys")
_LOGIN = re.compile(r"(?<=//)[^\s'\"]+@|(?<![\w/])[^\s/'\":]*:[^\s/'\"]+@")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a store. `password` never appears in an error."""

    host: str
    port: int
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False


def parse_address(url: str, *, schemes: tuple[str, ...], default_port: int) -> Address:
    """Parse `redis://[user:password@]host[:port][/database]`, `host[:port]` or `redis:host:port`.

    Raises ValueError. Its text says what is wrong and contains no credentials.
    """
    scheme, separator, remainder = url.partition("://")
    if not separator:
        # HyperPod's announcement writes `redis:HOST:PORT`.
        scheme, _, remainder = (
            url.partition(":") if url.partition(":")[0] in schemes else (schemes[0], "", url)
        )
    if scheme not in schemes:
        raise ValueError(f"expected {schemes[0]}://HOST:PORT, got the scheme {masked(scheme)!r}")
    parts = urlsplit(f"{scheme}://{remainder}")
    try:
        port = parts.port or default_port
    except ValueError:
        raise ValueError("the port is not a number from 1 to 65535") from None
    database = parts.path.strip("/")
    if not parts.hostname:
        raise ValueError(f"expected {schemes[0]}://HOST:PORT, found no host")
    if database and not database.isdigit():
        raise ValueError("only the number of a database may follow the port")
    return Address(
        host=parts.hostname,
        port=port,
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=int(database or 0),
        tls=scheme in TLS_SCHEMES,
    )


def masked(text: str) -> str:
    """`text` with user and password of each address replaced by stars."""
    return _LOGIN.sub("***@", text)


def has_password(url: str) -> bool:
    """Whether an address contains a password. The address may be invalid."""
    login, at, _ = url.rpartition("@")
    return bool(at) and bool(login.rpartition("//")[2].partition(":")[2])
