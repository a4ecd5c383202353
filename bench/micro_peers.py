"""The map of cached blocks beside those that other routers offer to Python.

    python bench/micro_peers.py [--install] [--json]

Of the routers on PyPI only Dynamo's has one: `dynamo.llm.RadixTree` (ai-dynamo-runtime). sglang-router and
vllm-router have theirs inside, and llm-d's is Go. It runs in a Python of its own, bench/.venv-peers, where
`--install` puts it (some 100 MB); without it, its column says so.

Each of the workers holds a different share of one prompt, in blocks of 16 tokens. `match` asks how much of
that prompt each of them has; both must say the same. `store a prompt` gives one worker as many new blocks as
the prompt has, at once, `store a block` one block: by `PrefixIndex.store`, and by Dynamo's JSON events, which
are what its API takes. All of that is with keys at hand; `hash a prompt` is from token ids to keys. What an
event costs from a worker's bytes to the map is in micro_events.py. CPU of all threads, and time waited,
least of the repeats.
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
    """Least of the repeats."""
    cpu = wall = float("inf")
    for _ in range(repeats):
        cpu_before, wall_before = time.process_time_ns(), time.perf_counter_ns()
        work()
        cpu = min(cpu, (time.process_time_ns() - cpu_before) / 1000)
        wall = min(wall, (time.perf_counter_ns() - wall_before) / 1000)
    return {"cpu_us": cpu, "wall_us": wall}


def case(length: int, workers: int, repeats: int) -> dict[str, Any]:
    """What both sides are told."""
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


def ours(told: dict[str, Any]) -> dict[str, Any]:
    index, keys = PrefixIndex(), told["keys"]
    for slot, share in enumerate(told["shares"]):
        holder = Holder(Tier.GPU)
        index.attach(slot, holder)
        index.store(holder, 16, None, keys[:share])
    found = index.match(keys)
    new = Holder(Tier.GPU)
    index.attach(len(told["shares"]), new)
    prompts, steps = iter(told["new"]), iter(told["single"])
    last = told["new"][0][-1]
    tokens = array("I", told["tokens"])
    return {
        "blocks": [found[slot].gpu // 16 if slot in found else 0 for slot in range(len(told["shares"]))],
        "match": best_us(lambda: index.match(keys), told["repeats"]),
        "store a prompt": best_us(lambda: index.store(new, 16, None, next(prompts)), NEW_PROMPTS),
        "store a block": best_us(
            lambda: index.store_one(new, 16 // KEY_TOKENS, last, next(steps)), NEW_BLOCKS
        ),
        "hash a prompt": best_us(lambda: token_keys(tokens, 0), told["repeats"]),
    }


def dynamo(python: str, told: dict[str, Any]) -> dict[str, Any]:
    """Raises SystemExit when it fails."""
    peer = subprocess.run(
        [python, str(HERE / "peer_dynamo.py")],
        input=json.dumps(told),
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
            told = case(length, workers, options.repeats)
            sides = {"kvroute": ours(told)}
            if version is not None:
                sides["dynamo"] = dynamo(python, told)
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
