"""AdamW (Loshchilov 2017, arXiv 1711.05101) over all adapters at once, in four flat fp32 buffers.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w - rate * ( (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay * w )

Weights, gradients and the two moments of every adapter are slices of four buffers that exist from the start, so the
first step costs no more memory than the last, a norm is one reduction, and saving is four tensors. The update works on
`CHUNK` values at a time to bound its temporaries. A non-finite gradient changes nothing: every new value is taken by
`where`, so that the same code runs on `meta` and no value is read back in the middle of a step.

Parameters of 16 bits (engine/full.py; an adapter has none) get moments in fp32 and a copy of themselves in fp32, in
which an update below 2^-9 of a weight is not rounded away (mixed precision: Micikevicius 2017, arXiv 1710.03740).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ajusta.memory.abridge import turns
from ajusta.memory.place import Category, Place

CHUNK = 1 << 18  # values: about 1 MiB of fp32 per temporary


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """The betas are decay rates a step; `max_grad_norm` is a norm of the token-mean gradient, 0 for no clipping."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class FlatAdamW:
    """The optimizer; it owns the adapters' storage, and the parameters become views of it."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: AdamWSettings, place: Place) -> None:
        assert parameters and all(p.dtype == parameters[0].dtype for p in parameters)
        self.settings = settings
        self.parameters = list(parameters)
        self.count = sum(p.numel() for p in parameters)
        dtype = parameters[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.weights = place.empty(self.count, dtype=dtype, category=Category.ADAPTERS)
        self.grads = place.zeros(self.count, dtype=dtype, category=Category.GRADIENTS)
        self.first = place.zeros(self.count, dtype=wide, category=Category.OPTIMIZER)
        self.second = place.zeros(self.count, dtype=wide, category=Category.OPTIMIZER)
        self.updates = place.zeros(1, dtype=torch.float64, category=Category.OPTIMIZER)  # finite updates so far
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            self.weights[start:stop].copy_(parameter.detach().reshape(-1))
            parameter.data = self.weights[start:stop].view(parameter.shape)
            parameter.grad = self.grads[start:stop].view(parameter.shape)
            start = stop
        self.master = self.weights  # what the update is added to
        if wide != dtype:
            self.master = place.empty(self.count, dtype=wide, category=Category.OPTIMIZER)
            self.master.copy_(self.weights)

    def step(self, learning_rate: float, trained_tokens: int) -> tuple[Tensor, Tensor]:
        """Update from the summed gradients and zero them.

        Returns the norm of the token-mean gradient before clipping and whether it was finite, both 0-dim tensors.
        """
        settings = self.settings
        norm = torch.linalg.vector_norm(self.grads).to(self.first.dtype) / max(trained_tokens, 1)
        finite = torch.isfinite(norm)
        factor = torch.ones_like(norm) / max(trained_tokens, 1)
        if settings.max_grad_norm > 0:
            factor = factor * torch.clamp(settings.max_grad_norm / (norm + 1e-6), max=1.0)
        self.updates.add_(finite.to(self.updates.dtype))
        count = torch.clamp(self.updates, min=1.0)
        correct_first = (1.0 - settings.beta1**count).to(self.first.dtype)
        correct_second = (1.0 - settings.beta2**count).to(self.first.dtype)
        for start in turns(range(0, self.count, CHUNK), self.grads.device):
            cut = slice(start, min(start + CHUNK, self.count))
            self._update(cut, factor, finite, correct_first, correct_second, learning_rate)
        self.grads.zero_()
        return norm, finite

    def _update(
        self, cut: slice, factor: Tensor, finite: Tensor, correct_first: Tensor, correct_second: Tensor, rate: float
    ) -> None:
        settings = self.settings
        grad = self.grads[cut].to(self.first.dtype).mul_(factor)
        first = torch.lerp(self.first[cut], grad, 1.0 - settings.beta1)
        second = torch.addcmul(self.second[cut] * settings.beta2, grad, grad, value=1.0 - settings.beta2)
        self.first[cut].copy_(torch.where(finite, first, self.first[cut]))
        self.second[cut].copy_(torch.where(finite, second, self.second[cut]))
        change = first.div_(correct_first).div_(second.div_(correct_second).sqrt_().add_(settings.epsilon))
        if settings.weight_decay:
            change.add_(self.master[cut], alpha=settings.weight_decay)
        self.master[cut].sub_(torch.where(finite, change, torch.zeros_like(change)), alpha=rate)
        if self.master is not self.weights:
            self.weights[cut].copy_(self.master[cut])

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint needs besides the adapters themselves."""
        state = {"first": self.first, "second": self.second, "updates": self.updates}
        return state if self.master is self.weights else {**state, "master": self.master}

    def load(self, state: dict[str, Tensor]) -> None:
        """Copy a saved state in place; no second copy is kept."""
        for name, mine in self.state().items():
            mine.copy_(state[name])


def learning_rate_schedule(kind: str, peak: float, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the rate as a function of the 0-based step: a linear rise, then `cosine`, `linear` or `constant`.

    The fall ends at exactly 0 behind the last step, so that the last step itself still learns.
    """

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
        if kind == "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        return peak * max(1.0 - done, 0.0) if kind == "linear" else peak

    return rate
