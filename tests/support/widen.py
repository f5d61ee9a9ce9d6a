"""Run foreign code in true fp64: families take norms and softmaxes in fp32 whatever the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFp64(TorchFunctionMode):
    """Read every wish for fp32 as one for fp64; the model's code and its order of operations stay as they are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*wide, **named)
