"""From tensors to what a card's allocator reserves: the comings and goings of a whole life, replayed.

The short row's events are told again for the whole depth (planning/depth.py). A storage is named by where it came: the
pass, the block, and its number among those that came there. So what a block left out would have made, and what it would
have freed of its neighbours', has a name too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ajusta.memory.allocator import Allocate, Event, Free, replay
from ajusta.memory.ledger import Section
from ajusta.memory.outside import Taken, outside_terms
from ajusta.planning.depth import passes

Key = tuple[int, int | None, int]


@dataclass(frozen=True, kw_only=True)
class _Home:
    """Where a storage came in the short row: the pass, the position of the block, its number there."""

    run: int
    position: int | None
    number: int


def told_events(
    sections: Sequence[Section], stands: Sequence[int], resident: Iterable[int]
) -> Iterator[tuple[Key, int]]:
    """Yield (name, bytes) for each storage that comes in the whole depth, `resident` ones first; 0 bytes as it goes."""
    yield from (((-1, None, number), size) for number, size in enumerate(resident) if size)
    homes = dict(_homes(sections))
    live: set[Key] = set()
    for run, (_, part) in enumerate(passes(sections)):
        for number, section in _in_order(part, stands):
            yield from _told(section, run, number, stands, homes, live)


def _in_order(part: list[Section], stands: Sequence[int]) -> Iterator[tuple[int | None, Section]]:
    if part[0].block is None:
        yield from ((None, section) for section in part)
        return
    by_position = {section.block: section for section in part}
    falling = len(part) > 1 and (part[0].block or 0) > (part[-1].block or 0)
    for number in range(len(stands) - 1, -1, -1) if falling else range(len(stands)):
        if stands[number] in by_position:
            yield number, by_position[stands[number]]


def _homes(sections: Sequence[Section]) -> Iterator[tuple[int, _Home]]:
    for run, (_, part) in enumerate(passes(sections)):
        for section in part:
            came = (event.storage for event in section.events if event.bytes > 0)
            for number, storage in enumerate(came):
                yield storage, _Home(run=run, position=section.block, number=number)


def _told(
    section: Section,
    run: int,
    number: int | None,
    stands: Sequence[int],
    homes: Mapping[int, _Home],
    live: set[Key],
) -> Iterator[tuple[Key, int]]:
    """Yield one section's events under the names of block `number`."""
    for event in section.events:
        home = homes.get(event.storage)
        if home is None:
            continue  # it was there before the trace began, and stays
        block = None
        if home.position is not None:
            # Seen from a block, a neighbour; seen from the rest of the model, the one that stands at that position.
            shift = None if section.block is None or number is None else section.block - home.position
            block = stands.index(home.position) if shift is None or number is None else number - shift
        key = (home.run, block, home.number)
        if event.bytes > 0:
            live.add(key)
            yield key, event.bytes
        elif key in live:
            live.remove(key)
            yield key, 0


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What a card must give: what torch's allocator reserves at most, and what is held beside it, by name; bytes."""

    allocated_bytes: int
    reserved_bytes: int
    beside: tuple[tuple[str, int], ...]

    @property
    def need_bytes(self) -> int:
        """All of it."""
        return self.reserved_bytes + sum(size for _, size in self.beside)


def reserve(
    sections: Sequence[Section],
    stands: Sequence[int],
    resident: Iterable[int],
    capability: tuple[int, int] | None,
    *,
    limit_bytes: int | None = None,
) -> Reserved:
    """Replay a step in a card's allocator with expandable segments, as the engine asks for them.

    Raises:
        OutOfMemory: the limit does not hold it, even with everything that is free given back.
    """
    terms = outside_terms("cuda", capability)
    inside = [term.size_bytes for term in terms if term.taken is Taken.INSIDE]
    events = told_events(sections, stands, (*resident, *inside))
    replayed = replay(_numbered(events), limit_bytes=limit_bytes, expandable=True)
    return Reserved(
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=replayed.peak_reserved_bytes,
        beside=tuple((term.name, term.size_bytes) for term in terms if term.taken is Taken.LATER),
    )


def _numbered(comings: Iterable[tuple[Key, int]]) -> Iterator[Event]:
    """Turn names into the numbers that the allocator knows; a size of 0 is a going."""
    numbers: dict[Key, int] = {}
    for key, size in comings:
        if size:
            numbers[key] = len(numbers)
            yield Allocate(key=numbers[key], size=size)
        else:
            yield Free(key=numbers[key])
