"""Second tiers of LMCache's own adapters.

Redis and Valkey (`resp`, `valkey`), and those that need no server of their own: a folder, an S3 bucket,
Mooncake.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from kvroute.deploy.l2.backend import Address, L2Location, L2Tier, ServiceSpec, parse_address
from kvroute.deploy.spec.extension import Extension, FileStore, MooncakeStore
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


class FileSystem:
    """A folder that every LMCache server sees: a node's disk, or a shared file system (adapter `fs`)."""

    name = "fs"
    description = "a folder"
    adapter_type = "fs"
    accepts_url = False
    accepts_password = False
    has_classic = True
    service_name = ""

    def url_problem(self, url: str) -> str:
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        store = extension.l2.fs or FileStore()
        if not store.path.startswith("/"):
            return ((("x-kvroute", "l2", "fs", "path"), "must be an absolute path"),)
        return ()

    def describe(self, extension: Extension, url: str | None) -> str:
        store = extension.l2.fs or FileStore()
        return f"the folder {store.path}" + (
            f" of the claim {store.claim}" if store.claim else " of the node"
        )

    def tier(self, location: L2Location) -> L2Tier:
        store = location.extension.l2.fs or FileStore()
        return L2Tier(
            adapter={"type": self.adapter_type, "base_path": store.path, "shared": store.claim is not None},
            remote_url=f"fs://localhost:0{store.path}",
            host_paths=(store.path,),
            claim=store.claim,
        )


class S3:
    """An S3 bucket, or a store with the S3 protocol (adapter `s3`)."""

    name = "s3"
    description = "an S3 bucket"
    adapter_type = "s3"
    accepts_url = False
    accepts_password = False
    has_classic = True
    service_name = ""

    def url_problem(self, url: str) -> str:
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        if extension.l2.s3 is None:
            return ((("x-kvroute", "l2", "s3"), "is required for l2CacheBackend: s3 (endpoint and region)"),)
        return ()

    def describe(self, extension: Extension, url: str | None) -> str:
        return f"the bucket {extension.l2.s3.endpoint}" if extension.l2.s3 else self.description

    def tier(self, location: L2Location) -> L2Tier:
        store = location.extension.l2.s3
        if store is None:
            raise ValueError("x-kvroute.l2.s3 is not given")
        return L2Tier(
            adapter={
                "type": self.adapter_type,
                "s3_endpoint": store.endpoint,
                "s3_region": store.region,
                "shared": True,
            },
            remote_url=store.endpoint if "://" in store.endpoint else f"s3://{store.endpoint}",
            extra_config={"s3_region": store.region},
        )


MOONCAKE_PORT = 50051


class Mooncake:
    """Mooncake with a master that the deployment starts, or the master at `mooncake://HOST:PORT`."""

    name = "mooncake"
    description = "Mooncake"
    adapter_type = "mooncake_store"
    accepts_url = True
    accepts_password = False
    has_classic = False
    service_name = "mooncake-master"

    def url_problem(self, url: str) -> str:
        host, separator, port = url.removeprefix("mooncake://").rpartition(":")
        return "" if host and separator and port.isdigit() else "expected mooncake://HOST:PORT of the master"

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        return ()

    def describe(self, extension: Extension, url: str | None) -> str:
        return "Mooncake with the master at l2CacheLocalUrl" if url else "Mooncake with a new master"

    def tier(self, location: L2Location) -> L2Tier:
        store = location.extension.l2.mooncake or MooncakeStore()
        master = (location.url or f"{location.host}:{location.port or MOONCAKE_PORT}").removeprefix(
            "mooncake://"
        )
        return L2Tier(
            adapter={
                "type": self.adapter_type,
                "master_server_address": master,
                "metadata_server": store.metadata_server or "P2PHANDSHAKE",
                "protocol": store.protocol,
                "device_name": store.device_name,
                "global_segment_size": str(round(store.segment_gb * 1024**3)),
                "shared": True,
            },
            remote_url="",
            services=() if location.url else (self._master(location, location.port or MOONCAKE_PORT),),
        )

    def _master(self, location: L2Location, port: int) -> ServiceSpec:
        return ServiceSpec(
            name=self.service_name,
            image=location.extension.images.mooncake,
            command=("mooncake_master", f"--rpc_port={port}"),
            port=port,
            probe=("sh", "-c", f"grep -q ':{port:04X} ' /proc/net/tcp /proc/net/tcp6"),
            memory_gb=1.0,
            ready_url=f"tcp://{location.host}:{port}",
        )
