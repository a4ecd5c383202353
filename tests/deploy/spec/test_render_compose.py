from __future__ import annotations

import json
import re
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from compose_pydantic.models import ComposeSpecification

from kvroute.cli import main
from kvroute.cli.deployments import write
from kvroute.deploy.l2.registry import BACKENDS
from kvroute.deploy.render.compose import render_compose
from kvroute.deploy.spec.loading import fix_layout

S3 = {"endpoint": "s3://b.s3.eu-central-1.amazonaws.com", "region": "eu-central-1"}


def rendered(plan) -> dict[str, Any]:
    """The services with the default of every variable."""
    text = render_compose(plan)["docker-compose.yml"]
    document = yaml.safe_load(re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", text))
    ComposeSpecification.model_validate(document)
    services: dict[str, Any] = document["services"]
    return services


def of_profile(services: dict[str, Any], profile: str) -> set[str]:
    return {name for name, each in services.items() if profile in each.get("profiles", [profile])}


def variants(own, hyperpod) -> dict[str, dict[str, Any]]:
    backend = "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend"
    made = {name: own({backend: name, "x-kvroute.l2.s3": S3}) for name in BACKENDS}
    return made | {
        "classic": own({"x-kvroute.lmcache.mode": "classic"}),
        "per-worker": own({"x-kvroute.lmcache.servers": "per-worker"}),
        "cpu": own({"x-kvroute.device": "cpu", "spec.model": "small"}),
        "sim": own({"x-kvroute.engine": "sim", "spec.replicas": 30}),
        "none": own({"spec.kvCacheSpec": None}),
        "no-metrics": own({"spec.metrics": {"enabled": False}}),
        "hyperpod": hyperpod({"spec.worker.resources.limits": {"nvidia.com/gpu": 2, "memory": "30Gi"}}),
        "fsx": hyperpod(
            {"spec.modelSourceConfig": {"modelSourceType": "fsx", "fsxStorage": {"fileSystemId": "fs-1"}}}
        ),
        "dollar": hyperpod({"spec.worker.environmentVariables": [{"name": "A", "value": "$B $(D)"}]}),
    }


@pytest.mark.parametrize(
    "variant",
    [*BACKENDS, "classic", "per-worker", "cpu", "sim", "none", "no-metrics", "hyperpod", "fsx"],
)
def test_debians_docker_compose_accepts_every_profile(docker_compose, variant, own, hyperpod, plan, tmp_path):
    files = render_compose(plan(variants(own, hyperpod)[variant]))
    write(tmp_path, files)
    services = yaml.safe_load(files["docker-compose.yml"])["services"]
    profiles = {profile for each in services.values() for profile in each.get("profiles", [])}

    # All at once: each profile's services, and what they depend on, are then checked together.
    flags = [word for profile in sorted(profiles) for word in ("--profile", profile)]
    resolved = yaml.safe_load(docker_compose(tmp_path, *flags, "config"))

    assert set(resolved["services"]) == set(services)
    assert "sim" in profiles


def test_the_announcements_spec_passes_docker_compose_too(docker_compose, sample, fill_in, plan, tmp_path):
    write(tmp_path, render_compose(plan(fill_in(fix_layout(sample).text))))

    resolved = yaml.safe_load(docker_compose(tmp_path, "--profile", "gpu", "--profile", "sim", "config"))

    assert {"vllm-a", "sim-a"} <= set(resolved["services"])


def test_dollars_of_the_users_reach_the_container(docker_compose, own, hyperpod, plan, tmp_path):
    files = render_compose(plan(variants(own, hyperpod)["dollar"]))
    (tmp_path / "docker-compose.yml").write_text(files["docker-compose.yml"])

    resolved = yaml.safe_load(docker_compose(tmp_path, "--profile", "gpu", "config"))["services"]["vllm-a"]

    # docker-compose prints what it would have to read again.
    assert resolved["environment"]["A"].replace("$$", "$") == "$B $(D)"


def test_each_profile_has_a_gateway_that_routes_to_its_own_workers(own, plan):
    services = rendered(plan(own()))

    assert of_profile(services, "gpu") == {
        "kvroute-gpu",
        "vllm-a",
        "vllm-b",
        "lmcache",
        "redis",
        "prometheus",
        "grafana",
    }
    assert of_profile(services, "sim") == {"kvroute", "sim-a", "sim-b", "redis", "prometheus", "grafana"}
    for gateway, workers in (("kvroute-gpu", "vllm"), ("kvroute", "sim")):
        command = services[gateway]["command"]
        named = [word for word in command if word.startswith("--worker=")]
        assert named == [f"--worker={workers}-{letter}=http://{workers}-{letter}:8000" for letter in "ab"]
        assert services[gateway]["networks"]["default"]["aliases"] == ["kvroute"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "spec.intelligentRoutingSpec.routingStrategy": "session",
            "x-kvroute.routing": {"sessionKeys": ["body:user"], "options": {"session": {"epsilon": 0.5}}},
            "spec.worker": {"requestLimits": {"maxConcurrentRequests": 10, "maxQueueSize": 5}},
            "x-kvroute.gateway.settings": {"fleet": {"health": {"interval_s": 3}}},
        },
    ],
)
def test_the_gateways_command_is_accepted_with_all_its_settings(changes, own, plan):
    for name in ("kvroute", "kvroute-gpu"):
        gateway = rendered(plan(own(changes)))[name]
        command, *flags = gateway["command"]

        result = CliRunner().invoke(main, ["check", *flags], env=gateway["environment"])

        assert command == "serve"
        assert result.exit_code == 0, result.output
        config = yaml.safe_load(result.stdout)
        assert len(config["fleet"]["workers"]) == 2
        if changes:
            assert config["routing"]["session"]["keys"] == ["body:user"]
            assert config["routing"]["session"]["epsilon"] == 0.5
            assert config["upstream"]["max_connections"] == 10
            assert config["server"]["max_in_flight"] == 30
            assert config["fleet"]["health"]["interval_s"] == 3


def test_the_simulated_workers_commands_are_understood(own, plan):
    for name in ("sim-a", "sim-b"):
        command = rendered(plan(own()))[name]["command"]
        parsed = main.get_command(click.Context(main), command[0])

        assert parsed.make_context(command[0], command[1:]).params["port"] == 8000


def test_workers_have_gpus_of_their_own_and_lmcache_sees_those_of_its_workers(own, plan):
    def gpus(service: dict[str, Any]) -> list[str]:
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        return device["device_ids"]

    shared = rendered(plan(own({"x-kvroute.gpusPerWorker": 2})))
    each = rendered(plan(own({"x-kvroute.lmcache.servers": "per-worker"})))

    assert [gpus(shared[name]) for name in ("vllm-a", "vllm-b")] == [["0", "1"], ["2", "3"]]
    assert gpus(shared["lmcache"]) == ["0", "1", "2", "3"]
    assert [gpus(each[name]) for name in ("lmcache-a", "lmcache-b")] == [["0"], ["1"]]


def test_workers_wait_for_their_lmcache_and_that_for_its_store(own, plan):
    services = rendered(plan(own()))

    assert services["vllm-a"]["depends_on"] == {"lmcache": {"condition": "service_healthy"}}
    assert services["lmcache"]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    adapter = services["lmcache"]["command"][services["lmcache"]["command"].index("--l2-adapter") + 1]
    assert json.loads(adapter)["host"] == "redis"


def test_engine_and_lmcache_share_memory(own, plan):
    services = rendered(plan(own({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"})))

    assert {services[name]["ipc"] for name in ("vllm-a", "lmcache", "tierd")} == {"host"}


def test_lmcache_waits_for_the_daemon_whose_memory_it_maps(own, plan):
    services = rendered(plan(own({"spec.kvCacheSpec.l2CacheSpec.l2CacheBackend": "tieredstorage"})))
    command = services["tierd"]["command"]
    adapter = json.loads(
        services["lmcache"]["command"][services["lmcache"]["command"].index("--l2-adapter") + 1]
    )

    assert services["lmcache"]["depends_on"] == {"tierd": {"condition": "service_healthy"}}
    assert adapter["url"] == f"sagemaker-hyperpod://tierd:{command[command.index('--port') + 1]}"
    assert adapter["shared_memory_name"] == command[command.index("--shared-memory-name") + 1]


def test_a_model_in_a_bucket_is_copied_before_the_workers_start(hyperpod, plan):
    services = rendered(plan(hyperpod()))

    assert services["model"]["command"][-2:] == ["s3://bucket/models/demo", "/opt/ml/model"]
    assert services["vllm-a"]["depends_on"]["model"] == {"condition": "service_completed_successfully"}
    assert services["vllm-a"]["volumes"] == ["model:/opt/ml/model:ro"]


def test_nothing_is_published_beyond_this_machine(own, plan):
    ports = [port for each in rendered(plan(own())).values() for port in each.get("ports", [])]

    assert len(ports) == 4
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_scrapes_every_service_at_the_specs_interval(own, plan):
    files = render_compose(plan(own({"spec.metrics": {"metricsScrapeIntervalSeconds": 7}})))
    config = yaml.safe_load(files["prometheus.yml"])
    targets = {
        t for job in config["scrape_configs"] for group in job["static_configs"] for t in group["targets"]
    }

    assert config["global"]["scrape_interval"] == "7s"
    assert targets == {
        "kvroute:8080",
        "lmcache:9555",
        *(f"{p}-{x}:8000" for p in ("sim", "vllm") for x in "ab"),
    }


def test_without_metrics_there_is_no_prometheus(own, plan):
    files = render_compose(plan(own({"spec.metrics": {"enabled": False}})))

    assert list(files) == ["docker-compose.yml"]
    assert not {"prometheus", "grafana"} & yaml.safe_load(files["docker-compose.yml"])["services"].keys()


def test_images_may_be_built_and_replaced(own, plan):
    services = rendered(
        plan(own({"x-kvroute.images": {"gatewayBuild": ".", "redis": "redis:8", "lmcache": "l"}}))
    )

    assert services["kvroute"]["build"] == "."
    assert services["redis"]["image"] == "redis:8"
    assert services["lmcache"]["image"] == "l"


SECRET = {
    "spec.kvCacheSpec.l2CacheSpec.l2CacheLocalUrl": "redis://cache:6379",
    "x-kvroute.l2.passwordSecret": {"name": "redis", "key": "password"},
}


def test_the_second_tiers_password_is_a_variable_and_on_no_command_line(own, plan):
    text = render_compose(plan(own(SECRET)))["docker-compose.yml"]
    service = yaml.safe_load(text)["services"]["lmcache"]

    assert service["environment"]["LMCACHE_RESP_PASSWORD"] == "${L2_PASSWORD:-}"
    assert "password" not in json.loads(service["command"][service["command"].index("--l2-adapter") + 1])
    assert "$(" not in text


def test_valkeys_password_can_only_be_a_setting_of_lmcache(own, plan):
    changes = {
        "spec.kvCacheSpec.l2CacheSpec": {
            "l2CacheBackend": "valkey",
            "l2CacheLocalUrl": "valkey://cache:6379",
        },
        "x-kvroute.l2.passwordSecret": {"name": "valkey", "key": "password"},
    }
    text = render_compose(plan(own(changes)))["docker-compose.yml"]
    command = yaml.safe_load(text)["services"]["lmcache"]["command"]

    assert json.loads(command[command.index("--l2-adapter") + 1])["password"] == "${L2_PASSWORD:-}"
    assert "$(" not in text
