"""What a model's own `config.json` says about its KV cache, where that file is at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvroute.deploy.render.plan import EndpointPlan, option_value

NUMBER_BYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_MOST_BYTES: Final = 1024 * 1024


def with_model_at_hand(endpoint: EndpointPlan) -> EndpointPlan:
    """`endpoint` with the bytes of a token, if its model is a folder of this host. Reads one file."""
    folder = endpoint.model.local_source
    if endpoint.token_bytes is not None or endpoint.is_simulated or not folder.startswith(("/", ".")):
        return endpoint
    try:
        with (Path(folder) / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return endpoint
    kv_type = option_value(list(endpoint.args), "--kv-cache-dtype") or "auto"
    return replace(endpoint, token_bytes=token_bytes(config, kv_type) if isinstance(config, dict) else None)


def token_bytes(config: Mapping[str, Any], kv_type: str = "auto") -> int | None:
    """Keys and values of one token in all layers, `kv_type` being vLLM's `--kv-cache-dtype`.

    None where the file does not tell, and for models with more than one kind of cache (sliding windows,
    state spaces, latent attention): their layers differ.
    """
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    special = ("kv_lora_rank", "layer_types", "layers_block_type", "state_size", "mamba_d_state", "ssm_cfg")
    if any(text.get(name) for name in special):
        kinds = text.get("layer_types")
        if not isinstance(kinds, list) or set(kinds) != {"full_attention"}:
            return None
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    size = text.get("head_dim")
    hidden = text.get("hidden_size")
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    if kv_type.startswith("fp8"):
        number: int | None = 1
    elif kv_type == "auto":
        names = (where.get(key) for where in (text, config) for key in ("torch_dtype", "dtype"))
        number = NUMBER_BYTES.get(str(next((name for name in names if name), "")))
    else:
        number = NUMBER_BYTES.get(kv_type)
    parts = (layers, kv_heads, size, number)
    if not all(isinstance(part, int) and part > 0 for part in parts):
        return None
    return 2 * int(layers or 0) * int(kv_heads or 0) * int(size or 0) * int(number or 0)
