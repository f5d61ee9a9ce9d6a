"""Replay allocations and frees through a model of PyTorch's CUDA caching allocator: allocated becomes reserved.

A card is full when *reserved* bytes reach its limit, and these are more than the tensors: requests are rounded, blocks
are cut from segments, and a free block serves only its own pool and stream. Given the events of a step, the model gives
the same answer on every machine, without a card. The rules, and what the model gives up, stand in `memory/segments.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ajusta.base.units import MIB, show_bytes
from ajusta.memory.segments import (
    SMALL_REQUEST_BYTES,
    Block,
    ExpandableSegments,
    PlainSegments,
    Pool,
    Segments,
    rounded_bytes,
    segment_bytes,
)

# With expandable segments torch compares the limit with the request in units of 2 MiB, and then maps pages of 20 MiB.
MOST_OVER_LIMIT_BYTES = 18 * MIB


@dataclass(frozen=True, slots=True)
class Allocate:
    """`size` bytes are asked for on a stream; `key` names them until they are freed, and may be used again then."""

    key: int
    size: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """The allocation with this key is given back."""

    key: int


Event = Allocate | Free


class OutOfMemory(Exception):
    """A request is over the limit even after everything that is free and whole went back. All figures are in bytes."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{show_bytes(requested_bytes)} asked for, {show_bytes(allocated_bytes)} allocated, "
            f"{show_bytes(reserved_bytes)} reserved of {show_bytes(limit_bytes)}"
        )
        self.requested_bytes, self.allocated_bytes = requested_bytes, allocated_bytes
        self.reserved_bytes, self.limit_bytes = reserved_bytes, limit_bytes


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a segment: held by the allocation `key`, or free (None)."""

    address: int
    size_bytes: int
    requested_bytes: int  # as it was asked for; 0 when free
    key: int | None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Mapped memory without a gap, and its pieces in the order of their addresses."""

    stream: int
    small: bool
    address: int
    size_bytes: int
    pieces: tuple[Piece, ...]


class CachingAllocator:
    """The allocator's state after the events so far; all figures in bytes.

    `allocated_bytes` and `reserved_bytes` are what `torch.cuda.memory_allocated` and `memory_reserved` would say.
    `limit_bytes` is what `torch.cuda.set_per_process_memory_fraction` sets: reserved never passes it with plain
    segments, and by at most `MOST_OVER_LIMIT_BYTES` with expandable ones.
    """

    def __init__(self, limit_bytes: int | None = None, expandable: bool = False) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.releases = 0  # how often cached memory had to go back for the sake of a request
        self._limit = limit_bytes
        self._segments: Segments = ExpandableSegments() if expandable else PlainSegments()
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._held: dict[int, tuple[Pool, Block] | None] = {}

    def allocate(self, key: int, size: int, stream: int = 0) -> None:
        """Hold `size` bytes under `key`; a tensor of no bytes holds no memory (`malloc`, `alloc_found_block`).

        Raises:
            OutOfMemory: the limit is too small, also after cached memory was given back.
        """
        assert key not in self._held and size >= 0, f"allocation {key} of {size} bytes"
        if size == 0:
            self._held[key] = None
            return
        rounded = rounded_bytes(size)
        pool = self._pool(stream, rounded <= SMALL_REQUEST_BYTES)
        block = self._segments.find(pool, rounded) or self._grow(pool, rounded, size)
        block.key, block.requested = key, size
        rest = block.size - rounded
        if rest and self._segments.keeps(pool, rest):
            pool.enter(block.cut(rounded))
        self._held[key] = pool, block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: int) -> None:
        """Give back what `key` holds: to its pool, joined with the free blocks beside it (`free_block`)."""
        held = self._held.pop(key)
        if held is None:
            return
        pool, block = held
        self.allocated_bytes -= block.size
        block.key, block.requested = None, 0
        pool.settle(block)

    def release_cached(self) -> int:
        """Give back to the driver all that is free and whole, in every pool; return the bytes (`empty_cache`)."""
        released = sum(self._segments.release(pool) for pool in self._pools.values())
        self.reserved_bytes -= released
        return released

    def snapshot(self) -> tuple[Segment, ...]:
        """Return all mapped memory, cut into its pieces, by address."""
        blocks = [(pool, block) for pool in self._pools.values() for block in pool.free_blocks()]
        blocks += [held for held in self._held.values() if held is not None]
        heads = [(pool, block) for pool, block in blocks if block.before is None or not block.before.mapped]
        return tuple(sorted((_segment(pool, head) for pool, head in heads), key=lambda segment: segment.address))

    def _pool(self, stream: int, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream, small)
        return pool

    def _grow(self, pool: Pool, rounded: int, size: int) -> Block:
        """Take memory from the driver; over the limit, give back what is cached and look once more."""
        wanted = segment_bytes(rounded)
        if self._limit is not None and self.reserved_bytes + wanted > self._limit:
            self.release_cached()
            self.releases += 1
            if self.reserved_bytes + wanted > self._limit:
                raise OutOfMemory(
                    requested_bytes=size,
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                    limit_bytes=self._limit,
                )
        block, taken = self._segments.grow(pool, rounded)
        self.reserved_bytes += taken
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block


def _segment(pool: Pool, head: Block) -> Segment:
    pieces: list[Piece] = []
    block: Block | None = head
    while block is not None and block.mapped:
        pieces.append(
            Piece(address=block.address, size_bytes=block.size, requested_bytes=block.requested, key=block.key)
        )
        block = block.after
    size = sum(piece.size_bytes for piece in pieces)
    return Segment(stream=pool.stream, small=pool.small, address=head.address, size_bytes=size, pieces=tuple(pieces))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a sequence of events does to the allocator, in bytes: the fullest moments, and the end."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    releases: int  # how often cached memory had to go back for the sake of a request

    @property
    def overhead_bytes(self) -> int:
        """What the card must have beside the blocks in use: the distance of the two peaks."""
        return self.peak_reserved_bytes - self.peak_allocated_bytes


def replay(events: Iterable[Event], *, limit_bytes: int | None = None, expandable: bool = False) -> Replayed:
    """Run the events, in their order, through an allocator that starts empty.

    Raises:
        OutOfMemory: a request is over the limit, also after cached memory was given back.
    """
    allocator = CachingAllocator(limit_bytes, expandable)
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.key, event.size, event.stream)
        else:
            allocator.free(event.key)
    return Replayed(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        reserved_bytes=allocator.reserved_bytes,
        releases=allocator.releases,
    )
