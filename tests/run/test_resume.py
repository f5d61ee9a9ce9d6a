"""kill -9 and --resume: the adapter is bit for bit that of a run that nothing disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import FAST, Killed, adapter_bytes, flags, kill_at_save, killed, settings, tune

from ajusta.base.errors import UserError
from ajusta.base.events import Ahead, Event, Note, StepDone
from ajusta.stages import device, folder

EVALUATING = {"evaluate_every": 1, "early_stopping": 2, "save_every": 2, "steps": 8, "optimizer__learning_rate": 20.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nf4, dropout, recomputed": {"bits": "nf4", "lora__dropout": 0.3, "gradient_checkpointing": "full"},
    "early stopping": EVALUATING,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_killed_run_goes_on_as_if_nothing_had_been(variant: str, model: Path, data: Path, tmp_path: Path) -> None:
    over = VARIANTS[variant]
    whole, _ = tune(settings(model, data, tmp_path / "whole", **over))
    broken = settings(model, data, tmp_path / "broken", **over)
    killed(broken, kill_at_save(1))
    assert not (tmp_path / "broken" / "adapter").exists()
    record, told = tune(broken, resume=True)
    assert adapter_bytes(tmp_path / "broken") == adapter_bytes(tmp_path / "whole")
    steps = [event.step for event in told if isinstance(event, StepDone)]
    assert steps[0] == 3
    assert [event.first_step for event in told if isinstance(event, Ahead)][-1] == 3
    assert replace(record.trained, seconds=0.0) == replace(whole.trained, seconds=0.0)
    assert record.losses == whole.losses
    if over is EVALUATING:
        assert record.trained.settled and record.trained.steps < 8


def test_killed_in_the_middle_of_a_save(
    model: Path, data: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, data, tmp_path / "run")
    replaced = os.replace

    def die_at_second(source: Path, target: Path) -> None:
        if Path(target).name == "step-000004":
            raise Killed
        replaced(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "replace", die_at_second)
        killed(config, lambda event: None)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [".step-000004.partial", "step-000002"]
    tune(config, resume=True)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(finished)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000006"]


def test_without_any_checkpoint_it_starts_at_the_beginning(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    def kill_in_step_two(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            raise Killed

    config = settings(model, data, tmp_path / "run")
    killed(config, kill_in_step_two)
    assert not (tmp_path / "run" / "checkpoints").exists()
    tune(config, resume=True)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(finished)


def test_a_finished_run_is_left_as_it_is(model: Path, data: Path, tmp_path: Path) -> None:
    config = settings(model, data, tmp_path / "run", **EVALUATING)
    first, _ = tune(config)
    state = next((tmp_path / "run" / "checkpoints").glob("step-*/state.safetensors"))
    before, written = adapter_bytes(tmp_path / "run"), state.stat().st_mtime_ns
    again, told = tune(config, resume=True)
    assert not [event for event in told if isinstance(event, StepDone)]
    assert adapter_bytes(tmp_path / "run") == before
    assert state.stat().st_mtime_ns == written
    assert again.trained == first.trained
    assert again.losses == first.losses


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    config = settings(model, data, tmp_path / "run")
    killed(config, kill_at_save(2))
    (newest,) = (tmp_path / "run" / "checkpoints").iterdir()
    file = newest / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    _, told = tune(config, resume=True)
    warnings = [event.text for event in told if isinstance(event, Note) and event.warning]
    assert "step-000004 is damaged and was passed over" in warnings
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(finished)


def test_another_run_is_refused_by_name_and_the_same_one_with_more_room_is_not(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    killed(settings(model, data, out), kill_at_save(1))
    written = (out / "config.yaml").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("Something else is here, and it is as long as this.\n" * 3, encoding="utf-8")
    refused = {
        "optimizer.learning_rate (0.005, now 0.001)": settings(model, data, out, optimizer__learning_rate=1e-3),
        "lora.r (4, now 8)": settings(model, data, out, lora__r=8),
        "another data": settings(model, other, out),
    }
    for named, config in refused.items():
        with pytest.raises(UserError, match=r"was saved with another .*put back what was") as refusal:
            tune(config, resume=True)
        assert named in str(refusal.value)
        assert (out / "config.yaml").read_bytes() == written
    tune(settings(model, data, out, memory="3GiB", stop_after="10h", save_every=1), resume=True)
    assert adapter_bytes(out) == adapter_bytes(finished)


def test_another_base_is_refused(data: Path, tmp_path: Path, model: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = settings(copy, data, tmp_path / "run", steps=2, save_every=1)
    killed(config, kill_at_save(1))
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 64
    weights.write_bytes(content)
    with pytest.raises(UserError, match="another base"):
        tune(config, resume=True)


def test_what_was_measured_on_the_first_day_counts_on_the_second(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine measures another dtype and has less memory free: the resumed run keeps dtype and rung."""
    config = settings(model, data, tmp_path / "run", dtype="auto", gradient_checkpointing="auto", micro_batch="auto")
    rates = {"fp32": 2.0, "bf16": 1.0}
    monkeypatch.setattr(device, "matmul_rate", lambda dtype, _: rates["bf16" if "bfloat16" in str(dtype) else "fp32"])
    killed(config, kill_at_save(1))
    rates["bf16"] = 9.0
    record, _ = tune(config, resume=True)
    assert record.plan.dtype == "fp32"
    assert {choice.because for choice in record.plan.choices if choice.name in ("dtype", "micro_batch")} == {
        "the run began with it"
    }


@pytest.mark.parametrize("moment", ["after a save", pytest.param("in a save", marks=pytest.mark.slow)])
def test_kill_minus_nine(moment: str, model: Path, data: Path, tmp_path: Path) -> None:
    """The real command, the real signal."""
    long = {**FAST, "steps": 12}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if moment == "in a save":
        hook = (
            "import os, signal\nreplace = os.replace\n"
            "def dying(source, target):\n"
            "    if str(target).endswith('step-000004'): os.kill(os.getpid(), signal.SIGKILL)\n"
            "    replace(source, target)\n"
            "os.replace = dying\n"
        )
        (tmp_path / "sitecustomize.py").write_text(hook, encoding="utf-8")
        env["PYTHONPATH"] = str(tmp_path)
    out = tmp_path / "run"
    words = [sys.executable, "-m", "ajusta", "train", "-m", str(model), "-d", str(data), "-o", str(out), *flags(long)]
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        until = time.monotonic() + 240
        while not list((out / "checkpoints").glob("step-*")) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        if moment == "after a save":
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, said
    assert not (out / "record.json").exists()
    config = settings(model, data, out, steps=12)
    tune(config, resume=True)
    tune(settings(model, data, tmp_path / "whole", steps=12))
    assert adapter_bytes(out) == adapter_bytes(tmp_path / "whole")
