from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvroute.deploy.plan import (
    AdminKeyLocation,
    Engine,
    HostFacts,
    ProcessPlan,
    UpSpec,
    gateway_process,
    plan_up,
    port_count,
    worker_count,
)
from kvroute.errors import ConfigError

ENV = {"PATH": "/bin", "PYTHONPATH": "src"}
ENGINE_ENV = {"PATH": "/bin"}


def plan(gpus: tuple[str, ...] = (), **wanted: object) -> ProcessPlan:
    host = HostFacts(ENV, ENGINE_ENV, (0, 1), gpus, (9001, 9002, 9003, 9004), ("/venv/bin/vllm",))
    return plan_up(UpSpec(**wanted), host)  # type: ignore[arg-type]


def command(plan: ProcessPlan, worker: int) -> str:
    return " ".join(plan.workers[worker].child.argv)


def test_simulated_workers_are_the_default() -> None:
    made = plan()

    assert made.simulated
    assert made.tiny_model is None
    assert [worker.url for worker in made.workers] == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]
    assert made.workers[0].child.argv[:4] == (sys.executable, "-m", "kvroute", "sim")
    assert command(made, 1).endswith("--host 127.0.0.1 --port 9002 --model simulated")
    assert made.workers[0].ready_url == "http://127.0.0.1:9001/health"


def test_the_gateway_knows_every_worker() -> None:
    gateway = plan(workers=3, strategy="roundrobin", port=8123).gateway

    assert gateway.child.argv[1:] == (
        *("-m", "kvroute", "serve", "--host", "127.0.0.1", "--port", "8123"),
        *("--worker", "worker-0=http://127.0.0.1:9001"),
        *("--worker", "worker-1=http://127.0.0.1:9002"),
        *("--worker", "worker-2=http://127.0.0.1:9003"),
        *("--strategy", "roundrobin"),
    )
    assert gateway.ready_url == "http://127.0.0.1:8123/ready"
    assert gateway.child.env == ENV


def test_with_tls_the_gateway_gets_its_certificate_and_is_polled_over_https() -> None:
    made = plan(tls=True, state_dir=Path("/state"), port=8123)

    assert made.gateway.child.argv[-4:] == (
        *("--set", "server.tls.cert_file=/state/tls/gateway.crt"),
        *("--set", "server.tls.key_file=/state/tls/gateway.key"),
    )
    assert made.gateway.ready_url == "https://127.0.0.1:8123/ready"
    assert made.ca_file == Path("/state/tls/gateway.crt")


def test_a_gateway_that_asks_for_client_certificates_is_polled_without_a_request() -> None:
    tls = {"cert_file": "a", "key_file": "b", "client_ca_file": "c"}
    made = gateway_process(("kvroute",), ENV, host="127.0.0.1", port=8123, log_path=Path("log"), tls=tls)

    assert (made.url, made.ready_url) == ("https://127.0.0.1:8123", "tcp://127.0.0.1:8123")


def test_the_gateway_makes_its_admin_key_in_the_given_folder() -> None:
    made = plan(admin_key=AdminKeyLocation(folder=Path("/state")), port=8123)
    given = plan(admin_key=AdminKeyLocation(file=Path("/keys/admin")))

    assert made.gateway.child.argv[-2:] == ("--state-dir", "/state")
    assert made.admin_key_file == Path("/state/admin-key-8123")
    assert given.gateway.child.argv[-2:] == ("--admin-key-file", "/keys/admin")
    assert given.admin_key_file is None


def test_the_admin_key_is_in_the_users_state_folder_unless_one_is_configured() -> None:
    place, home = AdminKeyLocation(), {"XDG_STATE_HOME": "/var/lib"}

    assert place.arguments == ()
    assert place.generated_file(home, {}, 1) == Path("/var/lib/kvroute/admin-key-1")
    assert (
        place.generated_file(home | {"KVROUTE__ADMIN__API_KEY": ""}, {"allowed_hosts": ["a"]}, 1) is not None
    )
    for environ, settings in (
        ({"KVROUTE__ADMIN__API_KEY": "key"}, {}),
        ({"KVROUTE__ADMIN__API_KEY_FILE": "/key"}, {}),
        ({}, {"api_key": "key"}),
        ({}, {"api_key_file": "/key"}),
    ):
        assert place.generated_file(home | environ, settings, 1) is None


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8080"), ("::", "http://127.0.0.1:8080"), ("::1", "http://[::1]:8080")],
)
def test_a_gateway_is_polled_at_a_reachable_address(host: str, url: str) -> None:
    assert plan(host=host).gateway.url == url


def test_without_gpus_vllm_runs_a_random_model_on_a_core_of_its_own() -> None:
    made = plan(engine=Engine.VLLM, state_dir=Path("/state"))

    assert made.tiny_model == made.model == "small"
    assert made.model_folder == Path("/state/models/small")
    assert command(made, 0).startswith("/venv/bin/vllm serve /state/models/small --served-model-name small")
    assert "--load-format dummy" in command(made, 1)
    assert [worker.child.env["VLLM_CPU_OMP_THREADS_BIND"] for worker in made.workers] == ["0", "1"]
    assert "PYTHONPATH" not in made.workers[0].child.env
    assert made.workers[1].child.log_path == Path("/state/logs/worker-1.log")


def test_without_gpus_vllm_can_serve_a_real_model() -> None:
    made = plan(engine=Engine.VLLM, model="org/model", workers=1, engine_args=("--dtype", "float32"))

    assert made.tiny_model is None
    assert made.model == "org/model"
    assert command(made, 0).startswith("/venv/bin/vllm serve org/model --served-model-name org/model")
    assert command(made, 0).endswith("--dtype float32")
    assert "--load-format" not in command(made, 0)
    assert "HF_HUB_OFFLINE" not in made.workers[0].child.env


def test_on_gpus_each_worker_gets_its_share() -> None:
    made = plan(gpus=tuple("0123"), engine=Engine.VLLM, model="org/model", tensor_parallel_size=2)

    assert [worker.child.env["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["0,1", "2,3"]
    assert "--tensor-parallel-size 2" in command(made, 0)


def test_every_gpu_gets_a_worker_by_default() -> None:
    assert len(plan(gpus=tuple("0123"), engine=Engine.VLLM).workers) == 4
    assert len(plan(gpus=tuple("0123"), engine=Engine.VLLM, workers=1).workers) == 1
    assert worker_count(UpSpec(engine=Engine.SIM), ("0", "1", "2")) == 2


@pytest.mark.parametrize("engine", Engine)
def test_tensor_parallelism_needs_gpus(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        plan(engine=engine, tensor_parallel_size=2)


def test_engines_publish_their_events_where_the_gateway_reads_them() -> None:
    spec = UpSpec(engine=Engine.VLLM, strategy="kvaware", workers=2)
    ports = tuple(range(9001, 9001 + port_count(spec, ())))
    made = plan_up(spec, HostFacts(ENV, ENGINE_ENV, (0, 1), (), ports, ("/venv/bin/vllm",)))

    events = []
    for worker in made.workers:
        events_config = json.loads(worker.child.argv[worker.child.argv.index("--kv-events-config") + 1])
        events += [events_config["endpoint"], events_config["replay_endpoint"]]
    assert [worker.url[-4:] for worker in made.workers] == ["9001", "9002"]
    assert events == [f"tcp://*:{port}" for port in (9003, 9004, 9005, 9006)]
    assert port_count(UpSpec(engine=Engine.VLLM, workers=2), ()) == 2
    assert "--kv-events-config" not in command(plan(engine=Engine.VLLM), 0)


def test_workers_with_roles_are_told_so_everywhere() -> None:
    spec = UpSpec(engine=Engine.VLLM, strategy="kvaware", prefill_workers=1, decode_workers=1, workers=1)
    ports = tuple(range(9001, 9001 + port_count(spec, ())))
    made = plan_up(spec, HostFacts(ENV, ENGINE_ENV, (0, 1), (), ports, ("/venv/bin/vllm",)))

    assert [worker.child.name for worker in made.workers] == ["prefill-0", "decode-0", "worker-0"]
    gateway = " ".join(made.gateway.child.argv)
    assert "--prefill prefill-0=http://127.0.0.1:9001 --decode decode-0=http://127.0.0.1:9002" in gateway
    assert "--worker worker-0=http://127.0.0.1:9003" in gateway
    used = {worker.url[-4:] for worker in made.workers}
    for worker, role in zip(made.workers, ("kv_producer", "kv_consumer", "kv_both"), strict=True):
        argv, env = worker.child.argv, worker.child.env
        transfer = json.loads(argv[argv.index("--kv-transfer-config") + 1])
        assert transfer == {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        }
        events = json.loads(argv[argv.index("--kv-events-config") + 1])
        assert env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        used |= {env["VLLM_NIXL_SIDE_CHANNEL_PORT"], events["endpoint"][-4:], events["replay_endpoint"][-4:]}
    assert len(used) == len(ports)


def test_simulated_workers_with_roles_exchange_kv() -> None:
    made = plan(prefill_workers=1, decode_workers=2)

    assert [worker.child.name for worker in made.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert all("--nixl" in worker.child.argv for worker in made.workers)


def test_on_gpus_nixl_chooses_the_memory_itself() -> None:
    made = plan(("0", "1"), engine=Engine.VLLM, model="org/model", prefill_workers=1, decode_workers=1)

    assert [worker.child.env["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["0", "1"]
    assert "kv_buffer_device" not in command(made, 0)
    assert "UCX_TLS" not in made.workers[0].child.env


@pytest.mark.parametrize("wanted", [{"prefill_workers": 1}, {"decode_workers": 1}])
def test_one_role_alone_is_an_error(wanted: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="both kinds"):
        plan(**wanted)
