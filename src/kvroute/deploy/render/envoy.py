"""Renders the door with endpoint pickers: Envoy relays, `kvroute epp` decides.

Either Envoy's own configuration (Envoy 1.40), or the objects of the Gateway API from which a Gateway's
implementation configures Envoy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from itertools import chain
from typing import Any, Final, NamedTuple

import yaml

from kvroute.deploy.render.config import SECRETS, config_text, gateway_config, merged
from kvroute.deploy.render.manifest import (
    GATEWAY,
    SHARING,
    SHARING_KEY,
    SHARING_PASSWORD,
    SHARING_PORT,
    WORKER,
    Manifest,
    manifest,
    selector,
)
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.reach import report_ports
from kvroute.deploy.render.site import LOOPBACK, kubernetes_site, local_site
from kvroute.deploy.spec.source import FieldVerdict, Path

_TYPE: Final = "type.googleapis.com/"
_DESTINATION: Final = "x-gateway-destination-endpoint"
_PICK_ID: Final = "x-kvroute-pick"
_PICKERS, _WORKERS = "pickers", "workers"
_CONNECTION_LIMIT: Final = 100_000
"""Envoy's default of 1,024 requests per cluster would refuse streams."""
_RETRY_BUFFER_BYTES: Final = 32 * 1024 * 1024
"""Envoy repeats a request only while it holds the whole body: the default of server.max_body_bytes."""
_LONGEST_IDLE: Final = "3600s"
_WORKER_IDLE: Final = "4s"
"""vLLM closes an idle connection after 5 s."""
PICKER_PORTS: Final = ((9002, 9090), (9003, 9091))
"""gRPC and HTTP port of the two pickers on one host."""
ADMIN_PORT: Final = 9901

Address = tuple[str, int]


class EnvoySite(NamedTuple):
    """Where Envoy, the pickers and the workers listen. Hosts are IP addresses or names."""

    listen: Address
    workers: Sequence[Address]
    pickers: Sequence[Address]
    """The first one decides; the next one when Envoy finds the earlier ones dead."""
    admin: Address | None = None
    is_open: bool = True
    """Without any picker, requests go to the workers in turn. False: they get 500. It must be False where the
    pickers check keys."""
    attempts: int = 3
    """Workers that a request is sent to, at most."""


def envoy_config(site: EnvoySite) -> dict[str, Any]:
    """A complete bootstrap configuration."""
    config: dict[str, Any] = {}
    if site.admin is not None:
        config["admin"] = {"address": _socket(site.admin)}
    config["static_resources"] = {
        "listeners": [
            {
                "name": "clients",
                "address": _socket(site.listen),
                "filter_chains": [
                    {
                        "filters": [
                            _typed(
                                "envoy.filters.network.http_connection_manager",
                                "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                                _connection_manager(site),
                            )
                        ]
                    }
                ],
            }
        ],
        "clusters": [_worker_cluster(site.workers), _picker_cluster(site.pickers)],
    }
    return config


def _connection_manager(site: EnvoySite) -> dict[str, Any]:
    return {
        "stat_prefix": "clients",
        "stream_idle_timeout": _LONGEST_IDLE,
        # A client must not choose the worker, nor name another client's request.
        "early_header_mutation_extensions": [
            _typed(
                "envoy.http.early_header_mutation.header_mutation",
                "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                {"mutations": [{"remove": name} for name in (_DESTINATION, _PICK_ID)]},
            )
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "response_headers_to_add": [
                        {
                            "header": {"key": f"{_DESTINATION}-served", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
                            "keep_empty_value": False,
                        }
                    ],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": _route(site),
                            "request_body_buffer_limit": _RETRY_BUFFER_BYTES,
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            _ext_proc(
                "pick",
                {
                    "failure_mode_allow": site.is_open,
                    "metadata_options": {
                        "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint"]},
                        "receiving_namespaces": {"untyped": ["envoy.lb", "kvroute"]},
                    },
                    "processing_mode": {
                        "request_header_mode": "SEND",
                        "request_body_mode": "FULL_DUPLEX_STREAMED",
                        "request_trailer_mode": "SEND",
                        "response_header_mode": "SKIP",
                        "response_body_mode": "NONE",
                        "response_trailer_mode": "SKIP",
                    },
                },
            ),
            # It fails open, and sends no body, so a picker that dies ends no answer of a worker. It needs the
            # trailers: without them Envoy closes its stream when the head of the answer has come. Not with
            # `observability_mode`: there Envoy resets the stream, and the picker may never read its messages.
            _ext_proc(
                "watch",
                {
                    "failure_mode_allow": True,
                    "response_attributes": [
                        "upstream.address",
                        "upstream.request_attempt_count",
                        "response.code_details",
                    ],
                    "processing_mode": {
                        "request_header_mode": "SEND",
                        "request_body_mode": "NONE",
                        "request_trailer_mode": "SKIP",
                        "response_header_mode": "SEND",
                        "response_body_mode": "NONE",
                        "response_trailer_mode": "SEND",
                    },
                },
            ),
            _typed("envoy.filters.http.router", "envoy.extensions.filters.http.router.v3.Router", {}),
        ],
    }


def _route(site: EnvoySite) -> dict[str, Any]:
    return {
        "cluster": _WORKERS,
        "timeout": "0s",
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": site.attempts - 1,
        },
    }


def _ext_proc(filter_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    service = {
        "envoy_grpc": {"cluster_name": _PICKERS},
        "initial_metadata": [{"key": "x-kvroute-part", "value": filter_name}],
    }
    return _typed(
        f"kvroute.{filter_name}",
        "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        {"grpc_service": service, "message_timeout": "60s", **settings},
    )


def _worker_cluster(workers: Sequence[Address]) -> dict[str, Any]:
    round_robin = _typed(
        "envoy.load_balancing_policies.round_robin",
        "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin",
        {},
    )
    override = _typed(
        "envoy.load_balancing_policies.override_host",
        "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        {
            "override_host_sources": [{"header": _DESTINATION}],
            "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
        },
    )
    return {
        **_cluster(_WORKERS, [workers]),
        "load_balancing_policy": {"policies": [{"typed_extension_config": override}]},
        "typed_extension_protocol_options": _protocol(
            {"common_http_protocol_options": {"idle_timeout": _WORKER_IDLE}},
            {"http_protocol_options": {}},
        ),
    }


def _picker_cluster(pickers: Sequence[Address]) -> dict[str, Any]:
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    return {
        **_cluster(_PICKERS, [[picker] for picker in pickers]),
        # Without this Envoy uses dead pickers when all of them are dead ("panic"), and no request passes.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "2s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "no_traffic_interval": "1s",
                "grpc_health_check": {"service_name": service},
            }
        ],
        # The health check needs some seconds to find a dead picker, a failed request finds it at once.
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 1,
            "interval": "1s",
            "base_ejection_time": "5s",
            "max_ejection_percent": 100,
        },
        "typed_extension_protocol_options": _protocol(
            {}, {"http2_protocol_options": {"connection_keepalive": {"interval": "10s", "timeout": "2s"}}}
        ),
    }


def _cluster(name: str, priorities: Sequence[Sequence[Address]]) -> dict[str, Any]:
    every = [host for addresses in priorities for host, _ in addresses]
    limits = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests"), _CONNECTION_LIMIT)
    return {
        "name": name,
        "type": "STATIC" if all(map(_is_address, every)) else "STRICT_DNS",
        "connect_timeout": "2s",
        "circuit_breakers": {"thresholds": [{**limits, "max_retries": 1000}]},
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {
                    "priority": priority,
                    "lb_endpoints": [{"endpoint": {"address": _socket(address)}} for address in addresses],
                }
                for priority, addresses in enumerate(priorities)
            ],
        },
    }


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _protocol(options: dict[str, Any], explicit: dict[str, Any]) -> dict[str, Any]:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {name: {"@type": _TYPE + name, **options, "explicit_http_config": explicit}}


def _socket(address: Address) -> dict[str, Any]:
    host, port = address
    return {"socket_address": {"address": host, "port_value": port}}


def _typed(name: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": _TYPE + kind, **settings}}


def envoy_text(config: dict[str, Any]) -> str:
    """The configuration as YAML without anchors, which Envoy does not read."""
    dumper: type[yaml.SafeDumper] = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    text: str = yaml.dump(config, Dumper=dumper, sort_keys=False, width=10**6)
    return text


def render_envoy(plan: EndpointPlan) -> dict[str, str]:
    """Envoy and two pickers on the workers' host: Envoy's configuration, and that of the pickers."""
    site = local_site(plan)
    config = gateway_config(plan, site)
    server = config["server"]
    door = EnvoySite(
        listen=(server["host"], server["port"]),
        workers=[(LOOPBACK, worker.port) for worker in site.workers],
        pickers=[(LOOPBACK, port) for port, _ in PICKER_PORTS],
        admin=(LOOPBACK, ADMIN_PORT),
        is_open=_is_open(config),
    )
    lines = [
        f"# The endpoint pickers of {plan.name}, for Envoy with envoy.yaml, on the workers' host:",
        *(
            f"#   kvroute epp -c kvroute.yaml --port {port} --http-port {http}{_other_reports(plan, number)}"
            for number, (port, http) in enumerate(PICKER_PORTS)
        ),
    ]
    (grpc_port, http), *_ = PICKER_PORTS
    picker_config = merged(config, {"server": {"port": grpc_port}, "epp": {"http_port": http}})
    head = f"# envoy -c envoy.yaml: the door of {plan.name}; kvroute.yaml has the pickers.\n"
    return {
        "envoy.yaml": head + envoy_text(envoy_config(door)),
        "kvroute.yaml": "\n".join(lines) + "\n" + config_text(picker_config),
    }


def _is_open(config: dict[str, Any]) -> bool:
    """Whether requests may reach workers without a picker: then nobody checks keys."""
    return not any(config["server"].get(name) for name in ("api_keys", "api_keys_file", "client_keys", "jwt"))


def _other_reports(plan: EndpointPlan, number: int) -> str:
    """Flags that let a further picker listen on other ports for LMCache's reports, which go to the first."""
    ports = report_ports(plan, local_site(plan)) if number else {}
    options = {
        "coordinator": "coordinator.listen",
        "lmcache-pull": "controller.pull",
        "lmcache-reply": "controller.reply",
        "lmcache-beat": "controller.heartbeat",
    }
    return "".join(
        f" --set lmcache.{options[name]}={LOOPBACK}:{port + number}" for name, port in ports.items()
    )


# --- the Gateway API --------------------------------------------------------------------------------------


GRPC_PORT: Final = PICKER_PORTS[0][0]
LEAST_PICKERS: Final = 2
"""The second one works while the first one is away."""
INFERENCE_API: Final = "inference.networking.k8s.io"
_ROUTE_API: Final = "gateway.networking.k8s.io"
_GATEWAY_LABELS: Final = (f"{_ROUTE_API}/gateway-name", "gateway.envoyproxy.io/owning-gateway-name")
"""Labels with the Gateway's name on the pods of its Envoys: that of the Gateway API, and Envoy Gateway's."""


_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class GatewayRef(NamedTuple):
    """A Gateway of the Gateway API, to which the endpoint's HTTPRoute is attached."""

    name: str
    namespace: str | None = None
    """None: the endpoint's."""


def gateway_ref(text: str) -> GatewayRef:
    """Read `[NAMESPACE/]NAME`. Raises ValueError."""
    *namespace, name = text.split("/")
    if len(namespace) > 1 or not all(_NAME.fullmatch(segment) for segment in (*namespace, name)):
        raise ValueError(f"{text!r} is not [NAMESPACE/]NAME")
    return GatewayRef(name, namespace[0] if namespace else None)


_SETTINGS: Final[Path] = ("x-kvroute", "gateway", "settings")


def picker_findings(plan: EndpointPlan, door: GatewayRef | None) -> Iterator[tuple[Path, FieldVerdict, str]]:
    """Yield the fields that pickers cannot have, or have in another way than a gateway.

    An empty path is the whole spec. Without `door` it is about the pickers of `render_envoy`.
    """
    extension = plan.extension
    if _setting(plan, "server", "processes") not in (None, 1):
        text = "must be 1: an endpoint picker is one process; several pickers are rendered instead"
        yield (*_SETTINGS, "server", "processes"), FieldVerdict.WRONG, text
    text = (
        "needs one gateway: each of the pickers, two at least, would write costs of its own on the same pods"
    )
    if door is not None and extension.scaling.deletion_cost:
        yield ("x-kvroute", "scaling", "deletionCost"), FieldVerdict.WRONG, text
    elif _setting(plan, "scaling", "deletion_cost", "enabled"):
        yield (*_SETTINGS, "scaling", "deletion_cost", "enabled"), FieldVerdict.WRONG, text
    yield from _port_findings(plan, door)
    if door is None:
        return
    routing = plan.spec.intelligent_routing_spec
    scaling = routing.auto_scaling_spec if routing is not None else None
    for key, number in (
        ("minReplicaCount", scaling.min_replica_count if scaling is not None else LEAST_PICKERS),
        ("maxReplicaCount", scaling.max_replica_count if scaling is not None else LEAST_PICKERS),
    ):
        if number < LEAST_PICKERS:
            text = f"applied as {LEAST_PICKERS}, the least number of pickers"
            yield ("spec", "intelligentRoutingSpec", "autoScalingSpec", key), FieldVerdict.NOTED, text
    if door.namespace not in (None, plan.namespace):
        text = (
            f"the Gateway {door.namespace}/{door.name} is in another namespace than the route: one of its "
            f"listeners must accept routes of the namespace {plan.namespace} (allowedRoutes.namespaces; by "
            "default a listener accepts those of its own namespace only)"
        )
        yield (), FieldVerdict.NOTED, text


def _port_findings(plan: EndpointPlan, door: GatewayRef | None) -> Iterator[tuple[Path, FieldVerdict, str]]:
    """Yield the ports that two listeners of one host or one pod would have."""
    path: Path = ("x-kvroute", "gateway", "port")
    port = _setting(plan, "server", "port")
    if port is None:
        port = plan.extension.gateway.port
    else:
        path = (*_SETTINGS, "server", "port")
    if door is not None:
        http = _setting(plan, "epp", "http_port")
        if http is not None:
            path, port = (*_SETTINGS, "epp", "http_port"), http
        reports = report_ports(plan, kubernetes_site(plan, 1))
        taken = {GRPC_PORT: "gRPC"} | {number: name for name, number in reports.items()}
        if port in taken:
            yield (
                path,
                FieldVerdict.WRONG,
                f"{port} is the pickers' port for {taken[port]}: choose another one",
            )
        return
    taken = dict.fromkeys(
        (*chain(*PICKER_PORTS), ADMIN_PORT), "a port of the pickers or of Envoy's admin page"
    )
    if port in taken:
        yield path, FieldVerdict.WRONG, f"{port} is {taken[port]} on the same host: choose another one"
    for worker in local_site(plan).workers:
        if worker.port in taken:
            field: Path = ("spec", "worker", "modelInvocationPort", "containerPort")
            text = f"{worker.port}, the port of {worker.name}, is {taken[worker.port]} on the same host"
            yield field, FieldVerdict.WRONG, text
            return


def _setting(plan: EndpointPlan, *path: str) -> Any:
    """A value of `x-kvroute.gateway.settings`; None without it."""
    setting: Any = plan.extension.gateway.settings
    for key in path:
        setting = setting.get(key) if isinstance(setting, dict) else None
    return setting


def shares_own_redis(plan: EndpointPlan) -> bool:
    """Whether the pickers share through a rendered Redis: the settings name no other."""
    sharing = (plan.extension.gateway.settings or {}).get("sharing") or {}
    return not (sharing.get("url") or sharing.get("url_file"))


def pickers_config(plan: EndpointPlan, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of pickers in a cluster, from that of a gateway. The gateway's port is theirs for
    HTTP."""
    epp, pods = config.get("epp", {}), config["fleet"]["kubernetes"]
    picker_options: dict[str, Any] = {
        "server": {"port": GRPC_PORT},
        "epp": {"http_port": epp.get("http_port", config["server"]["port"])},
    }
    if shares_own_redis(plan):
        picker_options["sharing"] = {
            "url": f"redis://{plan.name}-{SHARING}:{SHARING_PORT}",
            "password_file": f"{SECRETS}/{SHARING_PASSWORD}",
            "key_file": f"{SECRETS}/{SHARING_KEY}",
            "fleet": plan.name,
        }
    discovery = {key: value for key, value in pods.items() if key not in ("selector", "port")}
    fleet = config["fleet"] | {"kubernetes": discovery | {"pool": plan.name}}
    return merged(config, picker_options) | {"fleet": fleet}


def route_manifests(plan: EndpointPlan, config: dict[str, Any], door: GatewayRef) -> list[Manifest]:
    """The InferencePool of the workers, and the HTTPRoute that leads to it."""
    picker = {
        "name": f"{plan.name}-gateway",
        "port": {"number": config["server"]["port"]},
        "failureMode": "FailOpen" if _is_open(config) else "FailClose",
    }
    pool = {
        "selector": {"matchLabels": selector(plan, WORKER)},
        "targetPorts": [{"number": plan.port}],
        "endpointPickerRef": picker,
    }
    parent = {"name": door.name} | ({} if door.namespace is None else {"namespace": door.namespace})
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
        # A stream lasts as long as its answer.
        "timeouts": {"request": "0s"},
        "backendRefs": [{"group": INFERENCE_API, "kind": "InferencePool", "name": plan.name}],
    }
    route = {"parentRefs": [parent], "rules": [rule]}
    return [
        manifest(f"{INFERENCE_API}/v1", "InferencePool", plan, plan.name, GATEWAY, spec=pool),
        manifest(f"{_ROUTE_API}/v1", "HTTPRoute", plan, plan.name, GATEWAY, spec=route),
    ]


def data_plane(door: GatewayRef) -> list[Manifest]:
    """The NetworkPolicy peers that relay requests to the workers: the Gateway's Envoys, in any namespace."""
    return [
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {label: door.name}}}
        for label in _GATEWAY_LABELS
    ]
