"""LoRA: a frozen linear layer and, beside it, a trained product of two thin matrices.

Three acts: from base, forward, merge.

    y  = x W^T + b + s (x A^T) B^T          A [R, I] random, B [O, R] zero, so that training starts at the base model
    dA = (s dy B)^T x      dB = s dy^T (x A^T)      dx = dy W + (s dy B) A
    s  = alpha / sqrt(R)   rank-stabilised (Kalajdzievski 2023, arXiv 2312.03732), or alpha / R (Hu 2021, 2106.09685)

Saved for the backward pass: x itself (the same tensor for q, k, v and for gate, up: one storage however many read it)
and x A^T (R wide). Nothing is cloned or up-cast, no dequantized weight is kept; the low-rank term is added into y in
place. With dropout the mask is made again from its counter, tile by tile, and never saved.

Precision. A and B are kept in fp32 (the optimizer's own copy, whatever the base) and rounded to x's dtype for the
products, which is what makes them as cheap as the base's. The gradients dA and dB are sums over all tokens, and are
summed in fp32: bf16 factors are widened a tile of tokens at a time (a 16-bit result would lose up to 2^-9 of every
element at every micro-batch, before fp32 addition could help).

Shape letters: T tokens, I input features, O output features, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ajusta.blocks.dropout import MASK_BYTES, LoraDropout, keep_mask
from ajusta.blocks.linear import FrozenLinear, shaped_like
from ajusta.blocks.storage import row_tiles


class _LoraProduct(torch.autograd.Function):
    """Base and adapter in one operation, so that x is saved once and y is written once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lora_A: Tensor, lora_B: Tensor, layer: LoraLinear) -> Tensor:
        base, kept = layer.base, _Kept.of(layer)
        x_TI = x.reshape(-1, base.in_features)
        y_TO = base.storage.matmul(x_TI, base.bias)
        low_TR = _into_rank(x_TI, lora_A.to(x.dtype), kept)
        y_TO.addmm_(low_TR, lora_B.to(x.dtype).t(), alpha=layer.scale)
        ctx.layer, ctx.kept = layer, kept
        ctx.save_for_backward(x, low_TR, lora_A, lora_B)
        return shaped_like(y_TO, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        layer: LoraLinear = ctx.layer
        kept: _Kept | None = ctx.kept
        x, low_TR, lora_A, lora_B = ctx.saved_tensors
        dy_TO = dy.reshape(-1, layer.base.out_features)
        x_TI = x.reshape(-1, layer.base.in_features)
        dlow_TR = torch.mm(dy_TO, lora_B.to(dy.dtype)).mul_(layer.scale if kept is None else layer.scale * kept.gain)
        need_x, need_A, need_B, _ = ctx.needs_input_grad
        dA = _sum_outer(dlow_TR, x_TI, lora_A.dtype, kept) if need_A else None
        dB = _sum_outer(dy_TO, low_TR, lora_B.dtype, None).mul_(layer.scale) if need_B else None
        if not need_x:
            return None, dA, dB, None
        dx_TI = layer.base.storage.matmul_transposed(dy_TO)
        _add_from_rank(dx_TI, dlow_TR, lora_A.to(dy.dtype), kept)
        return dx_TI.view(x.shape), dA, dB, None


class LoraLinear(nn.Module):
    """y [..., O] of a `FrozenLinear` plus its adapter. Trainable: `lora_A` [R, I] and `lora_B` [O, R]; `scale` is s."""

    def __init__(
        self, base: FrozenLinear, lora_A: Tensor, lora_B: Tensor, scale: float, dropout: LoraDropout | None = None
    ) -> None:
        super().__init__()
        assert lora_A.shape[1] == base.in_features and lora_B.shape == (base.out_features, lora_A.shape[0])
        self.base = base
        self.lora_A = nn.Parameter(lora_A)
        self.lora_B = nn.Parameter(lora_B)
        self.scale = scale
        self.dropout = dropout

    @classmethod
    def from_base(
        cls,
        base: FrozenLinear,
        *,
        rank: int,
        alpha: float,
        generator: torch.Generator,
        rank_stabilized: bool = True,
        dropout: LoraDropout | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> LoraLinear:
        """Put a fresh adapter beside `base`: A uniform in +-1/sqrt(I) as PEFT draws it (Kaiming, a = sqrt 5), B zero.

        A is drawn on the CPU from `generator` (a CPU one), then moved: the same start on every device.
        """
        device = base.storage.device
        lora_A = torch.empty(rank, base.in_features, dtype=dtype, device=device)
        lora_B = torch.empty(base.out_features, rank, dtype=dtype, device=device)
        layer = cls(base, lora_A, lora_B, lora_scale(rank, alpha, rank_stabilized), dropout)
        layer.restart(generator, device)
        return layer

    @torch.no_grad()
    def restart(self, generator: torch.Generator, device: torch.device) -> None:
        """Draw A anew, put B to zero, and keep both on `device` (a layer made on `meta` gets its numbers by this)."""
        bound = 1 / math.sqrt(self.in_features)
        drawn = torch.empty(self.rank, self.in_features, device="meta" if device.type == "meta" else "cpu")
        drawn.uniform_(-bound, bound, generator=None if drawn.is_meta else generator)
        lora_A = drawn.to(device=device, dtype=self.lora_A.dtype)
        lora_B = torch.zeros(self.out_features, self.rank, dtype=self.lora_B.dtype, device=device)
        self.lora_A, self.lora_B = nn.Parameter(lora_A), nn.Parameter(lora_B)

    @property
    def weight(self) -> Tensor:
        """Refuse, as the base does.

        Raises:
            ModelError: always.
        """
        return self.base.weight

    @property
    def rank(self) -> int:
        """R."""
        return self.lora_A.shape[0]

    @property
    def in_features(self) -> int:
        """I."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.base.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., O] in x's dtype. Dropout is on in training mode only."""
        y: Tensor = _LoraProduct.apply(x, self.lora_A, self.lora_B, self)
        return y

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return what the adapter adds to W, s B A [O, I], in the adapter's dtype."""
        return torch.mm(self.lora_B, self.lora_A).mul_(self.scale)

    @torch.no_grad()
    def merged(self, dtype: torch.dtype) -> Tensor:
        """Return W + s B A as `dtype` [O, I], a new tensor.

        Summed in the adapter's dtype (fp32) a tile of rows at a time and rounded once: beyond the result it holds at
        most `storage.TILE_BYTES` and what the storage needs to expand such a tile.
        """
        storage, wide = self.base.storage, self.lora_A.dtype
        merged = torch.empty(self.out_features, self.in_features, dtype=dtype, device=storage.device)
        for start, stop in row_tiles(self.out_features, 2 * self.in_features * wide.itemsize, merged.device):
            tile = torch.addmm(storage.rows(start, stop, wide), self.lora_B[start:stop], self.lora_A, alpha=self.scale)
            merged[start:stop].copy_(tile)
        return merged

    def extra_repr(self) -> str:
        """Show the rank and the effective scale."""
        return f"rank={self.rank}, scale={self.scale:g}"


def lora_scale(rank: int, alpha: float, rank_stabilized: bool) -> float:
    """Return s: alpha / sqrt(rank) rank-stabilised, alpha / rank otherwise."""
    return alpha / math.sqrt(rank) if rank_stabilized else alpha / rank


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Which numbers of one x [T, I] dropout keeps: made again from `keys_T` for every tile of tokens, never stored."""

    keys_T: Tensor
    probability: float
    num_features: int

    @classmethod
    def of(cls, layer: LoraLinear) -> _Kept | None:
        """Return the mask of the micro-batch now passing through, or None where nothing is dropped."""
        if layer.dropout is None or not layer.training:
            return None
        keys_T, probability = layer.dropout.row_keys(), layer.dropout.probability
        return cls(keys_T=keys_T, probability=probability, num_features=layer.in_features)

    @property
    def gain(self) -> float:
        """1 / (1 - p). It goes into the thin factors, never into the mask, where bf16 would round it."""
        return 1 / (1 - self.probability)

    def tiles(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        """Yield (tokens, their mask of ones and zeros as `dtype` [t, I], to be written over)."""
        for start, stop in row_tiles(len(self.keys_T), self.num_features * MASK_BYTES, self.keys_T.device):
            yield slice(start, stop), keep_mask(self.keys_T[start:stop], self.num_features, self.probability, dtype)


def _into_rank(x_TI: Tensor, lora_A: Tensor, kept: _Kept | None) -> Tensor:
    """Return (x * keep) A^T / (1 - p) [T, R]."""
    if kept is None:
        return torch.mm(x_TI, lora_A.t())
    low_TR = x_TI.new_empty(len(x_TI), len(lora_A))
    for tokens, mask in kept.tiles(x_TI.dtype):
        torch.mm(mask.mul_(x_TI[tokens]), lora_A.t(), out=low_TR[tokens])
    return low_TR.mul_(kept.gain)


def _sum_outer(left_TM: Tensor, right_TN: Tensor, dtype: torch.dtype, kept: _Kept | None) -> Tensor:
    """Return left^T (right * keep) [M, N] as `dtype`, summed over the tokens in `dtype` or wider; a new tensor."""
    wide = torch.promote_types(left_TM.dtype, dtype)
    if kept is None and wide == left_TM.dtype:
        return torch.mm(left_TM.t(), right_TN).to(dtype)
    total = torch.zeros(left_TM.shape[1], right_TN.shape[1], dtype=wide, device=left_TM.device)
    if kept is None:
        for start, stop in row_tiles(len(left_TM), sum(total.shape) * wide.itemsize, left_TM.device):
            total.addmm_(left_TM[start:stop].to(wide).t(), right_TN[start:stop].to(wide))
    else:
        for tokens, mask in kept.tiles(wide):
            total.addmm_(left_TM[tokens].to(wide).t(), mask.mul_(right_TN[tokens]))
    return total.to(dtype)


def _add_from_rank(dx_TI: Tensor, dlow_TR: Tensor, lora_A: Tensor, kept: _Kept | None) -> None:
    """Add (dlow A) * keep into dx, in place; dlow already holds 1 / (1 - p)."""
    if kept is None:
        dx_TI.addmm_(dlow_TR, lora_A)
        return
    for tokens, mask in kept.tiles(dx_TI.dtype):
        dx_TI[tokens].addcmul_(torch.mm(dlow_TR[tokens], lora_A), mask)
