"""Measure the chunk index of LMCache: keys, store, match, reports, memory.

    python bench/micro_chunks.py [--json] [--chunks 500000]

Times are CPU time of one core; chunks have 256 tokens. `match` starts with computed keys: each slot has its
own L1 with a different share of the prompt, and all slots share one L2 with the whole prompt. `walk` is the
simplest alternative: for each slot, chunk by chunk, through sets. `reports` are bodies in the format of
LMCache's servers, from bytes to the index, with and without the optional token ids.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections.abc import Callable

from kvroute.blocks.chunks import ChunkScheme, ChunkSpace, PromptChunks, chunk_keys, chunk_names
from kvroute.blocks.keys import Tier
from kvroute.clock import SystemClock
from kvroute.index.chunk_index import ChunkHolder, ChunkIndex
from kvroute.lmcache.coordinator import Coordinator
from kvroute.lmcache.options import LMCacheOptions
from kvroute.wire.lmcache_server import ServerRegistration, decode_events

LENGTHS = {"8K": 8192, "64K": 65536}
SLOTS = (8, 64)
SCHEMES = {
    "blake3": ChunkScheme(),
    "builtin": ChunkScheme("builtin"),
    "sha256_cbor": ChunkScheme("sha256_cbor"),
}
MODEL = "/models/llama"


def cpu_s(work: Callable[[], object], repeats: int = 1) -> float:
    """The least CPU time of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def ids(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(128_000), k=count)


def match(length: int, slots: int) -> dict[str, float]:
    rng = random.Random(1)
    scheme = SCHEMES["blake3"]
    prompt = PromptChunks(ids(rng, length))
    keys = list(prompt.keys(scheme))
    index, space = ChunkIndex(), ChunkSpace(scheme, MODEL)
    pool = ChunkHolder(Tier.L2, shared=True)
    index.store(pool, space, keys)
    sets: list[set[int]] = []
    starts = {}
    for slot in range(slots):
        memory, share = ChunkHolder(Tier.L1), rng.randrange(len(keys) + 1)
        index.attach(slot, memory, [(scheme, MODEL)])
        index.attach(slot, pool, [(scheme, MODEL)])
        index.store(memory, space, keys[:share])
        sets.append(set(keys[:share]))
        starts[slot] = rng.randrange(length // 4)
    there = set(keys)

    def walk() -> dict[int, tuple[int, int]]:
        found = {}
        for slot, held in enumerate(sets):
            place, l1, l2 = starts[slot], 0, 0
            for position in range(place // 256, len(keys)):
                key, stop = keys[position], (position + 1) * 256
                if key in held:
                    l1 += stop - place
                elif key in there:
                    l2 += stop - place
                else:
                    break
                place = stop
            if l1 or l2:
                found[slot] = (l1, l2)
        return found

    assert index.match(prompt, "", starts) == walk()
    probed = {pool: there}
    cold = PromptChunks(ids(rng, length))
    index.match(cold, "", starts)
    return {
        "match us": cpu_s(lambda: index.match(prompt, "", starts), 50) * 1e6,
        "match, L2 probed us": cpu_s(lambda: index.match(prompt, "", starts, probed), 50) * 1e6,
        "match, unknown prompt us": cpu_s(lambda: index.match(cold, "", {}), 50) * 1e6,
        "walk us": cpu_s(walk, 10) * 1e6,
    }


def naming() -> dict[str, float]:
    tokens = ids(random.Random(3), 65536)
    return {
        f"64K tokens, {name} us": cpu_s(lambda scheme=scheme: chunk_keys(tokens, scheme), 10) * 1e6  # type: ignore[misc]
        for name, scheme in SCHEMES.items()
    }


def memory(chunks: int) -> dict[str, float]:
    """Store distinct chunks and remove them; with one holder, and with a second holder of the same chunks."""
    rng = random.Random(2)
    keys = [rng.getrandbits(64) for _ in range(chunks)]
    space = ChunkSpace(SCHEMES["blake3"], MODEL)
    before = _resident()
    index = ChunkIndex(max_chunks=chunks)
    one, two = ChunkHolder(Tier.L1), ChunkHolder(Tier.L1)
    first = cpu_s(lambda: index.store(one, space, keys))
    each = (_resident() - before) / chunks
    second = cpu_s(lambda: index.store(two, space, keys))
    both = (_resident() - before) / chunks
    removal_s = cpu_s(lambda: index.remove_all(one, space, keys))
    index.clear(two)

    def sweep() -> None:
        while index.sweep(4000):
            pass

    return {
        "store chunks/s": chunks / first,
        "store again for another chunks/s": chunks / second,
        "remove chunks/s": chunks / removal_s,
        "sweep chunks/s": chunks / cpu_s(sweep),
        "bytes a chunk": each,
        "with a second holder": both,
    }


def reports(count: int) -> dict[str, float]:
    """Entries per second, and the longest time without a pause for other work."""
    rng = random.Random(4)
    figures = {}
    for what, tokens in (("", 0), (" with token ids", 256)):
        names = chunk_names(ids(rng, count * 4), ChunkScheme(chunk_tokens=4))
        entries = [
            {
                "key": {
                    "chunk_hash_hex": name.hex(),
                    "model_name": MODEL,
                    "kv_rank": 16777472,
                    "object_group_id": 0,
                    "cache_salt": "",
                },
                "size_bytes": 131072,
                "token_ids": ids(rng, tokens),
                "token_offset": -1,
            }
            for name in names
        ]
        batch = {"instance_id": "a", "incarnation": 5, "seq": 1, "event_type": "store", "tier": "l1"}
        body = json.dumps(
            {"batches": [{**batch, "backend": "dram", "entries": entries, "shared": False}]},
            separators=(",", ":"),
        ).encode()
        coordinator = Coordinator(ChunkIndex(), SystemClock(), LMCacheOptions())
        coordinator.register(ServerRegistration("10.0.0.1", 8080, "a"))
        gc.collect()
        gc.freeze()  # the settings of the gateway (app/server.py)
        longest, spent = 0.0, 0.0
        decoding, batches = decode_events(body), None
        while batches is None:
            start = time.process_time()
            try:
                next(decoding)
            except StopIteration as end:
                batches = end.value
            step = time.process_time() - start
            longest, spent = max(longest, step), spent + step
        coordinator.admit(batches[0])
        for piece in batches:
            start = time.process_time()
            coordinator.apply(piece)
            step = time.process_time() - start
            longest, spent = max(longest, step), spent + step
        figures[f"entries/s{what}"] = count / spent
        figures[f"longest step{what} us"] = longest * 1e6
    return figures


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--chunks", type=int, default=500_000)
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {
        "memory": memory(options.chunks),
        "naming": naming(),
        "reports": reports(5_000),
    }
    for name, length in LENGTHS.items():
        for slots in SLOTS:
            results[f"{name} x {slots} slots"] = match(length, slots)
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for group, figures in results.items():
        for what, figure in figures.items():
            print(f"{group:18} {what:34} {figure:14,.1f}")


if __name__ == "__main__":
    main()
