"""`kvroute sim`: runs one simulated worker in the foreground."""

from __future__ import annotations

import asyncio
import signal

import click
import uvicorn
import zmq
from pydantic import ValidationError

from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.wire.vllm import DIALECTS

_DEFAULTS = SimOptions()


@click.command(
    "sim",
    help="Run one simulated vLLM worker: real HTTP, cache and events, no model. "
    'POST /sim/faults (JSON) causes faults: {"kind": "drop_events", "count": 2} loses two batches.',
)
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option("--port", default=8101, show_default=True, help="Port to listen on; 0 chooses a free one.")
@click.option("--model", "models", multiple=True, help="Served model name; repeat for more names.")
@click.option("--lora", "loras", multiple=True, metavar="NAME=PARENT", help="LoRA adapter; repeatable.")
@click.option(
    "--capacity-tokens", default=_DEFAULTS.capacity_tokens, show_default=True, help="KV cache size."
)
@click.option("--block-size", default=_DEFAULTS.block_size, show_default=True, help="Tokens per cache block.")
@click.option("--max-model-len", default=_DEFAULTS.max_model_len, show_default=True, help="Context length.")
@click.option(
    "--answer-tokens",
    default=_DEFAULTS.answer_tokens,
    show_default=True,
    help="Length of an answer if the request sets no limit.",
)
@click.option(
    "--time-scale",
    default=_DEFAULTS.time_scale,
    show_default=True,
    help="Factor for every simulated duration; with 0 nothing takes time.",
)
@click.option(
    "--max-sequences",
    default=_DEFAULTS.max_sequences,
    show_default=True,
    help="Maximum number of concurrent requests.",
)
@click.option("--events/--no-events", default=True, show_default=True, help="Publish KV events over ZMQ.")
@click.option(
    "--event-endpoint",
    default=_DEFAULTS.event_endpoint,
    show_default=True,
    help="ZMQ address where events are published.",
)
@click.option(
    "--replay-endpoint",
    default=_DEFAULTS.replay_endpoint,
    show_default=True,
    help="ZMQ address where events are replayed.",
)
@click.option(
    "--event-dialect",
    default=_DEFAULTS.event_dialect,
    show_default=True,
    type=click.Choice(list(DIALECTS)),
    help="Encoding of the events.",
)
@click.option("--nixl", is_flag=True, help="Exchange KV with other workers as vLLM's NixlConnector does.")
@click.option(
    "--record-requests",
    "recorded_requests",
    default=0,
    show_default=True,
    help="Number of received requests, with bodies, that GET /sim/requests returns.",
)
def sim(models: tuple[str, ...], loras: tuple[str, ...], events: bool, **values: object) -> None:
    """Parse the flags and serve until SIGINT or SIGTERM."""
    adapters = dict(item.partition("=")[::2] for item in loras)
    if "" in adapters or "" in adapters.values():
        raise click.UsageError("--lora takes NAME=PARENT.")
    try:
        options = SimOptions.model_validate(
            {"models": models or _DEFAULTS.models, "loras": adapters, "kv_events": events, **values}
        )
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise click.UsageError(problems) from exc
    try:
        with asyncio.Runner(loop_factory=uvicorn.Config(_serve).get_loop_factory()) as runner:
            runner.run(_serve(options))
    except (OSError, zmq.ZMQError) as exc:
        raise click.ClickException(str(exc)) from exc


async def _serve(options: SimOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with run_sim(options) as running:
        names = ", ".join(options.models)
        click.echo(f"Simulated worker ready at {running.url} (model {names})")
        await stop.wait()
