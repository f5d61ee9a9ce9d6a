"""The loss: linear head and cross-entropy together, on a few positions at a time, summed and never averaged.

    l = cap * tanh(s * W h / cap)          (s = 1 and no cap for most families)
    loss = sum_i  log sum_v exp(l_iv) - l_i,label(i)
    dloss/dl = softmax(l) - onehot(label)

The C x V block of logits is the only large tensor; the gradient is written over it in place, so its forward leaves the
backward's work done (the idea of Cut Cross-Entropy, Wijmans 2024, arXiv 2411.09009, without its kernel). 16-bit logits
are widened to fp32 before anything is summed. The sum is divided once per optimizer step, by the trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)


def cross_entropy_sum(
    logits_CV: Tensor, labels_C: Tensor, *, scale: float = 1.0, softcap: float | None = None, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss (0-dim, fp32 or wider) and dloss/d(head output) [C, V] in the head's dtype.

    `logits_CV` is the head's raw output and is overwritten. With `gradient=False` the second result is None.
    """
    narrow = logits_CV.dtype
    logits = logits_CV.float() if narrow in _NARROW else logits_CV
    if scale != 1.0:
        logits.mul_(scale)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1.0 - logits * logits if gradient else None
        logits.mul_(softcap)
    labels = labels_C[:, None]
    logits.sub_(logits.amax(dim=-1, keepdim=True))  # the largest logit is 0 from here on
    picked = logits.gather(-1, labels)
    total = logits.exp_().sum(dim=-1, keepdim=True)
    loss = (total.log() - picked).sum()
    if not gradient:
        return loss, None
    logits.div_(total)
    logits.scatter_add_(-1, labels, torch.full_like(picked, -1.0))
    if slope is not None:
        logits.mul_(slope)
    if scale != 1.0:
        logits.mul_(scale)
    return loss, logits.to(narrow)
