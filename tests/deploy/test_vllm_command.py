from __future__ import annotations

import json

from kvroute.deploy.vllm_command import (
    CpuPlacement,
    GpuPlacement,
    KvEventsEndpoint,
    VllmSpec,
    vllm_argv,
    vllm_environment,
)

CPU = CpuPlacement(cores=(2, 3), kv_cache_gib=4)


def spec(**changes: object) -> VllmSpec:
    plain = {"model": "org/model", "served_name": "m", "host": "127.0.0.1", "port": 8101, "placement": CPU}
    return VllmSpec(**(plain | changes))  # type: ignore[arg-type]


def test_the_plainest_engine() -> None:
    assert vllm_argv(spec(), ("/venv/bin/vllm",)) == (
        "/venv/bin/vllm",
        "serve",
        "org/model",
        "--served-model-name",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        "8101",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    )
    assert spec().url == "http://127.0.0.1:8101"


def test_every_option_reaches_the_command_line() -> None:
    argv = vllm_argv(
        spec(
            block_size=32,
            num_gpu_blocks=33,
            max_model_len=1024,
            random_weights=True,
            eager=True,
            tool_call_parser="hermes",
            kv_events=KvEventsEndpoint("tcp://*:5557", "tcp://*:5657"),
            extra_args=("--block-size", "64"),
        )
    )

    text = " ".join(argv)
    for part in (
        "--block-size 32",
        "--num-gpu-blocks-override 33",
        "--max-model-len 1024",
        "--load-format dummy",
        "--enforce-eager",
        "--enable-auto-tool-choice --tool-call-parser hermes",
    ):
        assert part in text
    assert argv[-2:] == ("--block-size", "64")
    assert json.loads(argv[argv.index("--kv-events-config") + 1]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5657",
        "topic": "kv",
    }


def test_events_without_replay_name_no_replay_endpoint() -> None:
    argv = vllm_argv(spec(kv_events=KvEventsEndpoint("tcp://router:5557", topic="t")))

    config = json.loads(argv[argv.index("--kv-events-config") + 1])
    assert "replay_endpoint" not in config
    assert config["topic"] == "t"


def test_several_gpus_are_one_tensor_parallel_engine() -> None:
    two = spec(placement=GpuPlacement(("4", "5")))
    one = spec(placement=GpuPlacement(("4",)))

    assert "--tensor-parallel-size 2" in " ".join(vllm_argv(two))
    assert "--tensor-parallel-size" not in vllm_argv(one)
    assert vllm_environment(two, {})["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "VLLM_CPU_KVCACHE_SPACE" not in vllm_environment(two, {})


def test_a_cpu_engine_gets_its_own_cores_and_pool() -> None:
    env = vllm_environment(spec(), {})

    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in env


def test_a_pool_of_no_given_size_is_the_environments_business() -> None:
    env = vllm_environment(spec(placement=CpuPlacement((0,))), {"VLLM_CPU_KVCACHE_SPACE": "40"})

    assert env["VLLM_CPU_KVCACHE_SPACE"] == "40"


def test_the_environment_is_passed_on_but_for_the_byte_code_switch() -> None:
    env = vllm_environment(spec(), {"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1"})

    assert env["PATH"] == "/bin"
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert env["VLLM_NO_USAGE_STATS"] == "1"


def test_environment_switches_are_off_by_default() -> None:
    names = {"HF_HUB_OFFLINE", "VLLM_SERVER_DEV_MODE", "VLLM_ENABLE_RESPONSES_API_STORE"}

    assert not names & vllm_environment(spec(), {}).keys()
    on = spec(offline=True, development_mode=True, store_responses=True)
    assert names <= vllm_environment(on, {}).keys()


def test_extra_environment_wins() -> None:
    assert vllm_environment(spec(extra_env={"DO_NOT_TRACK": "0"}), {})["DO_NOT_TRACK"] == "0"
