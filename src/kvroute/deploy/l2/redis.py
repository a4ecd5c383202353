"""Redis and Valkey as second tiers: LMCache's adapters `resp` and `valkey`."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from kvroute.deploy.l2.backend import Address, L2Location, L2Tier, ServiceSpec, parse_address
from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.source import Path

PORT = 6379
SCHEMES = ("redis",)
PASSWORD_VARIABLE = "LMCACHE_RESP_PASSWORD"
"""The variable from which the adapter reads the password (LMCache 0.5.6, l2_adapters/resp_l2_adapter.py)."""


def query_url(address: Address) -> str:
    """The address as a `redis://` URL for Redis clients, without the password."""
    scheme = "rediss" if address.tls else "redis"
    user = f"{quote(address.username, safe='')}@" if address.username else ""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{scheme}://{user}{host}:{address.port}/{address.database}"


def memory_argument(gigabytes: float) -> str:
    """The value of `--maxmemory` of Redis and Valkey."""
    return f"{round(gigabytes * 1024)}mb"


def _service(name: str, image: str, location: L2Location, *, reconnects: bool = True) -> ServiceSpec:
    """The service of a Redis or Valkey that the deployment starts. `name` begins its programs' names."""
    size_gb, port = location.extension.l2.size_gb, location.port or PORT
    return ServiceSpec(
        name=name,
        image=image,
        # Used as a cache: bounded, evicts the least recently used entries, writes nothing to disk.
        command=(
            f"{name}-server",
            *("--maxmemory", memory_argument(size_gb), "--maxmemory-policy", "allkeys-lru"),
            *("--save", "", "--appendonly", "no"),
        ),
        port=port,
        probe=(f"{name}-cli", "ping"),
        memory_gb=size_gb,
        reconnects=reconnects,
        local_arguments=("--bind", location.host, "--port", str(port)),
        ready_url=f"redis://{location.host}:{port}",
    )


class Redis:
    """One Redis for all workers: the deployment starts it, or the user names its URL."""

    name = "redis"
    description = "Redis"
    adapter_type = "resp"
    accepts_url = True
    accepts_password = True
    has_classic = True
    service_name = "redis"

    def url_problem(self, url: str) -> str:
        try:
            address = parse_address(url, schemes=(*SCHEMES, "rediss"), default_port=PORT)
        except ValueError as exc:
            return str(exc)
        if address.tls:
            return "LMCache's adapter does not support TLS to Redis (rediss://); the backend valkey does"
        if address.database:
            return "LMCache's adapter uses database 0 only"
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        return ()

    def describe(self, extension: Extension, url: str | None) -> str:
        if url is not None:
            return "Redis at l2CacheLocalUrl"
        return f"a new Redis of {extension.l2.size_gb:g} GB, which evicts the least recently used entries"

    def tier(self, location: L2Location) -> L2Tier:
        port = location.port or PORT
        url = location.url or f"redis://{location.host}:{port}"
        address = parse_address(url, schemes=SCHEMES, default_port=PORT)
        adapter: dict[str, object] = {"type": self.adapter_type, "host": address.host, "port": address.port}
        if address.username:
            adapter["username"] = address.username
        user = f"{address.username}:{address.password}@" if address.password else ""
        return L2Tier(
            adapter={**adapter, "shared": True},
            # Not on a command line, which every user of the host can read.
            password_variable=PASSWORD_VARIABLE,
            environment={PASSWORD_VARIABLE: address.password} if address.password else {},
            query_url=query_url(address),
            password=address.password,
            remote_url=f"redis://{user}{address.host}:{address.port}",
            # After a lost connection, LMCache's own client (0.5.6) stores and finds nothing.
            services=()
            if location.url
            else (_service(self.name, location.extension.images.redis, location, reconnects=False),),
        )


VALKEY_SCHEMES = ("valkey", "valkeys")


class Valkey:
    """One Valkey for all workers: the deployment starts it, or the user names its URL."""

    name = "valkey"
    description = "Valkey"
    adapter_type = "valkey"
    accepts_url = True
    accepts_password = True
    has_classic = True
    service_name = "valkey"

    def url_problem(self, url: str) -> str:
        try:
            parse_address(url, schemes=VALKEY_SCHEMES, default_port=PORT)
        except ValueError as exc:
            return str(exc)
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        return ()

    def describe(self, extension: Extension, url: str | None) -> str:
        if url is not None:
            return "Valkey at l2CacheLocalUrl"
        return f"a new Valkey of {extension.l2.size_gb:g} GB, which evicts the least recently used entries"

    def tier(self, location: L2Location) -> L2Tier:
        port = location.port or PORT
        url = location.url or f"valkey://{location.host}:{port}"
        address = parse_address(url, schemes=VALKEY_SCHEMES, default_port=PORT)
        adapter: dict[str, object] = {
            "type": self.adapter_type,
            "startup_nodes": f"{address.host}:{address.port}",
            "cluster_mode": False,
        }
        login = {"username": address.username, "password": address.password}
        adapter |= {key: value for key, value in login.items() if value}
        if address.database:
            adapter["database_id"] = address.database
        if address.tls:
            adapter["tls_enable"] = True
        user = f"{address.username}:{address.password}@" if address.password else ""
        return L2Tier(
            adapter={**adapter, "shared": True},
            query_url=query_url(address),
            password=address.password,
            remote_url=f"valkey://{user}{address.host}:{address.port}",
            services=()
            if location.url
            else (_service(self.name, location.extension.images.valkey, location),),
        )
