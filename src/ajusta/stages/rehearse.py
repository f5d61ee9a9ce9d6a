"""Rehearse: one real step at the worst micro-batch and one evaluation, measured beside what was planned.

The step is run at a learning rate of zero and the moments it leaves are wiped, so the run that follows is the same as
without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ajusta.base.errors import NumbersGoneBad
from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.optimizer import FlatAdamW
from ajusta.engine.phases import adopt_model, loss_only, run_step
from ajusta.memory.ledger import Category
from ajusta.spec.data import MicroBatch
from ajusta.spec.plan import Plan
from ajusta.spec.record import PhaseMeasure
from ajusta.stages.load import Loaded


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What the rehearsal measured."""

    seconds_per_token: float
    phases: tuple[PhaseMeasure, ...]
    fullest: tuple[tuple[str, int], ...] = ()  # bytes by category at the step's fullest moment, the largest first

    @property
    def measured_bytes(self) -> int:
        """The fullest moment, in bytes of tensors."""
        return max(phase.measured_bytes or 0 for phase in self.phases)


def rehearse(loaded: Loaded, optimizer: FlatAdamW, plan: Plan, fullest: MicroBatch, measured: MicroBatch) -> Rehearsal:
    """Run the step and the evaluation that the plan was made for, counting every allocation.

    `fullest` is the fullest micro-batch that is trained on, `measured` the fullest whose loss is only taken.

    Raises:
        NumbersGoneBad: an adapter got no gradient, or the loss is not finite.
    """
    planned = {phase.phase: phase.peak_bytes for phase in plan.phases}
    model, place = loaded.model, loaded.place
    with place.counting() as ledger:
        adopt_model(model, place)
        ledger.adopt((optimizer.grads,), Category.GRADIENTS)
        ledger.adopt((optimizer.first, optimizer.second, optimizer.updates), Category.OPTIMIZER)
        ledger.start_over()
        began = time.monotonic()
        result = run_step(
            model, place, (fullest,), plan.rung, optimizer, 0.0, 0, lambda _: _check_gradients(model.adapters)
        )
        loss = result.mean_loss()
        step, fullest_moment = _measure("train", began, planned, ledger.peak.live_bytes), ledger.peak.by_category
        ledger.start_over()
        began = time.monotonic()
        loss_only(model.chain, place, measured, plan.rung.loss_chunk)
        evaluation = _measure("evaluate", began, planned, ledger.peak.live_bytes)
    for buffer in (optimizer.first, optimizer.second, optimizer.updates):
        buffer.zero_()
    if not math.isfinite(loss):
        cure = "fetch the model again" if plan.dtype == "fp32" else "try --set dtype=fp32, or fetch the model again"
        raise NumbersGoneBad(
            f"the first loss is {loss}; expected a finite number; the weights are damaged, or too large for "
            f"{plan.dtype}: {cure}"
        )
    parts = sorted(((str(category), size) for category, size in fullest_moment.items() if size), key=lambda it: -it[1])
    return Rehearsal(
        seconds_per_token=step.seconds / fullest.num_tokens, phases=(step, evaluation), fullest=tuple(parts)
    )


def over_budget(rehearsal: Rehearsal, plan: Plan, resident_bytes: int | None) -> tuple[int, str]:
    """Return what the rehearsal took beyond what the plan needs, where that passes the budget, and by whose count.

    Args:
        rehearsal: as it was measured.
        plan: what it was made by.
        resident_bytes: on a processor, the most that was resident above the baseline: what tensors do not show.
    """
    counts = [(rehearsal.measured_bytes - plan.peak_bytes - plan.corrected_bytes, "tensors")]
    if resident_bytes is not None:
        counts.append((resident_bytes - plan.need_bytes, "resident memory"))
    over, counted = max(counts)
    return (over, counted) if over > 0 and plan.need_bytes + over > plan.budget_bytes else (0, counted)


def _check_gradients(adapters: Mapping[str, LoraLinear]) -> None:
    """Refuse to train adapters that the loss does not reach: B's gradient is zero only where nothing flows."""
    gradients = {path: layer.lora_B.grad for path, layer in adapters.items()}
    silent = [path for path, grad in gradients.items() if grad is None or not bool(grad.any())]
    if silent:
        more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        raise NumbersGoneBad(
            f"{len(silent)} of {len(adapters)} adapters got no gradient in the first step "
            f"({', '.join(silent[:3])}{more}); expected every one to be reached by the loss; leave those layers out, "
            f"for example --set lora.exclude={silent[0]}, and please report the model"
        )


def _measure(phase: str, began: float, planned: dict[str, int], measured: int) -> PhaseMeasure:
    return PhaseMeasure(
        phase=phase,
        seconds=time.monotonic() - began,
        planned_bytes=planned.get(phase),
        measured_bytes=measured,
    )
