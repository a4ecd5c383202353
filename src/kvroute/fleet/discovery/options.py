"""The options of discovery in Kubernetes and in DNS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, field_validator, model_validator

from kvroute.options import Options, Switch, option

_NUMBER = re.compile(r"\d+")
_PLACE = re.compile(r"(?P<host>[A-Za-z0-9_.\-]+):(?P<port>\d{1,5})")


class KubernetesOptions(Options):
    """Workers found by label through a watch of the Kubernetes API.

    A pod joins when it is ready. Later, while it is not ready or terminating, it drains: it gets no new
    requests, running requests continue, and the gateway still knows its cache. It leaves when it is deleted.
    """

    enabled: Annotated[bool, Switch] = option(False, "Find workers through the Kubernetes API.")
    resource: Literal["pods", "endpointslices"] = option(
        "pods",
        "The watched resource. EndpointSlices have the labels of their Service, and "
        "`kubernetes.io/service-name`; they also list workers outside the cluster.",
    )
    namespace: str | None = option(None, "Namespace of the workers; unset: the gateway's own.")
    selector: str = option(
        "",
        "Label selector, such as `app=vllm,tier in (a, b)`. Empty: all objects in the namespace.",
    )
    port: int | str = option(
        "http", "The workers' port: its number, or its name in the pod's containers or in the EndpointSlice."
    )
    scheme: Literal["http", "https"] = option("http", "Scheme of the workers' URLs.")
    require_ready: Annotated[bool, Switch] = option(
        True,
        "Wait for Kubernetes's readiness.",
        higher="a pod's own readiness probe counts, too",
        lower="only kvroute's probes count",
    )
    role_label: str = option("kvroute.dev/role", "Label with a worker's role.")
    prefill_labels: tuple[str, ...] = option(("prefill",), "Values of that label that mean prefill workers.")
    decode_labels: tuple[str, ...] = option(("decode",), "Values of that label that mean decode workers.")
    roles: tuple[str, ...] = option(
        (), "Roles of the workers that join the fleet; empty: all workers, also without a role."
    )
    model_label: str | None = option(
        None,
        "Label with the model's name, for workers whose `/v1/models` cannot be read. An annotation of the "
        "same key wins: it may have slashes, and several names with commas between them.",
    )
    api_url: str | None = option(
        None, "The API server, `https://host:port`; unset: that of the cluster that the gateway runs in."
    )
    token_file: Path | None = option(
        None,
        "File with the bearer token for the API server, read for each request; unset: the service account's, "
        "or none if `api_url` is set.",
    )
    ca_file: Path | None = option(
        None,
        "CA certificates of the API server, reloaded when the file changes; unset: the service account's, or "
        "the system's if `api_url` is set.",
    )
    timeout_s: float = option(
        10.0,
        "An API server that sends nothing for this long counts as unavailable.",
        unit="s",
        gt=0,
        higher="a slow server does not look unavailable",
        lower="a hanging one is noticed sooner",
    )
    watch_s: float = option(
        60.0,
        "How long one watch request lasts; the next one continues where it ended.",
        unit="s",
        ge=1,
        higher="fewer requests",
        lower="a connection that broke silently is noticed sooner",
    )
    resync_s: float = option(
        600.0,
        "How often all objects are listed again.",
        unit="s",
        gt=0,
        higher="fewer large answers",
        lower="changes that a watch has missed are known sooner",
    )
    backoff_max_s: float = option(
        30.0,
        "Longest pause before a retry while the API server is unavailable; the first is 0.5 s, then doubled.",
        unit="s",
        gt=0,
        higher="fewer requests to a failing server",
        lower="changes are known sooner once it is available again",
    )

    @field_validator("api_url")
    @classmethod
    def _is_base_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError("must look like https://host:port")
        return url.rstrip("/")

    @field_validator("port")
    @classmethod
    def _is_port(cls, port: int | str) -> int | str:
        if isinstance(port, str) and _NUMBER.fullmatch(port):
            port = int(port)
        if isinstance(port, int) and not 0 < port < 65536:
            raise ValueError("must be 1 to 65535, or a port's name")
        if port == "":
            raise ValueError("must be a number or a port's name")
        return port


def _as_list(value: object) -> object:
    """Split `HOST:PORT,HOST:PORT`, the form of an environment variable."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class DnsOptions(Options):
    """Workers found in DNS: every address of a name is one worker, as with headless Services."""

    names: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = option(
        (), "Names to resolve, each as `host:port`, such as `vllm-workers.llm.svc:8000`."
    )
    prefill_names: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = option(
        (), "Names of workers with the role `prefill`, as in `names`."
    )
    decode_names: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = option(
        (), "Names of workers with the role `decode`, as in `names`."
    )
    scheme: Literal["http", "https"] = option("http", "Scheme of the workers' URLs.")
    family: Literal["auto", "ipv4", "ipv6"] = option(
        "auto",
        "Addresses that count. `auto`: IPv4, or IPv6 if a name has no IPv4 address, so that a worker with "
        "both is one worker.",
    )
    interval_s: float = option(
        5.0,
        "Pause between two DNS lookups of a name.",
        unit="s",
        gt=0,
        higher="fewer queries",
        lower="changes are known sooner",
    )
    timeout_s: float = option(
        5.0,
        "A DNS lookup without an answer for this long has failed.",
        unit="s",
        gt=0,
        higher="a slow name server does not look unavailable",
        lower="a failure is known sooner",
    )
    keep_s: float = option(
        300.0,
        "How long the last addresses of a name stay while its DNS lookups fail.",
        unit="s",
        ge=0,
        higher="survives longer outages of the name server",
        lower="workers of a deleted name leave sooner",
    )

    @model_validator(mode="after")
    def _are_places(self) -> Self:
        for name, _ in self.by_role():
            place_of(name)
        return self

    def by_role(self) -> tuple[tuple[str, str | None], ...]:
        """Every name with the role of its workers."""
        roles = ((self.names, None), (self.prefill_names, "prefill"), (self.decode_names, "decode"))
        return tuple((name, role) for names, role in roles for name in names)


def place_of(name: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError."""
    match = _PLACE.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{name!r} is not host:port, such as vllm-workers.llm.svc:8000")
    return match["host"], int(match["port"])
