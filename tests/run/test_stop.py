"""Leaving early: a signal, the time given, a loss that has settled; and what is kept then."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import adapter_bytes, adapter_tensors, kill_at_save, killed, settings, tune

from ajusta.base.errors import NumbersGoneBad
from ajusta.base.events import Evaluated, Event, Note, Saved, StepDone
from ajusta.run import evaluate, finetune
from ajusta.stages import checkpoint, train


def signal_at(step: int, number: int) -> tuple[Callable[[Event], None], list[Event]]:
    told: list[Event] = []

    def listen(event: Event) -> None:
        told.append(event)
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), number)

    return listen, told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_obeyed_within_the_step(
    number: signal.Signals, model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    config = settings(model, data, tmp_path / "run", save_every=0)
    listen, told = signal_at(3, number)
    record = finetune(config, listen)
    assert signal.getsignal(number) is before
    assert [event.step for event in told if isinstance(event, StepDone)] == [1, 2, 3]
    assert record.trained.interrupted
    kept = json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))
    assert kept["trained"]["stopped_because"] == f"asked to stop ({number.name})"
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()
    assert any("--resume" in event.text for event in told if isinstance(event, Note))
    resumed, _ = tune(config, resume=True)
    assert not resumed.trained.interrupted
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(finished)


def test_a_signal_in_the_last_step_finds_everything_done(model: Path, data: Path, tmp_path: Path) -> None:
    listen, _ = signal_at(2, signal.SIGTERM)
    record = finetune(settings(model, data, tmp_path / "run", steps=2), listen)
    assert not record.trained.interrupted
    assert {when for _, _, when in record.losses} != {None}


def test_stop_after_makes_a_step_saves_and_leaves(model: Path, data: Path, tmp_path: Path) -> None:
    record, told = tune(settings(model, data, tmp_path / "run", stop_after="0.001s", save_every=0))
    assert record.trained.steps == 1
    assert record.trained.stopped_because == "the time given (--stop-after 0.001s) is over"
    assert [event.kind for event in told if isinstance(event, Saved)] == ["checkpoint", "adapter"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]


def test_early_stopping_exports_the_best_and_keeps_the_newest(model: Path, data: Path, tmp_path: Path) -> None:
    """Evaluations and saves at different steps; the rate is far too high, so the loss soon rises."""
    out = tmp_path / "run"
    over = {"evaluate_every": 2, "early_stopping": 2, "save_every": 3, "steps": 20}
    record, told = tune(
        settings(model, data, out, **over, optimizer__learning_rate=0.3, optimizer__schedule="constant")
    )
    measured = {event.step: event for event in told if isinstance(event, Evaluated) and event.when == "during"}
    best = min(measured, key=lambda step: measured[step].loss)
    assert record.trained.settled and not record.trained.interrupted
    assert record.trained.best_step == best < record.trained.steps < 20
    kept_at = [event.step for event in told if isinstance(event, Saved) and event.kind == "best"]
    assert kept_at == [step for step in measured if measured[step].best]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{record.trained.steps:06d}"]
    assert adapter_bytes(out) == (out / "best" / "adapter_model.safetensors").read_bytes()
    after = {name: loss for name, _, loss in record.losses}
    assert after["heldout"] == measured[best].loss
    assert {name: loss for name, _, loss in evaluate(out).losses}["heldout"] == measured[best].loss


def test_ten_bad_steps_in_a_row_end_the_run_and_the_last_good_state_is_there(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train.run_step

    def poisoned(model: object, place: object, micro: object, rung: object, optimizer: object, rate: float, step: int):
        """The third step and those after it meet a gradient that is not finite."""

        def spoil(optimizer) -> None:
            if step >= 2:
                optimizer.grads[0] = float("inf")

        return whole(model, place, micro, rung, optimizer, rate, step, spoil)

    monkeypatch.setattr(train, "run_step", poisoned)
    told: list[Event] = []
    with pytest.raises(NumbersGoneBad, match="the state of step 2 is saved") as gone:
        finetune(settings(model, data, tmp_path / "run", steps=30, save_every=100), told.append)
    assert gone.value.exit_code == 1
    assert [event.skipped for event in told if isinstance(event, StepDone)] == [False] * 2 + [True] * 10
    (kept,) = checkpoint._all(tmp_path / "run" / "checkpoints")
    assert checkpoint._facts(kept)["progress"]["step"] == 2
    monkeypatch.undo()
    killed(settings(model, data, tmp_path / "good", steps=30, save_every=2), kill_at_save(1))
    good = tmp_path / "good" / "checkpoints" / "step-000002" / "state.safetensors"
    assert (kept / "state.safetensors").read_bytes() == good.read_bytes()


def test_a_bad_step_changes_nothing_and_the_run_goes_on(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train.run_step

    def poisoned(*given):
        def spoil(optimizer) -> None:
            if given[-1] == 0:
                optimizer.grads[0] = float("nan")

        return whole(*given, spoil)

    monkeypatch.setattr(train, "run_step", poisoned)
    record, _ = tune(settings(model, data, tmp_path / "run", steps=1))
    assert record.trained.skipped_steps == 1
    lines = (tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert all(not tensor.any() for name, tensor in adapter_tensors(tmp_path / "run").items() if "lora_B" in name)
