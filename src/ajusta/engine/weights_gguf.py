"""A .gguf file as a `WeightSource`: transformers' names and layouts, decoded once, in tiles.

llama.cpp's converter changes four things that are undone here:
  llama  q/k rows: its rotation pairs neighbours (2i, 2i+1), transformers' pairs (i, i + half); rows are reordered
  bloom  fused q/k/v rows: stored [3, heads, dim], transformers wants [heads, 3, dim]; rows are reordered
  gpt2   Conv1D weights [in, out] are stored transposed
  gemma2 norms are stored with 1 added
Decoding is the `gguf` package's own `dequantize`; blocks are independent, so tiles of rows give the same bits, and
the peak is the tensor and one tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.engine.gguf_config import config_of, generation_of
from ajusta.engine.gguf_header import GgufHeader, GgufTensor, read_header
from ajusta.engine.weights_base import TensorInfo, check_rows, fingerprint_of, one_line

_ROPE_FREQS = "rope_freqs.weight"
_TILE_ELEMENTS = 1 << 16  # 256 KiB of float32: measured best, the unpacking stays in the second-level cache
_PLAIN = {
    GGMLQuantizationType.F32: (torch.float32, "<f4"),
    GGMLQuantizationType.F16: (torch.float16, "<f2"),
    GGMLQuantizationType.F64: (torch.float64, "<f8"),
    GGMLQuantizationType.BF16: (torch.bfloat16, "<u2"),
}


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What to undo: HF row i is stored row `row_order[i]`; the matrix is transposed; a number was added."""

    row_order: NDArray[np.int64] | None = None
    transposed: bool = False
    added: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Mapped:
    """A transformers parameter and where it comes from."""

    tensor: GgufTensor
    layout: _Layout
    info: TensorInfo


class GgufSource:
    """The weights of one .gguf file, read one tensor at a time (see `WeightSource`)."""

    def __init__(self, file: Path, *, reference: str | None = None) -> None:
        """Read the header, build the configuration and match every tensor; no weight is read yet.

        Raises:
            ModelError: anything that would stop the weights from being read.
        """
        self.reference = reference or str(file)
        self.files = (file,)
        self._header: GgufHeader = read_header(file)
        self.metadata: Mapping[str, object] = self._header.metadata  # the tokenizer is in here
        freqs = self._header.tensors.get(_ROPE_FREQS)
        divisors = None if freqs is None else _freqs(file, freqs)
        self.config: PretrainedConfig = config_of(self._header, divisors, str(file))
        self.generation: Mapping[str, object] = generation_of(self.metadata)
        self._mapped = _map_tensors(self._header, self.config, file)
        self.infos: Mapping[str, TensorInfo] = {name: mapped.info for name, mapped in self._mapped.items()}

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over the whole header and a sample of the data; see `fingerprint_of`."""
        return fingerprint_of({"header": self._header.digest}, self.infos, self.files)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor in transformers' layout, fresh; see `WeightSource.read`."""
        mapped = self._mapped[name]
        return self._decode(mapped, 0, mapped.info.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` in transformers' layout, fresh; see `WeightSource.read_rows`."""
        mapped = self._mapped[name]
        check_rows(mapped.info, start, stop)
        return self._decode(mapped, start, stop)

    def _decode(self, mapped: _Mapped, start: int, stop: int) -> torch.Tensor:
        tensor, layout = mapped.tensor, mapped.layout
        out = torch.empty((stop - start, *mapped.info.shape[1:]), dtype=mapped.info.dtype)
        # Stored rows: all of them if the matrix is transposed (a row of ours is then a column), else only ours.
        first, last = (0, tensor.shape[0]) if layout.transposed else (start, stop)
        if len(tensor.shape) == 1:
            out.copy_(_decode_rows(self.files[0], tensor, layout.row_order, 0, 1)[0, start:stop])
            first = last  # a vector is one row of blocks
        step = max(1, _TILE_ELEMENTS // tensor.shape[-1])
        for begin in range(first, last, step):
            end = min(begin + step, last)
            tile = _decode_rows(self.files[0], tensor, layout.row_order, begin, end)
            if layout.transposed:
                out[:, begin:end] = tile[:, start:stop].T
            else:
                out[begin - start : end - start] = tile
        return out.sub_(layout.added) if layout.added else out


def _decode_rows(file: Path, tensor: GgufTensor, order: NDArray[np.int64] | None, begin: int, end: int) -> torch.Tensor:
    """Return stored rows `order[begin:end]` (or `begin:end`) as [rows, width]; a vector is a single row."""
    vector = len(tensor.shape) == 1
    rows = 1 if vector else tensor.shape[0]
    width = tensor.shape[-1]
    row_bytes = tensor.stored_bytes // rows
    if order is None or vector:
        offset = tensor.offset + begin * row_bytes
        raw = np.fromfile(file, dtype=np.uint8, count=(end - begin) * row_bytes, offset=offset)
    else:
        mapped = np.memmap(file, dtype=np.uint8, mode="r", offset=tensor.offset, shape=(rows, row_bytes))
        raw = mapped[order[begin:end]].reshape(-1)
    if raw.size != (end - begin) * row_bytes:
        raise ModelError(
            f"{file} ends inside tensor {tensor.name}; expected the size it had when opened; fetch it again"
        )
    if tensor.kind in _PLAIN:
        dtype, number = _PLAIN[tensor.kind]
        decoded = torch.from_numpy(raw.view(number)).view(dtype)
    else:
        # One long row: `dequantize` walks a matrix 16 rows at a time, which for narrow ones is mostly overhead.
        decoded = torch.from_numpy(gguf.dequantize(raw.reshape(1, -1), tensor.kind))
    decoded = decoded.reshape(end - begin, width)
    return decoded[:, torch.from_numpy(order)] if vector and order is not None else decoded


def _freqs(file: Path, tensor: GgufTensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = _decode_rows(file, tensor, None, 0, 1)[0].float().numpy()
    return values


def _map_tensors(header: GgufHeader, config: PretrainedConfig, file: Path) -> dict[str, _Mapped]:
    """Match every parameter of the model with a stored tensor; nothing may be left over on either side."""
    model = _on_meta(config, file)
    names = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(names[config.model_type], int(config.num_hidden_layers))
    expected = dict(model.named_parameters())  # tied ones once
    mapped: dict[str, _Mapped] = {}
    missing: list[str] = []
    for name, parameter in expected.items():
        stored = _stored_name(table, name, model.base_model_prefix)
        tensor = header.tensors.get(stored or "")
        if tensor is None:
            missing.append(f"{name} ({stored})" if stored else name)
            continue
        _check_shape(file, name, tensor, tuple(parameter.shape), _is_transposed(name, config))
        layout = _layout_of(name, config)
        info = TensorInfo(shape=tuple(parameter.shape), dtype=_dtype_of(file, tensor), stored_bytes=tensor.stored_bytes)
        mapped[name] = _Mapped(tensor=tensor, layout=layout, info=info)
    used = {entry.tensor.name for entry in mapped.values()} | {_ROPE_FREQS}
    unexpected = sorted(set(header.tensors) - used)
    if missing or unexpected:
        raise ModelError(
            f"{file} does not hold a plain {config.model_type} model: missing {', '.join(missing[:6]) or 'nothing'}; "
            f"unexpected {', '.join(unexpected[:6]) or 'nothing'}; use the model's safetensors folder"
        )
    return mapped


def _on_meta(config: PretrainedConfig, file: Path) -> PreTrainedModel:
    """Build the model without memory: its parameters are the names and shapes to look for."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
        raise ModelError(
            f"{file} describes an impossible {config.model_type} model ({one_line(error)}); fetch it again"
        ) from error


def _stored_name(table: gguf.TensorNameMap, name: str, base_prefix: str) -> str | None:
    for form in (name, name.removeprefix(f"{base_prefix}.")):
        stored = table.get_name(form, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            return str(stored)
    return None


def _layout_of(name: str, config: PretrainedConfig) -> _Layout:
    part = name.rsplit(".", 2)[-2]
    if config.model_type == "llama" and part in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if part == "q_proj" else config.num_key_value_heads
        pairs = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
        return _Layout(row_order=pairs.swapaxes(1, 2).reshape(-1))
    if config.model_type == "bloom" and part == "query_key_value":
        rows = np.arange(3 * config.hidden_size).reshape(3, config.n_head, config.hidden_size // config.n_head)
        return _Layout(row_order=rows.swapaxes(0, 1).reshape(-1))
    if _is_transposed(name, config):
        return _Layout(transposed=True)
    if config.model_type == "gemma2" and name.endswith("norm.weight"):
        return _Layout(added=1.0)
    return _Layout()


def _is_transposed(name: str, config: PretrainedConfig) -> bool:
    part = name.rsplit(".", 2)[-2]
    return config.model_type == "gpt2" and part in ("c_attn", "c_proj", "c_fc") and name.endswith(".weight")


def _check_shape(file: Path, name: str, tensor: GgufTensor, wanted: tuple[int, ...], transposed: bool) -> None:
    shape = tensor.shape[::-1] if transposed else tensor.shape
    if shape != wanted:
        raise ModelError(
            f"{file}: {tensor.name} has the shape {list(shape)}; expected {list(wanted)} for {name}; the metadata and "
            f"the tensors do not belong together, fetch the file again"
        )


def _dtype_of(file: Path, tensor: GgufTensor) -> torch.dtype:
    if tensor.kind in _PLAIN:
        return _PLAIN[tensor.kind][0]
    if tensor.kind in _DECODABLE:
        return torch.float32
    known = ", ".join(sorted(kind.name for kind in (*_PLAIN, *_DECODABLE)))
    raise ModelError(
        f"{file}: {tensor.name} is stored as {tensor.kind.name}; expected one of {known}; requantize the file"
    )


def _can_decode(kind: GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


_DECODABLE = frozenset(kind for kind in GGMLQuantizationType if kind not in _PLAIN and _can_decode(kind))
