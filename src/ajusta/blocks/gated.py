"""The gated MLP (Shazeer 2020, arXiv 2002.05202) that keeps gate and up, and neither the activation nor the product.

    p = act(g) * u        y = down(p)         dg = dp * u * act'(g)        du = dp * act(g)

p is the input of down's adapter; it is made again from g and u when its gradient is taken (blocks/rebuild.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ajusta.blocks.rebuild import remember

_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return _product(gate, up, act)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            start = gate.detach().requires_grad_(True)
            active = ctx.act(start)
        (grad_gate,) = torch.autograd.grad(active, start, grads[0] * up)
        return grad_gate, active.detach().mul_(grads[0]), None


def _product(gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
    active: Tensor = act(gate)
    return active.mul_(up) if active is not gate else active * up


def gated_product(gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
    """Return act(gate) * up, two tensors of one shape; only they are kept, and the product leaves its recipe."""
    product: Tensor = _GatedProduct.apply(gate, up, act)
    kept_gate, kept_up = gate.detach(), up.detach()
    remember(product, lambda: _product(kept_gate, kept_up, act))
    return product


class GatedMlp(nn.Module):
    """y [..., H] of x [..., H]; holds the replaced module's own layers under their own names."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.gate_proj = original.get_submodule("gate_proj")
        self.up_proj = original.get_submodule("up_proj")
        self.down_proj = original.get_submodule("down_proj")
        self.act_fn = original.get_submodule("act_fn")

    def forward(self, x: Tensor) -> Tensor:
        """Return down(act(gate(x)) * up(x))."""
        y: Tensor = self.down_proj(gated_product(self.gate_proj(x), self.up_proj(x), self.act_fn))
        return y


def is_gated_mlp(module: nn.Module) -> bool:
    """Say whether the module is made of exactly the four parts of a gated MLP; `engine/lean.py` tries the values."""
    return {name for name, _ in module.named_children()} == _PARTS and not module._parameters
