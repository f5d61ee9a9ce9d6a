"""Build a model without bytes: transformers' own class on `meta`, with our attention, taken apart into a chain.

Whatever needs the weights' values comes later (engine/assemble.py); whatever only needs shapes works on the skeleton.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.blocks.attention import ATTENTION_NAME, attention
from ajusta.blocks.linear import is_linear
from ajusta.engine.bloom import replace_attention
from ajusta.engine.chain import Chain, derive

# Registered here and not in transformers' mask interface: so transformers builds no mask at all for it.
AttentionInterface.register(ATTENTION_NAME, attention)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor of the model lives: `holder._parameters[leaf]`."""

    holder: nn.Module
    leaf: str


@dataclass(kw_only=True)
class Skeleton:
    """A model on `meta`, taken apart. `slots` maps each of the model's own parameter names to its place."""

    chain: Chain
    slots: dict[str, Slot]
    linears: dict[str, nn.Module]  # path -> linear layer inside a block, in the model's order
    tied: tuple[tuple[str, str], ...]  # (name, the name whose tensor it shares)
    loose_buffers: tuple[tuple[nn.Module, str], ...]  # buffers that no file holds: the model computes them


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype) -> Skeleton:
    """Build the causal model of `config` on `meta` in `dtype` and take it apart.

    Raises:
        ModelError: transformers has no causal model of this type, or it cannot be built.
    """
    config = copy.deepcopy(config)
    config.pad_token_id = None  # or the forward reads ids back to look for padding
    model, needs_mask = _on_meta(config, dtype)
    model.eval()
    model.requires_grad_(False)
    slots = {name: _slot(model, name) for name, _ in model.named_parameters(remove_duplicate=False)}
    loose = tuple(
        (module, name)
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    )
    paths = {id(module): name for name, module in model.named_modules()}
    chain = derive(model, needs_mask)
    linears = {
        paths[id(module)]: module
        for block in chain.blocks
        for module in block.modules()
        if id(module) in paths and is_linear(module) and module is not chain.head
    }
    return Skeleton(chain=chain, slots=slots, linears=linears, tied=_tied(model, slots), loose_buffers=loose)




def _on_meta(config: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, bool]:
    """Return the model and whether its attention needs a ready mask."""
    try:
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
                needs_mask = False
            except ValueError:  # the family has no attention interface
                model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
                needs_mask = True
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"no causal language model can be built from the model type {config.model_type!r}: {error}; "
            f"expected a text model that transformers can load"
        ) from error
    if replace_attention(model):
        model.config._attn_implementation = ATTENTION_NAME
        needs_mask = False
    return model, needs_mask


def _slot(model: nn.Module, name: str) -> Slot:
    parent, _, leaf = name.rpartition(".")
    return Slot(holder=model.get_submodule(parent), leaf=leaf)


def _tied(model: PreTrainedModel, slots: dict[str, Slot]) -> tuple[tuple[str, str], ...]:
    """Pairs of names that share one tensor; the first-named one is the one that is loaded."""
    first: dict[int, str] = {}
    pairs = []
    for name, slot in slots.items():
        key = id(slot.holder._parameters[slot.leaf])
        if key in first:
            pairs.append((name, first[key]))
        else:
            first[key] = name
    return tuple(pairs)
