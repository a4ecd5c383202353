"""`kvroute up`: workers and a gateway in front of them, on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
from rich.console import Console

from kvroute.clock import SystemClock
from kvroute.deploy.plan import Engine, UpSpec
from kvroute.deploy.up import run_up
from kvroute.errors import KvrouteError


@click.command()
@click.option(
    "--engine",
    type=click.Choice([engine.value for engine in Engine]),
    default=Engine.SIM.value,
    show_default=True,
    help="sim: simulated workers; vllm: real ones, on GPUs if there are any, else on the CPU.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="What the workers serve: a model name or folder; vllm without it: a small random-weight model.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="How many. Default: 2; one per GPU share on GPUs."
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="GPUs per worker.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the gateway listens.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True)
@click.option("--strategy", metavar="NAME", help="Routing strategy of the gateway.")
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".kvroute"),
    show_default=True,
    help="Logs and made-up models.",
)
@click.option(
    "--engine-venv",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".venv-engine"),
    show_default=True,
    help="Where vLLM for CPUs is, or will be installed (2 GB).",
)
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
def up(
    engine: str,
    model: str | None,
    workers: int | None,
    tensor_parallel_size: int,
    host: str,
    port: int,
    strategy: str | None,
    state_dir: Path,
    engine_venv: Path,
    engine_args: tuple[str, ...],
) -> None:
    """Run workers and the gateway on this machine until Ctrl-C.

    ENGINE_ARGS, after a `--`, are appended to every worker's command line.
    """
    spec = UpSpec(
        engine=Engine(engine),
        model=model,
        workers=workers,
        tensor_parallel_size=tensor_parallel_size,
        host=host,
        port=port,
        strategy=strategy,
        state_dir=state_dir,
        engine_venv=engine_venv,
        engine_args=engine_args,
    )
    try:
        asyncio.run(run_up(spec, console=Console(), clock=SystemClock()))
    except KvrouteError as exc:
        raise click.ClickException(str(exc)) from exc
