"""Mooncake's store: adapter `mooncake_store`. The memory is the LMCache servers' own."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.deploy.l2.backend import ServiceSpec, Setting, Tier
from kvroute.deploy.spec.extension import Extension, MooncakeStore
from kvroute.deploy.spec.fields import Path

PORT = 50051


class Mooncake:
    """One master for all; or the one behind a URL, `mooncake://HOST:PORT`."""

    name = "mooncake"
    says = "Mooncake"
    takes_url = True
    takes_password = False
    has_classic = False
    service_name = "mooncake-master"

    def url_problem(self, url: str) -> str:
        host, separator, port = url.removeprefix("mooncake://").rpartition(":")
        return "" if host and separator and port.isdigit() else "expected mooncake://HOST:PORT of the master"

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        return ()

    def what_runs(self, extension: Extension, url: str | None) -> str:
        return "Mooncake behind the master at l2CacheLocalUrl" if url else "Mooncake with a master of its own"

    def tier(self, setting: Setting) -> Tier:
        store = setting.extension.l2.mooncake or MooncakeStore()
        master = (setting.url or f"{setting.host}:{setting.port or PORT}").removeprefix("mooncake://")
        return Tier(
            adapter={
                "type": "mooncake_store",
                "master_server_address": master,
                "metadata_server": store.metadata_server or "P2PHANDSHAKE",
                "protocol": store.protocol,
                "device_name": store.device_name,
                "global_segment_size": str(round(store.segment_gb * 1024**3)),
                "shared": True,
            },
            remote_url="",
            services=() if setting.url else (self._master(setting, setting.port or PORT),),
        )

    def _master(self, setting: Setting, port: int) -> ServiceSpec:
        return ServiceSpec(
            name=self.service_name,
            image=setting.extension.images.mooncake,
            command=("mooncake_master", f"--rpc_port={port}"),
            port=port,
            probe=("sh", "-c", f"grep -q ':{port:04X} ' /proc/net/tcp /proc/net/tcp6"),
            memory_gb=1.0,
            ready_url=f"tcp://{setting.host}:{port}",
        )
