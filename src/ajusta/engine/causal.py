"""Whether a family with a switch between encoder and decoder is a causal model, known on `meta`, without a weight.

A family that has our attention says so itself: its attention modules are causal or are refused (blocks/attention.py).
Where it has only an attention of its own, we hand it a causal mask, and an encoder (BERT) would take that too, though
it was made to look in both directions. Such families have a switch in their configuration, `is_decoder`; but others
carry the same field, false, and never read it (GPT-NeoX). So the model is asked itself: it runs once as it is
configured and once with the switch on. If it does other operations then, the switch counts, and is off.

What has no switch is told from its values, once it is loaded (engine/probe.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

_SWITCH = "is_decoder"
_TOKENS = 5

Build = Callable[[PretrainedConfig], PreTrainedModel]


def looks_both_ways(config: PretrainedConfig, build: Build, foreign: tuple[type[Exception], ...]) -> bool:
    """Say whether the model of this configuration is no decoder, and would be one with its switch on.

    Args:
        config: of the model.
        build: makes the model on torch's default device.
        foreign: what a model class raises where it cannot be built or run.
    """
    if getattr(config.get_text_config(), _SWITCH, True):
        return False
    switched = copy.deepcopy(config)
    for part in (switched, switched.get_text_config()):
        setattr(part, _SWITCH, True)
    as_it_is, as_decoder = (_operations(each, build, foreign) for each in (config, switched))
    return as_it_is != as_decoder


def _operations(config: PretrainedConfig, build: Build, foreign: tuple[type[Exception], ...]) -> list[str]:
    """Return what the model does with nothing but ids, as far as it comes on `meta`; where it fails is part of it."""
    with _Listing() as listing, torch.device("meta"), torch.no_grad():
        try:
            model = build(config)
            listing.seen.clear()  # how weights are drawn tells nothing
            model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64), use_cache=False)
        except foreign as error:
            listing.seen.append(f"{type(error).__name__}: {error}")
    seen: list[str] = listing.seen
    return seen


class _Listing(TorchDispatchMode):
    """Write down each operation with the shape of its result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and note it."""
        result = func(*args, **(kwargs or {}))
        shape = list(result.shape) if isinstance(result, Tensor) else ""
        self.seen.append(f"{func} {shape}")
        return result
