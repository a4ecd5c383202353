"""LoRA adapters of a tiny model: random matrices that change its keys and values."""

from __future__ import annotations

import json
import random
import struct
from array import array
from pathlib import Path

RANK = 8
SCALE = 0.1
"""Standard deviation of the numbers: with the weights of `weights.py`, no answer stays the same."""


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """Write an adapter of the model in `model` into `folder`, as PEFT would; returns `folder`."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    targets = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }
    chooser = random.Random(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for layer in range(config["num_hidden_layers"]):
        for target, (inputs, outputs) in targets.items():
            for part, rows, columns in (("A", RANK, inputs), ("B", outputs, RANK)):
                numbers = array("f", (chooser.gauss(0, SCALE) for _ in range(rows * columns))).tobytes()
                header[f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{part}.weight"] = {
                    "dtype": "F32",
                    "shape": [rows, columns],
                    "data_offsets": [len(data), len(data) + len(numbers)],
                }
                data += numbers
    encoded = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
