"""What operations of the step hold inside themselves on a processor. Figures were held against the allocator's events.

A worker is one of torch's threads that has a share of an operation. torch's profiler sees only the calling thread's
allocations; that each further worker makes the same was seen once by counting `posix_memalign` in all threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ajusta.memory.workspaces_experts import grouped_product
from ajusta.memory.workspaces_onednn import Product, bf16_by_onednn, product_bytes, scratch_bytes

_KEYS = 512  # columns of a tile of scores
_PACK = 64  # AMX: keys and values are packed in blocks of this many columns
_SCALAR_BYTES = 4


def flash_forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the score tiles, one set for each of torch's threads.

    A tile has 256, 64 or 32 queries by length and 512 keys. Beside the scores stand the row maxima and sums and a tile
    of the output, in fp32 (fp64 for fp64); a 16-bit type holds the scores once more in its own. Source: pytorch,
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, cpu_flash_attention.
    """
    query: Tensor = args[0]
    key: Tensor = args[1]
    rows, columns = _tile(query, key)
    accumulated = rows * columns + 2 * rows + rows * query.shape[3]
    narrow = rows * columns * query.itemsize if _is_narrow(query) else 0
    return torch.get_num_threads() * (accumulated * _wide_bytes(query) + narrow) + _packed_bytes(query, key)


def flash_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the copy of the output's gradient where its rows are not dense, the score tiles, and what workers hold.

    A set of tiles holds the scores and their gradient, and both again in a 16-bit type, for each of torch's threads.
    Source: as above, cpu_flash_attention_backward and flash_attention_backward_kernel_impl.
    """
    grad: Tensor = args[0]
    query: Tensor = args[1]
    key: Tensor = args[2]
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    workers = min(torch.get_num_threads(), key.shape[0] * key.shape[1])
    return copied + flash_backward_shared(query, key) + workers * flash_backward_worker(query, key)


def flash_backward_shared(query: Tensor, key: Tensor) -> int:
    """Return the tiles, which the calling thread takes for all threads."""
    rows, columns = _tile(query, key)
    size = _wide_bytes(query) + (query.itemsize if _is_narrow(query) else 0)
    return torch.get_num_threads() * 2 * rows * columns * size


def flash_backward_worker(query: Tensor, key: Tensor) -> int:
    """Return what each worker takes: a sum per row of its tile and, in bf16, oneDNN's scratch for one product.

    Three products of a tile have a bf16 result: the gradients of values, queries and keys. The largest counts. oneDNN
    takes scratch for as many threads as torch has, though it runs inside one of them.
    """
    rows, _ = _tile(query, key)
    sums = rows * _wide_bytes(query)
    if query.dtype != torch.bfloat16 or not bf16_by_onednn():
        return sums
    threads, width = torch.get_num_threads(), query.shape[3]
    largest = 0
    for tall in _sizes(query.shape[2], rows):
        for wide in _sizes(key.shape[2], _KEYS):
            for_keys = scratch_bytes(Product(M=wide, N=width, K=tall, transposed=True), threads)
            for_queries = scratch_bytes(Product(M=tall, N=width, K=wide, transposed=False), threads)
            largest = max(largest, for_keys and for_keys + _SCALAR_BYTES, for_queries and for_queries + _SCALAR_BYTES)
    return sums + largest


def matrix_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return copied factors and oneDNN's scratch of mm and bmm (memory/workspaces_onednn.py).

    fp32 products are MKL's, whose buffers are its own, and stay.
    """
    return product_bytes(args[0], args[1], result, torch.get_num_threads())


def added_product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the same for addmm and baddbmm, whose first argument is what is added to.

    A scale other than 1 is handed to oneDNN as a tensor of four bytes (pytorch, third_party/ideep, matmul.hpp).
    """
    held = product_bytes(args[1], args[2], result, torch.get_num_threads())
    by_onednn = args[1].dtype == torch.bfloat16 and held > 0
    return held + _SCALAR_BYTES if by_onednn and kwargs.get("alpha", 1) != 1 else held


def sort(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the numbers of one row, int64, which are copied into the result.

    Source: pytorch, aten/src/ATen/native/Sorting.cpp, sort_stable on the CPU.
    """
    values: Tensor = args[0]
    dim: int = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return 8 * values.shape[dim] if values.dim() else 0


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    queries, keys = query.shape[2], key.shape[2]
    return min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(_KEYS, keys)


def _sizes(length: int, part: int) -> set[int]:
    """Return the sizes of the parts that a length is cut into: whole ones, and the rest."""
    return {min(length, part), (length - 1) % part + 1}


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _wide_bytes(tensor: Tensor) -> int:
    return 8 if tensor.dtype == torch.float64 else 4


def _packed_bytes(query: Tensor, key: Tensor) -> int:
    """Return keys and values once more, as AMX wants them: taken with `new`, so that no event shows them.

    Unmeasured, and an upper bound: whether it pays to pack is decided by the source from the shapes; here it always is.
    """
    heads, keys, width = query.shape[1], key.shape[2], query.shape[3]
    if query.dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return 0
    if heads < 4 or width % _PACK or keys < _PACK:
        return 0
    columns = -(-keys // _PACK) * _PACK
    return 2 * query.shape[0] * heads * columns * width * query.itemsize


_ATEN = torch.ops.aten
RULES = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: flash_forward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_backward,
    _ATEN.mm.default: matrix_product,
    _ATEN.mm.out: matrix_product,
    _ATEN.bmm.default: matrix_product,
    _ATEN.addmm.default: added_product,
    _ATEN.addmm_.default: added_product,
    _ATEN.baddbmm.default: added_product,
    _ATEN.sort.default: sort,
    _ATEN.sort.stable: sort,
    **({_ATEN._grouped_mm.default: grouped_product} if hasattr(_ATEN, "_grouped_mm") else {}),  # torch 2.7 and later
}
