"""Which models are hybrid, by their `config.json` and by their names."""

from __future__ import annotations

import pytest

from kvroute.fleet.model_layers import has_hybrid_name, is_hybrid

GPT_OSS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128}
GEMMA = {"text_config": {"sliding_window": 512, "sliding_window_pattern": 6}}
LLAMA_4 = {"text_config": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4}}
QWEN_NEXT = {"full_attention_interval": 4, "num_hidden_layers": 48}
JAMBA = {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}
NEMOTRON = {"hybrid_override_pattern": "M-M-M-MM-M*-"}
ZAMBA = {"layers_block_type": ["mamba", "hybrid", "mamba"]}
LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32}
MISTRAL = {"sliding_window": 4096, "num_hidden_layers": 32}
QWEN_3 = {"layer_types": ["full_attention"] * 4, "sliding_window": None, "use_sliding_window": False}


@pytest.mark.parametrize("config", [GPT_OSS, GEMMA, LLAMA_4, QWEN_NEXT, JAMBA, NEMOTRON, ZAMBA])
def test_layers_of_several_kinds_make_a_model_hybrid(config):
    assert is_hybrid(config)


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN_3, {}, {"text_config": 3, "layer_types": 7}])
def test_layers_of_one_kind_do_not(config):
    assert not is_hybrid(config)


@pytest.mark.parametrize(
    ("name", "is_certain"),
    [
        ("openai/gpt-oss-20b", True),
        ("google/gemma-3-27b-it", True),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", True),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", True),
        ("meta-llama/Llama-3.1-8B-Instruct", False),
        ("me/gpt-oss-20b-finetuned", False),
        ("Qwen/Qwen3-8B", False),
    ],
)
def test_only_names_of_whole_families_are_certain(name, is_certain):
    assert has_hybrid_name(name) is is_certain
