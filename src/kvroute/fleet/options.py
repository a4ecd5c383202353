"""The options of the fleet: discovery sources, workers, probes and ejection."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr, field_validator, model_validator

from kvroute.clock import Clock
from kvroute.fleet.worker import WorkerId, WorkerRole, WorkerSpec
from kvroute.options import Options, Switch, option, with_sections

_NUMBER = re.compile(r"\d+")
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_.\-]+):(?P<port>\d{1,5})")


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
    pool: str | None = option(
        None,
        "Name of an InferencePool (`inference.networking.k8s.io/v1`) in the namespace. Its selector and "
        "target ports are used instead of `selector` and `port`, and followed when they change. With several "
        "target ports each port of a pod is a worker, called `pod:port`.",
        pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$",
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

    @model_validator(mode="after")
    def _pool_selects(self) -> Self:
        if self.pool is None:
            return self
        if pool_fields := [name for name in ("selector", "port") if name in self.model_fields_set]:
            raise ValueError(
                f"pool: the InferencePool has its own {' and '.join(pool_fields)}; set only one of them"
            )
        if self.resource != "pods":
            raise ValueError("pool: an InferencePool selects pods, so resource must be pods")
        return self


def _as_address_list(value: object) -> object:
    """Split `HOST:PORT,HOST:PORT`, the form of an environment variable."""
    return (
        [address.strip() for address in value.split(",") if address.strip()]
        if isinstance(value, str)
        else value
    )


class DnsOptions(Options):
    """Workers found in DNS: every address of a name is one worker, as with headless Services."""

    names: Annotated[tuple[str, ...], BeforeValidator(_as_address_list)] = option(
        (), "Names to resolve, each as `host:port`, such as `vllm-workers.llm.svc:8000`."
    )
    prefill_names: Annotated[tuple[str, ...], BeforeValidator(_as_address_list)] = option(
        (), "Names of workers with the role `prefill`, as in `names`."
    )
    decode_names: Annotated[tuple[str, ...], BeforeValidator(_as_address_list)] = option(
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
    match = _HOST_PORT.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(f"{name!r} is not host:port, such as vllm-workers.llm.svc:8000")
    return match["host"], int(match["port"])


_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+")
_ID = re.compile(r"[A-Za-z0-9._:\-\[\]@]{1,128}")


class HealthOptions(Options):
    """When a worker is routable: probes, and the results of clients' requests."""

    path: str = option("/health", "Path of a probe; any 2xx answer passes.", pattern="^/")
    interval_s: float = option(
        1.0,
        "Pause between two probes of a healthy worker.",
        unit="s",
        gt=0,
        higher="fewer probes",
        lower="a dead idle worker is noticed sooner",
    )
    recheck_s: float = option(
        0.25,
        "First pause between probes of a worker that is not healthy; grows to `interval_s`.",
        unit="s",
        gt=0,
        higher="fewer probes",
        lower="a recovered worker is used sooner",
    )
    timeout_s: float = option(
        2.0,
        "A probe without an answer for this long has failed.",
        unit="s",
        gt=0,
        higher="a busy worker does not look dead",
        lower="a hanging worker is noticed sooner",
    )
    failures_to_eject: int = option(
        3,
        "Failed probes in a row that make a worker unhealthy; a refused connection needs one.",
        ge=1,
        higher="single lost probes do no harm",
        lower="a dead worker is noticed sooner",
    )
    models_interval_s: float = option(
        10.0,
        "How often `/v1/models` is read.",
        unit="s",
        gt=0,
        higher="fewer requests",
        lower="a LoRA adapter loaded at run time is known sooner",
    )
    metrics_interval_s: float = option(
        5.0,
        "How often `/metrics` is read for capacity, process start time, sleep mode and load from elsewhere.",
        unit="s",
        gt=0,
        higher="fewer large pages",
        lower="a restart between two probes, and load from elsewhere, are noticed sooner",
    )
    burst_failures: int = option(
        5,
        "This many 5xx answers or broken connections among a worker's last 2x as many answers eject it.",
        ge=1,
        higher="a few errors are tolerated",
        lower="a failing worker is ejected sooner",
    )
    burst_window_s: float = option(
        10.0,
        "Answers older than this are not counted as part of a burst.",
        unit="s",
        gt=0,
        higher="slow bursts count too",
        lower="only dense bursts count",
    )
    backoff_s: float = option(
        1.0,
        "How long the first burst keeps a worker out; doubles with each following one.",
        unit="s",
        gt=0,
        higher="a failing worker gets more rest",
        lower="a recovered worker is used sooner",
    )
    backoff_max_s: float = option(
        60.0,
        "Longest back-off; after this time without a burst the next one lasts `backoff_s` again.",
        unit="s",
        gt=0,
        higher="a broken worker is tried less often",
        lower="a recovered worker is used sooner",
    )
    max_ejected_share: float = option(
        0.5,
        "Bursts and connect timeouts eject no worker if more than this share of its models' workers would "
        "be ejected: requests that make every worker fail must not empty the fleet. Failed probes and "
        "refused connections always eject.",
        ge=0,
        le=1,
        higher="failing workers are ejected, even the last one",
        lower="more workers stay in routing, even failing ones",
    )
    ramp_start: float = option(
        0.1,
        "Share of its normal traffic that a worker gets directly after an ejection.",
        gt=0,
        le=1,
        higher="full use sooner",
        lower="gentler on a cold or shaky worker",
    )
    ramp_s: float = option(
        10.0,
        "How long that share takes to reach 1; 0 switches the ramp off.",
        unit="s",
        ge=0,
        higher="gentler on a cold or shaky worker",
        lower="full use sooner",
    )
    jitter: float = option(
        0.1,
        "Pauses vary by this share of their length, so that probes are not sent at the same time.",
        ge=0,
        lt=1,
        higher="probes spread better",
        lower="pauses are more exact",
    )


def _as_mapping(value: object) -> object:
    """A bare URL becomes an entry with this URL only."""
    return {"url": value} if isinstance(value, str) else value


class WorkerEntry(Options):
    """One worker in the configuration, the workers file or a request to the admin API."""

    url: str = option(..., "Base URL, `http://host:port` or `http://host:port/path`; without `/v1`.")
    id: str | None = option(
        None,
        "Stable name for metrics, logs and `x-kvroute-worker`; default: `host:port` of the URL, and "
        "its path with dots for slashes.",
    )
    models: tuple[str, ...] = option((), "Models it serves, for a worker whose `/v1/models` cannot be read.")
    capacity_tokens: int | None = option(
        None,
        "Size of its KV cache, for a worker whose `/metrics` does not have it.",
        unit="tokens",
        gt=0,
        higher="the worker is expected to hold prompts for longer",
        lower="the worker is expected to evict prompts sooner",
    )
    role: WorkerRole | None = option(
        None,
        "`prefill`: it computes long prompts, and other workers answer them; `decode`: it answers, and gets "
        "the KV of long prompts from prefill workers; `both` (default). See `routing.prefill_decode`.",
    )

    needs_health: Annotated[bool, Switch] = option(
        True,
        "A probe passes with a 2xx answer only. Off, for a server without `fleet.health.path`: any answer "
        "passes, whatever its status; a refused connection or no answer fails as always. Set `models`, too, "
        "if it has no `/v1/models`.",
    )

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must look like http://host:port")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("must be a plain base URL: no user, query or fragment")
        path = parts.path.rstrip("/")
        if path.endswith("/v1"):
            raise ValueError("must be the worker's base URL: leave out /v1")
        if path and not _PATH.fullmatch(path):
            raise ValueError("must have a plain path, such as http://host:port/model")
        port = f":{parts.port}" if parts.port is not None else ""  # raises ValueError if out of range
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return f"{parts.scheme}://{host}{port}{path}"

    @field_validator("id")
    @classmethod
    def _is_safe_id(cls, worker_id: str | None) -> str | None:
        # The id is used in response headers, metric labels and the admin API's paths.
        if worker_id is not None and not _ID.fullmatch(worker_id):
            raise ValueError("must be 1 to 128 of the characters A-Z a-z 0-9 . _ : - [ ] @")
        return worker_id

    def spec(self) -> WorkerSpec:
        """The entry as a `WorkerSpec`, with the default id if none is set."""
        default_id = self.url.split("://", 1)[1].replace("/", ".")
        role = None if self.role is None else self.role.value
        return WorkerSpec(
            WorkerId(self.id or default_id),
            self.url,
            self.models,
            self.capacity_tokens,
            role,
            needs_health=self.needs_health,
        )


Entry = Annotated[WorkerEntry, BeforeValidator(_as_mapping)]
"""A `WorkerEntry`, or its URL alone."""


SAME_WORKER = "two workers have the "
"""Beginning of the error text for `Entries`."""


def _all_differ(entries: tuple[WorkerEntry, ...]) -> tuple[WorkerEntry, ...]:
    for what, values in (("id", [str(e.spec().id) for e in entries]), ("URL", [e.url for e in entries])):
        again = next((value for value, times in Counter(values).items() if times > 1), None)
        if again is not None:
            raise ValueError(f"{SAME_WORKER}{what} {again!r}")
    return entries


Entries = Annotated[tuple[Entry, ...], AfterValidator(_all_differ)]
"""Workers of one source; no two have the same id or URL."""


def _as_list(value: object) -> object:
    """Split `URL,URL`, the form of an environment variable."""
    return [url.strip() for url in value.split(",") if url.strip()] if isinstance(value, str) else value


class SourceType(Protocol):
    """A source of workers of another distribution (entry points `kvroute.discovery`)."""

    @property
    def options(self) -> type[Options]:
        """The class of its section, `fleet.NAME`."""
        ...

    def configured(self, options: Any, clock: Clock) -> Any:
        """The `Discovery` for this section; None if its options turn it off."""
        ...


class FleetOptions(Options):
    """Discovery sources, names of models, and health of workers."""

    sources: ClassVar[Mapping[str, SourceType]] = {}
    """Sources of workers that are not built in, by name."""

    workers: Annotated[Entries, BeforeValidator(_as_list)] = option(
        (),
        "Workers known from the start: URLs, or mappings with `url`, `id`, `models`, `capacity_tokens`, "
        "`role`, `needs_health`.",
        reload=True,
    )
    may_be_empty: Annotated[bool, Switch] = option(
        False,
        "Start without any worker and without a source of workers: they are added through the admin API.",
    )
    file: Path | None = option(
        None,
        "A YAML file with a `workers` list of the same form. Changes apply without dropping a request.",
    )
    file_poll_s: float = option(
        1.0,
        "How often the file is polled.",
        unit="s",
        gt=0,
        higher="fewer file system calls",
        lower="changes apply sooner",
    )
    shrink_share: float = option(
        0.5,
        "A set of workers from Kubernetes or DNS must be confirmed if it is empty, or if more than this "
        "share of the workers that answer would leave. Until then those workers stay, and the source is read "
        "again.",
        ge=0,
        lt=1,
        higher="only larger losses must be confirmed",
        lower="smaller losses must be confirmed, too",
    )
    shrink_confirm_s: float = option(
        30.0,
        "How long a source must omit a worker that answers until the worker leaves. Workers that stop "
        "answering, or that are terminating, get no requests anyway. 0: every set is accepted.",
        unit="s",
        ge=0,
        higher="longer failures of an API server or name server do no harm",
        lower="workers that were removed while they still answer leave sooner",
    )
    kubernetes: KubernetesOptions = option(default_factory=KubernetesOptions)
    dns: DnsOptions = option(default_factory=DnsOptions)
    aliases: dict[str, str] = option(
        {},
        "Other names for models or adapters: `alias: model`. An alias wins over a model of its name.",
        reload=True,
    )
    worker_api_key: SecretStr | None = option(
        None,
        "Key of the workers (`vllm serve --api-key`), sent as a bearer token when `/v1/models` is read. If "
        "the gateway checks keys (`server.api_keys`, `server.client_keys`), inference requests get it, too, "
        "instead of the client's key. Otherwise the client's own Authorization is passed on.",
    )
    worker_api_key_file: Path | None = option(None, "File with that key.")
    health: HealthOptions = option(HealthOptions(), "Probes, ejection and return.", reload=True)

    @model_validator(mode="after")
    def _names_are_clear(self) -> Self:
        for alias, target in self.aliases.items():
            if target in self.aliases:
                raise ValueError(f"the alias {alias!r} names another alias, {target!r}")
        return self


def with_sources(base: type[FleetOptions], sources: Mapping[str, SourceType]) -> type[FleetOptions]:
    """`base` with these sources of other distributions, and a section for each."""
    made = with_sections(base, {name: source.options for name, source in sources.items()})
    made.sources = {**base.sources, **sources}
    return made
