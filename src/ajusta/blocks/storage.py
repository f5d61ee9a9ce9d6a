"""How one frozen weight W [out, in] is kept, and the only two products that training ever takes with it.

    forward    y  = x  W^T     matmul
    backward   dx = dy W       matmul_transposed

A frozen weight has no gradient, so nothing of the input needs to be saved for it, and a quantized one is expanded into
a temporary for each product and dropped again. Expanding twice (forward, backward) costs time and no memory.

Shape letters: O output features, I input features, T tokens.
Every method also runs on `meta` tensors and makes there the allocations that the plain road makes on a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ajusta.base.errors import ModelError
from ajusta.memory.abridge import turns
from ajusta.memory.ledger import Category, booking, device_kind

TILE_BYTES = 16 << 20  # temporaries of a tile loop stay under this, whatever the weight


class Storage(nn.Module, ABC):
    """A frozen weight W [O, I] in some format. All of its tensors are frozen parameters or buffers."""

    kind: str  # none | int8 | nf4
    out_features: int
    in_features: int

    @abstractmethod
    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return W[start:stop] as `dtype` [stop - start, I]. It may be a view of the storage: read it only."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors under bitsandbytes' key names (`weight`, `weight.absmax`, `SCB`, ...), to be written."""

    @abstractmethod
    def workspace_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that `dense(dtype)` holds at its peak, its result included (0: a view of the storage)."""

    def constants(self) -> tuple[Tensor, ...]:
        """Return the tensors beside the codes that a format needs: scales and tables."""
        return ()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return W as `dtype` [O, I], a temporary. It may be a view of the storage: read it only."""
        with booking(Category.DEQUANTIZED):
            return self.rows(0, self.out_features, dtype)

    def matmul(self, x_TI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Return x W^T (+ bias) [T, O] in x's dtype; always a new tensor, which the caller may write into."""
        weight_IO = self.dense(x_TI.dtype).t()
        if bias_O is None:
            return torch.mm(x_TI, weight_IO)
        return torch.addmm(bias_O.to(x_TI.dtype), x_TI, weight_IO)

    def matmul_transposed(self, dy_TO: Tensor) -> Tensor:
        """Return dy W [T, I] in dy's dtype; always a new tensor, which the caller may write into."""
        return torch.mm(dy_TO, self.dense(dy_TO.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held for this weight, scales and maps included."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    @property
    def device(self) -> torch.device:
        """Where the weight lives."""
        return next(iter((*self.parameters(), *self.buffers()))).device

    @property
    def device_type(self) -> str:
        """The kind of device whose temporaries are to be made: the weight's own, or what `meta` stands for."""
        return device_kind(self.device)

    def extra_repr(self) -> str:
        """Show what a person looks for in a printed model."""
        return f"{self.kind}, {self.out_features} x {self.in_features}"


class Dense(Storage):
    """The weight as it came, not copied: the very same Parameter, so that a tied weight stays tied through `.to()`.

    `transposed`: the tensor is [I, O], GPT-2's `Conv1D` layout.
    """

    kind = "none"

    def __init__(self, weight: Tensor, *, transposed: bool = False) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.weight.requires_grad_(False)
        self.transposed = transposed
        self.out_features, self.in_features = weight.shape[::-1] if transposed else weight.shape

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return W[start:stop]: a view, or a copy where the dtype differs."""
        weight_OI = self.weight.t() if self.transposed else self.weight
        return weight_OI[start:stop].detach().to(dtype)

    def state(self) -> dict[str, Tensor]:
        """Return `weight` in the layout in which it came."""
        return {"weight": self.weight.detach()}

    def workspace_bytes(self, dtype: torch.dtype) -> int:
        """Return 0, or the bytes of the cast copy."""
        return 0 if dtype == self.weight.dtype else self.weight.numel() * dtype.itemsize


def row_tiles(num_rows: int, bytes_per_row: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Cut `num_rows` into (start, stop) pairs of at most TILE_BYTES each, at least one row; few of them on `meta`."""
    step = max(1, TILE_BYTES // max(1, bytes_per_row))
    for start in turns(range(0, num_rows, step), device):
        yield start, min(start + step, num_rows)


def take(tensors: Mapping[str, Tensor], key: str, layer: str, kind: str) -> Tensor:
    """Return `tensors[key]`.

    Raises:
        ModelError: the tensor is missing; the message names the layer, what is there and what to do.
    """
    if key not in tensors:
        there = ", ".join(sorted(tensors)) or "nothing"
        raise ModelError(
            f"{layer}: the {kind} weight has no {key!r} (there is: {there}); without it the packed numbers mean "
            "nothing; the file is incomplete: save or download it again"
        )
    return tensors[key]


def refuse_infinite(scales: Tensor) -> None:
    """Refuse a weight whose scales (its largest magnitudes) are not finite. Nothing is known, and asked, on `meta`.

    Raises:
        ModelError: there is an infinity or NaN.
    """
    if not scales.is_meta and not bool(torch.isfinite(scales).all()):
        raise ModelError(
            "the weight holds an infinity or NaN; no scale can express that; the model file is damaged, or was saved "
            "in a 16-bit format that overflowed: load it with bits: none to see which tensor"
        )
