"""Which device there is, what is free on it, and which dtype it computes in fastest: measured, not looked up."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from ajusta.base.errors import UserError
from ajusta.memory.dtypes import DTYPES
from ajusta.memory.measure import available_host_bytes, free_device_bytes
from ajusta.spec.config import Config
from ajusta.spec.device import Device, Machine
from ajusta.stages.known import Note, roofline_for
from ajusta.stages.speed import layer_rate, matmul_rate

RESERVE_SHARE = 0.1
_GAIN = 1.25  # a narrower dtype must be this much faster to be worth its rounding


def find_device(wish: str) -> tuple[torch.device, Device]:
    """Return the device asked for (auto | cpu | cuda | mps).

    Raises:
        UserError: there is no such device here.
    """
    if wish == "mps":
        raise UserError("device mps is not supported yet; expected cpu or cuda; use --set device=cpu")
    if wish == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device cuda was asked for, and torch finds no usable card; expected a card with its driver and a CUDA "
            f"build of torch (this one is {torch.__version__}); run ajusta doctor, or use --set device=cpu"
        )
    kind = "cuda" if wish == "cuda" or (wish == "auto" and torch.cuda.is_available()) else "cpu"
    device = torch.device(kind)
    if kind == "cuda":
        name, total = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, total = processor_name(), _total_host_bytes()
    found = Device(
        kind=kind,
        name=name,
        total_bytes=total,
        free_bytes=free_device_bytes(device),
        cpu_threads=torch.get_num_threads(),
        dtypes=("fp32", "bf16"),
    )
    return device, found


def look_at_machine(config: Config, note: Note, began_with: str | None = None) -> tuple[torch.device, Machine]:
    """Return the device to use, the dtype to compute in and the bytes that may be used, each with its reason.

    A run that is resumed `began_with` a dtype, and keeps it unless another is asked for. `note` is told what of the
    device is not known.

    Raises:
        UserError: the device or the dtype asked for cannot be had here.
    """
    device, found = find_device(config.device)
    if config.dtype == "auto" and began_with not in (None, "auto"):
        dtype, because = choose_dtype(str(began_with), device)[0], "the run began with it"
    else:
        dtype, because = choose_dtype(config.dtype, device)
    asked = config.memory_bytes
    if asked is None:
        budget = int(found.free_bytes * (1 - RESERVE_SHARE))
        why = f"what is free on the device, less {RESERVE_SHARE:.0%} for everything else that runs"
    else:
        budget, why = asked, "you asked for it"
    if device.type == "cpu":
        why += "; counted above what Python and torch take themselves"
    return device, Machine(
        device=found,
        dtype=dtype,
        dtype_because=because,
        budget_bytes=budget,
        budget_because=why,
        roofline=roofline_for(found, note),
    )


def choose_dtype(wish: str, device: torch.device) -> tuple[str, str]:
    """Return the dtype asked for, or the one that this device multiplies fastest in, and the reason.

    Raises:
        UserError: fp16 on a CPU.
    """
    if wish == "fp16" and device.type == "cpu":
        raise UserError("dtype fp16 overflows without loss scaling; expected fp32 or bf16; use --set dtype=bf16")
    if wish != "auto":
        return wish, "you asked for it"
    products = {name: matmul_rate(DTYPES[name], device) for name in ("fp32", "bf16")}
    if products["bf16"] < products["fp32"]:
        shown = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in products.items())
        return "fp32", f"measured on this device: {shown}"
    layers = {name: layer_rate(DTYPES[name], device) for name in ("fp32", "bf16")}
    name = "bf16" if layers["bf16"] > _GAIN * layers["fp32"] else "fp32"
    gain = layers["bf16"] / layers["fp32"]
    return name, f"measured on this device: a decoder layer in bf16 runs at {gain:.2f} of its speed in fp32"


def processor_name() -> str:
    """Return the processor's name as its maker writes it, and how many cores this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name} ({len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores)"


def environment(device: Device) -> dict[str, str]:
    """Return what a record says of where a run was made."""
    libraries = {name: version(name) for name in ("torch", "transformers", "safetensors")}
    return {"python": platform.python_version(), "system": platform.system(), "device": device.name, **libraries}


def _total_host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") or available_host_bytes()
