"""Our frozen layers made of the modules that they stand for."""

from __future__ import annotations

from torch import nn

from ajusta.blocks.linear import FrozenLinear, is_conv1d


def frozen_of(module: nn.Module, kind: str = "none") -> FrozenLinear:
    """Return the layer that holds this `nn.Linear`'s or `Conv1D`'s weight, stored as `kind`."""
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    return FrozenLinear.store(weight, bias, kind, transposed=is_conv1d(module))
