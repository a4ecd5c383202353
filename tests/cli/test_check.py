from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.config.config import Config
from kvroute.openai.rewriting import key_space

CONFIGS = Path(__file__).parents[2] / "configs"


def invoke(*arguments, **environ):
    return CliRunner().invoke(main, ["check", *map(str, arguments)], env=environ)


@pytest.mark.parametrize("file", ["kvroute.example.yaml", "reference.yaml"])
def test_every_documented_configuration_is_valid(file):
    result = invoke("-c", CONFIGS / file)

    assert result.exit_code == 0, result.output


def test_the_documented_workers_file_is_valid():
    result = invoke("--set", f"fleet.file={CONFIGS / 'workers.example.yaml'}")

    assert result.exit_code == 0, result.output


def test_the_output_is_the_resolved_configuration_with_origins_and_masked_secrets():
    result = invoke(
        "--worker", "a=http://a:1", KVROUTE__ADMIN__API_KEY="hidden-0123456789", KVROUTE__SERVER__PORT="9"
    )

    assert result.exit_code == 0, result.output
    assert "hidden" not in result.output
    assert "port: 9  # KVROUTE__SERVER__PORT\n" in result.output
    resolved = Config.model_validate(yaml.safe_load(result.stdout))
    assert [worker.id for worker in resolved.fleet.workers] == ["a"]


def test_a_configuration_without_workers_is_valid():
    assert invoke().exit_code == 0


def test_a_wrong_configuration_ends_with_1_and_prints_nothing_but_the_problems(tmp_path):
    (tmp_path / "c.yaml").write_text("server:\n  prot: 1\n")

    result = invoke("-c", tmp_path / "c.yaml")

    assert result.exit_code == 1
    assert result.output == "kvroute: server.prot: unknown option; did you mean server.port? (c.yaml:2)\n"


@pytest.mark.parametrize("text", ["workers: 5", "nope: []", "workers: [{url: ftp://a}]"])
def test_a_wrong_workers_file_ends_with_1_and_is_named(tmp_path, text):
    (tmp_path / "w.yaml").write_text(text)

    result = invoke("--set", f"fleet.file={tmp_path / 'w.yaml'}")

    assert result.exit_code == 1
    assert result.output.startswith(f"kvroute: fleet.file: {tmp_path / 'w.yaml'}: ")


def test_a_missing_workers_file_is_an_error(tmp_path):
    result = invoke("--set", f"fleet.file={tmp_path / 'no.yaml'}")

    assert result.exit_code == 1
    assert "No such file" in result.output


def test_adapters_that_are_not_isolated_are_a_finding():
    assert invoke().stderr == ""

    result = invoke("--set", "lmcache.isolate_adapters=false")

    assert result.exit_code == 0
    assert "answers become wrong" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("apiVersion: a/v1\nkind: Endpoint\n", ["endpoint spec (kind: Endpoint)", "`kvroute check -f {}`"]),
        ("workers: [http://a:1]\n", ["a file of workers", "--set fleet.file={}"]),
        ("keys: []\n", ["a file of API keys", "`kvroute keys check {}`"]),
    ],
)
def test_another_kind_of_file_is_recognised_with_the_command_that_reads_it(tmp_path, text, words):
    (tmp_path / "x.yaml").write_text(text)

    result = invoke("-c", tmp_path / "x.yaml")

    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    for word in words:
        assert word.format(tmp_path / "x.yaml") in result.output


def test_what_is_wrong_in_a_spec_comes_first_and_a_summary_last(tmp_path):
    text = (CONFIGS / "hyperpod.yaml").read_text()
    (tmp_path / "spec.yaml").write_text(f"{text.rstrip()}\nnope: 1\n")

    lines = invoke("-f", tmp_path / "spec.yaml").output.splitlines()

    verdicts = [line.split(": ")[1] for line in lines[:-1]]
    assert verdicts[0] == "wrong"
    assert "unknown field" in lines[0]
    assert verdicts == sorted(verdicts, key=["wrong", "noted", "applied"].index)
    assert lines[-1].startswith(f"{tmp_path / 'spec.yaml'}: ")
    assert lines[-1].endswith("1 wrong")


def test_the_salts_of_tenants_are_those_that_workers_get(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        "keys: [{name: a, jwt: x}, {name: b, jwt: y, tenant: both}, {name: c, jwt: z, tenant: both}]\n"
    )

    plain = CliRunner().invoke(main, ["keys", "check", str(file)])
    salts = CliRunner().invoke(main, ["keys", "check", str(file), "--salts"])

    assert plain.output.split() == ["a", "b", "c"]
    lines = [line.split() for line in salts.output.splitlines()]
    assert [line[:2] for line in lines] == [["a", "a"], ["b", "both"], ["c", "both"]]
    assert lines[0][2] == key_space("", "", "", "a")
    assert lines[1][2] == lines[2][2]
