"""How one setting is declared, and the three groups of settings: `text`, `lora`, `optimizer`.

A setting is a pydantic field with a unit and one line of help. Everything else (the command line's `--set`, the YAML
file with its comments, the table in the docs, the error messages) is derived from that one declaration, so nothing
about a setting is said twice. Values arrive as text, from a file or a flag, or as Python values: the type decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ajusta.base.errors import UserError
from ajusta.base.units import parse_bytes, parse_seconds


def setting(default: object, help_line: str, *, unit: str = "", expects: str = "", **limits: Any) -> Any:
    """Declare a setting: its default, one line of help, its unit, and its limits (ge, gt, le, lt).

    Args:
        default: the value when nothing is given; `...` makes the setting required.
        help_line: one line, in plain words.
        unit: what the number counts ("tokens", "steps"); empty where there is nothing to count.
        expects: what a right value looks like, where the type alone does not say it.
        limits: pydantic's `ge`, `gt`, `le`, `lt`.
    """
    return Field(default, description=help_line, json_schema_extra={"unit": unit, "expects": expects}, **limits)


def _not_bool(value: object) -> object:
    """Refuse True and False where a number is expected; Python would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    return value


def _path(value: object) -> object:
    """Expand `~`, which no shell has done for a path that stands in a file; refuse an empty path."""
    if isinstance(value, (str, Path)):
        if not str(value).strip():
            raise ValueError("an empty path")
        return os.path.expanduser(value)
    return value


def _one_or_many(value: object) -> object:
    """Read a single value as a list of one."""
    return (value,) if isinstance(value, (str, Path)) else value


def _names(value: object) -> object:
    """Read `a, b` as a list of two names; a module name never holds a comma."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _targets(value: object) -> object:
    """Leave the word `all-linear` as it is; read anything else as a list of names."""
    return value if value == "all-linear" else _names(value)


def _choice_or_count(words: Iterable[str]) -> Callable[[object], object]:
    """Make a reader of either one of the words or a whole number."""
    known = frozenset(words)

    def read(value: object) -> object:
        return value if isinstance(value, str) and value in known else _not_bool(value)

    return read


def _memory(value: object) -> object:
    """Keep a size as the text that was given, once it is known to be one."""
    text = str(_not_bool(value)).strip()
    if text == "auto":
        return text
    if _checked(parse_bytes, text) <= 0:
        raise ValueError("no memory at all")
    return text


def _duration(value: object) -> object:
    """Keep a duration as the text that was given, once it is known to be one."""
    if value is None:
        return None
    text = str(_not_bool(value)).strip()
    seconds = float(text) if text.replace(".", "", 1).isdigit() else _checked(parse_seconds, text)
    if seconds <= 0:
        raise ValueError("no time at all")
    return text


def _checked(read: Callable[[str], float], text: str) -> float:
    """Turn our own refusal into the one that pydantic collects."""
    try:
        return read(text)
    except UserError as error:
        raise ValueError(str(error)) from error


Whole = Annotated[int, BeforeValidator(_not_bool)]
Number = Annotated[float, BeforeValidator(_not_bool)]
FilePath = Annotated[Path, BeforeValidator(_path)]
Paths = Annotated[tuple[FilePath, ...], BeforeValidator(_one_or_many)]
ModelName = Annotated[str, BeforeValidator(_path)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Targets = Annotated[Literal["all-linear"] | tuple[str, ...], BeforeValidator(_targets)]
Size = Annotated[str, BeforeValidator(_memory)]
Duration = Annotated[str | None, BeforeValidator(_duration)]
Recompute = Annotated[
    Literal["auto", "none", "full"] | Annotated[int, Field(ge=0)],
    BeforeValidator(_choice_or_count(("auto", "none", "full"))),
]
MicroBatchSize = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1)],
    BeforeValidator(_choice_or_count(("auto",))),
]


class Settings(BaseModel):
    """The base of every group: frozen, no unknown key, no infinite number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=False,
        protected_namespaces=(),
    )


class Text(Settings):
    """How the data becomes examples."""

    heldout_fraction: Number = setting(
        0.05, "Share of the documents kept aside to measure the loss on", unit="of documents", ge=0, lt=1
    )
    packing: bool = setting(True, "Lay several short examples in one row, with no attention across them")
    overlap: Whole = setting(
        0, "Context repeated from one window of a long document to the next; trained once", unit="tokens", ge=0
    )
    system: str | None = setting(None, "System message put before each conversation that has none")
    strict: bool = setting(False, "Stop at the first row that cannot be used, instead of naming and dropping it")


class Lora(Settings):
    """The small matrices that are trained beside the frozen weights."""

    r: Whole = setting(16, "Rank of the adapter: larger learns more and costs more", ge=1)
    alpha: Number = setting(16, "Scale of the adapter; it is divided by sqrt(r), or by r", gt=0)
    rank_stabilized: bool = setting(True, "Divide alpha by sqrt(r), so that the learning rate suits every rank")
    dropout: Number = setting(0.0, "Share of the adapter's inputs set to zero while training", ge=0, lt=1)
    targets: Targets = setting(
        "all-linear", "Linear layers that get an adapter", expects="all-linear, or a list of layer names"
    )
    exclude: Names = setting((), "Linear layers that get none", expects="a list of layer names")
    adapter: FilePath | None = setting(None, "Folder of an adapter to go on from, in PEFT's format")


class Optimizer(Settings):
    """AdamW and its schedule."""

    learning_rate: Number = setting(2e-4, "Highest learning rate of the run", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "How the rate falls after the warm-up")
    warmup: Number = setting(0.05, "Share of the steps in which the rate rises from zero", unit="of steps", ge=0, lt=1)
    weight_decay: Number = setting(0.0, "Pull of the adapter's weights towards zero", ge=0)
    beta1: Number = setting(0.9, "Memory of the gradient's mean", ge=0, lt=1)
    beta2: Number = setting(0.999, "Memory of the gradient's square", ge=0, lt=1)
    epsilon: Number = setting(1e-8, "Added to the denominator of the update", gt=0)
    max_grad_norm: Number = setting(1.0, "Longest gradient; a longer one is scaled down; 0 for no limit", ge=0)
