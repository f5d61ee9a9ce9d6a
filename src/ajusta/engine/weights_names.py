"""Stored names against a model's own: with or without the base prefix, old buffers aside, nothing lost in silence.

transformers 5 also renames and fuses tensors while loading. Plain renamings are followed here, through its own tables;
tensors that several stored ones make up are one already when they come here (engine/weights_merged.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from ajusta.base.errors import ModelError, nearest
from ajusta.engine.weights_base import TensorInfo

# Buffers that old checkpoints carry and that the model computes by itself: masks, rotary frequencies, position ids.
_COMPUTED = re.compile(
    r"(^|\.)(attn|attention|self_attn|self_attention)\.(bias|masked_bias)$|(^|\.)inv_freq$|(^|\.)position_ids$"
)
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Which stored tensor fills which parameter; every name of both sides is in exactly one of the four."""

    found: Mapping[str, str]  # the model's name -> the stored name
    missing: tuple[str, ...]  # the model's names that no stored tensor fills
    unexpected: tuple[str, ...]  # stored names that the model has no place for
    ignored: tuple[str, ...]  # stored buffers that the model computes by itself

    def require_complete(self, tied: Iterable[str] = (), reference: str = "the checkpoint") -> None:
        """Check that all is filled and nothing is left over; `tied` names may be missing (they share another's).

        Raises:
            ModelError: names are missing or unexpected; the nearest pairs are shown.
        """
        missing = sorted(set(self.missing) - set(tied))
        if missing:
            raise ModelError(
                f"{reference} lacks {_some(missing)}{nearest(missing[0], self.unexpected)}; expected every parameter "
                f"of the model; check that all its files are there and belong to this config.json"
            )
        if self.unexpected:
            raise ModelError(
                f"{reference} has unexpected tensor names: {_some(self.unexpected)}; expected only the model's own "
                f"parameters; check that its files belong to this config.json, and if it is an already quantized "
                f"checkpoint, choose its plain float version"
            )


def match_names(
    stored: Iterable[str] | Mapping[str, TensorInfo],
    expected: Iterable[str],
    base_prefix: str,
    rename: Callable[[str], str] | None = None,
) -> Matching:
    """Match stored tensor names with the model's `state_dict` names.

    A stored name is tried as it is, then with `base_prefix.` added, then with it removed ("transformer" for GPT-2,
    whose hub files lack it); `rename` (see `renamer`) is tried for what is then left over.

    Args:
        stored: names in the checkpoint, or its `infos`.
        expected: the model's `state_dict` keys, tied ones included.
        base_prefix: the model's `base_model_prefix`.
        rename: transformers' renamings of old checkpoints.
    """
    wanted = list(dict.fromkeys(expected))
    wanted_set = set(wanted)
    found: dict[str, str] = {}
    left: list[str] = []
    # Exact names first, whatever the file's order: a prefixed twin must not take the place of the real one.
    for name in sorted(stored, key=lambda name: name not in wanted_set):
        target = _place(name, wanted_set, base_prefix, rename)
        if target is None or target in found:
            left.append(name)
        else:
            found[target] = name
    ignored = tuple(sorted(name for name in left if _COMPUTED.search(name)))
    unexpected = tuple(sorted(set(left) - set(ignored)))
    missing = tuple(name for name in wanted if name not in found)
    return Matching(found=found, missing=missing, unexpected=unexpected, ignored=ignored)


def renamer(model: PreTrainedModel) -> Callable[[str], str]:
    """Return transformers' renaming of old checkpoint names for this model; tensors are never merged by it."""
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]

    def rename(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, [])
        return str(renamed)

    return rename


def _place(name: str, wanted: set[str], base_prefix: str, rename: Callable[[str], str] | None) -> str | None:
    names = [name] if rename is None else [name, rename(name)]
    for candidate in names:
        for form in (candidate, f"{base_prefix}.{candidate}", candidate.removeprefix(f"{base_prefix}.")):
            if form in wanted:
                return form
    return None


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
