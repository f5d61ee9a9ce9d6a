"""Causal attention inside segments: examples laid end to end in one row never see each other.

    out_i = softmax_j(scale * q_i k_j + bias_ij) v_j      over j <= i of the same segment

T tokens lie in one row; `Segments.ends` cuts it. Each segment is one call of the flash kernel (Dao 2022,
arXiv 2205.14135), so no T x T matrix exists, nothing is computed across a border, and grouped-query heads (Ainslie
2023, arXiv 2305.13245) share their keys without a copy. The forward keeps q, k, v, out and one number per row; the
backward redoes the rest. ALiBi (Press 2021, arXiv 2108.12409) is a bias per key, since softmax ignores what is constant
along a row.

The segments of the moment are held in a context variable, because most model families do not hand keyword arguments
down to their attention. The engine sets it around each block, in the forward pass and in the recompute alike.

Models with soft-capped or sink logits take the plain way (`plain_attention`), which holds a full matrix per segment;
it is also the yardstick that the flash way is tested against.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ajusta.base.errors import ModelError
from ajusta.memory.ledger import device_kind

ATTENTION_NAME = "ajusta"
# What may come as a tensor among the options: the two that are used, and two that are of no concern to attention.
_TENSOR_OPTIONS = ("alibi_slopes", "s_aux", "position_ids", "cache_position")


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where examples end in a row of T tokens; ascending, the last is T."""

    ends: tuple[int, ...]

    def bounds(self) -> list[tuple[int, int]]:
        """Return (start, end) of each segment."""
        return list(zip((0, *self.ends[:-1]), self.ends, strict=True))


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Rows of different lengths, padded on the left, that grow by a cache. `valid_BK` tells real keys from padding."""

    valid_BK: Tensor  # bool [B, keys so far]


_layout: ContextVar[Segments | Generation | None] = ContextVar("attention_layout", default=None)


@contextlib.contextmanager
def using(layout: Segments | Generation) -> Iterator[None]:
    """Make this the layout of the rows that pass through attention inside."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' `AttentionInterface` asks: [B, heads, T, head_dim] in, [B, T, heads, head_dim] out.

    The layout in force says what sees what; transformers builds no mask for an attention of this name. `dropout` is the
    base model's own, which is off in fine-tuning.

    Raises:
        ModelError: the family attends in both directions, or makes a mask of its own (sparse attention, position bias).
    """
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} makes an attention mask of its own")
    unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in _TENSOR_OPTIONS]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which ours does not know"
        )
    bias = AttentionBias(
        slopes=options.get("alibi_slopes"),
        window=_window(module, options),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layout = _layout.get()
    if isinstance(layout, Generation):
        return _attend_with_cache(query, key, value, scale, bias, layout).transpose(1, 2), None
    segments = layout or Segments(ends=(query.shape[2],))
    if key.shape[2] != query.shape[2]:
        raise ModelError(f"{type(module).__name__} attends to keys that are no tokens of the row")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(f"{type(module).__name__} attends in both directions; only causal models can be trained")
    if bias.needs_matrix or value.shape[-1] != query.shape[-1] or query.shape[0] != 1:
        return plain_attention(query, key, value, scale, segments, bias).transpose(1, 2).contiguous(), None
    out = SegmentAttention.apply(query, key, value, scale, segments, bias)
    return out.transpose(1, 2), None


def _window(module: torch.nn.Module, options: Mapping[str, Any]) -> int | None:
    """Return how many tokens a token sees, where a family says so: in the call, on the module, or in its mask only."""
    if "sliding_window" in options:  # None is an answer too: full-attention layers may still carry the number
        given: int | None = options["sliding_window"]
        return given
    if hasattr(module, "sliding_window"):
        own: Any = module.sliding_window
        return None if own is None else int(own)
    config = getattr(module, "config", None)
    makes_windows = hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    uniform = makes_windows and not getattr(config, "layer_types", None)
    said: int | None = getattr(config, "sliding_window", None)
    return said if uniform else None


@dataclass(frozen=True, kw_only=True)
class AttentionBias:
    """What is added to the logits besides the causal border. `slopes` [heads] is ALiBi's, `window` is in tokens."""

    slopes: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def needs_matrix(self) -> bool:
        """Whether only the plain way can compute it."""
        return self.softcap is not None or self.sinks is not None

    def matrix(self, length: int, like: Tensor) -> Tensor | None:
        """Return the additive bias of one segment, broadcastable to [1, heads, length, length], or None."""
        bias = None
        if self.slopes is not None:
            positions = torch.arange(length, device=like.device, dtype=like.dtype)
            bias = (self.slopes.to(like)[:, None] * positions)[None, :, None, :].expand(1, -1, length, length)
        if self.window is not None and length > self.window:
            rows = torch.arange(length, device=like.device)
            outside = rows[:, None] - rows[None, :] >= self.window
            hidden = torch.zeros(length, length, dtype=like.dtype, device=like.device)
            hidden = hidden.masked_fill_(outside, torch.finfo(like.dtype).min)[None, None]
            bias = hidden if bias is None else bias + hidden
        return bias


class SegmentAttention(torch.autograd.Function):
    """The flash way, one kernel call a segment; q [1, Hq, T, D], k and v [1, Hkv, T, D], out as q."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Segments, bias: AttentionBias
    ) -> Tensor:
        """Return out [1, Hq, T, D]; keep the inputs, out and the log-sum-exp of each row."""
        outs, sums = [], []
        for start, end in segments.bounds():
            q, k, v = (t[:, :, start:end] for t in (query, key, value))
            out, log_sum = _flash_forward(q, k, v, scale, bias)
            outs.append(out)
            sums.append(log_sum)
        out = _join(outs)
        log_sum = sums[0] if len(sums) == 1 else torch.cat(sums, dim=2)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale, ctx.segments, ctx.bias = scale, segments, bias
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        query, key, value, out, log_sum = ctx.saved_tensors
        parts = []
        for start, end in ctx.segments.bounds():
            grad, q, k, v, o, s = (t[:, :, start:end] for t in (grads[0], query, key, value, out, log_sum))
            parts.append(_flash_backward(grad, q, k, v, o, s, ctx.scale, ctx.bias))
        if len(parts) == 1:
            return (*parts[0], None, None, None)
        grad_q, grad_k, grad_v = (torch.cat(pieces, dim=2) for pieces in zip(*parts, strict=True))
        return grad_q, grad_k, grad_v, None, None, None


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Segments, bias: AttentionBias
) -> Tensor:
    """Do the same with a full matrix per segment; the twin of `SegmentAttention`, and the way for odd logits."""
    groups = query.shape[1] // key.shape[1]
    outs = []
    for start, end in segments.bounds():
        q, k, v = (t[:, :, start:end] for t in (query, key, value))
        k, v = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v))
        logits = torch.matmul(q, k.transpose(-1, -2)) * scale
        if bias.softcap is not None:
            logits = torch.tanh(logits / bias.softcap) * bias.softcap
        added = bias.matrix(end - start, logits)
        if added is not None:
            logits = logits + added
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu_(1)
        logits = logits.masked_fill(future, torch.finfo(logits.dtype).min)
        outs.append(torch.matmul(_softmax(logits, bias.sinks).to(v.dtype), v))
    return _join(outs)


def _join(outs: list[Tensor]) -> Tensor:
    """Lay segments [1, heads, S, D] end to end, each token's heads side by side in memory as the kernel has them."""
    if len(outs) == 1:
        return outs[0]
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1).transpose(1, 2)


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if sinks is None:
        return torch.softmax(wide, dim=-1)
    sink = sinks.to(wide).reshape(1, -1, 1, 1).expand(wide.shape[0], -1, wide.shape[2], 1)
    return torch.softmax(torch.cat((wide, sink), dim=-1), dim=-1)[..., :-1]


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: AttentionBias) -> Any:
    added = bias.matrix(query.shape[2], query)
    if device_kind(query.device) == "cuda":
        return _cuda_forward(query, key, value, scale, added)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, attn_mask=added, scale=scale
    )


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float,
    bias: AttentionBias,
) -> Any:
    added = bias.matrix(query.shape[2], query)
    if device_kind(query.device) == "cuda":
        return _cuda_backward(grad, query, key, value, out, log_sum, scale, added)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, log_sum, 0.0, True, attn_mask=added, scale=scale
    )


def _cuda_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    key, value = (_repeat(t, query.shape[1]) for t in (key, value))
    out, log_sum, _seed, _offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, True, scale=scale
    )
    return out, log_sum[:, :, : query.shape[2]]


def _cuda_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = (_repeat(t, query.shape[1]) for t in (key, value))
    padded = functional.pad(log_sum, (0, -log_sum.shape[-1] % 32), value=float("inf"))  # the kernel reads rows of 32
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        wide_key,
        wide_value,
        bias,
        out,
        padded,
        zero,
        zero,
        0.0,
        [True, True, True, False],
        True,
        scale=scale,
    )
    if groups > 1:
        grad_k, grad_v = (g.unflatten(1, (-1, groups)).sum(2) for g in (grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _repeat(heads: Tensor, count: int) -> Tensor:
    groups = count // heads.shape[1]
    return heads.repeat_interleave(groups, dim=1) if groups > 1 else heads


def _attend_with_cache(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: AttentionBias, layout: Generation
) -> Tensor:
    """Attend over a cache: new tokens are the last ones of each row; padding lies on the left and is never seen."""
    queries, keys = query.shape[2], key.shape[2]
    rows = torch.arange(keys - queries, keys, device=query.device)[:, None]
    columns = torch.arange(keys, device=query.device)[None, :]
    seen = (columns <= rows)[None] & layout.valid_BK[:, None, -keys:]
    if bias.window is not None:
        seen = seen & (rows - columns < bias.window)[None]
    key, value = (_repeat(t, query.shape[1]) for t in (key, value))
    logits = torch.matmul(query, key.transpose(-1, -2)) * scale
    if bias.softcap is not None:
        logits = torch.tanh(logits / bias.softcap) * bias.softcap
    if bias.slopes is not None:
        logits = logits + bias.slopes.to(logits)[None, :, None, None] * columns.to(logits.dtype)
    logits = logits.masked_fill(~seen[:, None], torch.finfo(logits.dtype).min)
    return torch.matmul(_softmax(logits, bias.sinks).to(value.dtype), value)
