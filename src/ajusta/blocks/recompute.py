"""Gradient checkpointing (Chen 2016, arXiv 1604.06174), as one small class per policy.

Every decoder block is an island: its graph starts at its own input and ends at its own output, and the engine carries
the gradient from island to island. A policy says what an island keeps between its forward and its backward pass.

    Keep        the whole graph           fastest
    Recompute   the input, T x H values   one more forward pass of the block, the same numbers

Both give the same loss and gradients bit for bit: the second forward is the first one again. LoRA dropout is a pure
function of where a value stands, and torch's own random state is put back for whatever else a block may draw.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ajusta.blocks.rebuild import rebuilding
from ajusta.memory.ledger import Category, booking

RunBlock = Callable[[Tensor], Tensor]


class Island(Protocol):
    """What is kept of one block between its two passes."""

    output: Tensor

    def backward(self, grad: Tensor) -> Tensor | None:
        """Add to the adapters' gradients; return the gradient of the block's input, if it was wanted."""


class Policy(Protocol):
    """How one block's forward pass is run."""

    name: str

    def forward(self, run: RunBlock, hidden: Tensor, wants_grad: bool) -> Island:
        """Run the block on `hidden` [1, T, H]."""


@dataclass(kw_only=True)
class KeptIsland:
    """A block's whole graph."""

    hidden: Tensor
    output: Tensor
    result: Tensor

    def backward(self, grad: Tensor) -> Tensor | None:
        """Differentiate the graph; it is freed on the way."""
        if self.result.requires_grad:
            torch.autograd.backward(self.result, grad)
        return self.hidden.grad


class Keep:
    """Keep everything that the backward pass needs."""

    name = "keep"

    def forward(self, run: RunBlock, hidden: Tensor, wants_grad: bool) -> KeptIsland:
        """Run with the graph on."""
        start = hidden.detach()
        if wants_grad:
            start.requires_grad_(True)
        with torch.enable_grad(), rebuilding():
            result = run(start)
        return KeptIsland(hidden=start, output=result.detach(), result=result)


@dataclass(kw_only=True)
class RecomputedIsland:
    """A block's input and the random state it started from."""

    run: RunBlock
    hidden: Tensor
    output: Tensor
    wants_grad: bool
    random_state: Tensor

    def backward(self, grad: Tensor) -> Tensor | None:
        """Run the block again, this time with the graph on, then differentiate it."""
        now = _random_state(self.hidden.device)
        _restore(self.hidden.device, self.random_state)
        with booking(Category.RECOMPUTE):
            island = Keep().forward(self.run, self.hidden, self.wants_grad)
        _restore(self.hidden.device, now)
        del now
        return island.backward(grad)


class Recompute:
    """Keep the input only. One policy serves all blocks of a step: as long as none draws, they share a random state."""

    name = "recompute"

    def __init__(self) -> None:
        self._latest: weakref.ref[Tensor] | None = None

    def forward(self, run: RunBlock, hidden: Tensor, wants_grad: bool) -> RecomputedIsland:
        """Run with the graph off."""
        state = self._shared(_random_state(hidden.device))
        with torch.no_grad():
            output = run(hidden)
        return RecomputedIsland(run=run, hidden=hidden, output=output, wants_grad=wants_grad, random_state=state)

    def _shared(self, state: Tensor) -> Tensor:
        """Return the state that an earlier block kept where it is the same: 5 KB on a processor, for each block."""
        latest = None if self._latest is None else self._latest()
        if latest is not None and torch.equal(latest, state):
            return latest
        self._latest = weakref.ref(state)
        return state


def _random_state(device: torch.device) -> Tensor:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.clone()  # a ledger does not see where the state itself comes from, and sees its copy


def _restore(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
