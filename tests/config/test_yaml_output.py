from __future__ import annotations

import yaml

from kvroute.config.config import Config
from kvroute.config.loading import load, masked
from kvroute.config.yaml_output import flow, resolved_yaml

SECRETS = ["server.api_keys=hidden1,hidden2", "admin.api_key=hidden3-0123456789"]


def test_the_resolved_configuration_is_yaml_that_loads_to_the_same():
    assignments = ["fleet.workers=http://a:1,http://b:1", 'fleet.aliases."gpt-4.1"=m', "logging.level=debug"]
    loaded = load(assignments=assignments)

    text = resolved_yaml(loaded)

    assert Config.model_validate(yaml.safe_load(text)) == loaded.config


def test_a_value_that_was_set_is_followed_by_its_origin(tmp_path):
    file = tmp_path / "kvroute.yaml"
    file.write_text("fleet:\n  aliases:\n    a: m\n  workers:\n    - http://a:1\n")
    loaded = load(file=file, environ={"KVROUTE__SERVER__PORT": "9"}, assignments=["fleet.aliases.b=m"])

    lines = resolved_yaml(loaded).splitlines()

    assert "  port: 9  # KVROUTE__SERVER__PORT" in lines
    assert "  aliases: {a: m, b: m}  # kvroute.yaml:3, --set fleet.aliases.b" in lines
    assert "  workers:  # kvroute.yaml:4, kvroute.yaml:5" in lines
    assert "  host: 127.0.0.1" in lines


def test_secrets_are_masked_and_their_file_is_named(tmp_path):
    (tmp_path / "key").write_text("hidden4-0123456789")
    loaded = load(assignments=[SECRETS[0], f"admin.api_key_file={tmp_path / 'key'}"])

    text = resolved_yaml(loaded)

    assert "hidden" not in text
    assert f"  api_key: '**********'  # {tmp_path / 'key'}" in text.splitlines()


def test_masked_data_is_plain_and_holds_no_secret():
    data = masked(load(assignments=SECRETS).config)

    assert data["server"]["api_keys"] == ["**********", "**********"]
    assert data["admin"]["api_key"] == "**********"
    assert "hidden" not in repr(data)


def test_flow_style_keeps_one_line():
    assert flow(["a" * 200, None, 1.5, True]) == f"[{'a' * 200}, null, 1.5, true]"
    assert flow("on") == "'on'"
    assert flow({}) == "{}"
