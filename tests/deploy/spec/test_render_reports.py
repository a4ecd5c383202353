"""With kvaware, LMCache and engines report to where the gateway listens: both sides of every target."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvroute.config.config import Config
from kvroute.config.loading import load
from kvroute.deploy.render.compose import render_compose
from kvroute.deploy.render.config import render_config
from kvroute.deploy.render.kubernetes import kubernetes_objects
from kvroute.deploy.render.lmcache import render_lmcache
from kvroute.deploy.render.plan import EndpointPlan
from kvroute.deploy.render.site import ReportPorts
from kvroute.deploy.render.worker_args import render_worker_args
from kvroute.deploy.tiny_model import TINY_MODELS
from kvroute.events.options import configured_sources
from kvroute.fleet.worker import WorkerId, WorkerSpec

KVAWARE = {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"}
TIERED = "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"
CLASSIC = {"x-kvroute.lmcache": {"mode": "classic", "chunkSize": 64, "hashSeed": 11}}
PER_WORKER = {"x-kvroute.lmcache": {"servers": "per-worker", "chunkSize": 64}}
PER_NODE = {"x-kvroute.lmcache": {"servers": "per-node", "chunkSize": 64}}
SECRET = {"name": "redis", "key": "password"}
L2_URL = "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl"


@dataclass(frozen=True)
class Sides:
    """One deployment. `servers` are LMCache's flags by instance id, `workers` environments by worker id."""

    config: Config
    host: str
    """The gateway's name for the others."""
    servers: Mapping[str, dict[str, str]]
    workers: Mapping[str, dict[str, str]]
    ports: set[int]
    """Of the gateway that others of the deployment reach."""


def flags(argv: list[str]) -> dict[str, str]:
    return {
        word: argv[at + 1] if at + 1 < len(argv) else "" for at, word in enumerate(argv) if word[:2] == "--"
    }


def on_one_host(plan: EndpointPlan, tmp_path: Path) -> Sides:
    (tmp_path / "kvroute.yaml").write_text(render_config(plan)["kvroute.yaml"])
    config = load(file=tmp_path / "kvroute.yaml").config
    lines = render_lmcache(plan).get("lmcache-servers.sh", "").splitlines()
    servers = [flags(shlex.split(line)) for line in lines]
    workers = [shlex.split(line) for line in render_worker_args(plan)["worker-args.sh"].splitlines()]
    environments = [
        dict(word.split("=", 1) for word in words if re.match(r"\w+=", word)) for words in workers
    ]
    ids = [worker.id for worker in config.fleet.workers]
    return Sides(
        config,
        "127.0.0.1",
        {each["--instance-id"]: each for each in servers},
        dict(zip(map(str, ids), environments, strict=True)),
        set(range(1, 65536)),
    )


def in_compose(plan: EndpointPlan, tmp_path: Path) -> Sides:
    text = render_compose(plan)["docker-compose.yml"]
    services = yaml.safe_load(re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$"))[
        "services"
    ]
    gateway = services["kvroute-gpu"]
    command, environ = gateway["command"], gateway["environment"]
    given = [word.removeprefix("--set=") for word in command if word.startswith("--set=")]
    config = load(environ=environ, assignments=given).config
    found = [flags(each["command"]) for name, each in services.items() if name.startswith("lmcache")]
    workers = {name: each["environment"] for name, each in services.items() if name.startswith("vllm")}
    ports = {int(port) for port in gateway.get("expose", ())}
    return Sides(config, "kvroute-gpu", {each["--instance-id"]: each for each in found}, workers, ports)


def in_kubernetes(plan: EndpointPlan, tmp_path: Path) -> Sides:
    found = {
        (each["kind"], each["metadata"]["name"]): each
        for file in kubernetes_objects(plan).values()
        for each in file
    }
    text = found["ConfigMap", "demo-gateway"]["data"]["kvroute.yaml"]
    (tmp_path / "admin-key").write_text("an-admin-key-0123")
    (tmp_path / "kvroute.yaml").write_text(text.replace("/run/secrets/kvroute/admin-key", "admin-key"))
    config = load(file=tmp_path / "kvroute.yaml").config
    pods = [each["spec"]["template"]["spec"] for each in found.values() if "template" in each.get("spec", {})]
    all_containers = [c for pod in pods for c in (*pod.get("initContainers", ()), *pod["containers"])]
    servers = [flags(each["args"]) for each in all_containers if each["name"] == "lmcache"]
    (worker,) = [each for each in all_containers if each["name"] == "worker"]
    environment = {each["name"]: each.get("value", "") for each in worker["env"]}
    services = [
        each["spec"]
        for (kind, name), each in found.items()
        if kind == "Service" and name == "demo-gateway-cache"
    ]
    served = {port["port"] for service in services for port in service["ports"]}
    policy = found["NetworkPolicy", "demo-gateway"]["spec"]["ingress"]
    allowed = {port["port"] for rule in policy for port in rule["ports"]}
    (gateway,) = [each for each in all_containers if each["name"] == "kvroute"]
    opened = {port["containerPort"] for port in gateway["ports"]}
    return Sides(
        config,
        "demo-gateway-cache",
        {each["--instance-id"]: each for each in servers},
        {"$(POD_NAME)": environment},
        served & allowed & opened,
    )


TARGETS: dict[str, Callable[[EndpointPlan, Path], Sides]] = {
    "one host": on_one_host,
    "compose": in_compose,
    "kubernetes": in_kubernetes,
}


@pytest.fixture(params=TARGETS)
def sides(request, own, plan, tmp_path):
    """`(changes)` -> a kvaware deployment in each target."""
    return lambda changes: TARGETS[request.param](plan(own(KVAWARE | changes)), tmp_path)


@pytest.mark.parametrize("servers", [PER_WORKER, PER_NODE], ids=["per-worker", "per-node"])
def test_lmcache_servers_report_to_where_the_gateway_listens(servers, sides):
    made = sides(servers)
    coordinator = made.config.lmcache.coordinator
    bind, _, port = coordinator.listen.rpartition(":")

    assert coordinator.enabled
    assert not made.config.lmcache.controller.enabled
    assert made.config.routing.strategy == "kvaware"
    assert bind == ("127.0.0.1" if made.host == "127.0.0.1" else "0.0.0.0")
    assert int(port) in made.ports
    assert made.servers
    for server in made.servers.values():
        assert server["--coordinator-url"] == f"http://{made.host}:{port}"
        assert "--coordinator-event-reporting" in server
        assert server["--chunk-size"] == str(coordinator.chunk_tokens) == "64"


def test_each_workers_own_server_is_called_after_the_worker(sides):
    made = sides(PER_WORKER)

    assert set(made.servers) == set(made.workers)
    assert made.config.lmcache.instance == ""


def test_every_worker_of_a_node_finds_the_nodes_server(sides):
    made = sides(PER_NODE)
    (server,) = made.servers

    found = made.config.lmcache.instance.format(id="w", host="h", node="$(NODE_NAME)")
    assert found == server


def test_engines_with_lmcache_inside_report_to_the_controller_with_its_seed_and_chunks(sides):
    made = sides(CLASSIC)
    controller = made.config.lmcache.controller

    assert controller.enabled
    assert not made.config.lmcache.coordinator.enabled
    for name, environment in made.workers.items():
        assert environment["LMCACHE_LMCACHE_INSTANCE_ID"] == name
        assert environment["PYTHONHASHSEED"] == controller.hash_seed == "11"
        assert environment["LMCACHE_CHUNK_SIZE"] == str(controller.chunk_tokens) == "64"
        assert environment["LMCACHE_PRE_CACHING_HASH_ALGORITHM"] == controller.hash_algorithm
        for listens, role in ((controller.pull, "PULL"), (controller.reply, "REPLY")):
            port = listens.rpartition(":")[2]
            assert environment[f"LMCACHE_CONTROLLER_{role}_URL"] == f"{made.host}:{port}"
            assert int(port) in made.ports
        assert int(environment["LMCACHE_LMCACHE_WORKER_HEARTBEAT_TIME"]) < controller.worker_timeout_s
    assert int(controller.heartbeat.rpartition(":")[2]) in made.ports
    assert controller.advertise == ("" if made.host == "127.0.0.1" else made.host)


def test_with_lmcache_inside_the_gateway_follows_what_tierd_holds(sides, own, plan):
    made = sides({**CLASSIC, TIERED: "tieredstorage"})
    (url,) = made.config.lmcache.tierd.urls
    remote = {each["LMCACHE_REMOTE_URL"] for each in made.workers.values()}

    others = [{TIERED: "tieredstorage"}, CLASSIC]
    if "-peers" in url:  # Kubernetes: workers use their node's daemon, the gateway follows all of them
        assert (url, remote) == ("http://demo-tierd-peers:9200", {"sagemaker-hyperpod://demo-tierd:9200"})
        # HyperPod's own daemon has no list of its entries.
        others.append({**CLASSIC, TIERED: "tieredstorage", "x-kvroute.platform": "hyperpod"})
    else:
        assert remote == {url.replace("http://", "sagemaker-hyperpod://")}
    for changes in others:
        assert sides(changes).config.lmcache.tierd.urls == []


@pytest.mark.parametrize("backend", ["redis", "valkey"])
def test_the_gateway_queries_the_store_that_lmcache_uses(backend, sides):
    made = sides({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": backend})
    (server,) = made.servers.values()
    adapter = json.loads(server["--l2-adapter"])
    at = adapter.get("startup_nodes") or f"{adapter['host']}:{adapter['port']}"
    url = made.config.lmcache.l2.redis_url

    assert url is not None
    assert url.get_secret_value() == f"redis://{at}/0"
    assert made.config.lmcache.l2.redis_pool == adapter["type"]
    assert adapter["shared"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"},
        {"spec.kvCacheSpec.enableL2Cache": False, "spec.kvCacheSpec.l2CacheSpec": None},
        {
            "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "valkey",
            "x-kvroute.l2.options": {"key_prefix": "mine"},
        },
        CLASSIC,
    ],
    ids=["tierd", "none", "prefixed", "classic"],
)
def test_a_store_without_a_query_protocol_is_not_queried(changes, sides):
    assert sides(changes).config.lmcache.l2.redis_url is None


def test_without_kvaware_nothing_listens(own, plan, tmp_path):
    for target in TARGETS.values():
        made = target(plan(own(PER_WORKER)), tmp_path)

        assert made.config.lmcache == Config().lmcache
        assert made.config.kv_events == Config().kv_events


def test_the_ports_are_those_of_the_gateways_own_defaults():
    ports, options = ReportPorts(), Config().lmcache

    assert options.coordinator.listen == f"127.0.0.1:{ports.coordinator}"
    assert options.controller.pull == f"127.0.0.1:{ports.pull}"
    assert options.controller.reply == f"127.0.0.1:{ports.reply}"
    assert options.controller.heartbeat == f"127.0.0.1:{ports.heartbeat}"


@pytest.mark.parametrize("target", [in_compose, in_kubernetes])
def test_every_rank_of_a_container_is_listened_to(target, own, plan, tmp_path):
    made = plan(own(KVAWARE | {"spec.worker.args": ["--data-parallel-size", "2"]}))
    worker = WorkerSpec(WorkerId("w"), "http://vllm-a:8000")

    sources = configured_sources(target(made, tmp_path).config.kv_events, worker)

    assert [(each.endpoint, each.replay_endpoint) for each in sources] == [
        ("tcp://vllm-a:5557", "tcp://vllm-a:6557"),
        ("tcp://vllm-a:5558", "tcp://vllm-a:6558"),
    ]
    services = yaml.safe_load(render_compose(made)["docker-compose.yml"])["services"]
    assert services["vllm-a"]["expose"] == ["5557", "6557", "5558", "6558"]
    network = list(kubernetes_objects(made)["network.yaml"])
    (policy,) = [each for each in network if each["metadata"]["name"] == "demo-worker"]
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert {5557, 6557, 5558, 6558} <= opened


def test_simulated_workers_publish_where_they_are_listened_to(own, plan):
    made = plan(own(KVAWARE | {"x-kvroute.engine": "sim"}))
    command = yaml.safe_load(render_compose(made)["docker-compose.yml"])["services"]["sim-a"]["command"]

    assert flags(command)["--event-endpoint"] == "tcp://0.0.0.0:5557"
    assert flags(command)["--replay-endpoint"] == "tcp://0.0.0.0:6557"


def test_no_two_processes_of_one_host_share_a_port(own, plan):
    made = plan(own(KVAWARE | PER_WORKER | {"spec.replicas": 20}))
    text = render_worker_args(made)["worker-args.sh"] + render_lmcache(made)["lmcache-servers.sh"]

    ports = re.findall(r"--(?:http-)?port (\d+)", text) + re.findall(r"tcp://\*:(\d+)", text)
    assert len(ports) == 20 * 5
    assert len(set(ports)) == len(ports)


def test_a_model_of_this_host_is_tokenized_from_its_files(own, plan, tmp_path):
    made = plan(own(KVAWARE | {"spec.model": "/data/model", "spec.modelName": "Qwen3-0.6B"}))
    services = yaml.safe_load(render_compose(made)["docker-compose.yml"])["services"]

    assert on_one_host(made, tmp_path).config.tokens.models == {"Qwen3-0.6B": Path("/data/model")}
    assert in_compose(made, tmp_path).config.tokens.models == {"Qwen3-0.6B": Path("/opt/ml/model")}
    assert services["vllm-a"]["volumes"] == ["${MODEL_DIR:-/data/model}:/opt/ml/model:ro"]
    assert services["vllm-a"]["volumes"][0] in services["kvroute-gpu"]["volumes"]
    assert in_kubernetes(made, tmp_path).config.tokens.models == {}


def test_hyperpods_own_form_gets_the_log_lines_of_its_documentation(own, hyperpod, plan, tmp_path):
    theirs = plan(hyperpod(KVAWARE | {"spec.intelligentRoutingSpec.enabled": True}))

    assert in_compose(theirs, tmp_path).config.logging.hyperpod_lines
    assert in_kubernetes(theirs, tmp_path).config.logging.hyperpod_lines
    assert not in_compose(plan(own(KVAWARE)), tmp_path).config.logging.hyperpod_lines


def test_the_price_of_a_transfer_follows_from_the_model_where_that_is_known(own, plan, tmp_path):
    tiny = plan(own(KVAWARE | {"spec.model": "small", "x-kvroute.device": "cpu"}))
    tiers = on_one_host(tiny, tmp_path).config.routing.kvaware.tiers

    assert tiers.token_bytes == TINY_MODELS["small"].kv_bytes_per_token
    usual = on_one_host(plan(own(KVAWARE)), tmp_path).config.routing.kvaware.tiers
    assert usual.token_bytes == Config().routing.kvaware.tiers.token_bytes


def test_the_stores_password_is_in_no_configuration(own, plan, tmp_path):
    made = plan(own(KVAWARE | {L2_URL: "redis://cache:6379", "x-kvroute.l2.passwordSecret": SECRET}))
    gateway = yaml.safe_load(render_compose(made)["docker-compose.yml"])["services"]["kvroute-gpu"]
    objects = kubernetes_objects(made)["gateway.yaml"]
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    (config,) = [each for each in objects if each["kind"] == "ConfigMap"]
    pod = deployment["spec"]["template"]["spec"]

    assert gateway["environment"]["KVROUTE__LMCACHE__L2__REDIS_PASSWORD"] == "${L2_PASSWORD:-}"
    (keys,) = [each for each in pod["volumes"] if each["name"] == "keys"]
    assert {"secret": {"name": "redis", "items": [{"key": "password", "path": "l2-password"}]}} in keys[
        "projected"
    ]["sources"]
    asked = yaml.safe_load(config["data"]["kvroute.yaml"])["lmcache"]["l2"]
    assert asked["redis_password_file"] == "/run/secrets/kvroute/l2-password"
    assert "KVROUTE__LMCACHE__L2__REDIS_PASSWORD" in render_config(made)["kvroute.yaml"]


def test_a_password_in_the_specs_url_is_in_no_configuration_either(own, plan, tmp_path):
    made = plan(own(KVAWARE | {L2_URL: "redis://me:secret@cache:6379"}))
    gateway = yaml.safe_load(render_compose(made)["docker-compose.yml"])["services"]["kvroute-gpu"]
    objects = kubernetes_objects(made)["gateway.yaml"]
    (deployment,) = [each for each in objects if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]

    assert gateway["environment"]["KVROUTE__LMCACHE__L2__REDIS_PASSWORD"] == "secret"
    assert container["env"] == [{"name": "KVROUTE__LMCACHE__L2__REDIS_PASSWORD", "value": "secret"}]
    assert "secret" not in " ".join(gateway["command"])
    assert "secret" not in render_config(made)["kvroute.yaml"]
    assert "secret@" not in repr([each for each in objects if each["kind"] == "ConfigMap"])


def test_chat_with_kvaware_is_accepted_with_a_note_about_hyperpod(hyperpod, read):
    routing = {"enabled": True, "routingStrategy": "kvaware"}
    changes = {"spec.invocationEndpoint": "v1/chat/completions", "spec.intelligentRoutingSpec": routing}
    reading = read(hyperpod(changes))

    assert reading.document is not None
    (note,) = [each for each in reading.findings if each.path == ("spec", "invocationEndpoint")]
    assert "HyperPod refuses this combination" in note.text
    strategy = ("spec", "intelligentRoutingSpec", "routingStrategy")
    assert [each.verdict.value for each in reading.findings if each.path == strategy] == ["applied"]


def test_several_gateways_with_kvaware_get_a_note_about_their_limits(own, read):
    reading = read(own(KVAWARE | {"x-kvroute.gateway.replicas": 2}))
    (note,) = [each for each in reading.findings if each.path == ("x-kvroute", "gateway", "replicas")]

    assert "each LMCache reports to only one gateway" in note.text
