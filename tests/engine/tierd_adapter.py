"""Runs in the engine's environment: LMCache's own adapter, with one command per line.

Commands come as JSON lines on stdin: {"do": "store" | "lookup" | "load" | "unlock" | "status", "fill": n}.
Every answer is a JSON line after "answer": which keys succeeded, and for a load which of those have
every byte as it was stored with `fill`.
"""

from __future__ import annotations

import json
import sys

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_memory_objects,
    make_object_keys,
    wait_eventfd,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.sagemaker_hyperpod_l2_adapter import SageMakerHyperPodL2AdapterConfig

SIZE = 300_000


def main() -> None:
    config, count = json.loads(sys.argv[1]), int(sys.argv[2])
    buffer = torch.empty(count * SIZE, dtype=torch.uint8)
    memory = create_l1_memory_desc(buffer)
    adapter = create_l2_adapter(SageMakerHyperPodL2AdapterConfig.from_dict(config), l1_memory_desc=memory)
    keys = make_object_keys(count)
    print("answer", json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print("answer", json.dumps(carry_out(adapter, keys, buffer, command)), flush=True)
    adapter.close()


def carry_out(adapter, keys, buffer, command) -> object:
    count, fill = len(keys), command.get("fill", 0)
    match command["do"]:
        case "store":
            task = adapter.submit_store_task(keys, make_memory_objects(buffer, count, SIZE, 0, fill))
            wait_eventfd(adapter.get_store_event_fd())
            return adapter.pop_completed_store_tasks()[task].is_successful()
        case "lookup":
            task = adapter.submit_lookup_and_lock_task(keys, {})
            wait_eventfd(adapter.get_lookup_and_lock_event_fd())
            return adapter.query_lookup_and_lock_result(task).get_indices_list()
        case "load":
            objects = make_memory_objects(buffer, count, SIZE, 0, 255)
            task = adapter.submit_load_task(keys, objects)
            wait_eventfd(adapter.get_load_event_fd())
            loaded = adapter.query_load_result(task).get_indices_list()
            right = [each for each in loaded if bool((objects[each].raw_data == (each + fill) & 255).all())]
            return {"loaded": loaded, "right": right}
        case "unlock":
            return adapter.submit_unlock(keys)
    return adapter.report_status()


if __name__ == "__main__":
    main()
