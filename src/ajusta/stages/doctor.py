"""Look at this machine: one line a thing, and for each problem its cure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ajusta.base.errors import UserError
from ajusta.base.units import GIB, show_bytes
from ajusta.blocks.bitsandbytes_kernels import kernel_choice
from ajusta.memory.dtypes import DTYPES
from ajusta.spec.device import Device
from ajusta.spec.roofline import Roofline
from ajusta.stages.device import choose_dtype, find_device
from ajusta.stages.known import Known, keep, recall
from ajusta.stages.outside import measure_outside
from ajusta.stages.speed import matmul_rate, measure_roofline

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    problem: str | None = None
    cure: str | None = None


def look_around(*, measure: bool = False) -> tuple[Finding, ...]:
    """Return what is here, measured where it can be; with `measure` the device is timed, and the figures are kept."""
    device, found = find_device("auto")
    rates = {name: matmul_rate(DTYPES[name], device) for name in ("fp32", "bf16")}
    dtype, because = choose_dtype("auto", device)
    findings = [
        Finding(name="python", value=platform.python_version()),
        Finding(name="device", value=f"{found.kind}: {found.name}", **_card_missing(found.kind)),
        Finding(name="memory", value=f"{show_bytes(found.free_bytes)} free of {show_bytes(found.total_bytes)}"),
        *(Finding(name=f"speed in {name}", value=f"{rate / 1e9:.0f} GFLOP/s") for name, rate in rates.items()),
        Finding(name="dtype", value=f"{dtype}, {because}"),
        Finding(name="NF4 kernel", value=kernel_choice(device.type)),
        *(_measured(device, found) if measure else _remembered(found)),
        _disk(),
        Finding(
            name="network",
            value="off (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "on, for hub names only",
        ),
    ]
    return (*findings, *(_library(name) for name in _LIBRARIES))


def _remembered(found: Device) -> tuple[Finding, ...]:
    """Say whether plans know how fast this device is."""
    notes: list[str] = []
    known = recall(found, notes.append)
    value = known.roofline.source if known else "not measured; ajusta doctor --measure does it in some seconds"
    complaint = {"problem": notes[0], "cure": "ajusta doctor --measure"} if notes else {}
    return (Finding(name="speed for plans", value=value, **complaint),)


def _measured(device: torch.device, found: Device) -> tuple[Finding, ...]:
    """Time the device, keep the figures, and show them."""
    outside = measure_outside(device)  # first: what is loaded here meanwhile would be counted
    roofline = measure_roofline(device)
    shown = [Finding(name=name, value=value) for name, value in _figures(roofline)]
    shown += [Finding(name=name, value=show_bytes(size)) for name, size in outside.items()]
    try:
        path = keep(found, Known(roofline=roofline, outside=outside))
    except UserError as error:
        complaint = "the figures are gone when this ends"
        return (*shown, Finding(name="speed for plans", value="not kept", problem=complaint, cure=str(error)))
    return (*shown, Finding(name="speed for plans", value=f"{roofline.source}; kept in {path}"))


def _figures(roofline: Roofline) -> Iterator[tuple[str, str]]:
    """Yield the figures of a roofline as a person reads them."""
    for what, rates in (
        ("products", roofline.matmul_flops),
        ("products of few columns", roofline.thin_flops),
        ("products of few rows", roofline.few_flops),
        ("attention", roofline.attention_flops),
        ("attention over short rows", roofline.short_flops),
    ):
        yield what, ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates.items())
    yield "bandwidth", f"{show_bytes(roofline.bandwidth_bytes_per_s)}/s"
    yield "bandwidth in 16 bits", f"{show_bytes(roofline.narrow_bytes_per_s)}/s"
    yield "new memory", f"{show_bytes(roofline.fresh_bytes_per_s)}/s from {show_bytes(roofline.fresh_from_bytes)} on"
    yield "each operation", f"{roofline.per_operation_s * 1e6:.1f} us"
    expanding = (
        f"{name} {kernel.numbers_per_s / 1e9:.1f} G/s and {kernel.call_s * 1e6:.0f} us a call"
        for name, kernel in roofline.kernels.items()
    )
    yield "expanding weights", ", ".join(expanding)


def _card_missing(kind: str) -> dict[str, str]:
    if kind == "cuda" or not Path("/dev/nvidia0").exists():
        return {}
    return {
        "problem": "there is an NVIDIA card here, and torch does not see it",
        "cure": f"install a CUDA build of torch (this is {torch.__version__}), and check the driver with nvidia-smi",
    }


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    if free > 2 * GIB:
        return Finding(name="disk", value=f"{show_bytes(free)} free here")
    cure = "make room, or run in a folder on another disk"
    return Finding(name="disk", value=f"{show_bytes(free)} free here", problem="little room for checkpoints", cure=cure)


def _library(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        optional = name == "bitsandbytes"
        return Finding(
            name=name,
            value="not installed (optional: plain torch does the same)" if optional else "not installed",
            problem=None if optional else f"{name} is needed",
            cure=None if optional else f"pip install {name}",
        )
    return Finding(name=name, value=importlib.metadata.version(name))
