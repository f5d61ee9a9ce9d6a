"""The heap of the command's own process."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import ctypes, os
from ajusta.memory.heap import limit_kernel_caches, return_freed_memory
limit_kernel_caches()
assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
done = return_freed_memory()
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024
if done:
    # Blocks of 20 MiB, freed in the wrong order for a heap that only shrinks at its end.
    start = resident()
    blocks = [bytearray(20 << 20) for _ in range(4)]
    for block in blocks: block[:] = b"x" * len(block)
    last = bytearray(4096)
    del blocks, block
    assert resident() - start < 8 << 20, resident() - start
print("done")
"""


def test_freed_blocks_go_back_to_the_system():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "ONEDNN_", "LRU_CACHE"))}
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and result.stdout.strip() == "done", result.stderr


def test_what_the_person_set_is_kept():
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    code = "from ajusta.memory.heap import return_freed_memory; print(return_freed_memory())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == "False", result.stderr
