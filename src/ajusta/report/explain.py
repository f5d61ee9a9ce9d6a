"""An explanation as one screen of text: what a block keeps and why, five stacked bars, and how each technique works."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from ajusta.base.units import show_bytes, show_time
from ajusta.report.sentences import count_text, how_it_works, why_kept
from ajusta.report.show import as_plain, table, visible
from ajusta.spec.explanation import Explanation, Kept, Level

WIDTH = 100  # columns of the screen
CELLS = 52  # of a bar
_LABEL = 26
_BREAK = 2.0  # the longest bar is broken off where it is more than so many times as long as the next one
# The letter that a category has in the bars, in the order in which it is stacked.
LETTERS = {
    "base weights": "W",
    "quantization constants": "Q",
    "trained weights": "T",
    "gradients": "G",
    "optimizer state": "O",
    "saved activations": "S",
    "recompute window": "R",
    "logits and loss": "L",
    "dequantization window": "D",
    "attention workspace": "A",
    "other": "X",
}


def explanation_text(explanation: Explanation, next_command: str) -> str:
    """Return the explanation for a person, in ASCII.

    Args:
        explanation: what was traced.
        next_command: what to type next.
    """
    figures = f"{_bars(explanation)}\n{_figures(explanation)}"
    ending = f"{_notes(explanation)}\nnext: {next_command}"
    return "\n\n".join([_head(explanation), _kept(explanation), figures, _how(explanation), ending])


def explanation_facts(explanation: Explanation, next_command: str) -> dict[str, object]:
    """Return the same for a program; sizes in bytes, of one micro-batch's step."""
    plain = as_plain(explanation)
    assert isinstance(plain, dict)
    for level, how in zip(plain["levels"], how_it_works(explanation), strict=True):
        level["how"] = list(how)
    for kept, plain_kept in zip(explanation.block.kept, plain["block"]["kept"], strict=True):
        plain_kept |= {"bytes": kept.bytes, "why": why_kept(kept)}
    plain["block"]["kept_bytes"] = explanation.block.kept_bytes
    return {**plain, "next": next_command}


def _head(explanation: Explanation) -> str:
    it = explanation
    many = f"{it.micro_batches} micro-batches" if it.micro_batches > 1 else "one micro-batch"
    return (
        f"{visible(it.model)}: {count_text(it.parameters)} weights in {it.blocks} blocks, in {it.dtype}\n"
        f"a step is {it.step_tokens:,} tokens in {many} of at most {it.micro_tokens:,}; the bytes are one micro-batch's"
    )


def _kept(explanation: Explanation) -> str:
    """Return the table of what one block keeps between its two passes."""
    block = explanation.block

    def share(size: int) -> str:
        return f"{size / block.tokens:,.0f}"

    own = [kept for kept in block.kept if kept.part != "frozen"]
    frozen = block.kept_bytes - sum(kept.bytes for kept in own)
    rows = [(_name(kept), _tensors(kept, block.tokens), share(kept.bytes), why_kept(kept)) for kept in own]
    whole = show_bytes(block.kept_bytes * block.alike)
    alike = block.alike if block.alike == explanation.blocks else f"{block.alike} of {explanation.blocks}"
    rows += [
        ("frozen weights", "", share(frozen), "the gradient of x is dy W^T, without x"),
        ("in all", "", share(block.kept_bytes), f"x {block.tokens:,} tokens x {alike} blocks = {whole}"),
        ("made again", "", share(block.rebuilt_bytes), "outputs of norms and activations"),
        ("backward pass", "", share(block.backward_bytes), "at most, beside what is kept"),
    ]
    title = f"what one {block.block} keeps between its forward and its backward pass: bytes a token, traced with LoRA"
    return title + "\n" + _columns(rows)


def _columns(rows: Sequence[tuple[str, str, str, str]]) -> str:
    """Lay the rows out, numbers to the right, the last column wrapped."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = []
    for name, tensors, size, why in rows:
        start = f"  {name:<{widths[0]}}  {tensors:<{widths[1]}}  {size:>{widths[2]}}  "
        lines += textwrap.wrap(why, WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    return "\n".join(lines)


def _name(kept: Kept) -> str:
    names = {"norm": "norms", "gated": "gated MLP", "adapter": "adapters", "activation": "activation"}
    return names.get(kept.part, kept.part)


def _tensors(kept: Kept, tokens: int) -> str:
    """Return `2 x 1,152 + 2 x 4`: how many tensors of how many bytes a token; beyond three sizes, the rest as a sum."""
    sizes = Counter(tensor.bytes for tensor in kept.tensors)
    largest = sorted(sizes.items(), reverse=True)
    shown = [f"{many} x {size / tokens:,.0f}" if many > 1 else f"{size / tokens:,.0f}" for size, many in largest[:3]]
    left = sum(size * many for size, many in largest[3:])
    return " + ".join([*shown, *([f"{left / tokens:,.0f}"] if left >= tokens else [])])


def _bars(explanation: Explanation) -> str:
    """Return a stacked bar a level, all in one scale; where one is much longer than the others it is broken off."""
    sizes = sorted((level.peak_bytes for level in explanation.levels), reverse=True)
    budget = explanation.budget_bytes
    broken = sizes[0] > _BREAK * max(sizes[1], budget or 0)
    top = max(sizes[1], budget or 0) if broken else sizes[0]
    if budget is not None and sizes[0] < budget <= _BREAK * sizes[0]:
        top = budget
    lines = [f"{_bar(explanation, number, top)}" for number in range(len(explanation.levels))]
    title = f"the fullest moment of a step, stacked; a cell is {show_bytes(top / CELLS)}"
    if budget is not None:
        where = f"| is where {show_bytes(budget)} end" if budget <= top else f"{show_bytes(budget)} end beyond the edge"
        title += f", {where}"
    return "\n".join([title + (", > goes on" if broken else ""), *lines])


def _bar(explanation: Explanation, number: int, top: int) -> str:
    level, budget = explanation.levels[number], explanation.budget_bytes
    line = _cells(level.by_category, top)
    if len(line) > CELLS:
        line = line[: CELLS - 1] + ">"
    line = line.ljust(CELLS)
    if budget is not None and budget <= top:
        at = min(CELLS - 1, budget * CELLS // top)
        line = line[:at] + "|" + line[at + 1 :]
    fits = "" if level.fits is None else "  fits" if level.fits else "  does not fit"
    return f"  {_label(level, number):<{_LABEL}} {line} {show_bytes(level.peak_bytes):>8}{fits}"


def _cells(by_category: Mapping[str, int], top: int) -> str:
    """Return a letter for each cell. Each boundary is where it lies on the scale, so a small part may have no cell."""
    line, reached = "", 0
    for name, letter in LETTERS.items():
        reached += by_category.get(name, 0)
        line += letter * (round(reached * CELLS / top) - len(line))
    return line


def _label(level: Level, number: int) -> str:
    name = f"{level.technique} ({level.bits})" if level.technique == "quantization" else level.technique
    return f"{number + 1} {'+ ' if number else ''}{name}"


def _figures(explanation: Explanation) -> str:
    """Return the bytes by category, a column a level, and under them the sums, the fit and the time."""
    levels = explanation.levels
    rows: list[list[str]] = [["", *(str(number + 1) for number in range(len(levels)))]]
    for name, letter in LETTERS.items():
        sizes = [level.by_category.get(name, 0) for level in levels]
        if any(sizes):
            rows.append([f"{letter} {name}", *(show_bytes(size) if size else "-" for size in sizes)])
    rows.append(["the fullest moment", *(show_bytes(level.peak_bytes) for level in levels)])
    needs = [level.need_bytes for level in levels if level.need_bytes is not None]
    if needs:
        rows.append(["with what lies beside it", *map(show_bytes, needs)])
    rows.append(["time of a step", *(show_time(level.step_seconds) for level in levels)])
    rows.append(["of that of 1", *(f"{level.step_seconds / levels[0].step_seconds:.2f}" for level in levels)])
    return "\n".join(f"  {row[0]:<{_LABEL}}" + "".join(cell.rjust(13) for cell in row[1:]) for row in rows)


def _how(explanation: Explanation) -> str:
    """Return three sentences a level."""
    blocks = []
    for number, (level, how) in enumerate(zip(explanation.levels, how_it_works(explanation), strict=True)):
        text = f"{_label(level, number)}: {' '.join(how)}"
        blocks.append(textwrap.fill(text, WIDTH, subsequent_indent="    "))
    return "\n".join(blocks)


def _notes(explanation: Explanation) -> str:
    """Say what the figures are made of."""
    how = "measured" if explanation.speeds_measured else "not measured"
    speeds = f"on {explanation.device}; time by its roofline, {how}: {explanation.speeds}"
    yardstick = "1 is a yardstick, traced with ajusta's own blocks and loss; ajusta itself trains adapters only"
    return "\n".join(table([(line,)], indent=0) for note in (speeds, yardstick) for line in textwrap.wrap(note, WIDTH))
