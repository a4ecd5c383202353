"""`kvroute up`: an endpoint, or just workers and a gateway, as processes of this machine."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from kvroute.cli.specs import WrongSpec, count, read_text, reading_of, tell
from kvroute.clock import SystemClock
from kvroute.deploy.endpoint import simulated
from kvroute.deploy.local_reach import local_findings
from kvroute.deploy.model_shape import with_model_at_hand
from kvroute.deploy.plan import AdminKeyPlace, Engine, UpSpec
from kvroute.deploy.prepare import EndpointUp, prepare, prepare_endpoint
from kvroute.deploy.render.plan import EndpointPlan, plan_endpoint
from kvroute.deploy.spec.fields import Verdict
from kvroute.deploy.state import StateFolder
from kvroute.deploy.up import Prepare, run_up
from kvroute.errors import KvrouteError
from kvroute.routing.registry import STRATEGIES

STATE_DIR = Path(".kvroute")
IN_THE_SPEC = {
    "model": "spec.model",
    "workers": "spec.replicas",
    "tensor_parallel_size": "x-kvroute.gpusPerWorker",
    "engine_args": "spec.worker.args",
}
"""Parameters that a spec has fields for."""


@click.command()
@click.option(
    "-f",
    "--file",
    "file",
    metavar="SPEC",
    type=click.Path(path_type=Path),
    help="An endpoint spec: run all of it, caches included. --host, --port and --strategy win over it.",
)
@click.option(
    "--engine",
    type=click.Choice([engine.value for engine in Engine]),
    help="sim: simulated workers; vllm: real ones, on GPUs if there are any, else on the CPU. "
    "Default: sim; with -f what the spec says (sim: its workers simulated, without caches).",
)
@click.option(
    "--model",
    metavar="NAME",
    help="What the workers serve: a model name or folder; vllm without it: a small random-weight model.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="How many. Default: 2; one per GPU share on GPUs."
)
@click.option("--tensor-parallel-size", type=click.IntRange(min=1), help="GPUs per worker. Default: 1.")
@click.option("--host", help="Where the gateway listens. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 8080.")
@click.option("--strategy", type=click.Choice(list(STRATEGIES)), help="Routing strategy of the gateway.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=STATE_DIR,
    show_default=True,
    help="Logs, made-up models, and what `kvroute ps` reads; the gateway's admin key too, if given.",
)
@click.option(
    "--admin-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file with the gateway's admin key; without one, it is made.",
)
@click.option(
    "--engine-venv",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".venv-engine"),
    show_default=True,
    help="Where vLLM for CPUs is, or will be installed (2 GB).",
)
@click.option("--logs/--no-logs", default=True, help="Show what the processes write. Default: --logs.")
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def up(
    context: click.Context,
    /,
    file: Path | None,
    state_dir: Path,
    admin_key_file: Path | None,
    engine_venv: Path,
    logs: bool,
    **wanted: Any,
) -> None:
    """Run workers and the gateway, or the endpoint of a spec, on this machine until Ctrl-C.

    ENGINE_ARGS, after a `--`, are appended to every worker's command line.
    """
    console, clock = Console(), SystemClock()
    making: Prepare
    is_given = context.get_parameter_source("state_dir") is not ParameterSource.DEFAULT
    admin_key = AdminKeyPlace(admin_key_file, state_dir if is_given else None)
    if file is not None:
        endpoint = _endpoint(file, wanted)
        wish = EndpointUp(endpoint, wanted["host"], wanted["port"], state_dir, engine_venv, admin_key)
        making = partial(prepare_endpoint, wish, console=console, clock=clock)
    else:
        given = {name: value for name, value in wanted.items() if value is not None}
        engine = Engine(given.pop("engine", Engine.SIM.value))
        spec = UpSpec(
            engine=engine, state_dir=state_dir, engine_venv=engine_venv, admin_key=admin_key, **given
        )
        making = partial(prepare, spec, console=console, clock=clock)
    try:
        asyncio.run(run_up(making, StateFolder(state_dir), console=console, clock=clock, show_logs=logs))
    except KvrouteError as exc:
        raise click.ClickException(str(exc)) from exc


def _endpoint(file: Path, wanted: dict[str, Any]) -> EndpointPlan:
    """What the spec in `file` says, which is told as far as it has no effect here."""
    for name, field in IN_THE_SPEC.items():
        if wanted[name] not in (None, ()):
            option = f"--{name.replace('_', '-')}" if name != "engine_args" else "ENGINE_ARGS"
            raise click.UsageError(f"{option} does not go with -f: the spec has {field}")
    reading = reading_of(read_text(file))
    findings = list(reading.findings)
    if reading.document is not None:
        findings = list(local_findings(reading.document, findings))
    tell(file, (each for each in findings if each.verdict is not Verdict.APPLIED), err=True)
    if reading.document is None:
        raise WrongSpec(f"{file} is wrong: {count(findings)}")
    endpoint = with_model_at_hand(plan_endpoint(reading.document))
    if wanted["strategy"] is not None:
        endpoint = dataclasses.replace(endpoint, strategy=wanted["strategy"])
    if wanted["engine"] == Engine.SIM.value and not endpoint.is_simulated:
        return simulated(endpoint)
    if wanted["engine"] == Engine.VLLM.value and endpoint.is_simulated:
        raise click.UsageError("--engine vllm does not go with a spec that says x-kvroute.engine: sim")
    return endpoint
