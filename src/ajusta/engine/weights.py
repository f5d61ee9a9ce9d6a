"""How a model's weights come in: the one door, for a folder of safetensors or a .gguf file.

source = open_weights(path)
matching = match_names(source.infos, model.state_dict(), model.base_model_prefix, renamer(model))
for name, stored in matching.found.items(): put(name, source.read(stored))
"""

from __future__ import annotations

from pathlib import Path

from ajusta.base.errors import ModelError
from ajusta.engine.weights_base import TensorInfo, WeightSource, with_storages
from ajusta.engine.weights_gguf import GgufSource
from ajusta.engine.weights_merged import MergedSource, merged
from ajusta.engine.weights_names import Matching, match_names, renamer
from ajusta.engine.weights_quantized import QuantizedSource
from ajusta.engine.weights_safetensors import SafetensorsSource

__all__ = [
    "GgufSource",
    "Matching",
    "MergedSource",
    "QuantizedSource",
    "SafetensorsSource",
    "TensorInfo",
    "WeightSource",
    "match_names",
    "open_weights",
    "renamer",
    "with_storages",
]


def open_weights(
    path: str | Path, trust_remote_code: bool = False, reference: str | None = None
) -> SafetensorsSource | MergedSource | QuantizedSource | GgufSource:
    """Open a folder of safetensors or a .gguf file; headers are read and checked, weights are not read yet.

    Single experts of a folder are one tensor to the caller, as they are to the model (engine/weights_merged.py). So is
    a weight that bitsandbytes stored in several (engine/weights_quantized.py).

    Args:
        path: what `stages.fetch` returned, or any local path.
        trust_remote_code: let a model type unknown to transformers run the Python code of its folder.
        reference: what the user typed, for messages and the record; the path by default.

    Raises:
        ModelError: the path is neither, or the checkpoint cannot be used; one line says why.
    """
    place = Path(path)
    if place.is_dir():
        source = SafetensorsSource(place, trust_remote_code=trust_remote_code, reference=reference)
        return QuantizedSource(source) if source.is_quantized else merged(source)
    if not place.exists():
        raise ModelError(f"{place} does not exist; expected a model folder or a .gguf file; check the path")
    if place.suffix == ".gguf":
        return GgufSource(place, reference=reference)
    if place.suffix == ".safetensors":
        raise ModelError(f"{place} is a single weight file; expected its folder with config.json; give {place.parent}")
    raise ModelError(f"{place} is no model; expected a folder with safetensors, or a .gguf file")
