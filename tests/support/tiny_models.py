"""Tiny random models of every causal type of transformers, as data: what to shrink, and what a type needs besides.

`SHRINK` is laid over the default configuration wherever it has a field (or an alias) of that name, sub-configurations
included. `SPECIAL` holds what a type's own checks demand on top.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

VOCABULARY = 512

SHRINK: dict[str, Any] = {
    # width
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "emb_dim": 64, "dim_model": 64, "embedding_size": 64,
    "intermediate_size": 96, "n_inner": 96, "dim_ff": 96, "ffn_dim": 96, "d_ff": 96, "d_inner": 96, "dff": 96,
    "ffn_hidden_size": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "shared_intermediate_size": 32,
    "intermediate_size_mlp": 96, "word_embed_proj_dim": 64, "lru_width": 64,
    # depth
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 2, "decoder_layers": 3,
    "num_encoder_layers": 2, "num_decoder_layers": 3,
    # heads
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "dim_head": 16, "d_kv": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "kv_heads": 2,
    "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    # vocabulary and length
    "vocab_size": VOCABULARY, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128,
    "max_target_positions": 128, "max_source_positions": 128,
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rotary_dim": 8,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "chunk_size": 8, "mamba_chunk_size": 8,
    # state spaces and linear attention
    "state_size": 8, "mamba_d_state": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip

_DECODER = {"is_decoder": True}

SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
            "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
        ),
        _DECODER,
    ),
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "xmod": {**_DECODER, "default_language": "en_XX", "languages": ["en_XX"]},
    "reformer": {
        **_DECODER, "attn_layers": ["local", "local", "local"], "axial_pos_embds": False, "hash_seed": 0,
        "local_attn_chunk_length": 8, "feed_forward_size": 96, "attention_head_size": 16,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma4": {"text_config": {"vocab_size_per_layer_input": 512}},
    "gemma4_text": {"vocab_size_per_layer_input": 512},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 512},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mllama": {"text_config": {"cross_attention_layers": []}},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_mem_blocks": 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(kind: str, **over: Any) -> PretrainedConfig:
    """Return a tiny configuration of a causal type; `over` wins over everything."""
    kind_class = CONFIG_MAPPING[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        special = {**SPECIAL.get(kind, {}), **over}
        settings = _merge(_shrunk(kind_class, special), special)
        config = kind_class(**settings)
    return config


def _shrunk(kind_class: Any, special: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `SHRINK` that this class has fields for, with its sub-configurations as dicts."""
    try:
        default = kind_class()
    except Exception:  # the defaults themselves are refused: only the special settings count
        default = kind_class(**special)
    known = {*default.to_dict(), *kind_class.attribute_map}
    settings = {name: value for name, value in SHRINK.items() if name in known}
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # latent attention has one key for all heads
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            settings[name] = _shrunk(type(value), {})
    return settings


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        merged[name] = (
            _merge(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
        )
    return merged


def numel(model: torch.nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())
