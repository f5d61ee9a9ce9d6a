"""Phases of a model's life as functions over a place: the planner calls them on `meta`, the run calls them for real."""

from __future__ import annotations

from collections.abc import Callable

from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.recompute import Keep, Policy, Recompute
from ajusta.engine.assemble import Assembled
from ajusta.engine.step import StepPlan, StepResult, loss_only, optimizer_step
from ajusta.memory.place import Category, Place
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import Rung


def step_plan(rung: Rung, blocks: int) -> StepPlan:
    """Turn a rung into one policy a block: the first `recompute_blocks` keep their input only.

    The first ones, because they are the ones that would hold their graph the longest.
    """
    policies: tuple[Policy, ...] = tuple(Recompute() if i < rung.recompute_blocks else Keep() for i in range(blocks))
    return StepPlan(policies=policies, loss_chunk=rung.loss_chunk)


def make_optimizer(model: Assembled, settings: AdamWSettings, place: Place) -> FlatAdamW:
    """Give every adapter its place in the optimizer's flat buffers."""
    return FlatAdamW(model.parameters(), settings, place)


def run_step(
    model: Assembled,
    place: Place,
    micro: tuple[MicroBatch, ...],
    rung: Rung,
    optimizer: FlatAdamW,
    rate: float,
    step: int,
    before_update: Callable[[FlatAdamW], None] = lambda optimizer: None,
) -> StepResult:
    """Run one optimizer step on a rung of the plan; `before_update` may look at the summed gradients."""
    plan = step_plan(rung, len(model.chain.blocks))
    return optimizer_step(model.chain, place, micro, plan, optimizer, rate, step, before_update)


def adopt_model(model: Assembled, place: Place) -> None:
    """Book what a model holds under its categories; everything counts that the step will find there already."""
    if place.ledger is None:
        return
    module = model.chain.model
    tensors = [
        *module.parameters(),
        *module.buffers(),
        *(p for block in model.chain.blocks for p in block.parameters()),
    ]
    tensors += [b for block in model.chain.blocks for b in block.buffers()]
    place.ledger.adopt(tensors, Category.BASE)
    place.ledger.adopt(model.parameters(), Category.ADAPTERS)


__all__ = ["adopt_model", "loss_only", "make_optimizer", "run_step", "step_plan"]
