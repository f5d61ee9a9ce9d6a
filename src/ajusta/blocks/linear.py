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
        return shaped_like(y_TO, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        storage: Storage = ctx.storage
        if not ctx.needs_input_grad[0]:
            return None, None, None
        dx_TI = storage.matmul_transposed(dy.reshape(-1, storage.out_features))
        return dx_TI.view(*dy.shape[:-1], storage.in_features), None, None


def shaped_like(y_TO: Tensor, x: Tensor) -> Tensor:
    """Return y [T, O] in x's leading dimensions [..., O], without a copy; `y_TO` itself must not be used any more.

    Not `view`: models write into a layer's output (Falcon adds its branches in place), which autograd forbids for a
    view made inside an operation of ours. torch's own `linear` returns its result by the same operation.
    """
    y: Tensor = torch.ops.aten._unsafe_view.default(y_TO, [*x.shape[:-1], y_TO.shape[-1]])
    return y


class FrozenLinear(nn.Module):
    """y [..., O] = x [..., I] W^T + b with a frozen W (a `Storage`) and a frozen b.

    `transposed`: the model's files hold W as [I, O] (`Conv1D`), whatever the storage makes of it.
    """

    def __init__(self, storage: Storage, bias_O: Tensor | None = None, *, transposed: bool = False) -> None:
        super().__init__()
        self.storage = storage
        self.transposed = transposed
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
        return cls(_store(weight, kind, transposed), bias, transposed=transposed)

    def fill(self, weight: Tensor) -> None:
        """Take a weight as the model's files hold it ([O, I], or [I, O] where `transposed`), in the present format.

        This is how a layer made on `meta` gets its numbers: quantized on arrival, the given tensor is not kept then.

        Raises:
            ModelError: the weight holds an infinity or NaN and is to be quantized.
        """
        expected = (self.out_features, self.in_features)
        assert tuple(weight.shape) == (expected[::-1] if self.transposed else expected), "the loader checks shapes"
        self.storage = _store(weight, self.storage.kind, self.transposed)

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


def _store(weight: Tensor, kind: str, transposed: bool) -> Storage:
    if kind == "none":
        return Dense(weight, transposed=transposed)
    return quantize(weight.detach().t() if transposed else weight.detach(), kind)


def is_conv1d(module: nn.Module) -> bool:
    """Say whether this is transformers' `Conv1D` (weight [I, O]); told by name, so that blocks/ imports torch only."""
    conv1d = ("transformers.pytorch_utils", "Conv1D")
    return any((kind.__module__, kind.__name__) == conv1d for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Say whether the module computes x W^T + b with one 2-D weight: `nn.Linear`, `Conv1D` and their subclasses."""
    return isinstance(module, nn.Linear) or is_conv1d(module)
