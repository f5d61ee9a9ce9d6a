"""What `ajusta doctor --measure` found of a device, kept in the user's cache folder for later plans.

    $XDG_CACHE_HOME/ajusta/devices.json, or ~/.cache/ajusta/devices.json

Figures are kept by the device's name and torch's version, on a processor also by the number of threads. A file that
cannot be read, or that another version wrote, is passed over with a note: figures can always be taken again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ajusta.base.errors import UserError
from ajusta.spec.cards import find_card
from ajusta.spec.device import Device
from ajusta.spec.roofline import Kernel, Roofline
from ajusta.spec.speeds import tabulated, typical_processor
from ajusta.stages.folder import write_json

_STAND_IN = "GeForce RTX 3060 12GB"  # for a card that nobody knows: a card's balance of speeds, if not its size
FORM = 1  # of the file; another number is another form
_RATES = ("matmul_flops", "thin_flops", "few_flops", "attention_flops", "short_flops")
_SPEEDS = ("bandwidth_bytes_per_s", "narrow_bytes_per_s", "per_operation_s", "fresh_bytes_per_s", "fresh_from_bytes")

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Known:
    """The figures of one device. `outside` are bytes by the name that a term has in memory/outside.py."""

    roofline: Roofline
    outside: Mapping[str, int] = field(default_factory=dict)


def roofline_for(device: Device, note: Note) -> Roofline:
    """Return the speeds of a device: as they were measured and kept, else tabulated.

    `note` is told, in one line, what is wrong with figures that cannot be used.
    """
    known = recall(device, note)
    if known is not None:
        return known.roofline
    if device.kind != "cuda":
        return typical_processor(device.cpu_threads)
    try:
        return tabulated(find_card(device.name))
    except UserError:
        note(f"{device.name} is in no table: plans take it for a {_STAND_IN}; ajusta doctor --measure takes its speed")
        return tabulated(find_card(_STAND_IN))


def recall(device: Device, note: Note) -> Known | None:
    """Return what is known of the device, None if nothing is; what is wrong with the file goes to `note`."""
    path = known_file()
    if path is None or not path.is_file():
        return None
    try:
        row = _devices(path).get(_key(device))
        return None if row is None else _known(row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        note(f"{path} cannot be used ({error}); ajusta doctor --measure writes it anew")
        return None


def keep(device: Device, known: Known) -> Path:
    """Put the figures beside those of other devices; return the file. A damaged file is replaced.

    Raises:
        UserError: there is no folder for it, or it cannot be written.
    """
    path = known_file()
    if path is None:
        raise UserError("there is no home folder here; expected one to keep figures in; set XDG_CACHE_HOME")
    try:
        devices = _devices(path) if path.is_file() else {}
    except (OSError, ValueError, KeyError, TypeError):
        devices = {}
    devices[_key(device)] = asdict(known)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"form": FORM, "devices": devices})
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its disk says no"
        raise UserError(
            f"{path} cannot be written ({reason}); expected a cache folder of your own; set XDG_CACHE_HOME to one"
        ) from error
    return path


def known_file() -> Path | None:
    """Return where figures are kept, None where the user has no folder; a relative XDG_CACHE_HOME does not count.

    Source: XDG Base Directory Specification 0.8, https://specifications.freedesktop.org/basedir-spec/latest/
    """
    asked = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(asked) if os.path.isabs(asked) else Path(os.path.expanduser("~")) / ".cache"
    return folder / "ajusta" / "devices.json" if folder.is_absolute() else None


def _key(device: Device) -> str:
    threads = f", {torch.get_num_threads()} threads" if device.kind == "cpu" else ""
    return f"{device.name}{threads}, torch {torch.__version__}"


def _devices(path: Path) -> dict[str, Any]:
    """Return the file's rows by device.

    Raises:
        ValueError: it is no JSON of ours.
        OSError: it cannot be read.
    """
    whole = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(whole, dict) or whole.get("form") != FORM or not isinstance(whole.get("devices"), dict):
        raise ValueError(f"it is not of form {FORM}")
    devices: dict[str, Any] = whole["devices"]
    return devices


def _known(row: Any) -> Known:
    """Return a row as what it says, every figure looked at.

    Raises:
        ValueError, KeyError, TypeError: a figure is missing, or is none.
    """
    told = row["roofline"]
    figures: dict[str, Any] = {name: _figures(told[name], name) for name in _RATES}
    figures |= {name: _figure(told[name], name) for name in _SPEEDS}
    figures["fresh_from_bytes"] = int(figures["fresh_from_bytes"])
    figures["kernels"] = {name: _kernel(kernel, name) for name, kernel in told["kernels"].items()}
    outside = {name: int(size) for name, size in _figures(row["outside"], "outside").items()}
    return Known(roofline=Roofline(**figures, source=str(told["source"]), measured=True), outside=outside)


def _kernel(values: Any, name: str) -> Kernel:
    told = _figures(values, f"kernels, {name},")
    if set(told) != {"call_s", "numbers_per_s"}:
        raise ValueError(f"kernels, {name}, is {values!r}")
    return Kernel(call_s=told["call_s"], numbers_per_s=told["numbers_per_s"])


def _figures(values: Any, name: str) -> dict[str, float]:
    if not isinstance(values, dict) or (name == "matmul_flops" and not values):
        raise ValueError(f"{name} is {values!r}")
    return {str(key): _figure(value, f"{name} of {key}") for key, value in values.items()}


def _figure(value: Any, name: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}")
    return float(value)
