"""What an operation returns on `meta`, remembered: nothing is computed there, so equal shapes have an equal answer.

torch works out most shapes in Python, which is nearly all of the time of a trace. An operation that makes new tensors
and writes into nothing is asked once for each set of shapes; afterwards its answer is made in one call. One that writes
into its first argument and returns it has that argument for an answer. Everything else (views, `out=`, whatever returns
a tensor that shares memory with another) goes to torch every time. tests/memory/test_answers.py holds both ways equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype
_UNKNOWN = object()


class Answers:
    """Runs operations on `meta` tensors; what it has learnt lives as long as it does."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[bool, tuple[_Made, ...]] | None] = {}
        self._kinds: dict[Any, str] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `func(*args, **kwargs)` returns, for arguments on `meta`."""
        kind = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if kind == "torch":
            return func(*args, **kwargs)
        if kind == "in place":
            # A shape that does not fit would be refused where the same step runs for real, and in its tests.
            return args[0] if args[0].is_meta else func(*args, **kwargs)
        key = _key(func, args, kwargs)
        known = _UNKNOWN if key is None else self._made.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            result = func(*args, **kwargs)
            if key is not None:
                self._made[key] = _remember(result, args, kwargs)
            return result
        if known is None:
            return func(*args, **kwargs)
        assert isinstance(known, tuple)
        single, made = known
        tensors = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in made
        )
        return tensors[0] if single else tensors


class Remembering(TorchDispatchMode):
    """While it is active, operations on `meta` are answered from memory where they can be."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = Answers()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch's compiler out of it, as the ledger does."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer the operation."""
        return self._answers(func, args, kwargs or {})


def _kind(func: Any) -> str:
    """Say what an operation is by its schema: `fresh` (new tensors), `in place`, or to be left to `torch`."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return "torch"
    returns = [value.alias_info for value in schema.returns]
    taken = [value.alias_info for value in schema.arguments]
    written = [number for number, alias in enumerate(taken) if alias and alias.is_write]
    only_tensors = all(str(value.type) == "Tensor" for value in schema.returns)
    if not returns or not only_tensors or "resize" in schema.name or "set_" in schema.name:
        return "torch"
    if written == [0] and len(returns) == 1 and returns[0] is not None and returns[0].is_write:
        return "in place"
    return "torch" if any(taken) or any(returns) else "fresh"


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable | None:
    """Return all that the answer depends on; None where an argument is not on `meta`, or not of a plain kind."""
    parts: list[Hashable] = [func]
    for value in (*args, *kwargs.values()):
        part = _part(value)
        if part is _UNKNOWN:
            return None
        parts.append(part)
    return (*parts, *kwargs)


def _part(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else _UNKNOWN
    if isinstance(value, list | tuple):
        parts = tuple(_part(each) for each in value)
        return _UNKNOWN if _UNKNOWN in parts else parts
    if value is None or isinstance(value, int | float | bool | str | torch.dtype | torch.device | torch.layout):
        return type(value), value
    return _UNKNOWN


def _remember(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, tuple[_Made, ...]] | None:
    """Return how the answer is made again; None where it shares memory with an argument or within itself."""
    tensors = (result,) if isinstance(result, Tensor) else tuple(result)
    if not all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        return None
    given = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
    own = [tensor.untyped_storage() for tensor in tensors]
    if len({storage._cdata for storage in own} - given) != len(tensors):
        return None
    made = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors)
    again = (torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in made)
    if any(new.untyped_storage().nbytes() != old.nbytes() for new, old in zip(again, own, strict=True)):
        return None
    return isinstance(result, Tensor), made


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
