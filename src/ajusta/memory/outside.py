"""What a card holds beside our tensors, by name, each with its size and where the size is from.

No trace of tensors shows these, so each is a row of a table. Each says when it is taken: free memory is read with
`torch.cuda.mem_get_info`, which makes the CUDA context itself, so what is taken before is already off that figure and
must not be taken off twice. A row holds until `ajusta doctor --measure` has found this machine's own figure. On the CPU
there are none: what a plan counts there is tensors, above what the process held at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ajusta.base.errors import UserError, nearest
from ajusta.base.units import GIB, KIB, MIB

MEASURED_HERE = "measured on this machine"
_WORKSPACES = (
    "pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize; 32 MiB since pull requests 91564 "
    "(compute capability 9), 175344 (10, 12) and 189312 (11)"
)
_THREAD = "one handle a thread: pytorch torch/csrc/autograd/engine.cpp, note Allocating GPUs to autograd threads"


class Taken(StrEnum):
    """When a term is taken, and by whom."""

    BEFORE = "before free memory is read"
    INSIDE = "by torch's allocator, as a part of what it reserves"
    LATER = "beside torch's allocator, while the run goes on"


@dataclass(frozen=True, kw_only=True)
class OutsideTerm:
    """One thing that takes memory on the device and is no tensor of ours."""

    name: str
    size_bytes: int
    taken: Taken
    source: str  # whose figure it is; begins with "unmeasured" where nobody has measured it
    measured: bool  # whether it was measured on this machine


def outside_terms(
    kind: str, compute_capability: tuple[int, int] | None, *, measured: Mapping[str, int] | None = None
) -> tuple[OutsideTerm, ...]:
    """Return all that a device of this kind (cpu | cuda) holds beside tensors.

    `compute_capability` is what `torch.cuda.get_device_capability` says; unknown (None), the larger figures are used.
    What was `measured` here, bytes by the term's name, takes the place of the table's figure.

    Raises:
        UserError: a measured name is none of the terms, or its figure is negative.
    """
    assert kind in ("cpu", "cuda"), kind
    terms = _table(compute_capability) if kind == "cuda" else ()
    names = [term.name for term in terms]
    for name, size in (measured or {}).items():
        if name not in names or size < 0:
            what = f"{size} bytes" if name in names else f"{name!r}{nearest(name, names)}"
            known = ", ".join(names) or f"nothing for the device {kind}"
            raise UserError(
                f"measured memory: {what}; expected bytes of {known}; run ajusta doctor --measure to measure anew"
            )
    found = measured or {}
    return tuple(
        replace(term, size_bytes=found[term.name], source=MEASURED_HERE, measured=True) if term.name in found else term
        for term in terms
    )


def cublas_workspace_bytes(compute_capability: tuple[int, int] | None) -> int:
    """Return the bytes that cuBLAS gets for a handle and stream: 32 MiB from Hopper on, 8.125 MiB before.

    8.125 MiB is `:4096:2:16:8`, so 2 x 4096 KiB and 8 x 16 KiB. The source names 9 to 12; a later card, and an unknown
    one, is taken for the larger. torch takes these bytes from its own allocator, and keeps them; later than 2.13 it
    gives them back after each product, so that they are an upper bound there (pull request 194311).
    """
    if compute_capability is None or compute_capability[0] >= 9:
        return 32 * MIB
    return 2 * 4096 * KIB + 8 * 16 * KIB


def pinned_bytes(size: int) -> int:
    """Return what `size` bytes of pinned host memory take: the next power of two.

    Source: pytorch, aten/src/ATen/core/CachingHostAllocator.h, `allocate`; pull request 171662 added
    `pinned_max_round_threshold_mb`, which is off by default. 2.25 GiB were seen to take 4 (wtdcode/vllm-backport#67).
    """
    assert size >= 0, size
    return 1 << (size - 1).bit_length() if size else 0


def _table(compute_capability: tuple[int, int] | None) -> tuple[OutsideTerm, ...]:
    workspace = cublas_workspace_bytes(compute_capability)
    rows = (
        (
            "CUDA context",
            426 * MIB,
            Taken.BEFORE,
            "nvidia-smi on an RTX 6000 Ada, torch 2.10 with CUDA 13.0: https://github.com/unslothai/unsloth-zoo/pull/1053",
        ),
        (
            "other programs",
            GIB,
            Taken.BEFORE,
            "about 1 GB of a Windows desktop with a browser, RTX 4080: "
            "https://github.com/DaoyuanLi2816/can-i-finetune-this docs/rtx4080_baselines.md",
        ),
        ("cuBLAS workspace of the forward pass", workspace, Taken.INSIDE, _WORKSPACES),
        ("cuBLAS workspace of the backward pass", workspace, Taken.INSIDE, f"{_WORKSPACES}; {_THREAD}"),
        (
            "kernels",
            200 * MIB,
            Taken.LATER,
            "unmeasured: an upper guess for kernels of torch, cuBLAS and Triton, each loaded when it first runs "
            "(CUDA_MODULE_LOADING=LAZY, https://github.com/pytorch/pytorch/pull/86509)",
        ),
    )
    return tuple(
        OutsideTerm(name=name, size_bytes=size, taken=taken, source=source, measured=False)
        for name, size, taken, source in rows
    )
