"""bitsandbytes' kernels behind the plain twin's interface, used where they are installed and measured to be faster.

Only expanding NF4 is taken from it. Its int8 expansion is the same plain torch operation as ours, and its int8 product
rounds the activations too, which is another computation. The numbers are bit-equal to `nf4_codes.expand_plain`
(tests/blocks/test_nf4.py), so the choice, measured once a process on each kind of device, changes time only.

Memory: the result and nothing else (the plain road also holds a tile of index), so a plan for that is a bound.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ajusta.blocks import nf4_codes
from ajusta.memory.ledger import declare_work
from ajusta.memory.roofline import Work, kernel_name

_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRIAL_SHAPE = (1536, 576)  # a projection of a small model: 3.4 MiB in fp32
_TRIALS = 5

AVAILABLE = importlib.util.find_spec("bitsandbytes") is not None  # installed; whether it loads is seen at first use


def expand_nf4(packed: Tensor, scales_b: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return the weight [num_rows, num_columns] as `dtype` (fp32, bf16 or fp16) of packed codes and fp32 scales.

    On `meta` the result alone is made, as on a device.
    """
    if packed.is_meta:
        count = num_rows * num_columns
        moved = packed.nbytes + scales_b.nbytes + count * dtype.itemsize
        declare_work(Work(bytes=moved, kernel=kernel_name("nf4", dtype), numbers=count))
        return torch.empty(num_rows, num_columns, dtype=dtype, device=packed.device)
    shape = (num_rows, num_columns)
    dense: Tensor = torch.ops.bitsandbytes.dequantize_4bit.default(
        packed.view(-1, 1), scales_b, nf4_codes.BLOCK, "nf4", shape, dtype
    )
    return dense


def serves(device_type: str, num_columns: int, dtype: torch.dtype) -> bool:
    """Say whether `expand_nf4` is to be used for weights on such a device. Never for odd rows or fp64 (no kernel)."""
    return not num_columns % 2 and dtype in _NATIVE_DTYPES and _measured(device_type)[0]


def kernel_choice(device_type: str = "cpu") -> str:
    """Return which road expands NF4 on this kind of device, and why, as one line for a person."""
    return _measured(device_type)[1]


@functools.cache
def _measured(device_type: str) -> tuple[bool, str]:
    """Time both roads once on an fp32 weight; return (take bitsandbytes, the reason)."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return False, "NF4 by plain torch: there is no such device here to measure bitsandbytes on"
    if not AVAILABLE or not _load():
        return False, "NF4 by plain torch: bitsandbytes is not installed, or its compiled library does not load"
    with _disable_current_modes():  # a ledger that is counting a step must not count this trial
        return _race(torch.device(device_type))


def _load() -> bool:
    """Import bitsandbytes, which registers its operations; say whether its compiled library is there.

    Only when it is wanted: it brings torch's compiler with it, seconds that a plan for a card need not take. Without
    its compiled library it answers by code that it compiles at run time: slower than ours, and not wanted.
    """
    # On import it logs an advice to install `kernels`, which would download code: not wanted, so not shown.
    advice = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = advice.level
    advice.setLevel(logging.ERROR)
    library = importlib.import_module("bitsandbytes.cextension")
    advice.setLevel(level)
    return not isinstance(library.lib, library.ErrorHandlerMockBNBNativeLibrary)


def _race(device: torch.device) -> tuple[bool, str]:
    rows, columns = _TRIAL_SHAPE
    packed = torch.arange(rows * columns // 2, device=device).to(torch.uint8)
    scales_b = torch.ones(rows * columns // nf4_codes.BLOCK, device=device)
    pairs = nf4_codes.pair_table(device)
    plain = _best_seconds(lambda: nf4_codes.expand_plain(packed, scales_b, pairs, torch.float32, device.type), device)
    theirs = _best_seconds(lambda: expand_nf4(packed, scales_b, rows, columns, torch.float32), device)
    winner = "bitsandbytes" if theirs < plain else "plain torch"
    figures = f"{theirs * 1e3:.2f} ms against plain torch's {plain * 1e3:.2f} ms"
    return theirs < plain, f"NF4 by {winner}: bitsandbytes expands a {rows} x {columns} weight in {figures}"


def _best_seconds(expand: Callable[[], Tensor], device: torch.device) -> float:
    """Return the least time of a few runs: what the road can do, undisturbed by other processes."""
    best = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        expand()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
