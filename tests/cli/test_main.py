from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ajusta.base.errors import ConfigError, DataError, DoesNotFit, UserError

Typed = Callable[..., int]


def test_train_hands_one_config_over(fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["-m", "m", "-d", "a.txt", "-d", "b", "--exam", "e.jsonl", "-o", "r"]
    how = ["--epochs", "2", "--memory", "2GiB", "--bits", "nf4", "--stop-after", "3h", "--resume"]
    assert typed("train", *where, *how, "--set", "lora.r=4", "--set", "optimizer.learning_rate=2e-3") == 0
    name, (config, resume) = fake_run.calls[0]
    assert (name, resume) == ("finetune", True)
    assert (config.model, config.data, config.exam) == ("m", (Path("a.txt"), Path("b")), (Path("e.jsonl"),))
    assert (config.lora.r, config.optimizer.learning_rate, config.out) == (4, 2e-3, Path("r"))
    shown = capsys.readouterr()
    assert "1/40" in shown.out and "38/40" in shown.out and "runs/x/adapter" in shown.out
    assert "fp32, because it is the fastest here" in shown.err
    assert "fp32" not in shown.out


def test_the_file_and_the_flags_are_one_schema(
    fake_run: Any, typed: Typed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: d\nepoch: 3\n", encoding="utf-8")
    assert typed("train", "-c", str(file), "--epochs", "three", "--set", "lora.rank=x") == 2
    message = capsys.readouterr().err
    assert f"{file}:3: there is no setting 'epoch'; did you mean 'epochs'?" in message
    assert "--epochs: epochs is 'three'; expected a whole number" in message
    assert "--set: there is no setting 'lora.rank'; did you mean 'lora.r'?" in message
    assert not fake_run.calls


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--set lora.r", "expected KEY=VALUE"),
        ("--set lora.r=1 --set lora.r=2", "is given twice"),
        ("--epochs 1 --set epochs=2", "is given as --epochs too"),
    ],
)
def test_a_set_that_cannot_be_meant_is_refused(
    fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    assert typed("train", "-m", "m", "-d", "d", *words.split()) == 2
    assert expected in capsys.readouterr().err


def test_set_takes_lists_nothing_and_text(fake_run: Any, typed: Typed) -> None:
    pairs = ["lora.targets=[q, v]", "lora.exclude=a,b", "revision=null", "text.system=Answer: short", "max-length=64"]
    assert typed("train", "-m", "m", "-d", "d", *(word for pair in pairs for word in ("--set", pair))) == 0
    config = fake_run.calls[0][1][0]
    assert (config.lora.targets, config.lora.exclude) == (("q", "v"), ("a", "b"))
    assert (config.revision, config.text.system, config.max_length) == (None, "Answer: short", 64)


@pytest.mark.parametrize(
    ("trouble", "code", "expected"),
    [
        (ConfigError("a; b; c"), 2, "ajusta: a; b; c"),
        (DataError("row"), 2, "ajusta: row"),
        (DoesNotFit("2 GiB missing"), 3, "ajusta: 2 GiB missing"),
        (KeyboardInterrupt(), 130, "ajusta: stopped by Ctrl-C; the same command with --resume"),
        (ZeroDivisionError("oh"), 1, "something went wrong that should not: ZeroDivisionError: oh"),
    ],
)
def test_every_failure_has_its_exit_code_and_one_message(
    fake_run: Any,
    typed: Typed,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trouble: BaseException,
    code: int,
    expected: str,
) -> None:
    fake_run.trouble = trouble
    assert typed("train", "-m", "m", "-d", "d") == code
    shown = capsys.readouterr()
    assert expected in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    monkeypatch.setenv("AJUSTA_DEBUG", "1")
    assert typed("train", "-m", "m", "-d", "d") == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "trian", "train --epoch 3", "chat", "export"])
def test_a_wrong_command_line_is_the_persons_mistake(
    typed: Typed, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert typed(*words.split()) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err


def test_evaluate_export_plan_data_doctor(
    fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert typed("evaluate", "r", "-d", "a", "--exam", "e", "--json") == 0
    assert json.loads(capsys.readouterr().out)["exams"] == [["exam.jsonl", 1, 38, 40]]
    assert typed("export", "r", "--format", "merged", "-o", "x") == 0
    assert capsys.readouterr().out == f"{Path('r') / 'merged'}\n"
    assert typed("export", "r", "--format", "onnx") == 2
    assert "expected adapter or merged" in capsys.readouterr().err
    assert typed("plan", "-m", "m", "--max-length", "64") == 0
    assert "1.00 GiB" in capsys.readouterr().out
    assert typed("plan", "-m", "m", "--json") == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == 1 << 30
    assert typed("data", "a", "b", "-m", "m") == 0
    shown = capsys.readouterr().out
    assert "a.jsonl:3" in shown and "no trained token" in shown and "\x1b" not in shown
    assert typed("data", "a", "-m", "m", "--json") == 0
    assert json.loads(capsys.readouterr().out)["summary"]["files"] == 1
    assert typed("doctor") == 0
    assert "do: pip install 'ajusta[fast]'" in capsys.readouterr().out
    assert typed("doctor", "--measure") == 0
    assert [given for name, given in fake_run.calls if name == "doctor"] == [(False,), (True,)]
    names = [name for name, _ in fake_run.calls]
    assert names == ["evaluate", "export", "plan", "plan", "look_at_data", "look_at_data", "doctor", "doctor"]
    assert fake_run.calls[0][1] == (Path("r"), (Path("a"),), (Path("e"),))


def test_a_plan_that_does_not_fit_is_shown_and_has_its_exit_code(
    fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run.fits = False
    assert typed("plan", "-m", "m") == 3
    assert "does not fit" in capsys.readouterr().out


def test_explain_shows_one_screen_and_the_plan_to_ask_for_next(
    fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("explain", "-m", "m", "--gpu", "RTX 3060", "--max-length", "64", "--set", "lora.r=4") == 0
    name, (config, gpu) = fake_run.calls[0]
    assert (name, gpu, config.model, config.max_length, config.lora.r) == ("explain", "RTX 3060", "m", 64, 4)
    shown = capsys.readouterr().out
    assert "5 + chunked loss" in shown and "does not fit" in shown
    last = "next: ajusta plan --model m --gpu 'RTX 3060' --max-length 64 --set lora.r=4 --bits nf4\n"
    assert shown.endswith(last), "what does not fit is no failure: this explains, and promises nothing"


@pytest.mark.parametrize(
    ("words", "bits"), [("", "nf4"), ("--bits none", "nf4"), ("--bits int8", "int8"), ("--set bits=int8", "int8")]
)
def test_the_next_plan_has_the_bits_that_were_explained(
    fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str], words: str, bits: str
) -> None:
    assert typed("explain", "-m", "m", "-d", "a.txt", "-d", "b", "--json", *words.split()) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["next"] == f"ajusta plan --model m --data a.txt --data b --bits {bits}"
    assert len(facts["levels"]) == 5 and len(facts["levels"][0]["how"]) == 3
    assert typed(*facts["next"].split()[1:]) == 0, "it can be typed"


def test_explain_needs_a_model(fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("explain") == 2
    assert "model is missing" in capsys.readouterr().err
    fake_run.trouble = UserError("'zzz' is no card")
    assert typed("explain", "-m", "m", "--gpu", "zzz") == 2
    assert capsys.readouterr().err == "ajusta: 'zzz' is no card\n"


def test_chat_answers_questions_and_leaves(fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("chat", "r", "--question", "one") == 0
    assert capsys.readouterr().out == "I heard one\n"
    assert typed("chat", "r", "--question", "one", "--question", "two", "--max-tokens", "5", "--seed", "3") == 0
    assert capsys.readouterr().out == "> one\nI heard one\n> two\nI heard two\n"
    assert fake_run.calls[-1] == ("answer", ([{"role": "user", "content": "two"}], 5, 0.0, 3))


@pytest.mark.parametrize("ending", ["/exit\nnever\n", ""])
def test_chat_goes_on_until_exit_or_the_end_of_the_input(
    fake_run: Any, typed: Typed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n/new\nthree\n" + ending))
    assert typed("chat", "r") == 0
    assert capsys.readouterr().out == "I heard one\nI heard two\nI heard three\n"
    heard = [len(given[0]) for name, given in fake_run.calls if name == "answer"]
    assert heard == [1, 3, 1]


def test_chat_without_any_standard_input_ends(fake_run: Any, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert typed("chat", "r") == 0


def child(*words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, env=env, timeout=60, check=False)


def test_a_terminal_without_utf8_does_not_crash(tmp_path: Path) -> None:
    words = ["-m", "ajusta", "train", "-c", str(tmp_path / "\u00fcber \u6570\u636e.yaml")]
    done = child(*words, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 2
    assert b"cannot be read" in done.stderr
    assert b"\\u6570" in done.stderr
    assert b"Traceback" not in done.stderr


def test_python_dash_m_and_the_version() -> None:
    done = child("-m", "ajusta", "--version")
    assert (done.returncode, done.stdout.startswith(b"ajusta 0.")) == (0, True)
