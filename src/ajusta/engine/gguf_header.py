"""The head of a GGUF file: metadata and the list of tensors, each length checked against the file before it is used.

The `gguf` package reads headers too, but builds one array object per string (2 s for a vocabulary of 49,000) and
believes every count in the file. This reader takes its constants and nothing else. Layout, little-endian:
magic, version, tensor count, pair count; pairs (name, type, value); tensors (name, sizes from the fastest, type,
offset); padding to `general.alignment`; data. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ajusta.base.errors import ModelError, nearest

_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NESTING = 3
_MAX_NAME = 256  # llama.cpp allows 64 for tensors
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor of the file; `shape` is row-major as in torch, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    stored_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Everything but the weights."""

    metadata: Mapping[str, object]  # plain values: numbers, strings, bools, lists of these
    tensors: Mapping[str, GgufTensor]
    digest: str  # hex SHA-256 of all header bytes


class _Cursor:
    """Reads forward through the mapped file; refuses to step over its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def bad(self, what: str) -> ModelError:
        """Return the error for a broken header at this place."""
        return ModelError(
            f"{self.path} is no whole GGUF file: {what} at byte {self.at} of {len(self.data)}; expected a complete "
            f"download; fetch it again"
        )

    def need(self, count: int, what: str) -> None:
        """Refuse a length that goes past the end."""
        if count > len(self.data) - self.at:
            raise self.bad(f"{what} of {count} bytes")

    def u32(self, what: str) -> int:
        """Read an unsigned number of 4 bytes."""
        self.need(4, what)
        (value,) = struct.unpack_from("<I", self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        """Read an unsigned number of 8 bytes."""
        self.need(8, what)
        (value,) = struct.unpack_from("<Q", self.data, self.at)
        self.at += 8
        return int(value)

    def count(self, what: str, min_bytes: int) -> int:
        """Read how many things follow, each of at least `min_bytes`."""
        value = self.u64(what)
        if value * min_bytes > len(self.data) - self.at:
            raise self.bad(f"a {what} of {value}")
        return value

    def text(self, what: str) -> str:
        """Read a string; bytes that are no UTF-8 are written as escapes, so that it can be shown and stays unique."""
        length = self.u64(what)
        self.need(length, what)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", errors="backslashreplace")

    def name(self, what: str) -> str:
        """Read a short printable string: what messages are made of."""
        text = self.text(what)
        if len(text) > _MAX_NAME or not text.isprintable():
            raise self.bad(f"{what} that is no name")
        return text

    def scalar(self, kind: GGUFValueType) -> object:
        """Read a number or bool."""
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: GGUFValueType, count: int) -> list[object]:
        """Read `count` numbers or bools."""
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, "a value")
        values = np.frombuffer(self.data[self.at : self.at + count * dtype.itemsize], dtype=dtype)
        self.at += count * dtype.itemsize
        if kind is GGUFValueType.FLOAT32 and count == 1:
            return [float(str(values[0]))]  # the shortest decimal that gives this float: 1e-05, not 9.99999974e-06
        return list(values.tolist())

    def value(self, kind: GGUFValueType, nesting: int = 0) -> object:
        """Read a metadata value of any type."""
        if kind is GGUFValueType.STRING:
            return self.text("a string")
        if kind is not GGUFValueType.ARRAY:
            return self.scalar(kind)
        if nesting >= _MAX_NESTING:
            raise self.bad("arrays nested too deep")
        inner = self.kind()
        if inner in _SCALARS:
            return self.numbers(inner, self.count("list", np.dtype(_SCALARS[inner]).itemsize))
        smallest = 8 if inner is GGUFValueType.STRING else 12
        return [self.value(inner, nesting + 1) for _ in range(self.count("list", smallest))]

    def kind(self) -> GGUFValueType:
        """Read the type of a value."""
        raw = self.u32("a value type")
        try:
            return GGUFValueType(raw)
        except ValueError as error:
            raise self.bad(f"unknown value type {raw}") from error


def read_header(path: Path) -> GgufHeader:
    """Read and check the head of a GGUF file; the weights are not touched.

    Raises:
        ModelError: not GGUF, truncated, an absurd length, an unknown type, overlapping the end; one line each.
    """
    if path.stat().st_size < 24:
        raise ModelError(f"{path} has {path.stat().st_size} bytes; expected a GGUF file; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        _check_magic(cursor)
        num_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES)
        num_pairs = cursor.count("metadata count", _MIN_PAIR_BYTES)
        metadata: dict[str, object] = {}
        for _ in range(num_pairs):
            name = cursor.name("a metadata name")
            metadata[name] = cursor.value(cursor.kind())
        raw = [_tensor_entry(cursor) for _ in range(num_tensors)]
        start = _data_start(cursor, metadata)
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in raw:
            if name in tensors:
                raise cursor.bad(f"tensor {name} named twice")
            tensors[name] = _placed(cursor, name, shape, kind, start + offset)
        return GgufHeader(metadata=metadata, tensors=tensors, digest=hashlib.sha256(data[: cursor.at]).hexdigest())


def _check_magic(cursor: _Cursor) -> None:
    magic = cursor.data[:4]
    if magic != b"GGUF":
        raise ModelError(
            f"{cursor.path} begins with {magic!r}; expected a GGUF file (b'GGUF'); check the file or fetch it again"
        )
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in _VERSIONS:
        hint = "a big-endian file" if version and version % 65536 == 0 else f"GGUF version {version}"
        raise ModelError(f"{cursor.path} is {hint}; expected little-endian version 2 or 3; convert it with llama.cpp")


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.name("a tensor name")
    num_dims = cursor.u32("a dimension count")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.bad(f"tensor {name} with {num_dims} dimensions")
    sizes = [cursor.u64("a dimension") for _ in range(num_dims)]
    raw = cursor.u32("a tensor type")
    try:
        kind = GGMLQuantizationType(raw)
    except ValueError as error:
        names = ", ".join(entry.name for entry in GGMLQuantizationType)
        raise ModelError(
            f"{cursor.path}: tensor {name} has the unknown quantization type {raw}; expected one of {names}; "
            f"requantize the file or install a newer gguf package"
        ) from error
    return name, tuple(reversed(sizes)), kind, cursor.u64("a tensor offset")


def _data_start(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.bad(f"alignment {ascii(alignment)[:60]}")
    return -(-cursor.at // alignment) * alignment


def _placed(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int) -> GgufTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise cursor.bad(f"tensor {name}, whose rows of {shape[-1]} are no whole {kind.name} blocks of {block},")
    stored_bytes = prod(shape) // block * block_bytes
    if offset + stored_bytes > len(cursor.data):
        raise ModelError(
            f"{cursor.path} ends at byte {len(cursor.data)}, but tensor {name} ends at {offset + stored_bytes}; "
            f"expected a complete download; fetch it again"
        )
    return GgufTensor(name=name, shape=shape, kind=kind, offset=offset, stored_bytes=stored_bytes)


def number(metadata: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return a number of the metadata.

    Raises:
        ModelError: it is missing without a default, or no single number (some models give one a layer).
    """
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        near = nearest(key, metadata)
        raise ModelError(
            f"GGUF metadata {key} is {ascii(value)[:60]}; expected one number{near}; use the model's safetensors folder"
        )
    return value
