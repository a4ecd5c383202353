"""Compare `kvroute tierd` with Redis through LMCache's own adapters: ratio of load throughput.

    python bench/tierd.py [--runs 5] [--json FILE] [--engine-venv .venv-engine] [--sizes-kb 256,2048]

Each run measures both stores, one directly after the other in alternating order, with `lmcache bench l2`
(store, lookup, load; bytes verified) in a fresh bucket or an emptied Redis. Figures are medians over the
runs; the figure of a run is LMCache's own average over its rounds. The script needs an engine environment
(`python -m kvroute.deploy.engine_install`) and `redis-server`. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

GOALS = {2048: 1.2, 256: 0.15}
"""Size of an object in KB -> least load throughput, as a multiple of Redis' throughput."""
KEYS, ROUNDS = 16, 8
READY_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def running(*argv: str, port: int) -> AsyncIterator[None]:
    """Run a child until the block ends; it is ready when it listens."""
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(READY_S):
            while process.returncode is None:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            else:
                raise SystemExit(f"{argv[0]} ended at its start")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def empty_redis(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"FLUSHALL\r\n")
    await reader.readline()
    writer.close()


async def measure(lmcache: Path, adapter: dict[str, object], size_kb: int) -> dict[str, float]:
    """MB/s of store and load, operations/s of lookup."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        argv = [str(lmcache), "bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys", str(KEYS)]
        argv += ["--data-size-kb", str(size_kb), "--rounds", str(ROUNDS), "--no-skip-verify"]
        argv += ["--lookup-max-hit-rate", "0.5", "--quiet", "--format", "json", "--output", str(output)]
        environment = os.environ | {"LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
        process = await asyncio.create_subprocess_exec(
            *argv, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        printed, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"lmcache bench l2 failed:\n{printed.decode()[-2000:]}")
        return read_result(json.loads(output.read_text()))


def read_result(document: Any) -> dict[str, float]:
    found = {}
    for section in sections(document):
        name = str(section["operation"]).lower()
        if section["total_success"] < section["total_keys"] * (0.4 if name == "lookup" else 1):
            raise SystemExit(f"{name}: {section['total_success']} of {section['total_keys']} succeeded")
        found[name] = section["ops_per_sec_avg" if name == "lookup" else "throughput_avg_mbps"]
    return found


def sections(document: Any) -> list[dict[str, Any]]:
    """The objects with an `operation` in LMCache's output, at any depth."""
    if isinstance(document, dict):
        inner = [found for value in document.values() for found in sections(value)]
        return [document, *inner] if "operation" in document else inner
    if isinstance(document, list):
        return [found for value in document for found in sections(value)]
    return []


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    redis_port, tierd_port = free_port(), free_port()
    memory = f"kvroute_bench_{os.getpid()}"
    lmcache = arguments.engine_venv / "bin" / "lmcache"
    redis = [
        "redis-server",
        "--port",
        str(redis_port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    tierd = [sys.executable, "-m", "kvroute", "tierd", "--port", str(tierd_port)]
    tierd += ["--shared-memory-name", memory, "--size-gb", "1"]
    results: dict[str, Any] = {}
    async with running(*redis, port=redis_port), running(*tierd, port=tierd_port):
        for size_kb in arguments.sizes_kb:
            runs = []
            for number in range(arguments.runs):
                adapters: dict[str, dict[str, object]] = {
                    "redis": {"type": "resp", "host": "127.0.0.1", "port": redis_port},
                    "tierd": {
                        "type": "sagemaker-hyperpod",
                        "url": f"sagemaker-hyperpod://127.0.0.1:{tierd_port}",
                        "shared_memory_name": memory,
                        "bucket": f"run-{size_kb}-{number}",
                    },
                }
                figures = {}
                for name in sorted(adapters, reverse=number % 2 == 1):
                    await empty_redis(redis_port)
                    figures[name] = await measure(lmcache, adapters[name], size_kb)
                runs.append(figures)
                print(f"  {size_kb} KB run {number + 1}: {figures}", file=sys.stderr)
            results[str(size_kb)] = summary(runs, GOALS.get(size_kb))
    return results


def summary(runs: list[dict[str, dict[str, float]]], goal: float | None) -> dict[str, Any]:
    """Medians of each side and their ratios; the goal is for `load`."""
    medians = {
        side: {what: statistics.median(run[side][what] for run in runs) for what in runs[0][side]}
        for side in runs[0]
    }
    ratios = {what: medians["tierd"][what] / medians["redis"][what] for what in medians["redis"]}
    is_met = goal is None or ratios["load"] >= goal
    return {"medians": medians, "ratios": ratios, "goal": goal, "is_met": is_met, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--engine-venv", type=Path, default=os.environ.get("ENGINE_VENV", ".venv-engine"))
    parser.add_argument(
        "--sizes-kb", type=lambda text: [int(part) for part in text.split(",")], default=[256, 2048]
    )
    arguments = parser.parse_args()
    if shutil.which("redis-server") is None:
        raise SystemExit("needs redis-server")
    results = asyncio.run(compare(arguments))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'size':>8} {'what':>7} {'tierd':>9} {'Redis':>9} {'ratio':>6}  goal")
    for size_kb, result in results.items():
        for what, ratio in result["ratios"].items():
            unit = "/s" if what == "lookup" else "MB/s"
            goal = f">= {result['goal']}" if what == "load" and result["goal"] else ""
            sides = [f"{result['medians'][side][what]:.0f} {unit}" for side in ("tierd", "redis")]
            print(f"{size_kb:>5} KB {what:>7} {sides[0]:>12} {sides[1]:>12} {ratio:6.2f}  {goal}")
    sys.exit(0 if all(result["is_met"] for result in results.values()) else 1)


if __name__ == "__main__":
    main()
