"""From a spec to commands: the rendered ones, on ports and devices of this host."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvroute.deploy.endpoint import EndpointHost, LocalEndpoint, plan_local_endpoint, site_on_free_ports
from kvroute.deploy.plan import AdminKeyLocation, PlannedProcess, ProcessPlan
from kvroute.deploy.render.lmcache import server_argv
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.render.site import local_site
from kvroute.deploy.render.worker_args import render_worker_args
from kvroute.deploy.spec.loading import read_spec
from kvroute.errors import ConfigError

SPEC: dict[str, Any] = {
    "apiVersion": "kvroute.dev/v1",
    "kind": "Endpoint",
    "metadata": {"name": "demo"},
    "spec": {
        "model": "Qwen/Qwen3-8B",
        "replicas": 2,
        "kvCacheSpec": {"enableL2Cache": True, "l2CacheSpec": {"l2CacheBackend": "redis"}},
        "intelligentRoutingSpec": {"enabled": True},
    },
    "x-kvroute": {"lmcache": {"servers": "per-worker"}},
}
STRATEGIES = ("prefixaware", "session", "roundrobin", "kvaware")
PROGRAMS = {
    "vllm": ("/engine/bin/vllm",),
    "lmcache": ("/engine/bin/lmcache",),
    "redis-server": ("/usr/bin/redis-server",),
    "kvroute": (sys.executable, "-m", "kvroute"),
}
Planning = Callable[..., LocalEndpoint]


def endpoint(changes: dict[str, object] | None = None) -> EndpointPlan:
    document = json.loads(json.dumps(SPEC))
    for path, value in (changes or {}).items():
        *above, last = path.split(".")
        inner = document
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return plan_endpoint(read_spec(yaml.safe_dump(document), strategies=STRATEGIES).require("spec"))


def here(
    changes: dict[str, object] | None = None, *, gpus: str = "0123", environ: dict[str, str] | None = None
) -> LocalEndpoint:
    """The endpoint on a host with these GPUs, two cores, and free ports from 20000 on."""
    ports = count(20000, 10)
    host = EndpointHost(
        environ={"PATH": "/bin", **(environ or {})},
        engine_environ={"PATH": "/bin"},
        cores=(4, 5),
        gpus=tuple(gpus),
        programs=PROGRAMS,
        state_dir=Path("/state"),
        admin_key=AdminKeyLocation(folder=Path("/keys")),
    )
    return plan_local_endpoint(endpoint(changes), host, lambda _: next(ports))


def option(process: PlannedProcess, name: str) -> str:
    argv = process.child.argv
    return argv[argv.index(name) + 1]


def words(plan: ProcessPlan) -> list[str]:
    """Of every command line."""
    return [word for stage in plan.stages for each in stage for word in each.child.argv]


def test_every_process_starts_after_its_dependencies() -> None:
    stages = [[each.child.name for each in stage] for stage in here().plan.stages]

    assert stages == [["redis"], ["lmcache-a", "lmcache-b"], ["demo-a", "demo-b"], ["gateway"]]


def test_workers_run_their_rendered_command() -> None:
    """On the ports that `render --to worker-args` writes, the command lines are the same, word for word."""
    made = endpoint({"x-kvroute.device": "cpu", "spec.model": "small"})
    usual = local_site(made)
    ports = []
    for server in usual.servers:
        ports += [server.port, server.http_port]
    for worker in usual.workers:
        ports += [worker.port, worker.events_port, worker.replay_port, worker.classic_port]
    found = iter([*ports, 6379, 9300, 8300, 8400, 8500])
    host = EndpointHost({}, {}, (0, 1), (), {}, Path("/state"))

    plan = plan_local_endpoint(made, host, lambda _: next(found)).plan

    lines = [shlex.split(line) for line in render_worker_args(made)["worker-args.sh"].splitlines()]
    for worker, line in zip(plan.workers, lines, strict=True):
        environment = [f"{name}={value}" for name, value in worker.child.env.items()]
        assert [*environment, *worker.child.argv] == line
    for server, planned in zip(usual.servers, plan.caches[1], strict=True):
        assert made.cache is not None
        assert planned.child.argv == server_argv(made, made.cache, server, usual)


def test_every_process_has_its_own_port_and_the_addresses_of_the_others() -> None:
    plan = here().plan
    (redis,), servers = plan.caches
    taken = [option(redis, "--port")]
    for server, worker in zip(servers, plan.workers, strict=True):
        taken += [option(server, "--port"), option(server, "--http-port"), option(worker, "--port")]
        transfer = json.loads(option(worker, "--kv-transfer-config"))["kv_connector_extra_config"]
        assert str(transfer["lmcache.mp.port"]) == option(server, "--port")
        assert str(json.loads(option(server, "--l2-adapter"))["port"]) == option(redis, "--port")
        assert server.ready_url == f"http://127.0.0.1:{option(server, '--http-port')}/healthcheck"
        assert worker.ready_url == f"http://127.0.0.1:{option(worker, '--port')}/health"

    assert len(set(taken)) == len(taken) == 7
    assert redis.ready_url == f"redis://127.0.0.1:{option(redis, '--port')}"
    assert option(redis, "--bind") == "127.0.0.1"


def test_engines_miss_an_lmcache_server_that_ended() -> None:
    """They register with it again only when a ping has failed: one in the interval, and its own wait."""
    plan = here().plan

    for server, worker in zip(plan.caches[1], plan.workers, strict=True):
        transfer = json.loads(option(worker, "--kv-transfer-config"))["kv_connector_extra_config"]
        assert server.restart_delay_s >= 2 * transfer["lmcache.mp.heartbeat_interval"] > 0


def test_one_server_for_all_serves_every_worker() -> None:
    plan = here({"x-kvroute.lmcache.servers": "per-node"}).plan
    (server,) = plan.caches[1]

    assert server.child.name == "lmcache"
    assert server.child.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    for worker in plan.workers:
        transfer = json.loads(option(worker, "--kv-transfer-config"))["kv_connector_extra_config"]
        assert str(transfer["lmcache.mp.port"]) == option(server, "--port")


def test_the_gateway_has_the_workers_and_the_specs_port_unless_a_flag_sets_it() -> None:
    made = here({"x-kvroute.gateway.port": 8123})

    assert made.config["fleet"]["workers"] == [
        {"id": worker.child.name, "url": worker.url} for worker in made.plan.workers
    ]
    assert made.config["server"] == {"host": "127.0.0.1", "port": 8123}
    assert made.plan.gateway.ready_url == "http://127.0.0.1:8123/ready"
    assert made.plan.gateway.child.argv[-4:] == ("-c", "/state/gateway.yaml", "--state-dir", "/keys")
    assert made.plan.admin_key_file == Path("/keys/admin-key-8123")
    assert made.config_path == Path("/state/gateway.yaml")

    ports = count(20000)
    host = EndpointHost({}, {}, (0,), ("0", "1"), {}, Path("/state"))
    overridden = plan_local_endpoint(endpoint(), host, lambda _: next(ports), bind="0.0.0.0", port=9000)

    assert overridden.config["server"] == {"host": "0.0.0.0", "port": 9000}


def test_gpus_are_shared_out() -> None:
    plan = here({"x-kvroute.gpusPerWorker": 2}).plan

    for process in (plan.workers[1], plan.caches[1][1]):
        assert process.child.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert option(plan.workers[0], "--tensor-parallel-size") == "2"


def test_cores_are_shared_out_one_each() -> None:
    plan = here({"x-kvroute.device": "cpu", "spec.replicas": 3}, gpus="").plan

    assert [each.child.env["VLLM_CPU_OMP_THREADS_BIND"] for each in plan.workers] == ["4", "5", "4"]
    assert plan.workers[0].child.env["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_kv_memory_on_cores_can_be_set() -> None:
    variable = {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "9"}
    plan = here({"x-kvroute.device": "cpu", "spec.worker.environmentVariables": [variable]}, gpus="").plan

    assert plan.workers[0].child.env["VLLM_CPU_KVCACHE_SPACE"] == "9"


@pytest.mark.parametrize(("gpus", "path"), [("", r"x-kvroute\.device"), ("0", r"spec\.replicas")])
def test_too_few_gpus_are_an_error(gpus: str, path: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{path}: 2 worker\(s\) .*1 GPU"):
        here(gpus=gpus)


def test_a_tier_that_runs_elsewhere_has_no_process() -> None:
    plan = here({"spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache.example.com:6380"}).plan

    assert plan.caches[0] == ()
    assert json.loads(option(plan.caches[1][0], "--l2-adapter"))["host"] == "cache.example.com"


def test_tierd_runs_with_its_own_segment() -> None:
    plan = here({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"}).plan
    (tierd,), (server, _) = plan.caches
    adapter = json.loads(option(server, "--l2-adapter"))

    assert tierd.child.argv[:4] == (sys.executable, "-m", "kvroute", "tierd")
    assert adapter["url"] == f"sagemaker-hyperpod://127.0.0.1:{option(tierd, '--port')}"
    assert adapter["shared_memory_name"] == option(tierd, "--shared-memory-name")
    assert option(tierd, "--port") in adapter["shared_memory_name"]
    assert option(tierd, "--host") == "127.0.0.1"
    assert tierd.ready_url == f"http://127.0.0.1:{option(tierd, '--port')}/health"


def test_the_password_of_the_tier_comes_from_the_environment() -> None:
    secret = {
        "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache.example.com:6380",
        "x-kvroute.l2.passwordSecret": {"name": "redis", "key": "password"},
    }

    with pytest.raises(ConfigError, match="L2_PASSWORD"):
        here(secret)

    plan = here(secret, environ={"L2_PASSWORD": "open sesame"}).plan
    (server, _) = plan.caches[1]
    assert server.child.env["LMCACHE_RESP_PASSWORD"] == "open sesame"
    assert not [word for word in words(plan) if "sesame" in word]
    assert not [name for name in plan.gateway.child.env if name.startswith("KVROUTE__")]


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("redis://cache.example.com:6380", {"x-kvroute.l2.passwordSecret": {"name": "n", "key": "k"}}),
        ("redis://me:open%20sesame@cache.example.com:6380", {}),
    ],
)
def test_a_gateway_that_queries_the_tier_gets_the_password_from_its_environment(
    url: str, given: dict[str, object]
) -> None:
    changes = {
        "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": url,
        "spec.intelligentRoutingSpec.routingStrategy": "kvaware",
    }
    made = here(changes | given, environ={"L2_PASSWORD": "open sesame"})
    gateway = made.plan.gateway.child

    environ = {name: value for name, value in gateway.env.items() if name.startswith("KVROUTE__")}
    assert environ == {"KVROUTE__LMCACHE__L2__REDIS_PASSWORD": "open sesame"}
    assert not [word for word in words(made.plan) if "sesame" in word]
    assert "sesame" not in json.dumps(made.config)
    user = "me@" if "me:" in url else ""
    assert made.config["lmcache"]["l2"]["redis_url"] == f"redis://{user}cache.example.com:6380/0"


def test_without_caches_only_workers_and_the_gateway_run() -> None:
    plan = here({"spec.kvCacheSpec": {"enableL1Cache": False}}).plan

    assert [len(stage) for stage in plan.stages] == [2, 1]
    assert "--kv-transfer-config" not in plan.workers[0].child.argv


def test_lmcache_inside_the_engines_needs_no_server() -> None:
    plan = here({"x-kvroute.lmcache.mode": "classic"}).plan
    (redis,), servers = plan.caches

    assert servers == ()
    assert plan.workers[0].child.env["LMCACHE_REMOTE_URL"] == f"redis://127.0.0.1:{option(redis, '--port')}"


def test_workers_may_take_as_long_to_start_as_the_spec_allows() -> None:
    assert here({"spec.maxDeployTimeInSeconds": 77}).plan.workers[0].ready_timeout_s == 77


def test_a_user_s_own_command_gets_the_same_options() -> None:
    command = ["python3", "-m", "mine"]
    worker = here({"spec.worker.command": command}).plan.workers[0]

    assert worker.child.argv[:3] == ("python3", "-m", "mine")
    assert option(worker, "--model") == "Qwen/Qwen3-8B"


def test_kvaware_reports_reach_the_gateway_where_it_listens() -> None:
    made = here({"spec.intelligentRoutingSpec.routingStrategy": "kvaware"})
    servers = made.plan.caches[1]

    listen = made.config["lmcache"]["coordinator"]["listen"]
    for server, worker in zip(servers, made.plan.workers, strict=True):
        assert option(server, "--coordinator-url") == f"http://{listen}"
        assert "--coordinator-event-reporting" in server.child.argv
        assert option(server, "--instance-id") == worker.child.name
        events = json.loads(option(worker, "--kv-events-config"))
        assert events["endpoint"] != events["replay_endpoint"]


def test_other_strategies_need_no_reports() -> None:
    assert not {"kv_events", "lmcache"} & set(here().config)


def test_ranks_get_neighbouring_ports() -> None:
    asked = []

    def find(length: int) -> int:
        asked.append(length)
        return 20000

    args = ["--data-parallel-size", "4"]
    site_on_free_ports(endpoint({"spec.worker.args": args, "spec.replicas": 1}), find, ("0",))

    assert asked.count(4) == 2


def test_two_processes_of_one_name_are_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"metadata\.name: leads to two processes with the same name: lmcache-a"
    ):
        here({"metadata.name": "lmcache"})


def test_a_generated_models_tokenizer_is_found_from_any_folder() -> None:
    changes = {
        "spec.intelligentRoutingSpec.routingStrategy": "kvaware",
        "spec.model": "small",
        "x-kvroute.device": "cpu",
    }
    models = here(changes).config["tokens"]["models"]

    assert models == {"small": str(Path(".kvroute/models/small").absolute())}
