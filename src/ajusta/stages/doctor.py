"""Look at this machine: one line a thing, and for each problem its cure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from ajusta.base.units import GIB, show_bytes
from ajusta.blocks.bitsandbytes_kernels import kernel_choice
from ajusta.memory.dtypes import DTYPES
from ajusta.stages.device import choose_dtype, find_device
from ajusta.stages.speed import matmul_rate

_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    problem: str | None = None
    cure: str | None = None


def look_around() -> tuple[Finding, ...]:
    """Return what is here, measured where it can be."""
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
        _disk(),
        Finding(
            name="network",
            value="off (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "on, for hub names only",
        ),
    ]
    return (*findings, *(_library(name) for name in _LIBRARIES))


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
