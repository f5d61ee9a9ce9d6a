"""What a person can set: one frozen `Config`, and the only way to make it from a file and flags.

The one dial is `memory`; nearly everything else has a default or is found out. A mistake is never dropped in silence
and never comes alone: `load_config` lists all of them at once, each with its place and what to write instead.
"""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from ajusta.base.errors import ConfigError
from ajusta.base.units import parse_bytes, parse_seconds
from ajusta.spec.settings import (
    Duration,
    FilePath,
    Lora,
    MicroBatchSize,
    ModelName,
    Optimizer,
    Paths,
    Recompute,
    Settings,
    Size,
    Text,
    Whole,
    setting,
)
from ajusta.spec.settings_check import Setting, fields_of, group_of, table, unknown, wrong_values
from ajusta.spec.settings_file import Leaf, Mistake, flatten, read_settings_file, write_value

REQUIRED = ("model", "data")


class Config(Settings):
    """All settings of a run. Frozen; relative paths are taken from the folder where the command is typed."""

    model: ModelName = setting(
        "", "Model to start from", expects="a folder, a .gguf file or a name on the Hugging Face hub"
    )
    revision: str | None = setting(None, "Version of the model on the hub", expects="a branch, a tag or a commit")
    data: Paths = setting((), "What to learn from: files, or folders of them", expects="one path or a list of paths")
    out: FilePath | None = setting(None, "Folder of the run; left out, it is named after data and model under runs/")
    exam: Paths = setting((), "Question files that are asked before and after", expects="one path or a list of paths")
    memory: Size = setting("auto", "Memory that the run may use", unit="bytes", expects="auto, or a size such as 10GiB")
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "Where to compute")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = setting("auto", "Numbers to compute in; auto measures")
    bits: Literal["none", "int8", "nf4"] = setting("none", "How the frozen weights are stored: as is, 8 or 4 bits")
    gradient_checkpointing: Recompute = setting(
        "auto",
        "Blocks that are computed again instead of kept",
        unit="blocks",
        expects="auto, none, full, or a whole number of blocks",
    )
    max_length: Whole = setting(1024, "Longest piece of text that the model sees at once", unit="tokens", ge=8)
    batch_size: Whole = setting(8, "Examples in one step of the optimizer", unit="examples", ge=1)
    micro_batch: MicroBatchSize = setting(
        "auto",
        "Examples that pass through the model at once; the result is the same for every value",
        unit="examples",
        expects="auto, or a whole number, 1 or more",
    )
    epochs: Whole = setting(3, "Times that each example is seen; steps, when given, decides instead", ge=1)
    steps: Whole | None = setting(None, "Steps of the optimizer, instead of epochs", unit="steps", ge=1)
    seed: Whole = setting(0, "Where all chance starts from", ge=0, le=2**63 - 1)
    evaluate_every: Whole = setting(
        0, "Steps between two measures on held-out text; 0 for only before and after", unit="steps", ge=0
    )
    save_every: Whole = setting(50, "Steps between two saved states; 0 for only at the end", unit="steps", ge=0)
    stop_after: Duration = setting(
        None, "Save and leave after this time", unit="time", expects="a duration such as 3h or 1h30m, or null"
    )
    early_stopping: Whole = setting(
        0, "Measures in a row without improvement that end the run; 0 for never", unit="evaluations", ge=0
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model")
    offline: bool = setting(False, "Use only what is already on this machine")
    text: Text = Field(default=Text(), description="How the data becomes examples")
    lora: Lora = Field(default=Lora(), description="The adapter")
    optimizer: Optimizer = Field(default=Optimizer(), description="AdamW and its schedule")

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that the run may use, or None for what the device has free."""
        return None if self.memory == "auto" else parse_bytes(self.memory)

    @property
    def stop_after_seconds(self) -> float | None:
        """Seconds after which the run saves and leaves, or None."""
        return None if self.stop_after is None else _seconds(self.stop_after)

    @property
    def run_folder(self) -> Path:
        """The folder of the run: `out`, or a name made of data and model, the same whenever they are the same."""
        if self.out is not None:
            return self.out
        parts = [path.resolve().stem for path in self.data[:1]] + [Path(self.model).stem]
        return Path("runs") / "-".join(re.sub(r"[^\w.]+", "-", part).strip("-.") or "run" for part in parts)

    def to_yaml(self) -> str:
        """Write every setting with its unit and help; `load_config` reads the same Config back."""
        lines = ["# Every setting of this run, as it was used. To use it again: ajusta train --config THIS-FILE", ""]
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if group_of(info) is None:
                # steps decides over epochs, and a file that gives both is refused: so epochs is only remembered here.
                mute = "# " if name == "epochs" and self.steps is not None else ""
                lines.append(mute + _line(name, value, type(self)))
                continue
            lines += ["", f"{name}:  # {info.description}"]
            lines += [f"  {_line(inner, getattr(value, inner), type(value))}" for inner in type(value).model_fields]
        return "\n".join(lines) + "\n"

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Refuse settings that are each right and together wrong."""
        mistakes = list(conflicts(self))
        if mistakes:
            raise Disagreement(mistakes)
        return self


class Disagreement(ValueError):
    """Settings that are each right and together wrong."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(mistake.text for mistake in mistakes))
        self.mistakes = mistakes


def _seconds(text: str) -> float:
    """Read a duration whose unit may be missing."""
    return float(text) if text.replace(".", "", 1).isdigit() else parse_seconds(text)


def _line(name: str, value: object, model: type[Settings]) -> str:
    """Write one setting with its help."""
    info = model.model_fields[name]
    unit = str(info.json_schema_extra.get("unit", "")) if isinstance(info.json_schema_extra, dict) else ""
    return f"{name}: {write_value(value)}  # {info.description}{f' [{unit}]' if unit else ''}"


def conflicts(config: Config) -> Iterable[Mistake]:
    """Yield what does not go together; each names the settings that it is about."""
    if config.steps is not None and "epochs" in config.model_fields_set:
        yield _conflict("steps", "epochs", text="steps and epochs are both given; keep one of them")
    if isinstance(config.micro_batch, int) and config.micro_batch > config.batch_size:
        text = f"micro_batch ({config.micro_batch}) is larger than batch_size ({config.batch_size}); lower micro_batch"
        yield _conflict("micro_batch", "batch_size", text=text)
    if config.text.overlap >= config.max_length:
        text = f"text.overlap ({config.text.overlap}) leaves no room in max_length ({config.max_length}); lower overlap"
        yield _conflict("text.overlap", "max_length", text=text)
    if config.early_stopping and not config.evaluate_every:
        text = "early_stopping needs measures to look at; give evaluate_every too, for example evaluate_every: 50"
        yield _conflict("early_stopping", "evaluate_every", text=text)
    if config.evaluate_every and not config.text.heldout_fraction:
        text = "evaluate_every measures on held-out text, and text.heldout_fraction is 0; give one or the other"
        yield _conflict("evaluate_every", "text.heldout_fraction", text=text)


def _conflict(*names: str, text: str) -> Mistake:
    """Make a mistake about several settings."""
    return Mistake(origin="", text=text, names=names)


def load_config(
    file: Path | str | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    origins: Mapping[str, str] | None = None,
    required: Iterable[str] = REQUIRED,
) -> Config:
    """Make a Config of a YAML file and of values that win over it.

    Args:
        file: YAML file of settings; None for none.
        overrides: settings by dotted name (`lora.r`) or nested by group; text is read like text in the file.
        origins: for messages, where each override was typed: `{"lora.r": "--set"}`.
        required: settings that must be given in one of the two places.

    Raises:
        ConfigError: one or more settings are wrong; the message lists every one, with file and line.
    """
    leaves, mistakes = read_settings_file(Path(file)) if file is not None else ([], [])
    given = flatten(overrides or {}, origins or {})
    fields = dict(fields_of(Config))
    mistakes += [unknown(leaf, Config) for leaf in leaves + given if leaf.name not in fields]
    merged = _merge(leaves, given, fields)
    config, wrong = _validate(merged, fields)
    mistakes += wrong
    wrong_names = {name for mistake in mistakes for name in mistake.names}
    mistakes += _missing(config, [name for name in required if name not in wrong_names], merged)
    if mistakes:
        raise ConfigError(_all_at_once(mistakes))
    return config


def _merge(leaves: list[Leaf], given: list[Leaf], fields: Mapping[str, object]) -> dict[str, Leaf]:
    """Lay what was given over the file. A `--steps` also lifts the file's `epochs`, and the other way round."""
    merged = {leaf.name: leaf for leaf in leaves if leaf.name in fields}
    over = {leaf.name: leaf for leaf in given if leaf.name in fields}
    for mine, other in (("steps", "epochs"), ("epochs", "steps")):
        if mine in over and other not in over:
            merged.pop(other, None)
    return merged | over


def _validate(leaves: dict[str, Leaf], fields: dict[str, typing.Any]) -> tuple[Config, list[Mistake]]:
    """Return a Config of what is right, and the mistakes; the Config is only for further checks if there are any."""
    try:
        return Config.model_validate(_nested(leaves.values())), []
    except ValidationError as error:
        mistakes = wrong_values(error, leaves, fields)
        disagreements = _disagreements(error, leaves)
    wrong = {name for mistake in mistakes + disagreements for name in mistake.names}
    assert wrong, leaves  # each pass takes at least one setting away, or this would never end
    right = {name: leaf for name, leaf in leaves.items() if name not in wrong}
    config, others = _validate(right, fields)
    # With a wrong value left out, what disagrees with the default in its place is no mistake of the person's.
    kept = [mistake for mistake in others if not wrong & set(mistake.names)]
    return config, mistakes + disagreements + kept


def _disagreements(error: ValidationError, leaves: Mapping[str, Leaf]) -> list[Mistake]:
    """Return what does not go together, with the place of the first of the settings that was given."""
    found: list[Mistake] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, Disagreement):
            for mistake in cause.mistakes:
                places = [leaves[name].origin for name in mistake.names if name in leaves]
                found.append(Mistake(origin=next(iter(places), ""), text=mistake.text, names=mistake.names))
    return found


def _nested(leaves: Iterable[Leaf]) -> dict[str, object]:
    """Put dotted names back into their groups."""
    nested: dict[str, typing.Any] = {}
    for leaf in leaves:
        *group, name = leaf.name.split(".")
        target = nested.setdefault(group[0], {}) if group else nested
        target[name] = leaf.value
    return nested


def _missing(config: Config, required: Iterable[str], leaves: Mapping[str, Leaf]) -> list[Mistake]:
    """Name what must be given and was not."""
    hints = {"model": "--model NAME, or model: in the config file", "data": "--data PATH, or data: in the config file"}
    found: list[Mistake] = []
    for name in required:
        if not getattr(config, name):
            text = f"{name} is missing; give {hints.get(name, name + ': in the config file')}"
            found.append(Mistake(origin=leaves[name].origin if name in leaves else "", names=(name,), text=text))
    return found


def _all_at_once(mistakes: list[Mistake]) -> str:
    """Write all mistakes as one message, one a line."""
    lines = list(dict.fromkeys(str(mistake) for mistake in sorted(mistakes, key=_line_of)))
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} settings are wrong:\n" + "\n".join(f"  {line}" for line in lines)


def _line_of(mistake: Mistake) -> int:
    """Return the line in the file, for the order of the message; what was typed as a flag comes after the file."""
    match = re.search(r":(\d+)$", mistake.origin)
    return int(match[1]) if match else sys.maxsize


def describe() -> tuple[Setting, ...]:
    """Return the table of all settings, groups opened: name, default, unit, what is expected, help."""
    return table(Config)
