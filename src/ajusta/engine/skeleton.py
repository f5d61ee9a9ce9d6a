"""Build a model without bytes: transformers' own class on `meta`, our attention and experts in it, as a chain.

Whatever needs the weights' values comes later (engine/assemble.py); whatever only needs shapes works on the skeleton.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ajusta.base.errors import ModelError
from ajusta.blocks.attention import ATTENTION_NAME, attention
from ajusta.blocks.experts import EXPERTS_NAME, experts
from ajusta.blocks.linear import is_linear
from ajusta.blocks.targets import find_routers, has_stacked_weights
from ajusta.engine.bloom import replace_attention
from ajusta.engine.causal import looks_both_ways
from ajusta.engine.chain import Chain
from ajusta.engine.derive import derive
from ajusta.engine.lean import make_lean
from ajusta.memory.answers import Remembering

# Registered here and not in transformers' mask interface: so transformers builds no mask at all for it.
AttentionInterface.register(ATTENTION_NAME, attention)
ExpertsInterface.register(EXPERTS_NAME, experts)

# What the model types call the number of experts in a block.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")

# What a foreign model class raises when it cannot be built, or when it does not run with what it is given.
_FOREIGN = (
    ModelError, ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError, ImportError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one tensor of the model lives: `holder._parameters[leaf]`."""

    holder: nn.Module
    leaf: str

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        tensor = self._there
        assert tensor is not None
        return tensor

    @property
    def _there(self) -> Tensor | None:
        return self.holder._parameters[self.leaf]

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there; a parameter stays the very same one."""
        frozen = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        self.holder._parameters[self.leaf] = frozen


@dataclass(frozen=True, kw_only=True)
class BufferSlot(Slot):
    """Where a buffer lives that a checkpoint holds: `holder._buffers[leaf]`, in a dtype of its own."""

    dtype: torch.dtype

    @property
    def _there(self) -> Tensor | None:
        return self.holder._buffers[self.leaf]

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there."""
        self.holder._buffers[self.leaf] = tensor


@dataclass(kw_only=True)
class Skeleton:
    """A model on `meta`, taken apart. `slots` maps each of the model's own parameter names to its place."""

    chain: Chain
    slots: dict[str, Slot]
    buffers: dict[str, BufferSlot]  # those that a checkpoint holds, by the model's own names
    linears: dict[str, nn.Module]  # path -> linear layer inside a block, in the model's order
    routers: tuple[str, ...]  # paths of those linears that choose experts
    stacked: tuple[str, ...]  # paths of the modules inside a block with 3-D expert weights
    tied: tuple[tuple[str, str], ...]  # (name, the name whose tensor it shares)
    loose_buffers: tuple[tuple[nn.Module, str], ...]  # buffers that no file holds: the model computes them

    @property
    def stored(self) -> dict[str, Slot]:
        """All that a checkpoint holds, by the model's own names."""
        return {**self.slots, **self.buffers}

    def may_lack(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of these names that a checkpoint may lack, as the model's class says: it computes them."""
        patterns = self.chain.model._keys_to_ignore_on_load_missing or ()
        return tuple(
            name for name in names if name in self.buffers and any(re.search(pattern, name) for pattern in patterns)
        )


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype, device: str = "meta") -> Skeleton:
    """Build the causal model of `config` in `dtype` and take it apart; on a real device (in tests) with random weights.

    Our own attention is tried first; a family that has no interface for it, or that makes masks of its own, runs its
    eager attention on a ready mask (T x T values: short rows).

    Raises:
        ModelError: transformers has no causal model of this type, it is none with these settings, or it cannot be built
            or run.
    """
    reasons: list[str] = []

    def build_eager(config: PretrainedConfig) -> PreTrainedModel:
        return build_model(config, "eager", dtype)

    for implementation in (ATTENTION_NAME, "eager"):
        if implementation == "eager" and looks_both_ways(config, build_eager, _FOREIGN):
            raise ModelError(
                f"the model type {config.model_type!r} with is_decoder false looks at the tokens in both directions; "
                f"expected a causal language model, whose tokens see only those before them; choose one that writes "
                f'text, or put "is_decoder": true into its config.json if it was trained so'
            )
        try:
            with torch.device(device):
                model = build_model(config, implementation, dtype)
            with Remembering() if device == "meta" else contextlib.nullcontext():
                return _take_apart(model, needs_mask=model.config._attn_implementation != ATTENTION_NAME)
        except _FOREIGN as error:
            reasons.append(" ".join(str(error).split())[:300])
    raise ModelError(
        f"no causal language model can be built from the model type {config.model_type!r}: {reasons[0]}; with its "
        f"eager attention: {reasons[1]}; expected a text model that transformers can load"
    )


def build_model(config: PretrainedConfig, implementation: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the frozen causal model of `config` where torch's default device says, with this attention."""
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, experts_implementation=EXPERTS_NAME, dtype=dtype
    )  # a family without an interface for experts, or without experts, takes no notice of the latter
    if replace_attention(model):
        model.config._attn_implementation = ATTENTION_NAME
    make_lean(model)
    for part in model.modules():
        # The forward would read ids back to look for padding. Past the setter, since some families insist on a number.
        own = getattr(part, "config", None)
        if isinstance(own, PretrainedConfig):
            vars(own)["pad_token_id"] = None
    model.eval()
    model.requires_grad_(False)
    return model


def _take_apart(model: PreTrainedModel, needs_mask: bool) -> Skeleton:
    slots = {name: _slot(model, name) for name, _ in model.named_parameters(remove_duplicate=False)}
    loose = tuple(
        (module, name)
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    )
    buffers = _kept_buffers(model)
    paths = {id(module): name for name, module in model.named_modules()}
    chain = derive(model, needs_mask)
    inside = {paths[id(module)]: module for block in chain.blocks for module in block.modules() if id(module) in paths}
    linears = {path: module for path, module in inside.items() if is_linear(module) and module is not chain.head}
    return Skeleton(
        chain=chain,
        slots=slots,
        buffers=buffers,
        linears=linears,
        routers=find_routers(linears, chain.submodule, _expert_count(model.config)),
        stacked=tuple(path for path, module in inside.items() if has_stacked_weights(module)),
        tied=_tied(model, slots),
        loose_buffers=loose,
    )


def _expert_count(config: PretrainedConfig) -> int | None:
    """Read how many experts a block has, or None."""
    for part in (config, config.get_text_config()):
        for name in _EXPERT_COUNTS:
            if isinstance(count := getattr(part, name, None), int) and count > 1:
                return count
    return None


def _slot(model: nn.Module, name: str) -> Slot:
    parent, _, leaf = name.rpartition(".")
    return Slot(holder=model.get_submodule(parent), leaf=leaf)


def _kept_buffers(model: PreTrainedModel) -> dict[str, BufferSlot]:
    """Find the buffers that are saved with the model, and the dtype in which transformers itself would load each."""
    wide = model._get_dtype_plan(model.dtype)  # parts of names that stay in fp32 beside 16-bit weights
    found = {}
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is None or leaf in module._non_persistent_buffers_set:
                continue
            name = f"{path}.{leaf}" if path else leaf
            kept = [dtype for pattern, dtype in wide.items() if re.search(pattern.replace("*", ".*"), name)]
            found[name] = BufferSlot(holder=module, leaf=leaf, dtype=kept[0] if kept else buffer.dtype)
    return found


def _tied(model: PreTrainedModel, slots: dict[str, Slot]) -> tuple[tuple[str, str], ...]:
    """Pairs of names that share one tensor; the first-named one is the one that is loaded."""
    first: dict[int, str] = {}
    pairs = []
    for name, slot in slots.items():
        key = id(slot.tensor)
        if key in first:
            pairs.append((name, first[key]))
        else:
            first[key] = name
    return tuple(pairs)
