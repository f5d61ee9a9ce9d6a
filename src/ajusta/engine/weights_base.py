"""What a checkpoint is to the rest of the engine: a configuration, a list of tensors, and a way to read one of them.

A `WeightSource` never holds weights. Files are read at an offset into a fresh tensor, not mapped: mapped pages would
count as resident memory, and the promise is "final size + the largest tensor". So a source can be kept open for a
whole run at no cost, and reading the same tensor twice costs two reads of the page cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from transformers import PretrainedConfig

from ajusta.blocks.storage import Storage

SAMPLE_BYTES = 1024
SAMPLES_PER_FILE = 16


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One stored tensor, as it will be after reading (transformers' layout, not the file's)."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor that `read` returns; a block-quantized GGUF tensor is read as float32
    stored_bytes: int  # in the file

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def read_bytes(self) -> int:
        """Bytes of the tensor that `read` returns."""
        return self.num_elements * self.dtype.itemsize


class WeightSource(Protocol):
    """A checkpoint on disk, read tensor by tensor."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration, with `architectures` filled where the file tells the model type."""

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Stored tensors by name. GGUF names are already transformers' names; safetensors names are as stored."""

    @property
    def reference(self) -> str:
        """What the user typed: a hub name, a folder or a file."""

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 that tells two checkpoints apart without reading all of either; see `fingerprint_of`."""

    @property
    def generation(self) -> Mapping[str, object]:
        """Values of generation_config.json, or what takes their place (end, begin and pad token ids)."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""

    def read(self, name: str) -> torch.Tensor:
        """Return a fresh, contiguous CPU tensor of `infos[name]`'s shape and dtype; nothing else keeps a copy.

        Raises:
            KeyError: no such tensor.
            ModelError: the file changed or ends too early.
        """

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` of the first dimension, fresh; the rest of the tensor is not decoded.

        Raises:
            KeyError: no such tensor.
            IndexError: the rows are outside the tensor.
        """


@runtime_checkable
class HoldsStorages(Protocol):
    """A source in which some weights are stored quantized, and need not be rounded again."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """How each quantized weight is stored, by its name: nf4 | int8."""

    def storage(self, name: str, *, shapes_only: bool = False) -> Storage:
        """Return one of them as it is stored; with `shapes_only` on `meta`, for a plan.

        Raises:
            ModelError: a part of it is missing or does not fit.
        """


def with_storages(source: object) -> HoldsStorages | None:
    """Return the source as one that holds quantized weights, None where it holds none."""
    return source if isinstance(source, HoldsStorages) and source.kinds else None


def one_line(error: Exception) -> str:
    """Return another library's complaint as one line of at most 300 letters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def check_rows(info: TensorInfo, start: int, stop: int) -> None:
    """Hold `0 <= start < stop <= rows`.

    Raises:
        IndexError: the rows are outside the tensor, or the tensor has no rows.
    """
    rows = info.shape[0] if info.shape else 0
    if not 0 <= start < stop <= rows:
        raise IndexError(f"rows {start}:{stop} of a tensor with {rows} rows")


def fingerprint_of(facts: Mapping[str, object], infos: Mapping[str, TensorInfo], files: Sequence[Path]) -> str:
    """Return a hex SHA-256 over the configuration as stored, every name, shape and dtype, and a sample of the files.

    The sample is 1 KiB at 16 evenly spaced places of each file, the first and the last KiB among them, with the
    file's size. So another model, another revision, another quantization or a truncated file is told apart in
    milliseconds; a file changed by hand in a few bytes between the samples is not. Paths and file names do not
    count: a moved or renamed checkpoint is the same one.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in sorted(infos):
        info = infos[name]
        digest.update(f"{name}|{list(info.shape)}|{info.dtype}\n".encode())
    for sample in sorted(_sample(path) for path in files):
        digest.update(sample)
    return digest.hexdigest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    last = max(size - SAMPLE_BYTES, 0)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for index in range(SAMPLES_PER_FILE):
            file.seek(last * index // (SAMPLES_PER_FILE - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
