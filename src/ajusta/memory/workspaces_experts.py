"""What the grouped product of blocks/grouped.py holds inside itself on a processor: one expert's product at a time.

How many rows an expert gets is not known beforehand, so this is an upper bound over every way of sharing them out; the
rest is exact. Only bf16 products hold anything (memory/workspaces_onednn.py, from whose sources the bounds are).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ajusta.memory.workspaces_onednn import SMALLEST_WORK, bf16_by_onednn

_ROWS, _COLUMNS, _DEPTH = 256, 64, 1024  # of the largest tiles
_FAR_DEPTH, _FAR_ROWS, _RUN = 4096, 1024, 16  # from here on tiles of the rows are copied, and up to 16 lie side by side
_ALIGNED = 32  # to which the depth of a tile is rounded, in elements
_BUFFER_PAD, _LIST_BYTES = 128, 640  # bytes: beside each buffer, and each thread's list of tiles


def grouped_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the most that oneDNN's scratch can be for any expert's share of the rows."""
    rows: Tensor = args[0]
    weight: Tensor = args[1]
    if rows.dtype != torch.bfloat16 or not bf16_by_onednn():
        return 0
    return most_scratch_bytes(rows.shape[0], weight.shape[2], weight.shape[1], torch.get_num_threads())


def most_scratch_bytes(rows: int, columns: int, depth: int, threads: int) -> int:
    """Return a bound on the scratch of [m, depth] @ [depth, columns] for every m up to `rows`."""
    if rows * columns * depth <= SMALLEST_WORK:
        return 0
    copied = depth >= _FAR_DEPTH and rows >= _FAR_ROWS
    high, wide, deep = min(rows, _ROWS), min(columns, _COLUMNS), -(-min(depth, _DEPTH) // _ALIGNED) * _ALIGNED
    left = 2 * high * (deep + _ALIGNED) if copied else 0
    right = 2 * _COLUMNS * deep
    run = min(_RUN, -(-columns // wide)) if copied else 1
    sums = max(4 * wide * high * run, 4 * columns)
    return threads * (_LIST_BYTES + left + right + sums) + 4 * _BUFFER_PAD
