"""Phases of a model's life as functions over a place: the planner calls them on `meta`, the run calls them for real."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.blocks.recompute import Keep, Policy, Recompute
from ajusta.blocks.storage import Storage
from ajusta.engine.assemble import Assembled
from ajusta.engine.step import StepPlan, StepResult, loss_only, optimizer_step
from ajusta.memory.ledger import Ledger
from ajusta.memory.place import Category, Place
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import Rung


def step_plan(rung: Rung, blocks: int) -> StepPlan:
    """Turn a rung into one policy a block: the first `recompute_blocks` keep their input only.

    The first ones, because they are the ones that would hold their graph the longest.
    """
    again, keep = Recompute(), Keep()
    policies: tuple[Policy, ...] = tuple(again if i < rung.recompute_blocks else keep for i in range(blocks))
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
    ledger = place.ledger
    if ledger is None:
        return
    for number, block in enumerate(model.chain.blocks):
        ledger.mark("adopt", number)
        _adopt(block, ledger)
    ledger.mark("adopt")
    _adopt(model.chain.model, ledger)


def _adopt(module: nn.Module, ledger: Ledger) -> None:
    ledger.adopt((*module.parameters(), *module.buffers()), Category.BASE)
    for part in module.modules():
        if isinstance(part, Storage):
            ledger.adopt(part.constants(), Category.QUANTIZATION)
        elif isinstance(part, LoraLinear):
            ledger.adopt((part.lora_A, part.lora_B), Category.ADAPTERS)


__all__ = ["adopt_model", "loss_only", "make_optimizer", "run_step", "step_plan"]
