from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.deploy.render.registry import TARGETS

ROOT = Path(__file__).parents[2]
SPECS = sorted(
    file for file in (ROOT / "configs").glob("*.yaml") if re.search(r"^kind:", file.read_text(), re.MULTILINE)
)
SAMPLE = ROOT / "tests" / "data" / "hyperpod-announcement-sample.yaml"
FILLED_IN = {"INSTANCE_TYPE": "ml.g5.24xlarge", "CERT_S3_URI": "s3://bucket/certificates"}
MAIN_FILE = {
    "compose": "docker-compose.yml",
    "kubernetes": "workers.yaml",
    "lmcache": "lmcache.yaml",
    "worker-args": "worker-args.sh",
    "config": "kvroute.yaml",
    "envoy": "envoy.yaml",
}


def run(*arguments: object, code: int = 0):
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def spec() -> Path:
    return ROOT / "configs" / "redis-l2.yaml"


def test_there_are_specs_to_try():
    assert {"redis-l2.yaml", "hyperpod.yaml"} <= {file.name for file in SPECS}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("file", SPECS, ids=[file.name for file in SPECS])
def test_every_spec_that_comes_along_is_right_and_renders_to_everything(file, target, tmp_path):
    run("check", "-f", file)
    run("render", "-f", file, "--to", target, "-o", tmp_path)

    assert (tmp_path / MAIN_FILE[target]).read_text()


def test_the_folder_is_made_and_its_other_files_stay(spec, tmp_path):
    folder = tmp_path / "not" / "there"
    run("render", "-f", spec, "--to", "config", "-o", folder)
    (folder / "mine").write_text("x")

    result = run("render", "-f", spec, "--to", "compose", "-o", folder)

    assert {file.name for file in folder.iterdir()} == {
        "kvroute.yaml",
        "mine",
        "docker-compose.yml",
        "prometheus.yml",
        "configs",
    }
    assert str(folder / "docker-compose.yml") in result.stdout


def test_the_admin_key_is_its_owners_alone_and_stays(spec, tmp_path):
    file = tmp_path / "gateway-secret.yaml"
    run("render", "-f", spec, "--to", "kubernetes", "-o", tmp_path)
    first = file.read_text()

    run("render", "-f", spec, "--to", "kubernetes", "-o", tmp_path)

    assert file.read_text() == first
    assert file.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".*"))
    file.write_text("kind: Secret\n")
    refused = run("render", "-f", spec, "--to", "kubernetes", "-o", tmp_path, code=1)
    assert "remove it to generate a new key" in refused.stderr


def test_without_a_folder_standard_output_is_only_the_result(spec):
    compose = run("render", "-f", spec, "--to", "compose")
    manifests = run("render", "-f", spec, "--to", "kubernetes")

    assert "services" in yaml.safe_load(compose.stdout)
    assert "prometheus.yml" in compose.stderr
    assert len(list(yaml.safe_load_all(manifests.stdout))) > 10


def test_a_wrong_spec_is_reported_and_nothing_is_written(tmp_path):
    result = run("render", "-f", SAMPLE, "--to", "compose", "-o", tmp_path / "out", code=1)

    assert "belongs under spec.kvCacheSpec" in result.stderr
    assert not (tmp_path / "out").exists()


def test_fields_without_effect_are_reported_next_to_the_result(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text((ROOT / "configs" / "hyperpod.yaml").read_text() + "  gateway: {replicas: 2}\n")

    result = run("render", "-f", file, "--to", "kubernetes")

    assert "noted: x-kvroute.gateway.replicas: applied, but gateways do not share" in result.stderr


def test_a_gateway_gets_a_route_to_pickers_that_share(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text((ROOT / "configs" / "hyperpod.yaml").read_text() + "  gateway: {replicas: 3}\n")

    result = run(
        "render", "-f", file, "--to", "kubernetes", "--gateway", "infra/edge", "-o", tmp_path / "out"
    )

    pool, route = yaml.safe_load_all((tmp_path / "out" / "route.yaml").read_text())
    assert pool["kind"] == "InferencePool"
    assert route["spec"]["parentRefs"] == [{"name": "edge", "namespace": "infra"}]
    assert "do not share" not in result.stderr
    assert "the Gateway infra/edge is in another namespace" in result.stderr


@pytest.mark.parametrize(
    ("target", "name", "complaint"),
    [("compose", "edge", "--gateway needs --to kubernetes"), ("kubernetes", "a/b/c", "NAMESPACE")],
)
def test_a_gateway_that_cannot_be_is_refused(spec, target, name, complaint):
    result = run("render", "-f", spec, "--to", target, "--gateway", name, code=2)

    assert complaint in result.stderr


def test_a_spec_that_pickers_cannot_have_is_reported_and_nothing_is_written(tmp_path):
    file = tmp_path / "spec.yaml"
    settings = "  gateway: {settings: {server: {processes: 4}}}\n"
    file.write_text((ROOT / "configs" / "hyperpod.yaml").read_text() + settings)
    wanted = ["render", "-f", file, "--to", "kubernetes", "-o", tmp_path / "out"]

    result = run(*wanted, "--gateway", "edge", code=1)

    assert "x-kvroute.gateway.settings.server.processes: must be 1" in result.stderr
    assert not (tmp_path / "out").exists()
    run(*wanted)


@pytest.mark.parametrize("command", ["check", "render"])
def test_an_unreadable_file_is_reported_without_a_traceback(command, tmp_path):
    arguments = ["--to", "config"] if command == "render" else []

    result = run(command, "-f", tmp_path / "missing", *arguments, code=1)

    assert "cannot read" in result.stderr


def test_an_unwritable_folder_is_reported_without_a_traceback(spec, tmp_path):
    (tmp_path / "file").write_text("")

    result = run("render", "-f", spec, "--to", "config", "-o", tmp_path / "file" / "inside", code=1)

    assert "cannot write" in result.stderr


def test_check_prints_a_verdict_for_each_field(spec):
    lines = run("check", "-f", spec).stdout.splitlines()

    assert any(line.endswith("applied: spec.replicas: the number of workers") for line in lines)
    assert lines[-1].endswith("0 wrong")


def test_check_of_the_pasted_sample_fails_line_by_line_and_fix_prints_it_right(tmp_path):
    printed = run("check", "-f", SAMPLE, code=1).stdout
    fixed = run("check", "-f", SAMPLE, "--fix")

    assert f"{SAMPLE}:54: wrong: spec.worker.modelInvocationPort.name: belongs under" in printed
    assert "the variable ${NAME} is not filled in" in printed
    assert "the variable ${NAME} is not filled in" in fixed.stderr
    file = tmp_path / "spec.yaml"
    file.write_text(re.sub(r"\$\{(\w+)\}", lambda name: FILLED_IN.get(name[1], "x"), fixed.stdout))
    run("check", "-f", file)
    for target in TARGETS:
        run("render", "-f", file, "--to", target, "-o", tmp_path / target)


def test_a_line_that_fix_cannot_place_fails_it(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text("spec:\n  nonsense: 1\n")

    run("check", "-f", file, "--fix", code=1)


def test_fix_may_come_before_the_file():
    assert run("check", "--fix", "-f", SAMPLE).stdout.startswith("apiVersion")


def test_a_field_without_effect_in_one_target_is_reported_for_that_target_only():
    file = ROOT / "configs" / "hyperpod.yaml"
    compose = run("render", "-f", file, "--to", "compose").stderr
    manifests = run("render", "-f", file, "--to", "kubernetes").stderr

    assert "noted: spec.worker.resources.requests: has no effect in compose because" in compose
    assert "spec.worker.resources.requests" not in manifests


@pytest.mark.parametrize("command", ["check", "render"])
def test_a_password_in_an_address_is_never_printed_among_the_findings(command, tmp_path):
    file = tmp_path / "spec.yaml"
    text = (ROOT / "configs" / "redis-l2.yaml").read_text()
    file.write_text(text.replace("# l2CacheLocalUrl: redis://", "l2CacheLocalUrl: redis://me:hunter2@"))
    arguments = ["--to", "compose", "-o", tmp_path / "out"] if command == "render" else []

    result = run(command, "-f", file, *arguments)

    assert "use x-kvroute.l2.passwordSecret" in result.output
    assert "hunter2" not in result.output


def test_versions_may_be_given_on_the_command_line(spec):
    checked = run("check", "-f", spec, "--versions", "0.23.0+0.4.7").output
    rendered = run("render", "-f", spec, "--to", "lmcache", "--versions", "0.23.0+0.4.7").output

    assert "applied: x-kvroute.versions.vllm" in checked
    assert "--instance-id" in rendered
    assert "lmcache_driven" not in rendered
    assert "lmcache_driven" in run("render", "-f", spec, "--to", "lmcache").output


def test_the_version_of_lmcache_follows_from_vllms(spec):
    assert "applied: x-kvroute.versions.vllm" in run("check", "-f", spec, "--versions", "0.23.0+").output


@pytest.mark.parametrize("versions", ["newest", "+", "0.23.0+new"])
def test_versions_that_are_none_are_refused(spec, versions):
    for command in (("check", "-f", spec), ("render", "-f", spec, "--to", "config")):
        assert "--versions" in run(*command, "--versions", versions, code=2).output
