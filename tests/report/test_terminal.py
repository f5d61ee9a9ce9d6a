from __future__ import annotations

import io
import os
from collections.abc import Sequence

import pytest

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
from ajusta.report.terminal import PLAIN_SECONDS, TerminalListener


def step(number: int, total: int = 100) -> StepDone:
    return StepDone(
        step=number,
        total_steps=total,
        epoch=0.1,
        loss=2.5,
        learning_rate=1e-4,
        grad_norm=1.0,
        tokens=400,
        trained_tokens=300,
        seconds=2.0,
        tokens_left=400 * (total - number),
        memory_bytes=500 << 20,
        peak_bytes=900 << 20,
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(events: Sequence[Event], seconds_between: float = 0.0) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with TerminalListener(stream, live=False, clock=clock) as listener:
        for event in events:
            listener(event)
            clock.now += seconds_between
    return stream.getvalue().splitlines()


def test_plain_lines_come_every_few_seconds_and_at_the_last_step() -> None:
    lines = plain([step(number) for number in range(1, 101)], seconds_between=PLAIN_SECONDS / 4)
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert shown == [*range(1, 98, 4), 100]


def test_a_step_line_says_loss_speed_time_left_and_memory() -> None:
    (line,) = plain([Ahead(total_steps=100, total_tokens=40000, planned_bytes=1 << 30), step(1)])
    assert line == (
        "step 1/100  loss 2.500  200 tokens/s  3 min 18 s left  memory 500 MiB, peak 900 MiB of 1.00 GiB planned"
    )


def test_every_other_fact_has_its_line() -> None:
    lines = plain(
        [
            Note(text="fp32 [because] it is the fastest"),
            Note(text="a row was dropped", warning=True),
            PhaseStarted(phase="load"),
            Progress(phase="load", done=1, total=3),
            Progress(phase="load", done=3, total=3),
            PhaseEnded(phase="load", seconds=5.0, peak_bytes=1 << 30, planned_bytes=1 << 30),
            Evaluated(name="heldout", when="before", step=0, loss=2.0, perplexity=7.39, tokens=9, seconds=1, best=True),
            Examined(exam="e", when="after", correct=38, total=40, seconds=1.0),
            Saved(path="runs/x", step=5, kind="checkpoint"),
        ]
    )
    assert lines == [
        "fp32 [because] it is the fastest",
        "warning: a row was dropped",
        "load ...",
        "load 3/3",
        "load took 5 s, peak 1.00 GiB (planned 1.00 GiB)",
        "heldout loss before training: 2.0000 (perplexity 7.39), the best so far",
        "exam e after training: 38/40",
        "saved checkpoint at step 5: runs/x",
    ]


def test_the_bar_ends_at_its_end_and_resume_starts_at_its_place() -> None:
    lines = plain([Ahead(total_steps=8, total_tokens=1600, first_step=5), step(5, 8), step(8, 8)])
    assert [line.split("  ")[0] for line in lines] == ["step 5/8", "step 8/8"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_live_view_draws_and_gives_the_terminal_back(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", write_through=True)
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with TerminalListener(stream, live=True) as listener:
        listener(PhaseStarted(phase="load"))
        listener(Progress(phase="load", done=1, total=3))
        listener(PhaseEnded(phase="load", seconds=1.0))
        listener(Note(text="\u00fcber [red] 1", warning=True))
        listener(step(1))
    shown = raw.getvalue().decode(encoding)
    for part in ("step 1/100", "memory 500 MiB, peak 900 MiB", "[red]", "load took 1 s"):
        assert part in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is hidden and shown again


def test_an_error_inside_the_block_gives_the_terminal_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(ValueError, match="oh"), TerminalListener(stream, live=True) as listener:
        listener(step(1))
        raise ValueError("oh")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")
    assert os.environ["TERM"] == "xterm"
