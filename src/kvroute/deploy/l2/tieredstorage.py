"""A daemon on each node that keeps entries in shared memory: LMCache's adapter `sagemaker-hyperpod`.

HyperPod's nodes have such a daemon. On other nodes the deployment starts `kvroute tierd`, which implements
the same protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.deploy.l2.backend import L2Location, L2Tier, Scope, ServiceSpec
from kvroute.deploy.spec.extension import Extension
from kvroute.deploy.spec.source import Path

PORT = 9200
HYPERPOD_MEMORY = "ai_toolkit_cache"
TIERD_MEMORY = "kvroute_tierd"
NODE_IP = "$(NODE_IP)"
"""The container runtime replaces it with the variable NODE_IP of the container's environment."""


class TieredStorage:
    """The storage daemon of HyperPod's nodes, or `kvroute tierd`."""

    name = "tieredstorage"
    description = "a storage daemon on each node"
    adapter_type = "sagemaker-hyperpod"
    accepts_url = False
    accepts_password = False
    has_classic = True
    service_name = "tierd"

    def url_problem(self, url: str) -> str:
        return ""

    def missing(self, extension: Extension, url: str | None) -> Sequence[tuple[Path, str]]:
        return ()

    def describe(self, extension: Extension, url: str | None) -> str:
        if extension.platform == "hyperpod":
            return "the storage daemon of HyperPod's nodes"
        size = f"{extension.l2.size_gb:g} GB"
        return f"kvroute tierd on each node with {size}, which evicts the least recently used entries"

    def tier(self, location: L2Location) -> L2Tier:
        host = NODE_IP if location.on_hyperpod else location.host
        port = location.port or PORT
        # Two daemons on one host must not share a segment.
        default_memory = TIERD_MEMORY if port == PORT else f"{TIERD_MEMORY}_{port}"
        memory = HYPERPOD_MEMORY if location.on_hyperpod else default_memory
        url = f"sagemaker-hyperpod://{host}:{port}"
        return L2Tier(
            adapter={
                "type": self.adapter_type,
                "url": url,
                "bucket": "lmcache",
                "shared_memory_name": memory,
                "shared": True,
            },
            remote_url=url,
            extra_config={
                "sagemaker_hyperpod_bucket": "lmcache",
                "sagemaker_hyperpod_shared_memory_name": memory,
            },
            services=() if location.on_hyperpod else (self._daemon(location, port, memory),),
            host_paths=(f"/dev/shm/{memory}",) if location.on_hyperpod else (),
            needs_node_ip=host == NODE_IP,
        )

    def _daemon(self, location: L2Location, port: int, memory: str) -> ServiceSpec:
        extension = location.extension
        host = location.host if location.host == "127.0.0.1" else "0.0.0.0"
        code = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/health', timeout=2)"
        return ServiceSpec(
            name=self.service_name,
            image=extension.images.gateway,
            command=(
                *("kvroute", "tierd", "--host", host, "--port", str(port)),
                *("--shared-memory-name", memory, "--size-gb", f"{extension.l2.size_gb:g}"),
            ),
            port=port,
            probe=("python", "-c", code),
            memory_gb=extension.l2.size_gb,
            scope=Scope.PER_NODE,
            shares_memory=True,
            metrics_path="/metrics",
            peers_flag="--peers-dns",
            lists_changes=True,
            ready_url=f"http://{location.host}:{port}/health",
        )
