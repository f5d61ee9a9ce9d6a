"""A checkpoint whose experts are stored one by one, read as the stacked tensors that transformers' classes hold.

Hub checkpoints of mixtures of experts hold `experts.3.gate_proj.weight`; the model holds `experts.gate_up_proj`, all
experts in one tensor (and some families hold q, k and v in one). Which stored tensors make one up is told by
transformers' own tables (transformers/core_model_loading.py, WeightConverter). Two of its operations are followed:
`MergeModulelist(dim=0)`, a tensor for each number, and `Concatenate`, one behind the other along the next dimension. A
tensor made by them is its parts laid end to end in memory: number by number, and for each number kind by kind. So each
part is read straight to its place, and nothing is held beside the whole.

Whatever other operation a table asks for is not followed; its tensors keep their stored names, and are refused by name
where the model has no place for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from ajusta.base.errors import ModelError
from ajusta.engine.weights_base import TensorInfo, check_rows
from ajusta.engine.weights_safetensors import SafetensorsSource

_SHOWN = 6
# What a foreign model class raises when it cannot be built; engine/skeleton.py says so where it matters.
_FOREIGN = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, ArithmeticError, ImportError)


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A tensor of the model that several stored ones make up, in the order in which they lie in it."""

    info: TensorInfo
    parts: tuple[str, ...]


class MergedSource:
    """A folder of safetensors in which some tensors are made of several stored ones (see `WeightSource`)."""

    def __init__(self, source: SafetensorsSource, merges: Mapping[str, Merge]) -> None:
        self._source, self._merges = source, merges
        self.config: PretrainedConfig = source.config
        self.reference: str = source.reference
        self.generation: Mapping[str, object] = source.generation
        self.files: tuple[Path, ...] = source.files
        used = {part for merge in merges.values() for part in merge.parts}
        alone = {name: info for name, info in source.infos.items() if name not in used}
        self.infos: Mapping[str, TensorInfo] = alone | {name: merge.info for name, merge in merges.items()}

    @property
    def fingerprint(self) -> str:
        """That of the checkpoint as it is stored."""
        return self._source.fingerprint

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor, fresh; see `WeightSource.read`."""
        if name not in self._merges:
            return self._source.read(name)
        return self._read(self._merges[name], 0, self._merges[name].info.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop`, fresh; see `WeightSource.read_rows`."""
        if name not in self._merges:
            return self._source.read_rows(name, start, stop)
        check_rows(self._merges[name].info, start, stop)
        return self._read(self._merges[name], start, stop)

    def _read(self, merge: Merge, start: int, stop: int) -> torch.Tensor:
        """Read rows of the whole; a part is read in full, or of the last and the first one the rows that are asked."""
        shape, dtype = merge.info.shape, merge.info.dtype
        out = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        flat, row = out.view(-1), merge.info.num_elements // shape[0]
        begin, end, at = start * row, stop * row, 0
        for part in merge.parts:
            info = self._source.infos[part]
            low, high = max(begin, at), min(end, at + info.num_elements)
            if low < high:
                into = flat[low - begin : high - begin]
                if high - low == info.num_elements:
                    self._source.read_into(part, into)
                else:
                    width = info.num_elements // info.shape[0]
                    into.copy_(self._source.read_rows(part, (low - at) // width, (high - at) // width).view(-1))
            at += info.num_elements
        return out


def merged(source: SafetensorsSource) -> SafetensorsSource | MergedSource:
    """Return the source with single experts merged, where transformers' tables say so; the source itself elsewhere.

    Raises:
        ModelError: some of the parts of a tensor are missing, or they do not fit together.
    """
    kinds = {source.config.model_type, source.config.get_text_config().model_type}
    tables = [entry for kind in kinds for entry in get_checkpoint_conversion_mapping(kind) or ()]
    if not any(isinstance(entry, WeightConverter) for entry in tables):
        return source
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(source.config)
    except _FOREIGN:
        return source
    merges = dict(_find(source, model))
    return MergedSource(source, merges) if merges else source


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A stored tensor with its number (0 where there is none) and which of the converter's kinds it is."""

    name: str
    number: int
    kind: int


def _find(source: SafetensorsSource, model: PreTrainedModel) -> Iterator[tuple[str, Merge]]:
    """Yield each of the model's tensors that stored ones make up."""
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    owners = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    expected = model.state_dict()
    found: dict[str, tuple[Any, list[_Part]]] = {}
    for name in source.infos:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if pattern is None or name in expected or target not in expected or not _is_followed(owners[pattern]):
            continue
        number = _number(apply_renamings(name, renamings), pattern)
        if number is not None:
            part = _Part(name=name, number=number, kind=owners[pattern].source_patterns.index(pattern))
            found.setdefault(target, (owners[pattern], []))[1].append(part)
    for target, (converter, parts) in found.items():
        yield target, _merge(source, target, tuple(expected[target].shape), converter, parts)


def _is_followed(converter: Any) -> bool:
    """Say whether a tensor that this makes is its parts laid end to end."""
    operations: Sequence[Any] = converter.operations
    if len(converter.target_patterns) != 1:
        return False
    stacks = type(operations[0]) is MergeModulelist and operations[0].dim == 0
    joins = operations[1:] if stacks else operations
    return len(joins) <= 1 and all(type(join) is Concatenate and join.dim == int(stacks) for join in joins)


def _number(name: str, pattern: str) -> int | None:
    """Return the number that the pattern's star stands for, 0 where it has none, None where it is no number."""
    if "*" not in pattern:
        return 0
    match = re.search(re.escape(pattern).replace(r"\*\.", r"(\d+)\."), name)
    return None if match is None else int(match.group(1))


def _merge(
    source: SafetensorsSource, target: str, shape: tuple[int, ...], converter: Any, parts: Sequence[_Part]
) -> Merge:
    """Lay the parts end to end; one too many keeps its stored name, for which the model has no place.

    Raises:
        ModelError: parts are missing, or shapes or dtypes do not fit.
    """
    stacks = type(converter.operations[0]) is MergeModulelist
    wanted = {(n, k) for n in range(shape[0] if stacks else 1) for k in range(len(converter.source_patterns))}
    there = {(part.number, part.kind): part.name for part in parts}
    missing = sorted(wanted - there.keys())
    if missing:
        pieces = [converter.source_patterns[k].replace("*", str(n)).strip(".") for n, k in missing]
        more = f" and {len(pieces) - _SHOWN} more" if len(pieces) > _SHOWN else ""
        raise ModelError(
            f"{source.reference} lacks {', '.join(pieces[:_SHOWN])}{more} for {target}; expected all {len(wanted)} "
            f"parts; check that all its files are there and belong to this config.json"
        )
    ordered = [there[key] for key in sorted(wanted)]
    infos = [source.infos[name] for name in ordered]
    row = shape[1:] if stacks else shape  # what the parts of one number make up
    kinds = [info.shape for info in infos[: len(converter.source_patterns)]]
    alike = all(info.shape == kinds[at % len(kinds)] for at, info in enumerate(infos))
    joined = all(len(kind) == len(row) and kind[1:] == row[1:] for kind in kinds)
    if not (alike and joined and sum(kind[0] for kind in kinds) == row[0]):
        shown = ", ".join(f"{name} {list(source.infos[name].shape)}" for name in ordered[:_SHOWN])
        raise ModelError(f"{source.reference}: {shown}, ... do not make up {target} {list(shape)}; fetch it again")
    if len(dtypes := sorted({str(info.dtype).removeprefix("torch.") for info in infos})) > 1:
        raise ModelError(
            f"{source.reference} has the parts of {target} as {', '.join(dtypes)}; expected one dtype; fetch it again"
        )
    info = TensorInfo(shape=shape, dtype=infos[0].dtype, stored_bytes=sum(each.stored_bytes for each in infos))
    return Merge(info=info, parts=tuple(ordered))
