"""Whether a model is hybrid: whether its layers need different kinds of KV cache. Pure.

vLLM keeps the layers of a hybrid model (sliding windows, state spaces, linear attention besides full
attention) in groups of their own. A KV connector without support for that turns the groups off: then each
layer keeps the KV of every token, up to 10 times the memory (vllm-project/production-stack #1062), and
models with state spaces do not start. LMCacheConnectorV1 is such a connector; LMCacheMPConnector is none
(LMCache 0.5.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern")
"""Fields of `config.json` with one kind for each layer."""
_EVERY: Final = (
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "full_attention_interval",
    "attn_layer_period",
)
"""Fields with the distance between layers of the rarer kind."""
_NAMES: Final = re.compile(
    r"(?:openai/gpt-oss-|google/gemma-[23]-|google/gemma-3n-|meta-llama/Llama-4-|Qwen/Qwen3-Next-"
    r"|ibm-granite/granite-4\.0-h-|ai21labs/AI21-Jamba|nvidia/Nemotron-H-|nvidia/NVIDIA-Nemotron-Nano-)"
).match
"""Names of families all of whose models are hybrid, as their publishers name them."""


def has_hybrid_name(model: str) -> bool:
    """Whether a name on Hugging Face is that of a hybrid model for certain. False says nothing."""
    return _NAMES(model) is not None


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether a model's `config.json` describes layers of different kinds."""
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    for name in _KINDS:
        kinds = text.get(name)
        if isinstance(kinds, list | str) and len(set(map(str, kinds))) > 1:
            return True
    if text.get("attention_chunk_size"):
        return True
    return any(isinstance(every := text.get(name), int) and every > 1 for name in _EVERY)
