"""Weights that make a tiny model's answers depend on all of the prompt.

vLLM's dummy weights are so small that attention adds next to nothing: an answer depends on the last token
only, and stays the same when the KV before it is another prompt's. These are large enough that each token of
the answer changes with the KV.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

ONE = b"\x80\x3f"
# The upper byte of a bfloat16 between 1/32 and 1/8, with either sign.
UPPER = bytes([0x3D, 0xBD]) * 128


def write_weights(folder: Path, seed: int = 0) -> None:
    """Add `model.safetensors` to a folder that `write_tiny_model` made."""
    config = json.loads((folder / "config.json").read_text())
    chooser = random.Random(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for name, shape in _shapes(config).items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        numbers = bytearray(ONE * count)
        if len(shape) == 2:
            numbers[0::2] = chooser.randbytes(count)
            numbers[1::2] = chooser.randbytes(count).translate(UPPER)
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(numbers)],
        }
        data += numbers
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def _shapes(config: dict[str, int]) -> dict[str, list[int]]:
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    shapes = {"model.embed_tokens.weight": [words, hidden], "model.norm.weight": [hidden]}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = [words, hidden]
    return shapes
