"""Exchange the small parts of a model that keep more than they need: norms, activations, gated MLPs.

Nothing is named after a family: a part is exchanged if a small copy of it, with made-up numbers, gives the very bits
of ours. What is not recognised stays as it is.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from ajusta.blocks.gated import GatedMlp, is_gated_mlp
from ajusta.blocks.norm import RmsNorm
from ajusta.blocks.rebuild import RecomputedActivation, remember_output

_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")


def make_lean(model: PreTrainedModel) -> None:
    """Exchange what is recognised, in place; names of parameters and linears stay."""
    for path, module in list(model.named_modules()):
        parent_path, _, leaf = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        ours = None if isinstance(parent, GatedMlp) else _equal(module)
        if ours is not None:
            setattr(parent, leaf, ours)
        elif isinstance(module, nn.LayerNorm):
            module.register_forward_hook(remember_output)
    for module in model.modules():
        if isinstance(module, RmsNorm):
            module.register_forward_hook(remember_output)


def _equal(module: nn.Module) -> nn.Module | None:
    """Return our equal of the module, or None."""
    if is_gated_mlp(module):
        return GatedMlp(module) if _gates_alike(module) else None
    if isinstance(module, nn.ReLU):
        return None  # torch keeps its output alone, which the next layer's adapter keeps anyway
    if type(module).__module__ in _ACTIVATION_MODULES and not list(module.parameters()):
        return RecomputedActivation(module)
    return RmsNorm.like(module)


def _gates_alike(module: nn.Module) -> bool:
    """Say whether a narrow copy of the module, with small made-up linears, gives the bits of `GatedMlp`."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        linear = nn.Linear(4, 4, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            linear.weight.copy_(torch.sin(torch.arange(16.0, device="cpu") * (number + 1.1)).view(4, 4))
            linear.bias.copy_(torch.cos(torch.arange(4.0, device="cpu") + number))
        twin._modules[name] = linear
    x = torch.cos(torch.arange(8.0, device="cpu") * 0.9).view(2, 4)
    with torch.no_grad():
        try:
            return torch.equal(twin(x), GatedMlp(twin)(x))
        except (TypeError, RuntimeError, ValueError, AttributeError):
            return False
