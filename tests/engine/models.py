"""Tiny models of the architectures whose caches differ, with random weights: vLLM runs them on a CPU core.

Each is a folder with a configuration and the tokenizer and chat template of kvroute's own tiny model, so
words of that vocabulary are one token here too. Widths are small, ratios are real: windows and chunks are
shorter than the prompts of a test, and a state-space layer's state is larger than a block of keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvroute.deploy.tiny_model import CHAT_TEMPLATE, END, PAD, TURN, VOCABULARY, write_tiny_model

WINDOW = 128
"""Tokens of a sliding window, and of a chunk of local attention."""
LAYERS = 4
WIDTH = 256
INNER = 512
HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32

IMAGE, IMAGE_PAD, VISION_START, VISION_END, VIDEO_PAD = range(VOCABULARY, VOCABULARY + 5)
MEDIA_TEXTS = {
    IMAGE: "<image>",
    IMAGE_PAD: "<|image_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    VIDEO_PAD: "<|video_pad|>",
}

SPECIAL_IDS: dict[str, object] = {"bos_token_id": TURN, "eos_token_id": END, "pad_token_id": PAD}
COMMON: dict[str, object] = {
    **SPECIAL_IDS,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
ATTENTION: dict[str, object] = {
    **COMMON,
    "hidden_act": "silu",
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
MAMBA2: dict[str, object] = {
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 64,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What `config.json` says, and how the engine has to be started."""

    config: Mapping[str, object]
    files: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Further files of the folder."""
    tokenizer: Mapping[str, object] = field(default_factory=dict)
    """Further members of `tokenizer_config.json`."""
    media: str = ""
    """What the chat template writes for an image."""
    engine: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the engine, by their Python names."""
    zeroed_kernels: Literal["", "mamba", "mla"] = ""
    """Layers whose kernels a CPU lacks or runs without a prefix cache: they answer zeros."""
    drafting: Mapping[str, object] = field(default_factory=dict)
    """`speculative_config` of the engine, without its model."""
    drafter: str = ""
    """Another architecture of this table that is the model in `drafting`."""


def _layer_types(count: int, every: int, other: str) -> list[str]:
    """Full attention in each `every`th layer, `other` in the rest."""
    return [other if (number + 1) % every else "full_attention" for number in range(count)]


def _hybrid(name: str, kind: str, **config: object) -> Architecture:
    """A model with state-space layers whose states the engine keeps at the ends of blocks."""
    return Architecture(
        {"architectures": [name], "model_type": kind, **ATTENTION, **config},
        engine={"mamba_cache_mode": "align"},
        zeroed_kernels="mamba",
    )


GPT_OSS: dict[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    **ATTENTION,
    "sliding_window": WINDOW,
    "layer_types": _layer_types(LAYERS, 2, "sliding_attention"),
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "initial_context_length": 4096,
    "rope_scaling": None,
}
QWEN3_NEXT: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    **ATTENTION,
    "layer_types": _layer_types(LAYERS, 4, "linear_attention"),
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "rope_scaling": None,
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **ATTENTION}),
    "eagle_head": Architecture(
        {
            "architectures": ["EagleLlamaForCausalLM"],
            "model_type": "llama",
            **ATTENTION,
            "num_hidden_layers": 1,
        }
    ),
    "llama_eagle": Architecture(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **ATTENTION},
        drafting={"method": "eagle", "num_speculative_tokens": 2},
        drafter="eagle_head",
    ),
    "eagle3_head": Architecture(
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **ATTENTION,
            "num_hidden_layers": 1,
            "draft_vocab_size": VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        }
    ),
    "gpt_oss": Architecture(GPT_OSS),
    "gpt_oss_eagle": Architecture(
        GPT_OSS, drafting={"method": "eagle3", "num_speculative_tokens": 2}, drafter="eagle3_head"
    ),
    "gemma3": Architecture(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            **ATTENTION,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": _layer_types(6, 6, "sliding_attention"),
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": HEAD_DIM,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
    ),
    "mistral_window": Architecture(
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            **ATTENTION,
            "sliding_window": WINDOW,
        }
    ),
    "llama4": Architecture(
        {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            **ATTENTION,
            "rms_norm_eps": 1e-5,
            "attention_chunk_size": WINDOW,
            "layer_types": _layer_types(LAYERS, 4, "chunked_attention"),
            "no_rope_layers": [1, 1, 1, 0],
            "no_rope_layer_interval": 4,
            "intermediate_size_mlp": INNER,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 4,
            "moe_layers": [3],
            "use_qk_norm": True,
            "attn_temperature_tuning": False,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    ),
    "qwen3_next": Architecture(QWEN3_NEXT, engine={"mamba_cache_mode": "align"}),
    "qwen3_next_mtp": Architecture(
        {**QWEN3_NEXT, "num_nextn_predict_layers": 1},
        engine={"mamba_cache_mode": "align"},
        drafting={"method": "mtp", "num_speculative_tokens": 1},
    ),
    "granite4": _hybrid(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **MAMBA2,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        attention_multiplier=0.1,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=INNER,
        position_embedding_type="rope",
        normalization_function="rmsnorm",
        init_method="mup",
    ),
    "jamba": _hybrid(
        "JambaForCausalLM",
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=4,
        expert_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        use_mamba_kernels=False,
        num_logits_to_keep=1,
    ),
    "mamba": Architecture(
        {
            **COMMON,
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "intermediate_size": INNER,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "residual_in_fp32": True,
            "time_step_rank": 16,
            "tie_word_embeddings": True,
        },
        engine={"mamba_cache_mode": "align"},
        zeroed_kernels="mamba",
    ),
    "deepseek2": Architecture(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            **{name: value for name, value in ATTENTION.items() if name != "head_dim"},
            "num_key_value_heads": HEADS,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "attention_bias": False,
            "rope_scaling": None,
        },
        zeroed_kernels="mla",
    ),
    "bert": Architecture(
        {
            **COMMON,
            "architectures": ["BertModel"],
            "model_type": "bert",
            "torch_dtype": "float32",
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "intermediate_size": INNER,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "position_embedding_type": "absolute",
        },
        engine={"runner": "pooling"},
    ),
    "llava": Architecture(
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "torch_dtype": "bfloat16",
            "vocab_size": VOCABULARY + len(MEDIA_TEXTS),
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "image_seq_length": 16,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "text_config": {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                **ATTENTION,
                "vocab_size": VOCABULARY + len(MEDIA_TEXTS),
            },
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "projection_dim": 64,
                "num_channels": 3,
                "hidden_act": "quick_gelu",
                "layer_norm_eps": 1e-5,
            },
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 3,
                "rescale_factor": 1 / 255,
                **dict.fromkeys(
                    ("do_resize", "do_center_crop", "do_convert_rgb", "do_normalize", "do_rescale"), True
                ),
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "image_token": MEDIA_TEXTS[IMAGE],
                "num_additional_image_tokens": 1,
            },
        },
        tokenizer={"image_token": MEDIA_TEXTS[IMAGE]},
        media=MEDIA_TEXTS[IMAGE],
    ),
    "qwen2_vl": Architecture(
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            **{name: value for name, value in ATTENTION.items() if name != "head_dim"},
            "vocab_size": VOCABULARY + len(MEDIA_TEXTS),
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": LAYERS,
            "image_token_id": IMAGE_PAD,
            "video_token_id": VIDEO_PAD,
            "vision_token_id": IMAGE_PAD,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "vision_config": {
                "depth": 2,
                "embed_dim": 64,
                "mlp_ratio": 2,
                "num_heads": 2,
                "in_chans": 3,
                "in_channels": 3,
                "hidden_size": WIDTH,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
            },
        },
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Qwen2VLImageProcessor",
                "processor_class": "Qwen2VLProcessor",
                "min_pixels": 56 * 56,
                "max_pixels": 28 * 28 * 1024,
                "patch_size": 14,
                "temporal_patch_size": 2,
                "merge_size": 2,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 3,
                "rescale_factor": 1 / 255,
                **dict.fromkeys(("do_resize", "do_normalize", "do_rescale", "do_convert_rgb"), True),
            }
        },
        tokenizer={"image_token": MEDIA_TEXTS[IMAGE_PAD], "video_token": MEDIA_TEXTS[VIDEO_PAD]},
        media=f"{MEDIA_TEXTS[VISION_START]}{MEDIA_TEXTS[IMAGE_PAD]}{MEDIA_TEXTS[VISION_END]}",
    ),
}

MEDIA_TEMPLATE = """\
{%- for message in messages -%}
<|turn|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}IMAGE{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif %}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|turn|>assistant
{% endif -%}
"""


def write_model(name: str, folder: Path) -> Path:
    """Write the architecture `name` into `folder`, which may exist. Returns `folder`."""
    architecture = ARCHITECTURES[name]
    write_tiny_model("tiny", folder)
    (folder / "config.json").write_text(json.dumps(architecture.config, indent=1) + "\n")
    if architecture.media:
        _add_media_tokens(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    template = MEDIA_TEMPLATE.replace("IMAGE", architecture.media) if architecture.media else CHAT_TEMPLATE
    members = {**json.loads(path.read_text()), "chat_template": template, **architecture.tokenizer}
    path.write_text(json.dumps(members, indent=1) + "\n")
    for file, content in architecture.files.items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    return folder


def _add_media_tokens(path: Path) -> None:
    tokenizer = json.loads(path.read_text())
    plain = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**plain, "id": id_, "content": text} for id_, text in MEDIA_TEXTS.items()]
    path.write_text(json.dumps(tokenizer))
