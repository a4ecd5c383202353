"""Measure the prefix index, and the index of another router that has a Python interface.

    python bench/micro_peers.py [--install] [--json]

Of the routers on PyPI only Dynamo has such an interface: `dynamo.llm.RadixTree` (ai-dynamo-runtime). The
indexes of sglang-router and vllm-router have none, and llm-d's is written in Go. Dynamo runs in its own
Python, bench/.venv-peers, where `--install` installs it (some 100 MB). Without it the column says `missing`.

Each worker holds a different share of one prompt, in blocks of 16 tokens. `match` computes the share of each
worker; both sides must find the same shares. `store a prompt` adds as many new blocks as the prompt has to
one worker in one call, `store a block` adds one block: by `PrefixIndex.store`, and by JSON events, the input
of Dynamo's interface. Keys are computed beforehand; `hash a prompt` computes them from token ids.
micro_events.py measures an event from a worker's bytes to the map. Figures are CPU of all threads and waiting
time, least of the repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway_routers import install_package, package_version
from kvroute.blocks.keys import KEY_TOKENS, Tier, token_keys
from kvroute.index.prefix_index import Holder, PrefixIndex

HERE = Path(__file__).parent
PACKAGE, VERSION = "ai-dynamo-runtime", "1.6.1"
LENGTHS = {"8K": 8192, "64K": 65536}
WORKERS = (8, 64)
NEW_PROMPTS, NEW_BLOCKS = 10, 200
FIGURES = ("match", "store a prompt", "store a block", "hash a prompt")


def best_us(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """The least of the repeats."""
    cpu = wall = float("inf")
    for _ in range(repeats):
        cpu_before, wall_before = time.process_time_ns(), time.perf_counter_ns()
        work()
        cpu = min(cpu, (time.process_time_ns() - cpu_before) / 1000)
        wall = min(wall, (time.perf_counter_ns() - wall_before) / 1000)
    return {"cpu_us": cpu, "wall_us": wall}


def case(length: int, workers: int, repeats: int) -> dict[str, Any]:
    """The input of both sides."""
    rng = random.Random(1)
    tokens = rng.choices(range(128_000), k=length)
    blocks = length // 16
    return {
        "tokens": tokens,
        "keys": list(token_keys(array("I", tokens), 0)),
        "shares": [rng.randrange(1, blocks + 1) for _ in range(workers)],
        "new": [[rng.getrandbits(63) for _ in range(blocks)] for _ in range(NEW_PROMPTS)],
        "single": [rng.getrandbits(63) for _ in range(NEW_BLOCKS)],
        "repeats": repeats,
    }


def ours(case_input: dict[str, Any]) -> dict[str, Any]:
    index, keys = PrefixIndex(), case_input["keys"]
    for slot, share in enumerate(case_input["shares"]):
        holder = Holder(Tier.GPU)
        index.attach(slot, holder)
        index.store(holder, 16, None, keys[:share])
    found = index.match(keys)
    new = Holder(Tier.GPU)
    index.attach(len(case_input["shares"]), new)
    prompts, steps = iter(case_input["new"]), iter(case_input["single"])
    last = case_input["new"][0][-1]
    tokens = array("I", case_input["tokens"])
    return {
        "blocks": [
            found[slot].gpu // 16 if slot in found else 0 for slot in range(len(case_input["shares"]))
        ],
        "match": best_us(lambda: index.match(keys), case_input["repeats"]),
        "store a prompt": best_us(lambda: index.store(new, 16, None, next(prompts)), NEW_PROMPTS),
        "store a block": best_us(
            lambda: index.append_one(new, 16 // KEY_TOKENS, last, next(steps)), NEW_BLOCKS
        ),
        "hash a prompt": best_us(lambda: token_keys(tokens, 0), case_input["repeats"]),
    }


def dynamo(python: str, case_input: dict[str, Any]) -> dict[str, Any]:
    """Run Dynamo's side. Raises SystemExit on failure."""
    peer = subprocess.run(
        [python, str(HERE / "peer_dynamo.py")],
        input=json.dumps(case_input),
        capture_output=True,
        text=True,
        check=False,
    )
    if peer.returncode:
        raise SystemExit(f"Dynamo's side failed:\n{peer.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(peer.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--install", action="store_true", help="install Dynamo's package from PyPI")
    parser.add_argument("--peers", type=Path, default=HERE / ".venv-peers")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    why = install_package(options.peers, PACKAGE, VERSION) if options.install else None
    python = str(options.peers / "bin" / "python")
    version = package_version(python, PACKAGE)
    if version is None:
        print(f"without {PACKAGE}: {why or 'not installed; --install does it'}", file=sys.stderr)
    results: dict[str, Any] = {"version": version, "cases": {}}
    for name, length in LENGTHS.items():
        for workers in WORKERS:
            case_input = case(length, workers, options.repeats)
            sides = {"kvroute": ours(case_input)}
            if version is not None:
                sides["dynamo"] = dynamo(python, case_input)
                if sides["dynamo"]["blocks"] != sides["kvroute"]["blocks"]:
                    raise SystemExit(f"{name} x {workers}: the two do not find the same blocks")
            results["cases"][f"{name} x {workers} workers"] = {
                side: {what: figures[what] for what in FIGURES} for side, figures in sides.items()
            }
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{'':20}{'':16}{'kvroute us':>12}{'waited':>10}{'Dynamo us':>12}{'waited':>10}{'ratio':>8}")
    for name, by_side in results["cases"].items():
        for what in FIGURES:
            mine, theirs = by_side["kvroute"][what], by_side.get("dynamo", {}).get(what)
            line = f"{name:20}{what:16}{mine['cpu_us']:12.1f}{mine['wall_us']:10.1f}"
            if theirs:
                line += f"{theirs['cpu_us']:12.1f}{theirs['wall_us']:10.1f}"
                line += f"{theirs['cpu_us'] / mine['cpu_us']:8.1f}"
            print(line if theirs else f"{line}{'missing':>12}")


if __name__ == "__main__":
    main()
