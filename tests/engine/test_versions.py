"""LMCache's own parsers take every rendered `lmcache server` command line, its adapters their settings."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.pairs import server_commands

from kvroute.deploy.engine_install import EngineVenv
from kvroute.deploy.spec.versions import LMCACHE, PAIRS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Runs in the engine's environment with the wheel's files first: parses each command line of stdin.
PARSE = """
import argparse, importlib.util, json, sys
sys.path.insert(0, sys.argv[1])
import lmcache
from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.config import parse_args_to_config
parser = argparse.ArgumentParser(allow_abbrev=False)
ServerCommand().add_arguments(parser)
adapters = []
for argv in json.load(sys.stdin):
    parsed = parser.parse_args(argv)
    if "s3.eu-west-1" in str(argv) and importlib.util.find_spec("awscrt") is None:
        continue  # without this package, LMCache does not register its adapter for S3
    config = parse_args_to_config(parsed)
    adapters += [type(each).__name__ for each in config.l2_adapter_config.adapters]
print("parsed", json.dumps([lmcache.__file__, sorted(set(adapters))]))
"""


def wheel_of(release: str, folder: Path) -> Path:
    """A folder with the files of LMCache's wheel. Nothing is installed."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "-d", str(folder), f"lmcache=={release}"], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


SERVERS = [each.name for each in LMCACHE.values() if each.has_server]
"""The releases of LMCache with a server, the newest one last."""


@pytest.mark.parametrize(
    "release", [*(pytest.param(each, marks=pytest.mark.full) for each in SERVERS[:-1]), SERVERS[-1]]
)
def test_lmcaches_own_parser_takes_every_rendered_command_line(
    release: str, engine_venv: EngineVenv, tmp_path: Path
) -> None:
    commands = [argv[2:] for pair in PAIRS if pair.lmcache.name == release for argv in server_commands(pair)]
    source = wheel_of(release, tmp_path)
    done = subprocess.run(
        [str(engine_venv.script("python")), "-c", PARSE, str(source)],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("parsed ")]

    assert lines, done.stderr[-3000:]
    file, adapters = json.loads(lines[0].removeprefix("parsed "))
    assert Path(file).is_relative_to(source)
    assert commands
    assert len(adapters) >= 3
