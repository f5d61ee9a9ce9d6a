"""RMSNorm (Zhang 2019, arXiv 1910.07467) that keeps its input and one number a row.

    r = 1 / sqrt(mean(x^2) + eps)        y = w x r
    dx = r (w dy) - x r^3 mean(x (w dy))        dw = sum of dy x r over the rows, where the weight is trained

transformers' own keeps several copies of x, one of them in fp32. The forward pass here is the same operations in the
same order, so its values are the same bits. Families differ in small ways (a weight of 1 + w, rounding before or after
the product); `RmsNorm.like` finds out by trying which variant a module is, and leaves alone what is none of them.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`offset` is added to the weight; `wide` says that the product with it is taken before rounding."""

    offset: float
    wide: bool


VARIANTS = tuple(Variant(offset=offset, wide=wide) for offset in (0.0, 1.0) for wide in (False, True))


def _normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x r and r, fp32 or wider."""
    wide = x.float() if x.dtype in _NARROW else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))
    return wide * scale, scale


def _weigh(normal: Tensor, weight: Tensor, variant: Variant, dtype: torch.dtype) -> Tensor:
    if variant.wide:
        return (normal * (weight.to(normal.dtype) + variant.offset)).to(dtype)
    return (weight + variant.offset if variant.offset else weight) * normal.to(dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, variant: Variant) -> Tensor:
        normal, scale = _normalize(x, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = variant.offset
        return _weigh(normal, weight, variant, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        wide = x.float() if x.dtype in _NARROW else x
        weighed = grads[0].to(wide.dtype) * (weight.to(wide.dtype) + ctx.offset)
        inner = torch.linalg.vecdot(weighed, wide).unsqueeze(-1)
        inner.mul_(scale.pow(3)).div_(x.shape[-1])
        grad_weight = None
        if ctx.needs_input_grad[1]:
            by_row = grads[0].to(wide.dtype).mul(wide).mul_(scale)
            grad_weight = by_row.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
            del by_row
        grad = weighed.mul_(scale).addcmul_(wide, inner, value=-1).to(x.dtype)
        return grad, grad_weight, None, None


class RmsNorm(nn.Module):
    """y [..., H] of x [..., H]; `weight` [H] is called as in the module that this one replaces."""

    def __init__(self, weight: nn.Parameter, eps: float, variant: Variant) -> None:
        super().__init__()
        self.weight, self.eps, self.variant = weight, eps, variant

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        y: Tensor = _RmsNorm.apply(x, self.weight, self.eps, self.variant)
        return y

    @classmethod
    def like(cls, module: nn.Module) -> RmsNorm | None:
        """Return the equal of an RMSNorm module, or None if it is none; told by trying, in fp32 and in bf16."""
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = module._parameters.get("weight")
        if not isinstance(eps, float) or weight is None or len(module._parameters) != 1 or weight.dim() != 1:
            return None
        if next(module.children(), None) is not None or isinstance(module, nn.LayerNorm):
            return None
        if len(inspect.signature(module.forward).parameters) != 1:
            return None  # a gated norm, which may do without its gate when tried and be given one later
        variant = _variant_of(module, eps)
        return None if variant is None else cls(weight, eps, variant)


_found: dict[tuple[type[nn.Module], str, float], Variant | None] = {}  # norms of one class and size are alike


def _variant_of(module: nn.Module, eps: float) -> Variant | None:
    key = (type(module), repr(module), eps)
    if key not in _found:
        dtypes = (torch.float32, torch.bfloat16)
        alike = (v for v in VARIANTS if all(_same(module, eps, v, dtype) for dtype in dtypes))
        _found[key] = next(alike, None)
    return _found[key]


def _same(module: nn.Module, eps: float, variant: Variant, dtype: torch.dtype) -> bool:
    """Say whether this variant gives the module's own bits on a few made-up numbers."""
    width = module.get_parameter("weight").shape[0]
    with torch.no_grad():
        twin = copy.deepcopy(module).to_empty(device="cpu").to(dtype)
        steps = torch.arange(width, dtype=torch.float32, device="cpu")
        twin.get_parameter("weight").copy_(torch.cos(steps * 0.7) * 0.5 + 0.75)
        x = torch.stack([torch.sin(steps * 1.3), torch.cos(steps * steps) * 3.0]).to(dtype)
        try:
            wanted = twin(x)
        except (TypeError, RuntimeError, ValueError):
            return False
        ours = rms_norm(x, twin.get_parameter("weight"), eps, variant)
    return isinstance(wanted, Tensor) and wanted.dtype == ours.dtype and torch.equal(wanted, ours)


def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: Variant) -> Tensor:
    """Return the norm's value alone; the plain twin of the operation above."""
    return _weigh(_normalize(x, eps)[0], weight, variant, x.dtype)
