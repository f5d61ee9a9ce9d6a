"""Results as blocks of text for standard output: tables, bars of bytes, the end of a run, the account of the data.

Nothing here writes: each function returns text. With `unicode=False` every character is ASCII, and whatever came out
of a person's data has its control characters made visible, so that no text can drive the terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ajusta.base.units import show_bytes
from ajusta.spec.data import DataSummary

_FILLS = {True: "\u2588\u2593\u2592\u2591\u25aa", False: "#=+-."}
_TRAINED_ON, _TRAINED_OFF = "\x1b[32m", "\x1b[0m"
SHOWN_DROPS = 20  # dropped rows that are printed one by one


class Outcome(Protocol):
    """What the end of a run shows; the record of a run has these."""

    @property
    def exams(self) -> Sequence[tuple[str, int | None, int | None, int]]:
        """Exam's name, right answers before and after, questions."""

    @property
    def losses(self) -> Sequence[tuple[str, float | None, float | None]]:
        """Text's name, loss before and after."""

    @property
    def adapter(self) -> Path | str | None:
        """Where the adapter lies."""

    @property
    def savings(self) -> Sequence[tuple[str, int]]:
        """Technique, bytes that it saved."""


class LookedAt(Protocol):
    """What `ajusta data` shows."""

    @property
    def summary(self) -> DataSummary:
        """The account of the data."""

    @property
    def histogram(self) -> Sequence[tuple[int, int, int]]:
        """Tokens from, tokens to, examples."""

    @property
    def sample(self) -> Sequence[tuple[str, bool]]:
        """One example in pieces: the text, and whether it is trained on."""


class Finding(Protocol):
    """One thing that `ajusta doctor` looked at."""

    @property
    def name(self) -> str:
        """What was looked at."""

    @property
    def value(self) -> str:
        """What was found."""

    @property
    def problem(self) -> str | None:
        """What is wrong with it, if anything."""

    @property
    def cure(self) -> str | None:
        """What to do about it."""


def visible(text: str) -> str:
    """Return the text with control characters made visible; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def table(rows: Iterable[Sequence[object]], *, indent: int = 2) -> str:
    """Return rows of cells in columns, the last one as long as it is."""
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    if not cells:
        return ""
    count = max(len(row) for row in cells)
    widths = [max((len(row[column]) for row in cells if column < len(row)), default=0) for column in range(count)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in cells)
    return "\n".join(" " * indent + line.rstrip() for line in lines)


def bar(parts: Sequence[tuple[str, int]], width: int = 60, *, unicode: bool = True) -> str:
    """Return one bar of all parts' bytes and a line for each: its fill, bytes and share.

    Args:
        parts: label and bytes, none negative; a part of more than nothing gets at least one cell.
        width: cells of the bar.
        unicode: whether block characters can be shown.
    """
    whole = sum(size for _, size in parts)
    fills = _FILLS[unicode]
    cells = _cells([size for _, size in parts], width)
    line = "".join(fills[index % len(fills)] * count for index, count in enumerate(cells))
    rows = [
        (fills[index % len(fills)], label, show_bytes(size), f"{size / whole:.0%}" if whole else "0%")
        for index, (label, size) in enumerate(parts)
    ]
    return f"  |{line.ljust(width)}|  {show_bytes(whole)}\n{table(rows)}"


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    """Share `width` cells by size: at least one for each part that is there, the rest by the largest remainders."""
    whole = sum(sizes)
    if not whole:
        return [0] * len(sizes)
    cells = [max(1, int(size * width / whole)) if size else 0 for size in sizes]
    while sum(cells) > width and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    order = sorted(range(len(sizes)), key=lambda index: cells[index] - sizes[index] * width / whole)
    for index in order:
        if sizes[index] and sum(cells) < width:
            cells[index] += 1
    return cells


def as_plain(value: object) -> object:
    """Turn a noun into what JSON can hold: mappings with text keys, lists, numbers, texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def show_record(record: Mapping[str, object], *, indent: int = 2) -> str:
    """Return any noun as label and value, one a line; names that end in `_bytes` are shown as sizes."""
    lines: list[str] = []
    width = max((len(_label(key)) for key, value in record.items() if not _nested(value)), default=0)
    for key, value in record.items():
        if isinstance(value, Mapping):
            lines += [" " * indent + _label(key), show_record(value, indent=indent + 2)]
        elif _nested(value) and isinstance(value, (list, tuple)):
            lines.append(" " * indent + _label(key))
            lines += [_item(item, indent + 2) for item in value]
        else:
            lines.append(f"{' ' * indent}{_label(key).ljust(width)}  {_value(key, value)}")
    return "\n".join(line for line in lines if line)


def _item(item: object, indent: int) -> str:
    """Return one entry of a list: a mapping on one line, anything else as it is."""
    if isinstance(item, Mapping):
        return " " * indent + ", ".join(f"{_label(key)} {_value(key, value)}" for key, value in item.items())
    return " " * indent + visible(str(item))


def _nested(value: object) -> bool:
    """Whether a value takes lines of its own."""
    return bool(value) and isinstance(value, (Mapping, list, tuple))


def _label(key: str) -> str:
    """Return a field's name as a person reads it."""
    return key.removesuffix("_bytes").replace("_", " ")


def _value(key: str, value: object) -> str:
    """Return a field's value as a person reads it."""
    if key.endswith("_bytes") and isinstance(value, int):
        return show_bytes(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None or value == [] else visible(str(value))


def outcome_text(outcome: Outcome) -> str:
    """Return the end of a run: exams and losses before and after, where the adapter is, what each technique saved."""
    blocks: list[str] = []
    exams = [(f"exam {name}", _score(old, total), "->", _score(new, total)) for name, old, new, total in outcome.exams]
    losses = [(f"loss on {name}", _loss(old), "->", _loss(new)) for name, old, new in outcome.losses]
    if exams or losses:
        blocks.append("before -> after\n" + table([*exams, *losses]))
    if outcome.savings:
        rows = [(technique, show_bytes(size)) for technique, size in outcome.savings]
        blocks.append("what each technique saved\n" + table(rows))
    if outcome.adapter is not None:
        blocks.append(f"the adapter is in {visible(str(outcome.adapter))}")
    return "\n\n".join(blocks)


def _score(correct: int | None, total: int) -> str:
    """Return `37/40`, or a dash where the exam was not taken."""
    return "-" if correct is None else f"{correct}/{total}"


def _loss(loss: float | None) -> str:
    """Return a loss, or a dash where none was taken."""
    return "-" if loss is None else f"{loss:.4f}"


def data_text(seen: LookedAt, *, colour: bool = False, unicode: bool = True) -> str:
    """Return the account of the data: what was read, dropped and why, the histogram, one example.

    Args:
        seen: the data.
        colour: show trained text in green; without it, trained text stands in [[ ]].
        unicode: whether block characters can be shown.
    """
    blocks = [_account(seen.summary), _drops(seen.summary), _notes(seen.summary)]
    if seen.histogram:
        blocks.append("tokens of an example\n" + _histogram(seen.histogram, unicode=unicode))
    if seen.sample:
        marks = "trained text in green" if colour else "trained text in [[ ]]"
        blocks.append(f"one example, {marks}\n" + _sample(seen.sample, colour=colour))
    return "\n\n".join(block for block in blocks if block)


def _account(summary: DataSummary) -> str:
    """Return the counts of the data."""
    rows = [
        ("files", f"{summary.files:,}"),
        ("rows read", f"{summary.rows_read:,}"),
        ("rows dropped", f"{len(summary.dropped):,}"),
        ("examples to train on", f"{summary.train_examples:,}", f"{summary.train_tokens:,} tokens"),
        ("examples held out", f"{summary.heldout_examples:,}", f"{summary.heldout_tokens:,} tokens"),
        ("tokens that the loss falls on", f"{summary.trained_tokens:,}"),
        ("longest example", f"{summary.longest:,} tokens"),
    ]
    return "data\n" + table(rows)


def _drops(summary: DataSummary) -> str:
    """Return the dropped rows with their reasons; beyond the first ones, how many more for each reason."""
    if not summary.dropped:
        return ""
    shown, rest = summary.dropped[:SHOWN_DROPS], summary.dropped[SHOWN_DROPS:]
    more: dict[str, int] = {}
    for drop in rest:
        more[drop.reason] = more.get(drop.reason, 0) + 1
    rows = [(drop.source, drop.reason) for drop in shown]
    return "dropped\n" + table([*rows, *((f"and {count:,} more", reason) for reason, count in more.items())])


def _notes(summary: DataSummary) -> str:
    """Return the policies that were applied."""
    return "notes\n" + table([(note,) for note in summary.notes]) if summary.notes else ""


def _histogram(buckets: Sequence[tuple[int, int, int]], *, unicode: bool, width: int = 40) -> str:
    """Return one line a bucket, the longest as wide as `width`."""
    most = max(count for _, _, count in buckets) or 1
    fill = _FILLS[unicode][0]
    rows = [
        (f"{low:,} to {high:,}", f"{count:,}".rjust(len(f"{most:,}")), fill * -(-count * width // most))
        for low, high, count in buckets
    ]
    return table(rows)


def _sample(pieces: Sequence[tuple[str, bool]], *, colour: bool) -> str:
    """Return one example with its trained text marked."""
    start, end = (_TRAINED_ON, _TRAINED_OFF) if colour else ("[[", "]]")
    return "".join(f"{start}{visible(text)}{end}" if trained else visible(text) for text, trained in pieces)


def doctor_text(findings: Sequence[Finding]) -> str:
    """Return what was found, one a line, and under it what is wrong and what to do about it."""
    blocks = [table([(finding.name, finding.value) for finding in findings])]
    for finding in findings:
        if finding.problem:
            cure = f"\n    do: {visible(finding.cure)}" if finding.cure else ""
            blocks.append(f"{finding.name}: {visible(finding.problem)}{cure}")
    if len(blocks) == 1:
        blocks.append("nothing stands in the way")
    return "\n\n".join(blocks)
