"""`render --to envoy`: a real Envoy accepts every file, and the pickers' configuration is right."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.epp.conftest import envoy_program

from kvroute.cli import main
from kvroute.config.loading import load
from kvroute.deploy.render.envoy import PICKER_PORTS

CONFIGS = Path(__file__).parents[3] / "configs"
SPECS = sorted(
    file for file in CONFIGS.glob("*.yaml") if re.search(r"^kind:", file.read_text(), re.MULTILINE)
)


def rendered(spec: Path, folder: Path) -> tuple[Path, Path]:
    result = CliRunner().invoke(main, ["render", "-f", str(spec), "--to", "envoy", "-o", str(folder)])
    assert result.exit_code == 0, result.output
    return folder / "envoy.yaml", folder / "kvroute.yaml"


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
async def test_envoy_accepts_its_configuration(spec, tmp_path):
    envoy, _ = rendered(spec, tmp_path)
    process = await asyncio.create_subprocess_exec(
        envoy_program(), "--mode", "validate", "-c", str(envoy), stderr=asyncio.subprocess.PIPE
    )
    _, written = await process.communicate()

    assert process.returncode == 0, written.decode()


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
def test_the_pickers_listen_where_envoy_asks(spec, tmp_path):
    envoy, kvroute = rendered(spec, tmp_path)
    config = load(file=kvroute, environ={}).config

    clusters = yaml.safe_load(envoy.read_text())["static_resources"]["clusters"]
    ports = {
        cluster["name"]: [
            each["endpoint"]["address"]["socket_address"]["port_value"]
            for group in cluster["load_assignment"]["endpoints"]
            for each in group["lb_endpoints"]
        ]
        for cluster in clusters
    }
    assert ports["pickers"] == [port for port, _ in PICKER_PORTS]
    assert config.server.port == ports["pickers"][0]
    assert [int(worker.url.rsplit(":", 1)[1]) for worker in config.fleet.workers] == ports["workers"]


def test_with_keys_no_request_passes_without_a_picker(tmp_path):
    spec = tmp_path / "spec.yaml"
    text = (CONFIGS / "redis-l2.yaml").read_text()
    spec.write_text(text)
    open_text = rendered(spec, tmp_path / "open")[0].read_text()
    document = yaml.safe_load(text)
    document.setdefault("x-kvroute", {}).setdefault("gateway", {})["settings"] = {
        "server": {"api_keys_file": "/keys"}
    }
    spec.write_text(yaml.safe_dump(document, sort_keys=False))
    closed_text = rendered(spec, tmp_path / "closed")[0].read_text()

    assert open_text.count("failure_mode_allow: true") == 2
    assert closed_text.count("failure_mode_allow: true") == 1  # the filter that only watches
