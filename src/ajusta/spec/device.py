"""What a device is to the planner: a kind, a size, and what it can compute in. A pure noun, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ajusta.spec.roofline import Roofline


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place to compute: a card, or the processor with its memory.

    `free_bytes` is what could be had when it was asked: other programs' share and the system's own limit
    (a container's, for instance) are already taken off.
    """

    kind: str  # cpu | cuda | mps
    name: str  # as its maker writes it
    total_bytes: int
    free_bytes: int
    cpu_threads: int
    dtypes: tuple[str, ...]  # fp32 | bf16 | fp16, those that it computes in, the fastest first
    compute_capability: tuple[int, int] | None = None  # of a card, where it is known

    def can(self, dtype: str) -> bool:
        """Whether the device computes in this dtype."""
        return dtype in self.dtypes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run is planned for: the device, the dtype chosen for it, the bytes that tensors may take, its speeds."""

    device: Device
    dtype: str  # fp32 | bf16 | fp16
    dtype_because: str
    budget_bytes: int
    budget_because: str
    roofline: Roofline
