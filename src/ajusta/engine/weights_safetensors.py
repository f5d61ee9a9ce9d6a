"""A Hugging Face folder of safetensors files, single or sharded, as a `WeightSource`.

safetensors checks each header (its length, JSON, and that the tensors fill the file exactly); the tensors are then
read by offset. Nothing is unpickled: .bin and .pt files are refused. Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from ajusta.base.errors import ModelError
from ajusta.engine.weights_base import TensorInfo, check_rows, fingerprint_of, one_line
from ajusta.engine.weights_config import read_config, read_generation, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a tensor lies: bytes `offset : offset + info.stored_bytes` of `path`."""

    path: Path
    offset: int
    info: TensorInfo


class SafetensorsSource:
    """The weights of a folder, read one tensor at a time (see `WeightSource`)."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False, reference: str | None = None) -> None:
        """Read the configuration and every header; no weight is read yet.

        Raises:
            ModelError: anything that would stop the weights from being read.
        """
        self.reference = reference or str(folder)
        self.config: PretrainedConfig
        self.config, self._facts = read_config(folder, trust_remote_code, may_be_quantized=True)
        self.generation: Mapping[str, object] = read_generation(folder, self._facts)
        self.files = _weight_files(folder)
        self.is_quantized = "quantization_config" in self._facts  # by bitsandbytes: others were refused
        self._stored: dict[str, _Stored] = {}
        for path in self.files:
            for name, stored in _read_header(path).items():
                if name in self._stored:
                    other = self._stored[name].path.name
                    raise ModelError(f"{path} and {other} both hold {name}; expected it once; fetch the folder again")
                self._stored[name] = stored
        self.infos: Mapping[str, TensorInfo] = {name: stored.info for name, stored in self._stored.items()}
        _check_index(folder, self._stored)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over config.json, the tensors' names, shapes, dtypes, and a sample; see `fingerprint_of`."""
        return fingerprint_of(self._facts, self.infos, self.files)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor, fresh; see `WeightSource.read`."""
        info = self._stored[name].info
        tensor = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill a contiguous tensor of the stored dtype and size, without a second copy.

        Raises:
            KeyError: no such tensor.
            ModelError: the file changed or ends too early.
        """
        stored = self._stored[name]
        _read_at(stored, stored.offset, out)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop`, fresh; see `WeightSource.read_rows`."""
        stored = self._stored[name]
        check_rows(stored.info, start, stop)
        row_bytes = stored.info.stored_bytes // stored.info.shape[0]
        rows = torch.empty((stop - start, *stored.info.shape[1:]), dtype=stored.info.dtype)
        _read_at(stored, stored.offset + start * row_bytes, rows)
        return rows


def _read_at(stored: _Stored, offset: int, out: torch.Tensor) -> None:
    assert out.is_contiguous() and out.dtype == stored.info.dtype
    if out.numel() == 0:
        return
    # Straight into the tensor's own memory: no buffer, no second copy.
    into = out.view(-1).view(torch.uint8).numpy()
    with stored.path.open("rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        view = into.data
        while done < len(view):  # one call returns at most 2 GiB
            count = file.readinto(view[done:])
            if not count:
                raise ModelError(
                    f"{stored.path} ends too early; expected {len(view) - done} bytes more; fetch it again"
                )
            done += count


def _weight_files(folder: Path) -> tuple[Path, ...]:
    single, index = folder / SINGLE, folder / INDEX
    if index.is_file():
        return _sharded_files(folder, index)
    if single.is_file():
        return (single,)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return (others[0],)
    there = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    pickles = [name for name in there if name.endswith(PICKLES)]
    ggufs = [name for name in there if name.endswith(".gguf")]
    if others:
        raise ModelError(
            f"{folder} has {len(others)} safetensors files and no {INDEX}; expected the index that says which tensor "
            f"is where; fetch the folder again"
        )
    if ggufs:
        raise ModelError(f"{folder} has no {SINGLE} but GGUF files; give one of them as the model: {folder / ggufs[0]}")
    if pickles:
        raise ModelError(
            f"{folder} has its weights only as pickle ({', '.join(pickles[:4])}), which can run code and is never "
            f"loaded; expected {SINGLE}; convert it where you trust it (transformers' save_pretrained writes "
            f"safetensors), or look for the hub's refs/convert/safetensors or refs/pr revision"
        )
    listed = ", ".join(there[:12]) or "nothing"
    raise ModelError(f"{folder} has no weights (it holds {listed}); expected {SINGLE} or {INDEX} with its shards")


def _sharded_files(folder: Path, index: Path) -> tuple[Path, ...]:
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index} points to {name!r}; expected safetensors files of the same folder; do not trust it"
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        there = ", ".join(path.name for path in sorted(folder.glob("*.safetensors"))) or "none"
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:6])}; on disk: {there}; fetch "
            f"the rest (the download resumes)"
        )
    return tuple(folder / name for name in names)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; expected one from tensor names to files; fetch it again")
    if not all(isinstance(value, str) for value in weight_map.values()):
        raise ModelError(f"{index} maps tensors to things that are no file names; fetch it again")
    return {str(name): str(file) for name, file in weight_map.items()}


def _check_index(folder: Path, stored: Mapping[str, _Stored]) -> None:
    index = folder / INDEX
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in stored:
            raise ModelError(f"{index} promises {name} in {file}, which does not hold it; fetch both again")


def _read_header(path: Path) -> dict[str, _Stored]:
    size = path.stat().st_size
    try:
        with safe_open(path, framework="numpy"):  # checks everything; nothing is loaded
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} ({size} bytes) is no whole safetensors file ({one_line(error)}); expected a complete download; "
            f"fetch it again"
        ) from error
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(
                f"{path}: {name} is stored as {entry['dtype']}; expected one of {', '.join(_DTYPES)}; choose the "
                f"model's plain version"
            )
        info = TensorInfo(shape=tuple(entry["shape"]), dtype=dtype, stored_bytes=end - begin)
        stored[name] = _Stored(path=path, offset=8 + length + begin, info=info)
    return stored
