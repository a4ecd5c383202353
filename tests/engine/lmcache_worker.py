"""LMCache's own worker classes (0.5.6) around an engine that is only pretended, driven by lines on stdin.

    python lmcache_worker.py PULL REPLY OWN_PORT INSTANCE

Runs with the engine's Python. Commands are JSON lines: `{"do": "admit" | "evict", "keys": [...]}`,
`{"do": "chunks", "tokens": [...]}`, `{"do": "lose", "keys": [...]}` (dropped without a word being sent),
`{"do": "lookup", "hashes": [...]}`, `{"do": "leave"}`. One JSON line on stdout answers each; the worker also
reports freezing there.
"""

import asyncio
import json
import os
import sys
import time

import torch
from lmcache.v1.cache_controller.message import BatchedP2PLookupMsg, OpType
from lmcache.v1.cache_controller.worker import LMCacheWorker
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.batched_message_sender import BatchedMessageSender
from lmcache.v1.token_database import ChunkedTokenDatabase

CHUNK_TOKENS = 64


class Key:
    def __init__(self, chunk_hash: int) -> None:
        self.chunk_hash = chunk_hash


class LocalCPUBackend:
    """What a full synchronisation asks: all that is held."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def get_keys(self) -> list[Key]:
        return [Key(chunk_hash) for chunk_hash in sorted(self.held)]

    def __str__(self) -> str:
        return "LocalCPUBackend"


class Storage:
    def __init__(self) -> None:
        self.local_cpu_backend = LocalCPUBackend()


class Engine:
    def __init__(self) -> None:
        self.storage_manager = Storage()

    def freeze(self, frozen: bool) -> None:
        write_line({"frozen": frozen})


def write_line(what: dict[str, object]) -> None:
    # One write a line: two threads speak.
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    pull, reply, port, instance = sys.argv[1:]
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        enable_controller=True,
        lmcache_instance_id=instance,
        controller_pull_url=pull,
        controller_reply_url=reply,
        lmcache_worker_ports=[int(port)],
        lmcache_worker_heartbeat_time=1,
        lmcache_worker_heartbeat_delay_time=0,
        extra_config={
            "full_sync_startup_delay_s": 0.1,
            "full_sync_status_poll_interval_s": 0.2,
            "full_sync_batch_size": 4,
        },
    )
    metadata = LMCacheMetadata(
        model_name="tiny",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(4, 2, CHUNK_TOKENS, 4, 32),
        chunk_size=CHUNK_TOKENS,
    )
    engine = Engine()
    worker = LMCacheWorker(config, metadata, engine)
    sender = BatchedMessageSender(metadata, config, "LocalCPUBackend", worker)
    chunks = ChunkedTokenDatabase(config, metadata)
    held = engine.storage_manager.local_cpu_backend.held
    write_line({"ready": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        answer: object = None
        match command["do"]:
            case "admit":
                for key in command["keys"]:
                    sender.add_kv_op(OpType.ADMIT, key)
                held.update(command["keys"])
            case "evict":
                for key in command["keys"]:
                    sender.add_kv_op(OpType.EVICT, key)
                held.difference_update(command["keys"])
            case "lose":
                # As if a message with these operations had never arrived.
                for _ in command["keys"]:
                    sender._get_next_sequence_number()
                held.difference_update(command["keys"])
            case "chunks":
                found = chunks.process_tokens(tokens=command["tokens"], make_key=False)
                answer = [chunk_hash for start, end, chunk_hash in found if end - start == CHUNK_TOKENS]
            case "lookup":
                asked = BatchedP2PLookupMsg(hashes=command["hashes"], instance_id=instance, worker_id=0)
                future = asyncio.run_coroutine_threadsafe(worker.async_put_and_wait_msg(asked), worker.loop)
                answer = [list(row) for row in future.result(10).layout_info]
            case "leave":
                sender.close()
                worker.deregister()
                time.sleep(0.5)  # pushing has no acknowledgement
                write_line({"answer": None})
                os._exit(0)
        write_line({"answer": answer})


if __name__ == "__main__":
    main()
