"""A stand-in for `ajusta.run` and `ajusta.look` that remembers what it was asked, and a way to type a command."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from explained import make_explanation

import ajusta
from ajusta.base.events import Listener, Note
from ajusta.cli.main import main
from ajusta.spec.config import Config
from ajusta.spec.data import DataSummary, Dropped
from ajusta.spec.explanation import Explanation
from ajusta.spec.plan import Choice, Longest, OnCard, PhasePeak, Plan, Rung

SUMMARY = DataSummary(
    files=1,
    rows_read=3,
    train_examples=2,
    heldout_examples=0,
    train_tokens=20,
    heldout_tokens=0,
    trained_tokens=12,
    longest=11,
    dropped=(Dropped(source="a.jsonl:3", reason="no trained token"),),
    notes=("system turn folded into the first user turn: 1",),
)


@dataclass(frozen=True, kw_only=True)
class FakeRecord:
    exams: tuple[tuple[str, int | None, int | None, int], ...] = (("exam.jsonl", 1, 38, 40),)
    losses: tuple[tuple[str, float | None, float | None], ...] = (("held-out text", 3.25, 2.5),)
    adapter: Path | None = Path("runs/x/adapter")
    savings: tuple[tuple[str, int], ...] = (("nf4 weights", 3 << 20),)


def make_plan(fits: bool) -> Plan:
    rung = Rung(recompute_blocks=30, micro_tokens=512, loss_chunk=128, peak_bytes=1 << 30)
    phase = PhasePeak(phase="step", peak_bytes=1 << 30, operation="mm", by_category={"weights": 1 << 30})
    return Plan(
        fits=fits,
        device="cpu",
        dtype="fp32",
        bits="nf4",
        blocks=30,
        budget_bytes=2 << 30,
        margin_bytes=0,
        rungs=(rung,),
        phases=(phase,),
        choices=(Choice(name="dtype", value="fp32", because="it is the fastest here"),),
    )


@dataclass(frozen=True, kw_only=True)
class FakePrepared:
    summary: DataSummary = SUMMARY
    histogram: tuple[tuple[int, int, int], ...] = ((0, 8, 1), (8, 16, 1))
    sample: tuple[tuple[str, bool], ...] = (("Q: \x1b[2J", False), ("A", True))


@dataclass(frozen=True, kw_only=True)
class FakeFinding:
    name: str
    value: str
    problem: str | None = None
    cure: str | None = None


@dataclass
class FakeRun:
    """Takes the place of `ajusta.run`; `trouble` is raised by whatever is called."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    trouble: BaseException | None = None
    fits: bool = True

    def _called(self, name: str, *given: Any) -> None:
        self.calls.append((name, given))
        if self.trouble is not None:
            raise self.trouble

    def finetune(self, config: Config, listener: Listener, *, resume: bool) -> FakeRecord:
        self._called("finetune", config, resume)
        listener(Note(text="fp32, because it is the fastest here"))
        return FakeRecord()

    def plan(self, config: Config, listener: Listener, *, gpu: str | None) -> Plan:
        self._called("plan", config, gpu)
        return make_plan(self.fits)

    def explain(self, config: Config, listener: Listener, *, gpu: str | None) -> Explanation:
        self._called("explain", config, gpu)
        return make_explanation()

    def plan_on_cards(self, config: Config, listener: Listener) -> tuple[OnCard, ...]:
        self._called("plan_on_cards", config)
        return (OnCard(card="small", plan=make_plan(False)), OnCard(card="large", plan=make_plan(self.fits)))

    def longest_context(self, config: Config, listener: Listener, *, gpu: str | None) -> Longest:
        self._called("longest_context", config, gpu)
        return Longest(tokens=70_016, limit=2048, plan=make_plan(True))

    def largest_model(self, config: Config, listener: Listener, *, gpu: str | None) -> tuple[str, Plan]:
        self._called("largest_model", config, gpu)
        return "some-3b", make_plan(True)

    def evaluate(
        self, folder: Path, listener: Listener, *, data: tuple[Path, ...], exams: tuple[Path, ...]
    ) -> FakeRecord:
        self._called("evaluate", folder, data, exams)
        return FakeRecord()

    def export(self, folder: Path, out: Path | None, form: str, listener: Listener) -> Path:
        self._called("export", folder, out, form)
        return folder / form

    def chat(self, folder: Path, listener: Listener) -> FakeRun:
        self._called("chat", folder)
        return self

    def answer(
        self, messages: list[dict[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Iterator[str]:
        self.calls.append(("answer", (messages, max_tokens, temperature, seed)))
        yield from ("I heard ", messages[-1]["content"])

    def look_at_data(self, config: Config, listener: Listener) -> FakePrepared:
        self._called("look_at_data", config)
        return FakePrepared()

    def doctor(self, listener: Listener, *, measure: bool) -> list[FakeFinding]:
        self._called("doctor", measure)
        cure = "pip install 'ajusta[fast]'"
        return [FakeFinding(name="device", value="cpu"), FakeFinding(name="x", value="-", problem="absent", cure=cure)]


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    monkeypatch.setitem(sys.modules, "ajusta.run", types.ModuleType("ajusta.run"))
    monkeypatch.setattr(ajusta, "run", fake, raising=False)
    monkeypatch.setitem(sys.modules, "ajusta.look", types.ModuleType("ajusta.look"))
    monkeypatch.setattr(ajusta, "look", fake, raising=False)
    return fake


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Type a command; returns the exit code."""

    def type_command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["ajusta", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code if isinstance(left.value.code, int) else 0

    return type_command
