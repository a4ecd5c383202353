"""`kvroute up`: workers and the gateway in front of them as child processes, until told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from kvroute.clock import Clock
from kvroute.deploy.engine_install import install_engine, separate_environment
from kvroute.deploy.keeper import Keeper, Phase
from kvroute.deploy.placement import find_gpus
from kvroute.deploy.plan import Engine, HostFacts, Plan, UpSpec, plan_up, uses_gpus, worker_count
from kvroute.deploy.progress import showing
from kvroute.deploy.tiny_model import write_tiny_model
from kvroute.errors import ConfigError


async def run_up(spec: UpSpec, *, console: Console, clock: Clock) -> None:
    """All that `kvroute up` does; returns after Ctrl-C or SIGTERM, when every process has ended.

    Raises `ConfigError` before anything has started, `EngineInstallError` when vLLM cannot be
    installed, `ProcessFailed` when a worker or the gateway does not come up.
    """
    keepers: list[Keeper] = []
    with stopped_by_signals(keepers, console) as told:
        try:
            plan = await prepare(spec, console=console, clock=clock)
            await run_plan(plan, keepers, console=console, clock=clock)
        except asyncio.CancelledError:
            if not told.is_set():
                raise


async def prepare(spec: UpSpec, *, console: Console, clock: Clock) -> Plan:
    """Look at the host, install the engine if it is needed, write the model; the plan to run."""
    require_free_port(spec.host, spec.port)
    environ = dict(os.environ)
    gpus = await find_gpus(environ) if spec.engine is Engine.VLLM else ()
    ports = free_ports(worker_count(spec, gpus))
    vllm: tuple[str, ...] = ("vllm",)
    engine_environ = environ
    if uses_gpus(spec, gpus):
        vllm = (_installed_vllm(environ),)
    elif spec.engine is Engine.VLLM:
        console.print("No GPU is visible: vLLM runs on the CPU.")
        venv = await install_engine(
            spec.engine_venv, report=lambda line: console.print(line, markup=False), clock=clock
        )
        vllm, engine_environ = (str(venv.script("vllm")),), separate_environment(environ)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    plan = plan_up(spec, HostFacts(environ, engine_environ, cores, gpus, ports, vllm))
    if plan.tiny_model is not None:
        write_tiny_model(plan.tiny_model, plan.model_folder)
    return plan


async def run_plan(plan: Plan, keepers: list[Keeper], *, console: Console, clock: Clock) -> None:
    """Start the workers, then the gateway, and keep them up until cancelled; all have ended then.

    `keepers` receives one keeper per process. Raises the first `ProcessFailed` of the start.
    """

    def report(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def changed(keeper: Keeper) -> None:
        if keeper.status.phase is Phase.READY:
            again = " again" if keeper.status.restarts else ""
            report(f"{keeper.name} is ready{again}: {keeper.planned.url}")

    workers = [Keeper(each, clock=clock, report=report, changed=changed) for each in plan.workers]
    gateway = Keeper(plan.gateway, clock=clock, report=report, changed=changed)
    keepers += [*workers, gateway]
    kind = "simulated" if plan.simulated else "vLLM"
    report(f"starting {len(workers)} {kind} worker(s); logs in {plan.gateway.child.log_path.parent}")
    try:
        async with showing(console, keepers, clock=clock):
            async with asyncio.TaskGroup() as starting:
                for worker in workers:
                    starting.create_task(worker.bring_up())
            await gateway.bring_up()
        console.print(welcome(plan), markup=False, highlight=False, soft_wrap=True)
        async with asyncio.TaskGroup() as running:
            for keeper in keepers:
                running.create_task(keeper.keep_up())
    except ExceptionGroup as group:
        # Several may have failed for one reason; the others were stopped because of the first.
        raise group.exceptions[0] from None
    finally:
        # The gateway first: it lets the streams that its workers are still sending finish.
        await gateway.stop()
        await asyncio.gather(*(worker.stop() for worker in workers))


def welcome(plan: Plan) -> str:
    """What to try now."""
    url = plan.gateway.url
    body = {"model": plan.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    if plan.simulated:
        kind = "The workers are SIMULATED: they answer with made-up text and keep a modelled KV cache."
    elif plan.tiny_model is not None:
        kind = "The workers are real vLLM engines; the model has random weights and answers with noise."
    else:
        kind = f"The workers are vLLM engines that serve {plan.model}."
    return f"""
kvroute is ready at {url} with {len(plan.workers)} worker(s). {kind}

  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'

  API documentation  {url}/docs
  metrics            {url}/metrics

Ctrl-C ends everything.
"""


def require_free_port(host: str, port: int) -> None:
    """Raise `ConfigError` when nobody could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError("port", f"cannot listen on {host}:{port}: {exc.strerror}") from exc


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of the loopback interface that nobody listens on now."""
    with ExitStack() as held:
        # All are held until the last is found, so that they differ.
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(probe.getsockname()[1] for probe in probes)


def _installed_vllm(environ: dict[str, str]) -> str:
    """The `vllm` command beside this Python, or on the path."""
    beside = os.path.dirname(sys.executable)
    found = shutil.which("vllm", path=os.pathsep.join((beside, environ.get("PATH", ""))))
    if found is None:
        raise ConfigError("engine", "vLLM is not installed here: pip install 'kvroute[engine]'")
    return found


@contextmanager
def stopped_by_signals(keepers: list[Keeper], console: Console) -> Iterator[asyncio.Event]:
    """SIGINT or SIGTERM cancels the current task and sets the event; a second one kills `keepers`."""
    task, loop, told = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    if task is None:
        raise RuntimeError("not in a task")

    def arrived() -> None:
        if told.is_set():
            for keeper in keepers:
                keeper.kill()
            return
        told.set()
        console.print("\nstopping; once more to kill", markup=False)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrived)
    try:
        yield told
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
