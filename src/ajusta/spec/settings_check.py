"""What a wrong setting is told: what came, what was expected, and the nearest right name, in whatever group it is."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ajusta.spec.settings_file import Leaf, Mistake, write_value

# What other tools call the same thing. Only names that difflib would not find by itself.
ELSEWHERE = {
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "scheduler": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup",
    "warmup_steps": "optimizer.warmup",
    "clip_grad_norm": "optimizer.max_grad_norm",
    "rank": "lora.r",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "use_rslora": "lora.rank_stabilized",
    "target_modules": "lora.targets",
    "load_in_4bit": "bits",
    "load_in_8bit": "bits",
    "quantization": "bits",
    "max_seq_length": "max_length",
    "seq_len": "max_length",
    "cutoff_len": "max_length",
    "context_length": "max_length",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "batch_size",
    "output_dir": "out",
    "base_model": "model",
    "model_name_or_path": "model",
    "dataset": "data",
    "train_file": "data",
    "val_size": "text.heldout_fraction",
    "eval_steps": "evaluate_every",
    "save_steps": "save_every",
    "sample_packing": "text.packing",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table of settings."""

    name: str  # dotted: "lora.r"
    default: object
    unit: str
    expects: str
    help: str
    required: bool


def group_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the group's class if the field is a group."""
    kind = info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting under its dotted name, groups opened, in the order of declaration."""
    for name, info in model.model_fields.items():
        group = group_of(info)
        if group is None:
            yield prefix + name, info
        else:
            yield from fields_of(group, f"{prefix}{name}.")


def table(model: type[BaseModel]) -> tuple[Setting, ...]:
    """Return the table of settings that the docs and `--help` show."""
    return tuple(
        Setting(
            name=name,
            default=info.default,
            unit=_extra(info, "unit"),
            expects=expects(info),
            help=info.description or "",
            required=info.is_required(),
        )
        for name, info in fields_of(model)
    )


def _extra(info: FieldInfo, key: str) -> str:
    """Return what the declaration says beside the type."""
    return str(info.json_schema_extra.get(key, "")) if isinstance(info.json_schema_extra, dict) else ""


def expects(info: FieldInfo) -> str:
    """Say in words what a right value looks like: `a whole number, 1 or more`, `one of cosine, linear, constant`."""
    said = _extra(info, "expects")
    if said:
        return said
    kinds = _kinds(info.annotation)
    words = " or ".join(_word(kind) for kind in kinds if kind is not type(None))
    limits = " and ".join(_limit(mark) for mark in info.metadata if _limit(mark))
    nothing = ", or null" if type(None) in kinds else ""
    return f"{words}{', ' if limits else ''}{limits}{nothing}"


def _kinds(annotation: object) -> tuple[object, ...]:
    """Return the alternatives of a union, or the one type."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(kind for part in typing.get_args(annotation) for kind in _kinds(part))
    return (annotation,)


def _word(kind: object) -> str:
    """Name one type in plain words."""
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        part = _word(_kinds(typing.get_args(kind)[0])[0])
        return f"one or more of: {part.removeprefix('a ')}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
    return names[kind] if isinstance(kind, type) and kind in names else str(kind)


def _limit(mark: object) -> str:
    """Name one limit in plain words."""
    if isinstance(mark, annotated_types.Ge):
        return f"{mark.ge} or more"
    if isinstance(mark, annotated_types.Gt):
        return f"above {mark.gt}"
    if isinstance(mark, annotated_types.Le):
        return f"{mark.le} or less"
    if isinstance(mark, annotated_types.Lt):
        return f"below {mark.lt}"
    return ""


def unknown(leaf: Leaf, model: type[BaseModel]) -> Mistake:
    """Say that there is no such setting, and which one was meant, in whatever group that is."""
    groups = {name: group for name, info in model.model_fields.items() if (group := group_of(info))}
    if leaf.name in groups:
        inside = ", ".join(groups[leaf.name].model_fields)
        text = f"{leaf.name!r} is a group of settings, not one; expected {leaf.name}.NAME with one of: {inside}"
        return Mistake(origin=leaf.origin, text=text, names=(leaf.name,))
    near = nearest_setting(leaf.name, [name for name, _ in fields_of(model)])
    group = groups.get(leaf.name.split(".")[0], model)
    hint = f"; did you mean {near!r}?" if near else "; there are: " + ", ".join(group.model_fields)
    return Mistake(origin=leaf.origin, text=f"there is no setting {leaf.name!r}{hint}", names=(leaf.name,))


def nearest_setting(wrong: str, known: list[str]) -> str:
    """Return the setting that was probably meant: the same name in a group, another tool's name, or a near spelling."""
    last = wrong.rsplit(".", 1)[-1].lower().replace("-", "_")
    by_last = {name.rsplit(".", 1)[-1]: name for name in known}
    if last in by_last:
        return by_last[last]
    if last in ELSEWHERE:
        return ELSEWHERE[last]
    candidates = {**{name: name for name in known}, **by_last, **ELSEWHERE}
    for spelling in (wrong.lower().replace("-", "_"), last):
        match = difflib.get_close_matches(spelling, candidates, n=1, cutoff=0.6)
        if match:
            return candidates[match[0]]
    return ""


def wrong_values(error: ValidationError, leaves: dict[str, Leaf], fields: dict[str, FieldInfo]) -> list[Mistake]:
    """Turn pydantic's list into ours: one mistake for each setting, however many branches of its type it failed."""
    mistakes: dict[str, Mistake] = {}
    for detail in error.errors(include_url=False):
        name = _setting_at(detail["loc"], fields)
        if name is None or name in mistakes:
            continue
        leaf = leaves.get(name, Leaf(name=name, value=detail["input"], origin=""))
        info = fields[name]
        text = f"{name} is {_came(leaf.value)}; expected {expects(info)}{_near_choice(leaf.value, info)}"
        mistakes[name] = Mistake(origin=leaf.origin, text=text, names=(name,))
    return list(mistakes.values())


def _setting_at(location: tuple[int | str, ...], fields: dict[str, FieldInfo]) -> str | None:
    """Return the setting at the head of pydantic's location; what follows is a branch or an index inside it."""
    for length in (1, 2):
        name = ".".join(str(part) for part in location[:length])
        if name in fields:
            return name
    return None


def _came(value: object) -> str:
    """Show what came, short."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        return "nested deeper than any setting goes"
    if value is None:
        return "empty"
    shown = repr(value) if isinstance(value, str) else write_value(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _near_choice(value: object, info: FieldInfo) -> str:
    """Propose the nearest of the words that a setting takes."""
    kinds = [kind for kind in _kinds(info.annotation) if typing.get_origin(kind) is Literal]
    choices = [str(choice) for kind in kinds for choice in typing.get_args(kind)]
    match = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
