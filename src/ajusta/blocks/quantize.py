"""One door to the three storages: pick by name, quantize on arrival, open a saved one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ajusta.blocks.int8 import Int8
from ajusta.blocks.nf4 import Nf4
from ajusta.blocks.storage import Dense, Storage, take

KINDS = ("none", "int8", "nf4")


def quantize(weight_OI: Tensor, kind: str) -> Storage:
    """Return W [O, I] stored as `kind` (none | int8 | nf4); `none` keeps the very tensor, the others make a new one.

    Temporaries stay within `storage.TILE_BYTES` beyond the result. On `meta` the result is a `meta` storage of the
    right sizes.

    Raises:
        ModelError: the weight holds an infinity or NaN, which no scale can express.
    """
    if kind == "none":
        return Dense(weight_OI)
    assert kind in KINDS, f"unknown storage {kind!r}"
    return Nf4.quantize(weight_OI) if kind == "nf4" else Int8.quantize(weight_OI)


def storage_from_state(tensors: Mapping[str, Tensor], layer: str) -> Storage:
    """Open a weight that bitsandbytes or ajusta saved: `tensors` maps one layer's `weight`, `SCB`, `weight.absmax`, ...

    Raises:
        ModelError: a scale is missing or does not fit; the message names `layer`.
    """
    if any(key.startswith("weight.") for key in tensors) or ("SCB" not in tensors and _is_packed(tensors)):
        return Nf4.from_state(tensors, layer)
    if "SCB" in tensors or not take(tensors, "weight", layer, "saved").is_floating_point():
        return Int8.from_state(tensors, layer)
    return Dense(tensors["weight"])


def _is_packed(tensors: Mapping[str, Tensor]) -> bool:
    weight = tensors.get("weight")
    return weight is not None and not weight.is_floating_point() and weight.dim() == 2 and weight.shape[1] == 1
