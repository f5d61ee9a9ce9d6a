"""From few blocks to many: a life traced on a handful of blocks becomes that of the whole model, to the byte.

Blocks of one kind under one policy do the same work, so a run of them adds the same bytes once a block. A row of such
runs is cut short: of each long run the first units stay, and the last. (A unit is the shortest piece that the run
repeats: one block, or two where kinds alternate.) What is traced of the short row is then told again for every block
that was left out.

This is no estimate: the units that stand for others must have come out equal, three of them, or it is refused
(`proven`) and the whole row is traced. tests/planning/test_depth.py holds the result against whole traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ajusta.memory.ledger import Category, Peak, Section

_STAY = 4  # units at the start of a long run: the first one borders on what is before; the next three must be equal
_LONGEST_UNIT = 8

Levels = Mapping[Category, int]


@dataclass(frozen=True, kw_only=True)
class Short:
    """A short row that stands for a long one.

    `kept[p]` is the block of the long row that stands at position p of the short one; `stands[i]` is the position that
    tells of block i. `equal` holds groups of positions whose sections must come out
    equal.
    """

    kept: tuple[int, ...]
    stands: tuple[int, ...]
    equal: tuple[tuple[int, ...], ...]


def whole_row(length: int) -> Short:
    """Return the row as it is, nothing cut."""
    return Short(kept=tuple(range(length)), stands=tuple(range(length)), equal=())


def shorten(row: Sequence[Hashable]) -> Short:
    """Cut a row of blocks short; equal items do the same work."""
    kept: list[int] = []
    stands: list[int] = []
    equal: list[tuple[int, ...]] = []
    start = 0
    while start < len(row):
        unit, times = _run(row, start)
        if times <= _STAY + 1:
            stop = start + unit * times
            stands += range(len(kept), len(kept) + stop - start)
            kept += range(start, stop)
        else:
            stop, first = start + unit * times, len(kept)
            kept += [*range(start, start + unit * _STAY), *range(stop - unit, stop)]
            head = list(range(first, first + unit * _STAY))
            middle, last = head[2 * unit : 3 * unit], range(first + unit * _STAY, first + unit * (_STAY + 1))
            stands += [*head, *middle * (times - _STAY - 1), *last]
            equal += [(head[unit + k], head[2 * unit + k], head[3 * unit + k]) for k in range(unit)]
        start = stop
    return Short(kept=tuple(kept), stands=tuple(stands), equal=tuple(equal))


def _run(row: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Return the unit that repeats from `start` on and how often: the one that leaves the fewest blocks to trace."""
    best, saved = (1, 1), 0
    for unit in range(1, min(_LONGEST_UNIT, len(row) - start) + 1):
        times, piece = 1, row[start : start + unit]
        while row[start + times * unit : start + (times + 1) * unit] == piece:
            times += 1
        if (gain := unit * (times - _STAY - 1)) > saved or (unit == 1 and times > 1):
            best, saved = (unit, times), max(gain, 0)
    return best


def proven(sections: Sequence[Section], equal: Sequence[tuple[int, ...]]) -> bool:
    """Say whether positions that are to be equal came out so, on every pass over the blocks."""
    effects: dict[tuple[int, str, int], Hashable] = {}
    for run, (name, part) in enumerate(passes(sections)):
        for section in part:
            if section.block is not None:
                effects[run, name, section.block] = _effect(section)
    runs = {(run, name) for run, name, _ in effects}
    return all(
        len({effects.get((run, name, position)) for position in group}) == 1 for run, name in runs for group in equal
    )


def _effect(section: Section) -> Hashable:
    """Return what a section does to the levels, whatever they were, and the time that it takes."""
    over = frozenset(_minus(section.peak.by_category, section.begin).items())
    change = frozenset(_minus(section.end, section.begin).items())
    return over, change, section.peak.operation, section.seconds


def told_again(sections: Sequence[Section], stands: Sequence[int], start: Levels) -> tuple[Section, ...]:
    """Return the sections of the long row, in its order, on top of what is live at its `start`."""
    level: Levels = dict(start)
    told = []
    for section in _expanded(sections, stands):
        over, change = _minus(section.peak.by_category, section.begin), _minus(section.end, section.begin)
        high, end = _plus(level, over), _plus(level, change)
        peak = Peak(live_bytes=sum(high.values()), operation=section.peak.operation, by_category=high)
        told.append(replace(section, begin=dict(level), peak=peak, end=end))
        level = end
    return tuple(told)


def _expanded(sections: Sequence[Section], stands: Sequence[int]) -> Iterator[Section]:
    for _, part in passes(sections):
        if part[0].block is None:
            yield from part
            continue
        by_position = {section.block: section for section in part}
        assert len(by_position) == len(part), "a pass comes to each block once"
        falling = len(part) > 1 and (part[0].block or 0) > (part[-1].block or 0)
        numbers = range(len(stands) - 1, -1, -1) if falling else range(len(stands))
        for number in numbers:
            section = by_position.get(stands[number])
            if section is not None:
                yield replace(section, block=number)


def passes(sections: Sequence[Section]) -> Iterator[tuple[str, list[Section]]]:
    """Cut the sections into passes over the blocks and what lies between; a name with each."""
    for (name, _), part in groupby(sections, key=lambda section: (section.name, section.block is None)):
        yield name, list(part)


def fullest(sections: Sequence[Section]) -> Peak:
    """Return the fullest moment of them all, the first of equals."""
    return max((section.peak for section in sections), key=lambda peak: peak.live_bytes)


def _minus(these: Levels, those: Levels) -> dict[Category, int]:
    found = {category: these.get(category, 0) - those.get(category, 0) for category in Category}
    return {category: size for category, size in found.items() if size}


def _plus(these: Levels, those: Levels) -> dict[Category, int]:
    found = {category: these.get(category, 0) + those.get(category, 0) for category in Category}
    return {category: size for category, size in found.items() if size}
