"""The configuration: all option classes together, loaded from file, environment and flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, SupportsIndex

from pydantic import model_validator

from kvroute.admission.fair_queue import AdmissionOptions
from kvroute.epp.endpoints import EppOptions
from kvroute.events.options import KvEventsOptions
from kvroute.fleet.options import FleetOptions
from kvroute.http.options import AdminOptions, ServerOptions
from kvroute.journal.compat_metrics import MetricsOptions
from kvroute.journal.tracing import TracingOptions
from kvroute.lmcache.options import LMCacheOptions
from kvroute.logs import LoggingOptions
from kvroute.options import Options, option
from kvroute.replicas.options import SharingOptions
from kvroute.request.streams import StreamOptions
from kvroute.routing.registry import RoutingOptions
from kvroute.routing.scaling import ScalingOptions
from kvroute.routing.strategy import Needs
from kvroute.tokens.options import TokensOptions
from kvroute.upstream.options import RetryOptions, UpstreamOptions


class PartsOptions(Options):
    """Parts of other distributions: a section for each, named as its entry point."""


class Config(Options):
    """All options of `kvroute serve`, one section per room."""

    restored_by: ClassVar[tuple[Callable[..., Config], Any] | None] = None
    """For a class with sections of plugins: how another process makes it again, and from which names."""

    server: ServerOptions = option(default_factory=ServerOptions)
    admin: AdminOptions = option(default_factory=AdminOptions)
    fleet: FleetOptions = option(default_factory=FleetOptions)
    routing: RoutingOptions = option(default_factory=RoutingOptions)
    tokens: TokensOptions = option(default_factory=TokensOptions)
    kv_events: KvEventsOptions = option(default_factory=KvEventsOptions)
    lmcache: LMCacheOptions = option(default_factory=LMCacheOptions)
    admission: AdmissionOptions = option(default_factory=AdmissionOptions, reload=True)
    scaling: ScalingOptions = option(default_factory=ScalingOptions)
    epp: EppOptions = option(default_factory=EppOptions)
    upstream: UpstreamOptions = option(default_factory=UpstreamOptions)
    streams: StreamOptions = option(default_factory=StreamOptions, reload=True)
    retries: RetryOptions = option(default_factory=RetryOptions, reload=True)
    logging: LoggingOptions = option(default_factory=LoggingOptions)
    metrics: MetricsOptions = option(default_factory=MetricsOptions)
    tracing: TracingOptions = option(default_factory=TracingOptions)
    sharing: SharingOptions = option(default_factory=SharingOptions)
    parts: PartsOptions = option(
        description="Parts of other distributions, each with a section of its own (docs/extending.md).",
        default_factory=PartsOptions,
    )

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self.restored_by is None:
            return super().__reduce_ex__(protocol)
        restored, names = self.restored_by
        return restored, (names, self.model_dump(exclude_unset=True))

    @property
    def configured_names(self) -> frozenset[str]:
        """Names of models with options of their own."""
        return frozenset(self.routing.models) | frozenset(self.tokens.models)

    @model_validator(mode="after")
    def _refuse_client_keys_as_admin_keys(self) -> Config:
        if {key.get_secret_value() for key in self.server.api_keys} & set(self.admin.keys):
            raise ValueError("admin.api_key: is also one of server.api_keys, so every client would have it")
        return self

    @model_validator(mode="after")
    def _refuse_tokens_without_names(self) -> Config:
        if self.server.jwt.is_on and self.server.client_keys.file is None:
            raise ValueError(
                "server.jwt: set server.client_keys.file, which has what the client of a token may do"
            )
        return self

    @model_validator(mode="after")
    def _refuse_isolation_without_names(self) -> Config:
        if self.server.isolation == "per-key" and self.server.client_keys.file is None:
            raise ValueError("server.isolation: per-key needs named keys: set server.client_keys.file")
        return self

    @model_validator(mode="after")
    def _refuse_prefetch_with_processes(self) -> Config:
        if self.lmcache.prefetch.enabled and self.server.processes > 1:
            raise ValueError(
                "lmcache.prefetch.enabled: set server.processes to 1, because only one of several processes "
                "is connected to LMCache's servers"
            )
        return self

    @model_validator(mode="after")
    def _refuse_deletion_costs_without_pods_or_prompts(self) -> Config:
        if not self.scaling.deletion_cost.enabled:
            return self
        path = "scaling.deletion_cost.enabled"
        if not self.fleet.kubernetes.enabled:
            raise ValueError(f"{path}: needs fleet.kubernetes.enabled, because a worker must be a pod")
        if not (self.routing.may_need(Needs.PROMPT) or self.routing.may_need(Needs.TOKENS)):
            raise ValueError(
                f"{path}: needs routing.strategy prefixaware or kvaware; {self.routing.strategy} reads no "
                "prompts, so the caches' values are unknown"
            )
        return self
