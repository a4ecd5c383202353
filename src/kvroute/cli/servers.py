"""`kvroute tierd` and `kvroute sim`: run the cache daemon of a node, or one simulated worker, in the
foreground.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import click
import uvicorn
import zmq
from pydantic import ValidationError

from kvroute.clock import SystemClock
from kvroute.errors import ConfigError
from kvroute.logs import LoggingOptions, configure
from kvroute.secret_files import writers_problem
from kvroute.sim.app import run_sim
from kvroute.sim.options import SimOptions
from kvroute.tierd.daemon import run_tierd
from kvroute.tierd.options import TierdOptions
from kvroute.wire.vllm import DIALECTS

_DEFAULTS = TierdOptions()
_FLAGS = {
    "urls": "--peer",
    "dns": "--peers-dns",
    "answer_timeout_s": "--peer-timeout",
    "key": "--peer-key-file",
}
"""Options whose flag is not simply the option's name with dashes."""


class _Octal(click.ParamType):  # type: ignore[type-arg]
    name = "octal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return int(value, 8)
        except ValueError:
            self.fail(f"{value!r} is not a number such as 644", param, ctx)


@click.command("tierd")
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=_DEFAULTS.port, show_default=True, help="Port to listen on; 0 chooses a free one."
)
@click.option(
    "--shared-memory-name",
    default=_DEFAULTS.shared_memory_name,
    show_default=True,
    help="Name of the POSIX shared memory that LMCache maps.",
)
@click.option(
    "--shared-memory-mode",
    type=_Octal(),
    default=f"{_DEFAULTS.shared_memory_mode:o}",
    show_default=True,
    help="Permissions of the shared memory.",
)
@click.option(
    "--size-gb",
    default=_DEFAULTS.size_gb,
    show_default=True,
    help="Memory for entries; reserved at the start.",
)
@click.option(
    "--disk-dir", type=click.Path(file_okay=False, path_type=Path), help="Directory for evicted entries."
)
@click.option("--disk-gb", default=_DEFAULTS.disk_gb, help="Maximum size of that directory.")
@click.option("--peer", "urls", multiple=True, metavar="URL", help="Another node's daemon; repeatable.")
@click.option("--peers-dns", "dns", metavar="NAME:PORT", help="DNS name with the address of each daemon.")
@click.option(
    "--peer-timeout",
    "answer_timeout_s",
    default=_DEFAULTS.peers.answer_timeout_s,
    show_default=True,
    help="Seconds to wait for a peer's answer whether it has an entry.",
)
@click.option(
    "--peer-key-file",
    "key_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="KVROUTE_TIERD_PEER_KEY_FILE",
    help="File with the key that daemons present to each other.",
)
@click.option(
    "--holds-misses",
    is_flag=True,
    help="A lease of an unknown entry waits, as long as the client allows, until the entry is written.",
)
@click.option(
    "--longest-lease",
    "longest_lease_s",
    default=_DEFAULTS.longest_lease_s,
    show_default=True,
    help="Seconds; a lease for longer is refused.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def tierd(
    urls: tuple[str, ...],
    dns: str | None,
    answer_timeout_s: float,
    key_file: Path | None,
    log_format: str,
    **values: object,
) -> None:
    """Keep LMCache's second tier in this node's memory.

    Implements the protocol of LMCache's `sagemaker-hyperpod` adapter: HTTP on --port, entries in POSIX shared
    memory. Runs until SIGINT or SIGTERM.
    """
    key = _key_in(key_file) if key_file is not None else None
    try:
        options = TierdOptions.model_validate(
            {"peers": {"urls": urls, "dns": dns, "answer_timeout_s": answer_timeout_s, "key": key}, **values}
        )
    except ValidationError as exc:
        raise click.UsageError(
            "; ".join(_error_text(error["loc"], error["msg"]) for error in exc.errors())
        ) from exc
    configure(LoggingOptions.model_validate({"format": log_format}))
    try:
        with asyncio.Runner(loop_factory=uvicorn.Config(_serve).get_loop_factory()) as runner:
            runner.run(_serve(options))
    except ConfigError as exc:
        raise click.ClickException(str(exc)) from exc


def _key_in(file: Path) -> str:
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise click.UsageError(f"--peer-key-file: cannot read {file}: {reason}") from None
    if not key:
        raise click.UsageError("--peer-key-file: the file is empty")
    if problem := writers_problem(file):
        raise click.UsageError(f"--peer-key-file: {problem}")
    return key


def _error_text(location: tuple[int | str, ...], message: str) -> str:
    name = next((str(field) for field in reversed(location) if isinstance(field, str)), "")
    flag = _FLAGS.get(name, f"--{name.replace('_', '-').removesuffix('-s')}")
    message = message.removeprefix("Value error, ")
    return f"{flag}: {message}" if name else message


async def _serve(options: TierdOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(_run(options, stop))
    stopping = asyncio.create_task(stop.wait())
    try:
        # A signal may arrive while the start waits for memory, or for leases of the previous daemon.
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            starting.cancel()
        await starting
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    finally:
        stopping.cancel()


async def _run(options: TierdOptions, stop: asyncio.Event) -> None:
    async with run_tierd(options, SystemClock()) as running:
        gc.freeze()
        click.echo(
            f"tierd ready at {running.url} (shared memory {options.shared_memory_name}, "
            f"{options.size_bytes >> 20} MiB)"
        )
        await stop.wait()


_SIM_DEFAULTS = SimOptions()


@click.command(
    "sim",
    help="Run one simulated vLLM worker: real HTTP, cache and events, no model. "
    'POST /sim/faults (JSON) causes faults: {"kind": "drop_events", "count": 2} loses two batches.',
)
@click.option("--host", default=_SIM_DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option("--port", default=8101, show_default=True, help="Port to listen on; 0 chooses a free one.")
@click.option("--model", "models", multiple=True, help="Served model name; repeat for more names.")
@click.option(
    "--served-model-name",
    "served_names",
    multiple=True,
    metavar="NAME...",
    help="Names of the model, as for vLLM; `--model` is then the model that they stand for.",
)
@click.argument("more_names", nargs=-1, metavar="")
@click.option("--lora", "loras", multiple=True, metavar="NAME=PARENT", help="LoRA adapter; repeatable.")
@click.option(
    "--capacity-tokens", default=_SIM_DEFAULTS.capacity_tokens, show_default=True, help="KV cache size."
)
@click.option(
    "--block-size", default=_SIM_DEFAULTS.block_size, show_default=True, help="Tokens per cache block."
)
@click.option(
    "--max-model-len", default=_SIM_DEFAULTS.max_model_len, show_default=True, help="Context length."
)
@click.option(
    "--answer-tokens",
    default=_SIM_DEFAULTS.answer_tokens,
    show_default=True,
    help="Length of an answer if the request sets no limit.",
)
@click.option(
    "--time-scale",
    default=_SIM_DEFAULTS.time_scale,
    show_default=True,
    help="Factor for every simulated duration; with 0 nothing takes time.",
)
@click.option(
    "--max-sequences",
    default=_SIM_DEFAULTS.max_sequences,
    show_default=True,
    help="Maximum number of concurrent requests.",
)
@click.option("--events/--no-events", default=True, show_default=True, help="Publish KV events over ZMQ.")
@click.option(
    "--event-endpoint",
    default=_SIM_DEFAULTS.event_endpoint,
    show_default=True,
    help="ZMQ address where events are published.",
)
@click.option(
    "--replay-endpoint",
    default=_SIM_DEFAULTS.replay_endpoint,
    show_default=True,
    help="ZMQ address where events are replayed.",
)
@click.option(
    "--event-dialect",
    default=_SIM_DEFAULTS.event_dialect,
    show_default=True,
    type=click.Choice(list(DIALECTS)),
    help="Encoding of the events.",
)
@click.option("--nixl", is_flag=True, help="Exchange KV with other workers as vLLM's NixlConnector does.")
@click.option(
    "--kv-group",
    "kv_groups",
    multiple=True,
    metavar="KIND:BLOCK[:SPAN]",
    help="A KV cache group, for example mamba:528 or sliding_window:16:128; repeatable.",
)
@click.option(
    "--prefix-match-unit",
    default=_SIM_DEFAULTS.prefix_match_unit,
    show_default=True,
    help="Hits end at multiples of so many tokens; 0: the greatest common divisor of all blocks.",
)
@click.option(
    "--prefix-cache-retention",
    default=_SIM_DEFAULTS.prefix_cache_retention,
    show_default=True,
    help="Windows and states are kept once per so many tokens; 0: where prompts end; -1: everywhere.",
)
@click.option(
    "--junctions/--no-junctions",
    "keeps_junctions",
    default=True,
    show_default=True,
    help="Keep windows and states where prompts parted, too.",
)
@click.option(
    "--drafted-tokens",
    default=_SIM_DEFAULTS.drafted_tokens,
    show_default=True,
    help="Tokens of an EAGLE-style drafter; with one the last block of each hit is dropped.",
)
@click.option("--state-checkpoints", is_flag=True, help="A prefill writes a state inside its last chunk.")
@click.option("--harmony", is_flag=True, help="Render chats otherwise than /tokenize, as for gpt-oss.")
@click.option("--scale-out", is_flag=True, help="Have render endpoints, as vLLM with --enable-scale-out.")
@click.option(
    "--record-requests",
    "recorded_requests",
    default=0,
    show_default=True,
    help="Number of received requests, with bodies, that GET /sim/requests returns.",
)
@click.option(
    "--log-requests", is_flag=True, help="Print the body's request_id of each request that the engine gets."
)
def sim(
    models: tuple[str, ...],
    served_names: tuple[str, ...],
    more_names: tuple[str, ...],
    loras: tuple[str, ...],
    events: bool,
    log_requests: bool,
    **values: object,
) -> None:
    """Parse the flags and serve until SIGINT or SIGTERM."""
    if log_requests:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    if more_names and not served_names:
        raise click.UsageError(f"Got an unexpected argument ({more_names[0]}).")
    if served_names:  # vLLM takes several values after one flag
        if len(models) > 1:
            raise click.UsageError("--served-model-name needs one --model at most.")
        values["root"], models = "".join(models), served_names + more_names
    adapters = dict(item.partition("=")[::2] for item in loras)
    if "" in adapters or "" in adapters.values():
        raise click.UsageError("--lora takes NAME=PARENT.")
    try:
        options = SimOptions.model_validate(
            {"models": models or _SIM_DEFAULTS.models, "loras": adapters, "kv_events": events, **values}
        )
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise click.UsageError(problems) from exc
    try:
        with asyncio.Runner(loop_factory=uvicorn.Config(_serve_worker).get_loop_factory()) as runner:
            runner.run(_serve_worker(options))
    except (OSError, zmq.ZMQError) as exc:
        raise click.ClickException(str(exc)) from exc


async def _serve_worker(options: SimOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with run_sim(options) as running:
        names = ", ".join(options.models)
        click.echo(f"Simulated worker ready at {running.url} (model {names})")
        await stop.wait()
