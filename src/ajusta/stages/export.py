"""Take a tuned model out of its run folder: the adapter by itself, or merged into the base's own weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from ajusta.base.errors import UserError, nearest
from ajusta.blocks.linear import is_conv1d
from ajusta.data.tokenizer import save_tokenizer
from ajusta.engine.adapter_files import AdapterFile
from ajusta.engine.assemble import match_stored
from ajusta.engine.skeleton import build_skeleton
from ajusta.stages.base import Base
from ajusta.stages.folder import RunFolder, naming_what_fails, write_whole

FORMS = ("adapter", "merged")


def require_form(form: str) -> None:
    """Refuse a form that nothing writes.

    Raises:
        UserError: it is neither `adapter` nor `merged`.
    """
    if form not in FORMS:
        raise UserError(f"the form is {form!r}; expected {' or '.join(FORMS)}{nearest(form, FORMS)}")


def export_adapter(folder: RunFolder, out: Path) -> Path:
    """Copy the adapter, in PEFT's format, with the tokenizer and template that it was trained with.

    Raises:
        UserError: `out` holds something already.
    """

    def write(aside: Path) -> None:
        shutil.copytree(folder.tokenizer, aside)
        shutil.copytree(folder.adapter, aside, dirs_exist_ok=True)

    _make(out, write)
    return out


def export_merged(base: Base, adapter: AdapterFile, out: Path, told: Callable[[int, int], None]) -> Path:
    """Write W + s B A for every adapted linear and the other weights as they are, in the base's own dtype.

    Buffers that the base was saved with are written back as they were read.

    Merged onto the base's original weights, not onto their quantized form. A GGUF base is read as fp32, and its 4-bit
    weights are written as the bf16 numbers that they stand for.

    Raises:
        UserError: `out` holds something already.
    """
    skeleton = build_skeleton(base.config, _stored_dtype(base, base.source.infos))
    tied = {name for name, _ in skeleton.tied}
    found = {name: at for name, at in match_stored(skeleton, base.source).found.items() if name not in tied}
    dtype = _stored_dtype(base, [at for name, at in found.items() if name not in skeleton.buffers])
    transposed = {path for path, module in skeleton.linears.items() if is_conv1d(module)}

    def write(aside: Path) -> None:
        aside.mkdir(parents=True)
        tensors: dict[str, Tensor] = {}
        for name, at in found.items():
            tensor = base.source.read(at)
            path = name.removesuffix(".weight")
            if path in adapter.layers:
                pair = adapter.layers[path]
                delta = (pair.lora_B.float() @ pair.lora_A.float()).mul_(pair.scale)
                tensor = tensor.float().add_(delta.t() if path in transposed else delta)
            tensors[name] = tensor if name in skeleton.buffers else tensor.to(dtype).contiguous()
            told(len(tensors), len(found))
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        config = base.config
        config.dtype = dtype
        config.save_pretrained(aside)
        save_tokenizer(base.tokenizer, aside)
        _save_generation(base, aside)

    _make(out, write)
    return out


def _stored_dtype(base: Base, names: Iterable[str]) -> torch.dtype:
    """Return the widest float among these stored tensors; for a GGUF base the dtype that its numbers stand for."""
    kinds = {dtype for name in names if (dtype := base.source.infos[name].dtype).is_floating_point}
    if kinds == {torch.float32} and any(str(file).endswith(".gguf") for file in base.source.files):
        return torch.bfloat16
    return max(kinds, key=lambda kind: kind.itemsize)


def _save_generation(base: Base, aside: Path) -> None:
    values = {name: value for name, value in base.source.generation.items() if value is not None}
    GenerationConfig(**{**values, "eos_token_id": list(base.end_token_ids)}).save_pretrained(aside)


def _make(out: Path, write: Callable[[Path], None]) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; expected a new folder; choose another --out")
    with naming_what_fails(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, write)
