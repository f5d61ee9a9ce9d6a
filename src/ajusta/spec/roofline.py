"""How fast a device is, in the few figures that the time of a step is made of. A pure noun, no torch.

The idea: an operation takes as long as its arithmetic or its memory traffic, whichever takes longer (Williams,
Waterman, Patterson 2009, "Roofline", CACM 52(4)). Beside it stand what every call costs, and the speeds of what is no
large product: products with a short side, attention over short rows, the expansion of quantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WIDE_ROWS, WIDE_SIDE = 256, 576  # of the large product that is measured: its rows, and its shorter other side
SHORT_SIDE = 16  # of the two others: about an adapter's rank, and a small chunk of the loss
SHORT, LONG, WIDTH = 64, 512, 64  # tokens of the two rows that attention is measured on, and the width of its heads
# A score costs its exponential whatever the width: as much as so many more columns. On a Zen 4 core (fp32, 512
# tokens) heads of 32, 64 and 128 columns made 33, 40 and 43 GFLOP/s, which 17 explains.
EXPONENTIAL = 17


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a kernel with a speed of its own takes: seconds a call, and numbers that it makes a second beside that."""

    call_s: float
    numbers_per_s: float

    def seconds(self, numbers: int) -> float:
        """Return the time of one call that makes so many numbers."""
        return self.call_s + numbers / self.numbers_per_s


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The speeds of one device, by dtype: fp32, bf16, fp16. What is left out is as fast as its neighbour.

    `kernels` are what expands a quantized weight: "nf4 bf16" is its storage and its result.
    """

    matmul_flops: Mapping[str, float] = field(hash=False)  # FLOP/s of a large product: WIDE_ROWS, WIDE_SIDE
    thin_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # of as many rows, SHORT_SIDE wide
    few_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # of SHORT_SIDE rows, as wide
    attention_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # of causal attention over LONG rows
    short_flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # and SHORT ones
    bandwidth_bytes_per_s: float  # read and written together
    narrow_bytes_per_s: float = 0.0  # the same of 16-bit numbers, which a processor widens first; 0: no difference
    per_operation_s: float  # of every operation that does work, beside that work
    fresh_bytes_per_s: float = 0.0  # of memory that the system must find for new tensors; 0: it costs nothing
    fresh_from_bytes: int = 0  # tensors of this size on are found memory each; smaller ones use what others left
    kernels: Mapping[str, Kernel] = field(default_factory=dict, hash=False)
    source: str  # whose figures these are, for a person
    measured: bool  # on this very device

    def __post_init__(self) -> None:
        mappings = (self.matmul_flops, self.thin_flops, self.few_flops, self.attention_flops, self.short_flops)
        figures = [self.bandwidth_bytes_per_s, *(rate for rates in mappings for rate in rates.values())]
        assert self.matmul_flops and min(figures) > 0 and self.per_operation_s >= 0 <= self.narrow_bytes_per_s
        assert self.fresh_bytes_per_s >= 0 <= self.fresh_from_bytes

    def product_flops(self, dtype: str, rows: int, side: int) -> float:
        """Return the FLOP/s of a product with so many rows, whose shorter other side is `side`.

        The time of a unit of work is a + b / rows + c / side, by the three products that are measured. A dtype without
        a rate is as slow as the slowest.
        """
        wide = self.matmul_flops.get(dtype) or min(self.matmul_flops.values())
        thin, few = self.thin_flops.get(dtype, wide), self.few_flops.get(dtype, wide)
        b = max(0.0, (1 / few - 1 / wide) / (1 / SHORT_SIDE - 1 / WIDE_ROWS))
        c = max(0.0, (1 / thin - 1 / wide) / (1 / SHORT_SIDE - 1 / WIDE_SIDE))
        a = max(0.0, 1 / wide - b / WIDE_ROWS - c / WIDE_SIDE)
        return 1 / (a + b / rows + c / side)

    def attention_rate(self, dtype: str, tokens: int, width: int) -> float:
        """Return the FLOP/s of fused attention over rows of so many tokens, heads of such a width.

        The time of a unit of work is a + b / tokens, by the two rows that are measured. Unknown, it is a product's.
        """
        wide = self.matmul_flops.get(dtype) or min(self.matmul_flops.values())
        long = self.attention_flops.get(dtype, wide)
        b = max(0.0, (1 / self.short_flops.get(dtype, long) - 1 / long) / (1 / SHORT - 1 / LONG))
        unit = max(0.0, 1 / long - b / LONG) + b / tokens
        return 1 / (unit * (1 + EXPONENTIAL / width) / (1 + EXPONENTIAL / WIDTH))

    def bytes_per_s(self, narrow: bool) -> float:
        """Return the bandwidth for numbers of 16 bits, or of more."""
        return self.narrow_bytes_per_s or self.bandwidth_bytes_per_s if narrow else self.bandwidth_bytes_per_s
