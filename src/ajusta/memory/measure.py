"""What the process and the device hold now, read from the operating system or from torch."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class MemoryWatch:
    """What a run holds on its device, beside what its plan counts: tensors, without Python's and torch's own share.

    On a card that is what torch has allocated. On the CPU it is resident memory above what the process held when the
    watch began, so it also shows what the heap has not given back.
    """

    device: torch.device
    baseline_bytes: int

    @classmethod
    def begin(cls, device: torch.device) -> MemoryWatch:
        """Start watching: before anything of the model is loaded."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return cls(device=device, baseline_bytes=0)
        _forget_peak()
        return cls(device=device, baseline_bytes=resident_bytes())

    def forget_peak(self) -> None:
        """Let the peak start again at what is held now."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _forget_peak()

    def now_and_peak(self) -> tuple[int, int]:
        """Bytes held now and at most since the watch began."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        now, peak = resident_bytes(), peak_resident_bytes()
        return max(now - self.baseline_bytes, 0), max(peak - self.baseline_bytes, 0)


def _forget_peak() -> None:
    """Let the system's peak of resident memory start again at what is resident now (Linux; elsewhere it stays)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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
