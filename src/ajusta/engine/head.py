"""The output head's input gradient: dh = dl W, with W frozen."""

from __future__ import annotations

from torch import Tensor, nn


def head_backward(head: nn.Module, grad_logits_CV: Tensor) -> Tensor:
    """Return the gradient of the head's input [C, H]."""
    weight = head.weight
    assert isinstance(weight, Tensor)
    return grad_logits_CV @ weight
