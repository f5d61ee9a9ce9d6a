"""Which linears of a model are adapted, and how they are exchanged for ours. Found by walking, not by a list of models.

The default is every linear of every decoder block; head, embeddings, norms and the routers of mixtures of experts stay
as they are (LoRA Without Regret, Thinking Machines 2025: all layers, never attention alone). Every linear of a block is
replaced: an adapted one by `LoraLinear`, the others by `FrozenLinear`, so that both are stored in the chosen bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from ajusta.base.errors import UserError, nearest
from ajusta.blocks.dropout import DropoutContext, LoraDropout
from ajusta.blocks.linear import FrozenLinear, is_linear
from ajusta.blocks.lora import LoraLinear

Layer = TypeVar("Layer", bound=nn.Module)
_ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "router_linear", "gating"})
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What was found in the blocks; every path is the module's full name in the model, in the model's order."""

    adapted: Mapping[str, nn.Module]
    frozen: Mapping[str, nn.Module]  # linears that the person did not name
    routers: tuple[str, ...]  # left as they are, in float
    not_adapted: tuple[str, ...]  # modules with 3-D expert parameters: trained through, neither adapted nor quantized
    notes: tuple[str, ...]  # partial matches, for the person


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """How adapters start. `dropout` is a probability; `targets` None: every linear of the blocks."""

    rank: int
    alpha: float
    rank_stabilized: bool = True
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """The layers now in the model, by full path, and what was left alone."""

    lora: Mapping[str, LoraLinear]
    frozen: Mapping[str, FrozenLinear]
    kept_full: tuple[str, ...]  # linears of the blocks that stay unquantized at the person's wish
    targets: Targets


def find_linears(model: nn.Module, blocks_prefix: str, names: Sequence[str] | None = None) -> Targets:
    """Return the linears under `blocks_prefix` ("model.layers"), those that `names` mean apart from the others.

    A name means every linear whose path ends in it at a dot: "q_proj", "self_attn.q_proj", "layers.0.mlp.up_proj" or a
    full path. None means all but routers; a router is adapted only when it is named.

    Raises:
        UserError: a name means nothing (the message lists the names that exist), or there is no linear at all.
    """
    experts = _expert_count(model)
    inside = {path: module for path, module in model.named_modules() if path.startswith(f"{blocks_prefix}.")}
    linears = {path: module for path, module in inside.items() if is_linear(module)}
    if not linears:
        raise UserError(
            f"no linear layer under {blocks_prefix!r} in {type(model).__name__}; expected nn.Linear or Conv1D inside "
            "the decoder blocks; train another model"
        )
    routers = {path for path, module in linears.items() if _is_router(model, path, module, experts)}
    chosen = set(linears) - routers if names is None else _match(names, linears)
    routers -= chosen
    return Targets(
        adapted={path: module for path, module in linears.items() if path in chosen},
        frozen={path: module for path, module in linears.items() if path not in chosen and path not in routers},
        routers=tuple(path for path in linears if path in routers),
        not_adapted=tuple(path for path, module in inside.items() if _has_stacked_weights(module)),
        notes=() if names is None else _partial_matches(names, linears, blocks_prefix),
    )


def adapt(
    model: nn.Module,
    blocks_prefix: str,
    lora: LoraSettings,
    *,
    bits: str,
    generator: torch.Generator,
    dropout_context: DropoutContext | None = None,
    keep_full: Sequence[str] = (),
) -> Adapted:
    """Exchange the blocks' linears for ours, in place: `bits` (none | int8 | nf4) storage, adapters on the targets.

    `keep_full` names modules (of any depth: "layers.0", "mlp.down_proj") whose linears stay unquantized. All other
    parameters of the model are frozen and left where they are. Works on a model built on `meta` as well.

    Raises:
        UserError: a target or a name in `keep_full` does not exist.
        ModelError: a weight that is to be quantized is not finite.
    """
    targets = find_linears(model, blocks_prefix, lora.targets)
    kept_full = _inside(keep_full, model, {**targets.adapted, **targets.frozen})
    model.requires_grad_(False)
    adapted: dict[str, LoraLinear] = {}
    frozen: dict[str, FrozenLinear] = {}
    for path, module in {**targets.adapted, **targets.frozen}.items():
        base = FrozenLinear.from_module(module, "none" if path in kept_full else bits)
        if path not in targets.adapted:
            frozen[path] = _replace(model, path, base)
            continue
        dropout = None
        if lora.dropout > 0:
            assert dropout_context is not None, "dropout needs the run's context"
            dropout = LoraDropout(probability=lora.dropout, layer=len(adapted), context=dropout_context)
        layer = LoraLinear.from_base(
            base,
            rank=lora.rank,
            alpha=lora.alpha,
            rank_stabilized=lora.rank_stabilized,
            generator=generator,
            dropout=dropout,
        )
        adapted[path] = _replace(model, path, layer)
    return Adapted(lora=adapted, frozen=frozen, kept_full=tuple(kept_full), targets=targets)


def _replace(model: nn.Module, path: str, layer: Layer) -> Layer:
    parent, _, name = path.rpartition(".")
    old = model.get_submodule(path)
    layer.train(old.training)
    setattr(model.get_submodule(parent), name, layer)
    return layer


def _means(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _match(names: Sequence[str], linears: Mapping[str, nn.Module]) -> set[str]:
    """Return the paths that the names mean, or refuse all wrong names at once."""
    wrong = [name for name in names if not any(_means(name, path) for path in linears)]
    if wrong:
        known = list(dict.fromkeys(path.rpartition(".")[2] for path in linears))
        lines = [f"target {name!r} is no linear layer of the model's blocks{nearest(name, known)}" for name in wrong]
        raise UserError(
            "; ".join(lines) + f"; these exist: {', '.join(known)}; write one of them, or leave targets out"
        )
    return {path for path in linears if any(_means(name, path) for name in names)}


def _partial_matches(names: Sequence[str], linears: Mapping[str, nn.Module], blocks_prefix: str) -> tuple[str, ...]:
    """Say of each name in how many blocks it was found, where that is not all of them."""
    depth = blocks_prefix.count(".") + 1
    num_blocks = len({path.split(".")[depth] for path in linears})
    notes = []
    for name in names:
        found = len({path.split(".")[depth] for path in linears if _means(name, path)})
        if found < num_blocks:
            notes.append(f"target {name!r} is in {found} of {num_blocks} blocks")
    return tuple(notes)


def _inside(names: Sequence[str], model: nn.Module, linears: Mapping[str, nn.Module]) -> list[str]:
    """Return the linears that are, or lie in, a module that a name means."""
    paths = [path for path, _ in model.named_modules() if path]
    wrong = [name for name in names if not any(_means(name, path) for path in paths)]
    if wrong:
        known = list(dict.fromkeys([*(path.rpartition(".")[2] for path in linears), *paths]))
        raise UserError(
            "; ".join(f"{name!r} is no module of the model{nearest(name, known)}" for name in wrong)
            + f"; linears are called {', '.join(dict.fromkeys(path.rpartition('.')[2] for path in linears))}"
        )
    roots = [path for path in paths if any(_means(name, path) for name in names)]
    return [path for path in linears if any(f"{path}.".startswith(f"{root}.") for root in roots)]


def _expert_count(model: nn.Module) -> int | None:
    """Read how many experts the model's configuration names, or None."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in _EXPERT_COUNTS:
            if isinstance(count := getattr(part, name, None), int) and count > 1:
                return count
    return None


def _is_router(model: nn.Module, path: str, module: nn.Module, experts: int | None) -> bool:
    """Say whether this linear chooses experts: called like a router, and as wide as the experts are many (or 1)."""
    parent, _, name = path.rpartition(".")
    if name not in _ROUTER_NAMES:
        return False
    width = module.get_parameter("weight").shape[0]
    return (experts is not None and width in (experts, 1)) or hasattr(model.get_submodule(parent), "experts")


def _has_stacked_weights(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
