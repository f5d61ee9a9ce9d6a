"""Bring the model to its place, adapted; keep its adapter in the run folder; say what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ajusta.base.errors import UserError
from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.engine.adapter_files import load_into, read_adapter, save_adapter
from ajusta.engine.assemble import AdapterSpec, Assembled, Choose, assemble
from ajusta.engine.phases import make_optimizer
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.dtypes import DTYPES
from ajusta.memory.place import Place, RealPlace
from ajusta.spec.config import Config
from ajusta.spec.record import ModelFacts
from ajusta.stages.base import Base


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its place."""

    model: Assembled
    place: Place

    @property
    def trainable(self) -> int:
        """Numbers that training changes."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def load_base(
    base: Base,
    device: torch.device,
    *,
    dtype: str,
    bits: str,
    adapted: Choose,
    adapter: AdapterSpec,
    told: Callable[[int, int], None],
    continue_from: Path | None = None,
) -> Loaded:
    """Load the base tensor by tensor, quantized on arrival, with fresh adapters or those of `continue_from`.

    Raises:
        ModelError: the adapter belongs to another model; counts and an example say how it differs.
    """
    place = RealPlace(device)
    model = assemble(
        build_skeleton(base.config, DTYPES[dtype]),
        base.source,
        place,
        dtype=DTYPES[dtype],
        bits=bits,
        adapted=adapted,
        adapter=adapter,
        loaded=told,
    )
    loaded = Loaded(model=model, place=place)
    if continue_from is not None:
        fill_adapters(loaded, continue_from)
    return loaded


def fill_adapters(loaded: Loaded, folder: Path) -> None:
    """Put the numbers of a saved adapter into the model.

    Raises:
        ModelError: it belongs to another model; counts and an example say how it differs.
    """
    load_into(loaded.model.adapters, read_adapter(folder))


def optimizer_for(loaded: Loaded, settings: AdamWSettings) -> FlatAdamW:
    """Make the optimizer of a loaded model.

    Raises:
        UserError: there is nothing to train.
    """
    if not loaded.model.adapters:
        raise UserError("no layer has an adapter, so nothing would be trained; check lora.targets and lora.exclude")
    return make_optimizer(loaded.model, settings, loaded.place)


def keep_adapter(folder: Path, loaded: Loaded, base: Base, config: Config) -> Path:
    """Write the adapter in PEFT's format; return its folder."""
    save_adapter(
        folder,
        loaded.model.adapters,
        rank_stabilized=config.lora.rank_stabilized,
        module_paths=loaded.model.module_paths,
        base_reference=base.reference,
        base_fingerprint=base.source.fingerprint,
        dropout=config.lora.dropout,
    )
    return folder


def model_facts(base: Base, loaded: Loaded) -> ModelFacts:
    """Say which model this is and how it is stored and adapted."""
    model = loaded.model
    count = sum(info.num_elements for info in base.source.infos.values())
    scales = sorted({layer.scale for layer in model.adapters.values()})
    quantized = any(kind != "none" for kind in model.storages.values())
    return ModelFacts(
        reference=base.reference,
        revision=base.revision,
        fingerprint=base.source.fingerprint,
        model_type=str(base.config.model_type),
        parameters=count,
        trainable=loaded.trainable,
        adapted=len(model.adapters),
        not_adapted=model.not_adapted,
        in_float=tuple(sorted(model.loose)) if quantized else (),
        effective_scale=scales[0] if scales else 0.0,
    )
