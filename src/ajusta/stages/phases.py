"""The phases of a run as they pass: told when they begin and end, and kept for the record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from ajusta.base.events import Event, Listener, Note, PhaseEnded, PhaseStarted
from ajusta.spec.data import DataSummary
from ajusta.spec.plan import Plan
from ajusta.spec.record import PhaseMeasure


class Phases:
    """Tells every event to the listeners and remembers what each phase took."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        self._measures: list[PhaseMeasure] = []
        self.started = time.monotonic()

    @property
    def measures(self) -> tuple[PhaseMeasure, ...]:
        """What the phases so far took."""
        return tuple(self._measures)

    def tell(self, event: Event) -> None:
        """Hand an event to every listener."""
        for listener in self._listeners:
            listener(event)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Tell one line."""
        self.tell(Note(text=text, warning=warning))

    @contextmanager
    def phase(self, name: str, planned_bytes: int | None = None) -> Iterator[list[PhaseMeasure]]:
        """Tell when a phase begins and ends; measures put into the list are the phase's own, beside its time."""
        own: list[PhaseMeasure] = []
        began = time.monotonic()
        self.tell(PhaseStarted(phase=name))
        yield own
        seconds = time.monotonic() - began
        self._measures += own or [
            PhaseMeasure(phase=name, seconds=seconds, planned_bytes=planned_bytes, measured_bytes=None)
        ]
        fullest = max(own, key=lambda measure: measure.measured_bytes or 0, default=None)
        self.tell(
            PhaseEnded(
                phase=name,
                seconds=seconds,
                peak_bytes=fullest.measured_bytes if fullest else None,
                planned_bytes=fullest.planned_bytes if fullest else None,
            )
        )

    def tell_data(self, summary: DataSummary) -> None:
        """Tell what was read, and everything that was dropped or changed on the way."""
        self.note(
            f"{summary.rows_read} rows: {summary.train_examples} examples to train on ({summary.train_tokens} tokens, "
            f"{summary.trained_tokens} of them trained), {summary.heldout_examples} held out"
        )
        for text in summary.notes:
            self.note(text)
        for dropped in summary.dropped:
            self.note(f"dropped {dropped.source}: {dropped.reason}", warning=True)

    def tell_plan(self, plan: Plan) -> None:
        """Tell the plan and the reason of each choice."""
        self.note(plan.sentence())
        for choice in plan.choices:
            self.note(f"  {choice.name}: {choice.value}, because {choice.because}")
