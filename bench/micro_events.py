"""Measure the cache map of vLLM's blocks: blocks per second from bytes to index, match, hashing, memory,
compared with pygtrie.

    python bench/micro_events.py [--json] [--blocks 1000000] [--only intake,slice]

Times are CPU time of one core. `ingest` decodes vLLM 0.32 payloads and applies them: `prompts` are 64 blocks
of 16 tokens per event, `decoding` one block per event, `evictions` one hash per event; `decode` is the share
of decoding. `intake` is the whole way of a message after its socket (`Intake.apply_fast`), for batches of one
event with one block and with eight blocks, 8 messages read together. `shared` is the cost of a batch for
another process of the gateway: through the changes of the index, and if it read the batch itself.

`slice` is the longest time between two pauses for other work (the least of several runs; a stream pauses
after `slice_ms`): a batch of 100,000 one-block events, a prompt in one event, 8,192 removals in one batch.
`snapshot` writes and reads the map of one worker. `match` starts with computed keys: each worker holds a
different share of the prompt; `with L1` each worker also has an L1. `masks` is a dict from key to the bitmask
of its holders, read block by block. `pygtrie` is a trie of keys whose nodes have such a mask, stored and read
for one worker.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import pygtrie

from kvroute.blocks.keys import BlockKey, Tier, token_keys
from kvroute.blocks.known_prompts import KeyCache
from kvroute.clock import SystemClock
from kvroute.events.intake import Intake
from kvroute.events.ledger import Ledger
from kvroute.events.options import KvEventsOptions
from kvroute.events.poller import TimeSlicer
from kvroute.index import snapshot as snapshots
from kvroute.index.prefix_index import Holder, PrefixIndex
from kvroute.replicas.map_mirror import Mirror
from kvroute.replicas.maps import PublishingPrefixIndex
from kvroute.replicas.mesh import FrameReader, encode_frame
from kvroute.replicas.messages import Message
from kvroute.wire.batch_split import split_batch
from kvroute.wire.vllm import (
    DIALECTS,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ExternalBlockHash,
    KvEvent,
    decode_batch,
)

LENGTHS = {"8K": 8192, "64K": 65536}
WORKERS = (8, 64)
encode = DIALECTS["map-0.30"].encode


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


def ingest(blocks: int) -> dict[str, float]:
    rng = random.Random(0)
    prompts: list[bytes] = []
    decoding: list[bytes] = []
    evictions: list[bytes] = []
    for _ in range(blocks // 128):
        names: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(128)]
        tokens = ids(rng, 128 * 16)
        prompts.append(encode(1.0, [BlockStored(names[:64], None, tokens[:1024], 16, medium="GPU")], 0))
        steps: list[KvEvent] = [
            BlockStored(
                [names[place]], names[place - 1], tokens[place * 16 : place * 16 + 16], 16, medium="GPU"
            )
            for place in range(64, 128)
        ]
        decoding.extend(encode(1.0, steps[at : at + 8], 0) for at in range(0, 64, 8))
        removed_events: list[KvEvent] = [BlockRemoved([name], medium="GPU") for name in reversed(names)]
        evictions.extend(encode(1.0, removed_events[at : at + 16], 0) for at in range(0, 128, 16))
    half = len(prompts) * 64
    best = {"prompts": 0.0, "decoding": 0.0, "evictions": 0.0}
    for _ in range(3):
        ledger = Ledger(PrefixIndex(), 0)
        for kind, payloads, count in (
            ("prompts", prompts, half),
            ("decoding", decoding, half),
            ("evictions", evictions, 2 * half),
        ):
            start = time.process_time()
            for payload in payloads:
                for _ in ledger.apply(decode_batch(payload)):
                    pass
            best[kind] = max(best[kind], count / (time.process_time() - start))
    results = {f"{kind} blocks/s": rate for kind, rate in best.items()}
    for kind, payloads, count in (("decoding", decoding, half), ("evictions", evictions, 2 * half)):

        def decode_all(payloads: list[bytes] = payloads) -> None:
            for payload in payloads:
                decode_batch(payload)

        results[f"{kind} decode blocks/s"] = count / cpu_s(decode_all, 3)
    return results


def intake(blocks: int) -> dict[str, float]:
    """One event per block that a sequence has filled, as vLLM publishes it while it decodes."""
    rng = random.Random(6)
    found = {}
    for events in (1, 8):
        made = Intake(
            "worker",
            Ledger(PrefixIndex(), 0),
            SystemClock(),
            KvEventsOptions(),
            TimeSlicer(SystemClock(), 0.5),
            lambda: None,
        )
        made.sequence.start_replay()
        made.sequence.end_replay()
        messages: list[Sequence[bytes]] = []
        last: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(64)]
        for number, name in enumerate(last):
            root = BlockStored([name], None, ids(rng, 16), 16, medium="GPU")
            made.apply_fast([(b"", number.to_bytes(8), encode(1.0, [root], 0))])
        for number in range(64, 64 + blocks // events):
            steps: list[KvEvent] = []
            for step in range(events):
                place, name = (number * events + step) % 64, rng.getrandbits(64)
                steps.append(BlockStored([name], last[place], ids(rng, 16), 16, medium="GPU"))
                last[place] = name
            messages.append((b"", number.to_bytes(8), encode(1.0, steps, 0)))
        start = time.process_time()
        for place in range(0, len(messages), 8):
            made.apply_fast(messages[place : place + 8])
        used = time.process_time() - start
        assert made.counts.messages == len(messages) + 64
        found[f"{events}-block batch us"] = used / len(messages) * 1e6
    return found


def shared(blocks: int) -> dict[str, float]:
    """What a batch costs for a second gateway process: its index changes, or the batch itself.

    `publish` is what the following process adds, `mirror` the process that gets the index changes, `itself` a
    process that would get the batch and run a ledger of its own. 8 batches travel together.
    """
    rng, found = random.Random(8), dict[str, float]()
    for size in (1, 8, 64):
        batches: list[bytes] = []
        last: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(64)]
        roots = [encode(1.0, [BlockStored([name], None, ids(rng, 16), 16, medium="GPU")], 0) for name in last]
        for number in range(blocks // size):
            names: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(size)]
            stored = BlockStored(names, last[number % 64], ids(rng, 16 * size), 16, medium="GPU")
            batches.append(encode(1.0, [stored], 0))
            last[number % 64] = names[-1]

        def follow(index: PrefixIndex, batches: Sequence[bytes], roots: Sequence[bytes] = roots) -> float:
            ledger = Ledger(index, 0)
            for payload in roots:
                for _ in ledger.apply(decode_batch(payload)):
                    pass
            start = time.process_time()
            for payload in batches:
                batch = decode_batch(payload)
                for _ in ledger.apply(batch):
                    pass
            return (time.process_time() - start) / len(batches) * 1e6

        changes: list[Message] = []
        itself = min(follow(PrefixIndex(), batches) for _ in range(3))
        published = follow(PublishingPrefixIndex(changes.append, max_blocks=1 << 24), batches)
        start = time.process_time()
        frames = [encode_frame(changes[at : at + 8]) for at in range(0, len(changes), 8)]
        published += (time.process_time() - start) / len(batches) * 1e6
        mirror, reader = Mirror(max_blocks=1 << 24, max_chunks=1), FrameReader()
        start = time.process_time()
        for frame in frames:
            for change in reader.feed(frame):
                mirror.apply(change)
        mirrored = (time.process_time() - start) / len(batches) * 1e6
        found |= {
            f"{size}-block batch, publish us": published - itself,
            f"{size}-block batch, mirror us": mirrored,
            f"{size}-block batch, itself us": itself,
            f"{size}-block batch, bytes": sum(map(len, frames)) / len(batches),
            f"{size}-block batch, bytes itself": sum(map(len, batches)) / len(batches),
        }
    return found


def slices() -> dict[str, float]:
    """The longest time without a pause, in ms, while one message is applied as in the subscriber."""
    rng = random.Random(4)
    singles: list[KvEvent] = []
    for start in range(0, 100_000, 100):
        tokens = ids(rng, 1600)
        singles.extend(
            BlockStored([start + place], start + place - 1 if place else None, tokens[place * 16 :][:16], 16)
            for place in range(100)
        )

    def prompt(tokens: int) -> list[KvEvent]:
        names: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(tokens // 16)]
        return [BlockStored(names, None, ids(rng, tokens), 16)]

    removed_events: list[KvEvent] = [BlockRemoved([name]) for name in range(8192)]
    longest: dict[str, float] = {}
    for kind, events, before in (
        ("100,000 one-block events", singles, []),
        ("one 64K-token prompt", prompt(65_536), []),
        ("one 256K-token prompt", prompt(262_144), []),
        ("one 1M-token prompt", prompt(1_048_576), []),
        ("8,192 removals", removed_events, singles[:8192]),
    ):
        payload = encode(1.0, events, 0)
        gc.collect()
        gc.freeze()  # the settings of the gateway (app/server.py)
        gc.set_threshold(20_000, 20, 50)
        for _ in range(5):
            ledger = Ledger(PrefixIndex(), 0)
            for _ in ledger.apply(EventBatch(1.0, list(before), 0, "map")):
                pass
            worst, turn = 0.0, time.process_time()

            def pause() -> None:
                nonlocal worst, turn
                now = time.process_time()
                worst, turn = max(worst, now - turn), now

            pieces = []
            for piece in split_batch(payload):
                if piece is not None:
                    if not piece.is_checked:
                        decode_batch(piece.payload)
                    pieces.append(piece)
                pause()
            for piece in pieces:
                for _ in ledger.apply(decode_batch(piece.payload), from_root=piece.from_root):
                    pause()
                pause()
            longest[f"{kind} ms"] = min(longest.get(f"{kind} ms", 1e9), worst * 1e3)
    return longest


def snapshot(blocks: int) -> dict[str, float]:
    """Write and read one worker's map; also the longest step of each in ms."""
    rng = random.Random(5)
    ledger = Ledger(PrefixIndex(), 0)
    for _ in range(blocks // 64):
        names: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(64)]
        for _ in ledger.apply(EventBatch(1.0, [BlockStored(names, None, ids(rng, 1024), 16)], 0, "map")):
            pass
    frames, longest, start = [], 0.0, time.process_time()
    turn = start
    for part in ledger.dump():
        frames.append(snapshots.encode(part))
        longest, turn = max(longest, time.process_time() - turn), time.process_time()
    written = time.process_time() - start
    head = snapshots.StreamHead("w", "http://w", 0, 1.0, 1, 1, True, None, 16)
    data = b"".join([snapshots.HEAD, snapshots.encode(head), *frames, snapshots.encode_end(1 + len(frames))])
    start = time.process_time()
    ((_, parts),) = snapshots.split(data)
    again = Ledger(PrefixIndex(), 0)
    again.begin_restore(None, 16)
    longest_in = 0.0
    checked = turn = time.process_time()
    for frame in parts:
        again.restore(snapshots.decode(frame))
        longest_in, turn = max(longest_in, time.process_time() - turn), time.process_time()
    assert again.held_blocks(Tier.GPU) == ledger.held_blocks(Tier.GPU)
    return {
        "written s": written,
        "longest step written ms": longest * 1e3,
        "checked s": checked - start,
        "loaded s": time.process_time() - start,
        "longest step loaded ms": longest_in * 1e3,
        "bytes a block": len(data) / blocks,
    }


def match(length: int, workers: int) -> dict[str, float]:
    rng = random.Random(1)
    keys = token_keys(ids(rng, length), 0)
    index = PrefixIndex()
    masks: dict[BlockKey, int] = {}
    shares = [rng.randrange(1, len(keys) + 1) for _ in range(workers)]
    for slot, share in enumerate(shares):
        holder = Holder(Tier.GPU)
        index.attach(slot, holder)
        index.store(holder, 16, None, keys[:share])
        for key in keys[:share]:
            masks[key] = masks.get(key, 0) | 1 << slot

    def walk() -> dict[int, int]:
        alive, found, place = (1 << workers) - 1, {}, 0
        for place, key in enumerate(keys):
            still = masks.get(key, 0) & alive
            if still != alive:
                for slot in range(workers):
                    if (alive ^ still) >> slot & 1:
                        found[slot] = place
                alive = still
                if not alive:
                    return found
        for slot in range(workers):
            if alive >> slot & 1:
                found[slot] = len(keys)
        return found

    times = {"match us": cpu_s(lambda: index.match(keys), 30) * 1e6, "masks us": cpu_s(walk, 30) * 1e6}
    assert {slot: found.gpu for slot, found in index.match(keys).items()} == {
        slot: 16 * blocks for slot, blocks in walk().items() if blocks
    }
    for slot in range(workers):
        memory = Holder(Tier.L1)
        index.attach(slot, memory)
        index.store(memory, 256, None, keys[15::16][: rng.randrange(len(keys) // 16 + 1)])
    times["match with L1 us"] = cpu_s(lambda: index.match(keys), 30) * 1e6
    trie = pygtrie.Trie()
    trie[tuple(keys)] = 1
    times["pygtrie us"] = cpu_s(lambda: trie.longest_prefix(tuple(keys)), 5) * 1e6
    return times


def hashing(tokens: array[int]) -> dict[str, float]:
    """Compute a prompt's keys: without a known prefix, and with the keys of the prefix remembered."""
    remembered = KeyCache()

    def known() -> None:
        for _ in remembered.steps(tokens, 0):
            pass

    known()
    return {
        "64K tokens us": cpu_s(lambda: token_keys(tokens, 0), 20) * 1e6,
        "64K known tokens us": cpu_s(known, 20) * 1e6,
    }


def memory(blocks: int) -> dict[str, float]:
    """Resident bytes per block: the index and one ledger, with one holder."""
    rng = random.Random(2)
    before = _resident()
    index = PrefixIndex()
    ledgers = [Ledger(index, slot) for slot in range(8)]
    for number in range(blocks // 64):
        names: list[ExternalBlockHash] = [rng.getrandbits(64) for _ in range(64)]
        batch = decode_batch(encode(1.0, [BlockStored(names, None, ids(rng, 1024), 16)], 0))
        for _ in ledgers[number % 8].apply(batch):
            pass
    each = (_resident() - before) / index.size().blocks
    return {"bytes a block": each, "10 million blocks GB": each * 1e7 / 2**30}


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=256_000)
    parser.add_argument("--snapshot-blocks", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="groups whose names start with one of these")
    options = parser.parse_args()
    groups: dict[str, Callable[[], dict[str, float]]] = {
        "memory": lambda: memory(options.blocks),
        "ingest": lambda: ingest(options.blocks),
        "intake": lambda: intake(options.blocks),
        "shared": lambda: shared(options.blocks // 4),
        "slice": slices,
        f"snapshot of {options.snapshot_blocks}": lambda: snapshot(options.snapshot_blocks),
        "hashing": lambda: hashing(array("I", ids(random.Random(3), 65536))),
    }
    for name, length in LENGTHS.items():
        for workers in WORKERS:
            groups[f"{name} x {workers} workers"] = partial(match, length, workers)
    only = tuple(filter(None, options.only.split(",")))
    results = {group: measure() for group, measure in groups.items() if not only or group.startswith(only)}
    if options.json:
        print(json.dumps(results, indent=2))
        return
    for group, figures in results.items():
        for what, figure in figures.items():
            print(f"{group:20} {what:28} {figure:14,.{2 if figure < 10 else 1}f}")


if __name__ == "__main__":
    main()
