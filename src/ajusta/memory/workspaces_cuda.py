"""What memory-efficient attention holds inside itself on a card. From the source alone: no card was at hand.

Which kernel runs depends on the card's shared memory; the figures are those of the hungriest kernel that may run, on
any card since Volta. Sources, in pytorch under aten/src/ATen/native/transformers/cuda: attention.cu and
attention_backward.cu (what is allocated), mem_eff_attention/kernel_forward.h and kernel_backward.h (workspace_size and
the constants it is made of), mem_eff_attention/kernels/generate_kernels.py (which kernels there are).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FORWARD_IN_REGISTERS = 128  # widest head whose output stays in registers until it is done
_ENOUGH_BLOCKS = 256  # with as many heads, short keys are not split
_MOST_STAGED = 200  # heads times splits, where gradients of keys and values are staged in memory


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A backward kernel: its tile of queries and keys, and whether it stages the gradients of keys and values."""

    queries: int
    keys: int
    stages: bool


def efficient_forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the output once more in fp32: for 16-bit types whose heads are wider than 128."""
    query: Tensor = args[0]
    value: Tensor = args[2]
    if not _is_narrow(query) or max(query.shape[3], value.shape[3]) <= _FORWARD_IN_REGISTERS:
        return 0
    return 4 * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[3]


def efficient_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the copy of the output's gradient where its rows are not dense, `delta`, and the kernel's workspace.

    `delta` is a number per row: the sum of output times gradient. In fp32 it is made by three plain operations, whose
    product is as large as the output and is gone when the workspace is taken.
    """
    grad: Tensor = args[0]
    query: Tensor = args[1]
    key: Tensor = args[2]
    value: Tensor = args[3]
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    delta = 4 * query.shape[0] * query.shape[1] * query.shape[2]
    making = 0 if _is_narrow(query) else delta + 4 * grad.numel()
    workspace = max(_workspace_bytes(query, key, value, kernel) for kernel in _kernels(query, value))
    return copied + delta + max(making, workspace)


def _kernels(query: Tensor, value: Tensor) -> Iterator[Kernel]:
    """Yield the kernels that may be chosen for heads of this width."""
    width = max(query.shape[3], value.shape[3])
    narrow = _is_narrow(query)
    if width <= 64:
        yield Kernel(queries=64, keys=64, stages=False)
        return
    yield Kernel(queries=64, keys=64, stages=narrow)
    yield Kernel(queries=128, keys=64, stages=narrow and width > 128)
    if narrow and width <= 128:
        yield Kernel(queries=128, keys=128, stages=False)


def _workspace_bytes(query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> int:
    """Return fp32 tiles of the query gradient, each with a lock, and staged tiles of the other two gradients."""
    heads = query.shape[0] * query.shape[1]
    tile = kernel.queries * kernel.keys + 4
    elements = _parts(query.shape[2], kernel.queries) * _parts(query.shape[3], kernel.keys) * tile
    if kernel.stages:
        widths = sum(_parts(each.shape[3], kernel.queries) * kernel.queries for each in (query, value))
        elements += _splits(heads, key.shape[2], kernel) * kernel.keys * widths
    return 4 * heads * (_parts(elements, 4) * 4)


def _splits(heads: int, keys: int, kernel: Kernel) -> int:
    splits = _parts(keys, kernel.keys)
    if heads >= _ENOUGH_BLOCKS and keys <= 2 * kernel.keys:
        splits = 1
    return max(1, min(splits, _MOST_STAGED // heads))


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


_ATEN = torch.ops.aten
RULES = {
    _ATEN._scaled_dot_product_efficient_attention.default: efficient_forward,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
