"""The Helm chart in five settings: linted, rendered, valid in each release, and accepted by the gateway."""

from __future__ import annotations

import base64
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.manifests import RELEASES, check
from tests.support.rendered_redis import PASSWORDS, answers_to_auth

from kvroute.config.loading import load
from kvroute.deploy.render.plan import gateway_stop_s

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "kvroute"
HELM = Path(sys.executable).with_name("helm")
SECRETS = "/run/secrets/kvroute"
PODS = {"workers": {"labels": {"app": "vllm", "tier": "chat"}}}

SETTINGS: dict[str, dict[str, Any]] = {
    "two gateways that share": PODS,
    "one gateway behind an Ingress": {
        "replicas": 1,
        "workers": {"urls": ["http://10.0.0.5:8000", "http://10.0.0.6:8000"]},
        "config": {"routing": {"strategy": "session"}, "server": {"drain_timeout_s": 60}},
        "clientKeys": {"name": "clients", "key": "keys.yaml"},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            "hosts": ["llm.example.com"],
            "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}],
        },
    },
    "scaled and observed": PODS
    | {
        "autoscaling": {"enabled": True, "requestsInFlight": 200},
        "sharing": {"urlSecret": {"name": "redis", "key": "url"}},
        "tls": {"secretName": "gateway-tls"},
        "apiKeys": {"name": "clients", "key": "keys"},
        "monitoring": {
            "serviceMonitor": True,
            "prometheusRule": True,
            "dashboards": True,
            "labels": {"release": "prometheus"},
        },
    },
    "a picker for Envoy": PODS
    | {
        "door": "picker",
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "inference"}],
            "hostnames": ["llm.example.com"],
        },
    },
    "everything else": PODS
    | {
        "workers": {"labels": {"app": "vllm"}, "namespace": "engines", "port": 8000},
        "image": {"repository": "registry.example.com/kvroute", "tag": "1", "pullSecrets": ["registry"]},
        "keysSecret": "own-keys",
        "sharing": {"url": "redis://redis.example.com:6379"},
        "tls": {"secretName": "gateway-tls", "clientCa": True},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "inference", "namespace": "gateways"}]},
        "service": {
            "type": "LoadBalancer",
            "port": 443,
            "extraPorts": [{"name": "coordinator", "port": 9500}],
        },
        "networkPolicy": {
            "clients": [{"namespaceSelector": {}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
        },
        "topologySpread": {"kubernetes.io/hostname": "DoNotSchedule", "topology.kubernetes.io/zone": ""},
        "serviceAccount": {"name": "own-account"},
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
        "podLabels": {"team": "search"},
        "nodeSelector": {"pool": "services"},
        "tolerations": [{"key": "team", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "services",
        "extraEnv": [{"name": "HF_HOME", "value": "/models"}],
        "extraVolumes": [{"name": "models", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
    },
}
ALL = pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS.keys())


def helm(*arguments: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    text = yaml.safe_dump(values)
    return subprocess.run(
        [HELM, *arguments, "-f", "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of a release `gw` in the namespace `llm`, by kind and name."""
    objects = [each for each in yaml.safe_load_all(_rendered_text(json.dumps(values))) if each]
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


@functools.cache
def _rendered_text(values: str) -> str:
    done = helm("template", "gw", str(CHART), "-n", "llm", values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def gateway_config(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(found["ConfigMap", "gw-kvroute"]["data"]["kvroute.yaml"])
    return config


def pod_of(found: dict[tuple[str, str], dict[str, Any]], name: str = "gw-kvroute") -> dict[str, Any]:
    pod: dict[str, Any] = found["Deployment", name]["spec"]["template"]["spec"]
    return pod


@ALL
def test_it_is_linted_without_a_complaint(values):
    done = helm("lint", "--strict", str(CHART), values=values)

    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


@ALL
def test_its_objects_are_valid_in_each_release_of_kubernetes(values):
    found = rendered(values)

    for each in found.values():
        assert each["metadata"]["namespace"] == (
            "engines" if each["kind"].startswith("Role") and "namespace" in values["workers"] else "llm"
        )
        for release in RELEASES:
            check(each, release)


@ALL
def test_its_pods_are_of_the_restricted_profile(values):
    """The rules of Kubernetes' "Pod Security Standards" for the fields that the chart uses."""
    for (kind, _), each in rendered(values).items():
        if kind != "Deployment":
            continue
        pod = each["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "emptyDir", "projected", "secret"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
            assert not any("hostPort" in port for port in container["ports"])


@ALL
def test_names_inside_the_objects_lead_somewhere(values):
    """Ports by name, volumes, ConfigMaps and Secrets of the chart, selectors, and the account."""
    found = rendered(values)
    external = {"own-keys", "clients", "redis", "gateway-tls", "registry"}
    for (kind, name), each in found.items():
        spec = each.get("spec", {})
        if kind == "Deployment":
            labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert len(volumes) == len(pod["volumes"])
            for container in pod["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
            secrets = [
                source["secret"]["name"]
                for source in volumes.get("keys", {}).get("projected", {}).get("sources", [])
            ]
            assert all(secret in external or ("Secret", secret) in found for secret in secrets)
            account = pod.get("serviceAccountName")
            assert account in (None, "own-account") or ("ServiceAccount", account) in found
        if kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor"):
            selector = spec.get("podSelector") or spec["selector"]
            wanted = selector.get("matchLabels", selector)
            deployments = [
                one["spec"]["template"]
                for (other, _), one in found.items()
                if other == "Deployment"
                and wanted.items() <= one["spec"]["template"]["metadata"]["labels"].items()
            ]
            assert len(deployments) == 1, name
            named = {port["name"] for port in deployments[0]["spec"]["containers"][0]["ports"]}
            targets = {port["targetPort"] for port in spec.get("ports", [])} if kind == "Service" else set()
            targets |= {port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]}
            targets |= {endpoint["port"] for endpoint in spec.get("endpoints", [])}
            assert targets <= named


@ALL
def test_the_gateway_accepts_its_configuration(values, tmp_path):
    config = gateway_config(rendered(values))
    for name in ("admin-key", "sharing-key", "sharing-url", "redis-password", "api-keys"):
        (tmp_path / name).write_text("redis://redis:6379" if name == "sharing-url" else name * 3)
    (tmp_path / "client-keys").write_text("keys: []\n")
    file = tmp_path / "kvroute.yaml"
    file.write_text(yaml.safe_dump(config).replace(SECRETS, str(tmp_path)))

    loaded = load(file=file).config

    assert loaded.fleet.kubernetes.enabled is ("labels" in values["workers"])
    assert loaded.server.host == "0.0.0.0"
    assert loaded.admin.api_key is not None
    pod = pod_of(rendered(values))
    assert pod["terminationGracePeriodSeconds"] >= gateway_stop_s(config["server"])


def test_two_gateways_share_through_the_charts_redis_with_random_keys():
    found = rendered(SETTINGS["two gateways that share"])
    config = gateway_config(found)
    keys = found["Secret", "gw-kvroute-keys"]["data"]
    _rendered_text.cache_clear()
    again = rendered(SETTINGS["two gateways that share"])["Secret", "gw-kvroute-keys"]["data"]

    assert found["Deployment", "gw-kvroute"]["spec"]["replicas"] == 2
    assert config["sharing"]["url"] == "redis://gw-kvroute-sharing:6379"
    assert ("Service", "gw-kvroute-sharing") in found
    assert config["fleet"]["kubernetes"]["selector"] == "app=vllm,tier=chat"
    assert all(len(base64.b64decode(key)) >= 32 for key in keys.values())
    assert len({*keys.values(), *again.values()}) == 6
    mounted = {
        item["path"]
        for source in next(v for v in pod_of(found)["volumes"] if v["name"] == "keys")["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    assert mounted == {"admin-key", "sharing-key", "redis-password"}


def test_images_have_a_digest_where_one_is_given():
    digest = "sha256:" + "5a" * 32
    given = {
        "image": {"tag": "1", "digest": digest},
        "sharing": {"redis": {"image": "r:7", "digest": digest}},
    }
    objects = rendered(SETTINGS["two gateways that share"] | given)
    images = [
        pod_of(objects, name)["containers"][0]["image"] for name in ("gw-kvroute", "gw-kvroute-sharing")
    ]

    assert images == [f"kvroute:1@{digest}", f"r:7@{digest}"]


def test_the_password_of_redis_is_on_no_command_line():
    [container] = pod_of(rendered(SETTINGS["two gateways that share"]), "gw-kvroute-sharing")["containers"]
    words = " ".join([*container["command"], *container.get("args", ())])
    assert "$(REDIS_PASSWORD)" not in words
    assert "--requirepass" not in words
    assert 'requirepass "$quoted"\n' in words


@pytest.mark.parametrize("password", PASSWORDS)
async def test_any_password_works_in_the_rendered_redis(password, tmp_path):
    [container] = pod_of(rendered(SETTINGS["two gateways that share"]), "gw-kvroute-sharing")["containers"]

    right, wrong = await answers_to_auth(container["command"], password, tmp_path)

    assert right == b"+OK\r\n"
    assert wrong == b"-WRONG"


def test_only_pods_of_the_namespace_reach_ports_without_keys():
    values = PODS | {"service": {"extraPorts": [{"name": "coordinator", "port": 9500}]}}
    open_to = {"networkPolicy": {"extraClients": [{"podSelector": {"matchLabels": {"app": "lmcache"}}}]}}
    for more, peers in (({}, [{"podSelector": {}}]), (open_to, open_to["networkPolicy"]["extraClients"])):
        public, extra = rendered(values | more)["NetworkPolicy", "gw-kvroute"]["spec"]["ingress"]
        assert [port["port"] for port in public["ports"]] == ["http"]
        assert "from" not in public
        assert extra == {"ports": [{"protocol": "TCP", "port": "coordinator"}], "from": peers}


def test_one_gateway_shares_with_nobody_and_only_inference_is_public():
    found = rendered(SETTINGS["one gateway behind an Ingress"])
    config = gateway_config(found)

    assert "sharing" not in config
    assert ("Deployment", "gw-kvroute-sharing") not in found
    assert config["server"]["drain_timeout_s"] == 60  # `config` overrides the chart
    assert config["server"]["shutdown_delay_s"] == 5
    [rule] = found["Ingress", "gw-kvroute"]["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    assert "llm.example.com" in config["admin"]["allowed_hosts"]
    assert not any(kind in ("Role", "PodDisruptionBudget") for kind, _ in found)


def test_alerts_and_dashboards_are_those_of_configs():
    found = rendered(SETTINGS["scaled and observed"])

    alerts = yaml.safe_load((ROOT / "configs" / "alerts" / "kvroute.yaml").read_text())
    assert found["PrometheusRule", "gw-kvroute"]["spec"] == alerts
    boards = {
        f"kvroute-{file.name}": file.read_text() for file in (ROOT / "configs" / "grafana").glob("*.json")
    }
    assert boards
    dashboards = found["ConfigMap", "gw-kvroute-dashboards"]
    assert dashboards["data"] == boards
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    [endpoint] = found["ServiceMonitor", "gw-kvroute"]["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"


def test_gateways_are_scaled_by_cpu_and_running_requests():
    found = rendered(SETTINGS["scaled and observed"])

    scaler = found["HorizontalPodAutoscaler", "gw-kvroute"]["spec"]
    assert [next(iter(set(metric) - {"type"})) for metric in scaler["metrics"]] == ["resource", "pods"]
    assert scaler["metrics"][1]["pods"]["target"]["averageValue"] == "200"
    assert "replicas" not in found["Deployment", "gw-kvroute"]["spec"]
    assert ("PodDisruptionBudget", "gw-kvroute") in found


def test_probes_reach_a_gateway_with_tls():
    https = pod_of(rendered(SETTINGS["scaled and observed"]))["containers"][0]
    certificate = pod_of(rendered(SETTINGS["everything else"]))["containers"][0]

    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert https[probe]["httpGet"]["scheme"] == "HTTPS"
        assert certificate[probe]["tcpSocket"] == {"port": "http"}


def test_a_picker_is_an_inference_pool_and_its_route_leads_there():
    found = rendered(SETTINGS["a picker for Envoy"])
    pool = found["InferencePool", "gw-kvroute"]["spec"]
    [backend] = found["HTTPRoute", "gw-kvroute"]["spec"]["rules"][0]["backendRefs"]
    ports = {port["name"]: port for port in found["Service", "gw-kvroute"]["spec"]["ports"]}

    assert pod_of(found)["containers"][0]["args"][0] == "epp"
    assert pool["selector"]["matchLabels"] == {"app": "vllm", "tier": "chat"}
    assert pool["endpointPickerRef"]["port"]["number"] == ports["grpc"]["port"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "gw-kvroute"}


def test_a_picker_finds_the_workers_by_its_inference_pool_and_may_read_it():
    found = rendered(SETTINGS["a picker for Envoy"])
    rules = found["Role", "gw-kvroute"]["rules"]

    pool = {"enabled": True, "namespace": "llm", "pool": "gw-kvroute"}
    assert gateway_config(found)["fleet"]["kubernetes"] == pool
    granted = {(rule["apiGroups"][0], each): rule["verbs"] for rule in rules for each in rule["resources"]}
    assert granted["inference.networking.k8s.io", "inferencepools"] == ["get", "list", "watch"]
    gateway = rendered(SETTINGS["two gateways that share"])["Role", "gw-kvroute"]["rules"]
    assert not any("inferencepools" in rule["resources"] for rule in gateway)


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({}, "FailOpen"),
        ({"apiKeys": {"name": "clients", "key": "keys"}}, "FailClose"),
        ({"clientKeys": {"name": "clients", "key": "keys.yaml"}}, "FailClose"),
        ({"config": {"server": {"client_keys": {"file": "/etc/keys.yaml"}}}}, "FailClose"),
        ({"config": {"server": {"jwt": {"jwks_url": "https://issuer/keys"}}}}, "FailClose"),
        ({"apiKeys": {"name": "clients", "key": "keys"}, "picker": {"failureMode": "FailOpen"}}, "FailOpen"),
    ],
)
def test_requests_pass_no_dead_picker_that_checks_keys(values, mode):
    pool = rendered(SETTINGS["a picker for Envoy"] | values)["InferencePool", "gw-kvroute"]["spec"]

    assert pool["endpointPickerRef"]["failureMode"] == mode


def test_an_encrypted_picker_is_not_called_plaintext():
    found = rendered(SETTINGS["a picker for Envoy"] | {"tls": {"secretName": "gateway-tls"}})

    assert all("appProtocol" not in port for port in found["Service", "gw-kvroute"]["spec"]["ports"])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "no workers: set workers.labels, workers.urls or config.fleet"),
        (PODS | {"replica": 3}, "Additional property replica is not allowed"),
        (PODS | {"apiKeys": {"name": "clients"}}, "key"),
        (PODS | {"httpRoute": {"enabled": True}}, "httpRoute.parentRefs: name the Gateway"),
        ({"door": "picker", "workers": {"urls": ["http://a:1"]}}, "an InferencePool selects"),
        (PODS | {"door": "picker", "ingress": {"enabled": True}}, "use httpRoute"),
        (
            PODS | {"door": "picker", "config": {"server": {"processes": 2}}},
            "config.server.processes: must be 1",
        ),
        (
            PODS | {"door": "picker", "service": {"port": 9002}},
            "service.port: 9002 is the picker's gRPC port",
        ),
        (
            {"door": "picker", "workers": {"labels": {"app": "vllm"}, "namespace": "engines"}},
            "workers.namespace: an InferencePool selects pods of its own namespace",
        ),
        (PODS | {"config": {"server": {"port": 9000}}}, "config.server.port: the chart sets it"),
        (PODS | {"config": {"server": {"tls": {"cert_file": "/c"}}}}, "config.server.tls: the chart sets it"),
        (
            PODS | {"config": {"server": {"api_keys": ["k"]}}},
            "config.server.api_keys: a ConfigMap is no place",
        ),
        (PODS | {"config": {"admin": {"api_key": "k"}}}, "config.admin.api_key: a ConfigMap is no place"),
        (PODS | {"config": {"sharing": {"key": "k"}}}, "config.sharing.key: a ConfigMap is no place"),
        *(
            (PODS | {"config": {section: {name: "k"}}}, f"config.{section}.{name}: a ConfigMap is no place")
            for section, name in (("fleet", "worker_api_key"), ("sharing", "password"))
        ),
        *(
            (
                PODS | {"config": {"lmcache": {part: {name: text}}}},
                f"config.lmcache.{part}.{name}: a ConfigMap",
            )
            for part, name, text in (
                ("l2", "redis_password", "k"),
                ("l2", "redis_url", "redis://:k@r:6379"),
                ("tierd", "key", "k"),
            )
        ),
        (
            PODS | {"config": {"sharing": {"url": "redis://u:k@r:6379"}}},
            "config.sharing.url: a ConfigMap is no place for a password; set sharing.urlSecret",
        ),
        (
            PODS | {"replicas": 2, "sharing": {"url": "redis://u:k@r:6379"}},
            "sharing.url: a ConfigMap is no place for a password; set sharing.urlSecret",
        ),
        (PODS | {"config": {"epp": {"http_port": 9091}}}, "config.epp.http_port: the chart sets it"),
    ],
)
def test_wrong_values_are_refused_in_words(values, problem):
    done = helm("template", "gw", str(CHART), values=values)

    assert done.returncode != 0
    assert problem in done.stderr


def test_every_value_is_in_the_schema():
    """Of sections with known names; others are Kubernetes' or the gateway's own."""

    def compare(values: Any, schema: Any, path: str) -> None:
        if isinstance(values, dict) and schema.get("additionalProperties") is False:
            assert values.keys() <= schema["properties"].keys(), path
            for name, value in values.items():
                compare(value, schema["properties"][name], f"{path}.{name}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    compare(values, schema, "")
    assert schema["properties"].keys() - {"global"} == values.keys()
