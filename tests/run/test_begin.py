"""Before the first step: folders, devices, memory, data: what is refused, in one line and by which exit code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import (
    FAST,
    adapter_bytes,
    adapter_tensors,
    flags,
    kill_at_save,
    killed,
    settings,
    tune,
    write_exam,
    write_model,
)

from ajusta.base.errors import NumbersGoneBad, UserError
from ajusta.base.events import Note, PhaseEnded, PhaseStarted, StepDone
from ajusta.engine.weights import SafetensorsSource
from ajusta.look import plan
from ajusta.stages import folder as folders
from ajusta.stages.folder import open_for_training, write_whole

Typed = Callable[..., int]


def train_words(model: Path, data: Path, out: Path, **over: object) -> list[str]:
    return ["train", "-m", str(model), "-d", str(data), "-o", str(out), *flags({**FAST, "steps": 1, **over})]


def test_a_folder_that_holds_something_is_refused_and_left_alone(
    model: Path, data: Path, tmp_path: Path, finished: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "letter.txt").write_text("dear", encoding="utf-8")
    assert typed(*train_words(model, data, out)) == 2
    assert "holds other things (letter.txt) already" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["letter.txt"]
    assert typed(*train_words(model, data, out), "--resume") == 2
    assert "is no run folder" in capsys.readouterr().err
    before = adapter_bytes(finished)
    assert typed(*train_words(model, data, finished)) == 2
    assert "holds a run already" in (said := capsys.readouterr().err) and "--resume" in said
    assert adapter_bytes(finished) == before
    assert typed(*train_words(model, data, out / "letter.txt")) == 2
    assert "is a file" in capsys.readouterr().err
    assert typed(*train_words(model, data, out / "letter.txt" / "run")) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_two_runs_cannot_have_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for resume in (False, True):
        again = open_for_training(out, resume=resume)
        with open_for_training(out, resume=resume), pytest.raises(UserError, match="another run is using"), again:
            pass
    with open_for_training(out, resume=False):
        pass


def test_a_try_that_never_began_leaves_the_folder_free(
    model: Path, data: Path, tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    """And every way out of what does not fit is accepted, typed as it is given."""
    out = tmp_path / "run"
    assert typed(*train_words(model, data, out, memory="33MiB", batch_size=4, micro_batch=4)) == 3
    said = capsys.readouterr()
    assert re.search(r"does not fit: [\d.]+ MiB needed, 33(\.\d)? MiB given, [\d.]+ (MiB|KiB) missing", said.err)
    assert said.out == ""
    ways = [line.split("   (")[0].strip() for line in said.err.split("ways out:")[1].strip().splitlines()]
    assert ways[0].startswith("--memory")
    codes = {}
    for way in ways:
        kept = {name: value for name, value in FAST.items() if f"{name}=" not in way}
        kept |= {"batch_size": 4, "micro_batch": 4, "steps": 1}
        if "--memory" not in way:
            kept["memory"] = "33MiB"
        words = ["plan", "-m", str(model), "-d", str(data), *flags(kept), *shlex.split(way)]
        codes[way] = typed(*words)
        assert codes[way] in (0, 3), capsys.readouterr().err
    assert codes[ways[0]] == 0
    capsys.readouterr()
    words = train_words(model, data, out, batch_size=4, micro_batch=4)
    assert typed(*words, *shlex.split(ways[0])) == 0
    events = [json.loads(line) for line in (out / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["phase"] for event in events if event["event"] == "PhaseStarted"].count("data") == 1


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("dtype=fp16", "dtype fp16 overflows without loss scaling; expected fp32 or bf16"),
        ("device=cuda", "torch finds no usable card"),
        ("device=mps", "device mps is not supported yet"),
        ("lora.targets=q_prj", "q_proj"),
    ],
)
def test_what_this_machine_or_model_cannot_do_is_one_line(
    setting: str,
    expected: str,
    model: Path,
    data: Path,
    tmp_path: Path,
    typed: Typed,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if setting == "device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a card")
    name, value = setting.split("=")
    assert typed(*train_words(model, data, tmp_path / "run", **{name: value})) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ajusta: ")]
    assert expected in line


def test_bf16_when_asked_for(model: Path, data: Path, tmp_path: Path) -> None:
    record, _ = tune(settings(model, data, tmp_path / "run", dtype="bf16", steps=1))
    assert (record.plan.dtype, [c.because for c in record.plan.choices if c.name == "dtype"]) == (
        "bf16",
        ["you asked for it"],
    )
    assert {tensor.dtype for tensor in adapter_tensors(tmp_path / "run").values()} == {torch.float32}


def test_names_that_a_shell_would_trip_over(model: Path, data: Path, tmp_path: Path, typed: Typed) -> None:
    place = tmp_path / "my data (1)" / "\u00fcber 'it' \"#\u6570\u636e"
    shutil.copytree(data, place / "-in")
    shutil.copytree(model, place / "mod el")
    exam = write_exam(place / "exam #1.jsonl")
    out = place / "run 1"
    words = train_words(place / "mod el", place / "-in", out)
    assert typed(*words, "--exam", str(exam)) == 0
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert (out / "exams" / "exam #1-after.jsonl").is_file()
    assert typed("export", str(out), "--format", "merged", "-o", str(place / "mer ged")) == 0
    assert (place / "mer ged" / "model.safetensors").is_file()


def test_two_exams_of_one_name_are_two_exams(model: Path, data: Path, tmp_path: Path) -> None:
    exams = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        exams.append(str(write_exam(tmp_path / name / "exam.jsonl")))
    record, _ = tune(settings(model, data, tmp_path / "run", steps=1, exam=exams))
    assert [(name, total) for name, _, _, total in record.exams] == [("a-exam-jsonl", 2), ("b-exam-jsonl", 2)]
    with pytest.raises(UserError, match="expected each file once"):
        tune(settings(model, data, tmp_path / "run2", steps=1, exam=[exams[0], exams[0]]))


def test_changed_questions_are_asked_again_on_resume(model: Path, data: Path, tmp_path: Path) -> None:
    exam = write_exam(tmp_path / "exam.jsonl")
    config = settings(model, data, tmp_path / "run", steps=2, save_every=1, exam=[str(exam)])
    killed(config, kill_at_save(1))
    exam.write_text(exam.read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    record, _ = tune(config, resume=True)
    assert [result.total for result in record.exam_results] == [1, 1]


def test_a_full_disk_is_one_line(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path
) -> None:
    config = settings(model, data, tmp_path / "run")
    killed(config, kill_at_save(1))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "_flush", full)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
            tune(config, resume=True)
    tune(config, resume=True)
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(finished)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(content: str, fail: bool = False) -> Callable[[Path], None]:
        def make(aside: Path) -> None:
            (aside / "inner").mkdir(parents=True)
            (aside / "inner" / "a").write_text(content, encoding="utf-8")
            if fail:
                raise KeyboardInterrupt

        return make

    target = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt):
        write_whole(target, write("one", fail=True))
    assert not target.exists()
    write_whole(target, write("one"))
    with pytest.raises(KeyboardInterrupt):
        write_whole(target, write("two", fail=True))
    assert (target / "inner" / "a").read_text(encoding="utf-8") == "one"
    write_whole(target, write("two"))
    assert (target / "inner" / "a").read_text(encoding="utf-8") == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def damaged(model: Path, copy: Path, name: str, value: float) -> Path:
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name].fill_(value)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_weights_that_are_no_numbers_stop_the_run(
    model: Path, data: Path, tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = damaged(model, tmp_path / "bad", "model.layers.1.mlp.up_proj.weight", float("nan"))
    assert typed(*train_words(bad, data, tmp_path / "run")) == 1
    assert "logits that are no finite numbers; expected finite ones; the weights are damaged" in capsys.readouterr().err


def test_an_adapter_that_the_loss_does_not_reach_is_named(model: Path, data: Path, tmp_path: Path) -> None:
    dead = damaged(model, tmp_path / "dead", "model.layers.1.mlp.down_proj.weight", 0.0)
    with pytest.raises(NumbersGoneBad, match=r"2 of 14 adapters got no gradient .*layers\.1\.mlp\.gate_proj"):
        tune(settings(dead, data, tmp_path / "run", steps=1, lora__alpha=1))


def test_an_adapter_is_gone_on_from(model: Path, data: Path, tmp_path: Path, finished: Path) -> None:
    """Its rank, its scale and its numbers: the first loss is the last model's on those rows."""
    adapter = finished / "adapter"
    over = {"lora__adapter": str(adapter), "lora__r": 7, "lora__alpha": 3.0, "steps": 2}
    record, told = tune(settings(model, data, tmp_path / "on", **over))
    notes = [event.text for event in told if isinstance(event, Note) and event.warning]
    assert notes == [f"lora.{what}, as in the adapter that is gone on from" for what in ("r is 4", "alpha is 16.0")]
    before = {result.name: result.loss for result in record.loss_results if result.when == "before"}
    kept = json.loads((finished / "record.json").read_text(encoding="utf-8"))
    last = {row["name"]: row["loss"] for row in kept["loss_results"] if row["when"] == "after"}
    assert before == last
    old, new = adapter_tensors(finished), adapter_tensors(tmp_path / "on")
    assert old.keys() == new.keys()
    assert all(not torch.equal(old[name], new[name]) for name in old)
    assert record.model.trainable == sum(tensor.numel() for tensor in old.values())


def test_a_run_is_told_in_order_and_the_counts_agree(model: Path, data: Path, tmp_path: Path) -> None:
    """Two epochs with a small last step each: steps, tokens and the schedule end together."""
    exam = write_exam(tmp_path / "exam.jsonl")
    over = {"steps": None, "epochs": 2, "evaluate_every": 3, "batch_size": 4, "optimizer__warmup": 0.2}
    record, told = tune(settings(model, data, tmp_path / "run", **over, exam=[str(exam)]))
    began = [event.phase for event in told if isinstance(event, PhaseStarted)]
    ended = [event.phase for event in told if isinstance(event, PhaseEnded)]
    assert began == ended
    assert began == ["data", "plan", "load", "rehearse", "evaluate", "exam", "train", "evaluate", "exam"]
    steps = [event for event in told if isinstance(event, StepDone)]
    examples = record.data.train_examples
    assert examples % 4 and len(steps) == 2 * -(-examples // 4) == steps[0].total_steps
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.tokens for step in steps) == 2 * record.data.train_tokens == record.trained.tokens
    assert sum(step.trained_tokens for step in steps) == 2 * record.data.trained_tokens
    assert steps[-1].tokens_left == 0
    assert [a.tokens_left - b.tokens_left for a, b in pairwise(steps)] == [step.tokens for step in steps[1:]]
    rates = [step.learning_rate for step in steps]
    assert max(rates) <= 5e-3 and rates[-1] == min(rates[1:]) and 0 < rates[-1] < 0.1 * 5e-3
    assert steps[-1].epoch == 2
    kept = json.loads((tmp_path / "run" / "record.json").read_text(encoding="utf-8"))
    assert kept["trained"]["steps"] == len(steps)
    assert {row["phase"] for row in kept["phases"]} == {"data", "plan", "load", "train", "evaluate", "exam"}
    assert [name for name, _, _, _ in record.exams] == ["exam"]
    assert [name for name, _, _ in record.losses] == ["heldout", "general"]
    assert {name for name, _ in record.savings} == {"gradient checkpointing", "LoRA"}


def test_planning_needs_no_data(model: Path, data: Path, tmp_path: Path) -> None:
    made = plan(settings(model, data, tmp_path).model_copy(update={"data": ()}))
    assert made.fits and made.rung.micro_tokens >= 96


def test_an_encoder_is_refused_before_a_weight_is_read(
    data: Path, tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = write_model(tmp_path / "encoder", "bert", **shape)

    def never(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(SafetensorsSource, "read", never)
    for words in (
        ["plan", "-m", str(folder), "--set", "device=cpu"],
        train_words(folder, data, tmp_path / "run"),
    ):
        assert typed(*words) == 2
        said = [line for line in capsys.readouterr().err.splitlines() if "bert" in line and "both directions" in line]
        assert len(said) == 1 and "expected a causal language model" in said[0] and "choose one that" in said[0]
    assert not (tmp_path / "run" / "adapter").exists()


def test_what_is_no_causal_model_without_any_switch_is_refused_once_loaded(
    data: Path, tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"hidden_size": 64, "dim_ff": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "dim_head": 16}
    folder = write_model(tmp_path / "prefix", "cpmant", **shape)
    assert typed(*train_words(folder, data, tmp_path / "run", **{"text.packing": False})) == 2
    assert "is no causal language model: in CpmAntForCausalLM a token sees those" in capsys.readouterr().err
