"""4-bit NormalFloat weights with double-quantized scales, in bitsandbytes' layout.

    W.flat[k]  = map16[code[k]] * scale[k // 64]                            two codes a byte, the earlier one high
    scale[b]   = map256[absmax[b]] * nested_absmax[b // 256] + offset       absmax: one byte a block

That is 4 + 8/64 + 32/(64 * 256) = 4.127 bits a weight. Source: Dettmers 2023, QLoRA, arXiv 2305.14314, section 3. The
arithmetic is in `nf4_codes`; where bitsandbytes' kernel is there and faster, it
expands instead (same bits, less scratch).

Memory of expanding (`dequantize_workspace_bytes`): the fp32 scales (n / 16 bytes, twice that while they are made), the
result, and on the plain road an index (and for 16-bit results an fp32 tile) of one tile, which the bitsandbytes road
does without. On `meta` the same is allocated as on the device that it stands for, and no tile is walked.

Rounding. Given the same scales the 4-bit codes equal bitsandbytes' bit for bit, and so do the expanded weights. The
8-bit absmax codes are the nearest ones, as its generic and CUDA roads choose them; its CPU kernel looks them up in 2^16
bins over [-1, 1], so where a scale lies within 1/65535 of the middle between two codes it may take the other one.

Shape letters: O output features, I input features, n = O I weights, b blocks of 64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ajusta.base.errors import ModelError
from ajusta.blocks import bitsandbytes_kernels, nf4_codes
from ajusta.blocks.nf4_codes import BLOCK, NESTED_BLOCK
from ajusta.blocks.storage import Storage, refuse_infinite, take
from ajusta.memory.abridge import turns

STATE_KEY = "weight.quant_state.bitsandbytes__nf4"
_QUANTIZE_TILE = 1 << 19  # weights; five fp32 temporaries of it are 10 MiB
_RUN = BLOCK * NESTED_BLOCK  # weights under one nested scale; every run of rows is widened to whole ones


class Nf4(Storage):
    """W [O, I] as packed codes [ceil(n / 2), 1] uint8 and scales: `absmax` uint8 [b] nested, or fp32 [b] plain."""

    kind = "nf4"
    packed: Tensor
    absmax: Tensor
    nested_absmax: Tensor | None
    offset: Tensor | None
    pairs: Tensor
    nested_map: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        packed: Tensor,
        absmax: Tensor,
        nested_absmax: Tensor | None,
        offset: Tensor | None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("packed", packed)
        self.register_buffer("absmax", absmax)
        self.register_buffer("nested_absmax", nested_absmax)
        self.register_buffer("offset", offset)
        self.register_buffer("pairs", nf4_codes.pair_table(packed.device))
        self.register_buffer("nested_map", nf4_codes.dynamic_map(packed.device))

    @classmethod
    def quantize(cls, weight_OI: Tensor) -> Nf4:
        """Round W [O, I] to NF4 tile by tile; beyond the result 10 MiB, two rows and the fp32 scales are held.

        Raises:
            ModelError: the weight holds an infinity or NaN.
        """
        num_rows, num_columns = weight_OI.shape
        count, device = num_rows * num_columns, weight_OI.device
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device=device)
        scales_b = torch.empty(-(-count // BLOCK), dtype=torch.float32, device=device)
        for start in turns(range(0, count, _QUANTIZE_TILE), device):
            stop = min(start + _QUANTIZE_TILE, count)
            numbers = _numbers(weight_OI, start, stop)
            codes = nf4_codes.encode_tile(numbers, scales_b[start // BLOCK : -(-stop // BLOCK)])
            packed[start // 2 : (stop + 1) // 2, 0].copy_(codes)
        refuse_infinite(scales_b)
        offset = scales_b.mean()
        absmax, nested_absmax = nf4_codes.encode_scales(scales_b.sub_(offset))
        return cls((num_rows, num_columns), packed, absmax, nested_absmax, offset)

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], layer: str) -> Nf4:
        """Open what bitsandbytes or `state` wrote, with nested or with plain fp32 scales; nothing is copied.

        Raises:
            ModelError: a tensor is missing, of another size, or of a layout that ajusta does not read.
        """
        packed, absmax = take(tensors, "weight", layer, "nf4"), take(tensors, "weight.absmax", layer, "nf4")
        facts = read_facts(take(tensors, STATE_KEY, layer, "nf4"), layer)
        shape = facts["shape"]
        nested_absmax = offset = None
        if absmax.dtype == torch.uint8:
            nested_absmax = take(tensors, "weight.nested_absmax", layer, "nf4").float()
            offset = torch.tensor(float(facts["nested_offset"]), dtype=torch.float32, device=packed.device)
        _check_maps(tensors, layer, nested_absmax is not None)
        num_blocks = -(-shape[0] * shape[1] // BLOCK)
        num_nested = 0 if nested_absmax is None else -(-num_blocks // NESTED_BLOCK)
        sizes = (packed.numel(), absmax.numel(), 0 if nested_absmax is None else nested_absmax.numel())
        expected = ((shape[0] * shape[1] + 1) // 2, num_blocks, num_nested)
        if packed.dtype != torch.uint8 or sizes != expected:
            raise ModelError(
                f"{layer}: packed codes, scales and nested scales have {sizes} elements ({packed.dtype}); a weight "
                f"{list(shape)} needs {expected} in torch.uint8; the file is damaged: save or download it again"
            )
        scales = absmax if nested_absmax is not None else absmax.float()
        return cls((shape[0], shape[1]), packed.reshape(-1, 1), scales, nested_absmax, offset)

    def state(self) -> dict[str, Tensor]:
        """Return bitsandbytes' six tensors (four where the scales are not nested)."""
        facts: dict[str, object] = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": "float32",
            "shape": [self.out_features, self.in_features],
        }
        tensors = {"weight": self.packed, "weight.absmax": self.absmax, "weight.quant_map": self.pairs[:16, 1].clone()}
        if self.nested_absmax is not None and self.offset is not None:
            facts |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(self.offset)}
            tensors["weight.nested_absmax"] = self.nested_absmax
            tensors["weight.nested_quant_map"] = self.nested_map.clone()
        tensors[STATE_KEY] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
        return tensors

    def constants(self) -> tuple[Tensor, ...]:
        """Return scales, nested scales and tables."""
        nested = [] if self.nested_absmax is None or self.offset is None else [self.nested_absmax, self.offset]
        return (self.absmax, *nested, self.pairs, self.nested_map)

    def rows(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return W[start:stop] as `dtype`, new: multiplied in fp32, rounded once. Up to 2^14 more weights are made."""
        first, last = start * self.in_features, stop * self.in_features
        origin = first // _RUN * _RUN
        scales_b = self._scales(origin, last)
        packed = self.packed.view(-1)[origin // 2 : (last + 1) // 2]
        if origin == first and bitsandbytes_kernels.serves(self.device_type, self.in_features, dtype):
            return bitsandbytes_kernels.expand_nf4(packed, scales_b, stop - start, self.in_features, dtype)
        numbers = nf4_codes.expand_plain(packed, scales_b, self.pairs, dtype, self.device_type)
        return numbers[first - origin : last - origin].view(stop - start, self.in_features)

    def workspace_bytes(self, dtype: torch.dtype) -> int:
        """Return what `dense(dtype)` holds at its peak on the road that it takes here, the result included."""
        plain = not bitsandbytes_kernels.serves(self.device_type, self.in_features, dtype)
        kind = self.device_type if plain else None
        return dequantize_workspace_bytes(self.out_features * self.in_features, dtype, kind, self.offset is not None)

    def _scales(self, first: int, last: int) -> Tensor:
        """Return the fp32 scales of the weights first..last; `first` begins a nested block."""
        codes_b = self.absmax[first // BLOCK : -(-last // BLOCK)]
        if self.nested_absmax is None or self.offset is None:
            return codes_b
        return nf4_codes.expand_scales(codes_b, self.nested_absmax[first // _RUN :], self.offset, self.nested_map)


def dequantize_workspace_bytes(count: int, dtype: torch.dtype, plain_on: str | None, nested: bool = True) -> int:
    """Return the peak bytes of expanding `count` NF4 weights to `dtype`, the result included.

    `plain_on`: the kind of device for the plain road, None for bitsandbytes' road, which has no scratch.
    """
    scales = -(-count // BLOCK) * 4 if nested else 0
    result = (count + (count % 2 if plain_on else 0)) * dtype.itemsize
    scratch = nf4_codes.scratch_bytes(count, dtype, plain_on) if plain_on else 0
    return max(2 * scales, scales + result + scratch)


def _numbers(weight_OI: Tensor, start: int, stop: int) -> Tensor:
    """Return the weights start..stop of the flattened W as a new fp32 tensor, whatever W's strides."""
    num_columns = weight_OI.shape[1]
    first_row = start // num_columns
    rows = weight_OI[first_row : -(-stop // num_columns)]
    rows = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return rows.view(-1)[start - first_row * num_columns : stop - first_row * num_columns]


def read_facts(packed_json: Tensor, layer: str) -> dict[str, Any]:
    """Read the JSON bytes in which bitsandbytes keeps what is no tensor: `shape`, `dtype` of the original, block sizes.

    Raises:
        ModelError: they are no JSON, or tell of a layout that ajusta does not read.
    """
    try:
        facts: dict[str, Any] = json.loads(bytes(packed_json.tolist()).decode())
    except ValueError as error:
        raise ModelError(
            f"{layer}: {STATE_KEY} is no JSON ({error}); expected bitsandbytes'; fetch it again"
        ) from error
    known = ("nf4", BLOCK, facts.get("nested_blocksize", NESTED_BLOCK))
    came = (facts.get("quant_type"), facts.get("blocksize"), NESTED_BLOCK)
    if came != known or len(facts.get("shape") or ()) != 2:
        raise ModelError(
            f"{layer}: quantized as {facts}; expected nf4 in blocks of {BLOCK}, nested blocks of {NESTED_BLOCK}, "
            "and a 2-D shape; train from the unquantized model"
        )
    return facts


def _check_maps(tensors: Mapping[str, Tensor], layer: str, nested: bool) -> None:
    """Refuse a file whose codes stand for other values than ours."""
    ours = {"weight.quant_map": nf4_codes.pair_table(torch.device("cpu"))[:16, 1]}
    if nested:
        ours["weight.nested_quant_map"] = nf4_codes.dynamic_map(torch.device("cpu"))
    for key, expected in ours.items():
        came = take(tensors, key, layer, "nf4").to(device="cpu", dtype=torch.float32)
        if came.shape != expected.shape or not torch.allclose(came, expected, rtol=0, atol=1e-6):
            raise ModelError(f"{layer}: {key} is not the usual NF4 table; train from the unquantized model")
