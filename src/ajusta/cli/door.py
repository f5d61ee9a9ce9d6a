"""What the command line asks of `ajusta.run` and `ajusta.look`, as types, so that they cannot drift apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ajusta.base.events import Listener
from ajusta.report.show import Finding, LookedAt, Outcome
from ajusta.spec.config import Config
from ajusta.spec.explanation import Explanation
from ajusta.spec.plan import Longest, OnCard, Plan


class Speaker(Protocol):
    """A tuned model that answers."""

    def answer(
        self, messages: list[dict[str, str]], *, max_tokens: int, temperature: float, seed: int
    ) -> Iterator[str]:
        """Yield the answer in pieces of text."""


class Run(Protocol):
    """The functions of `ajusta.run`."""

    def finetune(self, config: Config, listener: Listener, *, resume: bool) -> Outcome:
        """Train and return the record."""

    def evaluate(self, folder: Path, listener: Listener, *, data: tuple[Path, ...], exams: tuple[Path, ...]) -> Outcome:
        """Measure and examine a tuned model again."""

    def export(self, folder: Path, out: Path | None, form: str, listener: Listener) -> Path:
        """Write the model in a form and return where."""

    def chat(self, folder: Path, listener: Listener) -> Speaker:
        """Load a tuned model for answering."""


class Look(Protocol):
    """The functions of `ajusta.look`."""

    def plan(self, config: Config, listener: Listener, *, gpu: str | None) -> Plan:
        """Return the plan, for this machine or for a card."""

    def explain(self, config: Config, listener: Listener, *, gpu: str | None) -> Explanation:
        """Return five ways to train, from full fine-tuning down."""

    def plan_on_cards(self, config: Config, listener: Listener) -> tuple[OnCard, ...]:
        """Return the plan for every card that is known."""

    def longest_context(self, config: Config, listener: Listener, *, gpu: str | None) -> Longest:
        """Return the longest example that fits."""

    def largest_model(self, config: Config, listener: Listener, *, gpu: str | None) -> tuple[str, Plan]:
        """Return the largest known model that fits, and its plan."""

    def look_at_data(self, config: Config, listener: Listener) -> LookedAt:
        """Read the data and account for it."""

    def doctor(self, listener: Listener, *, measure: bool) -> Sequence[Finding]:
        """Look at the machine, and time it where that is wanted."""


def the_run() -> Run:
    """Return the module `ajusta.run`; the first call loads torch, which takes seconds.

    This process is ours alone, so its heap is set to give freed memory back, before torch is there.
    """
    _bound_the_heap()
    import ajusta.run as run

    return run


def the_look() -> Look:
    """Return the module `ajusta.look`, in the same way."""
    _bound_the_heap()
    import ajusta.look as look

    return look


def _bound_the_heap() -> None:
    from ajusta.memory.heap import limit_kernel_caches, return_freed_memory

    limit_kernel_caches()
    return_freed_memory()
