"""The bound on a grouped product's scratch holds for every way of sharing the rows out."""

from __future__ import annotations

import pytest

from ajusta.memory.workspaces_experts import most_scratch_bytes
from ajusta.memory.workspaces_onednn import Product, scratch_bytes

# Columns and depth: around the sizes that oneDNN's tiles depend on, and those of two known models.
SIZES = [(64, 64), (32, 96), (300, 520), (96, 1024), (17, 1100), (80, 1536), (1536, 2048), (32, 4096), (8, 512)]


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize(("columns", "depth"), SIZES)
def test_no_share_of_the_rows_takes_more(columns: int, depth: int, threads: int) -> None:
    rows = 1300
    shares = {*range(1, 40), 63, 64, 65, 127, 128, 200, 255, 256, 257, 400, 511, 512, 768, 1023, 1024, 1025, rows}
    taken = [scratch_bytes(Product(M=m, N=columns, K=depth, transposed=False), threads) for m in shares]
    bound = most_scratch_bytes(rows, columns, depth, threads)
    assert max(taken) <= bound < 3 * max(taken)


def test_small_products_hold_nothing() -> None:
    assert most_scratch_bytes(16, 16, 16, 8) == 0 == scratch_bytes(Product(M=16, N=16, K=16, transposed=False), 8)
