from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kvroute import __version__
from kvroute.cli import COMMANDS, main


def test_version_names_the_program():
    result = CliRunner().invoke(main, ["--version"])

    assert (result.exit_code, result.output) == (0, f"kvroute {__version__}\n")


def test_help_lists_every_command():
    output = " ".join(CliRunner().invoke(main, ["-h"]).output.split())

    for name, (_, summary) in COMMANDS.items():
        assert f"{name} " in output
        assert summary in output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_listed_command_exists_and_has_help(name):
    result = CliRunner().invoke(main, [name, "--help"])

    assert result.exit_code == 0, result.output
    assert isinstance(main.get_command(click.Context(main), name), click.Command)


def test_an_unknown_command_is_a_usage_error():
    result = CliRunner().invoke(main, ["srve"])

    assert result.exit_code == 2
    assert "No such command 'srve'" in result.output


def modules_after(*arguments: str) -> set[str]:
    """The modules that are loaded once the command has run in a process of its own."""
    code = (
        "import sys\n"
        "from kvroute.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stderr.split())


def test_version_and_help_load_no_command():
    for argument in ("--version", "--help"):
        loaded = modules_after(argument)

        assert "kvroute.cli" in loaded
        assert not loaded & {"kvroute.app", "kvroute.errors", "kvroute.sim", "pydantic", "uvicorn", "fastapi"}


def test_serve_loads_neither_simulator_nor_deployment():
    loaded = modules_after("serve", "--help")

    assert "kvroute.config.config" in loaded
    assert not loaded & {"kvroute.sim", "kvroute.deploy", "uvicorn", "fastapi"}


def test_the_package_is_runnable_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "kvroute", "--version"], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == f"kvroute {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_completion_prints_a_script(shell):
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    assert f"_KVROUTE_COMPLETE={shell}_source kvroute" in readme

    environ = os.environ | {"_KVROUTE_COMPLETE": f"{shell}_source"}
    program = pathlib.Path(sys.executable).with_name("kvroute")
    script = subprocess.run([program], env=environ, capture_output=True, text=True, check=False)

    if shell == "bash" and "Bash" in script.stderr:
        pytest.skip("click's completion needs Bash 4.4")
    assert "_kvroute" in script.stdout
