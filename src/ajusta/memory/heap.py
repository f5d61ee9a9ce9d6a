"""Make the process give freed memory back, so that what the system counts follows what is held.

glibc keeps freed blocks and grows its own threshold for what it maps apart; a fixed threshold makes every tensor of
that size its own mapping, gone when it is freed. The threshold is a compromise: at 256 KiB resident memory follows the
tensors to a tenth, and steps are 1.3 to 1.6 times slower for the pages that are mapped anew; at 4 MiB they are as fast
as with glibc's own, which never shrinks (LAB.md). oneDNN (bf16 products on the CPU) keeps a compiled kernel of about
0.7 MB for each new shape, a thousand of them by default; a step needs some thirty.
"""

from __future__ import annotations

import ctypes
import os
import sys

THRESHOLD_BYTES = 4 << 20
KERNELS_KEPT, KERNEL_BYTES = 64, 700_000
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def limit_kernel_caches() -> None:
    """Bound oneDNN's caches; it reads these once, so this must run before torch is imported."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS_KEPT))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(KERNELS_KEPT))


def return_freed_memory() -> bool:
    """Fix glibc's thresholds for this process; return whether there is a glibc to tell."""
    if not sys.platform.startswith("linux") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    done = library.mallopt(_MMAP_THRESHOLD, THRESHOLD_BYTES) and library.mallopt(_TRIM_THRESHOLD, THRESHOLD_BYTES)
    return bool(done)
