from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ajusta.report.show import as_plain, bar, data_text, doctor_text, outcome_text, show_record, table, visible
from ajusta.spec.data import DataSummary, Dropped


@dataclass(frozen=True, kw_only=True)
class Outcome:
    exams: tuple[tuple[str, int | None, int | None, int], ...] = ()
    losses: tuple[tuple[str, float | None, float | None], ...] = ()
    adapter: Path | None = None
    savings: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Seen:
    summary: DataSummary
    histogram: tuple[tuple[int, int, int], ...] = ()
    sample: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    value: str
    problem: str | None = None
    cure: str | None = None


def summary(dropped: int = 0) -> DataSummary:
    drops = tuple(Dropped(source=f"a.jsonl:{line}", reason="empty") for line in range(dropped))
    return DataSummary(
        files=1,
        rows_read=30,
        train_examples=20,
        heldout_examples=1,
        train_tokens=12345,
        heldout_tokens=9,
        trained_tokens=8000,
        longest=700,
        dropped=drops,
        notes=("one BOS",),
    )


def test_the_end_of_a_run() -> None:
    outcome = Outcome(
        exams=(("exam", 0, 38, 40), ("documents", None, 3, 20)),
        losses=(("held-out text", 3.25, 2.5),),
        adapter=Path("runs/x/adapter"),
        savings=(("nf4 weights", 300 << 20), ("recompute", 1 << 30)),
    )
    assert outcome_text(outcome) == (
        "before -> after\n"
        "  exam exam              0/40    ->  38/40\n"
        "  exam documents         -       ->  3/20\n"
        "  loss on held-out text  3.2500  ->  2.5000\n\n"
        "what each technique saved\n"
        "  nf4 weights  300 MiB\n"
        "  recompute    1.00 GiB\n\n"
        "the adapter is in runs/x/adapter"
    )
    assert outcome_text(Outcome()) == ""


def test_a_bar_shows_every_part_and_is_ascii_when_it_must() -> None:
    text = bar([("weights", 1 << 30), ("adapter", 1), ("nothing", 0)], 20, unicode=False)
    assert text.isascii()
    assert "|" + "#" * 19 + "=|  1.00 GiB" in text
    assert "nothing  0 B       0%" in text
    assert not bar([("weights", 1)], 20).isascii()
    assert "|" + " " * 10 + "|" in bar([("none", 0)], 10)


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=8), st.integers(8, 80))
def test_a_bar_is_as_wide_as_asked_and_leaves_no_part_out(sizes: list[int], width: int) -> None:
    line = bar([(str(index), size) for index, size in enumerate(sizes)], width, unicode=False).splitlines()[0]
    cells = line.split("|")[1]
    assert len(cells) == width
    assert cells.count(" ") == (0 if any(sizes) else width)


def test_the_account_of_the_data() -> None:
    seen = Seen(
        summary=summary(dropped=25),
        histogram=((0, 256, 15), (256, 1024, 5)),
        sample=(("Who?\n", False), ("Ana\x1b[31m", True)),
    )
    text = data_text(seen, unicode=False)
    assert text.isascii()
    assert "a.jsonl:19  empty" in text and "a.jsonl:20" not in text and "and 5 more  empty" in text
    assert "12,345 tokens" in text and "one BOS" in text
    assert "0 to 256      15  " + "#" * 40 in text
    assert "Who?\n[[Ana\\x1b[31m]]" in text
    assert "\x1b[32mAna\\x1b[31m\x1b[0m" in data_text(seen, colour=True)
    assert "dropped\n" not in data_text(Seen(summary=summary()))


def test_doctor_says_what_to_do() -> None:
    good = Finding(name="device", value="cpu")
    assert doctor_text([good]) == "  device  cpu\n\nnothing stands in the way"
    bad = Finding(name="disk", value="1 GiB", problem="too small", cure="free 5 GiB")
    assert doctor_text([good, bad]).endswith("disk: too small\n    do: free 5 GiB")


def test_any_noun_as_a_table() -> None:
    record = as_plain({"peak_bytes": 1 << 30, "path": Path("x"), "loss": 0.123456, "none": None, "parts": [{"a": 1}]})
    assert isinstance(record, dict)
    assert show_record(record) == "  peak  1.00 GiB\n  path  x\n  loss  0.1235\n  none  -\n  parts\n    a 1"
    assert as_plain(summary(1))["dropped"] == [{"source": "a.jsonl:0", "reason": "empty"}]  # type: ignore[index]


def test_tables_keep_columns_and_let_no_control_character_through() -> None:
    assert table([("a", 1), ("long", "x\x07")]) == "  a     1\n  long  x\\x07"
    assert table([]) == ""
    assert visible("tab\there \u00fc \u202e") == "tab\there \u00fc \\u202e"
