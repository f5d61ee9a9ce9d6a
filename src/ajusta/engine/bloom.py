"""Bloom's attention, made of ours: transformers gives this family no attention interface and a full T x T softmax.

The module keeps the names of the original's linears, so that adapters and weights have the same paths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from ajusta.blocks.attention import attention


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head, fp32 [heads] (Press 2021, arXiv 2108.12409, section 3 and its footnote).

    A geometric series from 2^(-8/n) for a power of two n; further heads take every other term of the series of 2n.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


class SegmentBloomAttention(nn.Module):
    """Bloom's attention with ALiBi as a per-key bias; [B, T, H] in and out, residual added as in the original."""

    def __init__(self, original: BloomAttention) -> None:
        super().__init__()
        self.query_key_value = original.query_key_value
        self.dense = original.dense
        self.layer_idx = original.layer_idx
        self.num_heads = original.num_heads
        self.head_dim = original.head_dim
        self.is_causal = True
        self._slopes = alibi_slopes(original.num_heads)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor | None = None,
        attention_mask: Tensor | None = None,
        layer_past: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Attend; `alibi` and `attention_mask` are ignored, the layout in force says what sees what."""
        batch, length, _ = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(batch, length, self.num_heads, 3, self.head_dim)
        query, key, value = (fused[..., i, :].transpose(1, 2) for i in range(3))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        slopes = self._slopes.to(query.device, copy=True)  # a copy everywhere, so that every place counts the same
        out, _ = attention(self, query, key, value, alibi_slopes=slopes)
        return residual + self.dense(out.reshape(batch, length, -1)), None


def replace_attention(model: PreTrainedModel) -> int:
    """Put our attention in the place of each `BloomAttention`; return how many there were."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, BloomAttention)]
    for name, module in found:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, SegmentBloomAttention(module))
    return len(found)
