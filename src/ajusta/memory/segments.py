"""How PyTorch's CUDA caching allocator cuts memory: sizes, free blocks, and two ways of getting segments.

A request is rounded up to 512 bytes and served by one of two pools of its stream: small (up to 1 MiB) or large. A pool
keeps its free blocks in order of size, and the smallest that is big enough is taken and cut. A segment is what the
driver gave: whole pieces (`PlainSegments`), or pages that are mapped one after the other into a range of addresses
(`ExpandableSegments`, torch's `expandable_segments:True`). Sizes and addresses are in bytes.

Source: pytorch, c10/cuda/CUDACachingAllocator.cpp after August 2026 (pull request 195129 is in it); the constants are
those of c10/core/AllocatorConfig.h in 2.13. Each rule names its symbol there. Given up: what a setting other than
`expandable_segments` changes, pools of CUDA graphs, and blocks that wait for another stream (`record_stream`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ajusta.base.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_REQUEST_BYTES = MIB  # kSmallSize: a request up to this is small
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: a request from this on gets a segment of its own
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge

# torch reserves addresses for 9/8 of the card for each expandable segment; ours do not end. A multiple of both pages.
_RANGE_BYTES = LARGE_SEGMENT_BYTES << 24


def rounded_bytes(size: int) -> int:
    """Return what a request of `size` bytes takes: a multiple of 512, at least one (`round_size`)."""
    return max(_up(size, MIN_BLOCK_BYTES), MIN_BLOCK_BYTES)


def segment_bytes(rounded: int) -> int:
    """Return what is asked of the driver for a rounded request that no free block can serve (`get_allocation_size`)."""
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    return LARGE_SEGMENT_BYTES if rounded < OWN_SEGMENT_BYTES else _up(rounded, ROUND_LARGE_BYTES)


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of addresses in one state: held (`key` is set), free, or a hole that no memory is mapped into."""

    address: int
    size: int
    mapped: bool = True
    key: int | None = None
    requested: int = 0
    before: Block | None = None
    after: Block | None = None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; return the rest as a block of the same state behind this one."""
        rest = Block(self.address + size, self.size - size, self.mapped, before=self, after=self.after)
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, neighbour: Block) -> None:
        """Take the neighbour's addresses; it must be `before` or `after` this block, and is gone afterwards."""
        if neighbour is self.before:
            self.address, self.before = neighbour.address, neighbour.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = neighbour.after
            if self.after is not None:
                self.after.before = self
        self.size += neighbour.size


class Pool:
    """The free blocks and the holes of one stream and one size class (`BlockPool`).

    Free blocks stand in the order of size, then age of the segment, then address
    (`BlockComparatorSizeCounterAddress`, pytorch PR 183591; before 2026 size, then address). A later segment has higher
    addresses here, so size and address say the same.
    """

    def __init__(self, stream: int, small: bool) -> None:
        self.stream, self.small = stream, small
        self.holes: dict[int, Block] = {}
        self._free: dict[int, Block] = {}
        self._order: list[tuple[int, int]] = []

    def enter(self, block: Block) -> None:
        """List a block that nobody holds: among the free, or among the holes."""
        if block.mapped:
            self._free[block.address] = block
            insort(self._order, (block.size, block.address))
        else:
            self.holes[block.address] = block

    def leave(self, block: Block) -> None:
        """Take a block off the list that it stands in."""
        if block.mapped:
            del self._free[block.address]
            del self._order[bisect_left(self._order, (block.size, block.address))]
        else:
            del self.holes[block.address]

    def settle(self, block: Block) -> None:
        """Join a block that nobody holds with neighbours in its state, and list it (`try_merge_blocks`)."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.key is None and neighbour.mapped == block.mapped:
                self.leave(neighbour)
                block.absorb(neighbour)
        self.enter(block)

    def fitting(self, size: int) -> Iterator[Block]:
        """Yield the free blocks of at least `size` bytes, best first (`get_free_block`)."""
        for at in range(bisect_left(self._order, (size, 0)), len(self._order)):
            yield self._free[self._order[at][1]]

    def free_blocks(self) -> list[Block]:
        """Return the free blocks, smallest first."""
        return [self._free[address] for _, address in self._order]


class Segments(Protocol):
    """Where a pool's memory comes from and goes back to."""

    def find(self, pool: Pool, size: int) -> Block | None:
        """Return the free block to use for a rounded request, off its list; None if there is none."""

    def grow(self, pool: Pool, size: int) -> tuple[Block, int]:
        """Return a free block for the request, off its list, and the bytes newly taken from the driver."""

    def keeps(self, pool: Pool, rest: int) -> bool:
        """Whether the rest of a block that is too big becomes a block; else the holder has it too (`should_split`)."""

    def release(self, pool: Pool) -> int:
        """Give back to the driver what is free and whole; return how many bytes that is (`release_blocks`)."""


class PlainSegments:
    """Each segment is one piece from the driver, and goes back when all of it is free (torch's default)."""

    def __init__(self) -> None:
        self._end = 0

    def find(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block that is big enough, off its list (`get_free_block`)."""
        block = next(pool.fitting(size), None)
        if block is not None:
            pool.leave(block)
        return block

    def grow(self, pool: Pool, size: int) -> tuple[Block, int]:
        """Return a new segment as one block, and its size (`alloc_block`)."""
        block = Block(self._end, segment_bytes(size))
        self._end += block.size
        return block, block.size

    def keeps(self, pool: Pool, rest: int) -> bool:
        """Whether the rest is at least 512 bytes (small pool), or more than 1 MiB (large pool)."""
        return rest >= MIN_BLOCK_BYTES if pool.small else rest > SMALL_REQUEST_BYTES

    def release(self, pool: Pool) -> int:
        """Give back the segments that are free as a whole, of every size; return their bytes (`release_block`)."""
        whole = [block for block in pool.free_blocks() if block.before is None and block.after is None]
        for block in whole:
            pool.leave(block)
        return sum(block.size for block in whole)


class ExpandableSegments:
    """One range of addresses a pool, into which pages are mapped as needed: of 2 MiB (small) or 20 MiB (large)."""

    def __init__(self) -> None:
        self._end = 0

    def find(self, pool: Pool, size: int) -> Block | None:
        """Return the best free block, off its list, where the last one counts with all that it could grow to.

        So while a hole follows the smallest that fits, a bigger block that no hole follows is preferred: the loop over
        `expandable_size` in `get_free_block`.
        """
        best: Block | None = None
        for block in pool.fitting(size):
            if best is not None and _reach(block) >= _reach(best):
                break
            best = block
        if best is not None:
            pool.leave(best)
        return best

    def grow(self, pool: Pool, size: int) -> tuple[Block, int]:
        """Map what is missing behind (or in place of) the first stretch with room (`try_allocate_expandable_block`)."""
        page, mapped = _page(pool), 0
        block = self._first_with_room(pool, size)
        while not block.mapped or block.size < size:
            had = block.size if block.mapped else 0
            hole = block.after if block.mapped else block
            assert hole is not None, "there is room behind the block"
            mapped += _map(pool, hole, min(hole.size, _up(size - had, page)))
            block = hole
        pool.leave(block)
        return block, mapped

    def keeps(self, pool: Pool, rest: int) -> bool:
        """Whether the rest is at least 512 bytes, in either pool."""
        return rest >= MIN_BLOCK_BYTES

    def release(self, pool: Pool) -> int:
        """Unmap every page that lies wholly inside a free block; return their bytes (`unmap_block`)."""
        page, released = _page(pool), 0
        for block in pool.free_blocks():
            begin, end = _up(block.address, page), (block.address + block.size) // page * page
            if begin < end:
                pool.leave(block)
                _unmap(pool, block, begin, end)
                released += end - begin
        return released

    def _first_with_room(self, pool: Pool, size: int) -> Block:
        """Return the block with which the lowest free or unmapped stretch begins (`find_expandable_block`)."""
        for address in sorted(pool.holes):
            block = pool.holes[address]
            if block.before is not None and block.before.key is None:
                block = block.before
            if _has_room(block, size):
                return block
        block = Block(self._end, _RANGE_BYTES, mapped=False)
        self._end += _RANGE_BYTES
        pool.enter(block)
        return block


def _map(pool: Pool, hole: Block, size: int) -> int:
    """Map the first `size` bytes of a hole, whole pages, and join them with what is free beside (`map_block`)."""
    pool.leave(hole)
    if size < hole.size:
        pool.enter(hole.cut(size))
    hole.mapped = True
    pool.settle(hole)
    return size


def _unmap(pool: Pool, block: Block, begin: int, end: int) -> None:
    """Turn the pages from `begin` to `end` of a free block, which is off its list, into a hole."""
    if block.address < begin:
        rest = block.cut(begin - block.address)
        pool.enter(block)
        block = rest
    if end < block.address + block.size:
        pool.enter(block.cut(end - block.address))
    block.mapped = False
    pool.settle(block)


def _has_room(block: Block | None, size: int) -> bool:
    found = 0
    while found < size and block is not None and block.key is None:
        found, block = found + block.size, block.after
    return found >= size


def _reach(block: Block) -> int:
    """Bytes of a free block with the hole behind it."""
    hole = block.after
    return block.size + (hole.size if hole is not None and not hole.mapped else 0)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
