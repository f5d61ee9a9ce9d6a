"""Adapters on disk, in PEFT's format both ways: stock PEFT opens ours, we open PEFT's.

    adapter_model.safetensors   base_model.model.<path>.lora_A.weight [R, I], ...lora_B.weight [O, R]
    adapter_config.json         rank, alpha, how the scale is made, which modules
    ajusta.json                 what only ajusta knows (the base's fingerprint); PEFT never looks at it

The scale is read from the adapter's own config, never from the run's: alpha / sqrt(r) where `use_rslora`, alpha / r
otherwise, with PEFT's per-layer patterns. Whatever we cannot reproduce is refused by name, never ignored. Nothing is
unpickled. Format: PEFT 0.21, "Checkpoint format" in its documentation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ajusta.base.errors import ModelError
from ajusta.blocks.lora import LoraLinear, lora_scale

CONFIG_NAME, TENSORS_NAME, FACTS_NAME = "adapter_config.json", "adapter_model.safetensors", "ajusta.json"
_PREFIX = "base_model.model."
_KEY = re.compile(rf"{re.escape(_PREFIX)}(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
# Settings under which the adapter is more than W + s B A.
_UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "use_qalora",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "monteclora_config",
    "kasa_config",
    "megatron_config",
)
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", None)  # the others change the base's own weights


@dataclass(frozen=True, kw_only=True)
class LayerPair:
    """One layer's adapter as it is on disk: A [R, I], B [O, R], and the scale that its config gives it."""

    lora_A: Tensor
    lora_B: Tensor
    scale: float


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """An adapter read from a folder; `layers` by the full path of the module in the base model."""

    folder: Path
    layers: Mapping[str, LayerPair]
    rank_stabilized: bool
    base_reference: str | None
    base_fingerprint: str | None
    config: Mapping[str, object] = field(repr=False)

    @property
    def scales(self) -> tuple[float, ...]:
        """The distinct effective scales, ascending: what the person is shown."""
        return tuple(sorted({pair.scale for pair in self.layers.values()}))


def save_adapter(
    folder: Path,
    layers: Mapping[str, LoraLinear],
    *,
    rank_stabilized: bool,
    module_paths: Iterable[str],
    base_reference: str,
    base_fingerprint: str | None = None,
    dropout: float = 0.0,
) -> None:
    """Write `layers` (by full path) as a PEFT adapter: into a folder aside, synced to disk, then renamed into place.

    `module_paths`: every module of the model, so that the names written mean these layers and no other. A folder that
    exists is updated file by file, the tensors last. Per-layer ranks and alphas go into PEFT's patterns.
    """
    config = _config(layers, rank_stabilized, list(module_paths), base_reference) | {"lora_dropout": dropout}
    tensors = {}
    for path, layer in layers.items():
        for side in ("A", "B"):
            number = layer.get_parameter(f"lora_{side}").detach()
            tensors[f"{_PREFIX}{path}.lora_{side}.weight"] = number.to(device="cpu", dtype=torch.float32).contiguous()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    (aside / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (aside / FACTS_NAME).write_text(
        json.dumps({"base_fingerprint": base_fingerprint}, indent=2) + "\n", encoding="utf-8"
    )
    save_file(tensors, aside / TENSORS_NAME, metadata={"format": "pt"})
    _put_in_place(aside, folder)


def read_adapter(folder: Path) -> AdapterFile:
    """Read a PEFT LoRA adapter (ours or anybody's), its numbers as they are stored.

    Raises:
        ModelError: a file is missing or damaged, the adapter is a pickle or no plain LoRA, or its parts disagree.
    """
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    stabilized = bool(config.get("use_rslora", False))
    layers = {}
    for path, sides in _by_path(tensors, folder).items():
        lora_A, lora_B = sides["A"], sides["B"]
        rank = int(_pattern_value(config.get("rank_pattern"), path, config["r"]))
        alpha = float(_pattern_value(config.get("alpha_pattern"), path, config["lora_alpha"]))
        if lora_A.dim() != 2 or lora_B.dim() != 2 or {lora_A.shape[0], lora_B.shape[1]} != {rank}:
            raise ModelError(
                f"{folder}: {path} has A {list(lora_A.shape)} and B {list(lora_B.shape)}, but {CONFIG_NAME} says rank "
                f"{rank}; config and tensors are not of the same training; take both from one place"
            )
        layers[path] = LayerPair(lora_A=lora_A, lora_B=lora_B, scale=lora_scale(rank, alpha, stabilized))
    facts = _read_json(folder / FACTS_NAME) if (folder / FACTS_NAME).exists() else {}
    return AdapterFile(
        folder=folder,
        layers=layers,
        rank_stabilized=stabilized,
        base_reference=config.get("base_model_name_or_path"),
        base_fingerprint=facts.get("base_fingerprint"),
        config=config,
    )


@torch.no_grad()
def load_into(layers: Mapping[str, LoraLinear], file: AdapterFile) -> int:
    """Put the file's numbers and scales into `layers` (by full path); return how many layers were filled.

    A layer of another rank gets new parameters of the file's rank: make the optimizer afterwards.

    Raises:
        ModelError: the file misses a layer, has one too many, or a shape does not fit; with counts and an example.
    """
    missing = [path for path in layers if path not in file.layers]
    unexpected = [path for path in file.layers if path not in layers]
    if missing or unexpected:
        examples = [f"missing: {missing[0]}"] * bool(missing) + [f"unexpected: {unexpected[0]}"] * bool(unexpected)
        matched = len(layers) - len(missing)
        raise ModelError(
            f"{file.folder}: {matched} of {len(layers)} adapted layers are in the file, {len(missing)} are missing and "
            f"{len(unexpected)} are unexpected ({'; '.join(examples)}); the adapter was trained on other layers or "
            "another model: open it with the base model and targets that it names"
        )
    for path, pair in file.layers.items():
        layer = layers[path]
        if pair.lora_A.shape[1] != layer.in_features or pair.lora_B.shape[0] != layer.out_features:
            raise ModelError(
                f"{file.folder}: {path} is made for {pair.lora_A.shape[1]} inputs and {pair.lora_B.shape[0]} outputs; "
                f"the model's layer has {layer.in_features} and {layer.out_features}; open it with its own base model"
            )
        _fill(layer, pair)
    return len(file.layers)


def _fill(layer: LoraLinear, pair: LayerPair) -> None:
    layer.scale = pair.scale
    for name, number in (("lora_A", pair.lora_A), ("lora_B", pair.lora_B)):
        old = layer.get_parameter(name)
        if old.shape == number.shape and not old.is_meta:
            old.copy_(number)
        else:
            device = "cpu" if old.is_meta else old.device
            setattr(layer, name, nn.Parameter(number.to(device=device, dtype=old.dtype, copy=True)))


def _config(
    layers: Mapping[str, LoraLinear], rank_stabilized: bool, module_paths: list[str], base_reference: str
) -> dict[str, object]:
    """Return what PEFT needs to rebuild these layers: the commonest rank and alpha, and patterns for the others."""
    assert layers, "an adapter has at least one layer"
    ranks = {path: layer.rank for path, layer in layers.items()}
    alphas = {path: _alpha(layer, rank_stabilized) for path, layer in layers.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_reference,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rank_stabilized,
        "bias": "none",
        "fan_in_fan_out": all(layer.base.transposed for layer in layers.values()),
        "inference_mode": True,
        "target_modules": target_names(module_paths, list(layers)),
        "rank_pattern": {f"^{re.escape(path)}": value for path, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{re.escape(path)}": value for path, value in alphas.items() if value != alpha},
    }


def _alpha(layer: LoraLinear, rank_stabilized: bool) -> float | int:
    alpha = round(layer.scale / lora_scale(layer.rank, 1.0, rank_stabilized), 9)
    return int(alpha) if alpha == int(alpha) else alpha


def target_names(module_paths: list[str], adapted: list[str]) -> list[str]:
    """Return the last names ("q_proj", ...) where they mean exactly the adapted paths, else the full paths.

    PEFT takes a name for every module whose path is it or ends in it at a dot.
    """
    short = sorted({path.rpartition(".")[2] for path in adapted})
    meant = {path for path in module_paths if path.rpartition(".")[2] in short}
    return short if meant == set(adapted) else sorted(adapted)


def _put_in_place(aside: Path, folder: Path) -> None:
    for name in (CONFIG_NAME, FACTS_NAME, TENSORS_NAME):
        _sync(aside / name)
    _sync(aside)
    if folder.exists():
        for name in (CONFIG_NAME, FACTS_NAME, TENSORS_NAME):
            os.replace(aside / name, folder / name)
        _sync(folder)
        aside.rmdir()
    else:
        os.rename(aside, folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Force a file or folder onto the disk, so that a power cut after the rename finds it whole."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is no JSON ({error}); the file is damaged: copy or download it again") from error
    if not isinstance(read, dict):
        raise ModelError(f"{path} holds {type(read).__name__}; expected a JSON object; copy or download it again")
    return read


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if not path.is_file():
        there = (
            ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) if folder.is_dir() else "no such folder"
        )
        raise ModelError(
            f"{folder} has no {CONFIG_NAME} ({there}); expected a PEFT adapter; give the adapter's own folder"
        )
    config = _read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{folder} is a {config.get('peft_type')} adapter; ajusta opens LORA; merge it with PEFT first"
        )
    wrong = [f"{key}={config[key]!r}" for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        wrong.append(f"bias={config['bias']!r}")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        wrong.append(f"init_lora_weights={config['init_lora_weights']!r} (it changes the base's weights)")
    absent = [key for key in ("r", "lora_alpha") if key not in config]
    if wrong or absent:
        said = [f"uses {', '.join(wrong)}"] * bool(wrong) + [f"does not give {', '.join(absent)}"] * bool(absent)
        raise ModelError(
            f"{path} {' and '.join(said)}; ajusta opens plain LoRA only; merge the adapter with PEFT first"
        )
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / TENSORS_NAME
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").exists()
        why = "adapter_model.bin is a pickle, which can run code and is never opened" if pickled else "nothing to load"
        raise ModelError(f"{folder} has no {TENSORS_NAME}: {why}; save the adapter with safe_serialization=True")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open has no other way)
    except SafetensorError as error:
        raise ModelError(f"{path} cannot be read ({error}); it is cut off or damaged: copy it again") from error


def _by_path(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, dict[str, Tensor]]:
    """Group the tensors by layer; refuse what is neither an A nor a B, and halves."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ModelError(
                f"{folder}: {key!r} is no LoRA matrix of a linear layer; expected {_PREFIX}<module>.lora_A.weight or "
                "lora_B.weight; merge the adapter with PEFT first"
            )
        layers.setdefault(match["path"], {})[match["side"]] = tensor
    halves = [path for path, sides in layers.items() if len(sides) != 2]
    if halves or not layers:
        raise ModelError(
            f"{folder}: {len(halves)} of {len(layers)} layers have only one of lora_A and lora_B"
            + (f" (first: {halves[0]})" if halves else "")
            + "; the file is incomplete: save or copy it again"
        )
    return layers


def _pattern_value(patterns: Mapping[str, float] | None, path: str, default: float) -> float:
    """Return the value of the first pattern that means `path`, as PEFT decides it: a regular expression for its end."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default
