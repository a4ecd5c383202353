"""docker-compose.yml: made of a spec, and read by Debian 12's docker-compose 1.29.2 and the Compose
Specification."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from compose_pydantic.models import ComposeSpecification
from pydantic import ValidationError

from kvroute.cli import main
from kvroute.deploy.render.compose import render_compose
from kvroute.deploy.render.plan import plan_endpoint
from kvroute.deploy.spec.loading import read_spec
from kvroute.routing.registry import STRATEGIES

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
SPEC = ROOT / "configs" / "compose.yaml"
PROFILES = ("sim", "gpu")
WORKERS = {"sim": {"sim-a", "sim-b"}, "gpu": {"vllm-a", "vllm-b"}}
GATEWAYS = {"sim": "kvroute", "gpu": "kvroute-gpu"}
ALWAYS = {"redis", "prometheus", "grafana"}


def test_it_is_rendered_from_its_spec():
    """Where this fails: `make compose`."""
    document = read_spec(SPEC.read_text(), strategies=frozenset(STRATEGIES)).require(SPEC.name)
    files = render_compose(plan_endpoint(document))

    assert {"docker-compose.yml", "prometheus.yml", "configs/alerts/kvroute.yaml"} <= set(files)
    for name, text in files.items():
        assert (ROOT / name).read_text() == text, f"{name} is not what {SPEC.name} renders to: make compose"


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """The file with every ${NAME:-default} replaced by its default, read without docker-compose."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text())
    assert "${" not in text, "a variable has no default"
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def services(document: dict[str, Any], profile: str) -> dict[str, dict[str, Any]]:
    """What runs in `profile`: its own services and those of no profile."""
    return {
        name: service
        for name, service in document["services"].items()
        if profile in service.get("profiles", [profile])
    }


def started(command: list[str]) -> click.Context:
    """Parse a service's command as the image's entrypoint would, without running it."""
    parsed = main.get_command(click.Context(main), command[0])
    assert parsed is not None
    return parsed.make_context(command[0], list(command[1:]))


@pytest.mark.parametrize("arguments", [(), *(("--profile", profile) for profile in PROFILES)])
def test_debians_docker_compose_accepts_every_profile_with_no_variable_set(docker_compose, arguments):
    resolved = yaml.safe_load(docker_compose(ROOT, *arguments, "config"))

    assert set(resolved["services"]) >= ALWAYS | WORKERS["sim"] | WORKERS["gpu"] | set(GATEWAYS.values())


def test_debians_docker_compose_resolves_the_file_of_the_other_tests(docker_compose, written):
    resolved = yaml.safe_load(docker_compose(ROOT, "config"))["services"]

    for name, service in written["services"].items():
        assert resolved[name].get("command") == service.get("command")
        assert resolved[name].get("profiles") == service.get("profiles")


def test_the_compose_specification_accepts_it(written):
    plain = {key: value for key, value in written.items() if not key.startswith("x-")}

    assert set(ComposeSpecification.model_validate(plain).services) == set(written["services"])


def test_the_compose_specification_would_notice_a_wrong_key(written):
    plain = {key: value for key, value in written.items() if not key.startswith("x-")}
    plain["services"] = {"redis": written["services"]["redis"] | {"imagee": "x"}}

    with pytest.raises(ValidationError, match="imagee"):
        ComposeSpecification.model_validate(plain)


def test_it_has_no_version_which_the_specification_calls_obsolete(written):
    assert "version" not in written


def test_the_simulated_workers_run_by_default():
    assert "COMPOSE_PROFILES=sim" in (ROOT / ".env").read_text().splitlines()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_runs_its_own_gateway_and_workers_and_the_shared_services(written, profile):
    assert set(services(written, profile)) == ALWAYS | WORKERS[profile] | {GATEWAYS[profile]}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_gateway_routes_to_the_workers_of_its_profile_and_accepts_its_settings(written, profile):
    gateway = written["services"][GATEWAYS[profile]]
    command, *flags = gateway["command"]

    result = CliRunner().invoke(main, ["check", *flags], env=gateway["environment"])

    assert command == "serve"
    assert result.exit_code == 0, result.output
    workers = yaml.safe_load(result.stdout)["fleet"]["workers"]
    assert {worker["id"]: worker["url"] for worker in workers} == {
        name: f"http://{name}:8000" for name in WORKERS[profile]
    }


@pytest.mark.parametrize("profile", PROFILES)
def test_the_admin_key_that_is_made_lies_in_a_volume(written, profile):
    gateway = written["services"][GATEWAYS[profile]]
    command = gateway["command"]
    folder = command[command.index("--state-dir") + 1]

    assert gateway["read_only"]
    assert gateway["volumes"] == [f"kvroute-state:{folder}"]
    assert "kvroute-state" in written["volumes"]
    # A new volume gets what the image has there, its owner among it.
    assert f"install -d -o kvroute -g kvroute -m 0700 {folder}" in (ROOT / "Dockerfile").read_text()


def test_the_simulated_workers_commands_are_understood(written):
    for name in WORKERS["sim"]:
        parsed = started(written["services"][name]["command"])

        assert (parsed.info_name, parsed.params["host"], parsed.params["port"]) == ("sim", "0.0.0.0", 8000)


def test_the_gpu_workers_have_a_gpu_each_and_share_redis_by_equal_hashes(written):
    gpus = []
    for name in sorted(WORKERS["gpu"]):
        service = written["services"][name]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
        transfer = service["command"][service["command"].index("--kv-transfer-config") + 1]

        assert device["capabilities"] == ["gpu"]
        assert json.loads(transfer)["kv_connector"] == "LMCacheConnectorV1"
        assert service["environment"]["LMCACHE_REMOTE_URL"] == "redis://redis:6379"
        assert service["environment"]["PYTHONHASHSEED"] == "0"
        assert "redis" in service["depends_on"]
    assert gpus == ["0", "1"]


def test_redis_is_a_bounded_cache(written):
    command = written["services"]["redis"]["command"]

    assert "--maxmemory" in command
    assert command[command.index("--maxmemory-policy") + 1] == "allkeys-lru"


def ports(service: dict[str, Any]) -> Iterator[str]:
    yield from service.get("ports", [])


def test_nothing_is_published_beyond_this_machine(written):
    published = [port for service in written["services"].values() for port in ports(service)]

    assert len(published) == 4
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_prometheus_scrapes_the_gateway_and_every_worker_by_its_name(written):
    jobs = yaml.safe_load((ROOT / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in jobs for group in job["static_configs"] for target in group["targets"]}

    assert targets == {"kvroute:8080"} | {f"{name}:8000" for names in WORKERS.values() for name in names}
    for gateway in GATEWAYS.values():
        assert "kvroute" in written["services"][gateway]["networks"]["default"]["aliases"]


def test_a_gateway_may_drain_before_it_is_killed(written):
    from kvroute.config.config import Config

    for gateway in GATEWAYS.values():
        grace = written["services"][gateway]["stop_grace_period"]

        assert float(grace.removesuffix("s")) > Config().server.drain_timeout_s + 5
