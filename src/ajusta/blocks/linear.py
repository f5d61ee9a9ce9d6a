"""A linear layer whose weight is frozen: it costs no saved activation, in whatever format the weight is kept.

    y = x W^T + b,    dx = dy W

`torch.nn.functional.linear` on a dequantized weight would keep that weight alive until the backward pass; here the
backward expands it again. Nothing of x is saved (source: shared/MEMORY.md 2.2).
Shape letters: T tokens (all leading dimensions of x flattened), I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ajusta.blocks.quantize import quantize
from ajusta.blocks.storage import Dense, Storage


class _FrozenProduct(torch.autograd.Function):
    """x W^T + b with nothing saved: the storage itself (not its tensors) is remembered, so weights may be streamed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, storage: Storage, bias_O: Tensor | None) -> Tensor:
        ctx.storage = storage
        y_TO = storage.matmul(x.reshape(-1, storage.in_features), bias_O)
        return y_TO.view(*x.shape[:-1], storage.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        storage: Storage = ctx.storage
        if not ctx.needs_input_grad[0]:
            return None, None, None
        dx_TI = storage.matmul_transposed(dy.reshape(-1, storage.out_features))
        return dx_TI.view(*dy.shape[:-1], storage.in_features), None, None


class FrozenLinear(nn.Module):
    """y [..., O] = x [..., I] W^T + b with a frozen W (a `Storage`) and a frozen b."""

    def __init__(self, storage: Storage, bias_O: Tensor | None = None) -> None:
        super().__init__()
        self.storage = storage
        self.bias = bias_O if bias_O is None or isinstance(bias_O, nn.Parameter) else nn.Parameter(bias_O, False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @classmethod
    def from_module(cls, module: nn.Module, kind: str = "none") -> FrozenLinear:
        """Take over the weight of an `nn.Linear` or a transformers `Conv1D`, quantized as `kind` (none | int8 | nf4).

        Raises:
            TypeError: the module is neither (a mistake of ours: callers pick modules with `is_linear`).
            ModelError: the weight holds an infinity or NaN and is to be quantized.
        """
        if not is_linear(module):
            raise TypeError(f"{type(module).__name__} is no linear layer")
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        transposed = is_conv1d(module)
        if kind == "none":
            return cls(Dense(weight, transposed=transposed), bias)
        return cls(quantize(weight.detach().t() if transposed else weight.detach(), kind), bias)

    @property
    def in_features(self) -> int:
        """I."""
        return self.storage.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.storage.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., O] in x's dtype."""
        y: Tensor = _FrozenProduct.apply(x, self.storage, self.bias)
        return y


def is_conv1d(module: nn.Module) -> bool:
    """Say whether this is transformers' `Conv1D` (weight [I, O]); told by name, so that blocks/ imports torch only."""
    return any((kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D") for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Say whether the module computes x W^T + b with one 2-D weight: `nn.Linear`, `Conv1D` and their subclasses."""
    return isinstance(module, nn.Linear) or is_conv1d(module)
