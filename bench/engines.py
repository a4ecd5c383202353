"""Chats with two real vLLM engines on CPU cores, through kvroute and other routers, with alternating runs.

    python bench/engines.py [--engine .venv-engine] [--routers kvaware,roundrobin] [--sessions 10] [--runs 3]

Each session is a chat of several turns that sends the whole chat each time: a common system prompt, its own
first message, short questions, the model's answers. An engine's KV cache holds 65% of the total length of all
chats, so an engine that serves a part of each chat evicts blocks. The model has 32 million random weights:
its text is noise, its computation and caching are real. Between runs the script empties the engines' caches
and starts the next router. Each engine has one core; routers and load use the same cores, which affects the
figures on a machine with two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from comparison import (
    EVENTS_PEER,
    OURS,
    PEERS,
    PEERS_FOLDER,
    Answered,
    CpuWatch,
    Figures,
    figures,
    medians,
    request_streamed,
    running_router,
    table,
    verdicts,
    write_json,
)
from engines_chats import BLOCK, MODEL, Session, Shape, one_token_words, sessions
from gateway_machine import describe
from gateway_routers import install_peers
from kvroute.clock import SystemClock
from kvroute.deploy.engine_install import DEFAULT_PATH, EngineVenv, separate_environment
from kvroute.deploy.prepare import free_ports
from kvroute.deploy.processes import ChildProcess, ChildSpec
from kvroute.deploy.tiny_model import TINY_MODELS, write_tiny_model
from kvroute.deploy.vllm_command import (
    CpuPlacement,
    KvEventsEndpoint,
    VllmSpec,
    vllm_argv,
    vllm_environment,
)

READY_S = 300.0


async def hold(http: httpx.AsyncClient, url: str, session: Session, answer_tokens: int) -> list[Answered]:
    """Run one chat; stop at the first request that fails."""
    messages = [{"role": "system", "content": session.system}]
    answers: list[Answered] = []
    for question, pause_s in zip(session.questions, session.pauses_s, strict=True):
        await asyncio.sleep(pause_s)
        messages.append({"role": "user", "content": question})
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answers.append(await request_streamed(http, f"{url}/v1/chat/completions", json.dumps(body).encode()))
        if answers[-1].error:
            break
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def engine_arguments(cpu: str) -> tuple[str, ...]:
    """The arguments of vLLM for this CPU, from /proc/cpuinfo. Without bfloat16 in the CPU, vLLM 0.32 uses a
    matrix product that is slower than float32."""
    return () if re.search(r"\b(avx512_bf16|amx_bf16)\b", cpu) else ("--dtype", "float32")


@dataclass(frozen=True, slots=True)
class Engines:
    """Running engines; `folder` has their logs."""

    urls: list[str]
    pids: list[int]
    model_folder: Path
    folder: Path
    http: httpx.AsyncClient = field(repr=False)

    async def forget(self) -> None:
        """Empty the caches. Each engine computes one step, which publishes its cache event."""
        for url in self.urls:
            async with asyncio.timeout(30.0):
                while not (await self.http.post(f"{url}/reset_prefix_cache")).json()["success"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)  # a request still runs
            body = {"model": MODEL, "prompt": [5], "max_tokens": 1}
            (await self.http.post(f"{url}/v1/completions", json=body)).raise_for_status()


@asynccontextmanager
async def running_engines(venv: EngineVenv, shape: Shape, folder: Path) -> AsyncIterator[Engines]:
    """Run two engines on the first two cores."""
    model_folder = write_tiny_model(MODEL, folder / MODEL)
    cores = sorted(os.sched_getaffinity(0))
    pool_bytes = 2 * shape.pool_blocks * BLOCK * TINY_MODELS[MODEL].kv_bytes_per_token  # float32
    extra = engine_arguments(Path("/proc/cpuinfo").read_text())  # noqa: ASYNC240
    async with AsyncExitStack() as stack:
        processes = {}
        for number in range(2):
            port, events, replays = free_ports(3)
            spec = VllmSpec(
                model=str(model_folder),
                served_name=MODEL,
                host="127.0.0.1",
                port=port,
                kv_events=KvEventsEndpoint(f"tcp://*:{events}", f"tcp://*:{replays}"),
                placement=CpuPlacement((cores[number % len(cores)],), kv_cache_gib=1 + pool_bytes // 2**30),
                block_size=BLOCK,
                num_gpu_blocks=shape.pool_blocks + 1,  # the engine keeps one block for itself
                max_model_len=shape.longest + 64,
                random_weights=True,
                offline=True,
                eager=True,
                development_mode=True,
                extra_args=extra,
            )
            argv = vllm_argv(spec, (str(venv.script("vllm")),))
            environment = vllm_environment(spec, separate_environment(os.environ))
            log = folder / f"engine-{number}.log"
            process = ChildProcess(ChildSpec(f"engine {number}", argv, environment, log), SystemClock())
            processes[spec.url] = await stack.enter_async_context(process)
        for url, process in processes.items():
            await process.wait_ready(f"{url}/health", timeout_s=READY_S)
        # vLLM closes a connection after 5 idle seconds, possibly while the next question arrives.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        http = await stack.enter_async_context(
            httpx.AsyncClient(limits=limits, timeout=600.0, trust_env=False)
        )
        pids = [process.pid for process in processes.values()]
        yield Engines([*processes], pids, model_folder, folder, http)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one router. `follow_ups` are the figures without each session's first turn."""

    run: int
    router: str
    figures: Figures
    follow_ups: Figures
    seconds: float
    cores: dict[str, float]
    errors: list[str]


async def measure(
    number: int,
    router: str,
    engines: Engines,
    chats: Sequence[Session],
    shape: Shape,
    options: argparse.Namespace,
) -> Run:
    await engines.forget()
    started = running_router(
        router,
        engines.urls,
        engines.http,
        model=MODEL,
        folder=engines.folder,
        peers=options.peers,
        model_folder=engines.model_folder,
        settings=options.settings,
    )
    async with started as running:
        watch = CpuWatch({"router": running.pid, "engine 0": engines.pids[0], "engine 1": engines.pids[1]})
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(hold(engines.http, running.url, chat, shape.answer)) for chat in chats]
        seconds = asyncio.get_running_loop().time() - began
        cores = watch.cores()
    answers = [task.result() for task in tasks]
    every = [one for chat in answers for one in chat]
    later = [one for chat in answers for one in chat[1:]]
    errors = sorted({one.error for one in every if one.error})[:5]
    return Run(number, router, figures(every), figures(later), seconds, cores, errors)


def line(run: Run) -> str:
    one = run.figures
    return (
        f"run {run.run + 1} {run.router:22} mean {one.mean:6.3f}  p50 {one.p50:6.3f}  p90 {one.p90:6.3f}  "
        f"cached {one.cached_tokens:7.0f} of {one.prompt_tokens:.0f}  failed {one.failed:.0f}  "
        f"{run.seconds:.0f} s, cores: "
        + ", ".join(f"{name} {value:.2f}" for name, value in run.cores.items())
        + ("" if not run.errors else f"  first error: {run.errors[0]}")
    )


async def compare(options: argparse.Namespace, shape: Shape, routers: Sequence[str]) -> list[Run]:
    runs = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        async with running_engines(EngineVenv.at(options.engine), shape, folder) as engines:
            words = one_token_words(engines.model_folder / "tokenizer.json")
            for number in range(options.runs):
                chats = sessions(shape, words, number)
                for router in (*routers[number % len(routers) :], *routers[: number % len(routers)]):
                    runs.append(await measure(number, router, engines, chats, shape, options))
                    print(line(runs[-1]), flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*OURS, *PEERS, "roundrobin")
    parser.add_argument("--engine", type=Path, default=DEFAULT_PATH, help="environment with vLLM")
    parser.add_argument("--routers", default=",".join(known), help=f"some of %(default)s, {EVENTS_PEER}")
    parser.add_argument("--sessions", type=int, default=Shape().sessions, help="chats held at once, 10 to 40")
    parser.add_argument("--turns", type=int, default=Shape().turns)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="PATH=VALUE",
        help="an option for kvroute",
    )
    parser.add_argument("--output", type=Path, help="write the report to this JSON file")
    parser.add_argument("--peers", type=Path, default=PEERS_FOLDER, help="folder of the other routers")
    parser.add_argument("--no-install", action="store_true", help="use only installed peers")
    options = parser.parse_args()
    if not EngineVenv.at(options.engine).script("vllm").exists():
        parser.error(f"no vLLM in {options.engine}: python -m kvroute.deploy.engine_install")

    versions, missing = install_peers(options.peers, allow_install=not options.no_install)
    routers = [name for name in options.routers.split(",") if name.split()[0] not in missing]
    for name in sorted(set(options.routers.split(",")) - set(routers)):
        print(f"{name} is skipped: {missing[name.split()[0]]}", file=sys.stderr)
    shape = replace(Shape(), sessions=options.sessions, turns=options.turns)

    runs = asyncio.run(compare(options, shape, routers))
    every = {name: medians([run.figures for run in runs if run.router == name]) for name in routers}
    later = {name: medians([run.follow_ups for run in runs if run.router == name]) for name in routers}
    judged = verdicts(every, peers=(*PEERS, "roundrobin"))
    print("\nMedians of the runs, milliseconds: all turns", *table(every.items()), sep="\n")
    print("\nWithout first turns", *table(later.items()), "", *map(str, judged), sep="\n")
    if options.output:
        document = {
            "settings": {**asdict(shape), "runs": options.runs, "pool_blocks": shape.pool_blocks},
            "kvroute": options.settings,
            "machine": describe(),
            "versions": versions,
            "runs": runs,
            "medians": every,
            "medians_without_first_turns": later,
            "verdicts": [{**asdict(one), "met": one.is_met} for one in judged],
        }
        write_json(options.output, document)


if __name__ == "__main__":
    main()
