"""`render --to kubernetes --gateway`: endpoint pickers, and the Gateway's route to the workers."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.support.manifests import check
from tests.support.rendered_redis import PASSWORDS, answers_to_auth

from kvroute.config.config import Config
from kvroute.config.loading import load
from kvroute.deploy.render.envoy import GatewayRef, gateway_ref
from kvroute.deploy.render.kubernetes import SECRET_FILE, kubernetes_objects, render_kubernetes
from kvroute.deploy.render.manifest import with_earlier_keys
from kvroute.deploy.render.registry import target_findings
from kvroute.deploy.spec.loading import Finding, SpecReading
from kvroute.deploy.spec.source import FieldVerdict
from kvroute.fleet.discovery.kubernetes_api import read_pool

DOOR = GatewayRef("inference", "infra")
KVAWARE = {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"}
KEYS = {"x-kvroute.gateway.apiKeysSecret": {"name": "keys", "key": "list"}}

Found = dict[tuple[str, str], dict[str, Any]]


def objects_of(plan) -> Found:
    """Everything by kind and name; all valid."""
    objects = [each for file in kubernetes_objects(plan, DOOR).values() for each in file]
    for each in objects:
        check(each)
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def picker_findings_of(reading: SpecReading, target: str, door: GatewayRef = DOOR) -> list[Finding]:
    """What is found for a target with pickers in a spec without a wrong field."""
    document = reading.require("spec.yaml")
    return target_findings(target, document, reading.findings, door if target == "kubernetes" else None)


def picker_config(found: Found, tmp_path) -> Config:
    text = found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"]
    for name in ("admin-key", "sharing-key", "redis-password", "api-keys"):
        (tmp_path / name).write_text("k" * 40)
    file = tmp_path / "kvroute.yaml"
    file.write_text(text.replace("/run/secrets/kvroute", str(tmp_path)))
    return load(file=file).config


def allowed(found: Found, component: str) -> list[dict[str, Any]]:
    return found["NetworkPolicy", f"demo-{component}"]["spec"]["ingress"]


@pytest.mark.parametrize("changes", [{}, KVAWARE, KEYS, {"x-kvroute.engine": "sim"}])
def test_the_route_leads_to_the_workers_pods(changes, own, plan):
    found = objects_of(plan(own(changes)))
    route, pool = found["HTTPRoute", "demo"]["spec"], found["InferencePool", "demo"]
    (worker,) = [each for (kind, _), each in found.items() if kind == "StatefulSet"]
    template = worker["spec"]["template"]

    assert route["parentRefs"] == [{"name": "inference", "namespace": "infra"}]
    ((backend,),) = [rule["backendRefs"] for rule in route["rules"]]
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    target = read_pool(pool).target
    assert target is not None
    terms = dict(term.split("=") for term in target.selector.split(","))
    assert terms.items() <= template["metadata"]["labels"].items()
    ports = template["spec"]["containers"][0]["ports"]
    assert set(target.ports) <= {port["containerPort"] for port in ports}


def test_the_pool_names_the_pickers_service(own, plan, tmp_path):
    found = objects_of(plan(own()))
    picker = found["InferencePool", "demo"]["spec"]["endpointPickerRef"]
    service = found["Service", picker["name"]]["spec"]
    deployment = found["Deployment", "demo-gateway"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    config = picker_config(found, tmp_path)

    (port,) = [port for port in service["ports"] if port["port"] == picker["port"]["number"]]
    assert (port["targetPort"], port["appProtocol"]) == ("grpc", "kubernetes.io/h2c")
    assert container["args"][0] == "epp"
    listening = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert listening == {"grpc": config.server.port, "http": config.epp.http_port}
    assert deployment["replicas"] == 2
    assert picker["failureMode"] == "FailOpen"


def test_pickers_find_the_workers_by_the_pool_and_may_read_it(own, plan, tmp_path):
    found = objects_of(plan(own()))
    config = picker_config(found, tmp_path)

    assert (config.fleet.kubernetes.enabled, config.fleet.kubernetes.pool) == (True, "demo")
    rules = found["Role", "demo-gateway"]["rules"]
    granted = {(rule["apiGroups"][0], each): rule["verbs"] for rule in rules for each in rule["resources"]}
    assert granted["inference.networking.k8s.io", "inferencepools"] == ["get", "list", "watch"]
    assert granted["", "pods"] == ["get", "list", "watch"]


def test_two_pickers_share_through_a_redis_of_their_own(own, plan, tmp_path):
    made = plan(own())
    found = objects_of(made)
    config = picker_config(found, tmp_path)
    written = yaml.safe_load_all(render_kubernetes(made, DOOR)[SECRET_FILE])
    secrets = {each["metadata"]["name"]: each for each in written}
    (redis,) = found["Deployment", "demo-sharing"]["spec"]["template"]["spec"]["containers"]
    volumes = found["Deployment", "demo-gateway"]["spec"]["template"]["spec"]["volumes"]
    (sources,) = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "keys"]

    for each in secrets.values():
        check(each)
    assert config.sharing.url is not None
    assert config.sharing.url.get_secret_value() == "redis://demo-sharing:6379"
    assert found["Service", "demo-sharing"]["spec"]["ports"][0]["port"] == 6379
    (variable,) = redis["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert reference["key"] in secrets[reference["name"]]["stringData"]
    assert f'"${variable["name"]}" | sed' in " ".join(redis["command"])
    mounted = {item["path"] for each in sources for item in each["secret"]["items"]}
    assert mounted == {"admin-key", "sharing-key", "redis-password"}
    (rule,) = allowed(found, "sharing")
    assert rule["from"] == [{"podSelector": found["Deployment", "demo-gateway"]["spec"]["selector"]}]


@pytest.mark.parametrize("password", PASSWORDS)
async def test_any_password_works_in_the_rendered_redis(password, own, plan, tmp_path):
    found = objects_of(plan(own()))
    [container] = found["Deployment", "demo-sharing"]["spec"]["template"]["spec"]["containers"]

    right, wrong = await answers_to_auth(container["command"], password, tmp_path)

    assert right == b"+OK\r\n"
    assert wrong == b"-WRONG"


def test_settings_with_a_redis_of_their_own_render_none(own, plan, tmp_path):
    sharing = {"url": "redis://cache:6379", "key": "x" * 40}
    made = plan(own({"x-kvroute.gateway.settings": {"sharing": sharing}}))
    found = objects_of(made)

    assert ("Deployment", "demo-sharing") not in found
    assert "sharing" not in "".join(render_kubernetes(made, DOOR)[SECRET_FILE])
    url = picker_config(found, tmp_path).sharing.url
    assert url is not None
    assert url.get_secret_value() == "redis://cache:6379"


def test_generated_keys_are_kept(own, plan):
    plain = render_kubernetes(plan(own()))[SECRET_FILE]
    earlier, later = (render_kubernetes(plan(own()), DOOR)[SECRET_FILE] for _ in range(2))

    assert with_earlier_keys(later, earlier) == earlier
    admin, sharing = yaml.safe_load_all(with_earlier_keys(later, plain))
    (before,) = yaml.safe_load_all(plain)
    assert admin == before
    assert sharing in list(yaml.safe_load_all(later))


def test_keys_of_pickers_outlive_a_rendering_without_them(own, plan):
    """Otherwise pickers that run would have other keys than those that start later."""
    pickers = render_kubernetes(plan(own()), DOOR)[SECRET_FILE]
    gateway = with_earlier_keys(render_kubernetes(plan(own()))[SECRET_FILE], pickers)

    again = with_earlier_keys(render_kubernetes(plan(own()), DOOR)[SECRET_FILE], gateway)

    assert again == pickers


@pytest.mark.parametrize(
    ("scaling", "limits"),
    [
        ({"minReplicaCount": 1, "maxReplicaCount": 1}, (2, 2)),
        ({"maxReplicaCount": 8}, (2, 8)),
        ({"minReplicaCount": 3, "maxReplicaCount": 8}, (3, 8)),
    ],
)
def test_an_autoscaler_keeps_two_pickers(scaling, limits, own, plan):
    found = objects_of(plan(own({"spec.intelligentRoutingSpec.autoScalingSpec": scaling})))
    limits_of = found["HorizontalPodAutoscaler", "demo-gateway"]["spec"]

    assert (limits_of["minReplicas"], limits_of["maxReplicas"]) == limits


@pytest.mark.parametrize(
    ("changes", "target", "complaint"),
    [
        (
            {
                "x-kvroute.kubernetes": {"workload": "Deployment"},
                "x-kvroute.scaling": {"deletionCost": True},
            },
            "kubernetes",
            "x-kvroute.scaling.deletionCost: needs one gateway",
        ),
        (
            {"x-kvroute.gateway.settings": {"scaling": {"deletion_cost": {"enabled": True}}}},
            "kubernetes",
            "x-kvroute.gateway.settings.scaling.deletion_cost.enabled: needs one gateway",
        ),
        *(
            (
                {"x-kvroute.gateway.settings": {"server": {"processes": 2}}},
                target,
                "x-kvroute.gateway.settings.server.processes: must be 1",
            )
            for target in ("kubernetes", "envoy")
        ),
        ({"x-kvroute.gateway.port": 9002}, "kubernetes", "x-kvroute.gateway.port: 9002"),
        (
            {"x-kvroute.gateway.settings": {"epp": {"http_port": 9002}}},
            "kubernetes",
            "x-kvroute.gateway.settings.epp.http_port: 9002",
        ),
        (
            {"x-kvroute.gateway.settings": {"server": {"port": 9002}}},
            "kubernetes",
            "x-kvroute.gateway.settings.server.port: 9002",
        ),
        (KVAWARE | {"x-kvroute.gateway.port": 9300}, "kubernetes", "x-kvroute.gateway.port: 9300"),
        ({"x-kvroute.gateway.port": 9901}, "envoy", "x-kvroute.gateway.port: 9901"),
        (
            {"spec.worker.modelInvocationPort": {"containerPort": 9089}, "spec.replicas": 2},
            "envoy",
            "spec.worker.modelInvocationPort.containerPort: 9090",
        ),
    ],
)
def test_what_pickers_cannot_have_is_refused_by_name(changes, target, complaint, own, read):
    findings = picker_findings_of(read(own(changes)), target)

    (wrong,) = [each for each in findings if each.verdict is FieldVerdict.WRONG]
    assert str(wrong).startswith(complaint)
    assert not [each for each in findings if each.path == wrong.path and each is not wrong]


@pytest.mark.parametrize("target", ["kubernetes", "envoy"])
def test_other_ports_of_workers_and_gateway_are_rendered(target, own, read):
    """In a cluster workers and pickers have addresses of their own."""
    port = 9002 if target == "kubernetes" else 9100
    changes = {"spec.worker.modelInvocationPort": {"containerPort": port}, "x-kvroute.gateway.port": 9003}
    if target == "envoy":
        changes["x-kvroute.gateway.port"] = 9200

    findings = picker_findings_of(read(own(changes)), target)

    assert not [each for each in findings if each.verdict is FieldVerdict.WRONG]


@pytest.mark.parametrize(("door", "is_noted"), [(DOOR, True), (GatewayRef("inference"), False)])
def test_a_gateway_of_another_namespace_must_accept_the_route(door, is_noted, own, read):
    findings = picker_findings_of(read(own()), "kubernetes", door)

    noted = [each.text for each in findings if each.verdict is FieldVerdict.NOTED]
    assert any("allowedRoutes" in text for text in noted) is is_noted


def test_an_endpoints_own_namespace_needs_no_note(own, read, plan):
    door = GatewayRef("inference", plan(own()).namespace)

    assert not [each for each in picker_findings_of(read(own()), "kubernetes", door) if not each.path]


def test_fewer_than_two_pickers_are_noted(own, read):
    scaling = {"minReplicaCount": 1, "maxReplicaCount": 4}
    reading = read(own({"spec.intelligentRoutingSpec.autoScalingSpec": scaling}))

    texts = [str(each) for each in picker_findings_of(reading, "kubernetes")]

    field = "spec.intelligentRoutingSpec.autoScalingSpec"
    assert f"{field}.minReplicaCount: applied as 2, the least number of pickers" in texts
    assert not [text for text in texts if text.startswith(f"{field}.maxReplicaCount: applied as")]


def test_the_network_lets_the_gateways_envoys_reach_pickers_and_workers(own, plan):
    found = objects_of(plan(own()))

    peers = [each for rule in allowed(found, "worker") for each in rule["from"]]
    envoys = [each for each in peers if each.get("namespaceSelector") == {}]
    assert {"gateway.networking.k8s.io/gateway-name": "inference"} in [
        each["podSelector"]["matchLabels"] for each in envoys
    ]
    everybody = [rule["ports"] for rule in allowed(found, "gateway") if "from" not in rule]
    assert [port["port"] for port in everybody[0]] == [9002, 8080]


TOKENS = {"x-kvroute.gateway.settings": {"server": {"jwt": {"jwks_url": "https://issuer/keys"}}}}


@pytest.mark.parametrize("checks", [KEYS, TOKENS])
def test_requests_pass_no_dead_picker_where_keys_are_checked(own, plan, checks):
    found = objects_of(plan(own(checks)))

    assert found["InferencePool", "demo"]["spec"]["endpointPickerRef"]["failureMode"] == "FailClose"


def test_encrypted_pickers_are_not_called_plaintext(own, plan):
    tls = {"server": {"tls": {"cert_file": "/etc/tls/tls.crt", "key_file": "/etc/tls/tls.key"}}}
    found = objects_of(plan(own({"x-kvroute.gateway.settings": tls})))

    assert all("appProtocol" not in port for port in found["Service", "demo-gateway"]["spec"]["ports"])


@pytest.mark.parametrize(
    ("text", "door"),
    [("edge", GatewayRef("edge")), ("infra/edge", GatewayRef("edge", "infra"))],
)
def test_a_gateway_is_named_with_or_without_its_namespace(text, door):
    assert gateway_ref(text) == door


@pytest.mark.parametrize("text", ["", "a/b/c", "Edge", "/edge", "infra/", "-edge"])
def test_a_name_that_no_gateway_can_have_is_refused(text):
    with pytest.raises(ValueError, match="NAMESPACE"):
        gateway_ref(text)
