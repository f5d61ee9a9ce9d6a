"""Bring the model to its place, adapted; keep its adapter in the run folder; say what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ajusta.base.errors import ModelError, NumbersGoneBad, UserError
from ajusta.blocks.optimizer import AdamWSettings, FlatAdamW
from ajusta.engine.adapter_files import load_into, read_adapter, save_adapter
from ajusta.engine.assemble import AdapterSpec, Assembled, assemble
from ajusta.engine.phases import make_optimizer
from ajusta.engine.probe import probe
from ajusta.engine.skeleton import build_skeleton
from ajusta.memory.dtypes import DTYPES
from ajusta.memory.place import Place, RealPlace
from ajusta.spec.config import Config
from ajusta.spec.record import ModelFacts
from ajusta.stages.base import Base, open_base
from ajusta.stages.folder import RunFolder, naming_what_fails


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
        adapter=adapter,
        loaded=told,
    )
    loaded = Loaded(model=model, place=place)
    if continue_from is not None:
        fill_adapters(loaded, continue_from)
    return loaded


def tuned_base(config: Config, folder: RunFolder) -> Base:
    """Open the base of a finished run and hold that it is the one that was tuned.

    Raises:
        UserError: its fingerprint is another one.
    """
    base = open_base(config)
    tuned = read_adapter(folder.adapter).base_fingerprint
    if tuned is not None and tuned != base.source.fingerprint:
        raise UserError(
            f"{config.model} is not the model that was tuned in {folder.path} (another fingerprint); expected the same "
            f"files; put them back, or correct `model` in {folder.config}"
        )
    return base


def as_continued(config: Config, base: Base) -> tuple[Config, tuple[str, ...]]:
    """Return the settings with the shape of the adapter that is gone on from, and notes on what that changes.

    Raises:
        ModelError: the folder holds no plain LoRA adapter.
    """
    if config.lora.adapter is None:
        return config, ()
    file = read_adapter(config.lora.adapter)
    rank = max(pair.lora_A.shape[0] for pair in file.layers.values())
    shape = {"r": rank, "alpha": float(str(file.config["lora_alpha"])), "rank_stabilized": file.rank_stabilized}
    changed = [name for name, value in shape.items() if getattr(config.lora, name) != value]
    notes = [f"lora.{name} is {shape[name]}, as in the adapter that is gone on from" for name in changed]
    if file.base_fingerprint not in (None, base.source.fingerprint):
        notes.append(f"the adapter in {config.lora.adapter} was trained on another base ({file.base_reference})")
    return config.model_copy(update={"lora": config.lora.model_copy(update=shape)}), tuple(notes)


def fill_adapters(loaded: Loaded, folder: Path) -> None:
    """Put the numbers of a saved adapter into the model.

    Raises:
        ModelError: it belongs to another model; counts and an example say how it differs.
    """
    load_into(loaded.model.adapters, read_adapter(folder))


def check_chain(loaded: Loaded, base: Base, *, longest: int, packing: bool) -> None:
    """Ask the loaded model if the way it was taken apart is right, and if this data can pass through it.

    Args:
        loaded: the model on its place.
        base: what it was loaded from.
        longest: tokens of the longest example.
        packing: whether several examples share a row.

    Raises:
        NumbersGoneBad: the model's own logits are not finite.
        ModelError: the model is not causal, or the chain does not give the model's own logits.
        UserError: the model cannot keep the examples of a row apart, or takes no example that long.
    """
    chain = loaded.model.chain
    found = probe(chain, loaded.place, base.config.get_text_config().vocab_size)
    if not found.finite:
        cure = "fetch the model again" if chain.dtype == torch.float32 else "try --set dtype=fp32, or fetch it again"
        raise NumbersGoneBad(
            f"{found.message}; expected finite ones; the weights are damaged, or too large for {chain.dtype}: {cure}"
        )
    if not found.replay_equal:
        raise ModelError(
            f"{base.reference} cannot be trained: {found.message}; expected the model's own logits; please report "
            f"the model type {base.config.model_type!r}"
        )
    if not found.causal:
        raise ModelError(
            f"{base.reference} is no causal language model: in {type(chain.model).__name__} {found.message}; expected "
            f"tokens that see only those before them; choose a model that writes text"
        )
    if packing and not found.isolates:
        raise UserError(
            f"{base.reference} cannot take several examples in one row: {found.message}; expected one example a row; "
            f"add --set text.packing=false"
        )
    if chain.exact_up_to is not None and longest > chain.exact_up_to:
        raise UserError(
            f"the longest example has {longest} tokens; expected at most {chain.exact_up_to}, the sliding window of "
            f"{base.reference}, which is not applied to this family yet; add --set max_length={chain.exact_up_to}"
        )


def optimizer_for(loaded: Loaded, settings: AdamWSettings) -> FlatAdamW:
    """Make the optimizer of a loaded model."""
    return make_optimizer(loaded.model, settings, loaded.place)


def keep_adapter(folder: Path, loaded: Loaded, base: Base, config: Config) -> Path:
    """Write the adapter in PEFT's format; return its folder.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    with naming_what_fails(folder):
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
    plain = [f"{path}.weight" for path, layer in model.linears.items() if layer.storage.kind == "none"]
    quantized = len(plain) < len(model.linears)
    return ModelFacts(
        reference=base.reference,
        revision=base.revision,
        fingerprint=base.source.fingerprint,
        model_type=str(base.config.model_type),
        parameters=count,
        trainable=loaded.trainable,
        adapted=len(model.adapters),
        not_adapted=model.targets.frozen,
        routers=model.targets.routers,
        stacked_experts=model.targets.stacked,
        in_float=tuple(sorted([*model.loose, *plain])) if quantized else (),
        effective_scale=scales[0] if scales else 0.0,
    )
