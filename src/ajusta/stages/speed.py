"""How fast a device computes: a matrix product alone, a stand-in for a decoder layer, and all that a roofline holds.

The product alone does not decide which dtype is faster: on some processors it is three times faster in bf16 while
everything around it is slower, so that a step gains little.

A roofline's figures are each the best of many runs, in rounds over all of them, so that a busy moment spoils none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ajusta.blocks import bitsandbytes_kernels, nf4_codes
from ajusta.blocks.attention import AttentionBias, SegmentAttention, Segments
from ajusta.blocks.gated import GatedMlp
from ajusta.blocks.int8 import Int8
from ajusta.blocks.linear import FrozenLinear
from ajusta.blocks.lora import LoraLinear
from ajusta.blocks.norm import VARIANTS, RmsNorm
from ajusta.blocks.recompute import Keep
from ajusta.memory.dtypes import DTYPES
from ajusta.memory.heap import THRESHOLD_BYTES
from ajusta.memory.ledger import Ledger
from ajusta.memory.roofline import kernel_name
from ajusta.spec.roofline import LONG, SHORT, SHORT_SIDE, WIDE_ROWS, WIDE_SIDE, WIDTH, Kernel, Roofline

TOKENS, HIDDEN, INNER, HEADS = WIDE_ROWS, WIDE_SIDE, 1536, 9  # a small model's layer over a small micro-batch
MEASURE_S, ROUNDS = 6.0, 5
_STREAM = {"cpu": 1 << 18, "cuda": 1 << 26}  # numbers: a hidden state on a processor, beyond all caches on a card
_STREAMS, _LAYERS = 32, 4  # of them, and of weights: more than the near caches hold when the first one's turn comes
_WIDTH, _BLOCKS = 256, 4  # of the small blocks whose calls are timed
_LEAST_S = 1e-9  # what a difference of two times is at least


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """Something to time, and how much it does: FLOPs, bytes, operations or numbers."""

    run: Callable[[], object]
    amount: float


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a linear layer's product in `dtype`, the best of a few."""
    probe = _product(dtype, device, TOKENS, INNER)
    return probe.amount / _fastest(probe.run, device)


def layer_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the tokens/s of a frozen decoder layer's forward and input gradient in `dtype`, the best of a few."""

    def weight(rows: int, columns: int) -> Tensor:
        scaled: Tensor = torch.randn(rows, columns, device=device).div_(columns**0.5)
        return scaled.to(dtype)

    qkv, out = weight(3 * HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)
    gate_up, down = weight(2 * INNER, HIDDEN), weight(HIDDEN, INNER)
    start = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)

    def there_and_back() -> None:
        hidden = start.detach().requires_grad_(True)
        normal = functional.rms_norm(hidden, (HIDDEN,))
        q, k, v = (part.view(1, TOKENS, HEADS, -1).transpose(1, 2) for part in (normal @ qkv.t()).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = hidden + mixed.transpose(1, 2).reshape(TOKENS, HIDDEN) @ out.t()
        gate, up = (functional.rms_norm(middle, (HIDDEN,)) @ gate_up.t()).chunk(2, dim=-1)
        result = middle + (functional.silu(gate) * up) @ down.t()
        torch.autograd.backward(result, torch.ones_like(result))

    return TOKENS / _fastest(there_and_back, device)


def measure_roofline(device: torch.device, seconds: float = MEASURE_S) -> Roofline:
    """Time what a roofline is made of on this device.

    Args:
        device: where.
        seconds: beside the first run of each thing, about a second in all; more makes the figures steadier.
    """
    names = _names(device)
    steps = {name: _small_step(DTYPES[name], device) for name in names}
    probes = {
        **{f"matmul {name}": _product(DTYPES[name], device, TOKENS, INNER) for name in names},
        **{f"thin {name}": _product(DTYPES[name], device, TOKENS, SHORT_SIDE) for name in names},
        **{f"few {name}": _product(DTYPES[name], device, SHORT_SIDE, INNER) for name in names},
        **{f"attention {name}": _attention(DTYPES[name], device, LONG) for name in names},
        **{f"short {name}": _attention(DTYPES[name], device, SHORT) for name in names},
        **{f"step {name}": _Probe(run=run, amount=1.0) for name, run in steps.items()},
        "bandwidth": _stream(torch.float32, device),
        "narrow": _stream(DTYPES[names[-1]], device),
        "found": _fill(device, anew=True),
        "had": _fill(device, anew=False),
        **_expansions(names, device),
    }
    taken = _best_seconds(probes, device, seconds)
    without_calls = _as_roofline(probes, taken, names, f"measured on this device, torch {torch.__version__}")
    calls = [_call_seconds(without_calls, run, taken[f"step {name}"], device) for name, run in steps.items()]
    return replace(without_calls, per_operation_s=sum(calls) / len(calls))


def _as_roofline(
    probes: Mapping[str, _Probe], taken: Mapping[str, float], names: tuple[str, ...], source: str
) -> Roofline:
    """Return what these times say, the calls left out."""
    rates = {name: probe.amount / taken[name] for name, probe in probes.items()}

    def of(what: str) -> Mapping[str, float]:
        return {name: rates[f"{what} {name}"] for name in names}

    kernels = {}
    for name in (probe.removesuffix(" small") for probe in probes if probe.endswith(" small")):
        small, large = taken[f"{name} small"], taken[f"{name} large"]
        rate = probes[f"{name} large"].amount / max(large - small, _LEAST_S)
        kernels[name] = Kernel(call_s=small, numbers_per_s=rate)
    return Roofline(
        matmul_flops=of("matmul"),
        thin_flops=of("thin"),
        few_flops=of("few"),
        attention_flops=of("attention"),
        short_flops=of("short"),
        bandwidth_bytes_per_s=rates["bandwidth"],
        narrow_bytes_per_s=rates["narrow"],
        per_operation_s=0.0,
        fresh_bytes_per_s=probes["found"].amount / max(taken["found"] - taken["had"], _LEAST_S),
        fresh_from_bytes=THRESHOLD_BYTES,
        kernels=kernels,
        source=source,
        measured=True,
    )


def _call_seconds(roofline: Roofline, run: Callable[[], object], taken: float, device: torch.device) -> float:
    """Return what each operation of a run took beside its work."""
    work = _seconds_by(roofline, run, device)
    calls = _seconds_by(replace(roofline, per_operation_s=1.0), run, device) - work
    return max(taken - work, _LEAST_S) / calls


def _names(device: torch.device) -> tuple[str, ...]:
    """Return the dtypes to time: fp32, and 16-bit ones. Cards before Ampere have no bf16, and kernels refuse it."""
    if device.type == "cpu":
        return ("fp32", "bf16")
    return ("fp32", "bf16", "fp16") if torch.cuda.get_device_capability(device) >= (8, 0) else ("fp32", "fp16")


def _best_seconds(probes: Mapping[str, _Probe], device: torch.device, seconds: float) -> dict[str, float]:
    """Return the least time that each probe took in all rounds; every probe has its turn in every round."""
    rounds = ROUNDS if seconds >= 1 else 1
    each = seconds / rounds / len(probes)
    best = dict.fromkeys(probes, float("inf"))
    for _ in range(rounds):
        for name, probe in probes.items():
            best[name] = min(best[name], _fastest(probe.run, device, each))
    return best


def _product(dtype: torch.dtype, device: torch.device, rows: int, columns: int) -> _Probe:
    """Time a layer's product there and back, over a few layers: the weights of the next one are in no near cache."""
    layers = _LAYERS if rows == TOKENS else 2 * _LAYERS
    left = torch.randn(rows, HIDDEN, device=device).to(dtype)
    weights = [torch.randn(columns, HIDDEN, device=device).div_(HIDDEN).to(dtype) for _ in range(layers)]

    def there_and_back() -> None:
        for weight in weights:
            torch.mm(torch.mm(left, weight.t()), weight)

    return _Probe(run=there_and_back, amount=4.0 * rows * HIDDEN * columns * layers)


def _attention(dtype: torch.dtype, device: torch.device, tokens: int) -> _Probe:
    """Time the flash way there and back: two products and five, halved by the causal border."""
    width = HIDDEN // HEADS
    q, k, v = (torch.randn(1, HEADS, tokens, width, device=device).to(dtype).requires_grad_(True) for _ in range(3))
    segments, bias = Segments(ends=(tokens,)), AttentionBias()
    grad = torch.randn(1, HEADS, tokens, width, device=device).to(dtype)

    def there_and_back() -> None:
        torch.autograd.grad(SegmentAttention.apply(q, k, v, width**-0.5, segments, bias), (q, k, v), grad)

    return _Probe(run=there_and_back, amount=7.0 * HEADS * tokens * tokens * width)


def _expand_nf4(dtype: torch.dtype, device: torch.device, rows: int) -> _Probe:
    """Time the road that expands NF4 here; the scales are expanded by plain operations, which a trace sees."""
    count = rows * HIDDEN
    packed = torch.arange(count // 2, device=device).to(torch.uint8)
    scales_b = torch.ones(count // nf4_codes.BLOCK, device=device)
    pairs = nf4_codes.pair_table(device)

    def theirs() -> Tensor:
        return bitsandbytes_kernels.expand_nf4(packed, scales_b, rows, HIDDEN, dtype)

    def plain() -> Tensor:
        return nf4_codes.expand_plain(packed, scales_b, pairs, dtype, device.type)

    serves = bitsandbytes_kernels.serves(device.type, HIDDEN, dtype)
    return _Probe(run=theirs if serves else plain, amount=float(count))


def _expand_int8(dtype: torch.dtype, device: torch.device, rows: int) -> _Probe:
    weight = Int8.quantize(torch.randn(rows, HIDDEN, device=device))
    return _Probe(run=lambda: weight.rows(0, rows, dtype), amount=float(rows * HIDDEN))


_KERNELS = {"nf4": _expand_nf4, "int8": _expand_int8}


def _expansions(names: tuple[str, ...], device: torch.device) -> dict[str, _Probe]:
    """Return a small and a large expansion of each storage to each dtype: a call, and a call with its numbers."""
    return {
        f"{kernel_name(kind, DTYPES[name])} {size}": _KERNELS[kind](DTYPES[name], device, rows)
        for kind in _KERNELS
        for name in names
        for size, rows in (("small", 1), ("large", INNER))
    }


def _stream(dtype: torch.dtype, device: torch.device) -> _Probe:
    """Time what stands between products: a sum, an activation, a product, a norm, each of what was not just used.

    The amount counts each operation's own reading and writing, as memory/roofline.py does.
    """
    count = _STREAM[device.type]
    rows = [torch.randn(count // HIDDEN, HIDDEN, device=device).to(dtype) for _ in range(_STREAMS)]

    def run() -> None:
        for left, right in zip(rows, reversed(rows), strict=True):
            functional.silu(left + right).mul_(right).pow(2).mean(-1, keepdim=True)

    return _Probe(run=run, amount=float(len(rows) * (3 + 2 + 3 + 2 + 1) * rows[0].nbytes))


def _fill(device: torch.device, *, anew: bool) -> _Probe:
    """Time the filling of a tensor that is large enough to be mapped anew each time, or of one that is there."""
    count = 4 * THRESHOLD_BYTES // 4
    there = torch.empty(count, device=device)
    run = (lambda: torch.empty(count, device=device).fill_(1.0)) if anew else (lambda: there.fill_(1.0))
    return _Probe(run=run, amount=float(there.nbytes))


def _small_step(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a step through a few small blocks, forward and backward; what its arithmetic leaves over are its calls.

    A loop of one tiny operation would not do: between large tensors, and with all of a model's code, a call takes two
    to three times as long.
    """
    blocks = [_SmallBlock(dtype, device) for _ in range(_BLOCKS)]
    start = torch.randn(1, SHORT, _WIDTH, device=device).to(dtype)

    def there_and_back() -> None:
        islands, hidden = [], start
        for block in blocks:
            islands.append(Keep().forward(block, hidden, wants_grad=True))
            hidden = islands[-1].output
        grad: Tensor | None = torch.ones_like(hidden)
        while islands and grad is not None:
            grad = islands.pop().backward(grad)

    there_and_back()  # from here on there are gradients to add to, as in a step
    return there_and_back


def _seconds_by(roofline: Roofline, run: Callable[[], object], device: torch.device) -> float:
    """Return the time of a run's operations on such a device."""
    with Ledger(device.type, roofline=roofline) as ledger:
        run()
    return ledger.seconds


class _SmallBlock(nn.Module):
    """A decoder block out of the engine's own parts: norms, seven adapted layers, rotation, attention in segments."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def layer() -> LoraLinear:
            base = FrozenLinear.store(torch.randn(_WIDTH, _WIDTH, device=device).div_(_WIDTH).to(dtype), None)
            return LoraLinear.from_base(base, rank=SHORT_SIDE, alpha=1.0, generator=generator)

        def norm() -> RmsNorm:
            return RmsNorm(nn.Parameter(torch.ones(_WIDTH, device=device, dtype=dtype), False), 1e-6, VARIANTS[0])

        parts = nn.ModuleDict({"gate_proj": layer(), "up_proj": layer(), "down_proj": layer(), "act_fn": nn.SiLU()})
        self.qkv, self.out = nn.ModuleList([layer() for _ in range(3)]), layer()
        self.norms, self.mlp = nn.ModuleList([norm(), norm()]), GatedMlp(parts)
        self.cos, self.sin = (torch.ones(SHORT, WIDTH, device=device, dtype=dtype) for _ in range(2))
        self.segments = Segments(ends=(SHORT // 2, SHORT))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden state [1, SHORT, _WIDTH] behind the block."""
        normal = self.norms[0](hidden)
        query, key, value = (layer(normal).view(1, SHORT, -1, WIDTH).transpose(1, 2) for layer in self.qkv)
        query, key = self._rotate(query), self._rotate(key)
        mixed: Tensor = SegmentAttention.apply(query, key, value, WIDTH**-0.5, self.segments, AttentionBias())
        middle = hidden + self.out(mixed.transpose(1, 2).reshape(1, SHORT, _WIDTH))
        result: Tensor = middle + self.mlp(self.norms[1](middle))
        return result

    def _rotate(self, heads: Tensor) -> Tensor:
        left, right = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-right, left), dim=-1) * self.sin


def _fastest(run: Callable[[], object], device: torch.device, seconds: float = 0.3) -> float:
    """Return the seconds of the fastest run within the time given; the first, which loads libraries, does not count."""
    best, end = float("inf"), time.perf_counter() + seconds
    run()
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
