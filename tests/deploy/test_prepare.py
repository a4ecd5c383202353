"""What is looked at before anything starts."""

from __future__ import annotations

import stat
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from tests.support.sockets import free_ports

from kvroute.clock import SystemClock
from kvroute.deploy import prepare as prepare_module
from kvroute.deploy.endpoint import with_simulated_workers
from kvroute.deploy.engine_install import EngineVenv
from kvroute.deploy.plan import Engine, UpSpec
from kvroute.deploy.prepare import EndpointRequest, prepare, prepare_endpoint
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.spec.loading import read_spec
from kvroute.errors import ConfigError

ROOT = Path(__file__).parents[2]
MakeEndpoint = Callable[..., EndpointPlan]


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


@pytest.fixture
def endpoint() -> MakeEndpoint:
    """`(file, {"spec.replicas": 3})` -> the endpoint of one of our specs with these fields changed."""

    def make(file: str, changes: dict[str, object] | None = None) -> EndpointPlan:
        document: dict[str, Any] = yaml.safe_load((ROOT / "configs" / file).read_text())
        for path, value in (changes or {}).items():
            *above, last = path.split(".")
            inner = document
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = value
        strategies = ("prefixaware", "session", "roundrobin", "kvaware")
        return plan_endpoint(read_spec(yaml.safe_dump(document), strategies=strategies).require(file))

    return make


@pytest.fixture
def up(tmp_path: Path, engine_venv: Path) -> Callable[[EndpointPlan], EndpointRequest]:
    return lambda made: EndpointRequest(made, None, free_ports(1)[0], tmp_path / "state", engine_venv)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_preparing_simulated_workers_needs_nothing(console: Console, clock: SystemClock) -> None:
    plan = await prepare(UpSpec(port=free_ports(1)[0]), console=console, clock=clock)

    assert plan.simulated
    assert printed(console) == ""


async def test_preparing_cpu_engines_installs_them_and_writes_the_model(
    tmp_path: Path, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def installed(path: Path, **_: object) -> EngineVenv:
        return EngineVenv.at(path)

    monkeypatch.setattr(prepare_module, "install_engine", installed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    spec = UpSpec(
        Engine.VLLM, port=free_ports(1)[0], state_dir=tmp_path / "state", engine_venv=tmp_path / "venv"
    )

    plan = await prepare(spec, console=console, clock=clock)

    assert "No GPU is visible" in printed(console)
    assert plan.workers[0].child.argv[0] == str(tmp_path / "venv/bin/vllm")
    assert "PYTHONPATH" not in plan.workers[0].child.env
    assert (plan.model_folder / "config.json").exists()


async def test_gpu_engines_need_vllm_in_this_environment(
    tmp_path: Path, console: Console, clock: SystemClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = UpSpec(Engine.VLLM, model="org/model", port=free_ports(1)[0])

    with pytest.raises(ConfigError, match=r"pip install 'kvroute\[engine\]'"):
        await prepare(spec, console=console, clock=clock)

    program(tmp_path, "vllm")
    plan = await prepare(spec, console=console, clock=clock)

    assert plan.workers[1].child.argv[0] == str(tmp_path / "vllm")
    assert plan.workers[1].child.env["CUDA_VISIBLE_DEVICES"] == "1"


async def test_an_endpoint_gets_its_model_its_programs_and_its_gateway_s_configuration(
    endpoint, up, engine_venv, tmp_path, console, clock, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    redis = program(tmp_path, "redis-server")
    wanted = up(
        endpoint("redis-l2.yaml", {"x-kvroute.gateway.settings": {"admin": {"api_key": "s3cret-0123456789"}}})
    )

    plan = await prepare_endpoint(wanted, console=console, clock=clock)

    assert plan.caches[0][0].child.argv[0] == redis
    assert {server.child.argv[0] for server in plan.caches[1]} == {str(engine_venv / "bin/lmcache")}
    assert plan.workers[0].child.argv[:3] == (
        *(str(engine_venv / "bin/vllm"), "serve"),
        str(tmp_path / "state/models/small"),
    )
    assert (tmp_path / "state/models/small/config.json").exists()
    file = tmp_path / "state/gateway.yaml"
    config = yaml.safe_load(file.read_text())
    assert [each["id"] for each in config["fleet"]["workers"]] == ["redis-l2-a", "redis-l2-b"]
    assert config["server"]["port"] == wanted.port
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_valkey_takes_the_place_of_a_redis_that_is_not_there(
    endpoint, up, tmp_path, console, clock, monkeypatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ConfigError, match="redis-server is not installed here"):
        await prepare_endpoint(up(endpoint("redis-l2.yaml")), console=console, clock=clock)

    valkey = program(tmp_path, "valkey-server")
    plan = await prepare_endpoint(up(endpoint("redis-l2.yaml")), console=console, clock=clock)

    assert plan.caches[0][0].child.argv[0] == valkey
    assert "compatible valkey-server" in printed(console)


async def test_a_redis_that_runs_already_is_not_started(endpoint, up, console, clock) -> None:
    url = {"spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache.example.com:6380"}

    plan = await prepare_endpoint(up(endpoint("redis-l2.yaml", url)), console=console, clock=clock)

    assert plan.caches[0] == ()
    assert '"host":"cache.example.com","port":6380' in " ".join(plan.caches[1][0].child.argv)


async def test_the_folder_of_a_file_store_is_made(endpoint, up, tmp_path, console, clock) -> None:
    folder = tmp_path / "store" / "kv"
    changes = {"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "fs", "x-kvroute.l2.fs": {"path": str(folder)}}
    (tmp_path / "store").touch()

    with pytest.raises(ConfigError, match=r"x-kvroute\.l2\.fs\.path: cannot make"):
        await prepare_endpoint(up(endpoint("redis-l2.yaml", changes)), console=console, clock=clock)

    (tmp_path / "store").unlink()
    await prepare_endpoint(up(endpoint("redis-l2.yaml", changes)), console=console, clock=clock)

    assert folder.is_dir()


async def test_a_model_in_a_bucket_must_have_been_copied(
    endpoint, up, tmp_path, console, clock, monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("vllm", "lmcache"):
        program(tmp_path, name)
    away = {"spec.worker.modelVolumeMount": {"name": "weights", "mountPath": str(tmp_path / "weights")}}
    made = endpoint("hyperpod.yaml", {"x-kvroute.platform": "any", **away})

    with pytest.raises(ConfigError, match=r"spec\.modelSourceConfig: .*\(nothing is copied here\)"):
        await prepare_endpoint(up(made), console=console, clock=clock)

    (tmp_path / "weights").mkdir()
    plan = await prepare_endpoint(up(made), console=console, clock=clock)

    assert [worker.child.env["CUDA_VISIBLE_DEVICES"] for worker in plan.workers] == ["0,1,2,3", "4,5,6,7"]


async def test_an_unsupported_host_is_reported_before_the_engine_is_installed(
    endpoint, up, tmp_path, console, clock, monkeypatch
) -> None:
    async def must_not(path: Path, **_: object) -> EngineVenv:
        raise AssertionError("installed")

    monkeypatch.setattr(prepare_module, "install_engine", must_not)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (port,) = free_ports(1)

    with pytest.raises(ConfigError, match=r"x-kvroute\.device: 2 worker"):
        await prepare_endpoint(
            up(endpoint("redis-l2.yaml", {"x-kvroute.device": "gpu"})), console=console, clock=clock
        )
    with pytest.raises(ConfigError, match=r"spec\.replicas: is 0"):
        await prepare_endpoint(
            up(endpoint("redis-l2.yaml", {"spec.replicas": 0})), console=console, clock=clock
        )
    with pytest.raises(ConfigError, match=r"x-kvroute\.gateway\.port: cannot listen on 203\.0\.113\.1"):
        await prepare_endpoint(
            EndpointRequest(endpoint("session.yaml"), "203.0.113.1", port, tmp_path),
            console=console,
            clock=clock,
        )


async def test_a_simulated_endpoint_needs_neither_gpus_nor_caches(endpoint, up, console, clock) -> None:
    plan = await prepare_endpoint(
        up(with_simulated_workers(endpoint("hyperpod.yaml"))), console=console, clock=clock
    )

    assert plan.simulated
    assert not any(plan.caches)
    assert [worker.child.argv[1:4] for worker in plan.workers] == [("-m", "kvroute", "sim")] * 2


def program(folder: Path, name: str) -> str:
    """An executable of that name; its path."""
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)
    return str(folder / name)
