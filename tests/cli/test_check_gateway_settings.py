"""What a spec passes on to the gateway is checked as the gateway would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvroute.cli import main

COMMANDS = [("check", "-f"), ("render", "--to", "compose", "-f"), ("up", "-f")]


def spec(tmp_path: Path, settings: dict[str, Any], options: dict[str, Any], strategy: str) -> str:
    file = tmp_path / "spec.yaml"
    document = {
        "apiVersion": "kvroute.dev/v1",
        "kind": "Endpoint",
        "metadata": {"name": "demo"},
        "spec": {
            "model": "m",
            "kvCacheSpec": {
                "enableL1Cache": True,
                "enableL2Cache": True,
                "l2CacheSpec": {"l2CacheBackend": "redis"},
            },
            "intelligentRoutingSpec": {"enabled": True, "routingStrategy": strategy},
        },
        "x-kvroute": {"gateway": {"settings": settings}, "routing": {"options": options}},
    }
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_options_that_the_gateway_would_refuse_are_wrong_where_the_spec_has_them(command, tmp_path):
    settings = {"server": {"prot": 1}, "logging": {"level": "loud"}}
    file = spec(tmp_path, settings, {"kvaware": {"nothing": 1}}, "kvaware")

    result = CliRunner().invoke(main, [*command, file])

    assert result.exit_code == 1
    for line in (
        "wrong: x-kvroute.gateway.settings: server.prot: unknown option; did you mean server.port?",
        "wrong: x-kvroute.gateway.settings: logging.level: should be",
        "wrong: x-kvroute.routing.options: routing.kvaware.nothing: unknown option",
    ):
        assert line in result.output
    assert "kvroute.yaml" not in result.output


@pytest.mark.parametrize("strategy", ["kvaware", "prefixaware"])
def test_secrets_are_read_where_the_gateway_runs_and_never_printed(strategy, tmp_path):
    settings = {"server": {"api_keys_file": "/run/secrets/none", "max_in_flight": -1}}
    secret = {"admin": {"api_key": "hunter2", "what": "x"}}

    fine = CliRunner().invoke(
        main,
        ["check", "-f", spec(tmp_path, {"server": settings["server"] | {"max_in_flight": 1}}, {}, strategy)],
    )
    wrong = CliRunner().invoke(main, ["check", "-f", spec(tmp_path, settings | secret, {}, strategy)])

    assert fine.exit_code == 0, fine.output
    assert wrong.exit_code == 1
    assert "admin.what" in wrong.output
    assert "hunter2" not in wrong.output


def test_an_unknown_strategy_is_refused_before_any_process_starts(tmp_path):
    file = spec(tmp_path, {}, {}, "prefixaware")

    result = CliRunner().invoke(main, ["up", "-f", file, "--strategy", "best"])

    assert result.exit_code == 2
    assert "kvaware" in result.output
