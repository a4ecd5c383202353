"""Valkey: LMCache's adapter `valkey`, which also speaks TLS and to clusters."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.deploy.l2.address import parse_address
from kvroute.deploy.l2.backend import ServiceSpec, Setting, Tier
from kvroute.deploy.l2.redis import PORT, asked_at, memory_argument
from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.fields import Path

SCHEMES = ("valkey", "valkeys")


class Valkey:
    """One Valkey for all workers, or the one behind a URL."""

    name = "valkey"
    says = "Valkey"
    takes_url = True
    takes_password = True
    has_classic = True
    service_name = "valkey"

    def url_problem(self, url: str) -> str:
        try:
            parse_address(url, schemes=SCHEMES, default_port=PORT)
        except ValueError as exc:
            return str(exc)
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        return ()

    def what_runs(self, extension: Extension, url: str | None) -> str:
        if url is not None:
            return "Valkey at l2CacheLocalUrl"
        return f"a Valkey of its own, {extension.l2.size_gb:g} GB, least recently used out first"

    def tier(self, setting: Setting) -> Tier:
        port = setting.port or PORT
        url = setting.url or f"valkey://{setting.host}:{port}"
        address = parse_address(url, schemes=SCHEMES, default_port=PORT)
        adapter: dict[str, object] = {
            "type": "valkey",
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
        return Tier(
            adapter={**adapter, "shared": True},
            asked_at=asked_at(address),
            password=address.password,
            remote_url=f"valkey://{user}{address.host}:{address.port}",
            services=() if setting.url else (self._service(setting, port),),
        )

    def _service(self, setting: Setting, port: int) -> ServiceSpec:
        extension = setting.extension
        limit = memory_argument(extension.l2.size_gb)
        return ServiceSpec(
            name=self.service_name,
            image=extension.images.valkey,
            command=(
                "valkey-server",
                *("--maxmemory", limit, "--maxmemory-policy", "allkeys-lru"),
                *("--save", "", "--appendonly", "no"),
            ),
            port=port,
            probe=("valkey-cli", "ping"),
            memory_gb=extension.l2.size_gb,
            local_arguments=("--bind", setting.host, "--port", str(port)),
            ready_url=f"redis://{setting.host}:{port}",
        )
