"""Row-wise 8-bit weights in bitsandbytes' layout: W[o, i] = CB[o, i] * SCB[o] / 127, SCB[o] = max |W[o, :]|.

Only the weight is rounded (bitsandbytes' own forward rounds the activations too, which is another computation and
has no exact backward pass); its products are taken with the expanded weight. bitsandbytes' dequantization is the same
plain torch operation, so there is no second road here. Source: Dettmers 2022, LLM.int8(), arXiv 2208.07339, section 2.

State, under bitsandbytes' names: `weight` int8 [O, I], `SCB` fp32 [O] (and `weight_format` uint8 0, row-major).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ajusta.base.errors import ModelError
from ajusta.blocks.storage import Storage, refuse_infinite, row_tiles, take
from ajusta.memory.ledger import declare_work
from ajusta.memory.roofline import Work, kernel_name

_PER_127 = 7.874015718698502e-3  # 1/127 as bitsandbytes writes it: the same rounding, the same bits
_TILE_CPU, _TILE_ELSEWHERE = 1 << 20, 1 << 22  # weights; fp32 scratch of a 16-bit result: 4 MiB, 16 MiB


class Int8(Storage):
    """W [O, I] as int8 rows with one fp32 scale each: 1 byte a weight and 4 a row."""

    kind = "int8"
    CB: Tensor
    SCB: Tensor

    def __init__(self, CB: Tensor, SCB: Tensor) -> None:
        super().__init__()
        self.register_buffer("CB", CB)
        self.register_buffer("SCB", SCB)
        self.out_features, self.in_features = CB.shape

    @classmethod
    def quantize(cls, weight_OI: Tensor) -> Int8:
        """Round W [O, I] to int8, a tile of rows at a time.

        Raises:
            ModelError: the weight holds an infinity or NaN.
        """
        num_rows, num_columns = weight_OI.shape
        CB = torch.empty(num_rows, num_columns, dtype=torch.int8, device=weight_OI.device)
        SCB = torch.empty(num_rows, dtype=torch.float32, device=weight_OI.device)
        for start, stop in row_tiles(num_rows, 12 * num_columns, weight_OI.device):
            tile = weight_OI[start:stop].to(torch.float32, copy=True)
            torch.amax(tile.abs(), dim=1, out=SCB[start:stop])
            scale_O = SCB[start:stop].reciprocal().mul_(127.0)  # what 127 / SCB means in torch: the same last bit
            scale_O.nan_to_num_(nan=0.0, posinf=0.0)  # a row of zeros stays zeros
            CB[start:stop].copy_(tile.mul_(scale_O[:, None]).round_())
        refuse_infinite(SCB)
        return cls(CB, SCB)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], layer: str) -> Int8:
        """Open what bitsandbytes or `state` wrote.

        Raises:
            ModelError: `SCB` is missing or of another length, or the rows are not in row-major order.
        """
        CB, SCB = take(tensors, "weight", layer, "int8"), take(tensors, "SCB", layer, "int8")
        if CB.dtype != torch.int8 or CB.dim() != 2 or SCB.shape != CB.shape[:1]:
            raise ModelError(
                f"{layer}: weight is {CB.dtype} {list(CB.shape)} with SCB {list(SCB.shape)}; expected int8 [out, in] "
                "and one scale a row [out]; save the model again"
            )
        return cls(CB, SCB.float())

    def state(self) -> dict[str, Tensor]:
        """Return `weight`, `SCB` and `weight_format` (0: row-major)."""
        return {"weight": self.CB, "SCB": self.SCB, "weight_format": torch.tensor(0, dtype=torch.uint8)}

    def constants(self) -> tuple[Tensor, ...]:
        """Return the scale of each row."""
        return (self.SCB,)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return W[start:stop] as `dtype`, new: multiplied in fp32 (fp64 for fp64), rounded once."""
        dense = torch.empty(stop - start, self.in_features, dtype=dtype, device=self.CB.device)
        if dense.is_meta:
            _scratch(dense, self._tile_rows())
            _declare_tiles(dense, self._tile_rows())
            return dense
        for first in range(start, stop, self._tile_rows()):
            last = min(first + self._tile_rows(), stop)
            place = dense[first - start : last - start]
            tile = place if dtype == torch.float32 else torch.empty_like(place, dtype=torch.float32)
            tile.copy_(self.CB[first:last]).mul_(self.SCB[first:last, None]).mul_(_PER_127)
            if tile is not place:
                place.copy_(tile)
        return dense

    def workspace_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the dense weight, and of one fp32 tile where the result is not fp32."""
        scratch = 0 if dtype == torch.float32 else min(self._tile_rows(), self.out_features) * self.in_features * 4
        return self.CB.numel() * dtype.itemsize + scratch

    def _tile_rows(self) -> int:
        return max(1, (_TILE_CPU if self.device_type == "cpu" else _TILE_ELSEWHERE) // self.in_features)


def _scratch(dense: Tensor, tile_rows: int) -> None:
    """Allocate on `meta` what the tile loop would hold for a moment."""
    if dense.dtype != torch.float32:
        torch.empty(min(tile_rows, len(dense)), dense.shape[1], dtype=torch.float32, device=dense.device)


def _declare_tiles(dense: Tensor, tile_rows: int) -> None:
    """Declare the tiles that are not walked: widen the codes, scale twice, and round 16-bit results."""
    count, rows = dense.numel(), len(dense)
    moved, calls = 1 + 4 + 8 + 8, 3
    if dense.dtype != torch.float32:
        moved, calls = moved + 4 + dense.itemsize, 4
    declare_work(
        Work(
            bytes=count * moved + 4 * rows,
            operations=calls * -(-rows // tile_rows),
            kernel=kernel_name("int8", dense.dtype),
            numbers=count,
        )
    )
