"""What a run was: from what, how, what it cost, what came of it. Written into the run folder as record.json."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ajusta.spec.data import DataSummary
from ajusta.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question of an exam, what was expected and what was said."""

    question: str
    expected: tuple[str, ...]
    given: str
    correct: bool


@dataclass(frozen=True, kw_only=True)
class ExamResult:
    """An exam taken once; `when` is before or after the training."""

    exam: str
    when: str
    correct: int
    total: int


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """A loss taken on text that is not trained on, in nats per token; `name` is heldout or general."""

    name: str
    when: str
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a model scored at one moment."""

    losses: tuple[LossResult, ...] = ()
    exams: tuple[ExamResult, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PhaseMeasure:
    """What a phase took, beside what was planned; bytes of tensors."""

    phase: str
    seconds: float
    planned_bytes: int | None
    measured_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the training loop did."""

    steps: int
    total_steps: int
    epochs: float
    tokens: int
    trained_tokens: int
    seconds: float
    skipped_steps: int
    last_loss: float
    stopped_because: str | None = None  # None: all steps were made
    best_step: int | None = None
    best_loss: float | None = None
    settled: bool = False  # early stopping: the held-out loss had stopped falling

    @property
    def interrupted(self) -> bool:
        """Whether the run left before its end, to be resumed."""
        return self.stopped_because is not None and not self.settled


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Which model, pinned."""

    reference: str
    revision: str | None
    fingerprint: str
    model_type: str
    parameters: int
    trainable: int
    adapted: int  # linears with an adapter
    not_adapted: tuple[str, ...]  # linears of the blocks without one
    routers: tuple[str, ...]  # linears that choose experts: in float, adapted only where they were named
    stacked_experts: tuple[str, ...]  # modules whose experts are one tensor: neither adapted nor quantized
    in_float: tuple[str, ...]  # weights that were left in float although bits were asked for
    effective_scale: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """The whole run."""

    version: str
    model: ModelFacts
    plan: Plan
    data: DataSummary
    trained: Trained
    phases: tuple[PhaseMeasure, ...]
    exam_results: tuple[ExamResult, ...]
    loss_results: tuple[LossResult, ...]
    folder: str
    adapter: str
    environment: dict[str, str]

    @property
    def exams(self) -> tuple[tuple[str, int | None, int | None, int], ...]:
        """Exam's name, right answers before and after, questions."""
        names = dict.fromkeys(result.exam for result in self.exam_results)
        found = {(result.exam, result.when): result for result in self.exam_results}
        rows = []
        for name in names:
            before, after = found.get((name, "before")), found.get((name, "after"))
            total = (after or before or next(iter(found.values()))).total
            rows.append((name, before.correct if before else None, after.correct if after else None, total))
        return tuple(rows)

    @property
    def losses(self) -> tuple[tuple[str, float | None, float | None], ...]:
        """Text's name, loss before and after."""
        found = {(result.name, result.when): result.loss for result in self.loss_results}
        names = dict.fromkeys(result.name for result in self.loss_results)
        return tuple((name, found.get((name, "before")), found.get((name, "after"))) for name in names)

    @property
    def savings(self) -> tuple[tuple[str, int], ...]:
        """Technique, bytes that it took off the step's peak."""
        return tuple((saving.technique, saving.bytes_without - saving.bytes_with) for saving in self.plan.savings)

    def as_json(self) -> dict[str, object]:
        """Return plain values; the account of the data keeps its counts, notes and drops, not each length."""
        plain = dataclasses.asdict(self)
        plain["data"].pop("lengths")
        return plain


@dataclass(frozen=True, kw_only=True)
class LookedAt:
    """What `ajusta data` shows: the account, the histogram (from, to, examples), one example (text, trained)."""

    summary: DataSummary
    histogram: tuple[tuple[int, int, int], ...]
    sample: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `ajusta evaluate` found, in the form in which the end of a run is shown."""

    results: Results
    adapter: str

    @property
    def exams(self) -> tuple[tuple[str, int | None, int | None, int], ...]:
        """Exam's name, nothing, right answers now, questions."""
        return tuple((result.exam, None, result.correct, result.total) for result in self.results.exams)

    @property
    def losses(self) -> tuple[tuple[str, float | None, float | None], ...]:
        """Text's name, nothing, loss now."""
        return tuple((result.name, None, result.loss) for result in self.results.losses)

    @property
    def savings(self) -> tuple[tuple[str, int], ...]:
        """Nothing: no plan was made."""
        return ()
