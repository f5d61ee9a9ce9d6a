"""The model of PyTorch's caching allocator: each rule by itself, with its arithmetic, and published figures."""

from __future__ import annotations

import pytest

from ajusta.memory.allocator import (
    MOST_OVER_LIMIT_BYTES,
    Allocate,
    CachingAllocator,
    Event,
    Free,
    OutOfMemory,
    replay,
)
from ajusta.memory.segments import rounded_bytes, segment_bytes

KIB, MIB = 1 << 10, 1 << 20
BOTH = pytest.mark.parametrize("expandable", [False, True], ids=["plain", "expandable"])


def sizes(allocator: CachingAllocator) -> list[list[int]]:
    """Return the sizes of all pieces, segment by segment."""
    return [[piece.size_bytes for piece in segment.pieces] for segment in allocator.snapshot()]


def holders(allocator: CachingAllocator) -> list[list[int | None]]:
    """Return who holds each piece, segment by segment; None is free."""
    return [[piece.key for piece in segment.pieces] for segment in allocator.snapshot()]


# Sizes


@pytest.mark.parametrize(
    ("asked", "taken"), [(1, 512), (511, 512), (512, 512), (513, 1024), (40000, 40448), (MIB + 1, MIB + 512)]
)
def test_a_request_takes_a_multiple_of_512_bytes(asked: int, taken: int) -> None:
    assert rounded_bytes(asked) == taken  # 40448 = 79 * 512, 79 = ceil(40000 / 512)
    allocator = CachingAllocator()
    allocator.allocate(1, asked)
    assert allocator.allocated_bytes == taken


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # the largest small request
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounds up to 10 MiB: a segment of its own
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),  # 17 * 2 MiB
    ],
)
def test_a_segment_is_2_mib_or_20_mib_or_the_request_in_units_of_2_mib(asked: int, segment: int) -> None:
    assert segment_bytes(rounded_bytes(asked)) == segment
    assert replay([Allocate(1, asked)]).reserved_bytes == segment


@BOTH
def test_a_tensor_of_no_bytes_holds_no_memory(expandable: bool) -> None:
    allocator = CachingAllocator(limit_bytes=0, expandable=expandable)
    allocator.allocate(1, 0)
    allocator.free(1)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.snapshot()) == (0, 0, ())


# Cutting and joining


@BOTH
def test_small_blocks_are_cut_as_long_as_512_bytes_remain(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(1, MIB)
    allocator.allocate(2, MIB - 512)
    assert sizes(allocator) == [[MIB, MIB - 512, 512]]
    allocator.allocate(3, 1)  # exactly what remains
    assert holders(allocator) == [[1, 2, 3]] and allocator.reserved_bytes == 2 * MIB


def test_a_large_block_is_cut_only_if_more_than_1_mib_remains() -> None:
    """20 MiB less 19 MiB is 1 MiB: the holder has it too, and torch counts it as allocated. 512 bytes more, and cut."""
    whole, cut = CachingAllocator(), CachingAllocator()
    for allocator, second in ((whole, 19 * MIB), (cut, 19 * MIB - 512)):
        allocator.allocate(1, 20 * MIB)
        allocator.free(1)
        allocator.allocate(2, second)
    assert sizes(whole) == [[20 * MIB]] and whole.allocated_bytes == 20 * MIB
    assert sizes(cut) == [[19 * MIB - 512, MIB + 512]] and cut.allocated_bytes == 19 * MIB - 512


def test_an_expandable_segment_is_cut_to_the_last_512_bytes_in_the_large_pool_too() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.allocate(1, 20 * MIB - 512)
    assert sizes(allocator) == [[20 * MIB - 512, 512]] and allocator.allocated_bytes == 20 * MIB - 512


@BOTH
@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)])
def test_a_freed_block_joins_the_free_blocks_on_both_sides(order: tuple[int, ...], expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for key in (1, 2, 3):
        allocator.allocate(key, 5 * MIB)  # 15 of 20 MiB
    for key in order:
        allocator.free(key)
    assert sizes(allocator) == [[20 * MIB]] and allocator.allocated_bytes == 0
    allocator.allocate(4, 20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


@BOTH
def test_free_blocks_with_a_held_one_between_them_do_not_join(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    for key in (1, 2, 3):
        allocator.allocate(key, 4 * MIB)
    allocator.free(1)
    allocator.free(3)
    assert sizes(allocator) == [[4 * MIB, 4 * MIB, 12 * MIB]] and holders(allocator) == [[None, 2, None]]


# Choosing


def test_the_smallest_free_block_that_is_big_enough_is_taken() -> None:
    allocator = CachingAllocator()
    for key, size in enumerate((40 * MIB, 24 * MIB, 30 * MIB)):
        allocator.allocate(key, size)
    for key in range(3):
        allocator.free(key)
    allocator.allocate(9, 22 * MIB)
    assert holders(allocator) == [[None], [9, None], [None]]  # of 40, 24 and 30 MiB, the one of 24
    assert allocator.reserved_bytes == 94 * MIB


def test_of_two_blocks_of_one_size_the_one_in_the_older_segment_is_taken() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 12 * MIB)
    allocator.allocate(2, 12 * MIB)
    allocator.free(2)
    allocator.free(1)
    allocator.allocate(3, 12 * MIB)
    assert holders(allocator) == [[3], [None]]


def test_of_two_blocks_of_one_size_in_a_segment_the_first_is_taken() -> None:
    allocator = CachingAllocator()
    for key in range(1, 5):
        allocator.allocate(key, 4 * MIB)
    allocator.free(3)
    allocator.free(1)
    allocator.allocate(9, 4 * MIB)
    assert holders(allocator) == [[9, 2, None, 4, None]]


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 2 * MIB)
    allocator.free(1)
    allocator.allocate(2, MIB)  # 20 MiB are free, but in the large pool
    assert [segment.small for segment in allocator.snapshot()] == [False, True]
    assert allocator.reserved_bytes == 22 * MIB


@BOTH
def test_a_free_block_serves_its_own_stream_only(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(1, 20 * MIB, stream=0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB, stream=7)
    assert allocator.reserved_bytes == 40 * MIB
    assert [segment.stream for segment in allocator.snapshot()] == [0, 7]


# Limits


def test_at_the_limit_whole_free_segments_go_back_and_the_request_is_tried_again() -> None:
    """40 of 60 MiB are cached in two segments of 20. 34 MiB more are too many, until both went back."""
    allocator = CachingAllocator(limit_bytes=60 * MIB)
    for key in (1, 2):
        allocator.allocate(key, 20 * MIB)
    for key in (1, 2):
        allocator.free(key)
    assert (allocator.reserved_bytes, allocator.releases) == (40 * MIB, 0)
    allocator.allocate(3, 34 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes, allocator.releases) == (34 * MIB, 40 * MIB, 1)


def test_at_the_limit_the_segments_of_every_pool_and_stream_go_back() -> None:
    allocator = CachingAllocator(limit_bytes=24 * MIB)
    allocator.allocate(1, 100, stream=1)
    allocator.allocate(2, 20 * MIB, stream=2)
    allocator.free(1)
    allocator.free(2)
    allocator.allocate(3, 24 * MIB)
    assert holders(allocator) == [[3]]


def test_a_segment_that_is_held_in_part_stays_and_the_request_fails() -> None:
    """20 MiB are reserved for 2 MiB. 29 MiB more need 30, so 50 of 48 MiB; 28 MiB need 28."""
    allocator = CachingAllocator(limit_bytes=48 * MIB)
    allocator.allocate(1, 2 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(2, 29 * MIB)
    error = caught.value
    assert (error.requested_bytes, error.allocated_bytes) == (29 * MIB, 2 * MIB)
    assert (error.reserved_bytes, error.limit_bytes) == (20 * MIB, 48 * MIB)
    assert str(error) == "29.0 MiB asked for, 2.00 MiB allocated, 20.0 MiB reserved of 48.0 MiB"
    allocator.allocate(2, 28 * MIB)  # the same key: nothing is held by it
    assert allocator.reserved_bytes == 48 * MIB


def test_the_limit_is_met_to_the_byte() -> None:
    assert replay([Allocate(1, 100 * MIB)], limit_bytes=100 * MIB).reserved_bytes == 100 * MIB
    with pytest.raises(OutOfMemory):
        replay([Allocate(1, 100 * MIB)], limit_bytes=100 * MIB - 1)


def test_an_expandable_segment_may_pass_the_limit_by_up_to_18_mib() -> None:
    """Torch compares 22 MiB with the limit of 22 MiB, and then maps two pages: 40 MiB."""
    assert MOST_OVER_LIMIT_BYTES == 18 * MIB
    assert replay([Allocate(1, 22 * MIB)], limit_bytes=22 * MIB, expandable=True).reserved_bytes == 40 * MIB


def test_an_expandable_segment_fails_though_the_missing_page_would_fit() -> None:
    """100 MiB more end 2 MiB behind what is mapped, so that one page of 20 MiB would do; torch asks for 100 MiB."""
    events: list[Event] = [Allocate(1, 20 * MIB), Allocate(2, 98 * MIB), Free(2), Allocate(3, 102 * MIB)]
    assert replay(events, expandable=True).reserved_bytes == 140 * MIB
    assert replay(events, expandable=True, limit_bytes=222 * MIB).releases == 0  # 120 + 102
    assert replay(events, expandable=True, limit_bytes=221 * MIB).releases == 1


# Expandable segments


def test_an_expandable_segment_grows_by_pages_at_its_end() -> None:
    allocator = CachingAllocator(expandable=True)
    for key, reserved in ((1, 20), (2, 20), (3, 40), (4, 60)):  # 12, 18, 27, 43 MiB in pages of 20 MiB
        allocator.allocate(key, (12, 6, 9, 16)[key - 1] * MIB)
        assert allocator.reserved_bytes == reserved * MIB
    assert sizes(allocator) == [[12 * MIB, 6 * MIB, 9 * MIB, 16 * MIB, 17 * MIB]]


def test_an_expandable_segment_maps_only_what_is_missing_behind_its_last_free_block() -> None:
    """39 of 40 MiB are free at the end; 45 MiB need 6 more, so one page, where a plain allocator takes 46 MiB."""
    events: list[Event] = [Allocate(1, 40 * MIB), Free(1), Allocate(2, MIB + 512), Allocate(3, 45 * MIB)]
    assert replay(events, expandable=True).reserved_bytes == 60 * MIB
    assert replay(events).reserved_bytes == 86 * MIB


def test_an_expandable_small_pool_has_pages_of_2_mib() -> None:
    allocator = CachingAllocator(expandable=True)
    for key in range(5):
        allocator.allocate(key, 800 * KIB)  # 4000 KiB in pages of 2048 KiB
    assert sizes(allocator) == [[800 * KIB] * 5 + [96 * KIB]] and allocator.reserved_bytes == 4 * MIB


def test_a_block_before_the_end_is_taken_though_the_last_one_fits_more_closely() -> None:
    """Free are 8 MiB, and 6 MiB at the end, which count as all that they could grow to. So 6 MiB go into the 8."""
    allocator = CachingAllocator(expandable=True)
    for key, size in ((1, 8), (2, 6), (3, 26)):
        allocator.allocate(key, size * MIB)
    allocator.free(1)
    allocator.free(3)
    allocator.allocate(4, 20 * MIB)
    assert sizes(allocator) == [[8 * MIB, 6 * MIB, 20 * MIB, 6 * MIB]]
    allocator.allocate(5, 6 * MIB)
    assert holders(allocator) == [[5, None, 2, 4, None]]


def test_at_the_limit_only_pages_that_are_free_as_a_whole_are_unmapped() -> None:
    """Of 0-60 MiB, 0-10 and 30-32 are held. Of the pages at 0, 20 and 40 only the last is free: 20 MiB go back."""
    allocator = CachingAllocator(limit_bytes=80 * MIB, expandable=True)
    for key, size in ((1, 10), (2, 20), (3, 2), (4, 28)):
        allocator.allocate(key, size * MIB)
    allocator.free(2)
    allocator.free(4)
    assert allocator.release_cached() == 20 * MIB
    assert sizes(allocator) == [[10 * MIB, 20 * MIB, 2 * MIB, 8 * MIB]] and allocator.reserved_bytes == 40 * MIB


def test_the_lowest_hole_with_room_is_filled_first() -> None:
    """0-20, 60-80 are held, 20-60 was unmapped. 30 MiB fit in there: two pages, not at the end."""
    allocator = CachingAllocator(expandable=True)
    for key, size in ((1, 20), (2, 40), (3, 20)):
        allocator.allocate(key, size * MIB)
    allocator.free(2)
    allocator.release_cached()
    assert [segment.size_bytes for segment in allocator.snapshot()] == [20 * MIB, 20 * MIB]
    allocator.allocate(4, 30 * MIB)
    assert holders(allocator) == [[1, 4, None, 3]] and allocator.reserved_bytes == 80 * MIB


def test_a_hole_without_room_is_passed_over() -> None:
    allocator = CachingAllocator(expandable=True)
    for key, size in ((1, 20), (2, 40), (3, 20)):
        allocator.allocate(key, size * MIB)
    allocator.free(2)
    allocator.release_cached()
    allocator.allocate(4, 41 * MIB)  # one MiB more than the hole
    assert holders(allocator) == [[1], [3, 4, None]]
    assert allocator.reserved_bytes == (20 + 20 + 60) * MIB


def test_free_memory_before_and_behind_a_hole_is_used_with_it() -> None:
    """10-20 is free, 20-60 a hole, 60-75 free again. 63 MiB fit into 10-75: only the hole is mapped."""
    allocator = CachingAllocator(expandable=True)
    for key, size in ((1, 10), (2, 65), (3, 5)):
        allocator.allocate(key, size * MIB)
    allocator.free(2)
    assert allocator.release_cached() == 40 * MIB
    allocator.allocate(4, 63 * MIB)
    assert sizes(allocator) == [[10 * MIB, 63 * MIB, 2 * MIB, 5 * MIB]] and allocator.reserved_bytes == 80 * MIB


# Published figures


def test_the_snapshot_that_a_user_of_torch_published() -> None:
    """`X @ W + b` with W of 1000 x 10, (discuss.pytorch.org/t/178671): every block, and the workspace."""
    allocator = CachingAllocator()
    for key, size in enumerate((40000, 40, 4000, 40, 8519680, 40)):  # W, b, X, X @ W, cuBLAS workspace, sum
        allocator.allocate(key, size)
    allocator.free(3)
    assert sizes(allocator) == [[40448, 512, 4096, 512, 512, 2051072], [8519680, 12451840]]
    assert holders(allocator) == [[0, 1, 2, None, 5, None], [4, None]]
    assert allocator.allocated_bytes == 45568 + 8519680


@BOTH
@pytest.mark.parametrize(
    ("size", "plain", "plain_after", "pages", "pages_after"),
    [
        (512, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB),
        (MIB, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB),
        (MIB + 512, 20 * MIB, 20 * MIB, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 40 * MIB, 20 * MIB, 40 * MIB, 40 * MIB),
        (10 * MIB + 512, 36 * MIB, 12 * MIB, 40 * MIB, 20 * MIB),
    ],
)
def test_what_torch_expects_of_five_rounds_of_clone_and_add(
    size: int, plain: int, plain_after: int, pages: int, pages_after: int, expandable: bool
) -> None:
    """Torch's suite demands these of a card: test_graph_memory_stats_and_use_result_after_destroy_graph, test_cuda.py.

    `b = a.clone()`, then five times `b = b.clone() + 1`: reserved bytes then, and after `empty_cache` with b alive.
    """
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(0, size)
    for turn in range(5):
        old, copy, new = 2 * turn, 2 * turn + 1, 2 * turn + 2
        allocator.allocate(copy, size)
        allocator.allocate(new, size)
        allocator.free(copy)
        allocator.free(old)
    assert allocator.reserved_bytes == (pages if expandable else plain)
    allocator.release_cached()
    assert allocator.reserved_bytes == (pages_after if expandable else plain_after)
    assert allocator.allocated_bytes == size


def test_a_key_is_held_once() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 512)
    with pytest.raises(AssertionError):
        allocator.allocate(1, 512)
    with pytest.raises(KeyError):
        allocator.free(2)
