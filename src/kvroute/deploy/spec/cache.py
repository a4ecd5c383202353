"""`spec.kvCacheSpec` and `spec.intelligentRoutingSpec`."""

from __future__ import annotations

from typing import Literal

from kvroute.deploy.spec.fields import Fields, applied, section
from kvroute.deploy.spec.scaling import AutoScaling


class L2Cache(Fields):
    """Which second tier, and where it is."""

    l2_cache_backend: str | None = applied(becomes="the second cache tier behind LMCache")
    l2_cache_local_url: str | None = applied(becomes="the address of the second tier")


class KvCache(Fields):
    """Which cache tiers there are below the GPU."""

    enable_l1_cache: bool = applied(True, becomes="LMCache's CPU memory tier")
    enable_l2_cache: bool = applied(False, becomes="LMCache's second tier")
    l2_cache_spec: L2Cache | None = section()
    cache_config_file: str | None = applied(becomes="LMCACHE_CONFIG_FILE of the workers (classic mode)")


class IntelligentRouting(Fields):
    """The gateway and its strategy."""

    enabled: bool = applied(False, becomes="the gateway's strategy; without it requests go round robin")
    routing_strategy: Literal["prefixaware", "kvaware", "session", "roundrobin"] = applied(
        "prefixaware", becomes="routing.strategy of the gateway"
    )
    auto_scaling_spec: AutoScaling | None = section()
