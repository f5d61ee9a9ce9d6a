"""A linear layer whose weight is frozen: it costs no saved activation, in whatever format the weight is kept.

    y = x W^T + b,    dx = dy W

`torch.nn.functional.linear` on a dequantized weight would keep that weight alive until the backward pass; here the
backward expands it again. Nothing of x is saved: with W frozen, dx = dy W needs W alone.
Shape letters: T tokens (all leading dimensions of x flattened), I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ajusta.base.errors import ModelError
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
    def store(
        cls, weight: Tensor, bias_O: Tensor | None, kind: str = "none", *, transposed: bool = False
    ) -> FrozenLinear:
        """Make a layer of a weight as the model's files hold it ([O, I], or [I, O] where `transposed`).

        Stored as `kind` (none | int8 | nf4); `none` keeps the very tensor, the others do not keep it.

        Raises:
            ModelError: the weight holds an infinity or NaN and is to be quantized.
        """
        if kind == "none":
            storage: Storage = Dense(weight, transposed=transposed)
        else:
            storage = quantize(weight.detach().t() if transposed else weight.detach(), kind)
        return cls(storage, bias_O, transposed=transposed)

    @property
    def in_features(self) -> int:
        """I."""
        return self.storage.in_features

    @property
    def out_features(self) -> int:
        """O."""
        return self.storage.out_features

    @property
    def weight(self) -> Tensor:
        """Refuse: a family that multiplies by W itself would go past the storage, and past an adapter.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "this model's code reads the weight of a linear layer by itself, and ajusta keeps that in a form of its "
            "own, with an adapter beside it; expected a model that only calls its linear layers; choose another model"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., O] in x's dtype."""
        y: Tensor = _FrozenProduct.apply(x, self.storage, self.bias)
        return y


def is_conv1d(module: nn.Module) -> bool:
    """Say whether this is transformers' `Conv1D` (weight [I, O]); told by name, so that blocks/ imports torch only."""
    conv1d = ("transformers.pytorch_utils", "Conv1D")
    return any((kind.__module__, kind.__name__) == conv1d for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Say whether the module computes x W^T + b with one 2-D weight and nothing else: `nn.Linear`, `Conv1D`.

    A subclass with a forward of its own is none (Llama 4's router returns two tensors): ours could not stand for it.
    Falcon's is one; it only rounds between the product and the bias.
    """
    kind = type(module)
    plain = kind.__name__ == "FalconLinear" or kind.forward is nn.Linear.forward
    return (isinstance(module, nn.Linear) and plain) or is_conv1d(module)
