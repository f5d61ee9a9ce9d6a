"""The ready-made mask for families without an attention interface; T x T, so these families need short rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ajusta.memory.place import Category, Place


def block_diagonal_mask(segment_ends: tuple[int, ...], dtype: torch.dtype, place: Place) -> Tensor:
    """Return the additive mask [1, 1, T, T]: 0 where a token sees another (causal, one segment), else the least."""
    total = segment_ends[-1]
    least = torch.finfo(dtype).min
    mask = place.empty(1, 1, total, total, dtype=dtype, category=Category.SAVED).fill_(least)
    start = 0
    for end in segment_ends:
        # triu_(1) keeps what lies above the diagonal: the future stays hidden, the rest becomes 0
        mask[0, 0, start:end, start:end].triu_(1)
        start = end
    return mask
