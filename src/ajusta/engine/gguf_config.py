"""GGUF metadata -> a transformers configuration, one small function a family.

llama.cpp keeps what its own graphs need: the keys are `<architecture>.<name>`. What it leaves out and transformers
wants is restored here, or the file is refused; nothing is guessed in silence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from transformers import AutoConfig, PretrainedConfig

from ajusta.base.errors import ModelError, nearest
from ajusta.engine.gguf_header import GgufHeader, number
from ajusta.engine.weights_base import one_line
from ajusta.engine.weights_config import causal_class_names

Settings = dict[str, object]
# Llama 3's smooth band, the same in all releases; only the factor differs. transformers: _compute_llama3_parameters.
_YARN_UNREAD = ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier", "yarn_ext_factor")
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """The metadata of one architecture; `rope_freqs` are Llama 3's divisors of the frequencies, where stored."""

    architecture: str
    header: GgufHeader
    rope_freqs: NDArray[np.float32] | None

    def integer(self, key: str, default: int | None = None) -> int:
        """Return `<architecture>.<key>` as an integer."""
        return int(number(self.header.metadata, f"{self.architecture}.{key}", default))

    def real(self, key: str, default: float | None = None) -> float:
        """Return `<architecture>.<key>` as a float."""
        return float(number(self.header.metadata, f"{self.architecture}.{key}", default))

    def get(self, key: str) -> object:
        """Return `<architecture>.<key>` or None."""
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def has(self, tensor: str) -> bool:
        """Tell whether the file holds this tensor."""
        return tensor in self.header.tensors


def _decoder(reader: _Reader) -> Settings:
    """Return what every rotary decoder has (Llama, Qwen, Gemma, Phi)."""
    heads = reader.integer("attention.head_count")
    hidden = reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", hidden // heads)
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError("this GGUF has values and keys of different size; expected one head size; use its safetensors")
    if reader.integer("expert_count", 0) > 0:
        raise ModelError("this GGUF is a Mixture-of-Experts model, not read yet; expected a dense one")
    return {
        "hidden_size": hidden,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.integer("context_length"),
        "rms_norm_eps": reader.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(reader, head_dim),
    }


def _llama(reader: _Reader) -> Settings:
    biases = {"attention_bias": reader.has("blk.0.attn_q.bias"), "mlp_bias": reader.has("blk.0.ffn_up.bias")}
    return _decoder(reader) | biases


def _qwen2(reader: _Reader) -> Settings:
    return _decoder(reader)


def _qwen3(reader: _Reader) -> Settings:
    return _decoder(reader) | {"attention_bias": reader.has("blk.0.attn_q.bias")}


def _gemma2(reader: _Reader) -> Settings:
    settings = _decoder(reader)
    heads, layers = reader.integer("attention.head_count"), reader.integer("block_count")
    # llama.cpp stores no query_pre_attn_scalar: it scales by the head size, except in the 27B model (46 layers),
    # where Google divides by hidden size / heads.
    scalar = reader.integer("embedding_length") // heads if layers == 46 else settings["head_dim"]
    return settings | {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": reader.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.real("final_logit_softcapping", 30.0),
        "sliding_window": reader.integer("attention.sliding_window", 4096),
    }


def _phi3(reader: _Reader) -> Settings:
    settings = _decoder(reader)
    settings.pop("head_dim")  # Phi-3 derives it
    window = reader.integer("attention.sliding_window", 0)
    original = reader.integer("rope.scaling.original_context_length", reader.integer("context_length"))
    return settings | {"sliding_window": window or None, "original_max_position_embeddings": original}


def _gpt2(reader: _Reader) -> Settings:
    return {
        "n_embd": reader.integer("embedding_length"),
        "n_layer": reader.integer("block_count"),
        "n_head": reader.integer("attention.head_count"),
        "n_inner": reader.integer("feed_forward_length"),
        "n_positions": reader.integer("context_length"),
        "layer_norm_epsilon": reader.real("attention.layer_norm_epsilon"),
    }


def _bloom(reader: _Reader) -> Settings:
    return {
        "hidden_size": reader.integer("embedding_length"),
        "n_layer": reader.integer("block_count"),
        "n_head": reader.integer("attention.head_count"),
        "seq_length": reader.integer("context_length"),
        "layer_norm_epsilon": reader.real("attention.layer_norm_epsilon"),
    }


_FAMILIES: dict[str, Callable[[_Reader], Settings]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "bloom": _bloom,
}
ARCHITECTURES = tuple(_FAMILIES)


def config_of(header: GgufHeader, rope_freqs: NDArray[np.float32] | None, where: str) -> PretrainedConfig:
    """Return the transformers configuration that a GGUF header describes.

    Args:
        header: what `read_header` returned.
        rope_freqs: the values of the tensor `rope_freqs.weight`, [head_dim / 2], where the file has one.
        where: the file, for messages.

    Raises:
        ModelError: unknown architecture, a split or adapter file, a position scheme that is not read.
    """
    metadata = header.metadata
    architecture = _architecture(metadata, where)
    reader = _Reader(architecture=architecture, header=header, rope_freqs=rope_freqs)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{where} has no tensor token_embd.weight; expected a whole language model; fetch it again")
    try:
        if not 0 < reader.integer("block_count") <= len(header.tensors):  # before anything is built that many times
            raise ModelError(
                f"{len(header.tensors)} tensors cannot be {reader.integer('block_count')} blocks; fetch it again"
            )
        settings = _FAMILIES[architecture](reader)
        config: PretrainedConfig = AutoConfig.for_model(
            architecture,
            **settings,
            vocab_size=embedding.shape[0],
            tie_word_embeddings="output.weight" not in header.tensors,
            bos_token_id=token_id(metadata, "bos"),
            eos_token_id=token_id(metadata, "eos"),
            pad_token_id=token_id(metadata, "padding"),
        )
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    except (ValueError, TypeError, KeyError, ArithmeticError, StrictDataclassError) as error:
        raise ModelError(
            f"{where} describes an impossible {architecture} model ({one_line(error)}); fetch it again"
        ) from error
    config.architectures = causal_class_names(architecture)
    return config


def generation_of(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return what generation_config.json would say: begin and pad tokens, and every end token that the file names."""
    ends = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    found = {
        "bos_token_id": token_id(metadata, "bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": token_id(metadata, "padding"),
    }
    return {key: value for key, value in found.items() if value is not None}


def token_id(metadata: Mapping[str, object], name: str) -> int | None:
    """Return `tokenizer.ggml.<name>_token_id`, or None where it is missing or out of the vocabulary."""
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(value, int) or (isinstance(tokens, list) and value >= len(tokens)):
        return None
    return value


def _architecture(metadata: Mapping[str, object], where: str) -> str:
    if metadata.get("general.type", "model") != "model":
        raise ModelError(
            f"{where} is of the type {_short(metadata['general.type'])}; expected a whole model; give the base model's "
            f"file"
        )
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(f"{where} is one of {parts} parts; expected one file; join them with llama-gguf-split --merge")
    architecture = metadata.get("general.architecture")
    if architecture not in _FAMILIES:
        near = nearest(str(architecture), _FAMILIES)
        raise ModelError(
            f"{where} has the GGUF architecture {_short(architecture)}; expected one of {', '.join(_FAMILIES)}{near}; "
            f"use the model's safetensors folder instead"
        )
    return str(architecture)


def _short(value: object) -> str:
    """Show a value of the file: as it stands in Python, and never long."""
    return ascii(value)[:60]


def _rope(reader: _Reader, head_dim: int) -> Settings:
    rotated = reader.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"only {rotated} of {head_dim} head dimensions are rotated; expected all; use its safetensors")
    rope: Settings = {"rope_type": "default", "rope_theta": reader.real("rope.freq_base", 10000.0)}
    if reader.has("rope_factors_long.weight") or reader.has("rope_factors_short.weight"):
        raise ModelError("longrope positions are not read from GGUF; expected plain, linear, yarn or Llama 3 scaling")
    if reader.rope_freqs is not None:
        return rope | _llama3_scaling(reader.rope_freqs, float(str(rope["rope_theta"])), head_dim)
    kind = reader.get("rope.scaling.type")
    if kind in (None, "none"):
        legacy = reader.real("rope.scale_linear", 1.0)
        return rope if legacy == 1.0 else rope | {"rope_type": "linear", "factor": legacy}
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": reader.real("rope.scaling.factor")}
    if kind == "yarn":
        return rope | _yarn(reader)
    raise ModelError(f"rope scaling {_short(kind)} is not read from GGUF; expected none, linear, yarn or Llama 3's")


def _yarn(reader: _Reader) -> Settings:
    for key in (f"rope.scaling.{name}" for name in _YARN_UNREAD):
        if reader.get(key) not in (None, 1.0):
            raise ModelError(f"yarn with {key} = {reader.get(key)!r} is not read; use the model's safetensors folder")
    rope: Settings = {
        "rope_type": "yarn",
        "factor": reader.real("rope.scaling.factor"),
        "original_max_position_embeddings": reader.integer("rope.scaling.original_context_length"),
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if reader.get(f"rope.scaling.{theirs}") is not None:
            rope[ours] = reader.real(f"rope.scaling.{theirs}")
    return rope


def _llama3_scaling(stored: NDArray[np.float32], theta: float, head_dim: int) -> Settings:
    """Recover Llama 3's scaling from the divisors that llama.cpp stores in its place, and prove that it gives them."""
    if stored.shape != (head_dim // 2,):
        raise ModelError(f"rope_freqs.weight has {stored.size} values; expected {head_dim // 2}; fetch the file again")
    factor = float(str(np.float32(stored.max())))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (_LLAMA3_CONTEXT / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(stored, expected, rtol=1e-4, atol=0.0):
        raise ModelError(
            "rope_freqs.weight is not Llama 3's scaling; expected that one; use the model's safetensors folder"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
