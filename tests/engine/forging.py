"""The forge as an engine environment: whatever its scripts run is forked from one process (see forge.py)."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import EngineVenv, separate_environment
from kvroute.deploy.processes import ChildProcess, ChildSpec

PROGRAM = Path(__file__).with_name("forge.py")
IMPORTED_WITHIN_S = 300.0
MODULES = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.distributed.kv_events",
    "vllm.model_executor.models.llama",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "uvicorn.protocols.http.httptools_impl",
    "lmcache.cli.commands.server",
)
"""What engines and LMCache servers import. Not `lmcache.v1.gpu_connector`: `classic_shim` changes it while it
is imported."""


class Forging:
    """The environment `venv`, whose `python`, `vllm` and `lmcache` are forked once `started` is done.

    Everything else in it is that of the real one, for instance its stamp: it is an installed engine to
    `kvroute up --engine-venv`.
    """

    def __init__(self, real: EngineVenv, folder: Path) -> None:
        self.real = real
        self.venv = EngineVenv.at(folder / "venv")
        self._socket = folder / "forge"
        self._log = folder / "forge.log"

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        """The forge, ready; everything that it has forked ends with it."""
        self._write_scripts()
        argv = (str(self.real.python), str(PROGRAM), "serve", str(self._socket), *MODULES)
        env = separate_environment(os.environ) | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        async with ChildProcess(ChildSpec("forge", argv, env, self._log), SystemClock()) as process:
            async with asyncio.timeout(IMPORTED_WITHIN_S):
                while not self._socket.exists():
                    if not process.running:
                        raise process.failure("ended before it was ready")
                    await asyncio.sleep(0.05)
            yield

    def _write_scripts(self) -> None:
        own, real = self.venv.path, self.real.path
        (own / "bin").mkdir(parents=True)
        for file in real.iterdir():
            if file.name != "bin":
                (own / file.name).symlink_to(file)
        for file in (real / "bin").iterdir():
            (own / "bin" / file.name).symlink_to(file)
        run = [sys.executable, "-S", "-E", str(PROGRAM), "run", str(self._socket), str(self.real.python)]
        for name in ("python", "vllm", "lmcache"):
            script = self.venv.script(name)
            script.unlink()
            words = run if name == "python" else [*run, str(self.real.script(name))]
            script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            script.chmod(0o755)
