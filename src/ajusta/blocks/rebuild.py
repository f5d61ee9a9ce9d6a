"""Save less by construction: what is cheap to make again is not kept for the backward pass, its recipe is.

A norm's output is the input of the adapters behind it, and would be kept for their gradient; so would the product of a
gated MLP. Both follow from tensors that are kept anyway, by a few passes over memory and no matrix product. Whoever
makes such a tensor calls `remember(output, recipe)`. Inside `rebuilding()` autograd hands every tensor that it wants to
keep to us; one that has a recipe is exchanged for it, and made again, by the same operations and so with the same bits,
when the backward pass asks for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Recipe = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Known:
    storage: weakref.ref[torch.UntypedStorage]  # an address alone could be that of another tensor by now
    shape: torch.Size
    recipe: Recipe


@dataclass(kw_only=True)
class _Kitchen:
    """The recipes of the block that is being run."""

    known: dict[int, _Known] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor | _Dish:
        """Exchange a tensor that has a recipe."""
        recipe = self._recipe_of(tensor)
        if (tell := _tell.get()) is not None:
            tell(tensor, recipe is not None)
        return tensor if recipe is None else _Dish(recipe=recipe, shape=tensor.shape)

    def _recipe_of(self, tensor: Tensor) -> Recipe | None:
        known = self.known.get(tensor.untyped_storage()._cdata)
        if known is None or known.storage() is None or tensor.shape.numel() != known.shape.numel():
            return None
        return known.recipe if tensor.is_contiguous() else None


@dataclass(frozen=True, kw_only=True)
class _Dish:
    recipe: Recipe
    shape: torch.Size


_kitchen: ContextVar[_Kitchen | None] = ContextVar("kitchen", default=None)
_tell: ContextVar[Callable[[Tensor, bool], None] | None] = ContextVar("tell", default=None)


def _unpack(kept: Tensor | _Dish) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    with torch.no_grad():
        return kept.recipe().view(kept.shape)


@contextlib.contextmanager
def rebuilding() -> Iterator[None]:
    """Keep recipes in place of the tensors that have one, for the graph that is built inside."""
    kitchen = _Kitchen()
    token = _kitchen.set(kitchen)
    try:
        with torch.autograd.graph.saved_tensors_hooks(kitchen.pack, _unpack):
            yield
    finally:
        _kitchen.reset(token)
        # Autograd holds the kitchen as long as it holds a tensor: a recipe left in it would keep its tensors too, until
        # another storage takes the address under which it is known, so sooner or later by chance.
        kitchen.known.clear()


@contextlib.contextmanager
def telling(tell: Callable[[Tensor, bool], None]) -> Iterator[None]:
    """Be told inside of each tensor that autograd wants to keep, and whether a recipe takes its place."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def remember(output: Tensor, recipe: Recipe) -> None:
    """Say how `output` can be made again; the recipe must hold only tensors that are kept anyway."""
    kitchen = _kitchen.get()
    if kitchen is None or not torch.is_grad_enabled() or not output.is_contiguous():
        return
    storage = output.untyped_storage()
    kitchen.known[storage._cdata] = _Known(storage=weakref.ref(storage), shape=output.shape, recipe=recipe)


def remember_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a layer that is cheap and a function of its one input alone: its output has a recipe."""
    if len(args) == 1 and isinstance(output, Tensor) and isinstance(args[0], Tensor) and output.requires_grad:
        kept = args[0].detach()
        remember(output, lambda: module.forward(kept))


class _Activation(torch.autograd.Function):
    """A cheap function that keeps its input alone and is differentiated by running it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.act = act
        return act(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        with torch.enable_grad():
            x = kept.detach().requires_grad_(True)
            (grad,) = torch.autograd.grad(ctx.act(x), x, grads[0])
        return grad, None


def recomputed(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Return act(x), a cheap function without parameters; only x is kept, and the result leaves its recipe."""
    y: Tensor = _Activation.apply(x, act)
    kept = x.detach()
    remember(y, lambda: act(kept))
    return y


class RecomputedActivation(nn.Module):
    """Stands for an activation module without parameters; same values, only the input is kept."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Return act(x)."""
        return recomputed(x, self.act)
