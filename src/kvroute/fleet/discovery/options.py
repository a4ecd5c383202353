"""What can be set about finding workers in Kubernetes and in DNS."""

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
    """Workers found by label through the Kubernetes API, which is watched.

    A pod joins once it is ready. From then on, until it is gone, not ready or terminating means draining:
    no new requests, running ones go on, what it has cached is not forgotten.
    """

    enabled: Annotated[bool, Switch] = option(False, "Find workers through the Kubernetes API.")
    resource: Literal["pods", "endpointslices"] = option(
        "pods",
        "What is watched. EndpointSlices have the labels of their Service, and "
        "`kubernetes.io/service-name`; they also list workers outside the cluster.",
    )
    namespace: str | None = option(None, "Where; unset: the gateway's own.")
    selector: str = option(
        "",
        "Label selector, such as `app=vllm,tier in (a, b)`. Empty: everything in the namespace.",
    )
    port: int | str = option(
        "http", "The workers' port: its number, or its name in the pod's containers or in the EndpointSlice."
    )
    scheme: Literal["http", "https"] = option("http", "How workers are asked.")
    require_ready: Annotated[bool, Switch] = option(
        True,
        "Wait for Kubernetes's readiness.",
        higher="a pod's own readiness probe counts, too",
        lower="only kvroute's probes count",
    )
    role_label: str = option("kvroute.dev/role", "Label that says which role a worker has.")
    roles: tuple[str, ...] = option((), "Roles that are taken into the fleet; empty: any, or none at all.")
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
        "Bearer token for it, read anew for each request; unset: the service account's, or none if "
        "`api_url` is set.",
    )
    ca_file: Path | None = option(
        None,
        "Certificates that it is checked against, read anew when the file changes; unset: the service "
        "account's, or the system's if `api_url` is set.",
    )
    timeout_s: float = option(
        10.0,
        "An API server that sends nothing for this long is away.",
        unit="s",
        gt=0,
        higher="a slow server is not taken for a dead one",
        lower="a hanging one is noticed sooner",
    )
    watch_s: float = option(
        60.0,
        "How long one watch request lasts; the next one goes on where it ended.",
        unit="s",
        ge=1,
        higher="fewer requests",
        lower="a connection that broke silently is noticed sooner",
    )
    resync_s: float = option(
        600.0,
        "How often everything is listed anew.",
        unit="s",
        gt=0,
        higher="fewer large answers",
        lower="whatever a watch may have missed is known sooner",
    )
    backoff_max_s: float = option(
        30.0,
        "Longest pause before an API server that is away is asked again; the first is 0.5 s, doubling.",
        unit="s",
        gt=0,
        higher="fewer requests to a server in trouble",
        lower="changes are known sooner once it is back",
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
    """`HOST:PORT,HOST:PORT`, as it stands in an environment variable."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class DnsOptions(Options):
    """Workers found by name: every address that a name stands for is one, as with headless Services."""

    names: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = option(
        (), "Names to look up, each as `host:port`, such as `vllm-workers.llm.svc:8000`."
    )
    scheme: Literal["http", "https"] = option("http", "How workers are asked.")
    family: Literal["auto", "ipv4", "ipv6"] = option(
        "auto",
        "Addresses that count. `auto`: IPv4, or IPv6 where a name has no other: a worker with one of each "
        "is one worker.",
    )
    interval_s: float = option(
        5.0,
        "Pause between two look-ups of a name.",
        unit="s",
        gt=0,
        higher="fewer queries",
        lower="changes are known sooner",
    )
    timeout_s: float = option(
        5.0,
        "A look-up without an answer for this long has failed.",
        unit="s",
        gt=0,
        higher="a slow name server is not taken for a dead one",
        lower="a failure is known sooner",
    )
    keep_s: float = option(
        300.0,
        "How long a name's last addresses stay when it can no longer be looked up.",
        unit="s",
        ge=0,
        higher="survives longer outages of the name server",
        lower="workers of a name that is gone for good go sooner",
    )

    @model_validator(mode="after")
    def _are_places(self) -> Self:
        for name in self.names:
            place_of(name)
        return self


def place_of(name: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ValueError."""
    match = _PLACE.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{name!r} is not host:port, such as vllm-workers.llm.svc:8000")
    return match["host"], int(match["port"])
