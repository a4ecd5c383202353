from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvroute.deploy.render.plan import plan_endpoint, token_bytes, with_local_token_bytes
from kvroute.deploy.spec.loading import read_spec
from kvroute.deploy.tiny_model import TINY_MODELS, write_tiny_model

# As their publishers have them, the fields that count.
LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "kv_type", "expected"),
    [
        (LLAMA_8B, "auto", 131_072),
        (LLAMA_8B | {"num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128}, "auto", 327_680),
        (LLAMA_8B, "fp8_e4m3", 65_536),
        ({"text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 2}}, "auto", 131_072),
        (LLAMA_8B | {"layer_types": ["full_attention"] * 32}, "auto", 131_072),
        (LLAMA_8B | {"layer_types": ["full_attention", "sliding_attention"] * 16}, "auto", None),
        (LLAMA_8B | {"kv_lora_rank": 512}, "auto", None),
        (LLAMA_8B | {"torch_dtype": None}, "auto", None),
        (LLAMA_8B | {"num_hidden_layers": "many"}, "auto", None),
        ({}, "auto", None),
    ],
)
def test_bytes_of_a_token_follow_from_the_models_file(
    config: dict[str, Any], kv_type: str, expected: int | None
) -> None:
    assert token_bytes(config, kv_type) == expected


def test_the_file_of_a_generated_model_matches_its_shape(tmp_path: Path) -> None:
    write_tiny_model("small", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    assert token_bytes(config) == TINY_MODELS["small"].kv_bytes_per_token


@pytest.mark.parametrize("content", [None, "", "[]", "{", json.dumps(LLAMA_8B)])
def test_a_folder_is_read_if_it_can_be(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    document = {
        "apiVersion": "kvroute.dev/v1",
        "kind": "Endpoint",
        "metadata": {"name": "demo"},
        "spec": {"model": str(tmp_path)},
    }
    endpoint = plan_endpoint(read_spec(yaml.safe_dump(document), strategies=()).require("spec"))

    assert with_local_token_bytes(endpoint).token_bytes == (
        131_072 if content and "layers" in content else None
    )
