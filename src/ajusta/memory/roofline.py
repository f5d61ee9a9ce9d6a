"""What an operation does, and how long that takes by the roofline of a device: the rule that turns a trace into time.

    seconds = max(FLOPs / rate, bytes / bandwidth) + per operation

FLOPs are those of products and of fused attention (2 for a multiplication with its addition). Everything else goes by
the bytes that it touches: what it reads of each argument and what it writes, a broadcast number once. Views, and what
only makes room, cost nothing. Shapes alone decide, so that `meta` tensors give what real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ajusta.spec.roofline import Roofline

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_BACKWARD = 2.5  # two products there; scores again and four gradients back: Dao 2022, arXiv 2205.14135, appendix B


class Work(NamedTuple):
    """What an operation does, or several that are declared as one."""

    flops: float = 0.0
    bytes: int = 0
    dtype: str = "fp32"  # of the FLOPs, or of what is read and written
    rows: int = 0  # of a product
    side: int = 0  # of a product: the shorter one of what it sums over and of its columns; of attention: a head's width
    keys: int = 0  # of attention: what a row may attend to
    operations: int = 1
    kernel: str = ""  # what may have a speed of its own: `Roofline.kernels`
    numbers: int = 0  # that such a kernel makes


NOTHING = Work(operations=0)
Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], Work]


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Return what this call of an operation did; `NOTHING` for a view."""
    rule = _rules.get(func)
    if rule is None:
        rule = _rules[func] = _rule(func)
    return rule(args, kwargs, result)


class Clock:
    """Tells how long work takes on a device. A trace asks it for every operation: rates are worked out once."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self._narrow, self._wide = (1 / roofline.bytes_per_s(narrow) for narrow in (True, False))
        self._per_operation = roofline.per_operation_s
        self._unit_s: dict[tuple[str, int, int, int], float] = {}  # of one FLOP

    def seconds(self, work: Work) -> float:
        """Return how long this takes."""
        if work.kernel in self.roofline.kernels:
            return self.roofline.kernels[work.kernel].seconds(work.numbers)
        seconds = work.bytes * (self._wide if work.dtype == "fp32" else self._narrow)
        if work.flops:
            key = (work.dtype, work.rows, work.side, work.keys)
            unit = self._unit_s.get(key)
            if unit is None:
                unit = self._unit_s[key] = 1 / self._rate(work)
            seconds = max(seconds, work.flops * unit)
        return seconds + work.operations * self._per_operation

    def seconds_to_find(self, size_bytes: int) -> float:
        """Return how long the system takes to find so much memory."""
        return size_bytes / self.roofline.fresh_bytes_per_s if self.roofline.fresh_bytes_per_s else 0.0

    def _rate(self, work: Work) -> float:
        if work.keys:
            return self.roofline.attention_rate(work.dtype, work.keys, work.side)
        return self.roofline.product_flops(work.dtype, work.rows, work.side)


def kernel_name(kind: str, dtype: torch.dtype) -> str:
    """Return the name that expanding a storage of this kind has among `Roofline.kernels`."""
    return f"{kind} {_NAMES.get(dtype, 'fp32')}"


_rules: dict[Any, Rule] = {}
_PRODUCTS = dict.fromkeys(  # where the left factor stands
    ("mm", "bmm", "mv", "linear", "_grouped_mm", "ajusta::grouped_product", "ajusta::grouped_outer"), 0
)
_PRODUCTS |= dict.fromkeys(("addmm", "addmm_", "addmv", "baddbmm", "baddbmm_"), 1)
_ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "_unsafe_view"}
_GATHERS = {"index_select", "gather", "embedding", "index"}  # read as much as comes out
_SCATTERS = {"index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_", "scatter_add_"}
_OVERWRITES = {"copy_", "fill_", "zero_", "uniform_", "normal_", "random_"}


def _rule(func: Any) -> Rule:
    """Return the rule of an operation, found once: by its name, since no release of torch has all of them."""
    name = func._schema.name.removeprefix("aten::")
    if name in _PRODUCTS:
        return _product(_PRODUCTS[name])
    if name.startswith(_ATTENTION):
        return _attention(func)
    if name in _FREE or _is_view(func):
        return lambda args, kwargs, result: NOTHING
    if name in _GATHERS:
        return _gather
    if name in _SCATTERS:
        return _scatter
    return _overwrite if name in _OVERWRITES else _stream


def _is_view(func: Any) -> bool:
    """Say whether every result shares an argument's storage and nothing is written."""
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _product(left_at: int) -> Rule:
    """Return the rule of products [.., m, k] x [.., k, n]; what they are added to stands before the left factor."""

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Work:
        left: Tensor = args[left_at]
        right: Tensor = args[left_at + 1]
        shape, inner = result.shape, left.shape[-1]
        flops = 2.0 * result.numel() * inner
        if result.dim() == 3 and left.dim() == right.dim() == 2:
            flops /= shape[0]  # grouped along the sum: each group has a part of it
        rows = shape[-2] if result.dim() > 1 else 1
        if right.dim() == 3 and left.dim() == 2:
            rows = -(-rows // right.shape[0])  # an expert's share of them
        return Work(flops, _moved(args, kwargs, result), _name(left), rows, min(shape[-1], inner))

    return rule


def _attention(func: Any) -> Rule:
    """Return the rule of a fused attention; the causal border halves its work."""
    names = [argument.name for argument in func._schema.arguments]
    query_at, causal_at = names.index("query"), names.index("is_causal")
    passes = 2 * _BACKWARD if names[0].startswith("grad_out") else 2.0

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
        query, key, value = args[query_at : query_at + 3]
        causal = args[causal_at] if len(args) > causal_at else kwargs.get("is_causal", False)
        keys = key.shape[2]
        scores = query.shape[0] * query.shape[1] * query.shape[2] * keys * (0.5 if causal else 1.0)
        flops = passes * scores * (query.shape[3] + value.shape[3])
        return Work(flops, _moved(args, kwargs, result), _name(query), side=query.shape[3], keys=keys)

    return rule


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work:
    """Read everything, write the result; what touches nothing is a question to torch, and costs nothing."""
    moved = _moved(args, kwargs, result)
    return Work(0.0, moved, _narrowest(result, args)) if moved else NOTHING


def _overwrite(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Work:
    """Write the first argument without reading it."""
    return Work(0.0, _moved(args[1:], kwargs, result), _narrowest(result, args[1:]))


def _gather(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Work:
    """Read the index and as much as it asks for, and write that."""
    return Work(0.0, result.nbytes + _moved(args[1:], kwargs, result), _name(result))


def _scatter(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Work:
    """Read index and source, and read and write as much of the target as there is of the source."""
    incoming = list(_tensors(args[1:]))
    source = max((tensor.nbytes for tensor in incoming if tensor.dtype == result.dtype), default=0)
    return Work(0.0, sum(map(_distinct_bytes, incoming)) + 2 * source, _name(result))


def _moved(args: Iterable[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that are read of the arguments and that are written; this is most of what telling time costs."""
    moved: int = result.nbytes if isinstance(result, Tensor) else sum(tensor.nbytes for tensor in _tensors((result,)))
    before = None
    for value in args:
        if isinstance(value, Tensor):
            if value is not before:  # a tensor times itself is read once
                moved += value.nbytes if 0 not in value.stride() else _distinct_bytes(value)
            before = value
        elif isinstance(value, (list, tuple)):
            moved += sum(map(_distinct_bytes, _tensors(value)))
    if kwargs:
        moved += sum(map(_distinct_bytes, _tensors(value for name, value in kwargs.items() if name != "out")))
    return moved


def _distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct elements: what is broadcast counts once."""
    count = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size:
            count //= size
    return count * tensor.itemsize


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _name(tensor: Tensor) -> str:
    return _NAMES.get(tensor.dtype, "fp32")


def _narrowest(result: Any, args: tuple[Any, ...]) -> str:
    """Return the 16-bit dtype that is written or read first, if there is one."""
    if isinstance(result, Tensor) and result.itemsize == 2:
        return _name(result)
    if args and isinstance(args[0], Tensor) and args[0].itemsize == 2:
        return _name(args[0])
    return "fp32"
