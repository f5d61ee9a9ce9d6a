"""A product for each expert, over rows that lie expert by expert, as one operation.

    out[s] = rows[s] W[e]        for ends[e - 1] <= s < ends[e]

How many rows an expert gets is known from the data only; how many there are in all is not: S = T k, tokens times
choices. So the products are one operation to torch, whose only sizes are those of all rows. A ledger then sees the same
on `meta` and on a device, in every dtype, and nothing is read back from a device that has a kernel for it.

On a processor, and wherever that kernel is not to be had, it is a loop over the experts. The kernel is torch's own
(torch.nn.functional.grouped_mm): bf16, compute capability 8.0 and above, rows of whole 16 bytes. The call was written
from its documentation and has never run on a card.

Shape letters: T tokens, K choices a token, S = T K rows, E experts, H hidden, I input and O output features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ajusta.memory.workspaces import RULES
from ajusta.memory.workspaces_experts import grouped_product as held_on_cpu

_ALIGNED_BYTES = 16  # pytorch, aten/src/ATen/native/GroupedMMUtils.h, check_valid_strides_and_return_transposed
_CAPABILITY = (8, 0)
_kernel: Any = getattr(functional, "grouped_mm", None)  # torch 2.10 and later


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where each choice's row lies: row s is choice `order_S[s]`, token by token; expert e ends at `ends_E[e]`."""

    order_S: Tensor  # int64
    ends_E: Tensor  # int32
    choices: int

    @classmethod
    def of(cls, index_TK: Tensor, experts: int) -> Routing:
        """Sort the choices by expert; those of one expert stay in the order of their tokens."""
        sorted_S, order_S = torch.sort(index_TK.reshape(-1), stable=True)
        numbers_E = torch.arange(experts, device=index_TK.device, dtype=sorted_S.dtype)
        ends_E = torch.searchsorted(sorted_S, numbers_E, right=True, out_int32=True)
        return cls(order_S=order_S, ends_E=ends_E, choices=index_TK.shape[1])

    def spread(self, x_TH: Tensor) -> Tensor:
        """Return each row's token [S, H]."""
        return x_TH.index_select(0, self.order_S // self.choices)

    def sort(self, values_TK: Tensor) -> Tensor:
        """Return a value per choice as a value per row [S]."""
        return values_TK.reshape(-1).index_select(0, self.order_S)

    def unsort(self, values_S: Tensor) -> Tensor:
        """Return a value per row as a value per choice [T, K]."""
        back = torch.empty_like(values_S).index_copy_(0, self.order_S, values_S)
        return back.view(-1, self.choices)

    def gather(self, rows_SH: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        """Return the sum over each token's rows [T, H], weighted where weights are given.

        One choice of all tokens at a time, in order: no copy of the rows, and the same bits every time, which adding
        from many rows at once would not give on a card. 16-bit rows are summed in fp32.
        """
        wide = torch.promote_types(rows_SH.dtype, torch.float32)
        numbers_S = torch.arange(len(rows_SH), device=rows_SH.device)
        places_KT = self.unsort(numbers_S).t().contiguous()
        weights_KT = None if weights_TK is None else weights_TK.t().to(wide)
        total = torch.zeros(places_KT.shape[1], rows_SH.shape[1], dtype=wide, device=rows_SH.device)
        for choice, places_T in enumerate(places_KT):
            if weights_KT is None:
                total.add_(rows_SH.index_select(0, places_T).to(wide))
            else:
                total.addcmul_(rows_SH.index_select(0, places_T).to(wide), weights_KT[choice][:, None])
        return total.to(rows_SH.dtype)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A weight of each expert in one tensor: [E, O, I], or [E, I, O] where `transposed`.

    The module is remembered and not its tensor, as in blocks/linear.py.
    """

    module: nn.Module
    name: str
    transposed: bool

    @property
    def parameter(self) -> Tensor:
        """The weight itself."""
        return self.module.get_parameter(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are kept in, and their products are taken in."""
        return self.parameter.dtype

    def product(self, rows_SI: Tensor, routing: Routing) -> Tensor:
        """Return each row times its expert's W^T [S, O]."""
        return grouped_product(rows_SI, self._weight(not self.transposed), routing.ends_E)

    def product_transposed(self, dy_SO: Tensor, routing: Routing) -> Tensor:
        """Return each row times its expert's W [S, I]."""
        return grouped_product(dy_SO, self._weight(self.transposed), routing.ends_E)

    def gradient(self, rows_SI: Tensor, dy_SO: Tensor, routing: Routing) -> Tensor:
        """Return the sum of each expert's dy x^T as the weight is laid out, for weights that are trained."""
        left, right = (rows_SI, dy_SO) if self.transposed else (dy_SO, rows_SI)
        grad: Tensor = torch.ops.ajusta.grouped_outer(left.t(), right, routing.ends_E)
        return grad.to(self.dtype)

    def _weight(self, turned: bool) -> Tensor:
        weight = self.parameter.detach()
        return weight.transpose(1, 2) if turned else weight


def grouped_product(rows_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return out [S, O], always a new tensor; not differentiable.

    Args:
        rows_SI: rows, expert by expert.
        weight_EIO: a matrix for each expert, in any layout.
        ends_E: int32, ascending, the last is S.
    """
    out: Tensor = torch.ops.ajusta.grouped_product(rows_SI, weight_EIO, ends_E)
    return out


def _compute(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.device.type == "cuda" and _kernel_takes(rows, weight):
        result: Tensor = _kernel(rows, weight, offs=ends)
        return result
    out = _shape(rows, weight, ends)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
        start = end
    assert start == len(rows), "a row belongs to no expert"
    return out


def _shape(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    out = _outer_shape(left, right, ends).zero_()  # an expert without a row has a gradient of zero
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(left[:, start:end], right[start:end], out=out[expert])
        start = end
    return out


def _outer_shape(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return right.new_empty(ends.shape[0], left.shape[0], right.shape[1])


def _kernel_takes(rows: Tensor, weight: Tensor) -> bool:
    unit = _ALIGNED_BYTES // rows.element_size()
    dense = rows.is_contiguous() and (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous())
    return (
        _kernel is not None
        and rows.dtype == weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(rows.device) >= _CAPABILITY
        and dense
        and not any(size % unit for size in weight.shape[1:])
        and not any(each.data_ptr() % _ALIGNED_BYTES for each in (rows, weight))
    )


_library = torch.library.Library("ajusta", "FRAGMENT")  # held here: what it defines goes with it
_library.define("grouped_product(Tensor rows, Tensor weight, Tensor ends) -> Tensor")
_library.impl("grouped_product", _compute, "CompositeExplicitAutograd")
_library.impl("grouped_product", _shape, "Meta")
_library.define("grouped_outer(Tensor left, Tensor right, Tensor ends) -> Tensor")
_library.impl("grouped_outer", _outer, "CompositeExplicitAutograd")
_library.impl("grouped_outer", _outer_shape, "Meta")
RULES["cpu", torch.ops.ajusta.grouped_product.default] = held_on_cpu
