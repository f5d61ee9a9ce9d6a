"""The run as it goes on, for a person: a live view in a terminal, plain lines anywhere else.

Everything goes to one stream (standard error), so that results on standard output can be piped. A stream that cannot
show a character shows another in its place: nothing here may stop a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from ajusta.base.events import (
    Ahead,
    Evaluated,
    Event,
    Examined,
    Note,
    PhaseEnded,
    PhaseStarted,
    Progress,
    Saved,
    StepDone,
)
from ajusta.base.units import show_bytes, show_seconds
from ajusta.report.eta import Pace, advance, seconds_left

PLAIN_SECONDS = 10.0  # between two lines about steps, where the output is no terminal
VIEWS_PER_SECOND = 2  # few: the processor has better things to do
BAR_WIDTH = 40
MOST_PARTS = 5  # of the fullest moment, that are shown by name


class TerminalListener:
    """A `Listener` that shows events. Use it in a `with` block, so that a live view gives the terminal back.

    Args:
        stream: where to write.
        live: whether the stream is a terminal that can be drawn on.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, stream: TextIO, live: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = Pace()
        self._step: StepDone | None = None
        self._planned: int | None = None
        self._fullest: tuple[tuple[str, int], ...] = ()
        self._last_line = float("-inf")
        self._stream = stream
        self._live: Live | None = None
        if live:
            console = Console(file=stream, highlight=False, markup=False, emoji=False)
            self._live = Live(get_renderable=self._view, console=console, refresh_per_second=VIEWS_PER_SECOND)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take one event in and show it, at once or in the next view."""
        self._pace = advance(self._pace, event, self._clock())
        if isinstance(event, StepDone):
            self._step = event
        if isinstance(event, Ahead):
            self._planned, self._fullest = event.planned_bytes, event.fullest
        line = self._line(event)
        if line:
            self._print(line, warning=isinstance(event, Note) and event.warning)

    def _print(self, line: str, *, warning: bool = False) -> None:
        """Write one line, above the live view if there is one."""
        if self._live is not None:
            self._live.console.print(Text(line, style="yellow" if warning else ""))
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def _line(self, event: Event) -> str:
        """Return the line that an event is worth, or an empty text."""
        match event:
            case StepDone() | Progress():
                return self._due(event)
            case PhaseStarted() if self._live is None:
                self._last_line = self._clock()  # a phase that is over soon needs no line about its progress
                return f"{event.phase} ..."
        return event_line(event)

    def _due(self, event: StepDone | Progress) -> str:
        """Return a line about a step or a count if one is due: the first, the last, and one each few seconds."""
        if self._live is not None:
            return ""
        done, total = (event.step, event.total_steps) if isinstance(event, StepDone) else (event.done, event.total)
        first = isinstance(event, StepDone) and done == 1
        if not first and done != total and self._clock() - self._last_line < PLAIN_SECONDS:
            return ""
        self._last_line = self._clock()
        if isinstance(event, StepDone):
            return f"{step_line(event, self._left())}  {memory_line(event, self._planned)}"
        return f"{event.phase} {done}/{total}{self._left()}"

    def _left(self) -> str:
        """Return the time left, as the end of a line; an empty text while it is not known."""
        left = seconds_left(self._pace, self._clock())
        return "" if left is None else f"  {show_seconds(left)} left"

    def _view(self) -> RenderableType:
        """Draw the live view: a bar, a line about the run, a line about its memory."""
        pace, step = self._pace, self._step
        if pace.phase not in ("", "train") and pace.total:
            return _drawn(pace.done, pace.total, f"{pace.phase} {pace.done}/{pace.total}{self._left()}")
        if step is not None and pace.tokens_left:
            lines = [step_line(step, self._left()), memory_line(step, self._planned)]
            if self._fullest:
                lines.append(fullest_line(self._fullest))
            return _drawn(step.step, step.total_steps, *lines)
        return Text(f"{pace.phase} ...{self._left()}" if pace.phase else "")


def _drawn(done: int, total: int, *lines: str) -> RenderableType:
    """Return a bar with lines under it; the padding is what ends the bar's own line."""
    return Group(Padding(ProgressBar(total=total, completed=done, width=BAR_WIDTH)), *(Text(line) for line in lines))


def step_line(step: StepDone, left: str) -> str:
    """Return one line about a step: loss, tokens a second, and `left`, the time left as it is to be read."""
    speed = step.tokens / step.seconds if step.seconds > 0 else 0.0
    skipped = "  skipped: a gradient was not finite" if step.skipped else ""
    return f"step {step.step}/{step.total_steps}  loss {step.loss:.3f}  {speed:.0f} tokens/s{left}{skipped}"


def memory_line(step: StepDone, planned_bytes: int | None) -> str:
    """Return the memory now, at its peak, and as it was planned."""
    planned = f" of {show_bytes(planned_bytes)} planned" if planned_bytes else ""
    return f"memory {show_bytes(step.memory_bytes)}, peak {show_bytes(step.peak_bytes)}{planned}"


def fullest_line(parts: Sequence[tuple[str, int]]) -> str:
    """Return what the fullest moment is made of, the largest parts first; small ones as one."""
    shown = [f"{name} {show_bytes(size)}" for name, size in parts[:MOST_PARTS]]
    rest = sum(size for _, size in parts[MOST_PARTS:])
    return "at the peak: " + ", ".join([*shown, *([f"other {show_bytes(rest)}"] if rest else [])])


def event_line(event: Event) -> str:
    """Return the line of an event that always has one, or an empty text."""
    match event:
        case Note():
            return f"warning: {event.text}" if event.warning else event.text
        case PhaseEnded():
            return _phase_line(event)
        case Evaluated():
            best = ", the best so far" if event.best else ""
            loss = f"{event.loss:.4f} (perplexity {event.perplexity:.2f})"
            return f"{event.name} loss {event.when} training: {loss}{best}"
        case Examined():
            return f"exam {event.exam} {event.when} training: {event.correct}/{event.total}"
        case Saved():
            return f"saved {event.kind} at step {event.step}: {event.path}"
    return ""


def _phase_line(event: PhaseEnded) -> str:
    """Return what a phase took: seconds, and memory beside what was planned."""
    memory = f", peak {show_bytes(event.peak_bytes)}" if event.peak_bytes is not None else ""
    planned = f" (planned {show_bytes(event.planned_bytes)})" if memory and event.planned_bytes is not None else ""
    return f"{event.phase} took {show_seconds(event.seconds)}{memory}{planned}"
