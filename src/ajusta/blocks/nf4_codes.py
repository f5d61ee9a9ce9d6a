"""The arithmetic of NF4 in plain torch: numbers to codes, codes to numbers. `nf4.Nf4` holds the tensors.

Expanding reads both numbers of a byte at once from a table of 256 pairs (2 KiB), seen as 64-bit words, and scales them
in place: per tile of 2^20 weights one index of 2 MiB and, for a 16-bit result, one fp32 tile of 4 MiB.

Source: Dettmers 2023, QLoRA, arXiv 2305.14314, section 3 and appendix E; the 8-bit dynamic map: Dettmers 2015,
arXiv 1511.04561, section 3. Shape letters: n weights, b blocks of 64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ajusta.memory.ledger import declare_work
from ajusta.memory.roofline import Work, kernel_name

BLOCK, NESTED_BLOCK = 64, 256
# The 16 values of a normal distribution's quantiles, as published in QLoRA, appendix E.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_CELLS = 64
_SMALLEST = 1e-38  # smaller scales are lifted to it, or their reciprocal would overflow
_TILES = {"cpu": 1 << 20}  # weights a tile: few calls (2^15 was measured to take twice as long)
_TILE_ELSEWHERE = 1 << 22  # on a card: few launches, 8 MiB of index


def _dynamic_map_values() -> tuple[float, ...]:
    """The signed 8-bit dynamic map: 7 decades, 1 to 64 equal steps in each, every value the middle of its step."""
    positive: list[float] = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        positive += (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return tuple(sorted([*positive, *(-value for value in positive), 0.0, 1.0]))


def _middles(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the borders between neighbouring values, in fp32 arithmetic; a number on a border takes the lower one."""
    ascending = torch.tensor(values, dtype=torch.float32, device=device)
    return (ascending[:-1] + ascending[1:]) / 2


# Plain numbers, made on import, so that no mode under which this module is later used (a fake one) can get at them.
_DYNAMIC_VALUES = _dynamic_map_values()


def dynamic_map(device: torch.device) -> Tensor:
    """Return the 256 values that an 8-bit absmax code stands for, ascending, fp32 [256]."""
    if device.type == "meta":
        return torch.empty(len(_DYNAMIC_VALUES), device=device)  # torch.tensor() passes a ledger unseen there
    return torch.tensor(_DYNAMIC_VALUES, dtype=torch.float32, device=device)


def pair_table(device: torch.device) -> Tensor:
    """Return the two numbers of every byte, the high half first, fp32 [256, 2]; its rows 0..15 end in the 16 values."""
    if device.type == "meta":
        return torch.empty(256, 2, device=device)
    pairs = [(NF4_VALUES[byte >> 4], NF4_VALUES[byte & 15]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device)


def encode_tile(numbers_n: Tensor, scales_b: Tensor) -> Tensor:
    """Return the packed codes [ceil(n / 2)] uint8 of fp32 numbers (overwritten), their scales into `scales_b`.

    An incomplete last block is divided by its scale where full ones are multiplied by the reciprocal: bitsandbytes'
    own rounding, kept so that the codes are equal bit for bit.
    """
    full = len(numbers_n) // BLOCK * BLOCK
    blocks, rest = numbers_n[:full].view(-1, BLOCK), numbers_n[full:]
    scales = scales_b[: len(blocks)]
    torch.maximum(blocks.amax(1), blocks.amin(1).neg_(), out=scales)
    scales.abs_()  # of -0.0
    blocks.mul_((1.0 / scales.clamp(min=_SMALLEST))[:, None]).clamp_(-1, 1)
    if len(rest):
        scales_b[-1:].copy_(rest.abs().max().clamp(min=_SMALLEST))
        rest.div_(scales_b[-1]).clamp_(-1, 1)
    if len(numbers_n) % 2:
        numbers_n = functional.pad(numbers_n, (0, 1))
    codes = _nearest_code(numbers_n)
    return codes[::2].bitwise_left_shift(4).bitwise_or_(codes[1::2])


def encode_scales(scales_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes [b] uint8 (the nearest values of the dynamic map) and nested absmax fp32 [ceil(b / 256)]."""
    count = len(scales_b)
    padded = functional.pad(scales_b, (0, -count % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested_absmax = padded.abs().amax(1)
    normal = padded.mul_((1.0 / nested_absmax.clamp(min=_SMALLEST))[:, None]).view(-1)[:count]
    codes = torch.bucketize(normal, _middles(_DYNAMIC_VALUES, scales_b.device), out_int32=True)
    return codes.to(torch.uint8), nested_absmax


def expand_scales(codes_b: Tensor, nested_absmax: Tensor, offset: Tensor, nested_map: Tensor) -> Tensor:
    """Return fp32 scales [b] from codes that begin on a nested block; twice their bytes are held for a moment."""
    scales_b = torch.index_select(nested_map, 0, codes_b.to(torch.int32))
    full = len(codes_b) // NESTED_BLOCK
    scales_b[: full * NESTED_BLOCK].view(-1, NESTED_BLOCK).mul_(nested_absmax[:full, None])
    if len(codes_b) > full * NESTED_BLOCK:
        scales_b[full * NESTED_BLOCK :].mul_(nested_absmax[full])
    return scales_b.add_(offset)


def expand_plain(packed: Tensor, scales_b: Tensor, pairs: Tensor, dtype: torch.dtype, device_type: str) -> Tensor:
    """Return the numbers [2 len(packed)] as `dtype` of packed codes and fp32 scales; fp32 product, rounded once.

    Holds `scratch_bytes` for `device_type` beyond its result. On `meta` the same is allocated, and no tile is walked.
    """
    count = 2 * len(packed)
    tile = min(_tile(device_type), count)
    numbers = torch.empty(count, dtype=dtype, device=packed.device)
    index = torch.empty(tile // 2, dtype=torch.int32, device=packed.device)
    wide = None if dtype == torch.float32 else torch.empty(tile, dtype=torch.float32, device=packed.device)
    if packed.is_meta:
        _declare_tiles(count, tile, dtype)
        return numbers
    words = pairs.view(torch.float64).view(-1)
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        part = index[: (stop - start) // 2].copy_(packed[start // 2 : stop // 2])
        place = numbers[start:stop] if wide is None else wide[: stop - start]
        torch.index_select(words, 0, part, out=place.view(torch.float64))
        _scale(place, scales_b[start // BLOCK : -(-stop // BLOCK)])
        if wide is not None:
            numbers[start:stop].copy_(place)
    return numbers


def _declare_tiles(count: int, tile: int, dtype: torch.dtype) -> None:
    """Declare the tiles that are not walked: widen the codes, look the pairs up, scale, and round 16-bit results."""
    moved, calls = 0.5 + 2 + 2 + 4 + 4 + 4 + 4, 3
    if dtype != torch.float32:
        moved, calls = moved + 4 + dtype.itemsize, 4
    declare_work(
        Work(
            bytes=int(count * moved) + 4 * (count // BLOCK),
            operations=calls * -(-count // tile),
            kernel=kernel_name("nf4", dtype),
            numbers=count,
        )
    )


def scratch_bytes(count: int, dtype: torch.dtype, device_type: str) -> int:
    """Return what `expand_plain` holds beyond its result and its scales, for `count` weights."""
    tile = min(_tile(device_type), count + count % 2)
    return tile // 2 * 4 + (0 if dtype == torch.float32 else tile * 4)


def _tile(device_type: str) -> int:
    return _TILES.get(device_type, _TILE_ELSEWHERE)


def _nearest_code(numbers_n: Tensor) -> Tensor:
    """Return how many of the 15 borders lie below each number in [-1, 1], uint8 [n].

    [-1, 1] is cut into 64 cells, each narrower than the least distance of two borders: the cell says the code at its
    left edge and the one border that may still lie below the number. Seven times as fast as a binary search.
    """
    device = numbers_n.device
    edges = torch.arange(_CELLS + 1, device=device).mul(2 / _CELLS).sub_(1)
    borders = _middles(NF4_VALUES, device)
    code_at_edge = torch.bucketize(edges, borders, out_int32=True)
    next_border = torch.index_select(functional.pad(borders, (0, 1), value=2.0), 0, code_at_edge)
    cells = torch.mul(numbers_n, _CELLS / 2).add_(_CELLS / 2).to(torch.int32)
    cells.clamp_(0, _CELLS)  # NaN, which the caller refuses at its end, must not index out of bounds
    above = torch.gt(numbers_n, torch.index_select(next_border, 0, cells))
    return torch.index_select(code_at_edge.to(torch.uint8), 0, cells).add_(above.view(torch.uint8))


def _scale(numbers_n: Tensor, scales_b: Tensor) -> None:
    full = len(numbers_n) // BLOCK
    numbers_n[: full * BLOCK].view(-1, BLOCK).mul_(scales_b[:full, None])
    if len(numbers_n) > full * BLOCK:
        numbers_n[full * BLOCK :].mul_(scales_b[full])
