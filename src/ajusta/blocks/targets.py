"""Which linears of a model get an adapter. Found by walking, not by a list of models.

The default is every linear of every decoder block; head, embeddings, norms and the routers of mixtures of experts stay
as they are (LoRA Without Regret, Thinking Machines 2025: all layers, never attention alone). A linear without an
adapter is frozen and stored in the chosen bits like the others; a router is never quantized, since a rounding there
sends a token to another expert.

A name means every linear whose path ends in it at a dot: "q_proj", "self_attn.q_proj", "layers.0.mlp.up_proj" or a full
path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ajusta.base.errors import UserError, nearest

_ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "router_linear", "gating"})
_BLOCK = re.compile(r"^.*?\.\d+(?=\.)")  # "model.layers.0" of "model.layers.0.mlp.experts.3.up_proj"
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What becomes of the linears of the blocks; paths are full names in the model, in the model's order."""

    adapted: tuple[str, ...]
    frozen: tuple[str, ...]  # no adapter: not named, or excluded
    routers: tuple[str, ...]  # choose experts: in float always, and adapted only where they are named
    stacked: tuple[str, ...]  # modules with 3-D expert weights: trained through, neither adapted nor quantized
    notes: tuple[str, ...]  # for the person


def choose_targets(
    linears: Mapping[str, nn.Module],
    *,
    names: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    routers: Collection[str] = (),
    stacked: Sequence[str] = (),
) -> Targets:
    """Say which of the linears get an adapter.

    Args:
        linears: all linears of the blocks by path, in the model's order.
        names: those that get one; None is all but the routers.
        exclude: those that get none, whatever `names` says.
        routers: paths of the linears that choose experts (`find_routers`).
        stacked: paths of the modules with 3-D expert weights, to be told.

    Raises:
        UserError: a name means nothing (all wrong ones at once, with the names that exist), or no linear is left.
    """
    named = {"target": names or (), "excluded": exclude}
    _require_known(named, linears)
    chosen = set(linears) - set(routers) if names is None else _meant(names, linears)
    chosen -= _meant(exclude, linears)
    if not chosen:
        raise UserError(
            f"no layer of {len(linears)} linear ones gets an adapter, so nothing would be trained; expected at least "
            "one; correct lora.targets and lora.exclude"
        )
    return Targets(
        adapted=tuple(path for path in linears if path in chosen),
        frozen=tuple(path for path in linears if path not in chosen and path not in routers),
        routers=tuple(path for path in linears if path in routers),
        stacked=tuple(stacked),
        notes=(*_partial_matches(named, linears), *_left_alone(stacked)),
    )


def no_targets(linears: Mapping[str, nn.Module], routers: Collection[str]) -> Targets:
    """Say what becomes of the linears of a model that is used as it is, without adapters."""
    frozen = tuple(path for path in linears if path not in routers)
    return Targets(adapted=(), frozen=frozen, routers=tuple(routers), stacked=(), notes=())


def find_routers(
    linears: Mapping[str, nn.Module], submodule: Callable[[str], nn.Module], experts: int | None
) -> tuple[str, ...]:
    """Return the paths of the linears that choose experts.

    A router is called like one, or lies in a module that is, and is as wide as there are experts (or 1 wide, for an
    expert that is always asked), or what is called so stands beside a module called `experts`.

    Args:
        linears: all linears of the blocks by path.
        submodule: returns the module of a path.
        experts: how many experts a block has, None where the model's configuration names no number.
    """

    def is_router(path: str, module: nn.Module) -> bool:
        parts = path.split(".")
        parents = [".".join(parts[:depth]) for depth, name in enumerate(parts) if name in _ROUTER_NAMES]
        width = module.get_parameter("weight").shape[0]
        if parents and experts is not None and width in (experts, 1):
            return True
        return any(hasattr(submodule(parent), "experts") for parent in parents)

    return tuple(path for path, module in linears.items() if is_router(path, module))


def has_stacked_weights(module: nn.Module) -> bool:
    """Say whether the module itself holds 3-D weights, as experts in one tensor are; a convolution's are none."""
    return not isinstance(module, nn.Conv1d) and any(weight.dim() == 3 for weight in module.parameters(recurse=False))


def _means(name: str, path: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _meant(names: Sequence[str], paths: Iterable[str]) -> set[str]:
    return {path for path in paths if any(_means(name, path) for name in names)}


def _require_known(named: Mapping[str, Sequence[str]], linears: Mapping[str, nn.Module]) -> None:
    """Refuse all wrong names at once."""
    known = list(dict.fromkeys(path.rpartition(".")[2] for path in linears))
    wrong = [
        f"{what} {name!r} is no linear layer of the model's blocks{nearest(name, known)}"
        for what, names in named.items()
        for name in names
        if not any(_means(name, path) for path in linears)
    ]
    if wrong:
        raise UserError(
            "; ".join(wrong) + f"; these exist: {', '.join(known)}; write one of them in lora.targets or lora.exclude, "
            "or leave both out"
        )


def _partial_matches(named: Mapping[str, Sequence[str]], linears: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Say of each name in how many blocks it was found, where that is not all of them."""
    num_blocks = len({_block(path) for path in linears})
    notes = []
    for what, names in named.items():
        for name in names:
            found = len({_block(path) for path in linears if _means(name, path)})
            if found < num_blocks:
                notes.append(f"{what} {name!r} is in {found} of {num_blocks} blocks")
    return tuple(notes)


def _block(path: str) -> str:
    """Return the path of the block that a linear stands in; whatever stands in none counts as one block."""
    found = _BLOCK.match(path)
    return found.group() if found else ""


def _left_alone(stacked: Sequence[str]) -> tuple[str, ...]:
    if not stacked:
        return ()
    more = f" and {len(stacked) - _SHOWN} more" if len(stacked) > _SHOWN else ""
    return (
        f"the experts in {', '.join(stacked[:_SHOWN])}{more} are one tensor each: they get no adapter and are not "
        "quantized",
    )
