from __future__ import annotations

import json
import os
import shlex
import subprocess

import pytest
import yaml

from kvroute.cli.servers import tierd
from kvroute.deploy.render.lmcache import render_lmcache
from kvroute.deploy.render.registry import TARGETS
from kvroute.deploy.render.worker_args import render_worker_args

CLASSIC = {"x-kvroute.lmcache.mode": "classic"}
KVAWARE = {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"}


def flags(argv: list[str]) -> dict[str, str]:
    """Options with their values; one that is given twice fails."""
    found: dict[str, str] = {}
    for number, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            following = argv[number + 1] if number + 1 < len(argv) else ""
            assert name not in found, f"{name} is given twice"
            found[name] = value if equals else ("" if following.startswith("--") else following)
    return found


def servers(plan) -> list[dict[str, str]]:
    document = yaml.safe_load(render_lmcache(plan)["lmcache.yaml"])
    return [flags(server["command"]) for server in document["servers"]]


def workers(plan) -> list[tuple[dict[str, str], list[str]]]:
    """Environment and command of each line."""
    lines = [shlex.split(line) for line in render_worker_args(plan)["worker-args.sh"].splitlines()]
    split = [next(n for n, word in enumerate(words) if "=" not in word) for words in lines]
    return [
        (dict(word.partition("=")[::2] for word in words[:at]), words[at:])
        for words, at in zip(lines, split, strict=True)
    ]


def test_there_is_one_server_a_node_unless_each_worker_gets_its_own(own, plan):
    assert [server["--instance-id"] for server in servers(plan(own()))] == ["demo-node"]

    each = servers(plan(own({"x-kvroute.lmcache.servers": "per-worker"})))

    assert [server["--instance-id"] for server in each] == ["demo-a", "demo-b"]
    assert len({server[port] for server in each for port in ("--port", "--http-port")}) == 4


def test_workers_get_the_address_of_their_own_server(own, plan):
    settings = own({"x-kvroute.lmcache.servers": "per-worker"})
    ports = [server["--port"] for server in servers(plan(settings))]

    for (_, argv), port in zip(workers(plan(settings)), ports, strict=True):
        transfer = json.loads(flags(argv)["--kv-transfer-config"])
        assert transfer["kv_connector"] == "LMCacheMPConnector"
        assert transfer["kv_connector_extra_config"] == {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": int(port),
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.heartbeat_interval": 2,
        }


@pytest.mark.parametrize("l1", [True, False])
@pytest.mark.parametrize("l2", [True, False])
def test_every_combination_of_tiers_runs_the_processes_that_it_needs(l1, l2, own, plan):
    made = plan(own({"spec.kvCacheSpec.enableL1Cache": l1, "spec.kvCacheSpec.enableL2Cache": l2}))
    (_, argv), _ = workers(made)

    if not (l1 or l2):
        assert yaml.safe_load(render_lmcache(made)["lmcache.yaml"]) == {}
        assert "--kv-transfer-config" not in argv
        return
    (server,) = servers(made)
    assert "--kv-transfer-config" in argv
    assert ("--l2-adapter" in server) == l2
    assert server["--l1-size-gb"] == ("20" if l1 else "1")
    if l2:
        assert json.loads(server["--l2-adapter"])["type"] == "resp"
        assert server["--l2-store-policy"] == ("default" if l1 else "skip_l1")
        assert server["--l2-prefetch-policy"] == ("retain" if l1 else "default")


@pytest.mark.parametrize("l1", [True, False])
@pytest.mark.parametrize("l2", [True, False])
def test_the_classic_connector_has_the_same_combinations(l1, l2, own, plan):
    changes = {"spec.kvCacheSpec.enableL1Cache": l1, "spec.kvCacheSpec.enableL2Cache": l2}
    (environment, argv), _ = workers(plan(own(changes | CLASSIC)))

    if not (l1 or l2):
        assert "--kv-transfer-config" not in argv
        assert not [name for name in environment if name.startswith("LMCACHE")]
        return
    assert json.loads(flags(argv)["--kv-transfer-config"]) == {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
    }
    assert environment["LMCACHE_LOCAL_CPU"] == str(l1)
    assert environment["LMCACHE_MAX_LOCAL_CPU_SIZE"] == ("20" if l1 else "1")
    assert environment["PYTHONHASHSEED"] == "0"
    assert environment.get("LMCACHE_REMOTE_URL") == ("redis://127.0.0.1:6379" if l2 else None)


def test_the_classic_file_equals_the_environment(own, plan):
    files = render_lmcache(plan(own(CLASSIC)))
    settings = yaml.safe_load(files["lmcache.yaml"])
    environment = dict(line.partition("=")[::2] for line in files["lmcache.env"].splitlines())

    assert {f"LMCACHE_{name.upper()}" for name in settings} | {"PYTHONHASHSEED"} == set(environment)


def test_a_cache_config_file_takes_the_place_of_all_other_settings(own, plan):
    made = plan(own(CLASSIC | {"spec.kvCacheSpec.cacheConfigFile": "/etc/lmcache.yaml"}))
    (environment, _), _ = workers(made)

    assert environment["LMCACHE_CONFIG_FILE"] == "/etc/lmcache.yaml"
    assert [name for name in environment if name.startswith("LMCACHE")] == ["LMCACHE_CONFIG_FILE"]


def test_settings_of_the_cache_become_flags(own, plan):
    (server,) = servers(
        plan(
            own(
                {
                    "x-kvroute.l1": {"sizeGb": 40.5, "evictionPolicy": "ARC"},
                    "x-kvroute.lmcache.chunkSize": 512,
                    "x-kvroute.l2": {
                        "storePolicy": "skip_l1",
                        "prefetchPolicy": "default",
                        "options": {"num_workers": 2},
                    },
                }
            )
        )
    )

    assert (server["--l1-size-gb"], server["--eviction-policy"], server["--chunk-size"]) == (
        "40.5",
        "ARC",
        "512",
    )
    assert (server["--l2-store-policy"], server["--l2-prefetch-policy"]) == ("skip_l1", "default")
    assert json.loads(server["--l2-adapter"])["num_workers"] == 2


def test_without_kvaware_no_server_reports_blocks(own, plan):
    made = plan(own())

    assert not [name for name in servers(made)[0] if "coordinator" in name]
    assert "--kv-events-config" not in workers(made)[0][1]


def test_kvaware_has_servers_report_and_engines_publish(own, plan):
    made = plan(own(KVAWARE))
    (server,) = servers(made)
    published = [json.loads(flags(argv)["--kv-events-config"]) for _, argv in workers(made)]

    assert server["--coordinator-url"] == "http://127.0.0.1:9300"
    assert "--coordinator-event-reporting" in server
    assert all(each["enable_kv_cache_events"] for each in published)
    ports = [each[kind] for each in published for kind in ("endpoint", "replay_endpoint")]
    assert len(set(ports)) == 4


def test_kvaware_in_classic_mode_names_the_worker_to_the_controller(own, plan):
    first, second = (environment for environment, _ in workers(plan(own(KVAWARE | CLASSIC))))

    assert first["LMCACHE_ENABLE_CONTROLLER"] == "True"
    assert first["LMCACHE_CONTROLLER_PULL_URL"] == "127.0.0.1:8300"
    assert first["LMCACHE_CONTROLLER_REPLY_URL"] == "127.0.0.1:8400"
    assert [first["LMCACHE_LMCACHE_INSTANCE_ID"], second["LMCACHE_LMCACHE_INSTANCE_ID"]] == [
        "demo-a",
        "demo-b",
    ]
    assert first["LMCACHE_LMCACHE_WORKER_PORTS"] != second["LMCACHE_LMCACHE_WORKER_PORTS"]
    assert first["LMCACHE_ENABLE_KV_EVENTS"] == "True"


def test_kvaware_without_a_cache_still_shares_the_hash_seed(own, plan):
    made = plan(own(KVAWARE | {"spec.kvCacheSpec": None, "x-kvroute.lmcache.hashSeed": 7}))

    assert [environment["PYTHONHASHSEED"] for environment, _ in workers(made)] == ["7", "7"]


def test_the_users_own_hash_seed_is_everyones(hyperpod, plan):
    made = plan(
        hyperpod(
            {
                "spec.kvCacheSpec": {"enableL1Cache": True},
                "spec.worker.environmentVariables": [{"name": "PYTHONHASHSEED", "value": "123"}],
            }
        )
    )

    assert workers(made)[0][0]["PYTHONHASHSEED"] == "123"
    assert yaml.safe_load(render_lmcache(made)["lmcache.yaml"])["servers"][0]["environment"] == {
        "PYTHONHASHSEED": "123"
    }


# --- worker-args ------------------------------------------------------------------------------------------


def test_the_model_is_named_before_the_options_and_the_users_options_come_last(hyperpod, plan):
    made = plan(hyperpod({"spec.worker.args": ["--model", "/opt/ml/model", "--max-model-len", "20000"]}))
    ((_, argv),) = workers(made)

    assert argv[:3] == ["vllm", "serve", "/opt/ml/model"]
    assert argv[-2:] == ["--max-model-len", "20000"]
    assert flags(argv)["--served-model-name"] == "demo-model"


@pytest.mark.parametrize(
    "given", [["--tensor-parallel-size", "2"], ["-tp", "2"], ["--tensor-parallel-size=2"]]
)
def test_an_option_that_the_user_gives_is_given_once(given, hyperpod, plan):
    changes = {"spec.worker.args": given, "spec.worker.resources.limits": {"nvidia.com/gpu": 2}}
    ((_, argv),) = workers(plan(hyperpod(changes)))

    assert argv[-len(given) :] == given
    assert len([word for word in argv if word.startswith(("--tensor", "-tp"))]) == 1


def test_gpus_are_shared_out_between_the_workers(own, plan):
    made = plan(own({"x-kvroute.gpusPerWorker": 2}))

    assert [environment["CUDA_VISIBLE_DEVICES"] for environment, _ in workers(made)] == ["0,1", "2,3"]
    assert [flags(argv)["--tensor-parallel-size"] for _, argv in workers(made)] == ["2", "2"]


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 1),
        ({"spec.worker.resources.limits": {"nvidia.com/gpu": "4"}}, 4),
        (
            {"spec.worker.args": ["--tensor-parallel-size", "4"], "spec.worker.resources.limits": {"cpu": 1}},
            4,
        ),
        ({"x-kvroute.gpusPerWorker": 8}, 8),
        ({"x-kvroute.device": "cpu"}, 0),
        ({"x-kvroute.engine": "sim"}, 0),
    ],
)
def test_a_workers_gpus_are_those_set_reserved_or_needed(changes, gpus, hyperpod, plan):
    assert plan(hyperpod(changes)).gpus == gpus


def test_engines_on_cpus_get_a_core_each(own, plan):
    made = plan(own({"x-kvroute.device": "cpu"}))

    assert [environment["VLLM_CPU_OMP_THREADS_BIND"] for environment, _ in workers(made)] == ["0", "1"]


def test_a_command_of_the_users_own_takes_the_place_of_vllm_serve(hyperpod, plan):
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    ((_, argv),) = workers(plan(hyperpod({"spec.worker.command": command})))

    assert argv[:3] == command
    assert flags(argv)["--model"] == "/opt/ml/model"
    assert "serve" not in argv


def test_a_hub_model_is_loaded_by_name_and_revision(hyperpod, plan):
    source = {
        "modelSourceType": "huggingface",
        "huggingFaceModel": {"modelId": "Qwen/Qwen3-8B", "commitSHA": "abc"},
    }
    ((_, argv),) = workers(plan(hyperpod({"spec.modelSourceConfig": source})))

    assert argv[2] == "Qwen/Qwen3-8B"
    assert flags(argv)["--revision"] == "abc"


def test_a_folder_is_named_as_it_is_on_this_host(own, plan):
    ((_, argv), _) = workers(plan(own({"spec.model": "/data/model"})))

    assert argv[2] == "/data/model"


def test_a_generated_model_is_small_enough_for_a_laptop(own, plan):
    (environment, argv), _ = workers(plan(own({"spec.model": "small", "x-kvroute.device": "cpu"})))

    assert flags(argv)["--load-format"] == "dummy"
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_simulated_workers_need_no_engine(own, plan):
    (environment, argv), _ = workers(plan(own({"x-kvroute.engine": "sim"})))

    assert argv[:2] == ["kvroute", "sim"]
    assert environment == {}


# --- passwords --------------------------------------------------------------------------------------------

SECRET = {
    "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache:6379",
    "x-kvroute.l2.passwordSecret": {"name": "redis", "key": "password"},
}


def test_a_shell_fills_in_the_second_tiers_password_when_the_server_starts(own, plan):
    files = render_lmcache(plan(own(SECRET)))
    (line,) = files["lmcache-servers.sh"].splitlines()
    printed = subprocess.run(
        ["sh", "-c", line.replace(" lmcache server ", " printenv LMCACHE_RESP_PASSWORD # ", 1)],
        env={"L2_PASSWORD": "a b$c", "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    ).stdout.splitlines()

    assert printed == ["a b$c"]


def test_the_list_of_arguments_has_no_password_and_no_placeholder(own, plan):
    made = plan(own(SECRET))

    assert "password" not in json.loads(servers(made)[0]["--l2-adapter"])
    assert "L2_PASSWORD" not in render_lmcache(made)["lmcache.yaml"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("changes", [CLASSIC, {"spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": None}])
def test_a_password_that_nothing_takes_is_nowhere(changes, target, own, plan):
    files = TARGETS[target].render(plan(own(SECRET | changes)))

    assert "L2_PASSWORD" not in "".join(files.values())


@pytest.mark.parametrize("platform", ["any", "hyperpod"])
def test_our_daemon_has_its_own_command_that_kvroute_parses(platform, own, plan):
    """Hosts other than HyperPod's nodes use our daemon instead of HyperPod's."""
    backend = {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage", "x-kvroute.l2.sizeGb": 3.0}
    files = render_lmcache(plan(own(backend | {"x-kvroute.platform": platform})))
    program, command, *rest = shlex.split(files["tierd.sh"])

    context = tierd.make_context("tierd", rest)

    assert (program, command) == ("kvroute", "tierd")
    assert context.params["host"] == "127.0.0.1"
    assert context.params["size_gb"] == 3.0
    (server,) = yaml.safe_load(files["lmcache.yaml"])["servers"]
    adapter = json.loads(flags(server["command"])["--l2-adapter"])
    assert adapter["url"] == f"sagemaker-hyperpod://127.0.0.1:{context.params['port']}"
    assert adapter["shared_memory_name"] == context.params["shared_memory_name"]
