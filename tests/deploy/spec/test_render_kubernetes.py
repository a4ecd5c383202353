from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from tests.support.manifests import RELEASES, check

from kvroute.app.reference import families
from kvroute.config import paths as config_loading
from kvroute.config.config import Config
from kvroute.config.loading import load
from kvroute.deploy.l2.registry import BACKENDS
from kvroute.deploy.render.config import SECRET_OPTIONS
from kvroute.deploy.render.kubernetes import (
    SECRET_FILE,
    kubernetes_objects,
    render_kubernetes,
)
from kvroute.deploy.render.manifest import with_earlier_keys
from kvroute.deploy.spec.loading import fix_layout

S3 = {"endpoint": "s3://b.s3.eu-central-1.amazonaws.com", "region": "eu-central-1"}
BACKEND = "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"
KVAWARE = {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"}
TRIGGER = {"serverAddress": "http://prometheus:9090", "query": "up", "targetValue": 4.5}


def objects_of(plan) -> dict[tuple[str, str], dict[str, Any]]:
    """Everything by kind and name; all valid."""
    objects = [each for file in kubernetes_objects(plan).values() for each in file]
    for each in objects:
        check(each)
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def pod(found, kind: str, name: str) -> dict[str, Any]:
    return found[kind, name]["spec"]["template"]["spec"]


def flag(container: dict[str, Any], name: str) -> str:
    return container["args"][container["args"].index(name) + 1]


@pytest.mark.parametrize("servers", ["per-node", "per-worker"])
@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_every_second_tier_gives_valid_manifests(backend, servers, own, plan):
    changes = {
        BACKEND: backend,
        "spec.kvCacheSpec.enableL2Cache": backend is not None,
        "x-kvroute.l2.s3": S3,
        "x-kvroute.lmcache.servers": servers,
    }
    found = objects_of(plan(own(changes | KVAWARE)))

    assert ("StatefulSet", "demo-worker") in found
    assert (("DaemonSet", "demo-lmcache") in found) == (servers == "per-node")


@pytest.mark.parametrize(
    "changes",
    [
        {"x-kvroute.lmcache.mode": "classic"},
        {"x-kvroute.lmcache.mode": "classic", BACKEND: "fs"},
        {"x-kvroute.lmcache.mode": "classic", **KVAWARE},
        {"x-kvroute.engine": "sim"},
        {"x-kvroute.device": "cpu", "spec.model": "small"},
        {"spec.kvCacheSpec": None, "spec.metrics": {"enabled": False}},
        {"spec.model": "/data/model"},
        {"x-kvroute.platform": "hyperpod", BACKEND: "tieredstorage"},
    ],
)
def test_every_other_shape_gives_valid_manifests(changes, own, plan):
    assert ("Deployment", "demo-gateway") in objects_of(plan(own(changes)))


def test_the_announcements_spec_gives_valid_manifests(sample, fill_in, plan):
    found = objects_of(plan(fill_in(fix_layout(sample).text)))

    assert ("DaemonSet", "demo-tierd") in found
    assert found["PersistentVolume", "default-demo-model"]["spec"]["csi"]["driver"] == "s3.csi.aws.com"


def test_the_written_manifests_are_the_checked_ones(own, plan):
    made = plan(own(KVAWARE))

    files = {name: list(yaml.safe_load_all(text)) for name, text in render_kubernetes(made).items()}
    (secret,) = files.pop(SECRET_FILE)
    assert files == kubernetes_objects(made)
    check(secret)


def test_a_wrong_manifest_would_be_noticed(own, plan):
    (gateway,) = [
        each for each in kubernetes_objects(plan(own()))["gateway.yaml"] if each["kind"] == "Deployment"
    ]
    gateway["spec"]["template"]["spec"]["enableServicelinks"] = False
    with pytest.raises(jsonschema.ValidationError):
        check(gateway)

    (monitor, *_) = [
        each
        for each in kubernetes_objects(plan(own()))["monitoring.yaml"]
        if each["kind"] == "ServiceMonitor"
    ]
    monitor["spec"]["endpoints"][0]["prot"] = "http"
    with pytest.raises(jsonschema.ValidationError):
        check(monitor)


# --- gateway ----------------------------------------------------------------------------------------------


def gateway_config(found, tmp_path) -> Any:
    file = tmp_path / "kvroute.yaml"
    text = found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"]
    (tmp_path / "admin-key").write_text("an-admin-key-0123")
    file.write_text(text.replace("/run/secrets/kvroute", str(tmp_path)))
    return load(file=file).config


def test_the_gateways_configuration_loads_and_finds_the_workers_pods(own, plan, tmp_path):
    found = objects_of(plan(own()))
    config = gateway_config(found, tmp_path)

    assert config.server.host == "0.0.0.0"
    assert config.routing.strategy == "prefixaware"
    assert config.fleet.workers == ()
    wanted = config.fleet.kubernetes
    assert (wanted.enabled, wanted.resource, wanted.namespace) == (True, "pods", "default")
    labels = found["StatefulSet", "demo-worker"]["spec"]["template"]["metadata"]["labels"]
    terms = dict(term.split("=") for term in wanted.selector.split(","))
    assert terms.items() <= labels.items()
    others = found["Deployment", "demo-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert not terms.items() <= others.items()
    ports = pod(found, "StatefulSet", "demo-worker")["containers"][0]["ports"]
    assert wanted.port in [port["name"] for port in ports]


def test_the_gateway_has_the_permissions_to_discover_workers(own, plan, tmp_path):
    found = objects_of(plan(own()))
    wanted = gateway_config(found, tmp_path).fleet.kubernetes

    rules = found["Role", "demo-gateway"]["rules"]
    assert any(
        wanted.resource in rule["resources"] and {"list", "watch"} <= set(rule["verbs"]) for rule in rules
    )
    account = pod(found, "Deployment", "demo-gateway")["serviceAccountName"]
    assert found["RoleBinding", "demo-gateway"]["subjects"][0]["name"] == account
    assert found["ServiceAccount", account]["automountServiceAccountToken"] is True


def test_the_gateways_pod_is_locked_down_and_probed(own, plan):
    found = objects_of(plan(own()))
    spec = pod(found, "Deployment", "demo-gateway")
    (container,) = spec["containers"]

    assert found["Deployment", "demo-gateway"]["spec"]["replicas"] == 1
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert spec["terminationGracePeriodSeconds"] > 35


@pytest.mark.parametrize("asks", [False, True])
def test_a_gateway_with_tls_gets_its_secret_by_overlay_and_probes_that_can_reach_it(own, plan, asks):
    folder = "/etc/kvroute-tls"
    tls = {"cert_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key"}
    if asks:
        tls["client_ca_file"] = f"{folder}/ca.crt"
    mount = {"name": "tls", "mountPath": folder, "readOnly": True}
    volume = {"name": "tls", "secret": {"secretName": "gateway-tls"}}
    changes = {
        "x-kvroute.gateway.settings": {"server": {"tls": tls}},
        "x-kvroute.kubernetes.servicePodTemplate": {
            "spec": {"containers": [{"name": "kvroute", "volumeMounts": [mount]}], "volumes": [volume]}
        },
    }

    spec = pod(objects_of(plan(own(changes))), "Deployment", "demo-gateway")

    (container,) = spec["containers"]
    assert mount in container["volumeMounts"]
    assert volume in spec["volumes"]
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if asks:
            assert container[name]["tcpSocket"] == {"port": "http"}
            assert "httpGet" not in container[name]
        else:
            assert container[name]["httpGet"]["scheme"] == "HTTPS"


def test_no_pod_gets_variables_of_services(own, plan):
    found = objects_of(plan(own()))

    pods = [each["spec"]["template"]["spec"] for each in found.values() if "template" in each.get("spec", {})]
    assert len(pods) == 4
    assert all(each["enableServiceLinks"] is False for each in pods)


def test_keys_come_from_secrets_by_reference(own, plan):
    secret = {"name": "keys", "key": "clients"}
    found = objects_of(
        plan(
            own(
                {
                    "x-kvroute.gateway": {
                        "apiKeysSecret": secret,
                        "adminKeySecret": {"name": "keys", "key": "admin"},
                    }
                }
            )
        )
    )
    config = yaml.safe_load(found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"])
    volumes = pod(found, "Deployment", "demo-gateway")["volumes"]
    (keys,) = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "keys"]

    assert config["server"]["api_keys_file"] == "/run/secrets/kvroute/api-keys"
    assert config["admin"]["api_key_file"] == "/run/secrets/kvroute/admin-key"
    assert [each["secret"]["items"][0] for each in keys] == [
        {"key": "clients", "path": "api-keys"},
        {"key": "admin", "path": "admin-key"},
    ]
    assert not [key for key in found if key[0] == "Secret"]


def test_keys_and_passwords_of_the_settings_are_in_a_secret_not_in_the_configmap(own, plan, tmp_path):
    settings = {
        "fleet": {"worker_api_key": "hidden-worker"},
        "admin": {"api_key": "hidden-admin-0123456789"},
        "server": {"api_keys": ["hidden-a", "hidden-b"]},
        "sharing": {"url": "redis://user:hidden-redis@r:6379", "key": "hidden-" + "0" * 32},
        "lmcache": {"l2": {"redis_url": "redis://r:6379", "redis_password": "hidden-l2"}},
    }
    files = render_kubernetes(plan(own({"x-kvroute.gateway.settings": settings})))
    (secret,) = yaml.safe_load_all(files.pop("gateway-settings-secret.yaml"))
    gateway = [each for each in yaml.safe_load_all(files["gateway.yaml"]) if each]

    assert "hidden" not in "".join(files.values())
    (config,) = [
        yaml.safe_load(each["data"]["kvroute.yaml"]) for each in gateway if each["kind"] == "ConfigMap"
    ]
    (pod,) = [each["spec"]["template"]["spec"] for each in gateway if each["kind"] == "Deployment"]
    (keys,) = [volume["projected"]["sources"] for volume in pod["volumes"] if volume["name"] == "keys"]
    mounted = {item["path"] for each in keys for item in each["secret"]["items"]}
    assert secret["stringData"].keys() <= mounted
    for name, text in secret["stringData"].items():
        (tmp_path / name).write_text(text)
    text = yaml.safe_dump(config).replace("/run/secrets/kvroute", str(tmp_path))
    (tmp_path / "kvroute.yaml").write_text(text)
    loaded = load(file=tmp_path / "kvroute.yaml").config
    assert loaded.fleet.worker_api_key.get_secret_value() == "hidden-worker"
    assert [key.get_secret_value() for key in loaded.server.api_keys] == ["hidden-a", "hidden-b"]
    assert loaded.sharing.url.get_secret_value() == "redis://user:hidden-redis@r:6379"


def test_every_secret_option_is_kept_out_of_configmaps():
    secret = {
        path for path, _ in config_loading.walk(Config)
        if config_loading.is_secret(config_loading.shape_at(Config, path))
    }  # fmt: skip

    assert {*SECRET_OPTIONS} == secret


def test_without_a_secret_for_the_admin_key_one_is_made(own, plan):
    made = plan(own())
    found = objects_of(made)
    (secret,) = yaml.safe_load_all(render_kubernetes(made)[SECRET_FILE])
    config = yaml.safe_load(found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"])
    volumes = pod(found, "Deployment", "demo-gateway")["volumes"]
    (keys,) = [volume["projected"]["sources"] for volume in volumes if volume["name"] == "keys"]

    check(secret)
    assert (secret["metadata"]["name"], secret["metadata"]["namespace"]) == ("demo-gateway-admin", "default")
    assert keys == [
        {"secret": {"name": "demo-gateway-admin", "items": [{"key": "admin-key", "path": "admin-key"}]}}
    ]
    assert config["admin"]["api_key_file"] == "/run/secrets/kvroute/admin-key"
    assert len(secret["stringData"]["admin-key"]) >= 43
    assert secret["stringData"]["admin-key"] not in render_kubernetes(made)[SECRET_FILE]


def test_a_rendered_key_is_kept(own, plan):
    earlier, later = (render_kubernetes(plan(own()))[SECRET_FILE] for _ in range(2))

    assert with_earlier_keys(later, earlier) == earlier
    for wrong in ("", "- list", "kind: Secret", "{"):
        with pytest.raises(ValueError, match="not a Secret"):
            with_earlier_keys(later, wrong)


def test_settings_with_a_key_of_their_own_get_no_secret(own, plan):
    made = plan(own({"x-kvroute.gateway.settings": {"admin": {"api_key_file": "/mnt/key"}}}))
    config = yaml.safe_load(objects_of(made)["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"])

    assert config["admin"]["api_key_file"] == "/mnt/key"
    assert SECRET_FILE not in render_kubernetes(made)


def test_the_admin_api_is_served_under_the_services_names(own, plan):
    found = objects_of(plan(own()))
    config = yaml.safe_load(found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"])
    service = found["Service", "demo-gateway"]["metadata"]

    assert service["name"] in config["admin"]["allowed_hosts"]
    assert f"{service['name']}.{service['namespace']}.svc.cluster.local" in config["admin"]["allowed_hosts"]


def test_the_gateway_may_watch_pods_and_nothing_else(own, plan):
    found = objects_of(plan(own()))
    rules = found["Role", "demo-gateway"]["rules"]

    assert {(rule["resources"][0], *rule["verbs"]) for rule in rules} == {
        ("pods", "get", "list", "watch"),
        ("endpointslices", "get", "list", "watch"),
    }
    subject = found["RoleBinding", "demo-gateway"]["subjects"][0]
    assert pod(found, "Deployment", "demo-gateway")["serviceAccountName"] == subject["name"]


# --- workers and caches -----------------------------------------------------------------------------------


def test_a_workers_own_server_is_a_sidecar_that_starts_before_the_engine(own, plan):
    found = objects_of(plan(own({"x-kvroute.lmcache.servers": "per-worker"} | KVAWARE)))
    spec = pod(found, "StatefulSet", "demo-worker")
    (sidecar,), (worker,) = spec["initContainers"], spec["containers"]

    assert sidecar["restartPolicy"] == "Always"
    assert flag(sidecar, "--instance-id") == "$(POD_NAME)"
    assert flag(sidecar, "--coordinator-url") == "http://demo-gateway-cache:9300"
    assert (
        json.loads(flag(worker, "--kv-transfer-config"))["kv_connector_extra_config"]["lmcache.mp.host"]
        == "tcp://127.0.0.1"
    )
    assert ("Service", "demo-gateway-cache") in found
    shared = [mount for each in (sidecar, worker) for mount in each["volumeMounts"] if mount["name"] == "shm"]
    assert len(shared) == 2


def test_a_server_for_a_node_is_reached_on_that_node_and_shares_memory(own, plan):
    found = objects_of(plan(own()))
    worker = pod(found, "StatefulSet", "demo-worker")

    assert worker["hostIPC"] is True
    assert pod(found, "DaemonSet", "demo-lmcache")["hostIPC"] is True
    assert found["Service", "demo-lmcache"]["spec"]["internalTrafficPolicy"] == "Local"
    transfer = json.loads(flag(worker["containers"][0], "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"]["lmcache.mp.host"] == "tcp://demo-lmcache"


def test_each_nodes_daemon_knows_the_others(own, plan):
    found = objects_of(plan(own({BACKEND: "tieredstorage"})))
    spec = pod(found, "DaemonSet", "demo-tierd")
    (daemon,) = spec["containers"]
    peers = found["Service", "demo-tierd-peers"]["spec"]

    assert spec["hostIPC"] is True
    assert flag(daemon, "--peers-dns") == "demo-tierd-peers:9200"
    assert peers["clusterIP"] == "None"
    assert peers["selector"] == found["Service", "demo-tierd"]["spec"]["selector"]
    assert found["Service", "demo-tierd"]["spec"]["internalTrafficPolicy"] == "Local"
    adapter = json.loads(flag(pod(found, "DaemonSet", "demo-lmcache")["containers"][0], "--l2-adapter"))
    assert adapter["url"] == "sagemaker-hyperpod://demo-tierd:9200"
    assert adapter["shared_memory_name"] == flag(daemon, "--shared-memory-name")


def test_variables_are_defined_before_their_references(own, plan):
    found = objects_of(plan(own({BACKEND: "tieredstorage", "x-kvroute.platform": "hyperpod"})))
    container = pod(found, "DaemonSet", "demo-lmcache")["containers"][0]
    names = [variable["name"] for variable in container["env"]]

    assert "$(NODE_IP)" in flag(container, "--l2-adapter")
    assert "NODE_IP" in names
    assert container["volumeMounts"] == [{"name": "l2-0", "mountPath": "/dev/shm/ai_toolkit_cache"}]
    assert not [key for key in found if key[1] == "demo-tierd"]


def test_the_second_tiers_password_is_never_written(own, plan):
    made = plan(
        own(
            {
                "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache:6379",
                "x-kvroute.l2.passwordSecret": {"name": "redis", "key": "password"},
            }
        )
    )
    container = pod(objects_of(made), "DaemonSet", "demo-lmcache")["containers"][0]

    assert "password" not in json.loads(flag(container, "--l2-adapter"))
    (secret,) = [each for each in container["env"] if each["name"] == "LMCACHE_RESP_PASSWORD"]
    assert secret["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}


def test_classic_workers_name_themselves(own, plan):
    container = pod(
        objects_of(plan(own({"x-kvroute.lmcache.mode": "classic"} | KVAWARE))), "StatefulSet", "demo-worker"
    )["containers"][0]
    env = {each["name"]: each.get("value") for each in container["env"]}

    assert env["LMCACHE_LMCACHE_INSTANCE_ID"] == "$(POD_NAME)"
    assert env["LMCACHE_CONTROLLER_PULL_URL"] == "demo-gateway-cache:8300"
    assert env["LMCACHE_REMOTE_URL"] == "redis://demo-redis:6379"


def test_a_start_may_take_as_long_as_the_spec_allows(own, plan):
    container = pod(
        objects_of(plan(own({"spec.maxDeployTimeInSeconds": 605}))), "StatefulSet", "demo-worker"
    )["containers"][0]

    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 610


def test_the_users_probes_volumes_and_placement_are_taken_over(hyperpod, plan):
    probe = {"httpGet": {"path": "/ping", "port": 8000}, "periodSeconds": 3}
    required = {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
    }
    spec = pod(
        objects_of(
            plan(
                hyperpod(
                    {
                        "spec.worker.probes": {"livenessProbe": probe},
                        "spec.kubernetes": {
                            "schedulerName": "s",
                            "serviceAccountName": "a",
                            "initContainers": [{"name": "i", "image": "busybox"}],
                            "volumes": [{"name": "v", "emptyDir": {}}],
                        },
                        "spec.nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
                        "spec.instanceType": "ml.g5.xlarge",
                        "x-kvroute.platform": "hyperpod",
                    }
                )
            )
        ),
        "StatefulSet",
        "demo-worker",
    )

    assert spec["containers"][0]["livenessProbe"] == probe
    assert (spec["schedulerName"], spec["serviceAccountName"]) == ("s", "a")
    assert spec["initContainers"] == [{"name": "i", "image": "busybox"}]
    assert {"name": "v", "emptyDir": {}} in spec["volumes"]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert [each["key"] for each in term["matchExpressions"]] == ["zone", "node.kubernetes.io/instance-type"]


@pytest.mark.parametrize(
    ("source", "driver"),
    [
        ({"modelSourceType": "s3", "s3Storage": {"bucketName": "b", "region": "r"}}, "s3.csi.aws.com"),
        (
            {"modelSourceType": "fsx", "fsxStorage": {"fileSystemId": "f", "dnsName": "d", "mountName": "m"}},
            "fsx.csi.aws.com",
        ),
    ],
)
def test_a_model_in_aws_storage_is_mounted_through_its_driver(source, driver, hyperpod, plan):
    found = objects_of(plan(hyperpod({"spec.modelSourceConfig": source})))
    claim = {"claimName": "demo-model", "readOnly": True}

    assert found["PersistentVolume", "default-demo-model"]["spec"]["csi"]["driver"] == driver
    volumes = pod(found, "StatefulSet", "demo-worker")["volumes"]
    assert {"name": "model-weights", "persistentVolumeClaim": claim} in volumes


def test_a_model_on_a_volume_of_the_users_own_is_only_mounted(hyperpod, plan):
    found = objects_of(
        plan(
            hyperpod(
                {
                    "spec.modelSourceConfig": {"modelSourceType": "kubernetesVolume"},
                    "spec.kubernetes": {
                        "volumes": [{"name": "model-weights", "hostPath": {"path": "/nvme"}}]
                    },
                }
            )
        )
    )
    volumes = pod(found, "StatefulSet", "demo-worker")["volumes"]

    assert [volume for volume in volumes if volume["name"] == "model-weights"] == [
        {"name": "model-weights", "hostPath": {"path": "/nvme"}}
    ]


def test_a_token_of_the_hub_is_a_reference(hyperpod, plan):
    hub = {"modelId": "m", "tokenSecretRef": {"name": "hf", "key": "token"}}
    source = {"modelSourceType": "huggingface", "huggingFaceModel": hub}
    container = pod(
        objects_of(plan(hyperpod({"spec.modelSourceConfig": source}))), "StatefulSet", "demo-worker"
    )["containers"][0]

    (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}


# --- policies ---------------------------------------------------------------------------------------------


def test_each_part_is_reached_by_those_alone_that_need_it(own, plan):
    found = objects_of(plan(own(KVAWARE)))

    def sources(component: str, port: int) -> set[str]:
        rules = found["NetworkPolicy", f"demo-{component}"]["spec"]["ingress"]
        peers = [
            peer for r in rules if port in [p["port"] for p in r["ports"]] for peer in r.get("from", [{}])
        ]
        return {
            next(iter(reversed(peer["podSelector"]["matchLabels"].values()))) if peer else "everyone"
            for peer in peers
        }

    assert sources("gateway", 8080) == {"everyone"}
    assert sources("gateway", 9300) == {"lmcache"}
    assert sources("worker", 8000) == {"gateway", "prometheus"}
    assert sources("worker", 5557) == {"gateway"}
    assert sources("lmcache", 5555) == {"worker"}
    # The gateway asks Redis what it still has.
    assert sources("redis", 6379) == {"worker", "lmcache", "redis", "gateway"}


def test_the_gateway_reaches_tierd_if_it_follows_what_tierd_holds(own, plan):
    def sources(changes):
        found = objects_of(plan(own({BACKEND: "tieredstorage", **KVAWARE, **changes})))
        (rule,) = found["NetworkPolicy", "demo-tierd"]["spec"]["ingress"]
        return {next(reversed(peer["podSelector"]["matchLabels"].values())) for peer in rule["from"]}

    assert "gateway" in sources({"x-kvroute.lmcache.mode": "classic"})
    assert "gateway" not in sources({})


def test_pods_are_taken_away_one_at_a_time(own, plan):
    found = objects_of(plan(own()))

    assert {key[1] for key in found if key[0] == "PodDisruptionBudget"} == {"demo-worker", "demo-gateway"}


def test_triggers_are_kedas_and_without_one_cpu_use_decides(own, plan):
    scaling = {"minReplicaCount": 1, "maxReplicaCount": 3, "scaleUpStabilizationTime": 9}
    with_trigger = objects_of(plan(own({"spec.autoScalingSpec": scaling | {"prometheusTrigger": TRIGGER}})))
    without = objects_of(plan(own({"spec.autoScalingSpec": scaling})))

    scaled = with_trigger["ScaledObject", "demo-worker"]["spec"]
    assert scaled["triggers"][0]["metadata"]["threshold"] == "4.5"
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"] == {
        "stabilizationWindowSeconds": 9
    }
    autoscaler = without["HorizontalPodAutoscaler", "demo-worker"]["spec"]
    assert autoscaler["scaleTargetRef"]["kind"] == "StatefulSet"
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (1, 3)


NEEDED = {"x-kvroute.scaling.by": "workersNeeded", "spec.autoScalingSpec": {"maxReplicaCount": 7}}


def test_an_hpa_can_follow_the_needed_workers(own, plan):
    found = objects_of(plan(own(NEEDED)))

    spec = found["HorizontalPodAutoscaler", "demo-worker"]["spec"]
    (metric,) = spec["metrics"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 7)
    assert metric["external"]["metric"]["name"] in {family.name for family in families()}
    # The Service whose ServiceMonitor makes Prometheus add this label.
    assert ("Service", metric["external"]["metric"]["selector"]["matchLabels"]["service"]) in found
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_keda_can_follow_the_needed_workers_beside_other_triggers(own, plan):
    address = {"x-kvroute.scaling.prometheusAddress": "http://prometheus:9090"}
    found = objects_of(plan(own(NEEDED | address)))
    both = objects_of(plan(own(NEEDED | address | {"spec.autoScalingSpec": {"prometheusTrigger": TRIGGER}})))

    assert ("HorizontalPodAutoscaler", "demo-worker") not in found
    (trigger,) = found["ScaledObject", "demo-worker"]["spec"]["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(kvroute_workers_needed{namespace="default",service="demo-gateway"})',
        "threshold": "1",
        "ignoreNullValues": "false",
    }
    assert [
        each["metadata"]["threshold"] for each in both["ScaledObject", "demo-worker"]["spec"]["triggers"]
    ] == [
        "4.5",
        "1",
    ]


def test_the_gateways_own_autoscaler_does_not_follow_the_needed_workers(own, plan):
    found = objects_of(plan(own(NEEDED | {"spec.intelligentRoutingSpec.autoScalingSpec": {}})))

    (metric,) = found["HorizontalPodAutoscaler", "demo-gateway"]["spec"]["metrics"]
    assert metric["resource"]["name"] == "cpu"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("more", [{}, {"x-kvroute.scaling.prometheusAddress": "http://prometheus:9090"}])
def test_scaling_objects_are_valid_in_each_release(release, more, own, plan):
    deletion = {"x-kvroute.scaling.deletionCost": True, "x-kvroute.kubernetes.workload": "Deployment"}

    for each in objects_of(plan(own(NEEDED | more | deletion))).values():
        check(each, release)


def test_deletion_costs_come_with_the_permission_to_patch_pods(own, plan):
    def rules(**change: Any) -> list[dict[str, Any]]:
        found = objects_of(plan(own({"x-kvroute.kubernetes.workload": "Deployment", **change})))
        rendered: list[dict[str, Any]] = found["Role", "demo-gateway"]["rules"]
        return [rule for rule in rendered if "patch" in rule["verbs"]]

    assert rules() == []
    assert rules(**{"x-kvroute.scaling.deletionCost": True}) == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}
    ]
    change = {
        "x-kvroute.kubernetes.workload": "Deployment",
        "x-kvroute.scaling.deletionCost": True,
        "spec.autoScalingSpec": {"minReplicaCount": 3, "maxReplicaCount": 9},
    }
    found = objects_of(plan(own(change)))
    written = yaml.safe_load(found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"])
    costs = Config.model_validate(written).scaling.deletion_cost
    assert costs.enabled
    assert (costs.min_workers, costs.surplus_share) == (3, 0.25)


def test_without_an_autoscaler_no_worker_gets_less_traffic(own, plan):
    change = {"x-kvroute.kubernetes.workload": "Deployment", "x-kvroute.scaling.deletionCost": True}
    found = objects_of(plan(own({**change, "spec.replicas": 4})))
    written = yaml.safe_load(found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"])
    assert Config.model_validate(written).scaling.deletion_cost.surplus_share == 1.0


def test_cloudwatch_triggers_need_and_get_a_region(hyperpod, plan):
    trigger = {
        "namespace": "AWS/X",
        "metricName": "m",
        "targetValue": 3,
        "dimensions": [{"name": "a", "value": "1"}, {"name": "b", "value": "2"}],
    }
    found = objects_of(plan(hyperpod({"spec.autoScalingSpec.cloudWatchTriggerList": [trigger]})))
    (rendered,) = found["ScaledObject", "demo-worker"]["spec"]["triggers"]

    assert rendered["type"] == "aws-cloudwatch"
    assert rendered["metricType"] == "AverageValue"
    assert rendered["metadata"]["awsRegion"] == "us-west-2"
    assert rendered["metadata"]["dimensionName"] == "a;b"


def test_the_gateways_replicas_come_from_its_own_block(own, plan):
    found = objects_of(plan(own({"spec.intelligentRoutingSpec.autoScalingSpec.maxReplicaCount": 3})))

    assert found["HorizontalPodAutoscaler", "demo-gateway"]["spec"]["scaleTargetRef"]["kind"] == "Deployment"


def test_monitors_find_services_by_their_labels(own, plan):
    for servers in ("per-node", "per-worker"):
        found = objects_of(plan(own({"x-kvroute.lmcache.servers": servers})))
        services = [each for (kind, _), each in found.items() if kind == "Service"]

        monitors = [each for (kind, _), each in found.items() if kind == "ServiceMonitor"]
        assert monitors
        for monitor in monitors:
            wanted = monitor["spec"]["selector"]["matchLabels"].items()
            ports = {
                port["name"]
                for service in services
                if wanted <= service["metadata"]["labels"].items()
                for port in service["spec"]["ports"]
            }
            assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


@pytest.mark.parametrize(
    ("kind", "list_key", "change"),
    [
        ("ScaledObject", "triggers", {"treshold": "1"}),
        ("ScaledObject", "triggers", {"metadata": {"threshold": 1}}),
        ("ScaledObject", "triggers", {"type": ""}),
        ("ServiceMonitor", "endpoints", {"intervall": "15s"}),
        ("ServiceMonitor", "endpoints", {"interval": "15 seconds"}),
        ("ServiceMonitor", "endpoints", {"scheme": "ftp"}),
    ],
)
def test_the_operators_schemas_refuse_wrong_objects(kind, list_key, change, own, plan):
    found = objects_of(
        plan(own({"spec.autoScalingSpec": {"maxReplicaCount": 3, "prometheusTrigger": TRIGGER}}))
    )
    each = next(each for (its_kind, _), each in found.items() if its_kind == kind)
    each["spec"][list_key][0] |= change

    with pytest.raises(jsonschema.ValidationError):
        check(each)


def test_services_select_pods_that_have_their_ports(own, plan):
    for changes in ({}, KVAWARE, {"x-kvroute.lmcache.servers": "per-worker"}, {BACKEND: "tieredstorage"}):
        found = objects_of(plan(own(changes)))
        templates = [
            each["spec"]["template"] for each in found.values() if "template" in each.get("spec", {})
        ]
        for (kind, _), service in found.items():
            if kind != "Service":
                continue
            (template,) = [
                each
                for each in templates
                if service["spec"]["selector"].items() <= each["metadata"]["labels"].items()
            ]
            spec = template["spec"]
            named = {
                port["name"]
                for container in [*spec["containers"], *spec.get("initContainers", [])]
                for port in container.get("ports", [])
            }
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


def test_dashboards_and_alerts_are_configmaps(own, plan):
    maps = {
        each["metadata"]["name"].removeprefix(plan(own()).name): each
        for each in kubernetes_objects(plan(own()))["monitoring.yaml"]
        if each["kind"] == "ConfigMap"
    }

    assert maps.keys() == {"-dashboard-overview", "-dashboard-cache", "-dashboard-workers", "-alerts"}
    boards = [each for name, each in maps.items() if name != "-alerts"]
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in boards} == {"1"}
    for board in boards:
        assert all(json.loads(text)["panels"] for text in board["data"].values())
    (rules,) = maps["-alerts"]["data"].values()
    rules = yaml.safe_load(rules)["groups"][0]["rules"]
    assert len(rules) == 12
    # Prometheus' operator names a job after the Service.
    assert [each["expr"] for each in rules if "job=" in each["expr"]] == ['up{job=~"demo-gateway"} == 0']
    assert ("Service", "demo-gateway") in objects_of(plan(own()))
