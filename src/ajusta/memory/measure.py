"""What the process and the device hold now, read from the operating system or from torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from ajusta.base.units import KIB


def resident_bytes() -> int:
    """Bytes of this process in main memory now (VmRSS); the peak where the system does not tell."""
    return _status_field("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most bytes this process has had in main memory (VmHWM)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_field("VmHWM") or (peak if sys.platform == "darwin" else peak * KIB)


def available_host_bytes() -> int:
    """Main memory that a new program could have without swapping (MemAvailable)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return 0


def device_now_and_peak(device: torch.device) -> tuple[int, int]:
    """Bytes held now and at most: allocated ones on a card, resident ones on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return resident_bytes(), peak_resident_bytes()


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can still be had on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes()


def _status_field(name: str) -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * KIB
    return 0
