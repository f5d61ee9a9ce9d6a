"""What oneDNN holds inside one bf16 matrix product on a processor: copies of both factors in tiles, and sums in fp32.

Every thread gets a tile of A (only where A has to be copied), a tile of B and a tile of fp32 sums. The sizes of the
tiles are chosen by trying: whichever cut leaves the threads the most even shares of the work. So this is the same
search again, without the product. Sources, in oneDNN (https://github.com/uxlfoundation/oneDNN, src/cpu/x64/matmul/
brgemm_matmul_utils.cpp): compute_blocking_heuristic_avx512 (the search), init_aux_values (tile sizes), init_scratchpad
(what is booked); in pytorch, aten/src/ATen/native/mkldnn/Matmul.cpp (when oneDNN is taken at all). The scratch comes
out of torch's own allocator, whose events these figures were held against on a processor with AVX-512 and bf16 (oneDNN
3.12 in torch 2.13, tests/memory/test_workspaces.py). With AMX, and without AVX-512, oneDNN searches otherwise: there
the figure is an estimate of the right size.

Shape letters: M rows of A and C, K columns of A, N columns of C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

SMALLEST_WORK = 16**3  # M N K of the whole batch; at or below this torch multiplies by itself
_COLUMNS, _DEPTH, _DEPTH_WIDE, _MOST_ROWS = 64, 512, 1024, 256  # of a tile
_PAD = 128  # bytes added to each booked buffer for its alignment
_ELEMENT_BYTES = 640  # of a thread's list of tiles: 16 entries of 40 bytes


@dataclass(frozen=True, kw_only=True)
class Product:
    """C [M, N] = A [M, K] B [K, N] in bf16, `batch` times. `transposed`: A's columns are dense, not its rows."""

    M: int
    N: int
    K: int
    transposed: bool
    batch: int = 1
    dims: int = 2  # of the tensors as they are handed over: 3 for a batch


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the work is cut: tiles of `rows` x `columns`, `run` of them side by side, depth shared by `depth_threads`."""

    rows: int
    columns: int
    run: int
    depth: int
    depth_threads: int


@cache
def bf16_by_onednn() -> bool:
    """Say whether torch hands bf16 products to oneDNN on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_bytes(left: Tensor, right: Tensor, result: Tensor, threads: int) -> int:
    """Return the bytes held inside `result` [.., M, N] = `left` [.., M, K] @ `right` [.., K, N] while it runs.

    Beside oneDNN's scratch these are copies of factors: of matrices whose rows and columns both have gaps, in any
    dtype (aten/src/ATen/native/LinearAlgebra.cpp, addmm_impl_cpu_), and of batches that are not dense in bf16.
    """
    if left.dim() == 3:
        return _batch_bytes(left, right, threads)
    if _is_columnar(result):  # then torch computes the transpose
        left, right = right.t(), left.t()
    M, K, N = left.shape[0], left.shape[1], right.shape[1]
    copies = sum(each.nbytes for each in (left, right) if not (_has_dense_rows(each) or _has_dense_rows(each.t())))
    transposed = not _has_dense_rows(left) and _has_dense_rows(left.t())
    return copies + _scratch_of(left.dtype, Product(M=M, N=N, K=K, transposed=transposed), threads)


def _batch_bytes(left: Tensor, right: Tensor, threads: int) -> int:
    batch, M, K = left.shape
    product = Product(M=M, N=right.shape[2], K=K, transposed=_is_dense_transposed(left), batch=batch, dims=3)
    scratch = _scratch_of(left.dtype, product, threads)
    copied = [each for each in (left, right) if not (each.is_contiguous() or _is_dense_transposed(each))]
    return scratch + sum(each.nbytes for each in copied) if scratch else 0


def _scratch_of(dtype: torch.dtype, product: Product, threads: int) -> int:
    return scratch_bytes(product, threads) if dtype == torch.bfloat16 and bf16_by_onednn() else 0


def _has_dense_rows(matrix: Tensor) -> bool:
    return matrix.stride(1) == 1 and matrix.stride(0) >= max(1, matrix.shape[1])


def _is_columnar(matrix: Tensor) -> bool:
    """Say whether a result is taken for one whose columns are dense; a single column is."""
    return matrix.stride(0) == 1 and (matrix.shape[1] == 1 or matrix.stride(1) >= max(1, matrix.shape[0]))


def _is_dense_transposed(matrices: Tensor) -> bool:
    return not matrices.is_contiguous() and matrices.transpose(1, 2).is_contiguous()


@cache
def scratch_bytes(product: Product, threads: int) -> int:
    """Return oneDNN's scratch for one product, 0 where torch multiplies by itself."""
    if product.batch * product.M * product.N * product.K <= SMALLEST_WORK:
        return 0
    copies_left = _copies_left(product)
    if product.M == 1:  # a single row is dense either way, and is taken for a column
        product = replace(product, transposed=True)
    cut = _best_cut(product, threads, copies_left)
    left = 2 * cut.rows * _padded_depth(cut.depth) if copies_left else 0
    right = 2 * _up(cut.columns, _width(product, cut)) * _up(cut.depth, 32)
    sums = 4 * cut.columns * cut.rows * (cut.run if cut.depth < product.K else 1)
    if cut.depth_threads > 1:
        sums = 4 * product.M * product.N
    buffers = [threads * size for size in (left, right, sums) if size]
    return threads * _ELEMENT_BYTES + _PAD + sum(size + _PAD for size in buffers)


def _copies_left(product: Product) -> bool:
    """Say whether tiles of A are copied: A is transposed, or its rows lie a large power of two apart."""
    far_apart = _is_power(product.K) and product.K >= 4096 and product.M >= 1024
    return product.M > 1 if product.transposed else far_apart


def _padded_depth(depth: int) -> int:
    """Return the row length of a copied tile of A: whole cache lines, and no large power of two."""
    length = _up(depth, 32)
    return length + 32 if length >= 512 and _is_power(length) else length


def _width(product: Product, cut: Cut) -> int:
    """Return what a tile of B is as wide as, in memory."""
    return _up(cut.columns, 16) if cut.columns < _COLUMNS and cut.columns != product.N else _COLUMNS


def _best_cut(product: Product, threads: int, copies_left: bool) -> Cut:
    """Return the first cut with the least imbalance, larger tiles first."""
    columns = _tile_columns(product, threads)
    most_run = min(16 if copies_left else 1, _parts(product.N, min(_COLUMNS, product.N)))
    wide = product.K > _DEPTH_WIDE and not product.transposed
    depth = min(product.K, _DEPTH_WIDE if wide else _DEPTH)
    fewest_rows = min(16 if _few_tiles(product, threads) else 32, product.M)
    most_depth_threads = _depth_threads(product, threads)
    best, least = None, 1.0
    for depth_threads in range(most_depth_threads, 0, -1):
        shape = Cut(rows=fewest_rows, columns=columns, run=1, depth=depth, depth_threads=depth_threads)
        tried = [cut for cut in _cuts(product, shape, most_run) if _is_taken(product, cut, threads, most_depth_threads)]
        found = False
        for cut in tried:
            imbalance = _imbalance(product, cut, threads)
            if imbalance < least:
                best, least, found = cut, imbalance, True
        if not found and (imbalance := _imbalance(product, shape, threads)) < least:
            best, least = shape, imbalance
    return best or Cut(rows=fewest_rows, columns=columns, run=1, depth=depth, depth_threads=1)


def _cuts(product: Product, shape: Cut, most_run: int) -> Iterator[Cut]:
    for run in range(most_run, 0, -1):
        for rows in range(min(_MOST_ROWS, product.M), shape.rows - 1, -1):
            yield replace(shape, rows=rows, run=run)


def _few_tiles(product: Product, threads: int) -> bool:
    return threads > product.batch * _parts(product.N, min(_COLUMNS, product.N))


def _tile_columns(product: Product, threads: int) -> int:
    """Return the columns of a tile: 64, or 32 where a small product would leave threads idle."""
    columns = min(_COLUMNS, product.N)
    small = product.M <= 40 or (product.transposed and product.M <= 512)
    several = _parts(product.N, columns) > 1 or product.dims > 2
    return min(32, product.N) if _few_tiles(product, threads) and small and several else columns


def _depth_threads(product: Product, threads: int) -> int:
    """Return how many threads may share the depth at most, each with sums of its own."""
    deep = product.transposed and product.batch == 1 and _is_power(product.K) and product.K >= 2048
    return min(threads, 4) if deep and _few_tiles(product, threads) else 1


def _pieces(product: Product, cut: Cut) -> int:
    return product.batch * _parts(product.M, cut.rows) * _parts(product.N, cut.columns * cut.run)


def _is_taken(product: Product, cut: Cut, threads: int, most_depth_threads: int) -> bool:
    """Say whether the pieces can be shared out: many of them, or as many for each thread."""
    sharing = threads // cut.depth_threads
    pieces = _pieces(product, cut)
    return pieces >= 3 * sharing or pieces % sharing == 0 or most_depth_threads > 1


def _imbalance(product: Product, cut: Cut, threads: int) -> float:
    """Return the mean of five kinds of unevenness: pieces, rows, columns, idle threads, depth."""
    sharing = threads // cut.depth_threads
    strips = _parts(product.N, cut.columns)
    rows = (cut.rows * _parts(product.M, cut.rows) % product.M) / product.M
    columns = (_parts(strips, cut.run) * cut.run - strips) / strips
    idle = (threads - sharing * cut.depth_threads) / threads
    uneven = _uneven(_pieces(product, cut), sharing) + _uneven(product.K, cut.depth_threads * cut.depth)
    return (uneven + rows + columns + idle) / 5


def _uneven(work: int, share: int) -> float:
    rest = work % share
    return (share - rest if work < share else min(share - rest, rest)) / share


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


def _up(size: int, step: int) -> int:
    return _parts(size, step) * step


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
