"""The model of PyTorch's caching allocator on whole sequences: what always holds, and a slow twin that agrees.

The twin keeps no list of free blocks and joins nothing: it knows what is mapped and who holds what, and works out the
free stretches anew for each request.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajusta.memory.allocator import (
    MOST_OVER_LIMIT_BYTES,
    Allocate,
    CachingAllocator,
    Event,
    Free,
    OutOfMemory,
    replay,
)
from ajusta.memory.segments import rounded_bytes

KIB, MIB = 1 << 10, 1 << 20
BOTH = pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])
SIZES = st.one_of(
    st.integers(0, 4 * KIB),
    st.integers(1, MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 60 * MIB),
    st.sampled_from([512, MIB, MIB + 512, 10 * MIB, 19 * MIB, 20 * MIB]),
)
Step = tuple[int, int, bool]  # a size, a stream, and whether something is freed instead
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 1), st.booleans()), max_size=60)
LIMITS = st.integers(0, 150).map(lambda count: count * MIB)


def events_of(steps: list[Step]) -> list[Event]:
    """Turn steps into events; which live allocation is freed hangs on the step's size."""
    events: list[Event] = []
    live: list[int] = []
    for key, (size, stream, frees) in enumerate(steps):
        if frees and live:
            events.append(Free(live.pop(size % len(live))))
        else:
            events.append(Allocate(key, size, stream))
            live.append(key)
    return events


def random_events(seed: int, count: int) -> list[Event]:
    """Return a long sequence with about 60 live allocations of all sizes."""
    chance = random.Random(seed)
    steps: list[Step] = []
    live = 0
    for _ in range(count):
        most = chance.choice([4 * KIB, MIB, 12 * MIB, 40 * MIB])
        frees = live > 0 and chance.random() < (0.3 if live < 60 else 0.7)
        live += -1 if frees else 1
        steps.append((chance.randrange(most), chance.randrange(2), frees))
    return events_of(steps)


# The twin


@dataclass
class Space:
    """Addresses of one pool: pages that are mapped, and the stretches that are held."""

    stream: int
    small: bool
    page: int  # of a plain segment: all of it
    pages: set[int] = field(default_factory=set)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # key: begin, end

    def runs(self, mapped: bool) -> list[tuple[int, float]]:
        """Return the stretches of addresses that are mapped, or the holes; the last hole has no end."""
        edges = sorted({0, *(page + step for page in self.pages for step in (0, 1))})
        found: list[tuple[int, float]] = []
        for begin, end in zip(edges, [*edges[1:], math.inf], strict=True):
            if (begin in self.pages) != mapped:
                continue
            if found and found[-1][1] == begin:
                begin = int(found.pop()[0])
            found.append((begin, end))
        return [(begin * self.page, end * self.page) for begin, end in found]

    def free(self) -> list[tuple[int, int]]:
        """Return the mapped stretches that nobody holds."""
        found = []
        for begin, end in self.runs(mapped=True):
            for start, stop in sorted(self.held.values()):
                if begin <= start < end:
                    found.append((begin, start))
                    begin = stop
            found.append((begin, int(end)))
        return [(begin, end) for begin, end in found if begin < end]

    def could_reach(self, begin: int, end: int) -> float:
        """Return the size of a free stretch with the hole behind it."""
        return next((stop for start, stop in self.runs(mapped=False) if start == end), end) - begin

    def room(self, begin: int) -> float:
        """Return how far it is from here to the next that is held."""
        return min((start for start, _ in self.held.values() if start >= begin), default=math.inf) - begin


class Twin:
    """The allocator, slow and plain."""

    def __init__(self, limit: int | None, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.spaces: list[Space] = []

    @property
    def reserved(self) -> int:
        return sum(len(space.pages) * space.page for space in self.spaces)

    @property
    def allocated(self) -> int:
        return sum(end - begin for space in self.spaces for begin, end in space.held.values())

    def allocate(self, key: int, size: int, stream: int) -> bool:
        """Return whether there was room."""
        if size == 0:
            return True
        while size % 512:
            size += 1
        small = size <= MIB
        mine = [space for space in self.spaces if (space.stream, space.small) == (stream, small)]
        found = self._best(mine, size)
        if found is None:
            wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else math.ceil(size / (2 * MIB)) * 2 * MIB
            if self.limit is not None and self.reserved + wanted > self.limit:
                self.release()
                if self.reserved + wanted > self.limit:
                    return False
            if self.expandable:
                found = self._map(mine, stream, small, size)
            else:
                space = Space(stream, small, page=wanted, pages={0})
                self.spaces.append(space)
                found = space, 0, wanted
        space, begin, end = found
        rest = end - begin - size
        cut = rest >= 512 if small or self.expandable else rest > MIB
        space.held[key] = begin, begin + size if cut else end
        return True

    def _best(self, mine: list[Space], size: int) -> tuple[Space, int, int] | None:
        fitting = [
            (end - begin, age, begin, end, space)
            for age, space in enumerate(mine)
            for begin, end in space.free()
            if end - begin >= size
        ]
        fitting.sort(key=lambda entry: entry[:3])
        if not fitting:
            return None
        best = fitting[0]
        for entry in fitting[1:] if self.expandable else []:
            _, _, begin, end, space = best
            _, _, next_begin, next_end, other = entry
            if other.could_reach(next_begin, next_end) >= space.could_reach(begin, end):
                break
            best = entry
        return best[4], best[2], best[3]

    def _map(self, mine: list[Space], stream: int, small: bool, size: int) -> tuple[Space, int, int]:
        if not mine:
            mine = [Space(stream, small, page=(2 if small else 20) * MIB)]
            self.spaces.append(mine[0])
        (space,) = mine
        for hole, _ in space.runs(mapped=False):
            begin = next((start for start, stop in space.free() if stop == hole), hole)
            if space.room(begin) >= size:
                break
        space.pages |= set(range(begin // space.page, math.ceil((begin + size) / space.page)))
        return next((space, start, stop) for start, stop in space.free() if start <= begin < stop)

    def free(self, key: int) -> None:
        for space in self.spaces:
            space.held.pop(key, None)

    def release(self) -> None:
        for space in self.spaces:
            for begin, end in space.free():
                space.pages -= set(range(math.ceil(begin / space.page), end // space.page))


def pieces(allocator: CachingAllocator) -> list[tuple[int, bool, list[tuple[int, int | None]]]]:
    """Return stream, class and (size, holder) of all pieces, without addresses."""
    shown = [(s.stream, s.small, [(piece.size_bytes, piece.key) for piece in s.pieces]) for s in allocator.snapshot()]
    return sorted(shown, key=repr)


def pieces_of_twin(twin: Twin) -> list[tuple[int, bool, list[tuple[int, int | None]]]]:
    shown = []
    for space in twin.spaces:
        stretches = [(begin, end, None) for begin, end in space.free()]
        stretches += [(begin, end, key) for key, (begin, end) in space.held.items()]
        for begin, end in space.runs(mapped=True):
            inside = sorted(entry for entry in stretches if begin <= entry[0] < end)
            shown.append((space.stream, space.small, [(stop - start, key) for start, stop, key in inside]))
    return sorted(shown, key=repr)


def agree(events: list[Event], limit: int | None, expandable: bool, look_every: int) -> int:
    """Run both and compare after each event; return how many requests had no room."""
    fast, slow = CachingAllocator(limit, expandable), Twin(limit, expandable)
    absent: set[int] = set()
    for number, event in enumerate(events):
        if event.key in absent:
            continue
        if isinstance(event, Allocate):
            had_room = slow.allocate(event.key, event.size, event.stream)
            assert apply(fast, event) == had_room, event
            if not had_room:
                absent.add(event.key)
        else:
            slow.free(event.key)
            fast.free(event.key)
        assert (fast.allocated_bytes, fast.reserved_bytes) == (slow.allocated, slow.reserved), (number, event)
        if number % look_every == 0:
            assert pieces(fast) == pieces_of_twin(slow), (number, event)
    return len(absent)


def apply(allocator: CachingAllocator, event: Event) -> bool:
    """Apply one event; return whether there was room."""
    try:
        if isinstance(event, Allocate):
            allocator.allocate(event.key, event.size, event.stream)
        else:
            allocator.free(event.key)
    except OutOfMemory:
        return False
    return True


@BOTH
@given(steps=STEPS, limit=st.none() | LIMITS)
def test_the_twin_agrees_on_any_sequence(steps: list[Step], limit: int | None, expandable: bool) -> None:
    agree(events_of(steps), limit, expandable, look_every=1)


@BOTH
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [None, 500 * MIB])
def test_the_twin_agrees_on_a_long_sequence(seed: int, limit: int | None, expandable: bool) -> None:
    absent = agree(random_events(seed, count=400), limit, expandable, look_every=20)
    assert (absent > 0) == (limit is not None)


# What always holds


def check(allocator: CachingAllocator) -> None:
    """Assert what must be true after every event."""
    segments = allocator.snapshot()
    end = 0
    for segment in segments:
        assert segment.address >= end, "segments overlap"
        end = segment.address
        for piece, following in zip(segment.pieces, (*segment.pieces[1:], None), strict=True):
            assert piece.address == end, "pieces overlap or leave a gap"
            assert piece.size_bytes > 0 and piece.size_bytes % 512 == 0
            assert piece.size_bytes >= piece.requested_bytes >= (piece.key is not None)
            assert piece.key is not None or piece.requested_bytes == 0
            assert following is None or piece.key is not None or following.key is not None, "free pieces side by side"
            end += piece.size_bytes
        assert segment.size_bytes == end - segment.address
    held = [piece for segment in segments for piece in segment.pieces if piece.key is not None]
    assert allocator.allocated_bytes == sum(piece.size_bytes for piece in held)
    assert allocator.reserved_bytes == sum(segment.size_bytes for segment in segments)
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes


@BOTH
@given(steps=STEPS)
def test_blocks_never_overlap_and_the_figures_are_their_sums(steps: list[Step], expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for event in events_of(steps):
        assert apply(allocator, event)
        check(allocator)


@BOTH
@given(steps=STEPS)
def test_all_that_is_freed_joins_to_whole_segments_and_can_go_back(steps: list[Step], expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    live: set[int] = set()
    for event in events_of(steps):
        apply(allocator, event)
        live ^= {event.key}
    for key in live:
        allocator.free(key)
    assert allocator.allocated_bytes == 0
    assert all(len(segment.pieces) == 1 for segment in allocator.snapshot())
    reserved = allocator.reserved_bytes
    assert allocator.release_cached() == reserved
    assert (allocator.reserved_bytes, allocator.snapshot()) == (0, ())


@BOTH
@given(steps=STEPS, limit=LIMITS)
def test_no_limit_is_passed(steps: list[Step], limit: int, expandable: bool) -> None:
    allocator = CachingAllocator(limit, expandable)
    absent: set[int] = set()
    for event in events_of(steps):
        if event.key not in absent and not apply(allocator, event):
            absent.add(event.key)
        check(allocator)
        assert allocator.reserved_bytes <= limit + (MOST_OVER_LIMIT_BYTES if expandable else 0)


@given(steps=STEPS)
def test_expandable_segments_hold_nested_lifetimes_in_the_fewest_pages(steps: list[Step]) -> None:
    """Where the last that came is the first that goes, each pool's peak is reserved in whole pages, and no more."""
    events: list[Event] = []
    stack: list[tuple[int, tuple[int, bool], int]] = []
    now: dict[tuple[int, bool], int] = {}
    peak: dict[tuple[int, bool], int] = {}
    for key, (size, stream, frees) in enumerate(steps):
        if frees and stack:
            gone, pool, taken = stack.pop()
            events.append(Free(gone))
            now[pool] -= taken
        else:
            taken = rounded_bytes(size) if size else 0
            pool = (stream, taken <= MIB)
            events.append(Allocate(key, size, stream))
            stack.append((key, pool, taken))
            now[pool] = now.get(pool, 0) + taken
            peak[pool] = max(peak.get(pool, 0), now[pool])
    pages = {pool: 2 * MIB if pool[1] else 20 * MIB for pool in peak}
    expected = sum(math.ceil(most / pages[pool]) * pages[pool] for pool, most in peak.items())
    assert replay(events, expandable=True).peak_reserved_bytes == expected


@BOTH
def test_a_replay_is_the_allocator_after_all_events_and_gives_the_same_again(expandable: bool) -> None:
    events = random_events(seed=5, count=1000)
    allocator, again = CachingAllocator(expandable=expandable), CachingAllocator(expandable=expandable)
    for event in events:
        apply(allocator, event)
        apply(again, event)
    assert allocator.snapshot() == again.snapshot()
    result = replay(iter(events), expandable=expandable)
    assert (result.allocated_bytes, result.reserved_bytes) == (allocator.allocated_bytes, allocator.reserved_bytes)
    assert result.peak_allocated_bytes == allocator.peak_allocated_bytes
    assert result.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert result.overhead_bytes == result.peak_reserved_bytes - result.peak_allocated_bytes > 0
    assert result.releases == 0


@BOTH
def test_a_replay_that_does_not_fit_says_so(expandable: bool) -> None:
    events = random_events(seed=5, count=1000)
    with pytest.raises(OutOfMemory):
        replay(events, limit_bytes=100 * MIB, expandable=expandable)
