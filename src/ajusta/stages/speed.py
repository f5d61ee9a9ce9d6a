"""How fast a device computes in a dtype: a matrix product alone, and a stand-in for a decoder layer there and back.

The product alone does not decide: on some processors it is three times faster in bf16 while everything around it is
slower, so that a step gains little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

TOKENS, HIDDEN, INNER, HEADS = 256, 576, 1536, 9  # a small model's layer over a small micro-batch


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOP/s of a linear layer's product in `dtype`, the best of a few."""
    left = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)
    right = torch.randn(INNER, HIDDEN, device=device).to(dtype)
    return 2.0 * TOKENS * HIDDEN * INNER / _fastest(lambda: left @ right.t(), device)


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
