"""What happens during a run, as small frozen facts. Stages emit them; terminal, report and log only listen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Event:
    """A fact about the run; every field is a plain value, so that it can be written as JSON."""

    def as_json(self) -> dict[str, object]:
        """Return the fields, with the event's name under `event`."""
        return {"event": type(self).__name__, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """One line that a person should see: an automatic choice with its reason, a policy applied, a warning."""

    text: str
    warning: bool = False


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(Event):
    """A phase of the run's life begins: data, plan, load, rehearse, exam, train, evaluate, save, export."""

    phase: str


@dataclass(frozen=True, kw_only=True)
class PhaseEnded(Event):
    """The phase is over, with its own measures."""

    phase: str
    seconds: float
    peak_bytes: int | None = None  # allocated, where it was measured
    planned_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """So much of a countable phase is done (tensors loaded, questions answered)."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Ahead(Event):
    """What the training will be, told before its first step: the time left is shown from here on."""

    total_steps: int
    total_tokens: int  # that are still to pass through the model in training
    first_step: int = 1  # a resumed run starts later
    evaluate_every: int = 0  # steps; 0 for only before and after
    save_every: int = 0  # steps; 0 for only at the end
    seconds_per_token: float | None = None  # as the rehearsal measured it
    planned_bytes: int | None = None
    fullest: tuple[tuple[str, int], ...] = ()  # bytes by category at the rehearsal's fullest moment, the largest first


@dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """One optimizer step."""

    step: int  # 1-based
    total_steps: int
    epoch: float
    loss: float  # mean over this step's trained tokens
    learning_rate: float
    grad_norm: float
    tokens: int  # passed through the model in this step
    trained_tokens: int
    seconds: float
    tokens_left: int  # still to pass through the model: the time left is a share of tokens, not of steps
    memory_bytes: int  # resident now (CPU) or allocated now (card)
    peak_bytes: int
    skipped: bool = False  # a non-finite gradient: nothing was updated


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """A loss was taken on text that is not trained on."""

    name: str  # heldout | general
    when: str  # before | during | after
    step: int
    loss: float
    perplexity: float
    tokens: int
    seconds: float
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Examined(Event):
    """An exam was taken."""

    exam: str
    when: str  # before | after
    correct: int
    total: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A training state or adapter is safely on disk."""

    path: str
    step: int
    kind: str  # checkpoint | best | adapter


Listener = Callable[[Event], None]


def silent(event: Event) -> None:
    """Listen to nothing."""
