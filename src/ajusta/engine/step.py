"""One optimizer step: the only place where gradients are made.

    for each micro-batch:   prelude -> blocks, each by its policy -> epilogue and loss -> blocks backwards
    once:                   divide by the trained tokens of the whole step, clip, update

Each block is an island of the graph (blocks/recompute.py); the gradient is carried between them by hand. So the step
knows at every moment what is held, works the same on `meta` tensors, and gives the same gradient for any split of the
batch: sums are added up, and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ajusta.blocks.attention import Segments, using
from ajusta.blocks.loss import cross_entropy_sum
from ajusta.blocks.optimizer import FlatAdamW
from ajusta.blocks.recompute import Island, Policy
from ajusta.engine.chain import Chain
from ajusta.engine.head import head_backward
from ajusta.engine.masks import block_diagonal_mask
from ajusta.memory.abridge import turns
from ajusta.memory.place import Category, Place
from ajusta.spec.data import MicroBatch


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step found; tensors are 0-dim and not yet read back."""

    loss_sum: Tensor
    grad_norm: Tensor
    finite: Tensor
    trained_tokens: int
    tokens: int

    def mean_loss(self) -> float:
        """Return the loss per trained token."""
        return float(self.loss_sum) / max(self.trained_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How the step is run: one policy a block, and how many positions meet the head at a time."""

    policies: tuple[Policy, ...]
    loss_chunk: int


def optimizer_step(
    chain: Chain,
    place: Place,
    micro_batches: Sequence[MicroBatch],
    plan: StepPlan,
    optimizer: FlatAdamW,
    rate: float,
    step: int,
    before_update: Callable[[FlatAdamW], None] = lambda optimizer: None,
) -> StepResult:
    """Run optimizer step number `step` over `micro_batches` at the learning rate `rate`."""
    losses = [accumulate(chain, place, micro, plan, step) for micro in micro_batches]
    place.mark("update")
    before_update(optimizer)
    trained = sum(micro.num_trained for micro in micro_batches)
    norm, finite = optimizer.step(rate, trained)
    return StepResult(
        loss_sum=torch.stack((_no_loss(chain, place), *losses)).sum(),
        grad_norm=norm,
        finite=finite,
        trained_tokens=trained,
        tokens=sum(micro.num_tokens for micro in micro_batches),
    )


def accumulate(chain: Chain, place: Place, micro: MicroBatch, plan: StepPlan, step: int) -> Tensor:
    """Add one micro-batch's summed gradient to the adapters'; return its summed loss, 0-dim.

    Without a trained token there is nothing to learn: loss and gradient are zero, and no forward pass is made.
    """
    if micro.num_trained == 0:
        return _no_loss(chain, place)
    chain.at_micro_batch(place, micro, step)
    with using(Segments(ends=micro.segment_ends)):
        islands = _forward(chain, place, micro, plan)
        place.mark("loss")
        with place.category(Category.LOGITS):
            loss, grad = _loss(chain, place, micro, islands[-1].output, plan.loss_chunk)
        _backward(islands, grad, place)
    return loss


def _no_loss(chain: Chain, place: Place) -> Tensor:
    return torch.zeros((), dtype=loss_dtype(chain), device=place.device)


def loss_dtype(chain: Chain) -> torch.dtype:
    """Return what losses are summed in: fp32, fp64 where the model computes in it."""
    return torch.promote_types(chain.dtype, torch.float32)


def _forward(chain: Chain, place: Place, micro: MicroBatch, plan: StepPlan) -> list[Island]:
    place.mark("prelude")
    with torch.no_grad(), place.category(Category.SAVED):
        mask = block_diagonal_mask(micro.segment_ends, chain.dtype, place) if chain.needs_mask else None
        hidden, calls = chain.prelude(place.take(micro.input_ids_T), place.take(micro.position_ids_T), mask)
        islands: list[Island] = []
        for index, (call, policy) in enumerate(zip(calls, plan.policies, strict=True)):
            place.mark("forward", index)
            run = chain.runner(index, call)
            islands.append(policy.forward(run, hidden, wants_grad=index > 0))
            hidden = islands[-1].output
    return islands


def _backward(islands: list[Island], grad: Tensor | None, place: Place) -> None:
    """Differentiate the islands from the last to the first; what one held is free before the next one starts."""
    while islands:
        assert grad is not None
        place.mark("backward", len(islands) - 1)
        grad = islands.pop().backward(grad)


def _loss(chain: Chain, place: Place, micro: MicroBatch, hidden: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient for `hidden` [1, T, H]; only trained positions meet the head."""
    positions, labels = place.take(micro.positions_N), place.take(micro.labels_N)
    grad = torch.zeros_like(hidden)
    starts = range(0, micro.num_trained, chunk)
    losses = torch.zeros(len(starts), dtype=loss_dtype(chain), device=place.device)
    for start in turns(starts, place.device):
        cut = slice(start, min(start + chunk, micro.num_trained))
        at = positions[cut]
        rows = hidden[0].index_select(0, at).requires_grad_(True)
        with torch.enable_grad():
            ready = chain.finish(rows)
        with torch.no_grad():
            logits = chain.head(ready.detach())
            loss, grad_logits = cross_entropy_sum(
                logits, labels[cut], scale=chain.logits.scale, softcap=chain.logits.softcap
            )
            assert grad_logits is not None
            losses[start // chunk].copy_(loss)
            grad_ready = head_backward(chain.head, grad_logits)
            del logits, grad_logits
        torch.autograd.backward(ready, grad_ready)
        assert rows.grad is not None
        grad[0].index_copy_(0, at, rows.grad)
    return losses.sum(), grad


def loss_only(chain: Chain, place: Place, micro: MicroBatch, chunk: int) -> Tensor:
    """Return the summed loss of one micro-batch without any gradient; holds one block's activations at a time."""
    if micro.num_trained == 0:
        return _no_loss(chain, place)
    chain.at_micro_batch(place, micro, step=None)
    with torch.no_grad(), using(Segments(ends=micro.segment_ends)):
        mask = block_diagonal_mask(micro.segment_ends, chain.dtype, place) if chain.needs_mask else None
        hidden, calls = chain.prelude(place.take(micro.input_ids_T), place.take(micro.position_ids_T), mask)
        for index, call in enumerate(calls):
            place.mark("forward", index)
            hidden = chain.run_block(index, hidden, call)
        place.mark("loss")
        positions, labels = place.take(micro.positions_N), place.take(micro.labels_N)
        starts = range(0, micro.num_trained, chunk)
        losses = torch.zeros(len(starts), dtype=loss_dtype(chain), device=place.device)
        for start in turns(starts, place.device):
            cut = slice(start, min(start + chunk, micro.num_trained))
            losses[start // chunk].copy_(_chunk_loss(chain, hidden[0].index_select(0, positions[cut]), labels[cut]))
        return losses.sum()


def _chunk_loss(chain: Chain, rows: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of a few positions [C, H]; in a function, to free its logits before the next."""
    logits = chain.head(chain.finish(rows))
    loss, _ = cross_entropy_sum(logits, labels, scale=chain.logits.scale, softcap=chain.logits.softcap, gradient=False)
    return loss
