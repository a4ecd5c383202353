"""Second tiers that need no server of their own: a folder, an S3 bucket, Mooncake."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.deploy.l2.backend import L2Location, L2Tier, ServiceSpec
from kvroute.deploy.spec.extension import Extension, FileStore, MooncakeStore
from kvroute.deploy.spec.source import Path


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


PORT = 50051


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
        master = (location.url or f"{location.host}:{location.port or PORT}").removeprefix("mooncake://")
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
            services=() if location.url else (self._master(location, location.port or PORT),),
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
