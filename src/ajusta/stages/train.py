"""The only training loop.

For each step that is left: its examples, packed, one optimizer step, tell; now and then evaluate and save. It leaves
early when the time is up, the loss has stopped falling, or somebody asked it to; the state is saved first.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from ajusta.base.errors import NumbersGoneBad
from ajusta.base.events import Listener, Saved, StepDone
from ajusta.blocks.optimizer import FlatAdamW, learning_rate_schedule
from ajusta.data.order import Order
from ajusta.data.pack import micro_batches
from ajusta.engine.assemble import Assembled
from ajusta.engine.phases import run_step
from ajusta.engine.step import StepResult
from ajusta.memory.measure import MemoryWatch
from ajusta.memory.place import Place
from ajusta.spec.config import Config
from ajusta.spec.data import Example, MicroBatch
from ajusta.spec.plan import Rung
from ajusta.spec.record import Trained
from ajusta.stages.checkpoint import Progressed, save_checkpoint
from ajusta.stages.evaluate import report_loss, take_loss

MOST_BAD_STEPS = 10  # non-finite gradients in a row before the run stops


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the loop needs; nothing here is changed by it but the model's adapters and the optimizer's state."""

    config: Config
    model: Assembled
    place: Place
    optimizer: FlatAdamW
    rung: Rung
    order: Order
    examples: tuple[Example, ...]
    heldout: tuple[MicroBatch, ...]
    total_steps: int
    checkpoints: Path
    identity: dict[str, str]
    save_best: Callable[[], Path]
    watch: MemoryWatch
    started: float  # of the whole command, time.monotonic()


def train(job: Job, progress: Progressed, listener: Listener) -> Trained:
    """Make the steps that are left and return what was done; the final state is saved.

    Raises:
        NumbersGoneBad: too many steps in a row had a non-finite gradient; the last good state is saved.
        UserError: the disk is full.
    """
    schedule = _schedule(job)
    all_tokens = job.order.total_tokens(job.total_steps)
    saved = progress.step  # what was just loaded need not be written again
    good = progress
    stopped = _settled_reason(job, progress)
    with _asked_to_stop() as asked:
        while progress.step < job.total_steps and stopped is None:
            began = time.monotonic()
            result = _one_step(job, progress.step, schedule(progress.step))
            progress = _advance(progress, result, time.monotonic() - began)
            listener(_told(job, progress, result, schedule(progress.step - 1), began, all_tokens))
            if progress.bad_in_a_row >= MOST_BAD_STEPS:
                _give_up(job, good, saved, listener)
            progress = _evaluate_if_due(job, progress, listener)
            good = good if progress.bad_in_a_row else progress
            stopped = _reason_to_stop(job, progress, asked)
            if _due(job.config.save_every, progress.step) and not progress.bad_in_a_row:
                saved = _save(job, progress, listener)
    if saved != progress.step or not progress.step:
        _save(job, progress, listener)
    return _what_was_done(job, progress, stopped)


def _give_up(job: Job, good: Progressed, saved: int, listener: Listener) -> None:
    """Save the state before the bad steps, which changed nothing, and stop."""
    if good.step > saved:
        _save(job, good, listener)
    kept = f"the state of step {good.step} is saved" if good.step else "nothing was learned yet"
    raise NumbersGoneBad(
        f"{MOST_BAD_STEPS} steps in a row had a gradient that was not finite; expected finite ones; {kept}: lower the "
        f"learning rate, for example --set optimizer.learning_rate={job.config.optimizer.learning_rate / 4:g}, and "
        "start again with another --out"
    )


def _what_was_done(job: Job, progress: Progressed, stopped: str | None) -> Trained:
    return Trained(
        steps=progress.step,
        total_steps=job.total_steps,
        epochs=progress.step / job.order.steps_per_epoch,
        tokens=progress.tokens,
        trained_tokens=progress.trained_tokens,
        seconds=progress.seconds,
        skipped_steps=progress.skipped,
        last_loss=progress.last_loss,
        stopped_because=stopped,
        best_step=progress.best_step,
        best_loss=progress.best_loss,
        settled=_has_settled(job, progress),
    )


def step_batches(job: Job, step: int) -> tuple[MicroBatch, ...]:
    """Return the micro-batches of optimizer step `step` (0-based), a pure function of it."""
    examples = [job.examples[index] for index in job.order.examples_of_step(step)]
    return micro_batches(examples, job.rung.micro_tokens, packing=job.config.text.packing)


def _schedule(job: Job) -> Callable[[int], float]:
    settings = job.config.optimizer
    warmup = round(settings.warmup * job.total_steps)
    return learning_rate_schedule(settings.schedule, settings.learning_rate, warmup, job.total_steps)


def _one_step(job: Job, step: int, rate: float) -> StepResult:
    return run_step(job.model, job.place, step_batches(job, step), job.rung, job.optimizer, rate, step)


def _advance(progress: Progressed, result: StepResult, seconds: float) -> Progressed:
    finite = bool(result.finite)
    return replace(
        progress,
        step=progress.step + 1,
        tokens=progress.tokens + result.tokens,
        trained_tokens=progress.trained_tokens + result.trained_tokens,
        seconds=progress.seconds + seconds,
        skipped=progress.skipped + (not finite),
        bad_in_a_row=0 if finite else progress.bad_in_a_row + 1,
        last_loss=result.mean_loss(),
    )


def _told(job: Job, progress: Progressed, result: StepResult, rate: float, began: float, all_tokens: int) -> StepDone:
    now, peak = job.watch.now_and_peak()
    return StepDone(
        step=progress.step,
        total_steps=job.total_steps,
        epoch=progress.step / job.order.steps_per_epoch,
        loss=progress.last_loss,
        learning_rate=rate,
        grad_norm=float(result.grad_norm),
        tokens=result.tokens,
        trained_tokens=result.trained_tokens,
        seconds=time.monotonic() - began,
        tokens_left=all_tokens - job.order.total_tokens(progress.step),
        memory_bytes=now,
        peak_bytes=peak,
        skipped=progress.bad_in_a_row > 0,
    )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate_if_due(job: Job, progress: Progressed, listener: Listener) -> Progressed:
    """Take the held-out loss every so many steps, and keep the adapter whenever it is the best so far."""
    if not job.heldout or not _due(job.config.evaluate_every, progress.step):
        return progress
    began = time.monotonic()
    result = take_loss(job.model.chain, job.place, job.heldout, job.rung.loss_chunk, name="heldout", when="during")
    best = math.isfinite(result.loss) and (progress.best_loss is None or result.loss < progress.best_loss)
    report_loss(result, listener, step=progress.step, seconds=time.monotonic() - began, best=best)
    if not best:
        return replace(progress, evaluations_without_gain=progress.evaluations_without_gain + 1)
    listener(Saved(path=str(job.save_best()), step=progress.step, kind="best"))
    return replace(progress, best_step=progress.step, best_loss=result.loss, evaluations_without_gain=0)


def _reason_to_stop(job: Job, progress: Progressed, asked: list[str]) -> str | None:
    if progress.step >= job.total_steps:  # all is done: whoever asked has what they wanted
        return _settled_reason(job, progress)
    if asked:
        return f"asked to stop ({asked[0]})"
    limit = job.config.stop_after_seconds
    if limit is not None and time.monotonic() - job.started >= limit:
        return f"the time given (--stop-after {job.config.stop_after}) is over"
    return _settled_reason(job, progress)


def _settled_reason(job: Job, progress: Progressed) -> str | None:
    if not _has_settled(job, progress):
        return None
    return f"the held-out loss has not fallen for {job.config.early_stopping} evaluations"


def _has_settled(job: Job, progress: Progressed) -> bool:
    patience = job.config.early_stopping
    return patience > 0 and progress.evaluations_without_gain >= patience


def _save(job: Job, progress: Progressed, listener: Listener) -> int:
    path = save_checkpoint(job.checkpoints, job.optimizer, progress, job.identity)
    listener(Saved(path=str(path), step=progress.step, kind="checkpoint"))
    return progress.step


@contextmanager
def _asked_to_stop() -> Iterator[list[str]]:
    """Turn the first Ctrl-C or SIGTERM into a wish, granted after the step; a second one acts at once."""
    asked: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        for each, handler in before.items():
            signal.signal(each, handler)

    try:
        before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread: whoever runs us there handles signals
        yield asked
        return
    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


__all__ = ["Job", "step_batches", "train"]
