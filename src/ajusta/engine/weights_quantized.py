"""A folder whose linear weights bitsandbytes saved quantized, read as they are stored: nothing is rounded again.

Such a weight lies in several tensors: its codes under the weight's own name, scales and tables beside it, and what is
no tensor as JSON (`q_proj.weight`, `q_proj.weight.absmax`, `q_proj.weight.quant_state.bitsandbytes__nf4`, or `SCB` for
8 bits). To the model it is one, [out, in]. Who asks for its storage gets it as it lies there; who reads it gets floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PretrainedConfig

from ajusta.base.errors import ModelError
from ajusta.blocks.nf4 import STATE_KEY, read_facts
from ajusta.blocks.quantize import storage_from_state
from ajusta.blocks.storage import Storage
from ajusta.engine.weights_base import TensorInfo, check_rows
from ajusta.engine.weights_safetensors import SafetensorsSource

_FP4, _SCB = ".weight.quant_state.bitsandbytes__fp4", ".SCB"
_SMALL = (STATE_KEY, "weight.quant_map", "weight.nested_quant_map")  # looked into when a storage is opened


class QuantizedSource:
    """A folder of safetensors in which `kinds` names the weights that are stored quantized (see `HoldsStorages`)."""

    def __init__(self, source: SafetensorsSource) -> None:
        """Find the quantized weights; of each the JSON beside it is read.

        Raises:
            ModelError: a weight is stored in another way than NF4 or int8, or its JSON is damaged.
        """
        self._source = source
        self.config: PretrainedConfig = source.config
        self.reference: str = source.reference
        self.generation: Mapping[str, object] = source.generation
        self.files: tuple[Path, ...] = source.files
        nf4, int8 = (_layers(source.infos, suffix) for suffix in (f".{STATE_KEY}", _SCB))
        if fp4 := _layers(source.infos, _FP4):
            raise ModelError(
                f"{self.reference} has weights in fp4 ({fp4[0]}); expected nf4 or 8 bits; choose the model's plain "
                f"version"
            )
        self._parts = {f"{layer}.weight": _parts(source.infos, layer) for layer in (*nf4, *int8)}
        used = {part for parts in self._parts.values() for part in parts.values()}
        alone = {name: info for name, info in source.infos.items() if name not in used}
        floats = [info.dtype for info in alone.values() if info.dtype.is_floating_point]
        self._float = max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
        self.kinds: Mapping[str, str] = {f"{layer}.weight": "nf4" for layer in nf4} | {
            f"{layer}.weight": "int8" for layer in int8
        }
        self.infos: Mapping[str, TensorInfo] = alone | {name: self._info(name) for name in self._parts}

    @property
    def fingerprint(self) -> str:
        """That of the checkpoint as it is stored."""
        return self._source.fingerprint

    def storage(self, name: str, *, shapes_only: bool = False) -> Storage:
        """Return a weight as it is stored, on the CPU or, for a plan, on `meta`.

        Raises:
            ModelError: a part is missing or of a layout that ajusta does not read.
        """
        layer, tensors = name.removesuffix(".weight"), {}
        for key, part in self._parts[name].items():
            info = self._source.infos[part]
            on_meta = shapes_only and key not in _SMALL
            tensors[key] = (
                torch.empty(info.shape, dtype=info.dtype, device="meta") if on_meta else self._source.read(part)
            )
        return storage_from_state(tensors, layer)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor, fresh, a quantized one expanded; see `WeightSource.read`."""
        if name not in self._parts:
            return self._source.read(name)
        return self.storage(name).dense(self.infos[name].dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop`, fresh; see `WeightSource.read_rows`."""
        if name not in self._parts:
            return self._source.read_rows(name, start, stop)
        check_rows(self.infos[name], start, stop)
        return self.storage(name).rows(start, stop, self.infos[name].dtype)

    def _info(self, name: str) -> TensorInfo:
        """Return a quantized weight's shape, the float that it was, and the bytes of all its parts."""
        parts = self._parts[name]
        stored_bytes = sum(self._source.infos[part].stored_bytes for part in parts.values())
        if self.kinds[name] == "int8":
            shape = self._source.infos[parts["weight"]].shape if "weight" in parts else ()
            return TensorInfo(shape=shape, dtype=self._float, stored_bytes=stored_bytes)
        facts = read_facts(self._source.read(parts[STATE_KEY]), name)
        dtype = getattr(torch, str(facts.get("dtype")), None)
        return TensorInfo(
            shape=tuple(facts["shape"]),
            dtype=dtype if isinstance(dtype, torch.dtype) else self._float,
            stored_bytes=stored_bytes,
        )


def _layers(names: Mapping[str, TensorInfo], suffix: str) -> list[str]:
    return [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def _parts(names: Mapping[str, TensorInfo], layer: str) -> dict[str, str]:
    """Return the stored tensors of a layer's weight under the keys of `storage_from_state`."""
    keys = {name: name[len(layer) + 1 :] for name in names if name.startswith(f"{layer}.")}
    wanted = ("weight", "SCB", "weight_format")
    return {key: name for name, key in keys.items() if key in wanted or key.startswith("weight.")}
